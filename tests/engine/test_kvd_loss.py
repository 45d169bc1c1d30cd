"""A rank whose KV sidecar dies, hangs, returns, refuses or was never there: all requests are answered, with the right bytes."""

from collections.abc import Iterator

import msgspec
import pytest

from prefill_engine.messages import Cancel, Computed, Resolved, StoreProgress
from prefill_engine.rank.attempt import AttemptPhase
from prefill_engine.rank.build import build_rank
from prefill_engine.rank.read_server import ReadServer
from prefill_plan.config import ReplayConfig
from prefill_plan.errors import ConfigError, StoreUnavailable
from prefill_testing.fake_kvd import FakeKvd
from prefill_testing.kvd_rig import (
    HIT,
    LONG,
    cold_bytes,
    computed_bytes,
    count,
    fill,
    kvd_config,
    resolve_and_lose_residents,
    run_whole,
    settle,
)
from prefill_testing.rank_harness import ListMailbox, RankHarness, make_submit, tiny_tokens


@pytest.fixture
def kvd() -> Iterator[FakeKvd]:
    """Holds the long prompt's blocks and snapshot."""
    with FakeKvd.running() as fake:
        fill(fake)
        yield fake


@pytest.mark.parametrize("phase", ["resolving", "loading", "in-a-step", "saving"])
def test_kvd_killed_in_every_phase_costs_the_hit_only(kvd: FakeKvd, phase: str) -> None:
    rank = RankHarness(kvd_config(kvd.socket, gate_seconds=0.1))
    submit = make_submit(tiny_tokens(LONG), attempt=2)
    match phase:
        case "resolving":
            kvd.mute = {"Open"}
            rank.submit(submit)
            rank.run_until(lambda: "Open" in kvd.calls[-1:])
            kvd.kill()
        case "loading":
            kvd.held = dict.fromkeys(range(4), 0)
            rank.finish(submit, until=Resolved)
            rank.run_until(lambda: rank.attempt(submit).phase is AttemptPhase.LOADING)
            kvd.kill()
        case "in-a-step":
            kvd.held = {len(rank.cache.layout.sources) - 1: 0}
            rank.submit(submit)
            rank.run_until(lambda: count(rank, "kv_gate_poisoned") == 1)
            kvd.kill()
        case "saving":
            kvd.mute = {"Commit"}
            submit = make_submit(tiny_tokens(LONG, seed=8), attempt=2)
            rank.submit(submit)
            rank.run_until(lambda: "Commit" in kvd.calls[-1:])
            kvd.kill()
    data = computed_bytes(rank, submit)
    settle(rank, submit)
    if phase == "saving":
        store = rank.event(submit, StoreProgress)
        assert (store.committed, store.failed) == (0, 5)
    else:
        assert data == cold_bytes()
        assert rank.event(submit, Computed).cached_tokens == 0
    assert not rank.source.is_ok
    rank.assert_nothing_held()
    rank.close()


def test_restarted_kvd_is_found_again_and_its_old_leases_are_misses(kvd: FakeKvd) -> None:
    rank = RankHarness(kvd_config(kvd.socket))
    kvd.held = dict.fromkeys(range(4), 0)
    first, second = make_submit(tiny_tokens(LONG), attempt=2), make_submit(tiny_tokens(LONG), attempt=3)
    rank.finish(first, until=Resolved)
    rank.run_until(lambda: rank.attempt(first).phase is AttemptPhase.LOADING)
    held = set(kvd.leases)
    kvd.kill()
    kvd.start()
    kvd.held = {}
    assert computed_bytes(rank, first) == cold_bytes()
    rank.run_until(lambda: rank.source.is_ok)
    assert set(kvd.hello.held_leases) <= held
    settle(rank, first)
    hits = RankHarness(kvd_config(kvd.socket))
    assert run_whole(hits, second) == cold_bytes()
    assert hits.event(second, Computed).cached_tokens == HIT
    for each in (rank, hits):
        each.assert_nothing_held()
        each.close()


def test_late_answer_is_no_hit_and_its_lease_is_closed(kvd: FakeKvd) -> None:
    rank = RankHarness(kvd_config(kvd.socket, open_seconds=0.1))
    kvd.mute = {"Open"}
    submit = make_submit(tiny_tokens(LONG), attempt=2)
    assert run_whole(rank, submit) == cold_bytes()
    assert rank.event(submit, Resolved).effective_hit == 0
    assert count(rank, "kv_open_late") == 1
    kvd.mute = set()
    rank.run_until(lambda: "Close" in kvd.calls and not kvd.leases)
    rank.assert_nothing_held()
    rank.close()


@pytest.mark.parametrize(
    "phase", [AttemptPhase.RESOLVING, AttemptPhase.WAITING, AttemptPhase.LOADING, AttemptPhase.COMPUTED]
)
def test_cancel_in_every_phase_closes_the_lease(kvd: FakeKvd, phase: AttemptPhase) -> None:
    rank = RankHarness(kvd_config(kvd.socket))
    if phase is AttemptPhase.RESOLVING:
        kvd.mute = {"Open"}
    kvd.held = dict.fromkeys(range(4), 0) if phase is AttemptPhase.LOADING else {}
    slots = [rank.kv.states.allocate_state() for _ in range(4)] if phase is AttemptPhase.WAITING else []
    submit = make_submit(tiny_tokens(LONG), attempt=2)
    rank.submit(submit)
    rank.run_until(lambda: submit.attempt_id in rank.engine.attempts and rank.attempt(submit).phase is phase)
    rank.send(Cancel(attempt_id=submit.attempt_id))
    rank.run_until(lambda: rank.is_released(submit))
    kvd.mute = set()
    for slot in slots:
        rank.kv.states.release_state(slot)
    rank.run_until(lambda: not kvd.leases)
    rank.assert_nothing_held()
    rank.close()


