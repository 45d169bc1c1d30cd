"""The file segment store when the medium, a writer or the machine fails: a miss, never a wrong byte, nothing left behind."""

import errno
import logging
import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from prefill_engine.kv.file_operations import FileOperations
from prefill_engine.kv.segment_data import address_of
from prefill_engine.kv.segment_store import FileSegmentStore
from prefill_engine.kv.segments import SegmentInfo
from prefill_plan.errors import ConfigError, StoreUnavailable
from prefill_plan.kvd_config import KvdStoreConfig
from prefill_testing.fault_files import FaultyCall, limit_bytes
from prefill_testing.segments import SHAPE, Clock, Reading, locations, make_records, read

CONFIG = KvdStoreConfig(read_threads=2)


def open_store(path: Path, **changes: Any) -> FileSegmentStore:
    files = replace(FileOperations(), **changes)
    return FileSegmentStore(path, geometry=SHAPE, config=CONFIG, files=files)


def segment_files(path: Path) -> list[Path]:
    """Everything below a generation, temporary files included."""
    return [file for file in path.rglob("*") if file.is_file() and file.name != "store-id"]


# --- publishing (kv.md 8, bug 4: LMCache#4991, a failed store stays visible) ---


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EDQUOT], ids=["ENOSPC", "EIO", "EDQUOT"])
@pytest.mark.parametrize(
    ("operation", "at"),
    [
        ("open", 2),  # of the temporary file, once its directory is there
        ("writev", 1),
        ("fsync", 1),  # of the segment
        ("close", 1),
        ("mkdir", 1),  # of the generation
        ("mkdir", 3),  # of the segment's directory
        ("rename", 1),
        ("open", 3),  # of that directory
        ("fsync", 2),
    ],
    ids=lambda value: str(value),
)
def test_a_failed_publication_leaves_nothing_visible(tmp_path: Path, operation: str, at: int, error: int) -> None:
    faulty: FaultyCall[..., Any] = FaultyCall(getattr(FileOperations(), operation))
    store = open_store(tmp_path, **{operation: faulty})
    faulty.arm(error, at=at)

    with pytest.raises(StoreUnavailable, match=f"2 blocks was not stored: .*{errno.errorcode[error]}.*stay misses"):
        store.publish(make_records("ab"))

    assert list(store.scan()) == []
    assert segment_files(tmp_path) == []
    counts = store.counters()
    assert (counts["publish_failed"], counts["published"], counts["bytes_written"]) == (1, 0, 0)
    assert counts["publish_full"] == (error != errno.EIO)
    segment = store.publish(make_records("ab"))
    assert read(store, locations(segment)).bad == {}


def test_a_disk_that_fills_up_within_a_segment_leaves_nothing_visible(tmp_path: Path) -> None:
    writev = FaultyCall(limit_bytes(os.writev, 1000))
    store = open_store(tmp_path, writev=writev)
    writev.arm(errno.ENOSPC, at=4)

    with pytest.raises(StoreUnavailable, match="ENOSPC"):
        store.publish(make_records("abc"))

    assert segment_files(tmp_path) == []


