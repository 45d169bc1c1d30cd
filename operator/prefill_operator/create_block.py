"""Why no pod may be created now, whatever is missing: refusals, back-off, a revision that cannot come up."""

from dataclasses import dataclass

from prefill_operator.escalation import Escalation, EscalationStep
from prefill_operator.failures import PodState, Remedy
from prefill_operator.fleet import Fleet
from prefill_operator.ledger import Ledger, last_failure, paused_until
from prefill_operator.messages import format_time
from prefill_operator.model import CreateRefusal, Observed, OperatorTimes, RefusalReason
from prefill_operator.plan import PoolPlan

_HOPELESS = frozenset({PodState.CONFIG_REJECTED, PodState.CRASH_LOOP, PodState.OUT_OF_MEMORY})


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateBlock:
    reason: str
    until: float | None = None
    """None = until something changes."""


def active_refusal(observed: Observed, plan: PoolPlan, times: OperatorTimes) -> CreateRefusal | None:
    """The API server's refusal, until it is time to ask again; that of an overlay is void with the revision."""
    refusal = observed.create_refusal
    if refusal is None or observed.now >= refusal.at + times.refusal_retry_seconds:
        return None
    if refusal.reason is RefusalReason.INVALID_OVERLAY and refusal.revision != plan.revision:
        return None
    return refusal


def is_revision_refused(observed: Observed, refusal: CreateRefusal | None) -> bool:
    """Whether the pod itself is refused, by us or by the API server; a quota only refuses one more."""
    return bool(observed.config_refusal) or (refusal is not None and refusal.reason is RefusalReason.INVALID_OVERLAY)


def find_block(
    observed: Observed,
    plan: PoolPlan,
    fleet: Fleet,
    *,
    ledger: Ledger,
    escalation: Escalation,
    refusal: CreateRefusal | None,
    times: OperatorTimes,
) -> CreateBlock | None:
    """The first reason against creating pods; None = create."""
    if not plan.feasible:
        return CreateBlock(reason="the plan is infeasible")
    if observed.config_refusal:
        return CreateBlock(reason=observed.config_refusal)
    if escalation.step is EscalationStep.RAISE:
        return CreateBlock(reason="the EP is being raised")
    if refusal is not None:
        return CreateBlock(reason=refusal.message, until=refusal.at + times.refusal_retry_seconds)
    until = paused_until(ledger, now=observed.now, last_ready_at=fleet.last_ready_at, times=times)
    if until is not None:
        return CreateBlock(reason=_describe_pause(ledger, until), until=until)
    updated = fleet.select(lambda view: view.is_active and view.is_updated)
    if any(view.pod.ready for view in updated):
        return None
    # More pods of a revision that no pod could start would only fail too (k8s.md 4.6: no retry storm).
    for view in updated:
        if view.state in _HOPELESS and view.verdict.remedy is Remedy.NONE:
            return CreateBlock(reason=f"no pod of this revision came up; {view.pod.name}: {view.verdict.message}")
    return None


def _describe_pause(ledger: Ledger, until: float) -> str:
    """The pods that failed are gone by now, so this is where a user reads of them."""
    count, last = ledger.backoff.count, last_failure(ledger)
    failures = f"{count} failures in a row" if count > 1 else "1 failure"
    return f"no pod is made before {format_time(until)} after {failures}{f', the last {last}' if last else ''}"
