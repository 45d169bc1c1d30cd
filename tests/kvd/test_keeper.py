"""The Keeper with a real pool, a real directory in process, and a store and peers that fail on demand."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from prefill_engine.kv.directory import Holder
from prefill_engine.kv.pool_memory import LeaseState, PoolGeometry, PoolMemory, SnapshotState
from prefill_engine.kv.segments import RecordWrite, SegmentInfo
from prefill_engine.kv.transport.contract import PullState
from prefill_engine.kvd.commits import SlotKey
from prefill_engine.kvd.directory_local import LocalDirectory, new_local_state
from prefill_engine.kvd.keeper import Keeper
from prefill_engine.kvd.kvd_metrics import KvdMetrics
from prefill_engine.kvd.leases import Lease
from prefill_engine.kvd.mailbox import Mailbox
from prefill_engine.kvd.opens import OpenAnswer, OpenAsk
from prefill_engine.kvd.slot_pool import SlotState
from prefill_engine.kvd.store_link import StoreLink
from prefill_plan.block_keys import BlockKey, snapshot_key
from prefill_plan.errors import CapacityError, ConfigError
from prefill_plan.kvd_config import KvdConfig
from prefill_testing.kvd_fakes import GEOMETRY, Clock, FakeStore, FakeTransport, chain, make_record, make_snapshot

NUM_BLOCKS = 40
NUM_SNAPSHOTS = 3
OWNER = 77


@dataclass
class Rig:
    keeper: Keeper
    pool: PoolMemory
    """The rank's mapping."""
    store: FakeStore
    transport: FakeTransport
    directory: LocalDirectory
    clock: Clock
    registry: CollectorRegistry
    state: Any
    shared: Any
    """The directory's state, which peers share."""

    def metric(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"kv_{name}", labels) or 0.0

    async def open(self, keys: list[BlockKey], **changes: Any) -> OpenAnswer:
        fields: dict[str, Any] = {
            "resident_blocks": 0,
            "tenant": "",
            "want_snapshot": False,
            "limit_seconds": 30.0,
            "refuse_replayed": False,
        }
        return await self.keeper.open(OWNER, OpenAsk(keys=keys, **{**fields, **changes}))

    def row(self, answer: OpenAnswer) -> Any:
        record = self.pool.lease(answer.row)
        assert record.lease_id == answer.lease_id
        return record

    async def save(self, keys: list[BlockKey], *, snapshots: list[BlockKey] | None = None) -> Any:
        reservation = self.keeper.reserve(OWNER, num_blocks=len(keys), num_snapshots=len(snapshots or ()), tenant="")
        assert reservation is not None
        blocks = [SlotKey(slot=slot, key=key) for slot, key in zip(reservation.slots, keys, strict=False)]
        for index, one in enumerate(blocks):
            self.pool.record(one.slot)[:] = make_record(BlockKey(one.key), index=index)
        snaps = []
        for slot, key in zip(reservation.snapshot_slots, snapshots or (), strict=False):
            self.pool.snapshot(slot)[:] = make_snapshot(key)
            snaps.append(SlotKey(slot=slot, key=snapshot_key(key)))
        return await self.keeper.commit(reservation.lease_id, blocks, snaps)

    def assert_bytes(self, answer: OpenAnswer, keys: list[BlockKey]) -> None:
        for slot, key in zip(answer.slots, keys, strict=True):
            assert bytes(self.pool.payload(slot)) == make_record(key)[GEOMETRY.header_bytes :]

    async def assert_nothing_leaks(self) -> None:
        await until(lambda: self.state().is_idle)
        assert len(self.state().leases) == 0


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


def run(test: Callable[[Rig], Coroutine[Any, Any, None]], tmp_path: Path, **config: Any) -> None:
    async def main() -> None:
        async with open_rig(tmp_path, **config) as rig:
            await test(rig)

    asyncio.run(main())


