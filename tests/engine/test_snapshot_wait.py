"""A hit whose window snapshot is on its way from a peer: its first step waits for it a moment, and no other attempt's does."""

import math
from collections.abc import Callable, Iterator

import pytest

from prefill_engine.cost_model import seed_model
from prefill_engine.kv.pool_memory import SnapshotState
from prefill_engine.messages import Cancel, Computed, Started
from prefill_engine.rank.attempt import Attempt, AttemptPhase, read_submit
from prefill_engine.rank.block_source import Load, LoadDone, LookUp, LookupDone, SnapshotDone, SnapshotOutlook
from prefill_engine.rank.planner import RankPlanner
from prefill_plan.config import KvConfig, SchedulerConfig, Truncation
from prefill_plan.positions import plan_positions
from prefill_testing.fake_kvd import FakeKvd
from prefill_testing.kvd_process import wait_until
from prefill_testing.kvd_rig import (
    HIT,
    LONG,
    cold_bytes,
    computed_bytes,
    count,
    fill,
    kvd_config,
    replayed_bytes,
    run_whole,
    settle,
)
from prefill_testing.rank_harness import PATIENCE_SECONDS, RankHarness, make_submit, tiny_tokens

FOREVER = 600.0


# --- the decision
def running(*, snapshot_due: float, attempt: int = 1, phase: AttemptPhase = AttemptPhase.RUNNING) -> Attempt:
    """A hit of 640 tokens that is planned with a replay."""
    record = read_submit(make_submit(tiny_tokens(LONG), attempt=attempt), ())
    record.positions = plan_positions(
        LONG,
        offered_hit=HIT,
        keep_tokens=24,
        window_tokens=16,
        snapshot_held=lambda _hit: False,
        spans=(),
        embeddings_available=False,
    )
    record.next_row, record.phase, record.snapshot_due = record.plan.compute_start, phase, snapshot_due
    return record


def planner() -> RankPlanner:
    return RankPlanner(scheduler=SchedulerConfig(), kv=KvConfig(), truncation=Truncation.COMPACT, cost=seed_model())


@pytest.mark.parametrize(
    ("due", "phase", "is_window_set", "planned", "next_due"),
    [
        (0.0, AttemptPhase.RUNNING, False, True, math.inf),
        (10.5, AttemptPhase.RUNNING, False, False, 10.5),
        (10.0, AttemptPhase.RUNNING, False, True, math.inf),
        (10.5, AttemptPhase.RUNNING, True, True, math.inf),
        (10.5, AttemptPhase.LOADING, False, False, math.inf),
    ],
    ids=["waits-for-none", "may-still-come", "too-late", "has-begun", "still-loads"],
)
def test_attempt_is_held_back_until_its_snapshot_is_due(
    due: float, phase: AttemptPhase, is_window_set: bool, planned: bool, next_due: float
) -> None:
    one, other = running(snapshot_due=due, phase=phase), running(snapshot_due=0.0, attempt=2)
    one.is_window_set = is_window_set
    decision = planner().plan([one, other], now=10.0)
    assert other.attempt_id in {cut.attempt_id for cut in decision.chunks}
    assert (one.attempt_id in {cut.attempt_id for cut in decision.chunks}) == planned
    assert planner().next_due([one, other], now=10.0) == next_due


# --- a rank
@pytest.fixture(scope="module")
def kvd() -> Iterator[FakeKvd]:
    """Holds the long prompt's blocks and snapshot."""
    with FakeKvd.running() as fake:
        fill(fake)
        yield fake


@pytest.fixture
def rank(kvd: FakeKvd) -> Iterator[RankHarness]:
    """Patient with peers; kvd's snapshots are on their way."""
    kvd.pulling = True
    rank = RankHarness(kvd_config(kvd.socket, snapshot_seconds=FOREVER))
    try:
        yield rank
        rank.assert_nothing_held()
        wait_until(lambda: kvd.leases == {}, "the leases' end")
    finally:
        rank.close()
        kvd.pulling = False


def run_until_loaded(rank: RankHarness) -> None:
    """Every block of the hit is in its slot, and the rank has seen it."""
    rank.run_until(lambda: count(rank, "kv_swapin_whole") == 1)
    rank.turn()


