"""Where one attempt's next chunk may end: block boundaries, short tails, replay, rows that are not ready (C47,
serving.md 2.4).

Integer arithmetic only; the scheduler brings the row cap and the milliseconds. The trap: a candidate whose next rows
are ready may still have no legal chunk (half a block, replay rows alone), and then it is not runnable.
"""

from dataclasses import dataclass

from prefill_plan.layer_spec import BLOCK_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """An admitted attempt with rows left, as one step sees it. Positions are prompt tokens, ranges half-open.

    attempt_id: 16 bytes. priority: 1 interactive, 2 standard, 3 sheddable. weight: share of the fairness key, >= 1.
    arrival_seconds: same clock as the scheduler's now. next_row: first row not computed. runnable_end: rows below it
    can run in this step (an image not ready or a block not landed ends them; == next_row: none can). prompt_tokens: L.
    hit_tokens, compute_start: rows [compute_start, hit_tokens) are replayed. decoder_floor: rows from here run the
    decoder (0 where the truncation mode computes all of them). step_cap_ms: longest step while this attempt waits; None
    = no limit.
    """

    attempt_id: bytes
    priority: int
    fairness_key: str
    weight: int
    arrival_seconds: float
    next_row: int
    runnable_end: int
    prompt_tokens: int
    hit_tokens: int
    compute_start: int
    decoder_floor: int
    step_cap_ms: float | None = None

    def __post_init__(self) -> None:
        ordered = 0 <= self.compute_start <= self.next_row <= self.runnable_end <= self.prompt_tokens
        if not ordered or self.weight < 1 or not 1 <= self.priority <= 3 or self.next_row == self.prompt_tokens:
            raise ValueError(
                f"candidate: compute_start {self.compute_start} <= next_row {self.next_row} <= runnable_end "
                f"{self.runnable_end} <= prompt_tokens {self.prompt_tokens}, next_row < prompt_tokens, "
                f"weight {self.weight} >= 1 and priority {self.priority} in 1..3 expected"
            )

    @property
    def rows_left(self) -> int:
        return self.prompt_tokens - self.next_row

    @property
    def least_end(self) -> int:
        """Smallest end of the next chunk: one block, and with replay rows all of them plus a block of new ones."""
        first = self.hit_tokens if self.next_row < self.hit_tokens else floor_block(self.next_row)
        return min(first + BLOCK_TOKENS, self.prompt_tokens)

    def usable_end(self, *, min_tokens: int) -> int:
        """End of the rows that legal chunks can reach now; next_row = not runnable.

        Args:
            min_tokens: shortest last chunk (SchedulerConfig.min_chunk_tokens).
        """
        if self.runnable_end == self.prompt_tokens:
            return self.prompt_tokens
        return self.legal_end(self.runnable_end, min_tokens=min_tokens)

    def legal_end(self, limit: int, *, min_tokens: int) -> int:
        """Largest legal end <= limit < L: a block boundary that leaves a last chunk of min_tokens; next_row = there is
        none."""
        end = floor_block(min(limit, self.prompt_tokens - min_tokens))
        return end if end >= self.least_end else self.next_row


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Work of chunks in the terms of the cost model; add and subtract freely."""

    encoder_rows: int = 0
    decoder_rows: int = 0
    row_context_products: int = 0

    def __add__(self, other: "Work") -> "Work":
        return Work(
            encoder_rows=self.encoder_rows + other.encoder_rows,
            decoder_rows=self.decoder_rows + other.decoder_rows,
            row_context_products=self.row_context_products + other.row_context_products,
        )

    def __sub__(self, other: "Work") -> "Work":
        return Work(
            encoder_rows=self.encoder_rows - other.encoder_rows,
            decoder_rows=self.decoder_rows - other.decoder_rows,
            row_context_products=self.row_context_products - other.row_context_products,
        )


def chunk_work(start: int, end: int, *, decoder_floor: int, prompt_tokens: int) -> Work:
    """Work of a chunk [start, end). An unfinished chunk runs one placeholder row in the decoder; no chunk, no work."""
    if end == start:
        return Work()
    return Work(
        encoder_rows=end - start,
        decoder_rows=max(0, end - max(start, decoder_floor)) + (end < prompt_tokens),
        row_context_products=(end - start) * end,
    )


def ample_rows(min_tokens: int) -> int:
    """So many rows of room always hold a legal chunk that is no shorter than min_tokens or takes all rows left.

    One min_tokens for the chunk, one for the last chunk after it, one for rounding to blocks and for a replay.
    """
    return 3 * max(min_tokens, 2 * BLOCK_TOKENS)


def floor_block(position: int) -> int:
    """The block boundary at or below a position."""
    return position // BLOCK_TOKENS * BLOCK_TOKENS