@asynccontextmanager
async def open_rig(tmp_path: Path, *, has_store: bool = True, **changes: Any) -> AsyncIterator[Rig]:
    snapshot_bytes = NUM_SNAPSHOTS * GEOMETRY.snapshot_record_bytes
    pool_bytes = 4096 + 4096 * 64 + NUM_BLOCKS * GEOMETRY.record_bytes + snapshot_bytes
    config = KvdConfig(pool_bytes=pool_bytes, snapshot_bytes=snapshot_bytes, **{"lease_grace_seconds": 5.0, **changes})
    memory = PoolMemory.create(str(tmp_path / "pool"), pool_bytes=pool_bytes, epoch=9)
    store, transport, clock, registry = FakeStore(), FakeTransport(), Clock(), CollectorRegistry()
    shared = new_local_state()
    directory = LocalDirectory(shared, Holder(holder_id="me", epoch=9, endpoint="127.0.0.1:1"), clock=clock)
    link = StoreLink((lambda _geometry: store) if has_store else None, directory)
    keeper = Keeper(
        config,
        memory,
        store=link,
        directory=directory,
        transport=transport,
        metrics=KvdMetrics(registry),
        clock=clock,
    )
    keeper.start()
    session, _ = await keeper.connect(owner_epoch=OWNER, engine_id="e", rank=0, geometry=GEOMETRY, held_leases=())
    rank = PoolMemory.attach(memory.path, nonce=memory.nonce)
    rank.set_echo(session.echo_index, OWNER)
    keeper.attach(session)
    if has_store:
        await until(lambda: link.reader() is not None)
    rig = Rig(
        keeper=keeper,
        pool=rank,
        store=store,
        transport=transport,
        directory=directory,
        clock=clock,
        registry=registry,
        state=lambda: keeper.state,
        shared=shared,
    )
    try:
        yield rig
    finally:
        if store.hang is not None:
            store.hang.set()
        await keeper.stop()
        rank.close()
        memory.close()


