"""The eight conditions of a pool: all of them on every pass, each reason and message made from the condition's own value.

The trap: conditions are recomputed from pods every time and never latched (k8s.md 2.2); only lastTransitionTime comes from the
previous status, because it moves only when `status` flips (k8s.md 3.3).
"""

from collections.abc import Iterable
from dataclasses import dataclass

from prefill_operator.api_parts import Actuator
from prefill_operator.api_status import Condition, ConditionStatus
from prefill_operator.children import ChildStep, find_scaler
from prefill_operator.create_block import CreateBlock
from prefill_operator.errors import PoolInvalid
from prefill_operator.escalation import Escalation, EscalationStep
from prefill_operator.failures import PodState, Remedy
from prefill_operator.fleet import Fleet, PodView
from prefill_operator.gpu_faults import GpuStall
from prefill_operator.intent import Intent
from prefill_operator.messages import describe_fleet, describe_imbalance, describe_pause, describe_pod, format_time
from prefill_operator.model import ChildKind, CreateRefusal, Observed, WriteRefusal
from prefill_operator.names import ConditionType, Reason
from prefill_operator.plan import PoolPlan
from prefill_operator.rollout import RolloutStep
from prefill_operator.targets import Targets

_MAX_MESSAGE = 32_768
"""Bound of the CRD."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """Everything a pass has found out; what status and conditions are made from."""

    observed: Observed
    intent: Intent
    plan: PoolPlan
    fleet: Fleet
    targets: Targets
    step: RolloutStep
    children: ChildStep
    escalation: Escalation
    gpu_stall: GpuStall
    refusal: CreateRefusal | None
    """Still in force."""
    write_refusals: tuple[WriteRefusal, ...]
    """Those too."""
    block: CreateBlock | None
    """Why nothing is created now."""

    @property
    def pause(self) -> str:
        """Until when nothing is created because of failures, and which; "" = it may be."""
        block = self.block
        return block.reason if block is not None and block.until is not None and self.refusal is None else ""

    @property
    def dead_end(self) -> str:
        """Why no pod of the update revision can come up, until a human acts; "" = one may."""
        return self.block.reason if self.block is not None and self.block.is_final else ""

    @property
    def is_rolled_out(self) -> bool:
        """The update revision serves, and no old pod is left but those that a partition keeps."""
        is_updated = self.plan.feasible and not self.step.num_outdated
        return is_updated and self.fleet.num_serving >= self.targets.replicas

    @property
    def deadline(self) -> float | None:
        """When it has to be said that nothing progresses; None while all pods are Ready. Progress is any change of a pod."""
        unready = self.fleet.select(lambda view: view.is_active and view.is_updated and not view.pod.ready)
        if not unready or self.intent.paused:
            return None
        times = [
            time
            for view in self.fleet.live
            for pod in (view.pod,)
            for time in (pod.created_at, pod.scheduled_at, pod.ready_changed_at, pod.draining_since)
            if time is not None
        ]
        return max(times) + self.intent.rollout.progress_deadline_seconds

    @property
    def deadline_exceeded(self) -> str:
        """What has not progressed; "" = nothing."""
        if self.deadline is None or self.observed.now < self.deadline:
            return ""
        seconds = self.intent.rollout.progress_deadline_seconds
        return f"no {self.intent.noun} has changed for {seconds} s, and not all are ready"


_OPTIONAL = {
    ChildKind.SCALED_OBJECT: ("keda.sh ScaledObject", "rbac.keda"),
    ChildKind.POD_MONITOR: ("monitoring.coreos.com PodMonitor", "rbac.prometheusOperator"),
}
"""Name and chart value of the kinds that a pool asks for and may not get."""

_Found = tuple[ConditionType, bool | None, Reason, str]
"""Type, whether it holds (None = Unknown), reason, message."""


def build_conditions(findings: Findings, previous: Iterable[Condition]) -> tuple[Condition, ...]:
    """All eight, in the order of names.ConditionType."""
    found = (
        _judge_ready(findings),
        _judge_available(findings),
        _judge_redundant(findings),
        _judge_progressing(findings),
        _judge_plan(findings.plan),
        _judge_autoscaling(findings),
        _judge_stalled(findings),
        _judge_paused(findings),
    )
    pool = findings.observed.pool
    return seal_conditions(found, previous, generation=pool.generation, now=findings.observed.now)


def refuse_conditions(
    previous: Iterable[Condition], *, generation: int, fault: PoolInvalid, now: float
) -> tuple[Condition, ...]:
    """All eight for a spec that cannot be read: what pods do meanwhile stays as it was last known."""
    message = fault.message
    known = {condition.type: condition for condition in previous}
    false = {ConditionType.READY, ConditionType.PROGRESSING, ConditionType.PLAN_FEASIBLE}
    found: list[_Found] = []
    for kind in ConditionType:
        if kind in false:
            # A newer CustomResourceDefinition may allow models that this operator does not know.
            is_unknown = kind is ConditionType.PLAN_FEASIBLE and fault.path == "spec.model.architecture"
            found.append((kind, False, Reason.UNKNOWN_ARCHITECTURE if is_unknown else Reason.SPEC_INVALID, message))
        elif kind is ConditionType.STALLED:
            found.append((kind, True, Reason.CONFIG_REJECTED, message))
        elif kind not in known:
            reason = Reason.NOT_PAUSED if kind is ConditionType.PAUSED else Reason.SPEC_INVALID
            found.append((kind, False if kind is ConditionType.PAUSED else None, reason, message))
    sealed = {c.type: c for c in seal_conditions(found, known.values(), generation=generation, now=now)}
    return tuple(sealed.get(kind) or known[kind] for kind in ConditionType)


def seal_conditions(
    found: Iterable[_Found],
    previous: Iterable[Condition],
    *,
    generation: int,
    now: float,
) -> tuple[Condition, ...]:
    """With generation and transition time."""
    words = {True: ConditionStatus.TRUE, False: ConditionStatus.FALSE, None: ConditionStatus.UNKNOWN}
    known = {condition.type: condition for condition in previous}
    sealed = []
    for kind, holds, reason, message in found:
        status = words[holds]
        before = known.get(kind)
        since = before.last_transition_time if before and before.status == status else format_time(now)
        sealed.append(
            Condition(
                type=kind,
                status=status,
                reason=reason,
                message=message[:_MAX_MESSAGE],
                last_transition_time=since,
                observed_generation=generation,
            )
        )
    return tuple(sealed)


def _judge_ready(f: Findings) -> _Found:
    kind, holds, reason, text = _judge_rollout(f)
    return (kind, holds, reason, "; ".join((text, *_notes(f))))


def _notes(f: Findings) -> Iterable[str]:
    """What users should know beside the pods' state; it changes no condition."""
    if f.observed.reference is not None:
        yield f.observed.reference.text
    if f.intent.watches_metrics and ChildKind.POD_MONITOR not in f.observed.optional_kinds:
        yield f"monitoring.podMonitor: no PodMonitor is made: {_missing(f, ChildKind.POD_MONITOR)}"
    load = f.observed.load
    if load is not None and load.uneven is not None:
        yield describe_imbalance(load.uneven, f.fleet)


