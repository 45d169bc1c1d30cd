import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefill_engine.kv.record import VerifyFailure
from prefill_engine.kv.snapshot_record import HEADER_FIELDS, SNAPSHOT_KEY_BYTES, SnapshotCodec, SnapshotInfo
from prefill_plan.block_keys import snapshot_key
from prefill_testing.blocks import make_key

DIGEST = bytes(range(32))
PAYLOAD = bytes(range(256)) * 20
CODEC = SnapshotCodec(DIGEST, len(PAYLOAD))
KEY = snapshot_key(make_key("a"))


def make_record(*, generation: int = 9, payload: bytes = PAYLOAD, key: bytes = KEY) -> bytearray:
    header = CODEC.encode_header(
        key=key, position=384, first_valid=256, exact=False, generation=generation, payload=payload
    )
    record = bytearray(CODEC.record_bytes)
    record[: len(header)] = header
    record[len(header) : len(header) + len(payload)] = payload
    return record


def test_header_fields_lie_where_the_table_says() -> None:
    end = 0
    for name, offset, size, code in HEADER_FIELDS:
        assert offset == end, name
        assert struct.calcsize(f"<{code}") == size, name
        end = offset + size


def test_record_of_the_released_model_has_the_size_of_the_spec() -> None:
    assert SnapshotCodec(DIGEST, 1_415_040).record_bytes == 347 * 4096  # kv.md 7.2: 1,421,312
    assert 347 * 4096 == 1_421_312


def test_written_record_verifies_and_tells_its_fields() -> None:
    record = make_record()
    assert CODEC.verify(record, key=KEY) is None
    assert CODEC.decode_info(record) == SnapshotInfo(position=384, first_valid=256, exact=False, generation=9)
    assert CODEC.find_key(record) == KEY


@given(st.integers(0, 4096 + len(PAYLOAD) - 1), st.integers(1, 255))
def test_any_flipped_byte_fails(offset: int, flip: int) -> None:
    record = make_record()
    record[offset] ^= flip
    assert CODEC.verify(record, key=KEY) is not None


@given(st.integers(1, len(PAYLOAD) - 1))
def test_mix_of_two_writings_fails(cut: int) -> None:
    """A torn read: the old header with part of the next writing behind it."""
    old, new = make_record(generation=1), make_record(generation=2, payload=PAYLOAD[::-1])
    at = len(old) - len(PAYLOAD) + cut
    torn = old[:at] + new[at:]
    if bytes(torn) != bytes(old):
        assert CODEC.verify(torn, key=KEY) is VerifyFailure.CRC


def test_same_payload_of_another_generation_fails() -> None:
    old, new = make_record(generation=1), make_record(generation=2)
    assert struct.unpack_from("<I", old, 12) != struct.unpack_from("<I", new, 12)


@pytest.mark.parametrize(
    ("codec", "key", "length", "failure"),
    [
        (CODEC, snapshot_key(make_key("b")), None, VerifyFailure.KEY),
        (SnapshotCodec(bytes(32), len(PAYLOAD)), KEY, None, VerifyFailure.LAYOUT),
        (SnapshotCodec(DIGEST, len(PAYLOAD) - 5000), KEY, None, VerifyFailure.LAYOUT),
        (CODEC, KEY, 4096 + len(PAYLOAD) - 1, VerifyFailure.SHORT),
        (CODEC, KEY, 10, VerifyFailure.SHORT),
    ],
    ids=["key", "layout", "size", "short", "very-short"],
)
def test_foreign_record_fails(codec: SnapshotCodec, key: bytes, length: int | None, failure: VerifyFailure) -> None:
    assert codec.verify(make_record()[:length], key=key) is failure


def test_empty_memory_is_no_record() -> None:
    assert CODEC.verify(bytes(CODEC.record_bytes), key=KEY) is VerifyFailure.LAYOUT
    assert CODEC.find_key(bytes(CODEC.record_bytes)) is None


@pytest.mark.parametrize(
    "change", [{"key": KEY[1:]}, {"payload": PAYLOAD[1:]}, {"first_valid": 385}], ids=lambda change: next(iter(change))
)
def test_wrong_arguments_are_refused(change: dict[str, object]) -> None:
    arguments = {
        "key": KEY,
        "position": 384,
        "first_valid": 0,
        "exact": True,
        "generation": 1,
        "payload": PAYLOAD,
        **change,
    }
    with pytest.raises(ValueError, match=f"{SNAPSHOT_KEY_BYTES}"):
        CODEC.encode_header(**arguments)
