import struct

import crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefill_engine.kv.segment_file import HEADER_BYTES, HEADER_FIELDS, KEYS_OFFSET, SegmentForm
from prefill_plan.block_keys import BlockKey
from prefill_testing.blocks import make_key
from prefill_testing.segments import LAYOUT, SHAPE

FORM = SegmentForm.of_geometry(SHAPE)
KEYS = tuple(make_key(label) for label in "abc")
HEADER = FORM.encode_header(KEYS)


def test_header_fields_lie_where_the_table_says() -> None:
    end = 0
    for name, offset, size, code in HEADER_FIELDS:
        assert offset == end, name
        assert struct.calcsize(f"<{code}") == size, name
        end = offset + size
    assert end == KEYS_OFFSET


def test_header_bytes_are_those_of_the_format() -> None:
    """Frozen by hand: a change here is another version of the format."""
    fixed = b"PEKVSEG\x00" + struct.pack("<HHI", 1, 3, LAYOUT.record_bytes) + LAYOUT.digest()[:8] + bytes(40)
    body = (fixed + b"".join(KEYS)).ljust(4092, b"\0")
    assert body + struct.pack("<I", crc32c.crc32c(body)) == HEADER


@given(keys=st.lists(st.binary(min_size=32, max_size=32), min_size=1, max_size=32))
def test_keys_come_back_in_order(keys: list[bytes]) -> None:
    header = FORM.encode_header([BlockKey(key) for key in keys])

    assert len(header) == HEADER_BYTES
    assert FORM.decode_header(header, file_bytes=FORM.file_bytes(len(keys))) == tuple(keys)


@given(bit=st.integers(0, 8 * HEADER_BYTES - 1))
def test_every_flipped_bit_is_refused(bit: int) -> None:
    header = bytearray(HEADER)
    header[bit // 8] ^= 1 << bit % 8

    assert FORM.decode_header(header, file_bytes=FORM.file_bytes(3)) is None


@pytest.mark.parametrize("file_bytes", [0, FORM.file_bytes(2), FORM.file_bytes(3) - 1, FORM.file_bytes(3) + 1])
def test_a_file_of_another_length_is_refused(file_bytes: int) -> None:
    assert FORM.decode_header(HEADER, file_bytes=file_bytes) is None


@pytest.mark.parametrize("header", [b"", HEADER[:-1], HEADER + b"\0"], ids=["empty", "cut", "long"])
def test_a_header_of_another_length_is_refused(header: bytes) -> None:
    assert FORM.decode_header(header, file_bytes=FORM.file_bytes(3)) is None


@pytest.mark.parametrize(
    ("offset", "value"),
    [(0, b"PEKVBLK\x00"), (8, b"\x02\x00"), (10, b"\x00\x00"), (10, b"\x21\x00"), (12, b"\0\0\1\0"), (16, bytes(8))],
    ids=["magic", "version", "no_records", "33_records", "record_bytes", "layout"],
)
def test_a_valid_header_of_something_else_is_refused(offset: int, value: bytes) -> None:
    header = bytearray(HEADER)
    header[offset : offset + len(value)] = value
    header[-4:] = struct.pack("<I", crc32c.crc32c(bytes(header[:-4])))

    num_records = int.from_bytes(header[10:12], "little")
    assert FORM.decode_header(header, file_bytes=FORM.file_bytes(num_records)) is None


@pytest.mark.parametrize(
    "keys", [(), KEYS * 11, (BlockKey(b"x" * 31),), (KEYS[0], BlockKey(b"x" * 33))], ids=["none", "33", "short", "long"]
)
def test_keys_out_of_range_are_refused(keys: tuple[BlockKey, ...]) -> None:
    with pytest.raises(ValueError, match=r"expected 1\.\.32 of 32"):
        FORM.encode_header(keys)


def test_records_follow_each_other_in_whole_pages() -> None:
    assert [FORM.record_offset(record) for record in range(3)] == [
        4096,
        4096 + SHAPE.record_bytes,
        4096 + 2 * SHAPE.record_bytes,
    ]
    assert FORM.file_bytes(3) == FORM.record_offset(3)
    assert FORM.record_offset(1) % 4096 == 0