def test_a_write_that_moves_nothing_is_an_error(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    stuck = open_store(tmp_path, writev=lambda fd, buffers: os.writev(fd, buffers[:1]) if len(buffers) == 1 else 0)
    store.close()

    with pytest.raises(StoreUnavailable, match="nothing was written"):
        stuck.publish(make_records("a"))

    assert segment_files(tmp_path) == []


@pytest.mark.parametrize("max_bytes", [1000, 4096, 100_000])
def test_short_writes_and_reads_are_continued(tmp_path: Path, max_bytes: int) -> None:
    store = open_store(tmp_path, writev=limit_bytes(os.writev, max_bytes), preadv=limit_bytes(os.preadv, max_bytes))

    segment = store.publish(make_records("abc"))

    for group_major in (False, True):
        reading = read(store, locations(segment), group_major=group_major)
        assert [target.tobytes() for target in reading.targets] == [r.record.tobytes() for r in make_records("abc")]


def test_a_segment_has_no_name_before_it_is_synced(tmp_path: Path) -> None:
    calls: list[str] = []
    reader = open_store(tmp_path)

    def watched(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: object) -> Any:
            calls.append(f"{name} {len(list(reader.scan()))}")
            return real(*args)

        return call

    real = FileOperations()
    names = ("writev", "fsync", "close", "rename")
    store = open_store(tmp_path, **{name: watched(name, getattr(real, name)) for name in names})
    calls.clear()
    store.publish(make_records("a"))

    # The first rename fails, for want of the directory; the last two are of the directory that holds the new name.
    assert calls == ["writev 0", "fsync 0", "close 0", "rename 0", "rename 0", "fsync 1", "close 1"]
    assert reader.counters()["bad_toc"] == 0


def write_until_killed(path: Path) -> None:
    """Process: dies when a segment is written but not yet synced."""
    armed: list[bool] = []

    def fsync(fd: int) -> None:
        if armed:
            os.kill(os.getpid(), signal.SIGKILL)
        os.fsync(fd)

    store = open_store(path, fsync=fsync)
    armed.append(True)
    store.publish(make_records("ab"))


def test_a_killed_writer_leaves_a_temporary_file_that_goes_by_age(tmp_path: Path) -> None:
    """Forked, so that the test's own module need not be importable there."""
    process = multiprocessing.get_context("fork").Process(target=write_until_killed, args=(tmp_path,))
    process.start()
    process.join(60)
    assert not process.is_alive(), "the process has not ended within 60 s"
    assert process.exitcode == -signal.SIGKILL
    (temp,) = segment_files(tmp_path)
    clock = Clock()
    store = FileSegmentStore(tmp_path, geometry=SHAPE, config=CONFIG, clock=clock)

    assert list(store.scan()) == []
    store.collect(withdraw=lambda _: None)
    assert temp.exists()
    clock.advance(3601)
    store.collect(withdraw=lambda _: None)

    assert not temp.exists()
    assert store.counters()["stale_temps"] == 1


def test_descriptors_are_closed_whatever_happens(tmp_path: Path) -> None:
    fsync, preadv = FaultyCall(os.fsync), FaultyCall(os.preadv)
    store = open_store(tmp_path, fsync=fsync, preadv=preadv)
    segment = store.publish(make_records("ab"))
    num_open = len(os.listdir("/proc/self/fd"))
    for at in (1, 2):
        fsync.arm(errno.EIO, at=at)
        with pytest.raises(StoreUnavailable):
            store.publish(make_records("c"))
    preadv.arm(errno.EIO)
    read(store, locations(segment))
    (tmp_path / segment.name).unlink()
    read(store, locations(segment))

    assert len(os.listdir("/proc/self/fd")) == num_open


# --- reading ---


@pytest.mark.parametrize("group_major", [False, True], ids=["record_major", "group_major"])
def test_a_bad_sector_costs_one_record(tmp_path: Path, group_major: bool, caplog: pytest.LogCaptureFixture) -> None:
    segment = open_store(tmp_path).publish(make_records("abcde"))
    sector = 4096 + 2 * SHAPE.record_bytes + 100

    def preadv(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if offset <= sector < offset + sum(buffer.nbytes for buffer in buffers):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return os.preadv(fd, buffers, offset)

    store = open_store(tmp_path, preadv=preadv)
    with caplog.at_level(logging.WARNING):
        reading = read(store, locations(segment), group_major=group_major)

    assert reading.bad == {2: "io"}
    assert store.counters()["bad_io"] == 1
    assert store.counters()["opens"] == 1
    assert all(key.hex() not in str(record.__dict__) for record in caplog.records for key in segment.keys)


@pytest.mark.parametrize("error", [errno.EMFILE, errno.EACCES, errno.ENOTCONN, errno.ESTALE])
def test_a_segment_that_cannot_be_opened_is_tried_once_a_job(tmp_path: Path, error: int) -> None:
    segments = [open_store(tmp_path).publish(make_records(labels)) for labels in ("abcdefgh", "ij")]
    opened = FaultyCall(os.open)
    store = open_store(tmp_path, open=opened)
    opened.arm(error)
    before = opened.num_calls

    reading = read(store, locations(*segments))

    assert len(reading.bad) in (2, 8)
    assert set(reading.bad.values()) == {"io"}
    assert opened.num_calls - before == 2
    assert store.counters()["segments_gone"] == (error == errno.ESTALE)
    assert read(store, locations(*segments)).bad == {}


def test_an_end_of_file_in_the_middle_is_short(tmp_path: Path) -> None:
    segment = open_store(tmp_path).publish(make_records("ab"))

    def preadv(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.preadv(fd, [buffers[0][:100]], offset) if buffers[0].nbytes == SHAPE.record_bytes else 0

    store = open_store(tmp_path, preadv=leave_id(preadv))

    assert read(store, locations(segment)).bad == {0: "short", 1: "short"}


def test_a_file_with_a_hole_is_a_hole(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    segment = store.publish(make_records("ab"))
    path = tmp_path / segment.name
    content = path.read_bytes()
    path.unlink()
    with path.open("wb") as file:
        file.write(content[: 4096 + SHAPE.record_bytes])
        file.truncate(len(content))

    assert read(store, locations(segment)).bad == {1: "hole"}


def test_a_directory_in_place_of_a_segment_is_a_miss(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    segment = store.publish(make_records("a"))
    (tmp_path / segment.name).unlink()
    (tmp_path / segment.name).mkdir()

    assert read(store, locations(segment)).bad == {0: "io"}
    assert list(store.scan()) == []


def test_readers_keep_a_deleted_file_until_their_job_ends(tmp_path: Path) -> None:
    """POSIX; on 3FS the grace period does it."""
    segment = open_store(tmp_path).publish(make_records("abcdefghijkl"))
    calls: list[int] = []

    def preadv(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if not calls:
            (tmp_path / segment.name).unlink()
        calls.append(offset)
        return os.preadv(fd, buffers, offset)

    store = open_store(tmp_path, preadv=leave_id(preadv))

    assert read(store, locations(segment), group_major=True).bad == {}


def leave_id(preadv: Callable[..., int]) -> Callable[..., int]:
    """Leaves the read of the store's id alone."""
    return lambda fd, buffers, offset: (
        os.preadv(fd, buffers, offset) if len(buffers[0]) == 4096 else preadv(fd, buffers, offset)
    )


# --- O_DIRECT ---


def direct_store(path: Path, **changes: Any) -> FileSegmentStore:
    config = KvdStoreConfig(read_threads=2, direct_io=True)
    return FileSegmentStore(path, geometry=SHAPE, config=config, files=replace(FileOperations(), **changes))


def test_direct_reads_bypass_the_page_cache(disk_path: Path) -> None:
    flags: list[int] = []

    def watched(path: str, flag: int, mode: int) -> int:
        if path.endswith(".seg"):
            flags.append(flag)
        return os.open(path, flag, mode)

    store = direct_store(disk_path, open=watched)
    segment = store.publish(make_records("ab"))
    assert read(store, locations(segment)).bad == {}

    assert [flag & os.O_DIRECT for flag in flags] == [os.O_DIRECT]


def test_an_unaligned_target_is_refused_before_anything_is_read(disk_path: Path) -> None:
    store = direct_store(disk_path)
    segment = store.publish(make_records("a"))
    reading = Reading(locations(segment))
    memory = bytearray(SHAPE.record_bytes + 4096)
    start = (512 - address_of(memoryview(memory))) % 4096
    target = memoryview(memory)[start : start + SHAPE.record_bytes]

    with pytest.raises(ValueError, match="not aligned to 4096"):
        store.read(replace(reading.job, reads=[replace(reading.job.reads[0], target=target)]))

    assert not any(memory)


def test_a_file_system_without_direct_reads_is_a_configuration_error(tmp_path: Path) -> None:
    def refuse(path: str, flags: int, mode: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
        return os.open(path, flags, mode)

    with pytest.raises(ConfigError, match=r"EINVAL.*with O_DIRECT"):
        direct_store(tmp_path, open=refuse)


def test_records_of_no_whole_pages_cannot_be_read_directly(tmp_path: Path) -> None:
    shape = replace(SHAPE, record_bytes=SHAPE.record_bytes + 1)
    with pytest.raises(ConfigError, match=f"records of {SHAPE.record_bytes + 1} bytes"):
        FileSegmentStore(tmp_path, geometry=shape, config=KvdStoreConfig(direct_io=True))


# --- start ---


@pytest.mark.parametrize(
    ("operation", "error"),
    [
        ("mkdir", errno.EROFS),
        ("mkdir", errno.EACCES),
        ("listdir", errno.EACCES),
        ("open", errno.EROFS),
        ("fsync", errno.EIO),
        ("link", errno.EIO),
        ("preadv", errno.EIO),
    ],
)
def test_a_directory_that_cannot_be_used_is_a_configuration_error(tmp_path: Path, operation: str, error: int) -> None:
    faulty: FaultyCall[..., Any] = FaultyCall(getattr(FileOperations(), operation))
    faulty.arm(error)

    with pytest.raises(ConfigError, match=f"segment store {tmp_path} can't be used: .*{errno.errorcode[error]}"):
        open_store(tmp_path, **{operation: faulty})


def test_a_path_that_is_a_file_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")

    with pytest.raises(ConfigError, match="can't be used"):
        open_store(tmp_path / "file")


def test_a_full_disk_at_start_still_serves_what_is_stored(tmp_path: Path) -> None:
    segment = open_store(tmp_path).publish(make_records("a"))
    writev: FaultyCall[..., int] = FaultyCall(os.writev)
    writev.arm(errno.ENOSPC)

    store = open_store(tmp_path, writev=writev)

    assert read(store, locations(segment)).bad == {}


def test_a_damaged_id_is_a_configuration_error(tmp_path: Path) -> None:
    open_store(tmp_path)
    (tmp_path / "kv" / "store-id").write_bytes(b"short")

    with pytest.raises(ConfigError, match="store-id holds 5 characters"):
        open_store(tmp_path)


def test_a_file_system_without_hard_links_still_has_one_id(tmp_path: Path) -> None:
    def link(source: str, target: str) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM), source, None, target)

    assert open_store(tmp_path, link=link).store_id == open_store(tmp_path, link=link).store_id


def test_segments_survive_the_process(tmp_path: Path) -> None:
    segments: list[SegmentInfo] = [open_store(tmp_path).publish(make_records(labels)) for labels in ("abc", "d")]

    store = open_store(tmp_path)

    assert set(store.scan()) == set(segments)
    assert read(store, locations(*store.scan())).bad == {}