def _missing(f: Findings, kind: ChildKind) -> str:
    """Why there is no such object, and what to do."""
    name, value = _OPTIONAL[kind]
    if kind in f.observed.forbidden_kinds:
        return f"this installation may not manage {name}s: set the chart value {value} to true"
    return (
        f"the cluster does not serve {name}s: install its CustomResourceDefinition, which is looked for once a minute"
    )


def _judge_rollout(f: Findings) -> _Found:
    text = describe_fleet(f.intent, f.fleet)
    if not f.plan.feasible:
        return (ConditionType.READY, False, Reason.PLAN_INFEASIBLE, f"{text}; {f.plan.message}")
    if f.fleet.num_serving < f.targets.replicas:
        return (ConditionType.READY, False, Reason.NOT_ENOUGH_READY, text)
    if f.step.num_outdated:
        old = f"{f.step.num_outdated} old {f.intent.noun}s left"
        return (ConditionType.READY, False, Reason.ROLLOUT_IN_PROGRESS, f"{text}; {old}")
    reason = Reason.ALL_READY if f.targets.replicas else Reason.SCALED_TO_ZERO
    return (ConditionType.READY, True, reason, text)


def _judge_available(f: Findings) -> _Found:
    holds = f.fleet.num_serving >= f.targets.replicas
    reason = Reason.MINIMUM_AVAILABLE if holds else Reason.BELOW_MINIMUM
    if not f.targets.replicas:
        reason = Reason.SCALED_TO_ZERO
    text = describe_fleet(f.intent, f.fleet)
    return (ConditionType.AVAILABLE, holds, reason, text)


