"""Why no pod may be created now, whatever is missing: refusals, back-off, a revision that cannot come up."""

from dataclasses import dataclass

from prefill_operator.escalation import Escalation, EscalationStep
from prefill_operator.failures import PodState, Remedy
from prefill_operator.fleet import Fleet
from prefill_operator.ledger import Ledger, last_failure, paused_until
from prefill_operator.messages import format_time
from prefill_operator.model import ChildKind, CreateRefusal, Observed, OperatorTimes, RefusalReason, WriteRefusal
from prefill_operator.names import config_map_name
from prefill_operator.plan import PoolPlan
from prefill_operator.refusals import find_write_refusals

_HOPELESS = frozenset({PodState.CONFIG_REJECTED, PodState.CRASH_LOOP, PodState.OUT_OF_MEMORY})


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateBlock:
    reason: str
    until: float | None = None
    """None = until something changes."""
    is_final: bool = False
    """No pod of the revision can come up: only a human ends it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusals:
    """What the API server refused, as far as still in force."""

    pod: CreateRefusal | None
    config: WriteRefusal | None
    """Of the config map of the update revision, without which no pod of it can start; one of `writes`."""
    writes: tuple[WriteRefusal, ...]

    @property
    def is_of_revision(self) -> bool:
        """Pod or config map themselves are refused; a quota of pods only refuses one more."""
        is_pod_refused = self.pod is not None and self.pod.reason is not RefusalReason.QUOTA_EXCEEDED
        return is_pod_refused or self.config is not None


def active_refusals(observed: Observed, plan: PoolPlan, times: OperatorTimes) -> Refusals:
    writes = find_write_refusals(observed, times)
    name = (str(ChildKind.CONFIG_MAP), config_map_name(observed.pool.kind, observed.pool.name, plan.revision))
    config = next((item for item in writes if (item.kind, item.name) == name), None)
    return Refusals(pod=_pod_refusal(observed, plan, times), config=config, writes=writes)


def _pod_refusal(observed: Observed, plan: PoolPlan, times: OperatorTimes) -> CreateRefusal | None:
    """The API server's refusal of a pod, until it is time to ask again; but for a quota's it is void with the revision."""
    refusal = observed.create_refusal
    if refusal is None or observed.now >= refusal.at + times.refusal_retry_seconds:
        return None
    if refusal.reason is not RefusalReason.QUOTA_EXCEEDED and refusal.revision != plan.revision:
        return None
    return refusal


def find_block(
    observed: Observed,
    plan: PoolPlan,
    fleet: Fleet,
    *,
    ledger: Ledger,
    escalation: Escalation,
    refusals: Refusals,
    times: OperatorTimes,
) -> CreateBlock | None:
    """The first reason against creating pods; None = create."""
    if not plan.feasible:
        return CreateBlock(reason="the plan is infeasible")
    if observed.config_refusal:
        return CreateBlock(reason=observed.config_refusal)
    if escalation.step is EscalationStep.RAISE:
        return CreateBlock(reason="the EP is being raised")
    refusal = refusals.pod or refusals.config
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
            text = f"no pod of this revision came up; {view.pod.name}: {view.verdict.message}"
            return CreateBlock(reason=text, is_final=True)
    return None


def _describe_pause(ledger: Ledger, until: float) -> str:
    """The pods that failed are gone by now, so this is where a user reads of them."""
    count, last = ledger.backoff.count, last_failure(ledger)
    failures = f"{count} failures in a row" if count > 1 else "1 failure"
    return f"no pod is made before {format_time(until)} after {failures}{f', the last {last}' if last else ''}"
