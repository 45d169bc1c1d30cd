"""One suite for every BlockStore; a new implementation joins by a Medium of its own."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import pytest

from prefill_engine.kv.file_store import FileStore
from prefill_engine.kv.memory_store import MemoryStore
from prefill_engine.kv.record import RecordCodec
from prefill_engine.kv.store import BlockStore, StoredBlock
from prefill_plan.block_keys import BlockKey
from prefill_plan.config import RecordFormat
from prefill_plan.errors import StoreUnavailable
from prefill_plan.kv_layout import block_layout
from prefill_testing.blocks import make_key, make_payload, tiny_layout, tiny_spec

LAYOUT = tiny_layout()
KEY = make_key("a")
PAYLOAD = make_payload(LAYOUT, "a")


class Medium(Protocol):
    """A store and a way behind its back."""

    store: BlockStore

    def load(self, key: BlockKey) -> bytes: ...

    def place(self, key: BlockKey, record: bytes) -> None: ...


class MemoryMedium:
    def __init__(self) -> None:
        self._records: OrderedDict[BlockKey, bytes] = OrderedDict()
        self.store: BlockStore = MemoryStore(LAYOUT, max_bytes=100 * LAYOUT.record_bytes, records=self._records)

    def load(self, key: BlockKey) -> bytes:
        return self._records[key]

    def place(self, key: BlockKey, record: bytes) -> None:
        self._records[key] = record


class FileMedium:
    def __init__(self, path: Path) -> None:
        self._path = path
        self.store: BlockStore = FileStore(path, LAYOUT)

    def load(self, key: BlockKey) -> bytes:
        return self._file(key).read_bytes()

    def place(self, key: BlockKey, record: bytes) -> None:
        self._file(key).parent.mkdir(exist_ok=True)
        self._file(key).write_bytes(record)

    def _file(self, key: BlockKey) -> Path:
        return self._path / "blocks" / key.hex()[:2] / f"{key.hex()}.kv"


@pytest.fixture(params=["memory", "file"])
def medium(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Medium]:
    medium: Medium = MemoryMedium() if request.param == "memory" else FileMedium(tmp_path / "store")
    yield medium
    medium.store.close()


def read(store: BlockStore, key: BlockKey) -> tuple[StoredBlock | None, bytes]:
    out = bytearray(LAYOUT.payload_bytes)
    return store.read(key, memoryview(out)), bytes(out)


def write(store: BlockStore, key: BlockKey, payload: bytes = PAYLOAD) -> bool:
    return store.write(key, payload, block_index=3, provenance=0)


def test_read_returns_the_payload_written_and_what_the_record_says(medium: Medium) -> None:
    assert medium.store.write(KEY, memoryview(PAYLOAD), block_index=780, provenance=1)

    assert read(medium.store, KEY) == (StoredBlock(block_index=780, provenance=1), PAYLOAD)
    counts = medium.store.counters()
    assert (counts["hits"], counts["misses"], counts["writes"]) == (1, 0, 1)
    assert (counts["bytes_read"], counts["bytes_written"]) == (LAYOUT.payload_bytes, LAYOUT.record_bytes)


def test_an_absent_key_is_a_miss_and_no_failure(medium: Medium) -> None:
    write(medium.store, make_key("b"))

    assert read(medium.store, KEY)[0] is None
    counts = medium.store.counters()
    assert (counts["hits"], counts["misses"]) == (0, 1)
    assert not any(count for name, count in counts.items() if name.startswith("verify_fail") or name == "read_errors")


def test_a_second_write_leaves_the_first_payload(medium: Medium) -> None:
    write(medium.store, KEY)

    assert write(medium.store, KEY, make_payload(LAYOUT, "other"))

    assert read(medium.store, KEY)[1] == PAYLOAD
    counts = medium.store.counters()
    assert (counts["writes"], counts["writes_present"]) == (1, 1)


def test_count_present_stops_at_the_first_missing_key(medium: Medium) -> None:
    keys = [make_key(label) for label in "abcd"]
    for key in (keys[0], keys[1], keys[3]):
        write(medium.store, key)

    assert medium.store.count_present(keys) == 2
    assert medium.store.count_present(keys[:2]) == 2
    assert medium.store.count_present([]) == 0
    assert medium.store.counters()["bytes_read"] == 0


def flip(offset: int) -> Callable[[bytes], bytes]:
    return lambda record: record[:offset] + bytes([record[offset] ^ 0x10]) + record[offset + 1 :]


def other_key_record(record: bytes) -> bytes:
    return RecordCodec(LAYOUT).encode_header(
        key=make_key("b"), payload=record[LAYOUT.header_bytes :], block_index=0, provenance=0
    ) + bytes(record[LAYOUT.header_bytes :])


def other_layout_record(record: bytes) -> bytes:
    """A whole record of the other format under the same key, cut or filled to our size."""
    other = block_layout(tiny_spec(), RecordFormat.FP8)
    payload = make_payload(other, "a")
    header = RecordCodec(other).encode_header(key=KEY, payload=payload, block_index=0, provenance=0)
    return (header + payload)[: len(record)].ljust(len(record), b"\0")


def renamed_layout_record(record: bytes) -> bytes:
    """Our sizes, a valid header, another layout id: what a model with other source layers would write."""
    sources = tuple(
        type(source)(**{name: getattr(source, name) for name in source.__struct_fields__} | {"layer": source.layer + 1})
        for source in LAYOUT.sources
    )
    other = type(LAYOUT)(**{name: getattr(LAYOUT, name) for name in LAYOUT.__struct_fields__} | {"sources": sources})
    payload = record[LAYOUT.header_bytes :]
    return RecordCodec(other).encode_header(key=KEY, payload=payload, block_index=0, provenance=0) + payload


LAST_GROUP = LAYOUT.header_bytes + LAYOUT.sources[-1].group_offset


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (flip(LAYOUT.header_bytes), "crc"),
        (flip(LAST_GROUP + 5), "crc"),
        (flip(LAYOUT.record_bytes - 1), "crc"),
        (flip(10), "crc"),
        (flip(70), "crc"),
        (flip(LAYOUT.header_bytes - 1), "crc"),
        (lambda record: bytes(LAYOUT.header_bytes) + record[LAYOUT.header_bytes :], "layout"),
        (lambda record: b"\0" * len(record), "layout"),
        (flip(0), "layout"),
        (flip(8), "layout"),
        (lambda record: record + b"x", "layout"),
        (renamed_layout_record, "layout"),
        (other_layout_record, "crc"),
        (other_key_record, "key"),
        (lambda record: record[:-1], "short"),
        (lambda record: record[: LAYOUT.header_bytes - 1], "short"),
        (lambda record: record[:0], "short"),
    ],
    ids=[
        "first_payload_byte",
        "last_group",
        "last_payload_byte",
        "provenance",
        "group_checksum",
        "header_checksum",
        "zero_header",
        "all_zero",
        "magic",
        "version",
        "one_byte_more",
        "other_sources",
        "other_format",
        "other_key",
        "one_byte_less",
        "half_a_header",
        "empty",
    ],
)
def test_a_damaged_record_is_a_counted_miss_and_can_be_written_again(
    medium: Medium, damage: Callable[[bytes], bytes], reason: str
) -> None:
    write(medium.store, KEY)
    medium.place(KEY, damage(medium.load(KEY)))

    assert read(medium.store, KEY)[0] is None

    counts = medium.store.counters()
    failures = {name: count for name, count in counts.items() if name.startswith("verify_fail") and count}
    assert failures == {f"verify_fail_{reason}": 1}
    assert (counts["hits"], counts["misses"]) == (0, 1)
    assert medium.store.count_present([KEY]) == 0
    assert write(medium.store, KEY)
    assert read(medium.store, KEY) == (StoredBlock(block_index=3, provenance=0), PAYLOAD)


@pytest.mark.parametrize("payload", [PAYLOAD[:-1], PAYLOAD + b"x", b""], ids=["short", "long", "empty"])
def test_a_payload_of_another_size_is_refused(medium: Medium, payload: bytes) -> None:
    with pytest.raises(ValueError, match=f"payload has {len(payload)} bytes.*expected {LAYOUT.payload_bytes} bytes"):
        write(medium.store, KEY, payload)
    assert medium.store.count_present([KEY]) == 0


def test_a_key_of_another_size_is_refused(medium: Medium) -> None:
    with pytest.raises(ValueError, match="key of 5 bytes"):
        write(medium.store, BlockKey(b"short"))


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (memoryview(bytearray(LAYOUT.payload_bytes - 1)), "expected [0-9]+ bytes in one dimension"),
        (memoryview(bytes(LAYOUT.payload_bytes)), "read-only"),
    ],
    ids=["short", "read_only"],
)
def test_a_buffer_that_cannot_take_a_payload_is_refused(medium: Medium, out: memoryview, message: str) -> None:
    write(medium.store, KEY)

    with pytest.raises(ValueError, match=message):
        medium.store.read(KEY, out)


def test_a_closed_store_is_unavailable(medium: Medium) -> None:
    write(medium.store, KEY)
    medium.store.close()
    medium.store.close()

    with pytest.raises(StoreUnavailable, match="closed"):
        read(medium.store, KEY)
    with pytest.raises(StoreUnavailable, match="closed"):
        write(medium.store, KEY)
    with pytest.raises(StoreUnavailable, match="closed"):
        medium.store.count_present([KEY])


def test_threads_that_write_the_same_keys_leave_one_whole_record_each(medium: Medium) -> None:
    keys = [make_key(str(index)) for index in range(4)]
    barrier = threading.Barrier(3)
    seen: list[bytes] = []

    def work(writer: str) -> None:
        barrier.wait()
        for key in keys:
            write(medium.store, key, make_payload(LAYOUT, writer))
            info, payload = read(medium.store, key)
            assert info is not None
            seen.append(payload)

    threads = [threading.Thread(target=work, args=(writer,)) for writer in "xyz"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(seen) == 12
    assert set(seen) <= {make_payload(LAYOUT, writer) for writer in "xyz"}
    counts = medium.store.counters()
    assert (counts["writes"], counts["writes_present"], counts["hits"], counts["misses"]) == (4, 8, 12, 0)
    assert counts["bytes_read"] == 12 * LAYOUT.payload_bytes


# --- what only the memory store does ---


def test_memory_store_evicts_the_least_recently_used_record() -> None:
    store = MemoryStore(LAYOUT, max_bytes=2 * LAYOUT.record_bytes + 1)
    keys = [make_key(label) for label in "abc"]
    write(store, keys[0])
    write(store, keys[1])
    read(store, keys[0])

    assert write(store, keys[2])

    assert [store.count_present([key]) for key in keys] == [1, 0, 1]
    assert store.counters()["evicted"] == 1


def test_memory_store_without_room_says_that_nothing_is_present() -> None:
    store = MemoryStore(LAYOUT, max_bytes=0)

    assert not write(store, KEY)
    assert store.count_present([KEY]) == 0