def _judge_redundant(f: Findings) -> _Found:
    ready = max(0, f.fleet.num_serving - f.targets.replicas)
    expected = f"; expected availability {f.targets.availability:.6f}" if f.targets.availability is not None else ""
    text = f"{ready}/{f.targets.spares} spares ready{expected}"
    reason, holds = Reason.SPARES_READY, True
    if ready < f.targets.spares:
        holds = False
        stuck = f.fleet.in_state(PodState.UNSCHEDULABLE)
        reason = Reason.SPARES_UNSCHEDULABLE if stuck else Reason.SPARES_LOADING
        text += f"; {describe_pod(stuck[0])}" if stuck else ""
    elif f.targets.cap is not None and f.targets.replicas:
        reason, holds = f.targets.cap, False
    elif not f.targets.spares:
        reason = Reason.DISABLED
    return (ConditionType.REDUNDANT, holds, reason, text)


def _judge_progressing(f: Findings) -> _Found:
    """False when something is to be done and nothing moves, or nothing can."""
    holds, reason, detail = _find_obstacle(f) or _find_work(f)
    text = describe_fleet(f.intent, f.fleet)
    message = f"{detail}; {text}" if detail else text
    return (ConditionType.PROGRESSING, holds, reason, message)


def _find_obstacle(f: Findings) -> tuple[bool, Reason, str] | None:
    if not f.plan.feasible:
        return False, Reason.PLAN_INFEASIBLE, "nothing is created without a feasible plan"
    if f.refusal is not None:
        return False, Reason(f.refusal.reason.value), f.refusal.message
    if f.write_refusals:
        first, *others = f.write_refusals
        more = f" (and {len(others)} more)" if others else ""
        return False, Reason(first.reason.value), f"{first.message}{more}"
    if f.observed.config_refusal and (f.step.missing or f.step.num_outdated or f.step.num_forced):
        return False, Reason.INVALID_OVERLAY, f"no {f.intent.noun} is made: {f.observed.config_refusal}"
    if f.dead_end:
        return False, Reason.STALLED, f"{f.dead_end}; no other is made before the pool is changed"
    if f.step.blocked is not None:
        return False, f.step.blocked, f.step.blocked_message
    if f.deadline_exceeded:
        return False, Reason.DEADLINE_EXCEEDED, f.deadline_exceeded
    return None


def _find_work(f: Findings) -> tuple[bool, Reason, str]:
    step, noun = f.step, f.intent.noun
    waiting = " (paused)" if f.intent.paused else f"; {f.pause}" if f.pause and step.missing else ""
    if step.num_outdated or step.num_forced:
        return True, Reason.REPLACING, f"{step.num_outdated + step.num_forced} {noun}s to replace{waiting}"
    if step.missing or step.surplus or f.fleet.in_state(PodState.DRAINING):
        return True, Reason.SCALING, f"{len(f.fleet.active)} of {f.targets.total} {noun}s exist{waiting}"
    unready = f.fleet.select(lambda view: view.is_active and not view.pod.ready)
    if unready:
        return True, Reason.LOADING, ""
    return True, Reason.COMPLETE, ""


