"""What ranks tell each other before a step, and how the leading one gives in (serving.md 2.3, 2.4).

All ranks run a step together and it lasts as long as the largest one, so rows beyond the second-largest rank cost
everybody. The exchange itself is not here: this is its data and the pure decision after it.
"""

from collections.abc import Sequence
from dataclasses import replace

from prefill_engine.chunk_cut import Work, floor_block
from prefill_engine.cost_model import CostModel
from prefill_engine.scheduler import StepDecision
from prefill_plan.config import Struct

LEAST_EQUALISED_ROWS = 8_192  # serving.md 2.3: below this a shorter step wastes more than it saves


class StepWish(Struct):
    """One rank's word in the agreement of a step. stop_epoch: the drain it takes part in, 0 = none."""

    rows: int
    budget_ms: float
    has_work: bool
    stop_epoch: int


def step_wish(decision: StepDecision, *, stop_epoch: int) -> StepWish:
    """The wish that a decision amounts to."""
    return StepWish(
        rows=decision.encoder_rows,
        budget_ms=decision.budget_ms,
        has_work=bool(decision.chunks),
        stop_epoch=stop_epoch,
    )


def equalise(own: StepDecision, all_rows: Sequence[int], *, cost: CostModel) -> StepDecision:
    """The leading rank's step, shortened to the second-largest rank's rows, at least LEAST_EQUALISED_ROWS.

    Only unfinished chunks get shorter, the last first, none below its smallest legal end. Other ranks, ties and a
    single rank keep their step. Hand both decisions to scheduler.refund.

    Args:
        all_rows: rows of every rank's wish, this one's included.
    """
    if len(all_rows) < 2 or own.encoder_rows < max(all_rows):
        return own
    excess = own.encoder_rows - max(sorted(all_rows)[-2], LEAST_EQUALISED_ROWS)
    chunks = list(own.chunks)
    for i in reversed(range(len(chunks))):
        chunk = chunks[i]
        if excess <= 0:
            break
        if chunk.end == chunk.prompt_tokens:
            continue
        end = min(chunk.end, max(chunk.least_end, floor_block(chunk.end - excess)))
        excess -= chunk.end - end
        kept = (end - chunk.start) / chunk.rows
        chunks[i] = replace(chunk, end=end, charged_ms=chunk.charged_ms * kept)
    work = sum((chunk.work for chunk in chunks), Work())
    predicted_ms = cost.step_ms(work.encoder_rows, work.decoder_rows, work.row_context_products)
    return replace(own, chunks=tuple(chunks), work=work, predicted_ms=predicted_ms)
