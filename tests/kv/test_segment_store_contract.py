"""One suite for every SegmentStore; a new medium joins by a function that opens a store on it."""

import threading
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from prefill_engine.kv.segment_file import HEADER_BYTES
from prefill_engine.kv.segment_store import FileSegmentStore
from prefill_engine.kv.segments import RecordWrite, SegmentInfo
from prefill_plan.errors import StoreUnavailable
from prefill_plan.kvd_config import KvdStoreConfig
from prefill_testing.blocks import make_key
from prefill_testing.segment_media import CONFIG, Medium, corrupt, flip, publish
from prefill_testing.segments import (
    LAYOUT,
    NUM_GROUPS,
    SHAPE,
    Clock,
    Reading,
    locations,
    make_record,
    make_records,
    read,
)

# --- round trips ---


@pytest.mark.parametrize("group_major", [False, True], ids=["record_major", "group_major"])
def test_records_come_back_as_they_were_published(medium: Medium, group_major: bool) -> None:
    segments = [publish(medium, "a", "b", "c"), publish(medium, "d"), publish(medium, *"efghij")]

    reading = read(medium.open(), locations(*segments), group_major=group_major)

    assert reading.bad == {}
    assert [target.tobytes() for target in reading.targets] == [
        record.record.tobytes() for record in make_records("abcdefghij")
    ]


def test_a_published_segment_is_what_its_information_says(medium: Medium) -> None:
    segment = publish(medium, "a", "b")

    assert segment.keys == (make_key("a"), make_key("b"))
    assert segment.layout_id == LAYOUT.digest()[:8]
    assert medium.file(segment).stat().st_size == segment.num_bytes == HEADER_BYTES + 2 * SHAPE.record_bytes
    assert medium.store.counters()["published"] == 1
    assert medium.store.counters()["bytes_written"] == segment.num_bytes


def test_the_largest_segment_has_32_records(medium: Medium) -> None:
    segment = publish(medium, *(f"block {number}" for number in range(32)))

    assert read(medium.store, locations(segment)).bad == {}


def test_records_are_read_in_any_order_from_any_segment(medium: Medium) -> None:
    wanted = locations(publish(medium, *"abcd"), publish(medium, *"efgh"))
    shuffled = [wanted[index] for index in (7, 0, 3, 4, 1, 6, 6, 2)]

    reading = read(medium.store, shuffled)

    assert reading.bad == {}


def test_an_empty_job_calls_nothing(medium: Medium) -> None:
    assert read(medium.store, []).events == []


def test_a_hit_of_757_blocks_opens_each_segment_once(medium: Medium) -> None:
    """kv.md 8, bug 14 (deepseek-ai/3FS#292): opens dominate."""
    segments = [
        publish(medium, *(f"{number}" for number in range(start, min(start + 24, 757)))) for start in range(0, 757, 24)
    ]
    reader = medium.open()

    reading = read(reader, locations(*segments))

    assert reading.bad == {}
    assert reader.counters()["opens"] == len(segments) == 32
    assert reader.counters()["bytes_read"] == 757 * SHAPE.record_bytes


def test_group_major_finishes_a_group_of_all_records_before_the_next(medium: Medium) -> None:
    wanted = locations(publish(medium, *"abc"), publish(medium, *"de"))
    reader = medium.open(read_threads=1)

    reading = read(reader, wanted, group_major=True)

    if medium.is_grouped:
        assert reading.events == [(index, group + 1) for group in range(NUM_GROUPS) for index in range(5)]
    else:  # C17: with O_DIRECT whole records are read
        assert reading.events == [(index, NUM_GROUPS) for index in range(5)]


