"""What ranks save with the Keeper: verified, written back to a store that fails on demand, and never lost silently."""

import asyncio
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from prefill_engine.kv.segments import RecordWrite, SegmentInfo
from prefill_engine.kvd.commits import SlotKey
from prefill_engine.kvd.mailbox import Mailbox
from prefill_engine.kvd.write_back import write_patience
from prefill_plan.block_keys import BlockKey, snapshot_key
from prefill_plan.errors import CapacityError
from prefill_testing.keeper_rig import OWNER, Rig, run, until
from prefill_testing.kvd_fakes import GEOMETRY, chain, make_record, make_snapshot


def test_full_store_keeps_blocks_in_the_pool_and_says_why(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        rig.store.fail_writes = True
        keys = chain("a", 4)
        result = await rig.save(keys)
        assert (result.stored_blocks, result.failure) == (0, "no space left on device")
        assert rig.metric("writeback_dropped_total") == 4
        answer = await rig.open(keys)
        assert answer.found_blocks == 4
        rig.assert_bytes(answer, keys)
        rig.keeper.close([answer.lease_id])
        await rig.assert_nothing_leaks()

    run(test, tmp_path)


def test_segments_are_their_tenants(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        await rig.save(chain("a", 4), tenant="acme")
        await rig.save(chain("b", 4))
        assert rig.store.tenants == ["acme", ""]

    run(test, tmp_path)


def test_write_back_survives_a_store_that_breaks_its_promise(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        publish = rig.store.publish

        def fail_once(records: Sequence[RecordWrite], *, tenant: str = "") -> SegmentInfo:
            rig.store.publish = publish  # type: ignore[method-assign]
            raise RuntimeError("no such promise")

        rig.store.publish = fail_once  # type: ignore[method-assign]
        async with asyncio.timeout(20):
            assert (await rig.save(chain("a", 4))).failure == "no such promise"
            assert (await rig.save(chain("b", 4))).stored_blocks == 4
        await rig.assert_nothing_leaks()

    run(test, tmp_path)


def test_message_that_fails_does_not_hold_up_those_after_it() -> None:
    async def main() -> None:
        mailbox, arrived = Mailbox(asyncio.get_running_loop()), asyncio.Event()
        mailbox.post(lambda: [].pop())
        mailbox.post(arrived.set)
        await asyncio.wait_for(arrived.wait(), 20)

    asyncio.run(main())


def test_write_queue_drops_the_newest_beyond_its_bound(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        hang = rig.store.hang = threading.Event()
        first = asyncio.create_task(rig.save(chain("a", 4)))
        await until(lambda: rig.metric("writeback_queue_bytes") > 0)
        result = await rig.save(chain("b", 4))
        assert result.stored_blocks == 0
        assert "queue is full" in result.failure
        hang.set()
        assert (await first).stored_blocks == 4
        assert rig.store.keys() == set(chain("a", 4))
        await rig.assert_nothing_leaks()

    run(test, tmp_path, write_queue_bytes=6 * GEOMETRY.record_bytes)


def test_record_that_is_not_its_key_is_never_found(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        a, b, c = chain("a", 3)
        reservation = rig.keeper.reserve(OWNER, num_blocks=3, num_snapshots=1, tenant="")
        assert reservation is not None
        slots = reservation.slots
        for slot, key in zip(slots, (a, a, c), strict=True):
            rig.pool.record(slot)[:] = make_record(key)
        rig.pool.snapshot(reservation.snapshot_slots[0])[:] = make_snapshot(a)
        blocks = [SlotKey(slot=slot, key=key) for slot, key in zip(slots, (a, b, c), strict=True)]
        snapshots = [SlotKey(slot=reservation.snapshot_slots[0], key=snapshot_key(b))]
        result = await rig.keeper.commit(reservation.lease_id, blocks, snapshots)
        assert (result.stored_blocks, result.held_snapshots) == (1, 0)
        assert result.failure == "block 1 failed verification: key"
        assert (await rig.open([b])).found_blocks == 0
        assert rig.keeper.find_snapshot(b) is None
        await rig.assert_nothing_leaks()

    run(test, tmp_path)


def test_commit_of_foreign_slots_changes_nothing(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        key = chain("a", 1)[0]
        mine = rig.keeper.reserve(OWNER, num_blocks=1, num_snapshots=0, tenant="")
        other = rig.keeper.reserve(OWNER, num_blocks=1, num_snapshots=0, tenant="")
        assert mine is not None
        assert other is not None
        with pytest.raises(ValueError, match="not of reservation"):
            await rig.keeper.commit(mine.lease_id, [SlotKey(slot=other.slots[0], key=key)], [])
        with pytest.raises(ValueError, match="named twice"):
            await rig.keeper.commit(mine.lease_id, [SlotKey(slot=mine.slots[0], key=key)] * 2, [])
        assert (await rig.keeper.commit(12345, [], [])).failure == "reservation 12345 is not known"
        rig.keeper.close([mine.lease_id, other.lease_id])
        await rig.assert_nothing_leaks()

    run(test, tmp_path)


def test_draining_kvd_reserves_nothing_more(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        hang = rig.store.hang = threading.Event()
        saving = asyncio.create_task(rig.save(chain("a", 3)))
        await until(lambda: rig.metric("writeback_queue_bytes") > 0)
        assert not await rig.keeper.drain(0.05)
        assert rig.keeper.reserve(OWNER, num_blocks=1, num_snapshots=0, tenant="") is None
        hang.set()
        assert await rig.keeper.drain(20)
        assert (await saving).stored_blocks == 3

    run(test, tmp_path)


@dataclass(kw_only=True)
class BusyStore:
    """Of a Rig: its reads hang until `hang` is set; writes do not, and note how many records had been read before them."""

    keys: list[BlockKey]
    hang: threading.Event
    read_before: list[int]


async def make_busy(rig: Rig) -> BusyStore:
    busy = BusyStore(keys=chain("stored", 3), hang=threading.Event(), read_before=[])
    await rig.directory.publish_segments("fake", [rig.store.put(busy.keys)])
    rig.store.hang = busy.hang

    def publish(records: Sequence[RecordWrite], *, tenant: str = "") -> SegmentInfo:
        busy.read_before.append(rig.store.num_reads)
        return rig.store.put([record.key for record in records])

    rig.store.publish = publish  # type: ignore[method-assign]
    return busy


async def start_save(rig: Rig) -> "asyncio.Task[Any]":
    """A save that has come to the write queue, and got every chance to be written."""
    saving = asyncio.create_task(rig.save(chain("new", 4)))
    await until(lambda: rig.metric("writeback_queue_bytes") > 0)
    for _ in range(100):
        await asyncio.sleep(0)
    return saving


def test_segment_waits_for_reads_that_somebody_waits_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(rig: Rig) -> None:
        busy = await make_busy(rig)
        answer = await rig.open(busy.keys)
        saving = await start_save(rig)
        assert busy.read_before == []
        busy.hang.set()
        async with asyncio.timeout(20):
            assert (await saving).stored_blocks == 4
        assert busy.read_before == [3]
        rig.keeper.close([answer.lease_id])
        await rig.assert_nothing_leaks()

    monkeypatch.setattr("prefill_engine.kvd.write_back.PATIENCE_SECONDS", 3600.0)
    run(test, tmp_path)


def test_segment_does_not_wait_for_reads_that_nobody_waits_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(rig: Rig) -> None:
        busy = await make_busy(rig)
        answer = await rig.open(busy.keys)
        saving = await start_save(rig)
        rig.keeper.close([answer.lease_id])
        async with asyncio.timeout(20):
            assert (await saving).stored_blocks == 4
        assert busy.read_before == [0]
        busy.hang.set()
        await rig.assert_nothing_leaks()

    monkeypatch.setattr("prefill_engine.kvd.write_back.PATIENCE_SECONDS", 3600.0)
    run(test, tmp_path)


def test_reads_without_end_do_not_keep_segments_from_being_written(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        busy = await make_busy(rig)
        answer = await rig.open(busy.keys)
        async with asyncio.timeout(20):
            assert (await rig.save(chain("new", 4))).stored_blocks == 4
        assert busy.read_before == [0]
        busy.hang.set()
        rig.keeper.close([answer.lease_id])
        await rig.assert_nothing_leaks()

    run(test, tmp_path)


@pytest.mark.parametrize(
    ("num_bytes", "seconds"), [(0, 0.05), (5, 0.03), (10, 0.01), (12.5, 0.0), (100, 0.0)], ids=lambda value: str(value)
)
def test_fuller_queue_has_less_patience(num_bytes: int, seconds: float) -> None:
    assert write_patience(num_bytes, 100, most_seconds=0.05) == pytest.approx(seconds)


def test_without_a_store_the_pool_is_the_store(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        keys = chain("a", 4)
        assert (await rig.save(keys)).stored_blocks == 4
        assert (await rig.open(keys)).found_blocks == 4

    run(test, tmp_path, has_store=False)


def test_lease_that_can_not_be_written_down_is_not_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later life of kvd would hand its slots to somebody else."""

    async def test(rig: Rig) -> None:
        keys = chain("a", 4)
        await rig.save(keys)
        monkeypatch.setattr(os, "write", lambda _fd, data: len(data) // 2)
        with pytest.raises(CapacityError, match="make /dev/shm larger"):
            await rig.open(keys)
        with pytest.raises(CapacityError):
            rig.keeper.reserve(OWNER, num_blocks=2, num_snapshots=1, tenant="")
        monkeypatch.undo()
        await rig.assert_nothing_leaks()
        answer = await rig.open(keys)
        assert answer.found_blocks == 4
        rig.keeper.close([answer.lease_id])

    run(test, tmp_path)
