"""Position arithmetic of one prefill: hit, replay, new blocks, snapshots, chunks (C1-C3, C47, serving.md 0.1).

Pure functions on token positions; ranges are half-open. The trap: computing starts before the hit when the snapshot is
missing, yet the Block KV of the whole hit stays in use, so rows below the hit must never get a store slot (R3).
"""

from collections.abc import Callable, Sequence

from prefill_plan.config import Struct
from prefill_plan.errors import ConfigError
from prefill_plan.layer_spec import BLOCK_TOKENS


class Span(Struct):
    """An image's tokens [start, end) in the prompt."""

    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length


class PrefillPositions(Struct):
    """All positions of one prefill of L = prompt_tokens.

    Rows [compute_start, hit_tokens) are replayed: they rebuild window KV and write no Block KV. Rows
    [hit_tokens, prompt_tokens) are new.
    """

    prompt_tokens: int
    hit_tokens: int
    """Effective hit H: Block KV of [0, H) is reused."""
    compute_start: int
    replay_tokens: int
    new_tokens: int
    decoder_floor: int
    """Decoder layers run from here."""
    window_floor: int
    """No encoder window key below this position is visible; 0 when nothing is replayed."""
    snapshots: tuple[int, ...]
    """Positions at which to take SWA snapshots, ascending."""
    first_new_block: int
    end_new_block: int
    """Complete new blocks [first_new_block, end_new_block); the store gets these."""

    @property
    def is_all_computed(self) -> bool:
        """Every row is computed: there is no hit, or its replay starts at 0 and so saves none."""
        return self.compute_start == 0


def validate_keep(keep_tokens: int, window_tokens: int, max_rollback_tokens: int) -> None:
    """Refuses settings under which the decoder's window has a hole after a rollback (R6).

    Raises:
        ConfigError: keep_tokens < window_tokens + max_rollback_tokens, or a negative rollback.
    """
    if max_rollback_tokens < 0:
        raise ConfigError(f"replay.max_rollback_tokens = {max_rollback_tokens}, expected an integer >= 0")
    least = window_tokens + max_rollback_tokens
    if keep_tokens < least:
        raise ConfigError(
            f"replay.keep_tokens = {keep_tokens}, expected >= {least} = window {window_tokens} + max rollback "
            f"{max_rollback_tokens}; a rolled-back decoder would miss window KV",
            keep_tokens=keep_tokens,
            least=least,
        )


def effective_hit(offered: int, prompt_tokens: int, *, keep_tokens: int, spans: Sequence[Span] = ()) -> int:
    """Largest usable hit: a multiple of 128, at most offered and L - keep, not inside an image span (C1).

    Args:
        offered: leading tokens whose Block KV is present; any integer.
        prompt_tokens: L.
        spans: image spans, in any order.

    Returns:
        H with H = 0 or L - H >= keep_tokens.
    """
    hit = _floor_block(max(0, min(offered, prompt_tokens - keep_tokens)))
    while hit:
        inside = next((span for span in spans if span.start < hit < span.end), None)
        if inside is None:
            break
        hit = _floor_block(inside.start)
    return hit


def replay_start(hit: int, *, window_tokens: int) -> int:
    """Where computing starts when the snapshot at the hit is missing (C1)."""
    return max(0, hit - window_tokens)


def decoder_floor(prompt_tokens: int, *, keep_tokens: int) -> int:
    """First position that runs the decoder layers (R5)."""
    return max(0, prompt_tokens - keep_tokens)


def snapshot_positions(prompt_tokens: int, *, keep_tokens: int) -> tuple[int, ...]:
    """Block boundaries at which a finished prefill leaves SWA snapshots (C2).

    The last boundary before the end, for a longer prompt; and the largest possible hit of the same prompt, for a retry.
    """
    positions = {_floor_block(prompt_tokens - 1), _floor_block(prompt_tokens - keep_tokens)}
    return tuple(sorted(position for position in positions if position > 0))


def num_full_blocks(prompt_tokens: int) -> int:
    return prompt_tokens // BLOCK_TOKENS


