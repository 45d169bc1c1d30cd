"""The demo's slow store: as slow as it says, and a SegmentStore in everything else."""

from pathlib import Path

from prefill_engine.demo_kvd import SlowStore
from prefill_engine.kv.segment_store import FileSegmentStore
from prefill_plan.kvd_config import KvdStoreConfig
from prefill_testing.segments import NUM_GROUPS, SHAPE, locations, make_records, read

RATE = 1000.0


def slow_store(root: Path, slept: list[float]) -> SlowStore:
    store = FileSegmentStore(root, geometry=SHAPE, config=KvdStoreConfig(read_threads=1))
    return SlowStore(store, group_bytes=SHAPE.group_bytes, bytes_per_second=RATE, sleep=slept.append)


def test_slow_store_waits_for_every_group_before_it_is_told(tmp_path: Path) -> None:
    slept: list[float] = []
    store = slow_store(tmp_path, slept)
    segment = store.publish(make_records("ab"))
    reading = read(store, locations(segment), group_major=True)
    assert reading.bad == {}
    assert reading.events == [(index, group + 1) for group in range(NUM_GROUPS) for index in range(2)]
    assert slept == [size / RATE for size in SHAPE.group_bytes for _ in range(2)]
    store.close()


def test_slow_store_waits_for_a_whole_record_at_once_where_it_is_read_at_once(tmp_path: Path) -> None:
    slept: list[float] = []
    store = slow_store(tmp_path, slept)
    segment = store.publish(make_records("a"))
    assert read(store, locations(segment)).events == [(0, NUM_GROUPS)]
    assert slept == [sum(SHAPE.group_bytes) / RATE]
    store.close()


def test_slow_store_gives_everything_else_to_the_store_behind_it(tmp_path: Path) -> None:
    plain = FileSegmentStore(tmp_path, geometry=SHAPE, config=KvdStoreConfig())
    store = slow_store(tmp_path, [])
    segment = store.publish(make_records("abc"))
    assert store.store_id == plain.store_id
    assert list(store.scan()) == list(plain.scan()) == [segment]
    assert store.counters()["published"] == 1
    assert store.collect(withdraw=lambda _names: None) == 0
    store.close()
    plain.close()
