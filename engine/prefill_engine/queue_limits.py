"""When a request is turned away before it waits: full queue, tenant's share, impossible step budget (serving.md 1.1,
C47).

Called by whoever counts the queue (the front for the submit lane, the rank for what it holds). No torch.
"""

from dataclasses import dataclass

from prefill_engine.cost_model import CostModel
from prefill_plan.config import ServerConfig

RETRY_STEP_ROWS = 16_384  # serving.md 3.1: an engine's speed is taken at this step size


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """reason, retry: names of pe.v1.ErrorReason and RetryScope, without prefix. retry_after_seconds: None = no use in
    waiting.

    message: for the operator: what happened, values, what was expected. It names no tenant and no prompt.
    """

    reason: str
    retry: str
    retry_after_seconds: float | None
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueAhead:
    """What a rank holds when a request arrives, the request itself not counted.

    waiting_requests: attempts that have not started computing. rows: uncomputed rows of all attempts. tenant_rows:
    those of the request's fairness key.
    """

    waiting_requests: int
    rows: int
    tenant_rows: int


def queue_refusal(ahead: QueueAhead, *, config: ServerConfig, cost: CostModel) -> Refusal | None:
    """Whether the queue is too long for one more request of any size: only what is ahead of it counts, so that a long
    prompt is welcome on an idle engine.

    Returns:
        None = welcome. TENANT_QUOTA is checked first: it holds on every engine, so no other one should be tried.
    """
    ms_per_row = cost.ms_per_row(RETRY_STEP_ROWS)
    if ahead.tenant_rows > config.max_tenant_rows:
        excess = ahead.tenant_rows - config.max_tenant_rows
        return Refusal(
            reason="TENANT_QUOTA",
            retry="SAME_LATER",
            retry_after_seconds=_seconds(excess, ms_per_row=ms_per_row),
            message=f"fairness key has {ahead.tenant_rows} rows waiting, limit {config.max_tenant_rows}; refused",
        )
    if ahead.rows > config.max_waiting_rows:
        excess = ahead.rows - config.max_waiting_rows
        return Refusal(
            reason="QUEUE_FULL",
            retry="OTHER_PE",
            retry_after_seconds=_seconds(excess, ms_per_row=ms_per_row),
            message=f"{ahead.rows} rows ahead on this rank, limit {config.max_waiting_rows}; refused",
        )
    if ahead.waiting_requests >= config.max_waiting_requests:
        rows_each = ahead.rows // max(1, ahead.waiting_requests)
        return Refusal(
            reason="QUEUE_FULL",
            retry="OTHER_PE",
            retry_after_seconds=_seconds(rows_each, ms_per_row=ms_per_row),
            message=f"{ahead.waiting_requests} requests wait on this rank, limit {config.max_waiting_requests}; "
            "refused",
        )
    return None


def budget_refusal(
    step_cap_ms: float | None, *, least_rows: int, decoder_rows: int, context: int, cost: CostModel
) -> Refusal | None:
    """Whether even the request's smallest chunk takes longer than its step_cap.

    Args:
        least_rows: rows of its smallest first chunk (Candidate.least_end - next_row).
        decoder_rows: decoder rows of that chunk.
        context: end of that chunk.
    """
    if step_cap_ms is None:
        return None
    if cost.rows_for_budget(step_cap_ms, decoder_rows=decoder_rows, context=context) >= least_rows:
        return None
    least_ms = cost.step_ms(least_rows, decoder_rows, least_rows * context) + cost.residual_p95_ms
    return Refusal(
        reason="BUDGET_IMPOSSIBLE",
        retry="OTHER_PE",
        retry_after_seconds=None,
        message=f"step_cap {step_cap_ms:.1f} ms, but a step of {least_rows} rows takes up to {least_ms:.1f} ms; "
        "refused",
    )


def _seconds(rows: int, *, ms_per_row: float) -> float:
    """Time for these rows to go, at least one step: less would only be asked again at once."""
    return max(rows, RETRY_STEP_ROWS) * ms_per_row / 1e3
