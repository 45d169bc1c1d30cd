"""When a rank turns an attempt away: its own step budget is impossible here (serving.md 1.1). Full queues are the front's
judgement (front/binding.py), since it counts them. No torch.
"""

from dataclasses import dataclass

from prefill_engine.cost_model import CostModel


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