def test_blocks_that_left_the_pool_while_waiting_are_asked_for_again(kvd: FakeKvd) -> None:
    rank = RankHarness(kvd_config(kvd.socket))
    run_whole(rank, make_submit(tiny_tokens(LONG), attempt=2))
    submit = make_submit(tiny_tokens(LONG), attempt=3)
    let_go = resolve_and_lose_residents(rank, submit)
    let_go()
    assert computed_bytes(rank, submit) == cold_bytes()
    assert rank.event(submit, Computed).cached_tokens == HIT
    settle(rank, submit)
    rank.run_until(lambda: not kvd.leases)
    rank.assert_nothing_held()
    rank.close()


def test_full_pool_fails_the_write_not_the_request(kvd: FakeKvd) -> None:
    rank = RankHarness(kvd_config(kvd.socket))
    kvd.num_used, kvd.num_snapshots_used = kvd.pool.num_blocks - 2, kvd.pool.num_snapshots
    submit = make_submit(tiny_tokens(LONG, seed=8), attempt=2, store="required")
    run_whole(rank, submit)
    store = rank.event(submit, StoreProgress)
    assert (store.committed, store.failed, store.snapshots) == (2, 3, ())
    rank.assert_nothing_held()
    rank.close()


def test_blocks_after_a_portion_that_failed_do_not_count_as_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else nobody would ever store those of the hole."""
    monkeypatch.setattr("prefill_engine.rank.kvd_writer.MAX_RECORDS", 2)

    class ForgetfulKvd(FakeKvd):
        """Fails the first portion, which is the first to be reserved; commits overtake each other."""

        reserved = ()

        def Reserve(self, request, context):
            answer = super().Reserve(request, context)
            self.reserved += (answer.reservation_id,)
            return answer

        def Commit(self, request, context):
            answer = super().Commit(request, context)
            if request.reservation_id == self.reserved[0]:
                answer.stored_blocks, answer.failure = 1, "the write queue is full"
            return answer

    fake = ForgetfulKvd()
    config = kvd_config(fake.socket)
    scheduler = msgspec.structs.replace(config.scheduler, chunk_cap_tokens=1024)
    rank = RankHarness(msgspec.structs.replace(config, scheduler=scheduler))
    submit = make_submit(tiny_tokens(LONG, seed=8), attempt=2, store="required")
    rank.submit(submit)
    computed_bytes(rank, submit)
    slots = rank.attempt(submit).block_slots[:5]
    rank.run_until(lambda: any(isinstance(e, StoreProgress) and e.done for e in rank.events_of(submit)))
    store = rank.event(submit, StoreProgress)
    assert (store.committed, store.failed) == (1, 4)
    assert rank.kv.blocks.unstored(slots) == (1, 2, 3, 4)
    settle(rank, submit)
    rank.assert_nothing_held()
    rank.close()
    fake.close()


# --- start
def test_rank_starts_without_kvd_and_finds_it_later() -> None:
    fake = FakeKvd()
    fake.kill()
    rank = RankHarness(kvd_config(fake.socket, connect_seconds=0.1))
    assert not rank.source.is_ok
    submit = make_submit(tiny_tokens(LONG), attempt=2)
    assert run_whole(rank, submit) == cold_bytes()
    fake.start()
    rank.run_until(lambda: rank.source.is_ok)
    rank.close()
    fake.close()


def test_required_kvd_that_stays_away_ends_the_rank() -> None:
    fake = FakeKvd()
    config = kvd_config(fake.socket, connect_seconds=1.0)
    rank = RankHarness(msgspec.structs.replace(config, store=msgspec.structs.replace(config.store, required=True)))
    fake.kill()
    with pytest.raises(StoreUnavailable, match="required"):
        rank.run_until(lambda: False)
    rank.close()
    fake.close()


@pytest.mark.parametrize(("path", "words"), [("/dev/shm/not-there", "not visible here"), ("/dev/zero", "not the pool")])
def test_start_says_when_the_two_do_not_share_memory(path: str, words: str) -> None:
    fake = FakeKvd()
    told, fake._pool_path = fake._pool_path, path
    with pytest.raises(ConfigError, match=words) as caught:
        build_rank(
            kvd_config(fake.socket), rank=0, mailbox=ListMailbox(), reads=ReadServer(), enter=lambda _phase: None
        )
    assert "/dev/shm" in caught.value.message
    fake._pool_path = told
    fake.close()


def test_start_refuses_another_geometry(kvd: FakeKvd) -> None:
    config = msgspec.structs.replace(kvd_config(kvd.socket), replay=ReplayConfig(keep_tokens=40, max_rollback_tokens=8))
    with pytest.raises(ConfigError, match="kvd refuses this rank: another geometry"):
        build_rank(config, rank=0, mailbox=ListMailbox(), reads=ReadServer(), enter=lambda _phase: None)
