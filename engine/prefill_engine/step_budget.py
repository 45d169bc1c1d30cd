"""How large the next step may be: rows and milliseconds, by who waits (serving.md 2.2, C47)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from prefill_engine.chunk_cut import Candidate
from prefill_engine.cost_model import CostModel
from prefill_plan.config import SchedulerConfig

SHORT_WORK_ROWS = 8_192  # serving.md 2.2: fewer rows left = short work


class BudgetRule(StrEnum):
    """What sized the step."""

    IDLE = "idle"
    """Nothing can run: placeholder or no step."""
    LONE = "lone"
    """Nothing else waits: the full row cap, whatever it takes."""
    FULL = "full"
    """Only long work waits: the milliseconds of a full cap of rows at a short context."""
    CONTENDED = "contended"
    """Short work waits: a smaller step, so that newcomers wait less."""
    STEP_CAP = "step_cap"
    """A request of the highest class asked for less than the rules above."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBudget:
    """row_cap: rows of the step, replayed ones included. soft_ms: limit of the step (inf = none) unless it has at most
    floor_rows; hard_ms: the step_cap, which beats the row floor (inf = none). Milliseconds include margin_ms, the
    model's residual p95, which fits() adds to every prediction."""

    rule: BudgetRule
    row_cap: int
    floor_rows: int
    soft_ms: float
    hard_ms: float
    margin_ms: float

    @property
    def limit_ms(self) -> float:
        return min(self.soft_ms, self.hard_ms)

    def fits(self, encoder_rows: int, predicted_ms: float) -> bool:
        """Whether a step of so many rows may take so long."""
        if encoder_rows > self.row_cap:
            return False
        limit_ms = self.hard_ms if encoder_rows <= self.floor_rows else self.limit_ms
        return predicted_ms + self.margin_ms <= limit_ms * (1 + 1e-9)  # the limit may be this very step's prediction


def step_budget(runnable: Sequence[Candidate], *, config: SchedulerConfig, cost: CostModel) -> StepBudget:
    """The budget of a step.

    Only the highest class with runnable work counts: a step is not made shorter for those whom strict order keeps
    waiting anyway.

    Args:
        runnable: candidates with a legal chunk now; not empty.
    """
    top = min(candidate.priority for candidate in runnable)
    first = [candidate for candidate in runnable if candidate.priority == top]
    hard_ms = min((candidate.step_cap_ms for candidate in first if candidate.step_cap_ms is not None), default=math.inf)
    rule, row_cap = BudgetRule.FULL, config.chunk_cap_tokens
    if len(runnable) == 1:
        rule = BudgetRule.LONE
    elif len(first) > 1 and any(candidate.rows_left < SHORT_WORK_ROWS for candidate in first):
        rule, row_cap = BudgetRule.CONTENDED, min(row_cap, config.contended_chunk_tokens)
    decoder_rows = min(row_cap, max(candidate.prompt_tokens - candidate.decoder_floor for candidate in runnable))
    margin_ms = cost.residual_p95_ms
    usual_ms = cost.step_ms(row_cap, decoder_rows, 0) + margin_ms
    return StepBudget(
        rule=BudgetRule.STEP_CAP if hard_ms < usual_ms else rule,
        row_cap=row_cap,
        floor_rows=min(config.floor_chunk_tokens, row_cap),
        soft_ms=math.inf if rule is BudgetRule.LONE else usual_ms,
        hard_ms=hard_ms,
        margin_ms=margin_ms,
    )
