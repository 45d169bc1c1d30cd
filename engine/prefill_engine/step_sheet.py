"""The step being planned: chunks so far and the room left. Lives inside one plan_step call."""

import math
from dataclasses import dataclass, replace
from enum import StrEnum

from prefill_engine.chunk_cut import Candidate, Work, chunk_work, floor_block
from prefill_engine.cost_model import CostModel
from prefill_engine.step_budget import StepBudget
from prefill_plan.layer_spec import BLOCK_TOKENS


class ChunkRule(StrEnum):
    """Why an attempt is in the step."""

    ORDER = "order"
    """Its turn by class, fairness key and aged cost."""
    FLOOR = "floor"
    """Its class had less than its floor of milliseconds."""
    OVERDUE = "overdue"
    """It would be skipped too often."""
    FORCED = "forced"
    """No chunk fits the budget; the smallest one runs all the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkCut:
    """Rows [start, end) of an attempt in the step.

    least_end: smallest legal end, for whoever must shorten it. charged_ms: predicted milliseconds taken from the
    fairness key's deficit. why: the first rule that put the attempt into the step; later rules may have made its chunk
    longer.
    """

    attempt_id: bytes
    start: int
    end: int
    least_end: int
    hit_tokens: int
    decoder_floor: int
    prompt_tokens: int
    priority: int
    fairness_key: str
    charged_ms: float
    why: ChunkRule

    @property
    def rows(self) -> int:
        return self.end - self.start

    @property
    def replay_rows(self) -> int:
        return max(0, min(self.end, self.hit_tokens) - self.start)

    @property
    def work(self) -> Work:
        return chunk_work(self.start, self.end, decoder_floor=self.decoder_floor, prompt_tokens=self.prompt_tokens)


class StepSheet:
    """Owns the chunks of one step while they grow. An attempt has at most one chunk; extending it again makes it
    longer."""

    def __init__(self, budget: StepBudget, *, cost: CostModel, min_tokens: int) -> None:
        self.budget = budget
        self.cost = cost
        self.min_tokens = min_tokens
        self.work = Work()
        self._cuts: dict[bytes, ChunkCut] = {}

    @property
    def chunks(self) -> tuple[ChunkCut, ...]:
        """In the order in which the attempts got in."""
        return tuple(self._cuts.values())

    @property
    def is_full(self) -> bool:
        """Less room than the smallest chunk worth its overhead. An empty step is never full."""
        if not self._cuts:
            return False
        rows = self.work.encoder_rows + self.min_tokens
        return not self.budget.fits(rows, self._step_ms(self.work) + self.cost.rows_ms(self.min_tokens, 0, 0))

    def has_room_in(self, candidate: Candidate) -> bool:
        """Whether the candidate has runnable rows beyond its chunk so far."""
        return candidate.usable_end(min_tokens=self.min_tokens) > self._end_of(candidate)

    def extend(self, candidate: Candidate, *, limit_ms: float, limit_rows: int, why: ChunkRule) -> float:
        """Gives the candidate the longest legal chunk within the budget, limit_ms more milliseconds and limit_rows
        rows.

        A new chunk shorter than min_tokens is not begun unless it takes all runnable rows.

        Returns:
            Predicted milliseconds added; 0 = nothing changed.
        """
        usable = candidate.usable_end(min_tokens=self.min_tokens)
        old_end = self._end_of(candidate)
        end = self._longest_end(candidate, min(usable, candidate.next_row + limit_rows), limit_ms=limit_ms)
        if end != usable:
            end = candidate.legal_end(end, min_tokens=self.min_tokens)
            if old_end == candidate.next_row and end - candidate.next_row < self.min_tokens:
                return 0.0
        return self._put(candidate, end, why=why) if end > old_end else 0.0

    def force(self, candidate: Candidate) -> float:
        """Gives a runnable candidate its smallest chunk in an empty step whatever it takes: work never stands still.

        Uses what room there is, even if a short tail remains: with so little room no cut avoids that.

        Returns:
            Predicted milliseconds added.
        """
        usable = candidate.usable_end(min_tokens=self.min_tokens)
        limit = self._longest_end(candidate, usable, limit_ms=math.inf)
        end = limit if limit == usable else candidate.legal_end(limit, min_tokens=self.min_tokens)
        if end <= candidate.next_row:
            end = min(usable, max(candidate.least_end, floor_block(limit)))
        return self._put(candidate, end, why=ChunkRule.FORCED)

    def least_ms(self, candidate: Candidate) -> float:
        """Predicted milliseconds of the candidate's smallest chunk."""
        work = _work_of(candidate, candidate.least_end)
        return self.cost.rows_ms(work.encoder_rows, work.decoder_rows, work.row_context_products)

    def charge(self, candidate: Candidate, charged_ms: float) -> None:
        """Notes what the candidate's fairness key paid for its chunk."""
        cut = self._cuts[candidate.attempt_id]
        self._cuts[candidate.attempt_id] = replace(cut, charged_ms=cut.charged_ms + charged_ms)

    def _end_of(self, candidate: Candidate) -> int:
        cut = self._cuts.get(candidate.attempt_id)
        return cut.end if cut else candidate.next_row

    def _step_ms(self, work: Work) -> float:
        return self.cost.step_ms(work.encoder_rows, work.decoder_rows, work.row_context_products)

    def _longest_end(self, candidate: Candidate, high: int, *, limit_ms: float) -> int:
        """Largest end <= high that fits: high itself or a block boundary; next_row if none does."""
        old = _work_of(candidate, self._end_of(candidate))
        others = self.work - old

        def is_within(end: int) -> bool:
            work = _work_of(candidate, end)
            added = work - old
            added_ms = self.cost.rows_ms(added.encoder_rows, added.decoder_rows, added.row_context_products)
            total = others + work
            return added_ms <= limit_ms and self.budget.fits(total.encoder_rows, self._step_ms(total))

        if is_within(high):
            return high
        low_block, high_block = candidate.next_row // BLOCK_TOKENS, high // BLOCK_TOKENS
        while low_block < high_block:
            middle = (low_block + high_block + 1) // 2
            if is_within(middle * BLOCK_TOKENS):
                low_block = middle
            else:
                high_block = middle - 1
        return max(candidate.next_row, low_block * BLOCK_TOKENS)

    def _put(self, candidate: Candidate, end: int, *, why: ChunkRule) -> float:
        before = self._cuts.get(candidate.attempt_id)
        added = _work_of(candidate, end) - _work_of(candidate, self._end_of(candidate))
        self.work += added
        self._cuts[candidate.attempt_id] = ChunkCut(
            attempt_id=candidate.attempt_id,
            start=candidate.next_row,
            end=end,
            least_end=candidate.least_end,
            hit_tokens=candidate.hit_tokens,
            decoder_floor=candidate.decoder_floor,
            prompt_tokens=candidate.prompt_tokens,
            priority=candidate.priority,
            fairness_key=candidate.fairness_key,
            charged_ms=before.charged_ms if before else 0.0,
            why=before.why if before else why,
        )
        return self.cost.rows_ms(added.encoder_rows, added.decoder_rows, added.row_context_products)


def _work_of(candidate: Candidate, end: int) -> Work:
    return chunk_work(
        candidate.next_row, end, decoder_floor=candidate.decoder_floor, prompt_tokens=candidate.prompt_tokens
    )
