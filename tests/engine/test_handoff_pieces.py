"""Pieces of a hand-over: ranges cover a region, keys open one piece each, checksums find one wrong bit, sizes are kv.md 1.5's."""

import hashlib
from pathlib import Path

import pytest

from prefill_engine.front.served_model import BLOCK_KV, handover_format
from prefill_engine.handoff_pieces import (
    CHECKS_INDEX,
    checksums,
    component_lengths,
    cut_pieces,
    first_damaged,
    piece_key,
)
from prefill_plan.config import RecordFormat
from prefill_plan.kv_layout import block_layout, state_layout
from prefill_plan.model_spec import load_model_spec

KEY = bytes(range(32))
SPEC = load_model_spec(Path(__file__).parents[1] / "golden" / "tiny_quant")


@pytest.mark.parametrize(
    ("num_bytes", "ranges"),
    [
        (1, [(0, 1)]),
        (8, [(0, 8)]),
        (9, [(0, 8), (8, 9)]),
        (24, [(0, 8), (8, 16), (16, 24)]),
        (0, []),
    ],
)
def test_pieces_cover_the_region_in_order(num_bytes: int, ranges: list[tuple[int, int]]):
    pieces = cut_pieces(KEY, num_bytes=num_bytes, piece_bytes=8)
    assert [(piece.start, piece.end) for piece in pieces] == ranges
    assert [piece.key for piece in pieces] == [piece_key(KEY, index) for index in range(len(ranges))]


def test_piece_key_is_what_the_proto_says():
    expected = hashlib.sha256(b"handoff-piece" + KEY + (7).to_bytes(4, "little")).digest()
    assert piece_key(KEY, 7) == expected
    assert len({piece_key(KEY, index) for index in (0, 1, CHECKS_INDEX)}) == 3


def test_pieces_of_no_bytes_are_refused():
    with pytest.raises(ValueError, match="piece_bytes 0"):
        cut_pieces(KEY, num_bytes=5, piece_bytes=0)


@pytest.mark.parametrize("bit", [0, 8 * 1000 + 3, 8 * 2999 + 7])
def test_checksums_name_the_piece_with_a_wrong_bit(bit: int):
    data = bytearray(i % 251 for i in range(3000))
    checks = checksums(data, piece_bytes=1000)
    assert first_damaged(data, checks, piece_bytes=1000) is None
    data[bit // 8] ^= 1 << bit % 8
    assert first_damaged(data, checks, piece_bytes=1000) == bit // 8 // 1000


@pytest.mark.parametrize("cut", [0, 4, 11])
def test_checksums_of_another_number_of_pieces_prove_nothing(cut: int):
    data = bytes(3000)
    assert first_damaged(data, checksums(data, piece_bytes=1000)[:cut], piece_bytes=1000) == 0


@pytest.mark.parametrize("num_tokens", [1, 127, 128, 129, 700])
def test_lengths_are_those_that_the_layouts_give(num_tokens: int):
    blocks = block_layout(SPEC, RecordFormat.FP4)
    state = state_layout(SPEC, keep_tokens=24, rollback_tokens=6)
    served = handover_format(SPEC, blocks=blocks, state=state, weights_digest=bytes(32))
    lengths = component_lengths(served.components, block_tokens=128, num_tokens=num_tokens)
    assert lengths[BLOCK_KV] == -(-num_tokens // 128) * blocks.payload_bytes
    rings = {3: state.num_encoder_layers, 4: state.num_decoder_layers, 6: state.num_draft_layers}
    for kind, layers in rings.items():
        assert lengths.get(kind, 0) == layers * state.snapshot_layer_bytes
    assert sum(length for kind, length in lengths.items() if kind != BLOCK_KV) == (
        state.compress_state_offset + state.compress_state_bytes + 32
    )
