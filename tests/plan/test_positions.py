from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefill_plan.errors import ConfigError
from prefill_plan.kv_layout import state_layout
from prefill_plan.model_spec import released_model_spec
from prefill_plan.positions import (
    PrefillPositions,
    Span,
    cut_chunks,
    decoder_floor,
    effective_hit,
    embedding_spans,
    new_blocks,
    num_full_blocks,
    plan_positions,
    replay_start,
    snapshot_positions,
    validate_keep,
)

KEEP, WINDOW = 140, 128
STATE = state_layout(released_model_spec(), keep_tokens=KEEP, rollback_tokens=6)
LENGTHS = st.one_of(st.integers(1, 2_000), st.integers(1, 1_048_576))


@st.composite
def image_spans(draw: st.DrawFn) -> tuple[Span, ...]:
    spans, end = [], 0
    for gap, length in draw(st.lists(st.tuples(st.integers(0, 400), st.integers(1, 1_024)), max_size=6)):
        spans.append(Span(start=end + gap, length=length))
        end += gap + length
    return tuple(spans)


@st.composite
def prefills(draw: st.DrawFn) -> PrefillPositions:
    held = draw(st.booleans())
    return plan_positions(
        draw(LENGTHS),
        offered_hit=draw(st.integers(0, 1_048_576)),
        keep_tokens=KEEP,
        window_tokens=WINDOW,
        snapshot_held=lambda _: held,
        spans=draw(image_spans()),
        embeddings_available=draw(st.booleans()),
    )


WORKED_EXAMPLE = {
    "prompt_tokens": 100_000,
    "hit_tokens": 96_896,
    "new_tokens": 3_104,
    "decoder_floor": 99_860,
    "snapshots": (99_840, 99_968),
    "first_new_block": 757,
    "end_new_block": 781,
}


@pytest.mark.parametrize(
    ("snapshot_held", "compute_start", "replay_tokens", "window_floor", "rows"),
    [(True, 96_896, 0, 0, 3_104), (False, 96_768, 128, 96_768, 3_232)],
    ids=["snapshot held", "holder down"],
)
def test_worked_example(
    snapshot_held: bool, compute_start: int, replay_tokens: int, window_floor: int, rows: int
) -> None:
    positions = plan_positions(
        100_000,
        offered_hit=96_896,
        keep_tokens=KEEP,
        window_tokens=WINDOW,
        snapshot_held=lambda position: snapshot_held and position == 96_896,
    )

    assert positions == PrefillPositions(
        **WORKED_EXAMPLE,  # type: ignore[arg-type]
        compute_start=compute_start,
        replay_tokens=replay_tokens,
        window_floor=window_floor,
    )
    assert positions.replay_tokens + positions.new_tokens == rows
    assert positions.end_new_block - positions.first_new_block == 24
    assert cut_chunks(positions, cap_tokens=32_768, min_tokens=512) == ((compute_start, 100_000),)


def test_worked_example_largest_hit_of_a_retry_is_its_older_snapshot() -> None:
    hit = effective_hit(99_968, 100_000, keep_tokens=KEEP)

    assert hit == 99_840 == snapshot_positions(100_000, keep_tokens=KEEP)[0]


def test_worked_example_blocks() -> None:
    assert num_full_blocks(100_000) == 781
    # The text counts blocks from 1: 758..781.
    assert new_blocks(96_896, 100_000) == range(757, 781)


@given(offered=st.integers(-5, 1_048_576), extra=st.integers(0, 4_096), length=LENGTHS, spans=image_spans())
def test_effective_hit_is_monotone_in_the_offered_hit(
    offered: int, extra: int, length: int, spans: tuple[Span, ...]
) -> None:
    assert effective_hit(offered, length, keep_tokens=KEEP, spans=spans) <= effective_hit(
        offered + extra, length, keep_tokens=KEEP, spans=spans
    )


@given(offered=st.integers(-5, 1_048_576), length=LENGTHS, spans=image_spans(), keep=st.integers(0, 300))
def test_effective_hit_is_a_multiple_of_128_that_leaves_keep_tokens_and_cuts_no_image(
    offered: int, length: int, spans: tuple[Span, ...], keep: int
) -> None:
    hit = effective_hit(offered, length, keep_tokens=keep, spans=tuple(reversed(spans)))

    assert hit % 128 == 0
    assert hit == 0 or length - hit >= keep
    assert 0 <= hit <= max(0, offered)
    assert not any(span.start < hit < span.end for span in spans)


