"""Collecting on a real directory: what survives, what is counted, what several kvds do to each other."""

import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from prefill_engine.kv.file_operations import FileOperations
from prefill_engine.kv.segment_file import HEADER_BYTES
from prefill_engine.kv.segment_store import FileSegmentStore
from prefill_engine.kv.segments import SegmentInfo
from prefill_plan.errors import StoreUnavailable
from prefill_plan.kvd_config import KvdStoreConfig
from prefill_testing.fault_files import FaultyCall
from prefill_testing.segments import SHAPE, Clock, locations, make_records, read

FILE_BYTES = HEADER_BYTES + SHAPE.record_bytes


def open_store(
    path: Path, clock: Callable[[], float], *, num_segments: int = 10, tenant_share: float = 1.0, **changes: Any
) -> FileSegmentStore:
    """Room for so many segments of one record; each is a generation of its own."""
    config = KvdStoreConfig(
        read_threads=1,
        max_bytes=num_segments * FILE_BYTES,
        high_watermark=0.6,
        low_watermark=0.4,
        grace_seconds=60,
        generation_seconds=3600,
        tenant_share=tenant_share,
    )
    files = replace(FileOperations(), **changes)
    return FileSegmentStore(path, geometry=SHAPE, config=config, files=files, clock=clock)


def publish(store: FileSegmentStore, *labels: str) -> list[SegmentInfo]:
    return [store.publish(make_records([label])) for label in labels]


def collect(store: FileSegmentStore, clock: Clock) -> int:
    """A round that withdraws, and one after the grace period that deletes."""
    store.collect(withdraw=lambda _: None)
    clock.advance(61)
    return store.collect(withdraw=lambda _: None)


def names_of(store: FileSegmentStore) -> set[str]:
    return {segment.name for segment in store.scan()}


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_store_that_keeps_filling_keeps_the_newest(tmp_path: Path, clock: Clock) -> None:
    """kv.md 8, bug 16 (LMCache#3207, antirez/ds4#157): neither crash nor silent drop nor eviction of what was just written."""
    store = open_store(tmp_path, clock)
    written: list[SegmentInfo] = []
    refused = 0
    for number in range(100):
        try:
            written += publish(store, f"{number}")
        except StoreUnavailable:
            refused += 1
        clock.advance(20)
        before = names_of(store)
        store.collect(withdraw=lambda _: None)
        # Half a minute is within the grace period.
        assert {segment.name for segment in written[-2:]} <= before
        assert read(store, locations(*written[-2:])).bad == {}

    counts = store.counters()
    # Written faster than a grace period lets anything go: some are refused, and counted, never dropped in silence.
    assert counts["publish_full"] == counts["publish_failed"] == refused
    assert counts["published"] == len(written) == 100 - refused
    assert counts["collected_bytes"] > 40 * FILE_BYTES
    assert counts["withdrawn"] >= counts["collected_bytes"] // FILE_BYTES
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.seg")) <= 10 * FILE_BYTES


def test_beyond_max_bytes_nothing_is_written_until_a_collection(tmp_path: Path, clock: Clock) -> None:
    store = open_store(tmp_path, clock, num_segments=4)
    store.collect(withdraw=lambda _: None)
    publish(store, *"abcd")

    with pytest.raises(StoreUnavailable, match="0 bytes are left of max_bytes"):
        publish(store, "e")

    assert store.counters()["publish_full"] == 1
    clock.advance(61)
    assert collect(store, clock) == 3 * FILE_BYTES
    assert len(publish(store, "e")) == 1


def test_before_the_first_collection_max_bytes_holds_as_well(tmp_path: Path, clock: Clock) -> None:
    """On an emptyDir the kubelet evicts the pod that is beyond its limit."""
    store = open_store(tmp_path, clock, num_segments=4)
    publish(store, *"abcd")

    with pytest.raises(StoreUnavailable, match="0 bytes are left of max_bytes"):
        publish(store, "e")


def test_below_the_high_watermark_nothing_goes(tmp_path: Path, clock: Clock) -> None:
    store = open_store(tmp_path, clock)
    segments = publish(store, *"abcdef")
    clock.advance(100_000)

    assert collect(store, clock) == 0
    assert names_of(store) == {segment.name for segment in segments}