def _judge_plan(plan: PoolPlan) -> _Found:
    message = "; ".join((plan.message, *plan.notes))
    return (ConditionType.PLAN_FEASIBLE, plan.feasible, plan.reason, message)


def _judge_autoscaling(f: Findings) -> _Found:
    kind = ConditionType.AUTOSCALING_ACTIVE
    autoscaling = f.intent.autoscaling
    if autoscaling is None:
        return (kind, False, Reason.DISABLED, "spec.autoscaling is not set")
    if autoscaling.actuator is Actuator.EXTERNAL:
        return (kind, True, Reason.EXTERNAL, "somebody else writes /scale")
    if autoscaling.actuator is Actuator.KEDA and ChildKind.SCALED_OBJECT not in f.observed.optional_kinds:
        return (kind, False, Reason.KEDA_MISSING, _missing(f, ChildKind.SCALED_OBJECT))
    if not f.intent.replicas and autoscaling.actuator is Actuator.HPA:
        text = "replicas is 0, which switches an HPA off"
        return (kind, False, Reason.DISABLED, text)
    scaler = find_scaler(f.intent, f.observed.children)
    for refusal in f.write_refusals:
        if scaler is None and refusal.kind in (ChildKind.HPA, ChildKind.SCALED_OBJECT):
            return (kind, False, Reason.METRICS_UNAVAILABLE, refusal.message)
    if scaler is None or scaler.active is None:
        text = f"the {autoscaling.actuator} object has not reported yet"
        return (kind, None, Reason.METRICS_UNAVAILABLE, text)
    reason = Reason.ACTIVE if scaler.active else Reason.METRICS_UNAVAILABLE
    message = scaler.message or f"{scaler.kind} {scaler.name}"
    return (kind, scaler.active, reason, message)


def _judge_stalled(f: Findings) -> _Found:
    for reason, message in _stalls(f):
        return (ConditionType.STALLED, True, reason, message)
    return (ConditionType.STALLED, False, Reason.NOT_STALLED, "nothing needs a human")


def _stalls(f: Findings) -> Iterable[tuple[Reason, str]]:
    """What a human must look at, the most telling first."""
    if f.observed.config_refusal:
        yield Reason.CONFIG_REJECTED, f.observed.config_refusal
    for view in f.fleet.in_state(PodState.CONFIG_REJECTED):
        yield Reason.CONFIG_REJECTED, describe_pod(view)
    if f.escalation.step is EscalationStep.EXHAUSTED:
        yield Reason.ESCALATION_EXHAUSTED, f.escalation.message
    if f.gpu_stall.message:
        yield Reason.GPU_FAULT, f.gpu_stall.message
    for view in f.fleet.in_state(PodState.CRASH_LOOP):
        if view.verdict.remedy is Remedy.NONE:
            yield Reason.CRASH_LOOP, f"replacing did not help; {describe_pod(view)}"
    for view in f.fleet.in_state(PodState.IMAGE_PULL):
        if _is_overdue(view):
            yield Reason.IMAGE_PULL_FAILED, describe_pod(view)
    for view in f.fleet.in_state(PodState.CONTAINER_ERROR):
        if _is_overdue(view):
            yield Reason.CONFIG_REJECTED, describe_pod(view)
    for child in f.children.foreign:
        yield Reason.FOREIGN_OBJECT, f"{child.kind} {child.name} has another owner; left alone"
    for view in f.fleet.in_state(PodState.FOREIGN):
        yield Reason.FOREIGN_OBJECT, f"Pod {describe_pod(view)}"
    if f.deadline_exceeded:
        yield Reason.DEADLINE_EXCEEDED, f.deadline_exceeded


def _is_overdue(view: PodView) -> bool:
    return view.verdict.wakeup is None


def _judge_paused(f: Findings) -> _Found:
    if f.intent.paused:
        text = describe_pause(f.intent, f.fleet)
        return (ConditionType.PAUSED, True, Reason.USER_REQUEST, text)
    return (ConditionType.PAUSED, False, Reason.NOT_PAUSED, "spec.paused is not set")
