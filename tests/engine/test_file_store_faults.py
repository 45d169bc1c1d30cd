"""The file store when the medium, a writer or the machine fails: a miss, never a wrong byte, nothing left behind."""

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

from prefill_engine.kv.file_operations import FileOperations, rename_new
from prefill_engine.kv.file_store import FileStore
from prefill_engine.kv.store import StoredBlock
from prefill_plan.block_keys import BlockKey
from prefill_plan.errors import ConfigError, StoreUnavailable
from prefill_testing.blocks import make_key, make_payload, tiny_layout
from prefill_testing.fault_files import FaultyCall, die_writing, limit_bytes, write_blocks

LAYOUT = tiny_layout()
KEY = make_key("a")
PAYLOAD = make_payload(LAYOUT, "a")


def read(store: FileStore, key: BlockKey = KEY) -> bytes | None:
    out = bytearray(LAYOUT.payload_bytes)
    return None if store.read(key, memoryview(out)) is None else bytes(out)


def write(store: FileStore, key: BlockKey = KEY, payload: bytes = PAYLOAD) -> bool:
    return store.write(key, payload, block_index=0, provenance=0)


def files_below(path: Path, part: str) -> list[Path]:
    return [file for file in (path / part).rglob("*") if file.is_file()]


# --- writing ---


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO], ids=["ENOSPC", "EIO"])
@pytest.mark.parametrize(
    ("operation", "at"),
    [
        ("stat", 1),
        ("open", 1),  # of the temporary file
        ("writev", 1),
        ("fsync", 1),  # of the record
        ("close", 1),
        ("link", 1),
        ("mkdir", 1),
        ("fsync", 2),  # of blocks/, for the new directory in it
        ("fsync", 3),  # of that directory, for the record
    ],
    ids=lambda value: str(value),
)
def test_a_failed_write_leaves_a_miss_and_no_file(tmp_path: Path, operation: str, at: int, error: int) -> None:
    faulty: FaultyCall[..., Any] = FaultyCall(getattr(FileOperations(), operation))
    changes: dict[str, Any] = {operation: faulty}
    store = FileStore(tmp_path, LAYOUT, files=replace(FileOperations(), **changes))
    faulty.arm(error, at=at)

    with pytest.raises(StoreUnavailable, match=f"not stored: .*{errno.errorcode[error]}.*stays a miss"):
        write(store)

    assert read(store) is None
    assert store.count_present([KEY]) == 0
    # A failed close may or may not have closed; either way no name is left.
    assert files_below(tmp_path, "tmp") == files_below(tmp_path, "blocks") == []
    counts = store.counters()
    assert (counts["write_errors"], counts["writes"], counts["bytes_written"]) == (1, 0, 0)
    assert write(store)
    assert read(store) == PAYLOAD


def test_a_disk_that_fills_up_within_a_record_leaves_a_miss(tmp_path: Path) -> None:
    faulty = FaultyCall(limit_bytes(os.writev, 1000))
    store = FileStore(tmp_path, LAYOUT, files=replace(FileOperations(), writev=faulty))
    faulty.arm(errno.ENOSPC, at=4)

    with pytest.raises(StoreUnavailable, match="ENOSPC"):
        write(store)

    assert read(store) is None
    assert files_below(tmp_path, "tmp") == []


@pytest.mark.parametrize("max_bytes", [1, 999, 4096])
def test_short_writes_and_reads_are_continued(tmp_path: Path, max_bytes: int) -> None:
    files = replace(
        FileOperations(),
        writev=limit_bytes(os.writev, max(max_bytes, 100)),
        preadv=limit_bytes(os.preadv, max(max_bytes, 100)),
    )
    store = FileStore(tmp_path, LAYOUT, files=files)
    write(store)

    assert read(store) == PAYLOAD
    assert read(FileStore(tmp_path, LAYOUT)) == PAYLOAD


def test_a_reader_sees_a_miss_until_the_record_is_published(tmp_path: Path) -> None:
    seen: list[tuple[str, bytes | None, int]] = []
    reader = FileStore(tmp_path, LAYOUT)

    def watched(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: object) -> Any:
            seen.append((f"before {name}", read(reader), reader.count_present([KEY])))
            result = real(*args)
            seen.append((f"after {name}", read(reader), reader.count_present([KEY])))
            return result

        return call

    real = FileOperations()
    # A real writer pauses anywhere: between two chunks, before and after fsync, around the link.
    files = replace(real, writev=watched("writev", limit_bytes(os.writev, 5000)), link=watched("link", os.link))
    store = FileStore(tmp_path, LAYOUT, files=files)
    seen.clear()
    write(store)

    *before, after = seen
    assert len(before) > 4
    assert {(payload, present) for _, payload, present in before} == {(None, 0)}
    assert after == ("after link", PAYLOAD, 1)