def test_hot_segments_move_to_the_current_generation(tmp_path: Path, clock: Clock) -> None:
    store = open_store(tmp_path, clock)
    segments = publish(store, *"abcdefg")
    clock.advance(61)
    read(store, locations(segments[0]))
    read(store, locations(segments[1], segments[5]))
    events: list[tuple[str, object]] = []
    announced: list[SegmentInfo] = []

    def announce(infos: Sequence[SegmentInfo]) -> None:
        events.append(("announce", [info.keys for info in infos]))
        announced.extend(infos)

    def withdraw(names: Sequence[str]) -> None:
        events.append(("withdraw", list(names)))

    store.collect(withdraw=withdraw, announce=announce)

    # a, b and c go; at most half of their bytes stay, those that were read last; and their new place is told first.
    assert events == [
        ("announce", [segments[1].keys]),
        ("withdraw", [segment.name for segment in segments[:3]]),
    ]
    assert announced[0].name.split("/")[2] > segments[6].name.split("/")[2]
    clock.advance(61)
    # The bytes of b have two names, so deleting one frees nothing.
    assert store.collect(withdraw=withdraw, announce=announce) == 2 * FILE_BYTES
    assert read(store, locations(*announced)).bad == {}
    assert set(read(store, locations(*segments[:3])).bad) == {0, 1, 2}
    assert store.counters()["kept_hot"] == 1


def test_what_was_read_long_ago_is_not_hot(tmp_path: Path, clock: Clock) -> None:
    store = open_store(tmp_path, clock)
    segments = publish(store, *"abcdefg")
    read(store, locations(*segments))
    clock.advance(3601)
    announced: list[SegmentInfo] = []

    store.collect(withdraw=lambda _: None, announce=announced.extend)

    assert announced == []


def test_a_medium_without_links_keeps_nothing(tmp_path: Path, clock: Clock) -> None:
    link: FaultyCall[..., None] = FaultyCall(os.link)
    store = open_store(tmp_path, clock, link=link)
    segments = publish(store, *"abcdefg")
    read(store, locations(*segments))
    clock.advance(61)
    link.arm(errno.EPERM)
    announced: list[SegmentInfo] = []
    withdrawn: list[str] = []

    store.collect(withdraw=withdrawn.extend, announce=announced.extend)

    assert announced == []
    assert len(withdrawn) == 3


def test_without_an_announcer_nothing_is_kept(tmp_path: Path, clock: Clock) -> None:
    store = open_store(tmp_path, clock)
    segments = publish(store, *"abcdefg")
    read(store, locations(*segments))
    clock.advance(61)

    assert collect(store, clock) == 3 * FILE_BYTES
    assert store.counters()["kept_hot"] == 0


def test_every_kvd_of_a_shared_store_withdraws_before_one_deletes(tmp_path: Path, clock: Clock) -> None:
    first, second = open_store(tmp_path, clock), open_store(tmp_path, clock)
    segments = publish(first, *"abcdefg")
    clock.advance(61)
    told: dict[str, list[str]] = {"first": [], "second": []}
    first.collect(withdraw=told["first"].extend)
    # Less than the high watermark is left, as the second sees it, too; it learns of the withdrawal from the marker.
    second.collect(withdraw=told["second"].extend)
    clock.advance(61)

    deleted = first.collect(withdraw=told["first"].extend) + second.collect(withdraw=told["second"].extend)

    assert told["first"] == told["second"] == [segment.name for segment in segments[:3]]
    assert deleted == 3 * FILE_BYTES
    assert second.collect(withdraw=told["second"].extend) == 0


def test_a_restart_within_the_grace_period_begins_it_anew(tmp_path: Path, clock: Clock) -> None:
    before = open_store(tmp_path, clock)
    segments = publish(before, *"abcdefg")
    clock.advance(61)
    before.collect(withdraw=lambda _: None)
    before.close()
    after = open_store(tmp_path, clock)
    withdrawn: list[str] = []

    assert names_of(after) == {segment.name for segment in segments[3:]}
    assert after.collect(withdraw=withdrawn.extend) == 0
    assert len(withdrawn) == 3
    clock.advance(61)
    assert after.collect(withdraw=withdrawn.extend) == 3 * FILE_BYTES


def test_nothing_goes_to_a_generation_that_is_withdrawn(tmp_path: Path, clock: Clock) -> None:
    first, second = open_store(tmp_path, clock, num_segments=2), open_store(tmp_path, clock, num_segments=100)
    (old,) = publish(second, "old")
    publish(first, "a")
    clock.advance(61)
    first.collect(withdraw=lambda _: None)
    second.collect(withdraw=lambda _: None)

    (new,) = publish(second, "new")

    assert new.name.split("/")[2] != old.name.split("/")[2]
    clock.advance(61)
    first.collect(withdraw=lambda _: None)
    assert read(second, locations(new)).bad == {}