def test_snapshot_that_comes_after_the_blocks_spares_the_replay(kvd: FakeKvd, rank: RankHarness) -> None:
    again = make_submit(tiny_tokens(LONG), attempt=2)
    rank.submit(again)
    run_until_loaded(rank)
    assert rank.attempt(again).phase is AttemptPhase.RUNNING
    assert not any(isinstance(e, Started) for e in rank.events_of(again))
    kvd.deliver_snapshots()
    assert computed_bytes(rank, again) == cold_bytes()
    assert (rank.event(again, Computed).replayed_tokens, rank.event(again, Computed).provenance) == (0, 0)
    settle(rank, again)


@pytest.mark.parametrize("how", ["pull-failed", "lease-lost"])
def test_snapshot_that_will_not_come_ends_the_wait(kvd: FakeKvd, rank: RankHarness, how: str) -> None:
    again = make_submit(tiny_tokens(LONG), attempt=2)
    rank.submit(again)
    run_until_loaded(rank)
    end: Callable[[], None] = kvd.lose_leases
    if how == "pull-failed":
        end = lambda: kvd.deliver_snapshots(SnapshotState.FAILED)  # noqa: E731
    end()
    assert computed_bytes(rank, again) == replayed_bytes(HIT)
    assert rank.event(again, Computed).provenance == 1
    settle(rank, again)


def test_attempt_that_is_held_back_holds_up_nobody_else(kvd: FakeKvd, rank: RankHarness) -> None:
    late, other = make_submit(tiny_tokens(LONG), attempt=2), make_submit(tiny_tokens(180, seed=4), attempt=3)
    rank.submit(late)
    run_until_loaded(rank)
    rank.submit(other)
    computed_bytes(rank, other)
    assert not any(isinstance(e, Started) for e in rank.events_of(late))
    kvd.deliver_snapshots()
    assert computed_bytes(rank, late) == cold_bytes()
    for submit in (late, other):
        settle(rank, submit)


def test_pull_that_does_not_end_is_waited_for_until_its_deadline(kvd: FakeKvd) -> None:
    rank = RankHarness(kvd_config(kvd.socket, snapshot_seconds=0.02))
    kvd.pulling = True
    assert run_whole(rank, make_submit(tiny_tokens(LONG), attempt=2)) == replayed_bytes(HIT)
    kvd.pulling = False
    rank.assert_nothing_held()
    rank.close()


def test_cancel_of_an_attempt_that_is_held_back_frees_it(kvd: FakeKvd, rank: RankHarness) -> None:
    again = make_submit(tiny_tokens(LONG), attempt=2)
    rank.submit(again)
    run_until_loaded(rank)
    rank.send(Cancel(attempt_id=again.attempt_id))
    rank.run_until(lambda: rank.is_released(again))


def test_snapshot_that_a_later_lease_has_not_is_told_at_once(kvd: FakeKvd) -> None:
    """Blocks that were resident at the look-up are gone at the load, so kvd is asked again."""
    kvd.pulling = True
    rank = RankHarness(kvd_config(kvd.socket))
    keys = rank.engine._keys(make_submit(tiny_tokens(LONG)))
    rank.source.look_up(LookUp(attempt_id=b"a", keys=keys, resident_blocks=2, tenant="t"))
    found = rank.source.completions.get(timeout=PATIENCE_SECONDS)
    assert isinstance(found, LookupDone)
    assert found.snapshot is SnapshotOutlook.PULLING
    snapshots, kvd.snapshots = kvd.snapshots, {}
    slots = rank.kv.blocks.allocate(len(keys))
    rank.source.load(Load(attempt_id=b"a", keys=keys, first_block=0, slots=slots, tenant="t"))
    told = [rank.source.completions.get(timeout=PATIENCE_SECONDS)]
    while not isinstance(told[-1], LoadDone):
        told.append(rank.source.completions.get(timeout=PATIENCE_SECONDS))
    kvd.snapshots, kvd.pulling = snapshots, False
    rank.source.let_go(b"a")
    rank.kv.blocks.release(slots)
    rank.close()
    assert told[0] == SnapshotDone(attempt_id=b"a", snapshot=None)
    assert len(told[-1].provenances) == len(keys)