def test_a_writer_that_loses_the_race_keeps_the_winners_record(tmp_path: Path) -> None:
    winner = FileStore(tmp_path, LAYOUT)
    other = make_payload(LAYOUT, "other")

    def link(source: str, target: str) -> None:
        if target.endswith(".kv"):
            write(winner)
        os.link(source, target)

    store = FileStore(tmp_path, LAYOUT, files=replace(FileOperations(), link=link))

    assert write(store, payload=other)

    assert read(store) == PAYLOAD
    assert files_below(tmp_path, "tmp") == []
    assert store.counters()["writes_present"] == 1


def test_a_file_system_without_hard_links_is_served_by_rename(tmp_path: Path) -> None:
    def link(source: str, target: str) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM), source, None, target)

    store = FileStore(tmp_path, LAYOUT, files=replace(FileOperations(), link=link))

    assert write(store)
    assert write(store, payload=make_payload(LAYOUT, "other"))

    assert read(store) == PAYLOAD
    assert files_below(tmp_path, "tmp") == []


def test_rename_new_does_not_replace_a_file(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(b"new")
    target.write_bytes(b"old")

    with pytest.raises(FileExistsError):
        rename_new(str(source), str(target))
    assert target.read_bytes() == b"old"
    rename_new(str(source), str(tmp_path / "other"))
    assert (tmp_path / "other").read_bytes() == b"new"


# --- reading ---


def test_a_read_error_is_a_miss_and_leaves_the_record(tmp_path: Path) -> None:
    preadv = FaultyCall(os.preadv)
    store = FileStore(tmp_path, LAYOUT, files=replace(FileOperations(), preadv=preadv))
    write(store)
    preadv.arm(errno.EIO)

    assert read(store) is None
    assert store.counters()["read_errors"] == 1
    assert read(store) == PAYLOAD


def test_a_stat_error_ends_the_count_of_present_keys(tmp_path: Path) -> None:
    stat: FaultyCall[..., os.stat_result] = FaultyCall(os.stat)
    store = FileStore(tmp_path, LAYOUT, files=replace(FileOperations(), stat=stat))
    write(store)
    stat.arm(errno.EIO, at=2)

    assert store.count_present([KEY, KEY, KEY]) == 1
    assert store.counters()["read_errors"] == 1


def test_an_end_of_file_in_the_middle_is_a_short_record(tmp_path: Path) -> None:
    def preadv(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.preadv(fd, [buffers[0][:100]], offset) if offset == 0 else 0

    write(FileStore(tmp_path, LAYOUT))
    store = FileStore(tmp_path, LAYOUT, files=replace(FileOperations(), preadv=preadv))

    assert read(store) is None
    assert store.counters()["verify_fail_short"] == 1


def test_counting_present_keys_opens_and_reads_nothing(tmp_path: Path) -> None:
    opened, preadv = FaultyCall(os.open), FaultyCall(os.preadv)
    store = FileStore(tmp_path, LAYOUT, files=replace(FileOperations(), open=opened, preadv=preadv))
    write(store)
    num_opened = opened.num_calls

    assert store.count_present([KEY, make_key("b")]) == 1

    assert (opened.num_calls, preadv.num_calls) == (num_opened, 0)


def test_a_corrupt_record_is_removed_and_logged_without_its_key(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = FileStore(tmp_path, LAYOUT)
    write(store)
    (file,) = files_below(tmp_path, "blocks")
    file.write_bytes(file.read_bytes()[:-1] + b"\0")

    with caplog.at_level(logging.WARNING):
        assert read(store) is None

    assert not file.exists()
    (record,) = caplog.records
    assert record.__dict__["reason"] == "crc"
    assert KEY.hex() not in str(record.__dict__)


def test_a_corrupt_record_that_cannot_be_removed_stays_a_miss(tmp_path: Path) -> None:
    unlink = FaultyCall(os.unlink)
    store = FileStore(tmp_path, LAYOUT, files=replace(FileOperations(), unlink=unlink))
    write(store)
    (file,) = files_below(tmp_path, "blocks")
    file.write_bytes(b"foreign")
    unlink.arm(errno.EROFS)

    assert read(store) is None
    assert file.exists()
    assert read(store) is None
    assert store.counters()["verify_fail_short"] == 2


def test_a_foreign_directory_in_place_of_a_record_is_a_miss(tmp_path: Path) -> None:
    store = FileStore(tmp_path, LAYOUT)
    write(store)
    (file,) = files_below(tmp_path, "blocks")
    file.unlink()
    file.mkdir()

    assert read(store) is None
    assert store.counters()["read_errors"] == 1


def test_descriptors_are_closed_whatever_happens(tmp_path: Path) -> None:
    fsync, preadv = FaultyCall(os.fsync), FaultyCall(os.preadv)
    store = FileStore(tmp_path, LAYOUT, files=replace(FileOperations(), fsync=fsync, preadv=preadv))
    num_open = len(os.listdir("/proc/self/fd"))
    for at in (1, 2):
        fsync.arm(errno.EIO, at=at)
        with pytest.raises(StoreUnavailable):
            write(store)
    write(store)
    preadv.arm(errno.EIO)
    read(store)
    read(store)

    assert len(os.listdir("/proc/self/fd")) == num_open


# --- processes ---


def test_processes_that_write_the_same_keys_leave_one_whole_record_each(tmp_path: Path) -> None:
    labels, writers = [f"block {number}" for number in range(12)], ["x", "y", "z"]
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(len(writers) + 1)
    processes = [context.Process(target=write_blocks, args=(tmp_path, writer, labels, barrier)) for writer in writers]
    for process in processes:
        process.start()
    store = FileStore(tmp_path, LAYOUT)
    barrier.wait()
    seen: list[tuple[str, bytes]] = []
    while any(process.is_alive() for process in processes):
        for label in labels:
            payload = read(store, make_key(label))
            if payload is not None:
                seen.append((label, payload))
    for process in processes:
        process.join()

    assert [process.exitcode for process in processes] == [0, 0, 0]
    final = {label: read(store, make_key(label)) for label in labels}
    for label, payload in final.items():
        assert payload in {make_payload(LAYOUT, f"{label} by {writer}") for writer in writers}
    # Once published, a record never changes.
    assert all(payload == final[label] for label, payload in seen)
    assert len(files_below(tmp_path, "blocks")) == len(labels)
    assert files_below(tmp_path, "tmp") == []
    counts = store.counters()
    assert counts["read_errors"] == sum(count for name, count in counts.items() if name.startswith("verify_fail")) == 0


def test_a_writer_killed_before_fsync_leaves_a_miss_and_a_temp_that_goes_by_age(tmp_path: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(target=die_writing, args=(tmp_path, "a"))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    (temp,) = files_below(tmp_path, "tmp")
    assert temp.stat().st_size == LAYOUT.record_bytes

    early = FileStore(tmp_path, LAYOUT, temp_max_age_seconds=60, clock=lambda: temp.stat().st_mtime + 59)
    assert read(early) is None
    assert temp.exists()

    late = FileStore(tmp_path, LAYOUT, temp_max_age_seconds=60, clock=lambda: temp.stat().st_mtime + 61)
    assert not temp.exists()
    assert late.counters()["stale_temps"] == 1
    assert write(late)
    assert read(late) == PAYLOAD


# --- start ---


def test_a_new_store_serves_what_an_earlier_one_wrote(tmp_path: Path) -> None:
    FileStore(tmp_path / "new" / "store", LAYOUT).write(KEY, PAYLOAD, block_index=5, provenance=1)

    store = FileStore(tmp_path / "new" / "store", LAYOUT)

    out = bytearray(LAYOUT.payload_bytes)
    assert store.read(KEY, memoryview(out)) == StoredBlock(block_index=5, provenance=1)
    assert out == PAYLOAD


@pytest.mark.parametrize(
    ("operation", "error"),
    [
        ("mkdir", errno.EROFS),
        ("mkdir", errno.EACCES),
        ("listdir", errno.EACCES),
        ("open", errno.EACCES),
        ("open", errno.EROFS),
        ("fsync", errno.EIO),
        ("link", errno.EIO),
    ],
    ids=lambda value: value if isinstance(value, str) else errno.errorcode[value],
)
def test_a_directory_that_cannot_be_used_is_a_config_error(tmp_path: Path, operation: str, error: int) -> None:
    faulty: FaultyCall[..., Any] = FaultyCall(getattr(FileOperations(), operation))
    changes: dict[str, Any] = {operation: faulty}
    faulty.arm(error)

    with pytest.raises(ConfigError) as caught:
        FileStore(tmp_path, LAYOUT, files=replace(FileOperations(), **changes))

    assert str(tmp_path) in caught.value.message
    assert f"{os.strerror(error)} ({errno.errorcode[error]})" in caught.value.message
    assert files_below(tmp_path, "tmp") == []


def test_a_path_that_is_a_file_is_a_config_error(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"")

    with pytest.raises(ConfigError, match=f"store directory {file} can't be used: File exists"):
        FileStore(file, LAYOUT)
    with pytest.raises(ConfigError, match=r"Not a directory \(ENOTDIR\)"):
        FileStore(file / "below", LAYOUT)


def test_a_file_system_with_neither_link_nor_rename_is_a_config_error(tmp_path: Path) -> None:
    def refuse(source: str, target: str) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), source, None, target)

    with pytest.raises(ConfigError, match="ENOSYS"):
        FileStore(tmp_path, LAYOUT, files=replace(FileOperations(), link=refuse, rename_new=refuse))


def test_a_full_disk_at_start_still_serves_what_is_stored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(FileStore(tmp_path, LAYOUT))
    link: FaultyCall[..., None] = FaultyCall(os.link)
    link.arm(errno.ENOSPC)

    with caplog.at_level(logging.WARNING):
        store = FileStore(tmp_path, LAYOUT, files=replace(FileOperations(), link=link))

    assert read(store) == PAYLOAD
    assert "store is full" in caplog.text