def test_job_that_becomes_urgent_goes_on_by_groups_with_records_not_begun(medium: Medium) -> None:
    """kv.md 6.2 b: the first segment has been read whole when a step begins to wait."""
    wanted = locations(publish(medium, *"ab"), publish(medium, *"cd"), publish(medium, *"e"))
    told: list[bool] = []
    reading = Reading(wanted, is_urgent=lambda: len(reading.events) >= 2 and not told.append(True))

    medium.open(read_threads=1).read(reading.job)

    rest = [(index, NUM_GROUPS) for index in (2, 3, 4)]
    if medium.can_turn:
        rest = [(index, group + 1) for group in range(NUM_GROUPS) for index in (2, 3, 4)]
    assert reading.events == [(0, NUM_GROUPS), (1, NUM_GROUPS), *rest]
    assert bool(told) == medium.can_turn


def test_record_major_finishes_records_in_chain_order(medium: Medium) -> None:
    wanted = locations(publish(medium, *"abc"), publish(medium, *"de"))

    reading = read(medium.open(read_threads=1), wanted)

    assert [index for index, groups in reading.events if groups == NUM_GROUPS] == list(range(5))


def test_many_jobs_and_publications_run_at_once(medium: Medium) -> None:
    segments = [publish(medium, *(f"{number} {record}" for record in range(6))) for number in range(5)]
    failures: list[object] = []

    def work(number: int) -> None:
        try:
            new = publish(medium, f"new {number}")
            for _ in range(5):
                reading = read(medium.store, locations(*segments, new), group_major=number % 2 == 0)
                failures.extend(reading.bad.items())
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "the other thread has not ended within 60 s"

    assert failures == []


# --- cancelling and closing ---


def test_a_cancelled_job_writes_nothing(medium: Medium) -> None:
    wanted = locations(publish(medium, *"abc"))
    reading = Reading(wanted, is_cancelled=lambda: True)

    medium.store.read(reading.job)

    assert (reading.events, reading.bad) == ([], {})
    assert all(reading.is_untouched(index) for index in range(3))


@pytest.mark.parametrize("group_major", [False, True], ids=["record_major", "group_major"])
def test_nothing_is_written_after_a_job_was_cancelled_on_the_way(medium: Medium, group_major: bool) -> None:
    wanted = locations(*(publish(medium, f"{number}") for number in range(20)))
    told = threading.Event()
    reading = Reading(wanted, group_major=group_major, is_cancelled=told.is_set)
    on_group = reading.job.on_group

    def cancel_at_first(index: int, groups: int) -> None:
        on_group(index, groups)
        told.set()

    medium.store.read(replace(reading.job, on_group=cancel_at_first))
    before = [target.tobytes() for target in reading.targets]

    # At most one piece per thread was under way.
    assert 1 <= len(reading.events) <= CONFIG.read_threads
    assert reading.bad == {}
    assert any(reading.is_untouched(index) for index in range(20))
    publish(medium, "more")
    assert [target.tobytes() for target in reading.targets] == before


def test_an_error_of_the_caller_stops_the_job_and_reaches_it(medium: Medium) -> None:
    wanted = locations(*(publish(medium, f"{number}") for number in range(6)))
    reading = Reading(wanted)

    def fail(index: int, groups: int) -> None:
        raise RuntimeError("slot table is broken")

    with pytest.raises(RuntimeError, match="slot table"):
        medium.store.read(replace(reading.job, on_group=fail))
    assert read(medium.store, wanted).bad == {}


def test_a_closed_store_answers_with_misses_and_refuses_to_write(medium: Medium) -> None:
    wanted = locations(publish(medium, *"ab"))
    medium.store.close()
    medium.store.close()

    assert read(medium.store, wanted).bad == {0: "io", 1: "io"}
    with pytest.raises(StoreUnavailable, match="closed"):
        publish(medium, "c")


# --- wrong arguments ---


@pytest.mark.parametrize("count", [0, 33])
def test_a_segment_of_no_or_too_many_records_is_refused(medium: Medium, count: int) -> None:
    with pytest.raises(ValueError, match=r"expected 1\.\.32"):
        medium.store.publish(make_records([f"{number}" for number in range(count)]))


