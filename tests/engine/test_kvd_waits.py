"""A rank that waits for a hit: how long, as it has learnt from earlier ones, and what it says to kvd meanwhile."""

import threading
import time
from collections.abc import Iterator

import pytest

from prefill_engine.messages import Computed, Release
from prefill_testing.fake_kvd import FakeKvd
from prefill_testing.kvd_process import wait_until
from prefill_testing.kvd_rig import (
    LONG,
    cold_bytes,
    computed_bytes,
    count,
    fill,
    kvd_config,
    replayed_bytes,
    resolve_and_lose_residents,
    run_whole,
    settle,
)
from prefill_testing.rank_harness import RankHarness, make_submit, tiny_tokens


@pytest.fixture
def kvd() -> Iterator[FakeKvd]:
    """Holds the long prompt's blocks and snapshot."""
    with FakeKvd.running() as fake:
        fill(fake)
        yield fake
        assert fake.leases == {}
        assert fake.reservations == {}


def test_hit_is_cut_by_what_earlier_hits_took_long_before_the_longest_wait(kvd: FakeKvd) -> None:
    other = tiny_tokens(LONG, seed=9)
    with_other = RankHarness(kvd_config(kvd.socket))
    run_whole(with_other, make_submit(other))
    with_other.close()
    rank = RankHarness(kvd_config(kvd.socket, swap_in_seconds=3600.0, swap_in_min_seconds=0.05))
    kvd.held = dict.fromkeys(range(1, len(rank.cache.layout.sources)), 0)
    measured, stopped = make_submit(other, attempt=2), make_submit(tiny_tokens(LONG), attempt=3)

    def let_the_rest_come() -> None:
        wait_until(lambda: count(rank, "kv_group_ready_count_0") == 1, "the first group")
        kvd.let_through()

    helper = threading.Thread(target=let_the_rest_come)
    helper.start()
    rank.submit(measured)
    computed_bytes(rank, measured)
    helper.join(60)
    settle(rank, measured)
    assert (count(rank, "kv_swapin_whole"), count(rank, "kv_swapin_late")) == (1, 0)
    kvd.held = {1: 2}
    rank.submit(stopped)
    data = computed_bytes(rank, stopped)
    assert (rank.event(stopped, Computed).cached_tokens, count(rank, "kv_swapin_late")) == (256, 1)
    assert data == replayed_bytes(256)
    settle(rank, stopped)
    kvd.let_through()
    rank.assert_nothing_held()
    rank.close()


def test_kvd_is_told_once_when_nothing_but_a_hit_is_left_to_wait_for(kvd: FakeKvd) -> None:
    rank = RankHarness(kvd_config(kvd.socket))
    kvd.held = dict.fromkeys(range(len(rank.cache.layout.sources)), 0)
    late, urged = make_submit(tiny_tokens(LONG), attempt=2), len(kvd.urged)
    rank.submit(late)
    rank.run_until(lambda: len(kvd.urged) > urged)
    assert kvd.urged[urged:] == list(kvd.leases)
    for _ in range(3):
        rank.turn()
    kvd.let_through()
    assert computed_bytes(rank, late) == cold_bytes()
    assert len(kvd.urged) == urged + 1
    settle(rank, late)
    rank.assert_nothing_held()
    rank.close()


def test_loads_are_urged_by_turns_that_computed_nothing(kvd: FakeKvd, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = RankHarness(kvd_config(kvd.socket))
    urges: list[bool] = []
    monkeypatch.setattr(rank.engine, "urge_loads", lambda: urges.append(True))
    submit = make_submit(tiny_tokens(LONG, seed=5), store="skip")
    rank.submit(submit)
    turns: set[bool] = set()
    deadline = time.monotonic() + 60
    while not any(isinstance(e, Computed) for e in rank.events_of(submit)):
        assert time.monotonic() < deadline
        is_busy = rank.loop.turn(timeout_seconds=0.05, before_step=lambda: None)
        assert bool(urges) != is_busy
        urges.clear()
        turns.add(is_busy)
    assert turns == {True, False}
    monkeypatch.undo()
    rank.send(Release(attempt_id=submit.attempt_id))
    rank.run_until(lambda: rank.is_released(submit))
    rank.assert_nothing_held()
    rank.close()


def test_load_that_asks_for_a_second_lease_is_urged_when_it_has_one(kvd: FakeKvd) -> None:
    rank = RankHarness(kvd_config(kvd.socket, open_seconds=600.0))
    run_whole(rank, make_submit(tiny_tokens(LONG), attempt=2))
    submit = make_submit(tiny_tokens(LONG), attempt=3)
    let_go = resolve_and_lose_residents(rank, submit)
    urged = len(kvd.urged)
    kvd.held = dict.fromkeys(range(len(rank.cache.layout.sources)), 0)
    kvd.silent.add("Open")
    let_go()
    rank.run_until(lambda: rank.attempt(submit).is_urged)
    kvd.silent.clear()
    rank.run_until(lambda: len(kvd.urged) > urged)
    assert kvd.urged[urged:] == list(kvd.leases)
    kvd.let_through()
    assert computed_bytes(rank, submit) == cold_bytes()
    settle(rank, submit)
    rank.assert_nothing_held()
    rank.close()
