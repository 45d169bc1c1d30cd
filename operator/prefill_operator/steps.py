"""The whole sequence of a pool's creation or rollout, without a cluster: decide() against a cluster that never fails.

Called by `prefill-operator steps`. Nodes are unlimited and filled one after the other; loads and drains take fixed times, so
the sequence is what matters and not the seconds.
"""

from dataclasses import dataclass, replace

from prefill_operator.api import Pool
from prefill_operator.decide import decide
from prefill_operator.intent import read_intent
from prefill_operator.model import (
    Action,
    CreatePod,
    DeletePod,
    EmitEvent,
    EnsureObject,
    Observed,
    ObservedChild,
    ObservedPod,
    OperatorTimes,
    PodPhase,
    SetPoolAnnotation,
    StartDrain,
)
from prefill_operator.names import PodIdentity, pod_name
from prefill_operator.plan import PoolPlan

OLD_REVISION = "00000000"
"""Stands for whatever the pool runs before the rollout."""

_MAX_PASSES = 20_000
_START = 1_000_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    load_seconds: float = 300.0
    drain_seconds: float = 10.0
    stop_seconds: float = 5.0
    """From DELETE to gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One pass that did something."""

    at: float
    """Seconds since the start."""
    actions: tuple[str, ...]
    ready: int
    """PEs Ready and not draining, after it."""
    total: int
    """Pods that exist, after it."""


def creation_steps(pool: Pool, plan: PoolPlan, *, times: StepTimes) -> tuple[Step, ...]:
    """From nothing to all pods Ready."""
    return _run(pool, plan, times, pods={})


def rollout_steps(pool: Pool, plan: PoolPlan, *, old_ep: int | None, times: StepTimes) -> tuple[Step, ...]:
    """From as many Ready pods of an older revision as the pool shall have, to none.

    Args:
        old_ep: EP of the old pods; None = the same.
    """
    created = creation_steps(pool, plan, times=times)
    count = created[-1].total if created else 0
    intent = read_intent(pool)
    old = replace(plan, ep=old_ep or plan.ep, gpus=old_ep if old_ep and plan.gpus else plan.gpus)
    pods: dict[str, ObservedPod] = {}
    for incarnation in range(1, count + 1):
        name = pod_name(intent.kind, intent.name, PodIdentity(revision=OLD_REVISION, incarnation=incarnation))
        node = _find_node(pods, old.gpus, intent.gpus_per_node)
        pod = _new_pod(name, OLD_REVISION, incarnation, old, now=0.0, node=node)
        pods[name] = replace(pod, ready=True, ready_changed_at=0.0, phase=PodPhase.RUNNING)
    return _run(pool, plan, times, pods=pods)


def format_steps(steps: tuple[Step, ...]) -> str:
    """One line per step: time, Ready and existing pods, what was done."""
    lines = [f"{'time':>8}  {'ready':>5}  {'pods':>5}  action"]
    for step in steps:
        head = f"{step.at:>7.0f}s  {step.ready:>5}  {step.total:>5}  "
        lines.append(head + f"\n{'':>24}".join(step.actions))
    return "\n".join(lines)


def _run(pool: Pool, plan: PoolPlan, times: StepTimes, *, pods: dict[str, ObservedPod]) -> tuple[Step, ...]:
    now = _START
    steps: list[Step] = []
    children: dict[tuple[str, str], ObservedChild] = {}
    for _ in range(_MAX_PASSES):
        observed = Observed(pool=pool, now=now, pods=tuple(pods.values()), children=tuple(children.values()))
        decision = decide(observed, plan, OperatorTimes())
        pool = replace(pool, status=decision.status)
        done = []
        for action in decision.actions:
            pool = _apply(action, pool, plan, pods, children, now)
            text = _describe(action)
            if text:
                done.append(text)
        if done:
            ready = sum(pod.ready and _is_staying(pod) for pod in pods.values())
            steps.append(Step(at=now - _START, actions=tuple(done), ready=ready, total=len(pods)))
        due = [_next_change(pod, times) for pod in pods.values()]
        later = [time for time in (*due, decision.next_wakeup) if time is not None and time > now]
        if not decision.actions and (not later or min(later) > now + 10 * times.load_seconds + 7200):
            return tuple(steps)
        if not decision.actions:
            now = min(later)
        _advance(pods, now, times)
    return tuple(steps)


def _apply(
    action: Action,
    pool: Pool,
    plan: PoolPlan,
    pods: dict[str, ObservedPod],
    children: dict[tuple[str, str], ObservedChild],
    now: float,
) -> Pool:
    match action:
        case CreatePod():
            node = _find_node(pods, plan.gpus, read_intent(pool).gpus_per_node)
            pods[action.name] = _new_pod(action.name, action.revision, action.incarnation, plan, now=now, node=node)
        case StartDrain(name=name):
            pods[name] = replace(pods[name], draining_since=now)
        case DeletePod(name=name):
            pods[name] = replace(pods[name], terminating_since=now)
        case EnsureObject(kind=kind, name=name):
            children[kind, name] = ObservedChild(kind=kind, name=name)
        case SetPoolAnnotation(key=key, value=value):
            return replace(pool, annotations={**pool.annotations, key: value})
        case _:
            pass
    return pool


def _describe(action: Action) -> str:
    match action:
        case CreatePod(name=name):
            return f"create {name}"
        case StartDrain(name=name, reason=reason):
            return f"drain {name} ({reason})"
        case DeletePod(name=name, reason=reason):
            return f"delete {name} ({reason})"
        case EmitEvent(reason=reason, message=message):
            return f"event {reason}: {message}"
        case _:
            return ""


def _new_pod(name: str, revision: str, incarnation: int, plan: PoolPlan, *, now: float, node: str) -> ObservedPod:
    return ObservedPod(
        name=name,
        uid=name,
        revision=revision,
        incarnation=incarnation,
        ep=plan.ep,
        gpus=plan.gpus,
        created_at=now,
        scheduled_at=now,
        node=node,
        plan_hash=plan.hash,
    )


def _find_node(pods: dict[str, ObservedPod], gpus: int, gpus_per_node: int) -> str:
    """The first node with room; there is always one more."""
    used: dict[str, int] = {}
    for pod in pods.values():
        used[pod.node] = used.get(pod.node, 0) + max(1, pod.gpus)
    index = 1
    while used.get(f"node-{index}", 0) + max(1, gpus) > gpus_per_node:
        index += 1
    return f"node-{index}"


def _is_staying(pod: ObservedPod) -> bool:
    return pod.draining_since is None and pod.terminating_since is None


def _next_change(pod: ObservedPod, times: StepTimes) -> float | None:
    if pod.terminating_since is not None:
        return pod.terminating_since + times.stop_seconds
    if pod.draining_since is not None:
        return None if pod.drain_done else pod.draining_since + times.drain_seconds
    return None if pod.ready else pod.created_at + times.load_seconds


def _advance(pods: dict[str, ObservedPod], now: float, times: StepTimes) -> None:
    for name, pod in list(pods.items()):
        due = _next_change(pod, times)
        if due is None or due > now:
            continue
        if pod.terminating_since is not None:
            del pods[name]
        elif pod.draining_since is not None:
            pods[name] = replace(pod, drain_done=True)
        else:
            pods[name] = replace(pod, ready=True, ready_changed_at=now, phase=PodPhase.RUNNING)
