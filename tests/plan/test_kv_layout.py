from operator import attrgetter
from pathlib import Path

import pytest
from msgspec.structs import replace

from prefill_plan.config import RecordFormat
from prefill_plan.errors import KvError
from prefill_plan.kv_layout import (
    REQUEST_ROW_BYTES,
    RequestRow,
    StateLayout,
    block_layout,
    state_layout,
)
from prefill_plan.model_spec import load_model_spec, released_model_spec

GOLDEN = Path(__file__).parents[1] / "golden"
RELEASED = released_model_spec()


@pytest.mark.parametrize(
    ("record_format", "payload_bytes", "stride_bytes", "header_bytes", "pages"),
    [(RecordFormat.FP4, 113_920, 114_048, 768, 28), (RecordFormat.FP8, 190_720, 194_304, 1_792, 47)],
)
def test_block_sizes_of_the_release(
    record_format: RecordFormat, payload_bytes: int, stride_bytes: int, header_bytes: int, pages: int
) -> None:
    layout = block_layout(RELEASED, record_format)

    assert layout.payload_bytes == payload_bytes
    assert layout.stride_bytes == stride_bytes
    assert layout.header_bytes == header_bytes
    assert layout.record_bytes == pages * 4096


def test_fp4_record_of_the_release_is_114688_bytes() -> None:
    assert block_layout(RELEASED, RecordFormat.FP4).record_bytes == 114_688


@pytest.mark.parametrize(
    ("record_format", "per_token", "hit_payload", "hit_stride", "prompt_payload", "new_payload"),
    [
        (RecordFormat.FP4, 890, 86_237_440, 86_334_336, 88_971_520, 2_734_080),
        (RecordFormat.FP8, 1_490, 144_375_040, 147_088_128, 148_952_320, 4_577_280),
    ],
)
def test_bytes_of_the_worked_example(
    record_format: RecordFormat,
    per_token: int,
    hit_payload: int,
    hit_stride: int,
    prompt_payload: int,
    new_payload: int,
) -> None:
    layout = block_layout(RELEASED, record_format)

    assert layout.payload_bytes == per_token * 128
    assert 96_896 // 128 * layout.payload_bytes == hit_payload
    assert 96_896 // 128 * layout.stride_bytes == hit_stride
    assert 781 * layout.payload_bytes == prompt_payload
    assert 24 * layout.payload_bytes == new_payload


def test_group_offsets_of_the_fp4_block_are_those_of_kv_md_1_3() -> None:
    columns = ("layer", "ratio", "entries", "group_offset", "group_bytes")
    sections = ("index_offset", "index_bytes", "main_offset", "main_bytes")
    row_of = attrgetter(*columns, *sections)
    rows = [row_of(source) for source in block_layout(RELEASED, RecordFormat.FP4).sources]

    assert rows == [
        (2, 2, 64, 0, 22_784, 0, 4_352, 4_352, 18_432),
        (8, 2, 64, 22_784, 22_784, 22_784, 4_352, 27_136, 18_432),
        (14, 2, 64, 45_568, 22_784, 45_568, 4_352, 49_920, 18_432),
        (20, 1, 128, 68_352, 45_568, 68_352, 8_704, 77_056, 36_864),
    ]


def test_hit_bytes_per_layer_group_are_those_of_kv_md_1_3() -> None:
    sources = block_layout(RELEASED, RecordFormat.FP4).sources

    assert [757 * source.group_bytes for source in sources] == [17_247_488] * 3 + [34_494_976]


@pytest.mark.parametrize(("record_format", "record_bytes"), [(RecordFormat.FP4, 288), (RecordFormat.FP8, 528)])
def test_entry_records_of_the_release(record_format: RecordFormat, record_bytes: int) -> None:
    source = block_layout(RELEASED, record_format).sources[0]

    assert source.main_record_bytes == record_bytes
    assert (source.index_data_bytes, source.index_scale_bytes) == (64, 4)


@pytest.mark.parametrize("record_format", RecordFormat)
@pytest.mark.parametrize("model", ["tiny_dense", "tiny_quant"])
def test_tiny_blocks_are_packed_without_overlap(model: str, record_format: RecordFormat) -> None:
    spec = load_model_spec(GOLDEN / model)
    layout = block_layout(spec, record_format)

    end = 0
    for source in layout.sources:
        assert source.index_offset == source.group_offset == end
        assert source.main_offset >= source.index_offset + source.index_bytes
        assert source.main_offset % 32 == source.group_offset % 32 == 0
        assert source.index_bytes == source.entries * (16 + 1)
        assert source.main_bytes == source.entries * (36 if record_format == RecordFormat.FP4 else 66)
        end = source.group_offset + source.group_bytes
        assert source.main_offset + source.main_bytes <= end
    assert tuple(source.layer for source in layout.sources) == spec.kv_sources
    assert layout.payload_bytes == end <= layout.stride_bytes
    assert layout.stride_bytes % layout.sources[0].main_record_bytes == 0
    assert layout.record_bytes % 4096 == 0
    assert layout.header_bytes >= 128 + 4 * len(layout.sources)


