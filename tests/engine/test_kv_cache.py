import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefill_engine.kv.segment_data import address_of
from prefill_engine.kv_cache import KvCache
from prefill_plan.config import RecordFormat
from prefill_plan.kv_layout import BlockLayout, StateLayout, block_layout, state_layout
from prefill_plan.model_spec import ModelSpec, released_model_spec
from prefill_testing.blocks import tiny_spec

CPU = torch.device("cpu")
POISON = 0xA5


def make_cache(
    spec: ModelSpec,
    *,
    record_format: RecordFormat = RecordFormat.FP4,
    keep_tokens: int = 24,
    num_blocks: int = 2,
    num_state_slots: int = 2,
    raw_dtype: torch.dtype | None = None,
) -> KvCache:
    return KvCache(
        spec,
        layout=block_layout(spec, record_format),
        state=state_layout(spec, keep_tokens=keep_tokens, rollback_tokens=6),
        num_blocks=num_blocks,
        num_state_slots=num_state_slots,
        device=CPU,
        raw_dtype=raw_dtype,
    )


def released_cache(record_format: RecordFormat = RecordFormat.FP4) -> KvCache:
    return make_cache(
        released_model_spec(), record_format=record_format, keep_tokens=140, num_blocks=1, num_state_slots=1
    )


def row_byte(layer: int, position: int) -> int:
    return (layer * 37 + position * 11) % 160 + 1


def poison(cache: KvCache) -> None:
    for layer in range(cache.state.num_layers):
        cache.window_ring(layer).view(torch.uint8)[:] = POISON
    for source in pair_sources(cache.layout):
        cache.compress_state(source).view(torch.uint8)[:] = POISON


def pair_sources(layout: BlockLayout) -> list[int]:
    return [source.layer for source in layout.sources if source.ratio == 2]


def fill_state(cache: KvCache, slot: int, num_tokens: int) -> None:
    """Writes every token's rows as a forward pass would, the newest tokens last."""
    for layer in range(cache.state.num_layers):
        ring = cache.window_ring(layer).view(torch.uint8)
        for position in range(max(0, num_tokens - cache.state.ring_rows), num_tokens):
            ring[slot, position % cache.state.ring_rows] = row_byte(layer, position)
    for source in pair_sources(cache.layout):
        state = cache.compress_state(source)
        for position in range(max(0, num_tokens - cache.state.compress_state_rows), num_tokens):
            row = state[slot, position % cache.state.compress_state_rows]
            row[0], row[1] = position + 0.25, -position - source


def image_row(state: StateLayout, data: bytes, layer: int, position: int) -> set[int]:
    """Distinct bytes of a token's row in ring images of records."""
    start = layer * state.snapshot_layer_bytes + position % state.snapshot_rows * state.window_record_bytes
    return set(data[start : start + state.window_record_bytes])


# --- blocks ---


@pytest.mark.parametrize(
    ("layer", "index_offset", "main_offset", "entries"),
    [(2, 0, 4_352, 64), (8, 22_784, 27_136, 64), (14, 45_568, 49_920, 64), (20, 68_352, 77_056, 128)],
)
def test_pages_lie_where_the_released_layout_says(
    layer: int, index_offset: int, main_offset: int, entries: int
) -> None:
    cache = released_cache()
    data, scales = cache.index_pages(layer)

    data[0, 1, 0], scales[0, 1, 0], cache.main_pages(layer)[0, 1, 0] = 1, 2, 3

    view = cache.block_view(0)
    written = {offset: byte for offset, byte in enumerate(view) if byte}
    assert written == {index_offset + 64: 1, index_offset + entries * 64 + 4: 2, main_offset + 288: 3}


@pytest.mark.parametrize(
    ("record_format", "payload_bytes", "stride_bytes", "record_bytes"),
    [(RecordFormat.FP4, 113_920, 114_048, 288), (RecordFormat.FP8, 190_720, 194_304, 528)],
    ids=["fp4", "fp8"],
)
def test_blocks_have_released_sizes(
    record_format: RecordFormat, payload_bytes: int, stride_bytes: int, record_bytes: int
) -> None:
    cache = released_cache(record_format)

    assert cache.blocks.shape == (1, stride_bytes)
    assert cache.block_view(0).nbytes == payload_bytes
    assert cache.main_pages(20).shape == (1, 128, record_bytes)
    assert [pages.shape for pages in cache.index_pages(2)] == [(1, 64, 64), (1, 64, 4)]