@pytest.mark.parametrize("operation", ["unlink", "rmdir"])
def test_what_cannot_be_deleted_is_tried_again(tmp_path: Path, clock: Clock, operation: str) -> None:
    faulty: FaultyCall[..., None] = FaultyCall(getattr(os, operation))
    store = open_store(tmp_path, clock, **{operation: faulty})
    segments = publish(store, *"abcdefg")
    clock.advance(61)
    store.collect(withdraw=lambda _: None)
    clock.advance(61)
    faulty.arm(errno.EIO)

    deleted = store.collect(withdraw=lambda _: None)

    assert deleted == 2 * FILE_BYTES
    assert store.counters()["collect_errors"] >= 1
    store.collect(withdraw=lambda _: None)
    assert {path.name for path in (tmp_path / segments[0].name).parents[2].iterdir()} == {
        segment.name.split("/")[2] for segment in segments[3:]
    }


def test_a_full_disk_that_takes_no_marker_still_collects(tmp_path: Path, clock: Clock) -> None:
    def refuse(path: str, flags: int, mode: int) -> int:
        if path.endswith(".withdrawn"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        return os.open(path, flags, mode)

    store = open_store(tmp_path, clock, open=refuse)
    publish(store, *"abcdefg")
    clock.advance(61)

    assert collect(store, clock) == 3 * FILE_BYTES
    assert store.counters()["collect_errors"] == 3


def test_without_max_bytes_the_free_space_of_the_medium_decides(tmp_path: Path, clock: Clock) -> None:
    real = os.statvfs(tmp_path)
    free = [1000]

    def statvfs(path: str) -> os.statvfs_result:
        fields = list(real)
        fields[1], fields[2], fields[3], fields[4] = 4096, 1000, free[0], free[0]  # frsize, blocks, bfree, bavail
        return os.statvfs_result(fields)

    config = KvdStoreConfig(read_threads=1, grace_seconds=60)
    files = replace(FileOperations(), statvfs=statvfs)
    store = FileSegmentStore(tmp_path, geometry=SHAPE, config=config, files=files, clock=clock)
    publish(store, "a")
    clock.advance(4000)
    publish(store, "b")

    assert collect(store, clock) == 0
    free[0] = 90
    assert collect(store, clock) > 0
    # a's generation alone would not do, so b's went as well; neither is younger than the grace period.
    assert names_of(store) == set()


def test_foreign_files_in_the_store_are_left_alone_until_their_generation_goes(tmp_path: Path, clock: Clock) -> None:
    store = open_store(tmp_path, clock)
    segments = publish(store, *"abcdefg")
    foreign = tmp_path / "kv" / "README"
    foreign.write_text("do not touch")
    (tmp_path / segments[0].name).with_suffix(".txt").write_text("goes with the generation")
    clock.advance(61)

    assert collect(store, clock) == 3 * FILE_BYTES

    assert foreign.read_text() == "do not touch"
    assert not (tmp_path / segments[0].name).parents[1].exists()


# --- shares of tenants
def publish_for(store: FileSegmentStore, tenant: str, *labels: str) -> list[SegmentInfo]:
    return [store.publish(make_records([label]), tenant=tenant) for label in labels]


def test_tenant_above_its_share_loses_its_oldest_first(tmp_path: Path, clock: Clock) -> None:
    """Room for 10, collected from 6 on down to 4; a share is 3. "small" is older, "big" has 5."""
    store = open_store(tmp_path, clock, tenant_share=0.3)
    small = publish_for(store, "small", *"ab")
    big = publish_for(store, "big", *"cdefg")
    clock.advance(61)

    assert collect(store, clock) == 3 * FILE_BYTES

    left = {segment.name for segment in (*small[1:], *big[2:])}
    assert names_of(store) == left, "two of big, down to its share, and then the oldest of all"


def test_tenants_within_their_shares_lose_the_oldest(tmp_path: Path, clock: Clock) -> None:
    store = open_store(tmp_path, clock, tenant_share=0.5)
    publish_for(store, "small", *"ab")
    big = publish_for(store, "big", *"cdefg")
    clock.advance(61)

    assert collect(store, clock) == 3 * FILE_BYTES
    assert names_of(store) == {segment.name for segment in big[1:]}, "both of small, then the oldest of big"


def test_shares_hold_for_another_kvd_that_only_sees_the_files(tmp_path: Path, clock: Clock) -> None:
    """After a restart, or on another node: who owns what stands in the names of directories, and in nobody's memory."""
    store = open_store(tmp_path, clock, tenant_share=0.3)
    small, big = publish_for(store, "small", *"ab"), publish_for(store, "big", *"cdefg")
    clock.advance(61)
    other = open_store(tmp_path, clock, tenant_share=0.3)

    collect(other, clock)

    assert names_of(other) == {segment.name for segment in (*small[1:], *big[2:])}
    assert read(other, locations(*big[2:])).bad == {}
    [more] = publish_for(other, "big", "h")
    assert more.name.split("/")[2].split("-")[2] == big[0].name.split("/")[2].split("-")[2]


def test_what_was_committed_in_the_grace_period_stays_whoever_is_above_its_share(tmp_path: Path, clock: Clock) -> None:
    store = open_store(tmp_path, clock, tenant_share=0.3)
    small = publish_for(store, "small", *"ab")
    clock.advance(61)
    big = publish_for(store, "big", *"cdefg")
    for segment in big:  # files have the machine's time
        os.utime(tmp_path / segment.name, (clock(), clock()))
    withdrawn: list[str] = []

    store.collect(withdraw=withdrawn.extend)

    assert withdrawn == [segment.name for segment in small]
    assert read(store, locations(*big)).bad == {}


def test_hot_segments_stay_their_tenants(tmp_path: Path, clock: Clock) -> None:
    store = open_store(tmp_path, clock, tenant_share=0.2)
    big = publish_for(store, "big", *"abcdefg")
    clock.advance(61)
    read(store, locations(big[1]))
    announced: list[SegmentInfo] = []

    store.collect(withdraw=lambda _: None, announce=announced.extend)

    [kept] = announced
    assert kept.keys == big[1].keys
    assert kept.name.split("/")[2].split("-")[2] == big[1].name.split("/")[2].split("-")[2]
    assert kept.name.split("/")[2] > big[-1].name.split("/")[2]


def test_no_tenants_name_is_on_the_medium(tmp_path: Path, clock: Clock) -> None:
    store = open_store(tmp_path, clock, tenant_share=0.3)
    publish_for(store, "acme-corp", "a")
    files = [path for path in tmp_path.rglob("*") if path.is_file()]

    assert not any("acme" in str(path) for path in tmp_path.rglob("*"))
    assert files
    assert not any(b"acme" in path.read_bytes() for path in files)


def test_without_shares_tenants_share_generations(tmp_path: Path, clock: Clock) -> None:
    """A tenant of its own directory costs what it costs; by default nobody pays it."""
    store = open_store(tmp_path, clock, num_segments=100)
    names = [
        segment.name.split("/")[2] for tenant in ("small", "big") for segment in publish_for(store, tenant, tenant)
    ]

    assert [name.count("-") for name in names] == [1, 1]
    assert names[0].split("-")[1] == names[1].split("-")[1], "one part, were it not for the turn of an hour"


def is_withdrawn(root: Path, segment: SegmentInfo) -> bool:
    return ((root / segment.name).parents[1] / ".withdrawn").exists()


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_restarted_kvd_publishes_into_no_withdrawn_generation(tmp_path: Path, clock: Clock, share: float) -> None:
    """It counts parts from 0 again, where others were withdrawn in the same hour; what it stored would be gone with them."""
    before = open_store(tmp_path, clock, num_segments=20, tenant_share=share)
    for tenant, labels in (("big", "ab"), ("small", "cd"), ("big", "efghijklm")):
        publish_for(before, tenant, *labels)
    clock.advance(61)
    store = open_store(tmp_path, clock, num_segments=20, tenant_share=share)
    withdrawn: list[str] = []
    store.collect(withdraw=withdrawn.extend)

    fresh = publish_for(store, "big", *"nopqrs")

    assert withdrawn
    assert [segment.name for segment in fresh if is_withdrawn(tmp_path, segment)] == []


def test_generation_that_another_kvd_withdraws_is_left(tmp_path: Path, clock: Clock) -> None:
    store = open_store(tmp_path, clock)
    [before] = publish_for(store, "", "a")
    ((tmp_path / before.name).parents[1] / ".withdrawn").touch()

    after = publish_for(store, "", *"bc")

    assert [is_withdrawn(tmp_path, segment) for segment in after] == [False, False]
