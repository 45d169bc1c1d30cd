"""Ranks and kvd killed or frozen: all slots come back, no byte is wrong (kv.md 7.5)."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from prefill_engine.kv.lease_record import LeaseState
from prefill_testing.kvd_fakes import chain
from prefill_testing.kvd_process import (
    NUM_BLOCKS,
    NUM_SNAPSHOTS,
    PHASES,
    KvdProcess,
    RankClient,
    end,
    start_ranks,
    wait_until,
)

KEYS = chain("k", 6)


@pytest.fixture
def kvd(tmp_path: Path) -> Iterator[KvdProcess]:
    process = KvdProcess(tmp_path)
    yield process
    process.kill()


def test_killed_ranks_leave_nothing_behind(kvd: KvdProcess) -> None:
    """One rank per phase, all killed while there."""
    end(start_ranks(kvd.socket, *PHASES))
    wait_until(lambda: kvd.log.read_text().count("session over") == len(PHASES), "end of the sessions")
    rank = RankClient(kvd.socket)
    for phase in PHASES:
        keys = chain(f"{phase}-", 6)
        answer = rank.open(keys)
        if phase in ("committed", "opened"):
            assert rank.read(answer, keys) == 6
        else:
            assert answer.found_blocks == 0, phase
        rank.close_leases(answer.lease_id)
    reserved = rank.reserve(NUM_BLOCKS, NUM_SNAPSHOTS)
    assert (len(reserved.slots), len(reserved.snapshot_slots)) == (NUM_BLOCKS, NUM_SNAPSHOTS)
    rank.leave()


def test_frozen_rank_keeps_its_slots_and_disturbs_nobody(kvd: KvdProcess) -> None:
    frozen = start_ranks(kvd.socket, "half-written")
    frozen.send_signal(signal.SIGSTOP)
    rank = RankClient(kvd.socket, owner=2)
    others = chain("o", 4)
    assert rank.save(others).stored_blocks == 4
    assert rank.read(rank.open(others), others) == 4
    reserved = rank.reserve(NUM_BLOCKS)
    assert len(reserved.slots) == NUM_BLOCKS - 6 - 4, "neither the frozen rank's nor leased ones"
    frozen.send_signal(signal.SIGCONT)
    end(frozen)
    wait_until(lambda: len(rank.reserve(1).slots) == 1, "slots of the dead rank")
    rank.leave()


def test_frozen_rank_keeps_its_slots_over_a_restart_of_kvd(kvd: KvdProcess) -> None:
    """It can't declare its reservation, but it may go on writing: the kernel says it lives."""
    frozen = start_ranks(kvd.socket, "half-written")
    frozen.send_signal(signal.SIGSTOP)
    kvd.kill()
    kvd.start()
    rank = RankClient(kvd.socket, owner=2)
    wait_until(lambda: kvd.num_usable_blocks() == NUM_BLOCKS - 6, "the rest of the pool")
    assert kvd.metric('leases{state="grace"}') == 1
    assert len(rank.reserve(NUM_BLOCKS).slots) == NUM_BLOCKS - 6
    end(frozen)
    wait_until(lambda: kvd.metric('leases{state="grace"}') == 0, "end of the dead rank's lease")
    assert len(rank.reserve(NUM_BLOCKS).slots) == 6
    rank.leave()


def test_restarted_kvd_serves_what_verifies_and_keeps_declared_leases(kvd: KvdProcess) -> None:
    rank = RankClient(kvd.socket)
    rank.save(KEYS, KEYS[-1:])
    answer = rank.open(KEYS, want_snapshot=True)
    assert rank.read(answer, KEYS) == 6
    pool, epoch = rank.pool, rank.welcome.kvd_epoch
    kvd.kill()
    # What a crash or a foreign write may leave: one block whose bytes changed behind kvd's back.
    damaged = answer.slots[4]
    pool.payload(damaged)[7] ^= 1
    for segment in (kvd.folder / "store").rglob("*.seg"):
        segment.unlink()

    kvd.start()
    rank = RankClient(kvd.socket, held=[answer.lease_id, 12345], pool=pool)

    assert rank.pool is pool, "the same file: nothing to map or register again"
    assert rank.welcome.kvd_epoch > epoch
    assert list(rank.welcome.adopted_leases) == [answer.lease_id]
    assert rank.row(answer).state is LeaseState.LIVE
    found = []

    def is_recovered() -> bool:
        found[:] = [rank.open(KEYS, want_snapshot=True)]
        return found[0].found_blocks == 6

    wait_until(is_recovered, "slots to be looked at")
    assert rank.read(found[0], KEYS) == 4, "the damaged block ends the hit"
    assert kvd.metric('verify_fail_total{reason="crc"}') == 1
    assert rank.close_leases(answer.lease_id).unknown == 0
    rank.leave()
    wait_until(lambda: kvd.num_leases() == 0 and kvd.num_usable_blocks() == NUM_BLOCKS, "all slots")


def test_restarted_kvd_drops_leases_that_nobody_declares(kvd: KvdProcess) -> None:
    rank = RankClient(kvd.socket)
    rank.save(KEYS)
    answer = rank.open(KEYS)
    rank.reserve(3)
    pool = rank.pool
    kvd.kill()
    kvd.start()
    rank = RankClient(kvd.socket, pool=pool)
    assert list(rank.welcome.adopted_leases) == []
    wait_until(lambda: pool.lease(answer.lease_row).state is LeaseState.LOST, "end of the lease")
    wait_until(lambda: kvd.num_usable_blocks() == NUM_BLOCKS, "its slots")
    rank.leave()


def test_reservation_can_be_committed_after_a_restart_of_kvd(kvd: KvdProcess) -> None:
    rank = RankClient(kvd.socket)
    reserved = rank.reserve(6, 1)
    pool = rank.pool
    kvd.kill()
    kvd.start()
    rank = RankClient(kvd.socket, held=[reserved.reservation_id], pool=pool)
    assert list(rank.welcome.adopted_leases) == [reserved.reservation_id]
    result = rank.stub.Commit(rank.write(reserved, KEYS, KEYS[-1:]))
    assert (result.stored_blocks, result.held_snapshots) == (6, 1)
    assert rank.read(rank.open(KEYS), KEYS) == 6
    rank.leave()