def test_pages_of_all_sources_fill_the_payload_without_overlap() -> None:
    cache = released_cache()
    for number, source in enumerate(cache.layout.sources):
        for pages in (cache.main_pages(source.layer), *cache.index_pages(source.layer)):
            assert torch.all(pages == 0)
            pages[:] = number + 1

    payload = bytes(cache.block_view(0))

    assert [payload.count(number) for number in range(5)] == [0, 22_784, 22_784, 22_784, 45_568]


def test_raw_pages_hold_float_rows_and_do_not_overlap() -> None:
    spec = tiny_spec()
    cache = make_cache(spec, raw_dtype=torch.float32)
    value = 0
    for source in cache.layout.sources:
        main = cache.main_pages(source.layer)
        data, scales = cache.index_pages(source.layer)
        assert main.shape == (2, source.entries, spec.head_dim)
        assert data.shape == (2, source.entries, spec.index_head_dim)
        assert scales.shape == (2, source.entries, 0)
        for pages in (main, data):
            value += 1
            pages[1] = value

    # No value was overwritten by another page, and no place was left out.
    assert set(cache.blocks[1].tolist()) == set(range(1, value + 1))
    assert torch.all(cache.blocks[0] == 0)


def test_block_view_shares_memory_with_pages() -> None:
    cache = make_cache(tiny_spec())
    layer = cache.layout.sources[0].layer
    view = cache.block_view(1)

    view[:] = bytes([7]) * len(view)

    assert torch.all(cache.main_pages(layer)[1] == 7)
    assert torch.all(cache.blocks[0] == 0)
    assert torch.all(cache.blocks[1, cache.layout.payload_bytes :] == 0)


@pytest.mark.parametrize("slot", [-1, 2])
def test_block_view_refuses_a_slot_outside_the_pool(slot: int) -> None:
    with pytest.raises(ValueError, match=rf"block slot {slot} is outside \[0, 2\)"):
        make_cache(tiny_spec()).block_view(slot)


def test_views_refuse_layers_that_are_no_source() -> None:
    cache = make_cache(tiny_spec())
    ratio_one = next(source.layer for source in cache.layout.sources if source.ratio == 1)

    with pytest.raises(KeyError):
        cache.main_pages(0)
    with pytest.raises(KeyError):
        cache.compress_state(ratio_one)
    with pytest.raises(ValueError, match="no window ring for layer -1"):
        cache.window_ring(-1)


