"""Which events a pass emits. Each goes with a write of the same pass or with the flip of a condition (k8s.md 4.14).

So a pass that changes nothing emits nothing; the writer merges what repeats within a minute.
"""

from collections.abc import Iterable

from prefill_operator.api_status import Condition, PlanStatus, PoolStatus
from prefill_operator.conditions import Findings
from prefill_operator.escalation import EscalationStep
from prefill_operator.failures import PodState, Remedy
from prefill_operator.messages import UNEVEN_LOAD, describe_imbalance
from prefill_operator.model import EmitEvent, EventType
from prefill_operator.names import ConditionType, EventReason, Reason
from prefill_operator.rollout import Removal

_EVICTED = frozenset({"EvictionByEvictionAPI", "PreemptionByScheduler"})
"""Reasons of DisruptionTarget with which a pod goes and its node stays, as in `kubectl drain`."""


def plan_events(findings: Findings, conditions: Iterable[Condition]) -> tuple[EmitEvent, ...]:
    """Events of this pass.

    Args:
        conditions: the new ones; the pool's status still holds those before.
    """
    # The pass that raises the EP does nothing else.
    if findings.escalation.step is EscalationStep.RAISE:
        return (_warn(EventReason.EP_ESCALATED, findings.escalation.message),)
    return (
        *_flips(findings, conditions),
        *_reference(findings),
        *_imbalance(findings),
        *_plan_change(findings),
        *_losses(findings),
        *_replacements(findings),
        *_drains(findings),
    )


def _warn(reason: EventReason, message: str, *, node: str = "") -> EmitEvent:
    return EmitEvent(type=EventType.WARNING, reason=reason, message=message, node=node)


def _flips(findings: Findings, conditions: Iterable[Condition]) -> Iterable[EmitEvent]:
    before = {condition.type: condition.reason for condition in findings.observed.pool.status.conditions}
    after = next(condition for condition in conditions if condition.type == ConditionType.PROGRESSING)
    was = before.get(ConditionType.PROGRESSING)
    if after.reason == Reason.QUOTA_EXCEEDED and was != Reason.QUOTA_EXCEEDED:
        yield _warn(EventReason.QUOTA_EXCEEDED, after.message)
    if findings.is_rolled_out and findings.observed.pool.status.current_revision not in ("", findings.plan.revision):
        text = f"all {findings.intent.noun}s run revision {findings.plan.revision}"
        yield EmitEvent(type=EventType.NORMAL, reason=EventReason.ROLLOUT_COMPLETE, message=text)


def _plan_change(findings: Findings) -> Iterable[EmitEvent]:
    status = findings.observed.pool.status
    before: PlanStatus | None = status.plan if isinstance(status, PoolStatus) else None
    if before is not None and findings.plan.feasible and before.hash != findings.plan.hash:
        text = f"EP {before.ep} to {findings.plan.ep}; {findings.plan.message}"
        yield EmitEvent(type=EventType.NORMAL, reason=EventReason.PLAN_CHANGED, message=text)


def _reference(findings: Findings) -> Iterable[EmitEvent]:
    """When the condition Ready begins to say it."""
    note = findings.observed.reference
    if note is not None and note.is_missing and not _is_said(findings, note.text):
        yield _warn(EventReason.REFERENCE_MISSING, note.text)


def _imbalance(findings: Findings) -> Iterable[EmitEvent]:
    """The same. Its figures change while it lasts, its first words do not."""
    load = findings.observed.load
    if load is not None and load.uneven is not None and not _is_said(findings, UNEVEN_LOAD):
        yield _warn(EventReason.LOAD_IMBALANCE, describe_imbalance(load.uneven, findings.fleet))


def _is_said(findings: Findings, text: str) -> bool:
    """By the condition Ready as it is stored."""
    before = findings.observed.pool.status.conditions
    return any(text in condition.message for condition in before if condition.type == ConditionType.READY)


def _losses(findings: Findings) -> Iterable[EmitEvent]:
    by_node: dict[str, list[str]] = {}
    for removal in findings.step.deletes:
        if removal.view.state is PodState.LOST and removal.view.pod.disruption_target not in _EVICTED:
            by_node.setdefault(removal.view.pod.node, []).append(removal.view.pod.name)
    for node, names in sorted(by_node.items()):
        yield _warn(EventReason.NODE_LOST, f"node {node} took {', '.join(sorted(names))} with it", node=node)


def _replacements(findings: Findings) -> Iterable[EmitEvent]:
    forced = {Remedy.REPLACE_NOW, Remedy.REPLACE_FIRST, Remedy.DRAIN_NOW}
    for removal in (*findings.step.deletes, *findings.step.drains):
        view = removal.view
        if view.pod.disruption_target in _EVICTED:
            text = f"{view.pod.name} on {view.pod.node}: evicted ({view.pod.disruption_target})"
            yield _warn(EventReason.PE_REPLACED, text)
        elif view.verdict.remedy in forced or view.state is PodState.FAILED:
            node = view.pod.node if view.state is PodState.GPU_FAULT else ""
            text = f"{view.pod.name}{f' on {view.pod.node}' if view.pod.node else ''}: {view.state}"
            detail = f": {view.verdict.message}" if view.verdict.message else ""
            yield _warn(EventReason.PE_REPLACED, f"{text}{detail}", node=node)


def _drains(findings: Findings) -> Iterable[EmitEvent]:
    for view in findings.step.timed_out:
        seconds = findings.intent.lifecycle.drain_timeout_seconds
        yield _warn(EventReason.DRAIN_TIMEOUT, f"{view.pod.name} was not drained within {seconds} s; deleted")
    if findings.step.is_large_scale_down:
        text = f"{findings.step.surplus} of {len(findings.fleet.live)} {findings.intent.noun}s are to go"
        yield _warn(EventReason.LARGE_SCALE_DOWN, f"{text}, {_names(findings.step.drains)} first")


def _names(removals: tuple[Removal, ...]) -> str:
    return ", ".join(removal.view.pod.name for removal in removals)