def test_layout_digest_tells_formats_and_models_apart() -> None:
    specs = (RELEASED, load_model_spec(GOLDEN / "tiny_dense"), load_model_spec(GOLDEN / "tiny_quant"))
    digests = {block_layout(spec, record_format).digest() for spec in specs for record_format in RecordFormat}

    assert len(digests) == 6
    assert all(len(digest) == 32 for digest in digests)


def test_layout_digest_is_stable() -> None:
    # A change orphans every stored block; do it only with a new layout version.
    assert block_layout(RELEASED, RecordFormat.FP4).digest().hex() == (
        "3387ea23e93385706080b6dae3d827d6227ccb1d3e04cfb24bc474041fdb8da8"
    )


def released_state() -> StateLayout:
    return state_layout(RELEASED, keep_tokens=140, rollback_tokens=6)


def test_snapshot_is_1415040_bytes() -> None:
    state = released_state()

    assert (state.snapshot_rows, state.window_record_bytes, state.num_encoder_layers) == (134, 528, 20)
    assert state.snapshot_bytes == 20 * 134 * 528 == 1_415_040


def test_handover_state_is_3128928_bytes_in_the_parts_of_kv_md_1_5() -> None:
    state = released_state()

    assert state.decoder_offset == 1_415_040
    assert state.draft_offset - state.decoder_offset == 1_415_040
    assert state.compress_state_offset - state.draft_offset == 212_256
    assert (state.compress_state_rows, state.num_pair_sources, state.compress_state_bytes) == (7, 3, 86_016)
    assert state.handover_bytes - state.compress_state_offset - state.compress_state_bytes == 576
    assert state.handover_bytes == 3_128_928


def test_gpu_state_slot_is_9213600_bytes() -> None:
    state = released_state()

    assert state.ring_rows == 402
    assert state.num_layers == 43
    assert state.gpu_slot_bytes == 43 * 402 * 528 + 86_016 + 576 == 9_213_600


def test_state_slot_without_extra_ring_rows_is_the_handover() -> None:
    state = released_state()
    short = replace(state, ring_rows=134)

    assert short.gpu_slot_bytes == state.handover_bytes == 3_128_928


def test_state_slot_of_encoder_layers_only_is_1501632_bytes() -> None:
    encoder_only = replace(released_state(), ring_rows=134, num_decoder_layers=0, num_draft_layers=0)

    assert encoder_only.gpu_slot_bytes == 1_501_632


def test_tiny_state_has_its_own_window_and_draft() -> None:
    state = state_layout(load_model_spec(GOLDEN / "tiny_quant"), keep_tokens=24, rollback_tokens=6)

    assert (state.snapshot_rows, state.ring_rows, state.window_record_bytes) == (22, 22 + 128 + 24, 66)
    assert (state.num_encoder_layers, state.num_decoder_layers, state.num_draft_layers) == (3, 3, 1)
    assert state.num_pair_sources == 1
    assert state.snapshot_layer_bytes == 1472
    assert state.handover_bytes == 14_784


ROW = RequestRow(
    prompt_tokens=100_000,
    decoder_floor=99_860,
    window_floor=96_768,
    last_tokens=(-1, 7, 129_279),
    first_token=-1,
)


def test_request_row_round_trips_at_fixed_size() -> None:
    data = ROW.encode()

    assert len(data) == REQUEST_ROW_BYTES == 32
    assert RequestRow.decode(memoryview(data)) == ROW


def test_request_row_is_little_endian_with_a_version_first() -> None:
    assert ROW.encode().hex() == "01000000a086010014860100007a0100ffffffff07000000fff80100ffffffff"


@pytest.mark.parametrize(
    ("data", "message"),
    [(b"", "0 bytes, expected 32"), (bytes(33), "33 bytes, expected 32"), (bytes(32), "version 0, expected 1")],
)
def test_request_row_of_other_size_or_version_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(KvError, match=message):
        RequestRow.decode(data)
