"""kvd killed again and again while ranks save, open and read at random: no byte is wrong, nothing is lost for good."""

import random
import threading
import time
from pathlib import Path

import grpc

from prefill_testing.kvd_fakes import chain
from prefill_testing.kvd_process import NUM_BLOCKS, NUM_SNAPSHOTS, KvdProcess, RankClient, wait_until

NUM_KILLS = 3
CHAINS = [chain(f"storm{number}-", 7) for number in range(9)]


class BusyRank:
    """A rank in a thread: works until told to stop, and connects again when kvd is gone."""

    def __init__(self, socket: str, owner: int) -> None:
        self.num_read = self.num_saved = self.num_sessions = 0
        self.failure: BaseException | None = None
        self._socket, self._owner = socket, owner
        self._random = random.Random(owner)
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        pool = None
        while not self.stop.is_set() and self.failure is None:
            try:
                rank = RankClient(self._socket, owner=self._owner, pool=pool)
                self.num_sessions += 1
                pool = rank.pool
                while not self.stop.is_set():
                    self._work(rank)
            except (grpc.RpcError, grpc.FutureTimeoutError, StopIteration):
                time.sleep(0.05)
            except BaseException as failure:
                self.failure = failure
        if pool is not None:
            rank.leave()

    def _work(self, rank: RankClient) -> None:
        keys = self._random.choice(CHAINS)
        if self._random.random() < 0.4:
            reserved = rank.reserve(len(keys), 1)
            if len(reserved.slots) == len(keys) and len(reserved.snapshot_slots) == 1:
                commit = rank.write(reserved, keys, keys[-1:])
                self.num_saved += rank.stub.Commit(commit, timeout=30).stored_blocks
            else:
                rank.close_leases(reserved.reservation_id)
            return
        answer = rank.open(keys, want_snapshot=True)
        if answer.lease_id:
            self.num_read += self._read(rank, answer, keys)
            rank.close_leases(answer.lease_id)

    @staticmethod
    def _read(rank: RankClient, answer: object, keys: list[bytes]) -> int:
        """Bytes count only if the lease stands after they were read."""
        try:
            return rank.read(answer, keys)
        except AssertionError:
            if (
                rank.pool.lease(answer.lease_row).lease_id != answer.lease_id
                or rank.pool.epoch != rank.welcome.kvd_epoch
            ):
                return 0
            raise


def test_storm_of_kills_gives_no_wrong_byte_and_loses_no_slot(tmp_path: Path) -> None:
    kvd = KvdProcess(tmp_path)
    ranks = [BusyRank(kvd.socket, owner) for owner in (1, 2)]
    try:
        for round_ in range(1, NUM_KILLS + 1):
            wait_until(
                lambda round_=round_: all(rank.failure is not None or rank.num_sessions >= round_ for rank in ranks),
                "sessions",
            )
            read = [rank.num_read for rank in ranks]
            wait_until(
                lambda read=read: (
                    any(rank.failure is not None for rank in ranks)
                    or all(rank.num_read > before for rank, before in zip(ranks, read, strict=True))
                ),
                "reads in every life of kvd",
            )
            kvd.kill()
            kvd.start()
    finally:
        for rank in ranks:
            rank.stop.set()
        for rank in ranks:
            rank.thread.join(60)
    assert [rank.failure for rank in ranks] == [None, None]
    assert all(rank.num_saved for rank in ranks)
    last = RankClient(kvd.socket, owner=3)
    found = []

    def are_all_slots_back() -> bool:
        found[:] = [last.reserve(NUM_BLOCKS, NUM_SNAPSHOTS)]
        is_all = (len(found[0].slots), len(found[0].snapshot_slots)) == (NUM_BLOCKS, NUM_SNAPSHOTS)
        if not is_all:
            last.close_leases(found[0].reservation_id)
        return is_all

    wait_until(are_all_slots_back, "every slot")
    last.leave()
    kvd.kill()