def test_unknown_blocks_are_a_miss(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        answer = await rig.open(chain("a", 5), want_snapshot=True)
        assert (answer.lease_id, answer.found_blocks, answer.shrunk_blocks) == (0, 0, 0)
        assert rig.metric("open_total", mode="miss") == 1
        await rig.assert_nothing_leaks()

    run(test, tmp_path)


def test_saved_blocks_are_stored_and_served_from_the_pool(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        keys = chain("a", 35)
        result = await rig.save(keys)
        assert (result.stored_blocks, result.failure) == (35, "")
        assert rig.store.keys() == set(keys)
        assert [len(segment) for segment in rig.store.segments.values()] == [32, 3]

        answer = await rig.open(keys)
        assert (answer.found_blocks, rig.row(answer).ready[:2]) == (35, (35, 35))
        assert rig.store.num_reads == 0
        rig.assert_bytes(answer, keys)
        assert rig.keeper.close([answer.lease_id]) == 0
        await rig.assert_nothing_leaks()

    run(test, tmp_path)


def test_blocks_of_the_store_are_read_verified_and_kept(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        keys = chain("a", 12)
        await rig.directory.publish_segments("fake", [rig.store.put(keys[:7]), rig.store.put(keys[7:])])
        answer = await rig.open(keys, resident_blocks=2)
        assert (answer.found_blocks, len(answer.slots)) == (12, 10)
        await until(lambda: rig.row(answer).ready[:2] == (10, 10))
        rig.assert_bytes(answer, keys[2:])
        rig.keeper.close([answer.lease_id])

        again = await rig.open(keys, resident_blocks=2)
        assert rig.row(again).ready[:2] == (10, 10)
        assert rig.store.num_reads == 10
        rig.keeper.close([again.lease_id])
        await rig.assert_nothing_leaks()

    run(test, tmp_path)


def test_waiting_step_gets_its_first_groups_first(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        keys = chain("a", 4)
        await rig.directory.publish_segments("fake", [rig.store.put(keys)])
        for first, step_waits in ((0, False), (2, True)):
            answer = await rig.open(keys[: first + 2], resident_blocks=first, step_waits=step_waits)
            await until(lambda answer=answer: rig.row(answer).ready[0] == 2)
            rig.keeper.close([answer.lease_id])
        assert rig.store.group_major == [False, True]

    run(test, tmp_path)


def test_damaged_block_ends_the_hit_and_is_not_kept(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        keys = chain("a", 6)
        await rig.directory.publish_segments("fake", [rig.store.put(keys)])

        def damage(key: BlockKey, record: bytearray) -> None:
            if key == keys[3]:
                record[-1] ^= 1

        rig.store.damage = damage
        answer = await rig.open(keys)
        await until(lambda: rig.row(answer).limit_blocks == 3)
        assert rig.row(answer).error == 1
        assert rig.metric("verify_fail_total", reason="crc") == 1
        rig.keeper.close([answer.lease_id])
        await rig.assert_nothing_leaks()
        assert rig.state().blocks.find(keys[3]) is None

    run(test, tmp_path)


def test_two_requests_share_one_read(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        keys = chain("a", 6)
        await rig.directory.publish_segments("fake", [rig.store.put(keys)])
        rig.store.hang = threading.Event()
        first = await rig.open(keys)
        second = await rig.open(keys)
        assert list(first.slots) == list(second.slots)
        rig.keeper.close([first.lease_id])
        rig.store.hang.set()
        await until(lambda: rig.row(second).ready[:2] == (6, 6))
        assert rig.store.num_reads == 6
        rig.assert_bytes(second, keys)
        rig.keeper.close([second.lease_id])
        await rig.assert_nothing_leaks()

    run(test, tmp_path)


def test_closed_request_does_not_free_slots_under_a_running_read(tmp_path: Path) -> None:
    """kv.md 8, bug 9: the read still writes into its slots."""

    async def test(rig: Rig) -> None:
        keys = chain("a", 6)
        await rig.directory.publish_segments("fake", [rig.store.put(keys)])
        hang = rig.store.hang = threading.Event()
        answer = await rig.open(keys)
        rig.keeper.close([answer.lease_id])
        reservation = rig.keeper.reserve(OWNER, num_blocks=NUM_BLOCKS, num_snapshots=0, tenant="")
        assert reservation is not None
        assert not set(reservation.slots) & set(answer.slots)
        assert len(reservation.slots) == NUM_BLOCKS - 6
        rig.keeper.close([reservation.lease_id])
        hang.set()
        await rig.assert_nothing_leaks()

    run(test, tmp_path)


def test_read_that_hangs_is_given_up_at_its_limit_and_its_slots_stay_away(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        keys = chain("a", 6)
        await rig.directory.publish_segments("fake", [rig.store.put(keys)])
        hang = rig.store.hang = threading.Event()
        answer = await rig.open(keys, limit_seconds=0.05)
        await until(lambda: rig.row(answer).limit_blocks == 0)
        rig.keeper.close([answer.lease_id])
        assert rig.state().blocks.counts()[SlotState.QUARANTINED] == 6
        hang.set()
        await rig.assert_nothing_leaks()

    run(test, tmp_path)


def test_failing_store_is_left_alone_then_tried_again(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        rig.store.fail_reads = True
        for round_ in range(3):
            keys = chain(f"r{round_}-", 2)
            await rig.directory.publish_segments("fake", [rig.store.put(keys)])
            answer = await rig.open(keys)
            await until(lambda answer=answer: rig.row(answer).limit_blocks == 0)
            rig.keeper.close([answer.lease_id])
        await until(lambda: not rig.keeper.store.is_up)
        assert (await rig.open(keys)).found_blocks == 0

        rig.store.fail_reads = False

        async def is_back() -> bool:
            answer = await rig.open(keys)
            if answer.found_blocks == 2:
                await until(lambda: rig.row(answer).ready[:2] == (2, 2))
            rig.keeper.close([answer.lease_id])
            return answer.found_blocks == 2

        async with asyncio.timeout(20):
            while not await is_back():
                await asyncio.sleep(0.05)
        await until(lambda: rig.keeper.store.is_up)
        await rig.assert_nothing_leaks()

    run(test, tmp_path)


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


def test_write_back_survives_a_store_that_breaks_its_promise(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        publish = rig.store.publish

        def fail_once(records: Sequence[RecordWrite]) -> SegmentInfo:
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


def test_full_pool_shrinks_the_hit_and_says_so(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        keys = chain("a", 30)
        await rig.directory.publish_segments("fake", [rig.store.put(keys)])
        reservation = rig.keeper.reserve(OWNER, num_blocks=NUM_BLOCKS - 8, num_snapshots=0, tenant="")
        assert reservation is not None
        answer = await rig.open(keys)
        assert (answer.found_blocks, answer.shrunk_blocks) == (8, 22)
        assert answer.retry_seconds > 0
        rig.keeper.close([reservation.lease_id, answer.lease_id])
        await rig.assert_nothing_leaks()

    run(test, tmp_path)


def test_truncated_lease_gives_its_end_back(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        keys = chain("a", 10)
        await rig.save(keys, snapshots=[keys[9]])
        answer = await rig.open(keys, want_snapshot=True)
        assert answer.snapshot is SnapshotState.READY
        assert rig.keeper.truncate(answer.lease_id, num_blocks=4, drop_snapshot=True)
        row = rig.row(answer)
        assert (row.num_blocks, row.limit_blocks, row.snapshot_state) == (4, 4, SnapshotState.NONE)
        blocks = rig.state().blocks
        assert [blocks.is_takeable(slot) for slot in answer.slots] == [False] * 4 + [True] * 6
        assert not rig.keeper.truncate(999, num_blocks=0, drop_snapshot=False)
        rig.keeper.close([answer.lease_id])
        await rig.assert_nothing_leaks()

    run(test, tmp_path)


def test_replayed_blocks_are_missing_for_who_refuses_them(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        exact, replayed = chain("a", 3), chain("b", 3)
        segments = [rig.store.put(exact), rig.store.put(replayed, provenance=1)]
        await rig.directory.publish_segments("fake", segments)
        keys = exact + replayed
        answer = await rig.open(keys, refuse_replayed=True)
        await until(lambda: rig.row(answer).ready[:2] == (3, 3) and rig.row(answer).limit_blocks == 3)
        rig.keeper.close([answer.lease_id])
        await until(lambda: rig.state().is_idle)
        known = await rig.open(keys, refuse_replayed=True)
        either = await rig.open(keys)
        assert (known.found_blocks, either.found_blocks) == (3, 6)
        rig.keeper.close([known.lease_id, either.lease_id])
        await rig.assert_nothing_leaks()

    run(test, tmp_path)


async def tell_peer_has(rig: Rig, key: BlockKey, thing: bytes) -> None:
    peer = LocalDirectory(
        rig.shared,
        Holder(holder_id="peer", epoch=1, endpoint="10.0.0.1:7"),
        clock=rig.clock,
    )
    await peer.publish_snapshots([snapshot_key(key)])
    rig.transport.things[key] = thing


def test_snapshot_is_pulled_from_a_peer_then_served_here(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        keys = chain("a", 3)
        await rig.save(keys)
        await tell_peer_has(rig, keys[2], make_snapshot(keys[2]))
        answer = await rig.open(keys, want_snapshot=True)
        assert answer.snapshot is SnapshotState.PULLING
        await until(lambda: rig.row(answer).snapshot_state is SnapshotState.READY)
        assert bytes(rig.pool.snapshot(answer.snapshot_slot)) == make_snapshot(keys[2])
        again = await rig.open(keys, want_snapshot=True)
        assert (again.snapshot, again.snapshot_slot) == (SnapshotState.READY, answer.snapshot_slot)
        source = rig.keeper.find_snapshot(keys[2])
        assert source is not None
        assert bytes(source.view) == make_snapshot(keys[2])
        rig.keeper.close([answer.lease_id, again.lease_id])
        assert not rig.state().is_idle, "pinned while it is sent"
        source.release()
        await rig.assert_nothing_leaks()

    run(test, tmp_path)


@pytest.mark.parametrize(
    ("state", "thing"),
    [
        (PullState.ABSENT, b""),
        (PullState.FAILED, b""),
        (PullState.DONE, make_snapshot(chain("other", 1)[0])),
        (PullState.DONE, make_snapshot(chain("a", 3)[2])[:-1] + b"\x01"),
        (PullState.DONE, make_snapshot(chain("a", 3)[2])[:9000] + b"\xff" * 7384),
    ],
    ids=["absent", "failed", "other-snapshot", "damaged-padding", "torn"],
)
def test_snapshot_that_does_not_arrive_whole_is_never_ready(tmp_path: Path, state: PullState, thing: bytes) -> None:
    async def test(rig: Rig) -> None:
        keys = chain("a", 3)
        await rig.save(keys)
        await tell_peer_has(rig, keys[2], thing)
        rig.transport.state = state
        answer = await rig.open(keys, want_snapshot=True)
        ended = (SnapshotState.FAILED, SnapshotState.READY)
        await until(lambda: rig.row(answer).snapshot_state in ended)
        is_whole = thing[:-1] == make_snapshot(keys[2])[:-1]  # padding carries nothing
        assert (rig.row(answer).snapshot_state is SnapshotState.READY) is is_whole
        rig.keeper.close([answer.lease_id])
        await rig.assert_nothing_leaks()

    run(test, tmp_path)


@pytest.mark.parametrize(
    ("order", "kept"), [((True, False), 0), ((False, True), 1), ((True, True), 0), ((False, False), 0)]
)
def test_exact_snapshot_takes_the_place_of_a_replayed_one_and_never_the_other_way_round(
    tmp_path: Path, order: tuple[bool, bool], kept: int
) -> None:
    async def test(rig: Rig) -> None:
        keys = chain("a", 3)
        await rig.save(keys)
        records = [make_snapshot(keys[2], generation=number, exact=exact) for number, exact in enumerate(order, 1)]
        leases = []
        for record in records:
            await commit_snapshot(rig, keys[2], record)
            leases.append(await rig.open(keys, want_snapshot=True))
        assert bytes(rig.pool.snapshot(leases[1].snapshot_slot)) == records[kept]
        assert bytes(rig.pool.snapshot(leases[0].snapshot_slot)) == records[0], "a lease keeps what it has"
        rig.keeper.close([lease.lease_id for lease in leases])
        await rig.assert_nothing_leaks()

    run(test, tmp_path)


def test_replayed_snapshot_does_not_replace_the_exact_one_that_is_being_pulled(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        keys = chain("a", 3)
        await rig.save(keys)
        exact = make_snapshot(keys[2], generation=2)
        await tell_peer_has(rig, keys[2], exact)
        rig.transport.hold = asyncio.Event()
        answer = await rig.open(keys, want_snapshot=True)
        assert answer.snapshot is SnapshotState.PULLING
        await commit_snapshot(rig, keys[2], make_snapshot(keys[2], exact=False))
        rig.transport.hold.set()
        await until(lambda: rig.row(answer).snapshot_state is SnapshotState.READY)
        again = await rig.open(keys, want_snapshot=True)
        assert bytes(rig.pool.snapshot(again.snapshot_slot)) == exact
        rig.keeper.close([answer.lease_id, again.lease_id])
        await rig.assert_nothing_leaks()

    run(test, tmp_path)


async def commit_snapshot(rig: Rig, key: BlockKey, record: bytes) -> None:
    reservation = rig.keeper.reserve(OWNER, num_blocks=0, num_snapshots=1, tenant="")
    assert reservation is not None
    (slot,) = reservation.snapshot_slots
    rig.pool.snapshot(slot)[:] = record
    await rig.keeper.commit(reservation.lease_id, [], [SlotKey(slot=slot, key=snapshot_key(key))])


def test_late_pull_keeps_its_slot_out_of_the_pool_until_it_settles(tmp_path: Path) -> None:
    """ai-dynamo/nixl#2067: what was given up may still be written."""

    async def test(rig: Rig) -> None:
        keys = chain("a", 3)
        await rig.save(keys)
        await tell_peer_has(rig, keys[2], make_snapshot(keys[2]))
        rig.transport.state = PullState.LATE
        answer = await rig.open(keys, want_snapshot=True)
        await until(lambda: rig.row(answer).snapshot_state is SnapshotState.FAILED)
        rig.keeper.close([answer.lease_id])
        taken = rig.keeper.reserve(OWNER, num_blocks=0, num_snapshots=NUM_SNAPSHOTS, tenant="")
        assert taken is not None
        assert len(taken.snapshot_slots) == NUM_SNAPSHOTS - 1
        assert answer.snapshot_slot not in taken.snapshot_slots
        rig.transport.late[0][:4] = b"late"
        rig.transport.is_settled = True
        await until(lambda: rig.state().snapshots.num_takeable == 1)
        rig.keeper.close([taken.lease_id])
        await rig.assert_nothing_leaks()
        assert rig.transport.closed_peers == []

    run(test, tmp_path)


def test_too_many_late_pulls_close_the_peer(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        keys = chain("a", 3)
        await rig.save(keys)
        rig.transport.state = PullState.LATE
        for num in (1, 2):
            await tell_peer_has(rig, keys[num], b"")
            answer = await rig.open(keys[: num + 1], want_snapshot=True)
            await until(lambda answer=answer: rig.row(answer).snapshot_state is SnapshotState.FAILED)
            rig.keeper.close([answer.lease_id])
        await until(lambda: rig.transport.closed_peers == ["10.0.0.1:7"])
        await rig.assert_nothing_leaks()

    run(test, tmp_path, max_quarantined_slots=1)


def test_evicted_snapshot_is_withdrawn_from_the_directory(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        keys = chain("a", NUM_SNAPSHOTS + 1)
        for key in keys:
            await rig.save([key], snapshots=[key])
        peer = LocalDirectory(
            rig.shared,
            Holder(holder_id="peer", epoch=1, endpoint="10.0.0.1:7"),
            clock=rig.clock,
        )
        async with asyncio.timeout(20):
            while await peer.lookup_snapshot(snapshot_key(keys[0])):
                await asyncio.sleep(0.005)
        assert rig.keeper.find_snapshot(keys[0]) is None
        found = await peer.lookup_snapshot(snapshot_key(keys[-1]))
        assert [one.holder.holder_id for one in found] == ["me"]

    run(test, tmp_path)


def test_slots_of_a_broken_session_come_back_after_grace_and_death_only(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        keys = chain("a", 4)
        await rig.save(keys)
        answer = await rig.open(keys)
        rig.keeper.reserve(OWNER, num_blocks=5, num_snapshots=1, tenant="")
        session = rig.keeper.sessions.find(OWNER)
        assert session is not None
        rig.keeper.disconnect(session, session.connection)
        assert rig.row(answer).state is LeaseState.GRACE
        with pytest.raises(ConfigError, match="no ready session"):
            await rig.open(keys)

        rig.clock.ahead = 60.0
        await asyncio.sleep(0.3)
        assert len(rig.state().leases) == 2, "the process still maps the pool and may write"

        second = PoolMemory.attach(rig.pool.path, nonce=rig.pool.nonce)
        rig.pool.close()
        rig.pool = second
        await rig.assert_nothing_leaks()
        assert second.lease(answer.row).state is LeaseState.LOST

    run(test, tmp_path)


def test_rank_that_comes_back_keeps_what_it_declares(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        keys = chain("a", 4)
        await rig.save(keys)
        kept, dropped = await rig.open(keys), await rig.open(keys)
        session = rig.keeper.sessions.find(OWNER)
        assert session is not None
        old = session.connection
        again, adopted = await rig.keeper.connect(
            owner_epoch=OWNER, engine_id="e", rank=0, geometry=GEOMETRY, held_leases=[kept.lease_id]
        )
        rig.keeper.disconnect(again, old)  # the old stream's end comes late
        rig.keeper.attach(again)
        assert adopted == [kept.lease_id]
        rig.clock.ahead = 60.0
        await until(lambda: len(rig.state().leases) == 1)
        assert rig.row(kept).state is LeaseState.LIVE
        assert rig.pool.lease(dropped.row).state is LeaseState.LOST
        rig.keeper.close([kept.lease_id])
        await rig.assert_nothing_leaks()

    run(test, tmp_path)


def test_other_model_waits_until_leases_are_closed_and_empties_the_pool(tmp_path: Path) -> None:
    other = PoolGeometry(
        layout_digest=bytes(32),
        header_bytes=GEOMETRY.header_bytes,
        payload_bytes=GEOMETRY.payload_bytes,
        record_bytes=GEOMETRY.record_bytes,
        group_bytes=(GEOMETRY.payload_bytes,),
        snapshot_payload_bytes=SNAPSHOT_OTHER,
    )

    async def test(rig: Rig) -> None:
        keys = chain("a", 4)
        await rig.save(keys)
        answer = await rig.open(keys)
        hello = {"owner_epoch": 5, "engine_id": "f", "rank": 1, "geometry": other, "held_leases": ()}
        with pytest.raises(ConfigError, match="holds 1 leases"):
            await rig.keeper.connect(**hello)
        assert rig.pool.geometry == GEOMETRY
        rig.keeper.close([answer.lease_id])
        await rig.keeper.connect(**hello)
        assert rig.keeper.memory.geometry == other
        with pytest.raises(ConfigError, match="no ready session"):
            await rig.open(keys)

    run(test, tmp_path)


SNAPSHOT_OTHER = 5000


def test_ranks_that_bring_another_model_together_lay_the_pool_out_once(tmp_path: Path) -> None:
    other = replace(GEOMETRY, layout_digest=bytes(32))

    async def test(rig: Rig) -> None:
        withdraw, may_go_on = rig.directory.withdraw_snapshots, asyncio.Event()

        async def withdraw_slowly(keys: Sequence[bytes]) -> None:
            await may_go_on.wait()
            await withdraw(keys)

        rig.directory.withdraw_snapshots = withdraw_slowly  # type: ignore[method-assign]

        async def join(owner: int) -> Lease:
            session, _ = await rig.keeper.connect(
                owner_epoch=owner, engine_id="f", rank=owner, geometry=other, held_leases=()
            )
            rig.pool.set_echo(session.echo_index, owner)
            rig.keeper.attach(session)
            reservation = rig.keeper.reserve(owner, num_blocks=3, num_snapshots=0, tenant="")
            assert reservation is not None
            return reservation

        joining = [asyncio.create_task(join(owner)) for owner in (5, 6)]
        for _ in range(20):
            await asyncio.sleep(0)
        may_go_on.set()
        first, second = await asyncio.gather(*joining)
        assert not set(first.slots) & set(second.slots)
        assert [rig.state().leases.find(one.lease_id) for one in (first, second)] == [first, second]

    run(test, tmp_path)


def test_echo_that_is_not_there_tells_the_shared_memory_problem(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        session, _ = await rig.keeper.connect(owner_epoch=6, engine_id="e", rank=1, geometry=GEOMETRY, held_leases=())
        with pytest.raises(ConfigError, match="need the same /dev/shm"):
            rig.keeper.attach(session)

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
