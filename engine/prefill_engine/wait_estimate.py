"""How long a request will wait: Accepted and Queued (serving.md 3.1). Pure; no
torch."""

from collections.abc import Sequence
from dataclasses import dataclass

from prefill_engine.chunk_cut import Work, chunk_work
from prefill_engine.cost_model import CostModel
from prefill_engine.fairness import aged_cost
from prefill_plan.config import SchedulerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingWork:
    """The uncomputed rows [start, prompt_tokens) of an attempt, whether it waits or runs. Other fields as in
    Candidate."""

    attempt_id: bytes
    priority: int
    arrival_seconds: float
    start: int
    prompt_tokens: int
    decoder_floor: int

    @property
    def rows(self) -> int:
        return self.prompt_tokens - self.start

    @property
    def work(self) -> Work:
        """All rows as one chunk, each with the mean context."""
        whole = chunk_work(
            self.start, self.prompt_tokens, decoder_floor=self.decoder_floor, prompt_tokens=self.prompt_tokens
        )
        return Work(
            encoder_rows=whole.encoder_rows,
            decoder_rows=whole.decoder_rows,
            row_context_products=self.rows * (self.start + self.prompt_tokens) // 2,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitEstimate:
    """wait_seconds: until the first chunk's step starts. finish_seconds: until the last one ends. ahead_*: attempts
    that go first, and their rows (messages.Waiting)."""

    wait_seconds: float
    finish_seconds: float
    ahead_requests: int
    ahead_rows: int


def estimate_wait(
    own: PendingWork,
    others: Sequence[PendingWork],
    *,
    cost: CostModel,
    config: SchedulerConfig,
    now: float,
    step_left_ms: float,
) -> WaitEstimate:
    """Predicts from the work that goes before, as if the queue stayed as it is.

    Goes before: a higher class, and in the same class a lower aged cost. Later arrivals, shares of other fairness keys,
    floors of lower classes and rows that are not ready are left out, so it is an estimate, not a promise.

    Args:
        others: all other attempts with rows left.
        step_left_ms: what the step now running still takes.
    """
    own_turn = _turn(own, cost=cost, config=config, now=now)
    ahead = [other for other in others if _turn(other, cost=cost, config=config, now=now) < own_turn]
    ahead_work = sum((other.work for other in ahead), Work())
    step_rows = min(config.chunk_cap_tokens, config.contended_chunk_tokens if others else config.chunk_cap_tokens)
    a_ms = cost.step_ms(0, 0, 0)
    ahead_ms, own_ms = _rows_ms(ahead_work, cost=cost), _rows_ms(own.work, cost=cost)
    full_steps, shared_rows = divmod(ahead_work.encoder_rows, step_rows)
    # The own first chunk joins the step in which the rows ahead end.
    joined_ms = ahead_ms * shared_rows / max(1, ahead_work.encoder_rows)
    all_steps = -(-(ahead_work.encoder_rows + own.rows) // step_rows)
    return WaitEstimate(
        wait_seconds=(step_left_ms + a_ms * full_steps + ahead_ms - joined_ms) / 1e3,
        finish_seconds=(step_left_ms + a_ms * all_steps + ahead_ms + own_ms) / 1e3,
        ahead_requests=len(ahead),
        ahead_rows=ahead_work.encoder_rows,
    )


def _turn(
    work: PendingWork, *, cost: CostModel, config: SchedulerConfig, now: float
) -> tuple[int, float, float, bytes]:
    aged = aged_cost(
        _rows_ms(work.work, cost=cost), arrival_seconds=work.arrival_seconds, now=now, age_seconds=config.age_seconds
    )
    return work.priority, aged, work.arrival_seconds, work.attempt_id


def _rows_ms(work: Work, *, cost: CostModel) -> float:
    return cost.rows_ms(work.encoder_rows, work.decoder_rows, work.row_context_products)
