"""Hits of the Keeper: from its pool, from a store that fails on demand, shared, cut and cancelled."""

import asyncio
import dataclasses
import threading
from pathlib import Path

from prefill_engine.kv.pool_memory import SnapshotState
from prefill_engine.kvd.slot_pool import SlotState
from prefill_plan.block_keys import BlockKey
from prefill_testing.keeper_rig import NUM_BLOCKS, OWNER, Rig, run, until
from prefill_testing.kvd_fakes import chain


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


def test_lease_that_a_step_waits_for_has_its_reads_urged_and_no_others(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        keys, others = chain("a", 3), chain("b", 3)
        await rig.directory.publish_segments("fake", [rig.store.put(keys), rig.store.put(others)])
        rig.store.hang = threading.Event()
        mine, other = await rig.open(keys), await rig.open(others)
        await until(lambda: len(rig.store.jobs) == 2)
        first_mine = rig.store.jobs[0].reads[0].key in keys
        job, other_job = rig.store.jobs if first_mine else reversed(rig.store.jobs)
        session = rig.keeper.sessions.find(OWNER)
        assert session is not None

        rig.keeper.urge(dataclasses.replace(session, owner_epoch=OWNER + 1), [mine.lease_id])
        rig.keeper.urge(session, [12345])
        assert not job.is_urgent()
        rig.keeper.urge(session, [mine.lease_id])

        assert (job.is_urgent(), other_job.is_urgent()) == (True, False)
        rig.store.hang.set()
        rig.keeper.close([mine.lease_id, other.lease_id])
        await rig.assert_nothing_leaks()

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


def test_block_whose_read_was_cancelled_is_read_again_for_the_next_request(tmp_path: Path) -> None:
    """It must not wait for the read that nobody ends."""

    async def test(rig: Rig) -> None:
        keys = chain("a", 6)
        await rig.directory.publish_segments("fake", [rig.store.put(keys)])
        hang = rig.store.hang = threading.Event()
        first = await rig.open(keys)
        rig.keeper.close([first.lease_id])
        second = await rig.open(keys)
        assert second.found_blocks == 6
        hang.set()
        await until(lambda: rig.row(second).ready[:2] == (6, 6))
        rig.assert_bytes(second, keys)
        rig.keeper.close([second.lease_id])
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
