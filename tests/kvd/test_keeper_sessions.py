"""Ranks of the Keeper: gone, back, with another model, or with calls that they gave up."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from prefill_engine.kv.directory import SnapshotLocation
from prefill_engine.kv.pool_memory import LeaseState, PoolGeometry, PoolMemory
from prefill_engine.kvd.leases import Lease
from prefill_plan.errors import ConfigError
from prefill_testing.keeper_rig import OWNER, Rig, run, tell_peer_has, until
from prefill_testing.kvd_fakes import GEOMETRY, chain, make_snapshot


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


# --- calls whose answer nobody got (kvd was frozen between granting and answering)
def test_lease_of_an_abandoned_call_ends_and_others_stay(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        keys = chain("a", 4)
        await rig.save(keys)
        lost, kept = await rig.open(keys, call_id=1), await rig.open(keys, call_id=2)
        reservation = rig.keeper.reserve(OWNER, num_blocks=2, num_snapshots=1, tenant="", call_id=3)
        assert reservation is not None
        abandon(rig, 1, 3)
        assert [lease.lease_id for lease in rig.state().leases] == [kept.lease_id]
        assert rig.row(kept).state is LeaseState.LIVE
        assert rig.pool.lease(lost.row).lease_id != lost.lease_id
        rig.keeper.close([kept.lease_id])
        await rig.assert_nothing_leaks()

    run(test, tmp_path)


def test_call_that_was_abandoned_before_it_began_gets_nothing(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        keys = chain("a", 4)
        await rig.save(keys)
        abandon(rig, 1, 2)
        assert (await rig.open(keys, call_id=1)).lease_id == 0
        assert rig.keeper.reserve(OWNER, num_blocks=2, num_snapshots=0, tenant="", call_id=2) is None
        await rig.assert_nothing_leaks()

    run(test, tmp_path)


@pytest.mark.parametrize("how", ["abandoned", "rank-dead"])
def test_lease_that_ends_while_its_open_asks_the_directory_leaves_nothing(tmp_path: Path, how: str) -> None:
    async def test(rig: Rig) -> None:
        keys = chain("a", 4)
        await rig.save(keys)
        asked, may_answer = asyncio.Event(), asyncio.Event()
        look_up = rig.directory.lookup_snapshot

        async def look_up_slowly(key: bytes) -> Sequence[SnapshotLocation]:
            asked.set()
            await may_answer.wait()
            return await look_up(key)

        await tell_peer_has(rig, keys[3], make_snapshot(keys[3]))
        rig.directory.lookup_snapshot = look_up_slowly  # type: ignore[method-assign]
        opening = asyncio.create_task(rig.open(keys, want_snapshot=True, call_id=1))
        await asked.wait()
        if how == "abandoned":
            abandon(rig, 1)
        else:
            session = rig.keeper.sessions.find(OWNER)
            assert session is not None
            rig.keeper.disconnect(session, session.connection)
            rig.pool.close()
            rig.clock.ahead = 60.0
        await until(lambda: len(rig.state().leases) == 0)
        may_answer.set()
        assert (await opening).lease_id == 0
        await rig.assert_nothing_leaks()

    run(test, tmp_path)


def abandon(rig: Rig, *call_ids: int) -> None:
    session = rig.keeper.sessions.find(OWNER)
    assert session is not None
    rig.keeper.abandon(session, call_ids)