@pytest.mark.parametrize("num_tokens", [0, 1, 32, 33, 127, 128])
@pytest.mark.parametrize("raw_dtype", [None, torch.float32], ids=["records", "raw"])
def test_zero_tail_keeps_exactly_the_complete_entries(num_tokens: int, raw_dtype: torch.dtype | None) -> None:
    cache = make_cache(tiny_spec(), raw_dtype=raw_dtype)
    cache.blocks[:] = 5

    cache.zero_tail(1, num_tokens)

    for source in cache.layout.sources:
        for pages in (cache.main_pages(source.layer), *cache.index_pages(source.layer)):
            assert torch.all(pages[1, : num_tokens // source.ratio] == 5)
            assert torch.all(pages[1, num_tokens // source.ratio :] == 0)
    assert torch.all(cache.blocks[0] == 5)


# --- snapshots ---


def test_snapshots_of_the_worked_example_are_ring_images() -> None:
    cache = released_cache()
    fill_state(cache, 0, 100_000)

    for position in (99_968, 99_840):
        data = cache.take_snapshot(0, position, first_valid=0)

        assert len(data) == 1_415_040
        for layer in (0, 19):
            for token in (position - 134, position - 133, position - 1):
                assert image_row(cache.state, data, layer, token) == {row_byte(layer, token)}


def test_snapshot_rows_below_first_valid_are_zero() -> None:
    cache = make_cache(tiny_spec())
    fill_state(cache, 0, 300)

    data = cache.take_snapshot(0, 256, first_valid=250)

    rows = [image_row(cache.state, data, 1, token) for token in range(256 - cache.state.snapshot_rows, 256)]
    assert rows == [{0}] * (cache.state.snapshot_rows - 6) + [{row_byte(1, token)} for token in range(250, 256)]


def test_restore_writes_only_the_snapshots_rows_into_a_poisoned_ring() -> None:
    source, target = make_cache(tiny_spec()), make_cache(tiny_spec())
    fill_state(source, 0, 300)
    poison(target)

    target.restore_snapshot(1, 256, source.take_snapshot(0, 256, first_valid=0))

    state = target.state
    held = {token % state.ring_rows: token for token in range(256 - state.snapshot_rows, 256)}
    for layer in range(state.num_layers):
        ring = target.window_ring(layer)
        assert torch.all(ring[0] == POISON)
        for row in range(state.ring_rows):
            is_restored = row in held and layer < state.num_encoder_layers
            assert set(ring[1, row].tolist()) == {row_byte(layer, held[row]) if is_restored else POISON}
    assert all(
        torch.all(target.compress_state(layer).view(torch.uint8) == POISON) for layer in pair_sources(target.layout)
    )


@settings(max_examples=30, deadline=None)
@given(num_tokens=st.integers(1, 400), back=st.integers(0, 150), absent=st.integers(0, 30), data=st.data())
def test_restored_rows_equal_the_rows_taken(num_tokens: int, back: int, absent: int, data: st.DataObject) -> None:
    raw_dtype = data.draw(st.sampled_from([None, torch.bfloat16, torch.float64]))
    source, target = (make_cache(tiny_spec(), raw_dtype=raw_dtype) for _ in range(2))
    state = source.state
    fill_state(source, 0, num_tokens)
    poison(target)
    position = max(0, num_tokens - min(back, state.ring_rows - state.snapshot_rows))
    first_valid = max(0, position - state.snapshot_rows + absent)

    target.restore_snapshot(0, position, source.take_snapshot(0, position, first_valid=first_valid))

    for layer in range(state.num_encoder_layers):
        ring = target.window_ring(layer).view(torch.uint8)
        for token in range(max(0, position - state.snapshot_rows), position):
            expected = row_byte(layer, token) if token >= first_valid else 0
            assert set(ring[0, token % state.ring_rows].tolist()) == {expected}


def test_restore_refuses_data_of_another_size() -> None:
    cache = make_cache(tiny_spec())

    with pytest.raises(ValueError, match=rf"snapshot has 10 bytes: expected {cache.state.snapshot_bytes}"):
        cache.restore_snapshot(0, 128, bytes(10))


# --- hand-over ---


def test_handover_of_the_worked_example_has_the_parts_of_kv_md() -> None:
    cache = released_cache()
    state = cache.state
    fill_state(cache, 0, 100_000)

    data = cache.export_state(0, 100_000, first_valid=0, decoder_floor=99_860)

    assert len(data) == 3_128_928
    assert image_row(state, data, 19, 99_866) == {row_byte(19, 99_866)}
    assert image_row(state, data, 20, 99_866) == {row_byte(20, 99_866)}
    assert image_row(state, data, 42, 99_999) == {row_byte(42, 99_999)}
    pairs = torch.frombuffer(bytearray(data), dtype=torch.float32)[state.compress_state_offset // 4 :]
    pairs = pairs[: 3 * 7 * 2 * 512].view(3, 7, 2, 512)
    for token in range(99_993, 100_000):
        assert torch.all(pairs[:, token % 7, 0] == token + 0.25)
        assert torch.all(pairs[:, token % 7, 1] == torch.tensor([[-token - layer] for layer in (2, 8, 14)]))
    assert data[-576:] == bytes(576)
    assert state.compress_state_offset + state.compress_state_bytes + 576 == len(data)


def test_handover_rows_below_their_floor_are_zero() -> None:
    cache = make_cache(tiny_spec())
    state = cache.state
    poison(cache)
    fill_state(cache, 0, 300)

    data = cache.export_state(0, 300, first_valid=290, decoder_floor=295)

    for layer in range(state.num_layers):
        floor = 290 if layer < state.num_encoder_layers else 295
        for token in range(300 - state.snapshot_rows, 300):
            expected = row_byte(layer, token) if token >= floor else 0
            assert image_row(state, data, layer, token) == {expected}


@pytest.mark.parametrize("num_tokens", [1, 3, 21, 22, 150, 299])
@pytest.mark.parametrize("raw_dtype", [None, torch.float32, torch.float64], ids=["records", "float32", "float64"])
def test_import_places_rows_in_a_ring_of_another_length(num_tokens: int, raw_dtype: torch.dtype | None) -> None:
    source = make_cache(tiny_spec(), keep_tokens=24, raw_dtype=raw_dtype)
    target = make_cache(tiny_spec(), keep_tokens=57, raw_dtype=raw_dtype)
    poison(source)
    poison(target)
    fill_state(source, 1, num_tokens)

    target.import_state(0, num_tokens, source.export_state(1, num_tokens, first_valid=0, decoder_floor=0))

    state = target.state
    assert state.ring_rows == source.state.ring_rows + 33
    held = {token % state.ring_rows: token for token in range(max(0, num_tokens - state.snapshot_rows), num_tokens)}
    for layer in range(state.num_layers):
        ring = target.window_ring(layer).view(torch.uint8)
        rows = [set(ring[0, row].tolist()) for row in range(state.ring_rows)]
        assert rows == [{row_byte(layer, held[row]) if row in held else POISON} for row in range(state.ring_rows)]
        assert torch.all(ring[1] == POISON)
    num_pairs = min(num_tokens, state.compress_state_rows)
    for layer in pair_sources(target.layout):
        rows_there, rows_here = target.compress_state(layer)[0], source.compress_state(layer)[1]
        for token in range(num_tokens - num_pairs, num_tokens):
            row = token % state.compress_state_rows
            assert torch.equal(rows_there[row], rows_here[row])
        assert torch.all(rows_there[num_pairs:].view(torch.uint8) == POISON) or num_pairs == state.compress_state_rows


def test_handover_of_a_short_prompt_leaves_out_stale_compressor_rows() -> None:
    cache = make_cache(tiny_spec())
    poison(cache)
    fill_state(cache, 0, 3)

    data = cache.export_state(0, 3, first_valid=0, decoder_floor=0)

    assert POISON not in data


@pytest.mark.parametrize("num_tokens", [0, 3, 40, 300])
@pytest.mark.parametrize("raw_dtype", [None, torch.float32], ids=["records", "raw"])
def test_copies_into_used_memory_hold_nothing_of_it(num_tokens: int, raw_dtype: torch.dtype | None) -> None:
    cache = make_cache(tiny_spec(), raw_dtype=raw_dtype)
    poison(cache)
    fill_state(cache, 0, num_tokens)
    copies = {
        "snapshot": lambda: cache.take_snapshot(0, num_tokens, first_valid=num_tokens - 6),
        "state": lambda: cache.export_state(0, num_tokens, first_valid=0, decoder_floor=num_tokens - 1),
    }

    for take in copies.values():
        fresh = take()
        expected, address = bytes(fresh), address_of(fresh)
        fresh[:] = bytes([POISON]) * len(fresh)
        del fresh
        used = take()
        assert address_of(used) == address
        assert bytes(used) == expected


def test_import_refuses_data_of_another_size() -> None:
    cache = make_cache(tiny_spec())

    with pytest.raises(ValueError, match=rf"hand-over state has 3 bytes: expected {cache.state.handover_bytes}"):
        cache.import_state(0, 128, b"abc")


def test_clear_state_zeroes_one_slot_only() -> None:
    cache = make_cache(tiny_spec())
    poison(cache)

    cache.clear_state(1)

    tensors = [cache.window_ring(layer) for layer in range(cache.state.num_layers)]
    tensors += [cache.compress_state(layer) for layer in pair_sources(cache.layout)]
    assert all(torch.all(tensor[1].view(torch.uint8) == 0) for tensor in tensors)
    assert all(torch.all(tensor[0].view(torch.uint8) == POISON) for tensor in tensors)
