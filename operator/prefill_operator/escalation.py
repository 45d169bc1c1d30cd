"""When out-of-memory ends raise the EP: evidence, the rule of two nodes, and its end (k8s.md 4.4).

The trap: what looks like evidence often is not. Only exits 12 and 13 count, only with the hash of the plan in use, and not
when somebody else held memory of the GPU; a killed process (137, OOMKilled) is about host memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from prefill_operator.ledger import FOREIGN_MEMORY, EngineEnd, Ledger, pod_key
from prefill_operator.model import ObservedNode, ObservedPod
from prefill_operator.plan import EPFloor, PoolPlan, next_ep
from prefill_operator.pool_api import PrefillPoolSpec
from prefill_plan.errors import ExitCode

OOM_EXITS = frozenset({ExitCode.OUT_OF_MEMORY_LOAD, ExitCode.OUT_OF_MEMORY_RUN})


class EscalationStep(StrEnum):
    NONE = "None"
    """No evidence, or the user switched it off."""
    WAIT = "Wait"
    """Some evidence; pods that gave it are replaced elsewhere, so that another node can speak (C29)."""
    RAISE = "Raise"
    EXHAUSTED = "Exhausted"
    """Enough evidence, and no larger EP to go to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Escalation:
    step: EscalationStep
    evidence: tuple[EngineEnd, ...] = ()
    """Oldest first."""
    floor: EPFloor | None = None
    """For RAISE: what to write."""
    message: str = ""

    def has_evidence_of(self, pod: ObservedPod) -> bool:
        key = pod_key(pod)
        return any(end.pod == key for end in self.evidence)


NO_ESCALATION = Escalation(step=EscalationStep.NONE)


def judge_escalation(
    spec: PrefillPoolSpec,
    plan: PoolPlan,
    ledger: Ledger,
    *,
    pods: Sequence[ObservedPod],
    nodes: tuple[ObservedNode, ...] | None,
    now: float,
) -> Escalation:
    """What the evidence for the plan in use asks for."""
    rule = spec.expert_parallel.oom_escalation
    evidence = find_evidence(ledger, plan.hash, since=now - rule.window_seconds)
    if not rule.enabled or not plan.feasible or not evidence:
        return NO_ESCALATION
    needed = min(2, rule.failures)
    sources = {end.pod for end in evidence}
    places = {end.node for end in evidence}
    is_enough = len(evidence) >= rule.failures and (
        len(places) >= needed or (len(sources) >= needed and _has_one_node(spec, plan, pods, nodes))
    )
    if not is_enough and not _was_ever_ready(plan, ledger, pods):
        # Nothing serves under this plan yet, so nothing is at risk: two incarnations do, wherever they ran.
        loads = [end for end in evidence if end.exit_code == ExitCode.OUT_OF_MEMORY_LOAD]
        is_enough = len(loads) >= rule.failures and len({end.pod for end in loads}) >= needed
    text = _evidence_text(evidence, places)
    if not is_enough:
        return Escalation(step=EscalationStep.WAIT, evidence=evidence, message=text)
    larger = next_ep(spec, plan.ep)
    if larger is None:
        fixed = spec.expert_parallel.fixed_size is not None
        limit = f"expertParallel.size fixes EP {plan.ep}" if fixed else f"EP {plan.ep} is the largest allowed"
        return Escalation(step=EscalationStep.EXHAUSTED, evidence=evidence, message=f"{text}; {limit}")
    return Escalation(
        step=EscalationStep.RAISE,
        evidence=evidence,
        floor=EPFloor(ep=larger, inputs=plan.inputs_hash),
        message=f"EP {plan.ep} to {larger}: {text}",
    )


def find_evidence(ledger: Ledger, plan_hash: str, *, since: float) -> tuple[EngineEnd, ...]:
    """Out-of-memory ends under this plan."""
    return tuple(
        end
        for end in ledger.ends
        if end.exit_code in OOM_EXITS
        and end.plan_hash == plan_hash
        and end.at >= since
        and end.reason != FOREIGN_MEMORY
    )


def _evidence_text(evidence: tuple[EngineEnd, ...], places: set[str]) -> str:
    minutes = (evidence[-1].at - evidence[0].at) // 60
    span = f" in {minutes} min" if len(evidence) > 1 else ""
    return f"{len(evidence)} CUDA out-of-memory ends{span} on {', '.join(sorted(places))}"


def _has_one_node(
    spec: PrefillPoolSpec, plan: PoolPlan, pods: Sequence[ObservedPod], nodes: tuple[ObservedNode, ...] | None
) -> bool:
    """Whether no second node could speak. Without the permission to read nodes: whether the pool is on one node now."""
    if nodes is None:
        return len({pod.node for pod in pods if pod.node and not pod.foreign}) <= 1
    product = spec.gpu.product if plan.gpus else None
    fitting = [node for node in nodes if node.gpu_capacity >= plan.gpus and product in (None, "", node.gpu_product)]
    return len(fitting) <= 1


def _was_ever_ready(plan: PoolPlan, ledger: Ledger, pods: Sequence[ObservedPod]) -> bool:
    if any(load.plan_hash == plan.hash for load in ledger.loads):
        return True
    return any(pod.ready and pod.plan_hash == plan.hash and not pod.foreign for pod in pods)
