import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prefill_engine.batch import AttemptRows, Batch, SpanEmbeddings, build_batch
from prefill_engine.step_plan import ChunkPlan, StepPlan
from prefill_plan.config import Truncation
from prefill_plan.kv_layout import BLOCK_TOKENS, state_layout
from prefill_testing.blocks import tiny_spec

CPU = torch.device("cpu")
SPEC = tiny_spec()
WINDOW, RING = 4, 10
STATE = msgspec.structs.replace(
    state_layout(SPEC, keep_tokens=24, rollback_tokens=6), window_tokens=WINDOW, ring_rows=RING
)


def make_chunk(start: int, end: int, *, attempt_id: bytes = b"a", prompt_tokens: int = 0, **terms: object) -> ChunkPlan:
    total = prompt_tokens or end
    defaults: dict[str, object] = {
        "hit_tokens": 0,
        "window_floor": 0,
        "decoder_floor": 0,
        "block_slots": tuple(range(-(-total // BLOCK_TOKENS))),
        "state_slot": 0,
        "snapshot_positions": (),
        "is_last": end == total,
    }
    return ChunkPlan(attempt_id=attempt_id, start=start, end=end, prompt_tokens=total, **(defaults | terms))


def make_rows(num_tokens: int, **parts: object) -> AttemptRows:
    return AttemptRows(token_ids=np.arange(100, 100 + num_tokens, dtype=np.int32), **parts)


def build(*chunks: ChunkPlan, truncation: Truncation = Truncation.COMPACT, **rows: AttemptRows) -> Batch:
    inputs = {chunk.attempt_id: make_rows(chunk.prompt_tokens) for chunk in chunks}
    inputs |= {name.encode(): value for name, value in rows.items()}
    return build_batch(
        StepPlan(step_id=0, chunks=chunks), inputs, spec=SPEC, state=STATE, truncation=truncation, device=CPU
    )


# The third chunk of a prompt of 8 tokens: hit 4, replayed from 2, decoder from 6, pool block 7, state slot 1.
REPLAYED = make_chunk(5, 8, hit_tokens=4, window_floor=2, decoder_floor=6, block_slots=(7,), state_slot=1)


def test_encoder_rows_of_a_resumed_chunk() -> None:
    rows = build(REPLAYED).encoder
    assert rows.positions.tolist() == [5, 6, 7]
    assert rows.history_slots.tolist() == [-1, 12, 13, 14]  # positions 1..4; 1 is below the window floor
    assert rows.window_index.tolist() == [[1, 2, 3, 4], [2, 3, 4, 5], [3, 4, 5, 6]]
    assert rows.ring_slots.tolist() == [15, 16, 17]
    assert rows.entries.r1.num_visible.tolist() == [6, 7, 8]
    assert rows.entries.r2.num_visible.tolist() == [3, 3, 4]
    assert rows.entries.r1.first.tolist() == [0, 0, 0]


def test_entries_of_a_resumed_chunk() -> None:
    entries = build(REPLAYED).entries
    assert entries.r1.write_slots.tolist() == [7 * 128 + 5, 7 * 128 + 6, 7 * 128 + 7]
    assert entries.r1.write_positions.tolist() == [5, 6, 7]
    assert entries.r1.gather_slots.tolist() == list(range(7 * 128, 7 * 128 + 8))
    assert entries.r2.write_slots.tolist() == [7 * 64 + 2, 7 * 64 + 3]  # the pair (4, 5) closes in this chunk
    assert entries.r2.write_positions.tolist() == [4, 6]
    assert entries.r2.gather_slots.tolist() == list(range(7 * 64, 7 * 64 + 4))


def test_compact_decoder_rows_start_at_the_floor_and_see_nothing_below_it() -> None:
    batch = build(REPLAYED)
    assert batch.decoder.positions.tolist() == [6, 7]
    assert batch.decoder_rows.tolist() == [1, 2]
    assert batch.decoder.history_slots.tolist() == [-1, -1, -1, -1]
    assert batch.decoder.window_index.tolist() == [[-1, -1, -1, 4], [-1, -1, 4, 5]]
    assert batch.decoder.ring_slots.tolist() == [16, 17]
    assert batch.last_rows.tolist() == [1]


def test_mask_decoder_rows_are_all_rows_with_the_same_visibility() -> None:
    batch = build(REPLAYED, truncation=Truncation.MASK)
    assert batch.decoder.positions.tolist() == [5, 6, 7]
    assert batch.decoder_rows.tolist() == [0, 1, 2]
    assert batch.decoder.window_index.tolist() == [[-1, -1, -1, -1], [-1, -1, -1, 5], [-1, -1, 5, 6]]
    assert batch.decoder.ring_slots.tolist() == [-1, 16, 17]
    assert batch.last_rows.tolist() == [2]


def test_chunk_below_the_decoder_floor_keeps_one_row_that_sees_and_stores_nothing() -> None:
    batch = build(make_chunk(0, 5, prompt_tokens=40, decoder_floor=30))
    assert batch.decoder.positions.tolist() == [4]
    assert batch.decoder.window_index.tolist() == [[-1] * WINDOW]
    assert batch.decoder.ring_slots.tolist() == [-1]
    assert batch.last_rows.tolist() == []


def test_sequences_of_a_step_do_not_see_each_other() -> None:
    first = make_chunk(0, 3, attempt_id=b"a", block_slots=(2,), state_slot=0)
    second = make_chunk(2, 4, attempt_id=b"b", block_slots=(5,), state_slot=3)
    batch = build(first, second)
    assert batch.cu_rows.tolist() == [0, 3, 5]
    assert batch.starts.tolist() == [0, 2]
    assert batch.state_slots.tolist() == [0, 3]
    assert batch.encoder.history_slots.tolist() == [-1, -1, -1, -1, -1, -1, 30, 31]
    assert batch.encoder.window_index.tolist() == [
        [-1, -1, -1, 8],
        [-1, -1, 8, 9],
        [-1, 8, 9, 10],
        [-1, 6, 7, 11],
        [6, 7, 11, 12],
    ]
    assert batch.encoder.entries.r1.first.tolist() == [0, 0, 0, 3, 3]
    assert batch.encoder.entries.r2.first.tolist() == [0, 0, 0, 1, 1]
    assert batch.entries.r2.gather_slots.tolist() == [128, 320, 321]
    assert batch.last_rows.tolist() == [2, 4]
    assert batch.history_ids.tolist() == [[-1, -1, -1], [-1, 100, 101]]


def test_sequence_without_entries_is_padded_to_one_absent_entry() -> None:
    batch = build(make_chunk(0, 1))
    assert batch.entries.r2.write_slots.tolist() == []
    assert batch.entries.r2.gather_slots.tolist() == [-1]
    assert batch.encoder.entries.r2.num_visible.tolist() == [0]


def test_long_chunk_stores_only_what_the_ring_holds() -> None:
    ring_slots = build(make_chunk(0, 2 * RING + 3)).encoder.ring_slots.tolist()
    assert ring_slots[: RING + 3] == [-1] * (RING + 3)
    assert sorted(ring_slots[RING + 3 :]) == list(range(RING))


def test_image_rows_have_no_token_and_take_their_embeddings() -> None:
    is_image = np.array([False, True, True, True, False])
    data = torch.arange(3.0)[:, None].expand(3, 2)
    rows = make_rows(5, is_image=is_image, embeddings=(SpanEmbeddings(start=1, data=data),))
    batch = build(make_chunk(2, 5), a=rows)
    assert batch.token_ids.tolist() == [-1, -1, 104]
    assert batch.image_rows is not None
    assert batch.image_rows.tolist() == [0, 1]
    assert batch.image_embeddings is not None
    assert batch.image_embeddings[:, 0].tolist() == [1.0, 2.0]
    assert batch.encoder.is_image.tolist() == [True, True, False]
    assert batch.history_ids.tolist() == [[-1, 100, -1]]


def test_placeholder_batch_is_one_row_that_writes_nowhere() -> None:
    batch = build()
    assert batch.cu_rows.tolist() == [0, 1]
    assert batch.state_slots.tolist() == [-1]
    assert batch.last_rows.tolist() == []
    for rows in (batch.encoder, batch.decoder):
        assert rows.ring_slots.tolist() == [-1]
        assert rows.history_slots.tolist() == [-1] * WINDOW
    assert batch.entries.r1.write_slots.tolist() == [-1]
    assert batch.entries.r1.gather_slots.tolist() == [-1]
    assert batch.entries.r2.write_slots.tolist() == []


@pytest.mark.parametrize(
    ("chunk", "rows", "message"),
    [
        (make_chunk(3, 3, prompt_tokens=5), make_rows(5), "expected 0 <= start < end"),
        (make_chunk(0, 6, prompt_tokens=5), make_rows(5), "expected 0 <= start < end"),
        (make_chunk(0, 5), make_rows(4), "4 token ids"),
        (make_chunk(0, 5, hit_tokens=3), make_rows(5), "hit 3 is odd"),
        (make_chunk(0, 129, block_slots=(0,)), make_rows(129), "1 block slots, expected at least 2"),
        (make_chunk(2, 5, window_floor=3), make_rows(5), "window floor 3 is above its start"),
        (make_chunk(0, 5), make_rows(5, is_image=np.ones(5, dtype=np.bool_)), "5 image rows"),
    ],
    ids=["empty", "beyond prompt", "tokens", "odd hit", "blocks", "floor", "no embedding"],
)
def test_build_batch_refuses(chunk: ChunkPlan, rows: AttemptRows, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(chunk, a=rows)


@st.composite
def chunk_plans(draw: st.DrawFn) -> ChunkPlan:
    total = draw(st.integers(1, 700))
    start = draw(st.integers(0, total - 1))
    end = draw(st.integers(start + 1, total))
    num_blocks = -(-total // BLOCK_TOKENS)
    return make_chunk(
        start,
        end,
        prompt_tokens=total,
        hit_tokens=2 * draw(st.integers(0, total // 2)),
        window_floor=draw(st.integers(0, start)),
        decoder_floor=draw(st.integers(0, total)),
        block_slots=tuple(draw(st.permutations(range(10, 10 + num_blocks)))),
        state_slot=draw(st.integers(0, 3)),
    )


@given(chunk_plans())
def test_rows_below_the_hit_never_get_a_store_slot(chunk: ChunkPlan) -> None:
    entries = build(chunk).entries
    for ratio in (1, 2):
        batch = entries.of(ratio)
        per_block = BLOCK_TOKENS // ratio
        expected = [
            chunk.block_slots[entry // per_block] * per_block + entry % per_block
            if entry * ratio >= chunk.hit_tokens
            else -1
            for entry in range(chunk.start // ratio, chunk.end // ratio)
        ]
        assert batch.write_slots.tolist() == expected
        assert all(
            slot < 0 for slot, p in zip(expected, batch.write_positions.tolist(), strict=True) if p < chunk.hit_tokens
        )


@given(chunk_plans(), st.sampled_from(Truncation))
def test_window_slots_are_positions_whatever_the_chunking(chunk: ChunkPlan, truncation: Truncation) -> None:
    batch = build(chunk, truncation=truncation)
    floors = (chunk.window_floor, max(chunk.window_floor, chunk.decoder_floor))
    for rows, floor in zip((batch.encoder, batch.decoder), floors, strict=True):
        before = range(chunk.start - WINDOW, chunk.start)
        buffer = [*before, *rows.positions.tolist()]
        for position, index in zip(rows.positions.tolist(), rows.window_index.tolist(), strict=True):
            keys = range(position - WINDOW + 1, position + 1)
            assert [buffer[i] if i >= 0 else None for i in index] == [key if key >= floor else None for key in keys]
            assert all(rows.history_slots[i] >= 0 for i in index if 0 <= i < WINDOW)