@given(offered=st.integers(0, 1_048_576), length=LENGTHS)
def test_effective_hit_without_images_is_the_largest_allowed(offered: int, length: int) -> None:
    hit = effective_hit(offered, length, keep_tokens=KEEP)

    assert hit + 128 > min(offered, length - KEEP)


def test_effective_hit_steps_over_adjacent_images() -> None:
    spans = (Span(start=100, length=200), Span(start=300, length=500))

    assert effective_hit(768, 5_000, keep_tokens=KEEP, spans=spans) == 0


def test_effective_hit_may_touch_an_image_on_either_side() -> None:
    assert (
        effective_hit(768, 5_000, keep_tokens=KEEP, spans=(Span(start=768, length=9), Span(start=700, length=68)))
        == 768
    )


@pytest.mark.parametrize("length", range(1, 700))
def test_every_length_has_a_cold_plan(length: int) -> None:
    positions = plan_positions(
        length, offered_hit=length, keep_tokens=KEEP, window_tokens=WINDOW, snapshot_held=lambda _: False
    )

    assert positions.hit_tokens == max(0, (length - KEEP) // 128 * 128)
    assert positions.new_tokens >= min(length, KEEP)
    assert positions.compute_start + positions.replay_tokens + positions.new_tokens == length
    assert positions.end_new_block == length // 128


@given(prefills())
def test_prefill_rows_add_up(positions: PrefillPositions) -> None:
    assert positions.compute_start + positions.replay_tokens == positions.hit_tokens
    assert positions.hit_tokens + positions.new_tokens == positions.prompt_tokens
    assert positions.replay_tokens in (0, min(WINDOW, positions.hit_tokens))
    assert positions.window_floor == (positions.compute_start if positions.replay_tokens else 0)
    assert positions.first_new_block * 128 == positions.hit_tokens


@given(prefills())
def test_both_snapshots_of_a_finished_prefill_are_in_the_gpu_ring(positions: PrefillPositions) -> None:
    assert STATE.ring_rows == 402

    for position in positions.snapshots:
        oldest_row = max(0, position - STATE.snapshot_rows)
        assert positions.compute_start < position < positions.prompt_tokens
        assert positions.prompt_tokens - oldest_row <= 401


@given(length=LENGTHS, keep=st.integers(134, 400))
def test_snapshot_positions_are_the_next_turn_and_the_retry(length: int, keep: int) -> None:
    positions = snapshot_positions(length, keep_tokens=keep)

    assert list(positions) == sorted(set(positions))
    assert all(0 < position < length and position % 128 == 0 for position in positions)
    retry = effective_hit(length, length, keep_tokens=keep)
    assert retry == 0 or retry in positions
    assert length <= 128 or positions[-1] == (length - 1) // 128 * 128


def test_snapshot_at_a_restored_hit_is_not_taken_again() -> None:
    held = plan_positions(
        100_000, offered_hit=99_968, keep_tokens=KEEP, window_tokens=WINDOW, snapshot_held=lambda _: True
    )
    replayed = plan_positions(
        100_000, offered_hit=99_968, keep_tokens=KEEP, window_tokens=WINDOW, snapshot_held=lambda _: False
    )

    assert (held.hit_tokens, held.snapshots) == (99_840, (99_968,))
    assert (replayed.compute_start, replayed.snapshots) == (99_712, (99_840, 99_968))


@pytest.mark.parametrize(("hit", "start"), [(0, 0), (128, 0), (256, 128), (96_896, 96_768)])
def test_replay_starts_one_window_before_the_hit(hit: int, start: int) -> None:
    assert replay_start(hit, window_tokens=WINDOW) == start


@pytest.mark.parametrize(("length", "floor"), [(1, 0), (140, 0), (141, 1), (100_000, 99_860)])
def test_decoder_floor_leaves_keep_tokens(length: int, floor: int) -> None:
    assert decoder_floor(length, keep_tokens=KEEP) == floor


SPANS = (Span(start=1_000, length=100), Span(start=1_950, length=60), Span(start=3_000, length=968))


@pytest.mark.parametrize(
    ("hit", "snapshot_held", "needed"),
    [
        (0, False, SPANS),
        (2_048, True, SPANS[2:]),
        (2_048, False, SPANS[1:]),
        (2_176, False, SPANS[2:]),
        (1_024 + 128, True, SPANS[1:]),
        (1_024 + 128, False, SPANS),
    ],
)
def test_embeddings_are_needed_for_images_with_rows_to_compute(
    hit: int, snapshot_held: bool, needed: tuple[Span, ...]
) -> None:
    assert embedding_spans(SPANS, hit=hit, window_tokens=WINDOW, snapshot_held=snapshot_held) == needed


@pytest.mark.parametrize(
    ("held_at", "hit", "compute_start"),
    [((), 1_920, 1_792), ((2_048,), 2_048, 2_048)],
    ids=["lowered below the image", "snapshot makes the replay needless"],
)
def test_hit_is_lowered_until_the_replay_window_meets_no_image(
    held_at: tuple[int, ...], hit: int, compute_start: int
) -> None:
    positions = plan_positions(
        5_000,
        offered_hit=2_048,
        keep_tokens=KEEP,
        window_tokens=WINDOW,
        snapshot_held=lambda position: position in held_at,
        spans=SPANS,
        embeddings_available=False,
    )

    assert (positions.hit_tokens, positions.compute_start) == (hit, compute_start)


@given(offered=st.integers(0, 20_000), length=LENGTHS, spans=image_spans())
def test_replay_without_embeddings_never_computes_an_image_row_of_the_hit(
    offered: int, length: int, spans: tuple[Span, ...]
) -> None:
    positions = plan_positions(
        length,
        offered_hit=offered,
        keep_tokens=KEEP,
        window_tokens=WINDOW,
        snapshot_held=lambda _: False,
        spans=spans,
        embeddings_available=False,
    )

    assert positions.hit_tokens <= effective_hit(offered, length, keep_tokens=KEEP, spans=spans)
    assert not any(s.start < positions.hit_tokens and s.end > positions.compute_start for s in spans)
    assert not any(s.start < positions.hit_tokens < s.end for s in spans)


@given(prefills(), st.integers(1, 40_000), st.integers(0, 2_000))
def test_chunks_cover_the_rows_within_the_cap_and_leave_no_short_tail(
    positions: PrefillPositions, cap: int, least: int
) -> None:
    cap = max(cap, positions.prompt_tokens // 200 + 1)

    chunks = cut_chunks(positions, cap_tokens=cap, min_tokens=least)

    assert chunks[0][0] == positions.compute_start
    assert chunks[-1][1] == positions.prompt_tokens
    assert all(before[1] == after[0] for before, after in pairwise(chunks))
    assert all(0 < end - start <= cap for start, end in chunks)
    assert len(chunks) == 1 or chunks[-1][1] - chunks[-1][0] >= min(least, cap)


@given(prefills(), st.integers(256, 40_000))
def test_chunks_end_on_block_boundaries(positions: PrefillPositions, cap: int) -> None:
    cap = max(cap, positions.prompt_tokens // 200 + 256)
    chunks = cut_chunks(positions, cap_tokens=cap, min_tokens=128)

    assert all(end % 128 == 0 for _, end in chunks[:-1])


def cold(prompt_tokens: int) -> PrefillPositions:
    return plan_positions(
        prompt_tokens, offered_hit=0, keep_tokens=KEEP, window_tokens=WINDOW, snapshot_held=lambda _: False
    )


@pytest.mark.parametrize(
    ("prompt_tokens", "chunks"),
    [
        (1, ((0, 1),)),
        (32_768, ((0, 32_768),)),
        (32_769, ((0, 32_256), (32_256, 32_769))),
        (33_280, ((0, 32_768), (32_768, 33_280))),
        (70_000, ((0, 32_768), (32_768, 65_536), (65_536, 70_000))),
    ],
)
def test_tail_that_cannot_merge_shortens_the_chunk_before_it(
    prompt_tokens: int, chunks: tuple[tuple[int, int], ...]
) -> None:
    assert cut_chunks(cold(prompt_tokens), cap_tokens=32_768, min_tokens=512) == chunks


def test_cap_below_a_block_still_advances() -> None:
    assert cut_chunks(cold(150), cap_tokens=64, min_tokens=512) == ((0, 64), (64, 86), (86, 150))


@pytest.mark.parametrize(("keep", "window", "rollback"), [(140, 128, 6), (134, 128, 6), (24, 16, 6), (128, 128, 0)])
def test_sufficient_keep_tokens_are_accepted(keep: int, window: int, rollback: int) -> None:
    validate_keep(keep, window, rollback)


def test_keep_below_window_and_rollback_is_refused_with_the_sum() -> None:
    with pytest.raises(ConfigError, match=r"keep_tokens = 133, expected >= 134 = window 128 \+ max rollback 6"):
        validate_keep(133, 128, 6)


def test_negative_rollback_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_rollback_tokens = -1"):
        validate_keep(140, 128, -1)


def test_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="prompt_tokens = 0"):
        cold(0)


def test_cap_of_no_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="cap_tokens = 0"):
        cut_chunks(cold(5), cap_tokens=0, min_tokens=1)
