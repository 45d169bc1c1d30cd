"""Window snapshots of the Keeper: pulled from peers, exact before replayed, late ones quarantined."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prefill_engine.kv.directory import Holder
from prefill_engine.kv.pool_memory import SnapshotState
from prefill_engine.kv.snapshot_record import SnapshotCodec
from prefill_engine.kv.transport.contract import PullState
from prefill_engine.kvd.directory_local import LocalDirectory
from prefill_engine.kvd.slot_pool import SlotState
from prefill_plan.block_keys import BlockKey, snapshot_key
from prefill_plan.kvd_config import KvdConfig
from prefill_testing.keeper_rig import NUM_SNAPSHOTS, OWNER, Rig, commit_snapshot, open_rig, run, tell_peer_has, until
from prefill_testing.kvd_fakes import GEOMETRY, chain, make_snapshot


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


def test_transport_is_told_the_snapshot_area_and_no_more(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        await until(lambda: len(rig.transport.regions) == 1)
        (region,) = rig.transport.regions
        assert len(region) == NUM_SNAPSHOTS * GEOMETRY.snapshot_record_bytes
        rig.pool.snapshot(0)[:5] = b"first"
        rig.pool.snapshot(NUM_SNAPSHOTS - 1)[-4:] = b"last"
        assert (bytes(region[:5]), bytes(region[-4:])) == (b"first", b"last")

    run(test, tmp_path)


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
    """With the default limit, which is more than the pool has slots."""
    assert KvdConfig().max_quarantined_slots > NUM_SNAPSHOTS

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

    run(test, tmp_path)


def test_one_pull_that_stays_late_closes_its_peer_once(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        keys = chain("a", 2)
        await rig.save(keys)
        await tell_peer_has(rig, keys[1], b"")
        rig.transport.state, rig.transport.closing_settles = PullState.LATE, False
        answer = await rig.open(keys, want_snapshot=True)
        await until(lambda: rig.row(answer).snapshot_state is SnapshotState.FAILED)
        rig.keeper.close([answer.lease_id])
        for _ in range(3):
            await rig.keeper._tick()
        assert rig.transport.closed_peers == []
        rig.clock.ahead = 6.0
        for _ in range(3):
            await rig.keeper._tick()
        assert rig.transport.closed_peers == ["10.0.0.1:7"], "not again while it settles"
        rig.transport.is_settled = True
        await rig.assert_nothing_leaks()

    run(test, tmp_path)


def test_lookup_whose_snapshot_is_still_being_pulled_is_not_counted_as_exact(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        keys = chain("a", 3)
        await rig.save(keys)
        await tell_peer_has(rig, keys[2], b"torn")
        rig.transport.state = PullState.FAILED
        leases = [await rig.open(keys, want_snapshot=True)]
        assert leases[0].snapshot is SnapshotState.PULLING
        await until(lambda: rig.row(leases[0]).snapshot_state is SnapshotState.FAILED)
        await commit_snapshot(rig, keys[2], make_snapshot(keys[2]))
        leases += [await rig.open(keys, want_snapshot=want) for want in (True, False)]
        await rig.open(chain("never", 1))
        counts = {mode: rig.metric("open_total", mode=mode) for mode in ("exact", "pulling", "replay", "miss")}
        assert counts == {"exact": 1, "pulling": 1, "replay": 1, "miss": 1}
        rig.keeper.close([lease.lease_id for lease in leases])
        await rig.assert_nothing_leaks()

    run(test, tmp_path)


def test_tenant_that_floods_snapshots_leaves_another_one_its_share(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        quiet = chain("quiet", 1)[0]
        await commit_snapshot(rig, quiet, make_snapshot(quiet), tenant="quiet")
        for key in chain("loud", 3 * NUM_SNAPSHOTS):
            await commit_snapshot(rig, key, make_snapshot(key), tenant="loud")
        assert snapshot_key(quiet) in rig.keeper.snapshot_keys()
        assert len(rig.keeper.snapshot_keys()) == NUM_SNAPSHOTS

    run(test, tmp_path)


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


# --- after a restart
@pytest.mark.parametrize(
    ("left_exact", "new_exact", "stays"),
    [(True, False, True), (True, True, False), (False, True, False), (False, False, False)],
    ids=["exact-then-replayed", "both-exact", "replayed-then-exact", "both-replayed"],
)
def test_snapshot_that_a_restart_left_unverified_gives_way_to_one_that_is_as_good(
    tmp_path: Path, left_exact: bool, new_exact: bool, stays: bool
) -> None:
    async def test(rig: Rig) -> None:
        (key,) = chain("a", 1)
        pool = rig.state().snapshots
        pool.quarantine_all()
        rig.pool.snapshot(1)[:] = make_snapshot(key, exact=left_exact)
        for slot in range(NUM_SNAPSHOTS):
            pool.recover(slot, snapshot_key(key) if slot == 1 else None)
        await commit_snapshot(rig, key, make_snapshot(key, generation=2, exact=new_exact))
        found = pool.find(snapshot_key(key))
        assert (found == 1, pool.is_suspect(found)) == (stays, stays)
        await rig.assert_nothing_leaks()

    run(test, tmp_path)


@pytest.fixture
def recovery_may_go_on(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """kvd looks at each slot by itself, and at the snapshot that its former life left when this is set."""
    event, find_key = threading.Event(), SnapshotCodec.find_key

    def find_key_later(codec: SnapshotCodec, record: Any) -> bytes | None:
        if any(bytes(record[:64])):
            event.wait()
        return find_key(codec, record)

    monkeypatch.setattr("prefill_engine.kvd.recovery._CHUNK", 1)
    monkeypatch.setattr(SnapshotCodec, "find_key", find_key_later)
    yield event
    event.set()


async def leave_behind(tmp_path: Path, records: dict[BlockKey, bytes]) -> None:
    """A life of kvd that ends with these snapshots in its pool, and nothing in the first slot."""
    async with open_rig(tmp_path, has_store=False, epoch=8) as rig:
        first = rig.keeper.reserve(OWNER, num_blocks=0, num_snapshots=1, tenant="")
        assert first is not None
        for key, record in records.items():
            await commit_snapshot(rig, key, record)
        rig.keeper.close([first.lease_id])


async def until_first_slot_is_known(rig: Rig) -> None:
    await until(lambda: rig.state().snapshots.counts()[SlotState.FREE] == 1)


@pytest.mark.parametrize(("left_exact", "kept"), [(True, 0), (False, 1)], ids=["exact-left", "replayed-left"])
def test_exact_snapshot_is_found_again_although_a_replayed_one_was_committed_before_it_was_looked_at(
    tmp_path: Path, recovery_may_go_on: threading.Event, left_exact: bool, kept: int
) -> None:
    async def main() -> None:
        (key,) = chain("a", 1)
        records = [make_snapshot(key, exact=left_exact), make_snapshot(key, generation=2, exact=False)]
        await leave_behind(tmp_path, {key: records[0]})
        async with open_rig(tmp_path, has_store=False) as rig:
            pool = rig.state().snapshots
            await until_first_slot_is_known(rig)
            await commit_snapshot(rig, key, records[1])
            recovery_may_go_on.set()
            await until(lambda: pool.counts()[SlotState.QUARANTINED] == 0 and pool.is_idle)
            source = rig.keeper.find_snapshot(key)
            assert source is not None
            assert bytes(source.view) == records[kept]
            source.release()
            await rig.assert_nothing_leaks()

    asyncio.run(main())


def test_pull_that_hangs_does_not_hold_up_the_snapshots_that_a_restart_left(
    tmp_path: Path, recovery_may_go_on: threading.Event
) -> None:
    async def main() -> None:
        other, *left = chain("a", NUM_SNAPSHOTS)
        await leave_behind(tmp_path, {key: make_snapshot(key) for key in left})
        async with open_rig(tmp_path, has_store=False) as rig:
            await until_first_slot_is_known(rig)
            rig.transport.hold = asyncio.Event()
            await tell_peer_has(rig, other, make_snapshot(other))
            await rig.save([other])
            answer = await rig.open([other], want_snapshot=True)
            assert answer.snapshot is SnapshotState.PULLING
            recovery_may_go_on.set()
            await until(lambda: set(rig.keeper.snapshot_keys()) == {snapshot_key(key) for key in left})
            assert rig.row(answer).snapshot_state is SnapshotState.PULLING
            rig.transport.hold.set()
            rig.keeper.close([answer.lease_id])
            await rig.assert_nothing_leaks()

    asyncio.run(main())
