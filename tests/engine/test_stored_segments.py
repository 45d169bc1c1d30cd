"""Blocks read by key from the segments of a kvd's store, for store-only hand-overs."""

import os
from pathlib import Path

import pytest

from prefill_engine.kv.record import RecordCodec
from prefill_engine.kv.segment_store import FileSegmentStore
from prefill_engine.kv.segments import RecordWrite
from prefill_engine.stored_blocks import read_stored_blocks
from prefill_engine.stored_segments import StoredSegments
from prefill_plan.block_keys import BlockKey
from prefill_plan.config import RecordFormat
from prefill_plan.errors import KvError
from prefill_plan.kv_layout import block_layout
from prefill_plan.kvd_config import KvdStoreConfig
from prefill_plan.model_spec import released_model_spec

LAYOUT = block_layout(released_model_spec(), RecordFormat.FP4)
CODEC = RecordCodec(LAYOUT)
KEYS = [BlockKey(bytes([number]) * 32) for number in range(5)]
PAYLOADS = [bytes([number + 1]) * LAYOUT.payload_bytes for number in range(5)]


def publish(root: Path, numbers: range) -> Path:
    """One segment of these blocks, as a kvd writes it; its file."""
    store = FileSegmentStore(root, geometry=CODEC.shape, config=KvdStoreConfig())
    records = []
    for number in numbers:
        header = CODEC.encode_header(key=KEYS[number], payload=PAYLOADS[number], block_index=number, provenance=0)
        record = (header + PAYLOADS[number]).ljust(LAYOUT.record_bytes, b"\0")
        records.append(RecordWrite(key=KEYS[number], record=memoryview(record)))
    segment = store.publish(records)
    store.close()
    return root / segment.name


def read(segments: StoredSegments, numbers: range) -> bytes:
    return read_stored_blocks(segments, KEYS[numbers.start : numbers.stop], payload_bytes=LAYOUT.payload_bytes)


def test_blocks_of_several_segments_are_read_by_key_also_those_published_since(tmp_path: Path) -> None:
    publish(tmp_path, range(2))
    segments = StoredSegments(tmp_path, LAYOUT)
    assert segments.exists
    assert read(segments, range(2)) == b"".join(PAYLOADS[:2])
    publish(tmp_path, range(2, 5))
    before = sorted(tmp_path.rglob("*"))
    assert read(segments, range(5)) == b"".join(PAYLOADS)
    assert sorted(tmp_path.rglob("*")) == before


def test_block_that_was_never_stored_refuses_the_hand_over(tmp_path: Path) -> None:
    publish(tmp_path, range(2))
    with pytest.raises(KvError, match="block 2 of 3 is missing or damaged"):
        read(StoredSegments(tmp_path, LAYOUT), range(3))


@pytest.mark.parametrize("offset", [0, 100, 800, LAYOUT.payload_bytes], ids=["magic", "header", "first", "last-group"])
def test_damaged_block_refuses_the_hand_over(tmp_path: Path, offset: int) -> None:
    path = publish(tmp_path, range(2))
    with path.open("r+b") as file:
        file.seek(4096 + LAYOUT.record_bytes + offset)
        old = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([old[0] ^ 1]))
    with pytest.raises(KvError, match="block 1 of 2 is missing or damaged"):
        read(StoredSegments(tmp_path, LAYOUT), range(2))


def test_segment_that_was_collected_after_the_scan_is_a_miss(tmp_path: Path) -> None:
    path = publish(tmp_path, range(2))
    segments = StoredSegments(tmp_path, LAYOUT)
    read(segments, range(1))
    path.unlink()
    with pytest.raises(KvError, match="block 0 of 2"):
        read(segments, range(2))


def test_directory_without_segments_says_so(tmp_path: Path) -> None:
    assert not StoredSegments(tmp_path, LAYOUT).exists