def test_records_and_targets_of_another_size_are_refused(medium: Medium) -> None:
    record = make_record("a")
    with pytest.raises(ValueError, match="another size"):
        medium.store.publish([RecordWrite(key=record.key, record=record.record[:-1])])
    segment = publish(medium, "a")
    reading = Reading(locations(segment))
    short = replace(reading.job.reads[0], target=reading.targets[0][:-1])
    with pytest.raises(ValueError, match=f"expected {SHAPE.record_bytes}"):
        medium.store.read(replace(reading.job, reads=[short]))


# --- scanning ---


def test_a_scan_tells_every_segment_to_whoever_comes_later(medium: Medium) -> None:
    segments = {publish(medium, *"abc"), publish(medium, "d")}

    assert set(medium.open().scan()) == segments


def test_a_scan_passes_over_what_is_no_whole_segment(medium: Medium) -> None:
    good, cut, flipped = publish(medium, "a"), publish(medium, *"bc"), publish(medium, "d")
    corrupt(medium, cut, lambda content: content[:-1])
    corrupt(medium, flipped, flip(64))
    (medium.file(good).parent / "notes.txt").write_text("foreign")
    (medium.file(good).parent / ("f" * 32 + ".seg")).write_bytes(b"")

    assert list(medium.store.scan()) == [good]
    assert medium.store.counters()["bad_toc"] == 3


def test_kvds_on_the_same_files_have_the_same_store_id(medium: Medium, tmp_path: Path) -> None:
    elsewhere = FileSegmentStore(tmp_path / "elsewhere", geometry=SHAPE, config=KvdStoreConfig())
    other_layout = FileSegmentStore(
        medium.root, geometry=replace(SHAPE, layout_digest=bytes(32)), config=KvdStoreConfig()
    )

    assert medium.open().store_id == medium.store.store_id
    assert len({medium.store.store_id, elsewhere.store_id, other_layout.store_id}) == 3
    assert list(other_layout.scan()) == []
    elsewhere.close()
    other_layout.close()


def test_a_scan_during_publications_sees_whole_segments_only(medium: Medium) -> None:
    """kv.md 8, bug 5 (LMCache#207): no reader sees half of what is being written."""
    seen: set[SegmentInfo] = set()
    reader = medium.open()
    done = threading.Event()

    def scan() -> None:
        while not done.is_set():
            seen.update(reader.scan())

    thread = threading.Thread(target=scan)
    thread.start()
    segments = [publish(medium, *(f"{number} {record}" for record in range(8))) for number in range(20)]
    done.set()
    thread.join(60)
    assert not thread.is_alive(), "the other thread has not ended within 60 s"

    assert seen <= set(segments)
    assert reader.counters()["bad_toc"] == 0
    assert set(reader.scan()) == set(segments)


# --- collecting ---


def test_a_collection_withdraws_first_and_deletes_a_grace_period_later(medium: Medium) -> None:
    clock = Clock()
    file_bytes = HEADER_BYTES + SHAPE.record_bytes
    store = medium.open(clock=clock, max_bytes=10 * file_bytes, high_watermark=0.4, low_watermark=0.2, grace_seconds=60)
    segments = [store.publish(make_records([f"{number}"])) for number in range(5)]
    generations = [segment.name.split("/")[2] for segment in segments]
    assert all(early < late for early, late in pairwise(generations))
    withdrawn: list[str] = []

    assert store.collect(withdraw=withdrawn.extend) == 0
    assert withdrawn == []  # younger than the grace period
    clock.advance(61)
    assert store.collect(withdraw=withdrawn.extend) == 0

    assert withdrawn == [segment.name for segment in segments[:3]]
    assert read(store, locations(*segments)).bad == {}
    assert list(medium.open().scan()) == [segments[4], segments[3]]
    clock.advance(59)
    assert store.collect(withdraw=withdrawn.extend) == 0
    clock.advance(2)
    assert store.collect(withdraw=withdrawn.extend) == 3 * file_bytes
    assert len(withdrawn) == 3
    assert sorted(read(store, locations(*segments)).bad) == [0, 1, 2]
    assert not medium.file(segments[0]).parents[1].exists()
    assert store.counters()["collected_bytes"] == 3 * file_bytes
