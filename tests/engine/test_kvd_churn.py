"""kv.md 8, bug 9: requests cancelled at any moment while another rank takes, overwrites and returns whatever slots are free."""

import random
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from prefill_engine.messages import Cancel, Computed, Submit
from prefill_testing.kvd_process import KvdProcess, RankClient, wait_until
from prefill_testing.kvd_rig import LONG, cold_bytes, computed_bytes, kvd_config, run_whole, settle
from prefill_testing.rank_harness import RankHarness, make_submit, tiny_tokens

NUM_RANKS, NUM_ATTEMPTS = 3, 9


@pytest.fixture
def kvd() -> Iterator[KvdProcess]:
    """Its pool has room for a few prompts only."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="kvd") as directory:
        process = KvdProcess(Path(directory), pool_bytes=(1 << 20) + (1 << 18), snapshot_bytes=1 << 17)
        yield process
        process.kill()


class Churn(threading.Thread):
    """Takes slots, fills them with bytes of its own, looks at them again, gives them back."""

    def __init__(self, rank: RankClient) -> None:
        super().__init__(daemon=True)
        self.stop = threading.Event()
        self.failure: BaseException | None = None
        self.num_slots = 0
        self._rank = rank
        self._random = random.Random(4)

    def run(self) -> None:
        try:
            while not self.stop.is_set():
                self._turn()
        except BaseException as failure:
            self.failure = failure

    def _turn(self) -> None:
        pool = self._rank.pool
        taken = self._rank.reserve(
            self._random.randrange(1, pool.num_blocks), self._random.randrange(pool.num_snapshots)
        )
        views = [pool.record(slot) for slot in taken.slots] + [pool.snapshot(slot) for slot in taken.snapshot_slots]
        for number, view in enumerate(views):
            view[:] = bytes([number % 251]) * len(view)
        self.num_slots += len(views)
        for number, view in enumerate(views):
            assert bytes(view) == bytes([number % 251]) * len(view), "somebody else wrote into a reserved slot"
        self._rank.close_leases(taken.reservation_id)


def test_cancels_at_any_moment_never_let_a_copy_read_or_write_a_slot_of_somebody_else(kvd: KvdProcess) -> None:
    generator = random.Random(9)
    first = RankHarness(kvd_config(kvd.socket))
    run_whole(first, make_submit(tiny_tokens(LONG)))
    churn = Churn(RankClient(kvd.socket, owner=2, geometry=first.source.client._geometry))
    churn.start()
    hits = 0
    for number in range(NUM_RANKS):
        rank = RankHarness(kvd_config(kvd.socket))
        for attempt in range(NUM_ATTEMPTS):
            submit = make_submit(tiny_tokens(LONG), attempt=10 * number + attempt + 2)
            rank.submit(submit)
            if attempt < NUM_ATTEMPTS - 1:
                cancel_after(rank, submit, num_turns=generator.randrange(8))
        # What the cancelled ones have left of the hit in its cache counts as well.
        data, computed = computed_bytes(rank, submit), rank.event(submit, Computed)
        hits += computed.cached_tokens
        if not computed.provenance:
            assert data == cold_bytes(), computed
        settle(rank, submit)
        rank.assert_nothing_held()
        rank.close()
    churn.stop.set()
    churn.join(60)
    assert not churn.is_alive(), "the other rank has not ended within 60 s"
    if churn.failure is not None:
        raise churn.failure
    assert hits
    assert churn.num_slots > 500
    first.assert_nothing_held()
    first.close()
    wait_until(lambda: kvd.num_leases() == 0, "no lease")


def cancel_after(rank: RankHarness, submit: Submit, *, num_turns: int) -> None:
    for _ in range(num_turns):
        rank.turn()
    rank.send(Cancel(attempt_id=submit.attempt_id))
    rank.run_until(lambda: rank.is_released(submit))
