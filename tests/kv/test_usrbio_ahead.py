"""A store on USRBIO hands in the reads of a job together, through its own read path; and what it did not need comes back."""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from prefill_engine.kv.segment_store import FileSegmentStore
from prefill_engine.kv.segments import BlockLocation, SegmentInfo
from prefill_engine.kv.usrbio import UsrbioClient
from prefill_engine.kv.usrbio_ahead import WINDOW
from prefill_plan.block_keys import BlockKey
from prefill_testing.segments import NUM_GROUPS, SHAPE, Reading, locations, make_records, read
from prefill_testing.usrbio_rig import Fake, config_of, open_store

Wanted = Sequence[tuple[BlockKey, BlockLocation]]


@pytest.fixture
def store(hf3fs: Fake) -> Iterator[FileSegmentStore]:
    client = UsrbioClient(config_of(hf3fs), sync=os.fsync, deadline_seconds=20.0)
    yield open_store(hf3fs, client)
    client.close_rings()


def publish(store: FileSegmentStore, count: int) -> list[SegmentInfo]:
    """Segments of one record: each is a strip, and an IO, of its own."""
    return [store.publish(make_records([f"record {number}"])) for number in range(count)]


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline, "not so within 20 s"
        time.sleep(0.002)


def read_from_standstill(
    hf3fs: Fake, store: FileSegmentStore, wanted: Wanted, *, at_once: int, group_major: bool = False
) -> tuple[Reading, int]:
    """Reads while the daemon stands still until so many IOs are prepared; the reading, and by how many submits they were."""
    prepared, submits = hf3fs.count("prepared"), hf3fs.count("submits")
    readings: list[Reading] = []
    hf3fs.pause(True)
    thread = threading.Thread(target=lambda: readings.append(read(store, wanted, group_major=group_major)))
    thread.start()
    try:
        wait_until(lambda: hf3fs.count("prepared") - prepared >= at_once and hf3fs.count("submits") > submits)
        assert hf3fs.count("prepared") - prepared == at_once
        num_submits = hf3fs.count("submits") - submits
    finally:
        hf3fs.pause(False)
        thread.join(60)
    assert not thread.is_alive(), "the read has not ended within 60 s"
    return readings[0], num_submits


@pytest.mark.parametrize("group_major", [False, True], ids=["record_major", "group_major"])
def test_all_strips_of_a_job_are_one_submit_and_one_batch(
    hf3fs: Fake, store: FileSegmentStore, group_major: bool
) -> None:
    """More IOs than threads (3), while none of them has ended."""
    count = WINDOW // NUM_GROUPS if group_major else WINDOW - 2
    num_ios = count * NUM_GROUPS if group_major else count
    wanted = locations(*publish(store, count))

    reading, num_submits = read_from_standstill(hf3fs, store, wanted, at_once=num_ios, group_major=group_major)

    assert reading.bad == {}
    assert num_submits == 1
    assert hf3fs.count("max_batch") == num_ios > 3
    assert hf3fs.count("violations") == 0


def test_a_long_job_keeps_the_ring_filled_up_to_the_window(hf3fs: Fake, store: FileSegmentStore) -> None:
    wanted = locations(*publish(store, 3 * WINDOW))
    submits = hf3fs.count("submits")

    reading, num_submits = read_from_standstill(hf3fs, store, wanted, at_once=WINDOW)

    assert (reading.bad, num_submits) == ({}, 1)
    assert hf3fs.count("submits") - submits < WINDOW  # one more for each half of a window
    assert hf3fs.count("registered") == hf3fs.count("deregistered")


def test_a_job_that_is_cancelled_gives_buffers_and_descriptors_back(hf3fs: Fake, store: FileSegmentStore) -> None:
    wanted = locations(*publish(store, WINDOW - 2))
    for _ in range(5):  # more than all buffers
        cancelled = Reading(wanted, is_cancelled=lambda: True)
        store.read(cancelled.job)
        assert (cancelled.groups, cancelled.bad) == ({}, {})
    assert hf3fs.count("registered") == hf3fs.count("deregistered")

    await_all_buffers(hf3fs, store, wanted)


def test_damaged_records_do_not_hold_what_was_read_ahead_of_them(hf3fs: Fake, store: FileSegmentStore) -> None:
    """Of a bad header the other groups are never asked for."""
    segments = publish(store, 2 * WINDOW)
    wanted = locations(*segments)
    for segment in segments[::2]:
        with open(f"{hf3fs.mount}/store/{segment.name}", "r+b") as file:
            file.seek(4096)
            file.write(b"\xff" * SHAPE.header_bytes)

    reading = read(store, wanted, group_major=True)

    assert sorted(reading.bad) == list(range(0, 2 * WINDOW, 2))
    await_all_buffers(hf3fs, store, wanted[1 : WINDOW - 2 : 2])


def test_a_segment_that_is_gone_costs_its_own_blocks(hf3fs: Fake, store: FileSegmentStore) -> None:
    segments = publish(store, 8)
    os.unlink(f"{hf3fs.mount}/store/{segments[3].name}")

    reading, num_submits = read_from_standstill(hf3fs, store, locations(*segments), at_once=7)

    assert (reading.bad, num_submits) == ({3: "io"}, 1)
    assert store.counters()["segments_gone"] == 1


def test_a_record_may_be_wanted_twice(store: FileSegmentStore) -> None:
    wanted = locations(*publish(store, 3))

    assert read(store, [*wanted, *wanted]).bad == {}
    assert read(store, [*wanted, *wanted], group_major=True).bad == {}


def test_jobs_that_want_more_than_all_buffers_share_them(hf3fs: Fake, store: FileSegmentStore) -> None:
    wanted = locations(*publish(store, 2 * WINDOW))
    failures: list[object] = []
    threads = [
        threading.Thread(target=lambda: failures.append(read(store, wanted, group_major=True).bad)) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "the other thread has not ended within 60 s"

    assert failures == [{}] * 4
    await_all_buffers(hf3fs, store, wanted[: WINDOW - 2])


def await_all_buffers(hf3fs: Fake, store: FileSegmentStore, wanted: Wanted) -> None:
    """The ring's threads hand buffers back one by one; with all of them a job is one submit again."""

    def is_one_submit() -> bool:
        submits = hf3fs.count("submits")
        assert read(store, wanted).bad == {}
        return hf3fs.count("submits") - submits == 1

    wait_until(is_one_submit)
