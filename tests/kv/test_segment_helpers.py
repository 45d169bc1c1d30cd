"""The threads of a read job: how many there are, and what becomes of them at its end."""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from prefill_engine.kv.file_operations import FileOperations
from prefill_engine.kv.segment_helpers import Helpers
from prefill_engine.kv.segment_store import FileSegmentStore
from prefill_plan.kvd_config import KvdStoreConfig
from prefill_testing.segments import SHAPE, locations, make_records, read

SECONDS = 60


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


@pytest.mark.parametrize(("most", "calls", "started"), [(0, 2, 0), (1, 3, 1), (3, 2, 2), (-1, 1, 0)])
def test_no_more_help_than_allowed(threads: ThreadPoolExecutor, most: int, calls: int, started: int) -> None:
    done: list[int] = []
    helpers = Helpers(threads, most=most)

    for _ in range(calls):
        helpers.call(lambda: done.append(1))
    threads.shutdown(wait=True)

    assert helpers.end() == []
    assert len(done) == started


def test_the_end_waits_for_who_works_and_tells_what_went_wrong(threads: ThreadPoolExecutor) -> None:
    begun, release = threading.Event(), threading.Event()
    helpers = Helpers(threads, most=2)

    def fail() -> None:
        begun.set()
        release.wait(SECONDS)
        raise RuntimeError("slot table is broken")

    helpers.call(fail)
    assert begun.wait(SECONDS)
    threads.submit(release.set)

    assert [str(failure) for failure in helpers.end()] == ["slot table is broken"]


def test_nobody_starts_after_the_end() -> None:
    done: list[int] = []
    held = threading.Event()
    with ThreadPoolExecutor(1) as threads:
        threads.submit(held.wait, SECONDS)
        helpers = Helpers(threads, most=2)
        helpers.call(lambda: done.append(1))

        assert helpers.end() == []
        helpers.call(lambda: done.append(2))
        held.set()

    assert done == []


def slow_at_first(told: threading.Condition, most: list[int]) -> Callable[..., int]:
    """preadv of a medium whose first answer takes long; later ones wait until two are asked for at a time."""
    inside = 0
    is_first = True

    def preadv(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        nonlocal inside, is_first
        if len(buffers[0]) == 4096:  # the store's id
            return os.preadv(fd, buffers, offset)
        with told:
            inside += 1
            most.append(inside)
            told.notify_all()
            waits, is_first = not is_first, False
            if waits:
                told.wait_for(lambda: max(most) > 1, SECONDS)
        if not waits:
            time.sleep(0.05)
        num_bytes = os.preadv(fd, buffers, offset)
        with told:
            inside -= 1
        return num_bytes

    return preadv


@pytest.mark.parametrize("group_major", [False, True], ids=["record_major", "group_major"])
def test_a_slow_medium_is_asked_by_more_threads_than_there_are_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group_major: bool
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    most: list[int] = []
    store = FileSegmentStore(
        tmp_path,
        geometry=SHAPE,
        config=KvdStoreConfig(read_threads=2),
        files=replace(FileOperations(), preadv=slow_at_first(threading.Condition(), most)),
    )
    segments = [store.publish(make_records(labels)) for labels in ("ab", "cd", "ef", "gh")]

    assert read(store, locations(*segments), group_major=group_major).bad == {}
    assert max(most) == 2
    store.close()