def new_blocks(hit: int, prompt_tokens: int) -> range:
    """Indices (from 0) of complete blocks that a prefill adds to a hit."""
    return range(hit // BLOCK_TOKENS, num_full_blocks(prompt_tokens))


def embedding_spans(spans: Sequence[Span], *, hit: int, window_tokens: int, snapshot_held: bool) -> tuple[Span, ...]:
    """Image spans with rows to compute, which therefore need their embeddings (C3)."""
    start = hit if snapshot_held else replay_start(hit, window_tokens=window_tokens)
    return tuple(span for span in spans if span.end > start)


def plan_positions(
    prompt_tokens: int,
    *,
    offered_hit: int,
    keep_tokens: int,
    window_tokens: int,
    snapshot_held: Callable[[int], bool],
    spans: Sequence[Span] = (),
    embeddings_available: bool = True,
) -> PrefillPositions:
    """Decides the hit and derives every position of the prefill.

    Args:
        prompt_tokens: L >= 1.
        offered_hit: leading tokens whose Block KV is present.
        snapshot_held: whether an SWA snapshot at a position is held.
        spans: image spans.
        embeddings_available: False when embeddings of images inside the offered hit can't be had; the hit is then
            lowered until no row of its replay window belongs to an image, or a snapshot makes the replay needless (C3).
            Images after the hit need theirs in any case: see embedding_spans.

    Raises:
        ValueError: prompt_tokens < 1.
    """
    if prompt_tokens < 1:
        raise ValueError(f"prompt_tokens = {prompt_tokens}, expected >= 1")
    hit = effective_hit(offered_hit, prompt_tokens, keep_tokens=keep_tokens, spans=spans)
    # Asked once per position: a snapshot may be dropped between two questions.
    while is_replayed := hit > 0 and not snapshot_held(hit):
        if embeddings_available or not _replay_meets_image(hit, spans, window_tokens=window_tokens):
            break
        hit = effective_hit(hit - BLOCK_TOKENS, prompt_tokens, keep_tokens=keep_tokens, spans=spans)
    compute_start = replay_start(hit, window_tokens=window_tokens) if is_replayed else hit
    blocks = new_blocks(hit, prompt_tokens)
    return PrefillPositions(
        prompt_tokens=prompt_tokens,
        hit_tokens=hit,
        compute_start=compute_start,
        replay_tokens=hit - compute_start,
        new_tokens=prompt_tokens - hit,
        decoder_floor=decoder_floor(prompt_tokens, keep_tokens=keep_tokens),
        window_floor=compute_start if is_replayed else 0,
        # A snapshot at the start of computing is the one that was restored.
        snapshots=tuple(
            position
            for position in snapshot_positions(prompt_tokens, keep_tokens=keep_tokens)
            if position > compute_start
        ),
        first_new_block=blocks.start,
        end_new_block=blocks.stop,
    )


def cut_chunks(positions: PrefillPositions, *, cap_tokens: int, min_tokens: int) -> tuple[tuple[int, int], ...]:
    """Chunks of a request that has the engine for itself: as large as the cap allows, ends on block boundaries.

    Args:
        cap_tokens: most rows of a chunk, replayed rows included (C47).
        min_tokens: a last chunk is no shorter, unless the whole is; the chunk before it is shortened instead.

    Returns:
        Half-open ranges that cover [compute_start, prompt_tokens) in order.

    Raises:
        ValueError: cap_tokens < 1.
    """
    if cap_tokens < 1:
        raise ValueError(f"cap_tokens = {cap_tokens}, expected >= 1")
    least = min(min_tokens, cap_tokens)
    start, total = positions.compute_start, positions.prompt_tokens
    chunks = []
    while total - start > cap_tokens:
        limit = min(start + cap_tokens, total - least)
        end = _floor_block(limit)
        if end <= start:
            end = limit
        chunks.append((start, end))
        start = end
    chunks.append((start, total))
    return tuple(chunks)


def _replay_meets_image(hit: int, spans: Sequence[Span], *, window_tokens: int) -> bool:
    start = replay_start(hit, window_tokens=window_tokens)
    return any(span.start < hit and span.end > start for span in spans)


def _floor_block(tokens: int) -> int:
    return tokens // BLOCK_TOKENS * BLOCK_TOKENS
