"""Direct reads pass through huge pages: the same bytes in the slots, never bytes of an earlier read. Advice for other memory."""

import errno
import mmap
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from prefill_engine.kv import huge_pages, segment_data
from prefill_engine.kv.file_operations import FileOperations
from prefill_engine.kv.huge_pages import PIECE_BYTES, HugePieces, advise
from prefill_engine.kv.segment_data import DIRECT_ALIGN, address_of, scatter
from prefill_engine.kv.segment_store import FileSegmentStore
from prefill_plan.kvd_config import KvdStoreConfig
from prefill_testing.segments import SHAPE, Reading, locations, make_records, read


@pytest.mark.parametrize(
    ("text", "is_used"),
    [
        ("always [madvise] never\n", True),
        ("[always] madvise never\n", True),
        ("always madvise [never]\n", False),
        (None, False),
    ],
)
def test_pieces_need_a_kernel_that_gives_huge_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, is_used: bool
) -> None:
    path = tmp_path / "enabled"
    if text is not None:
        path.write_text(text)
    monkeypatch.setattr(huge_pages, "_ENABLED", path)

    assert (HugePieces.of_system() is not None) == is_used


def test_a_piece_is_lent_to_one_at_a_time_and_used_again() -> None:
    pieces = HugePieces()

    with pieces.borrow() as first, pieces.borrow() as second:
        addresses = {address_of(first), address_of(second)}
        assert len(addresses) == 2
        assert {len(first), len(second)} == {PIECE_BYTES}
        assert [address % PIECE_BYTES for address in addresses] == [0, 0]
    with pytest.raises(OSError, match="broken"), pieces.borrow() as third:
        raise OSError("broken")
    with pieces.borrow() as one, pieces.borrow() as other:
        assert {address_of(one), address_of(other)} == addresses
        assert address_of(third) in addresses


@pytest.mark.parametrize(
    ("num_bytes", "filled"),
    [(0, (b"...", b"..")), (2, (b"ab.", b"..")), (3, (b"abc", b"..")), (4, (b"abc", b"d.")), (6, (b"abc", b"de"))],
)
def test_scattering_fills_targets_in_order(num_bytes: int, filled: tuple[bytes, ...]) -> None:
    targets = [bytearray(b"..."), bytearray(b"..")]

    scatter(memoryview(bytearray(b"abcdef"))[:num_bytes], [memoryview(target) for target in targets])

    assert tuple(bytes(target) for target in targets) == filled


def direct_store(path: Path, preadv: Callable[..., int] = os.preadv) -> FileSegmentStore:
    config = KvdStoreConfig(read_threads=1, direct_io=True)
    files = replace(FileOperations(), preadv=preadv)
    return FileSegmentStore(path, geometry=SHAPE, config=config, files=files)


def use_pieces(monkeypatch: pytest.MonkeyPatch, pieces: HugePieces | None) -> None:
    monkeypatch.setattr(HugePieces, "of_system", lambda: pieces)


@pytest.mark.parametrize("way", ["pieces", "no_huge_pages", "longer_than_a_piece"])
def test_records_arrive_either_way(disk_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    use_pieces(monkeypatch, None if way == "no_huge_pages" else HugePieces())
    if way == "longer_than_a_piece":
        monkeypatch.setattr(segment_data, "PIECE_BYTES", DIRECT_ALIGN)
    buffers: list[int] = []

    def preadv(fd: int, targets: Sequence[memoryview], offset: int) -> int:
        buffers.append(len(targets))
        return os.preadv(fd, targets, offset)

    store = direct_store(disk_path, preadv)
    segment = store.publish(make_records("abc"))
    buffers.clear()
    reading = read(store, locations(segment))

    assert [target.tobytes() for target in reading.targets] == [r.record.tobytes() for r in make_records("abc")]
    assert buffers == ([1] if way == "pieces" else [3])
    store.close()


@pytest.mark.parametrize("fault", ["short", "error", "corrupt"])
def test_only_verified_records_reach_their_slots(disk_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    use_pieces(monkeypatch, HugePieces())
    is_broken = False

    def preadv(fd: int, targets: Sequence[memoryview], offset: int) -> int:
        if not is_broken:
            return os.preadv(fd, targets, offset)
        if fault == "error":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if fault == "corrupt":
            num_bytes = os.preadv(fd, targets, offset)
            targets[0][2 * SHAPE.record_bytes - 1] ^= 1
            return num_bytes
        # All of it reaches the piece, and the call says that only the first record did, in no whole pages.
        return min(os.preadv(fd, targets, offset), SHAPE.record_bytes + 1)

    store = direct_store(disk_path, preadv)
    segment = store.publish(make_records("abc"))
    assert read(store, locations(segment)).bad == {}
    is_broken = True
    reading = Reading(locations(segment))
    store.read(reading.job)

    bad = {
        "error": {0: "io", 1: "io", 2: "io"},
        "short": {1: "short", 2: "short"},
        "corrupt": {1: "crc"},
    }[fault]
    assert reading.bad == bad
    assert reading.complete == [index for index in range(3) if index not in bad]
    assert all(reading.is_untouched(index) for index in bad)
    store.close()


@pytest.mark.parametrize("num_bytes", [0, 1, PIECE_BYTES - 1, 3 * PIECE_BYTES])
def test_advice_leaves_memory_as_it_is(num_bytes: int) -> None:
    memory = bytearray(b"\x5a" * num_bytes)

    advise(address_of(memoryview(memory)) if num_bytes else 0, num_bytes)

    assert memory.count(0x5A) == num_bytes


def test_advised_memory_lies_on_huge_pages_where_the_kernel_gives_them() -> None:
    if HugePieces.of_system() is None:
        pytest.skip("this kernel gives no huge pages (/sys/kernel/mm/transparent_hugepage/enabled)")
    memory = memoryview(mmap.mmap(-1, 3 * PIECE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))

    advise(address_of(memory), memory.nbytes)

    assert "hg" in flags_at(-(-address_of(memory) // PIECE_BYTES) * PIECE_BYTES)


def flags_at(address: int) -> list[str]:
    """VmFlags of the mapping that holds an address of this process (proc(5))."""
    is_ours = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            start, end = (int(number, 16) for number in match.groups())
            is_ours = start <= address < end
        elif is_ours and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise LookupError(f"nothing is mapped at {address:#x}")
