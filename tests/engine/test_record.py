import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefill_engine.kv.record import GROUP_CRCS_OFFSET, HEADER_FIELDS, RecordCodec, VerifyFailure, decode_info
from prefill_engine.kv.store import StoredBlock
from prefill_plan.block_keys import BlockKey
from prefill_plan.config import RecordFormat
from prefill_plan.kv_layout import BlockLayout, block_layout
from prefill_plan.model_spec import released_model_spec
from prefill_testing.blocks import make_key, make_payload, tiny_layout

LAYOUT = tiny_layout()
CODEC = RecordCodec(LAYOUT)
KEY = make_key("a")
PAYLOAD = make_payload(LAYOUT, "a")
HEADER = CODEC.encode_header(key=KEY, payload=PAYLOAD, block_index=7, provenance=1)


def crc32c_by_bit(data: bytes) -> int:
    """Definition (RFC 3720 B.4): reflected polynomial 0x82F63B78."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def test_header_fields_lie_where_the_table_says() -> None:
    end = 0
    for name, offset, size, code in HEADER_FIELDS:
        assert offset == end, name
        assert struct.calcsize(f"<{code}") == size, name
        end = offset + size
    assert end == GROUP_CRCS_OFFSET


def test_header_bytes_are_those_of_the_format() -> None:
    """Frozen by hand: a change here is another version of the format."""
    assert HEADER[:64] == (
        b"PEKVBLK\x00" + struct.pack("<HBBI", 1, 1, len(LAYOUT.sources), 7) + LAYOUT.digest()[:8] + KEY + bytes(8)
    )
    crcs_end = GROUP_CRCS_OFFSET + 4 * len(LAYOUT.sources)
    groups = [PAYLOAD[s.group_offset : s.group_offset + s.group_bytes] for s in LAYOUT.sources]
    assert list(struct.unpack(f"<{len(groups)}I", HEADER[64:crcs_end])) == [crc32c_by_bit(group) for group in groups]
    assert HEADER[crcs_end:-4] == bytes(len(HEADER) - 4 - crcs_end)
    assert struct.unpack("<I", HEADER[-4:]) == (crc32c_by_bit(HEADER[:-4]),)


@pytest.mark.parametrize(
    ("record_format", "header_bytes", "record_bytes"),
    [(RecordFormat.FP4, 768, 114_688), (RecordFormat.FP8, 1_792, 47 * 4_096)],
    ids=["fp4", "fp8"],
)
def test_released_records_are_whole_pages(record_format: RecordFormat, header_bytes: int, record_bytes: int) -> None:
    layout: BlockLayout = block_layout(released_model_spec(), record_format)
    payload = make_payload(layout, "a")

    header = RecordCodec(layout).encode_header(key=KEY, payload=payload, block_index=0, provenance=0)

    assert len(header) == header_bytes
    assert len(header) + len(payload) == record_bytes
    assert RecordCodec(layout).verify(header, payload, key=KEY) is None


def test_a_whole_record_verifies_and_tells_its_block() -> None:
    assert CODEC.verify(HEADER, PAYLOAD, key=KEY) is None
    assert decode_info(HEADER) == StoredBlock(block_index=7, provenance=1)


@given(bit=st.integers(0, 8 * LAYOUT.record_bytes - 1))
def test_every_flipped_bit_fails_verification(bit: int) -> None:
    record = bytearray(HEADER + PAYLOAD)
    record[bit // 8] ^= 1 << bit % 8
    header, payload = CODEC.split(record)

    failure = CODEC.verify(header, payload, key=KEY)

    assert failure == (VerifyFailure.LAYOUT if bit < 80 else VerifyFailure.CRC)


@given(length=st.integers(0, LAYOUT.record_bytes - 1))
def test_every_cut_record_is_short(length: int) -> None:
    header, payload = CODEC.split((HEADER + PAYLOAD)[:length])

    assert CODEC.verify(header, payload, key=KEY) == VerifyFailure.SHORT


def test_swapped_groups_fail_verification() -> None:
    layout = block_layout(released_model_spec(), RecordFormat.FP4)
    codec, payload = RecordCodec(layout), make_payload(layout, "a")
    header = codec.encode_header(key=KEY, payload=payload, block_index=0, provenance=0)
    size = layout.sources[0].group_bytes
    assert layout.sources[1].group_bytes == size

    swapped = payload[size : 2 * size] + payload[:size] + payload[2 * size :]

    assert codec.verify(header, swapped, key=KEY) == VerifyFailure.CRC


@pytest.mark.parametrize(
    ("key", "block_index", "provenance"),
    [(BlockKey(b"x" * 31), 0, 0), (KEY, -1, 0), (KEY, 1 << 32, 0), (KEY, 0, 2)],
    ids=["key", "negative_index", "large_index", "provenance"],
)
def test_fields_out_of_range_are_refused(key: BlockKey, block_index: int, provenance: int) -> None:
    with pytest.raises(ValueError, match=f"block index {block_index}, provenance {provenance}"):
        CODEC.encode_header(key=key, payload=PAYLOAD, block_index=block_index, provenance=provenance)
