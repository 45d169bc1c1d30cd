"""A rank with the pod's KV sidecar: hits through shared memory, layer gates and snapshots that are there, late or damaged."""

import threading
from collections.abc import Iterator

import pytest

from prefill_engine.messages import ChunkFinished, Computed, FirstTokenReady, Resolved, Started, SwappedIn
from prefill_engine.rank.attempt import AttemptPhase
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
from prefill_testing.rank_harness import RankHarness, make_submit, tiny_tokens


@pytest.fixture(scope="module")
def kvd() -> Iterator[FakeKvd]:
    """Holds the long prompt's blocks and snapshot; every test leaves it as it was."""
    with FakeKvd.running() as fake:
        fill(fake)
        yield fake


@pytest.fixture(autouse=True)
def _nothing_held(kvd: FakeKvd) -> Iterator[None]:
    yield
    assert kvd.leases == {}
    assert kvd.reservations == {}


@pytest.fixture(scope="module")
def cold() -> dict[int, bytes]:
    return cold_bytes()


@pytest.fixture(scope="module")
def replayed() -> dict[int, bytes]:
    return replayed_bytes(HIT)


def test_hit_through_shared_memory_equals_a_cold_run_bit_by_bit(kvd: FakeKvd, cold: dict[int, bytes]) -> None:
    rank = RankHarness(kvd_config(kvd.socket))
    again = make_submit(tiny_tokens(LONG), attempt=2)
    rank.cache._rings.fill_(0x3A)  # bug 2 of kv.md 8: what an earlier request left must never be read
    assert run_whole(rank, again) == cold
    resolved, computed = rank.event(again, Resolved), rank.event(again, Computed)
    assert (resolved.effective_hit, resolved.replay_rows, resolved.swa_source) == (HIT, 0, "local")
    assert (computed.cached_tokens, computed.replayed_tokens, computed.provenance) == (HIT, 0, 0)
    swapped = [e for e in rank.events_of(again) if isinstance(e, SwappedIn)]
    assert [e.layers_ready for e in swapped] == sorted({e.layers_ready for e in swapped})
    assert swapped[-1].layers_ready == swapped[-1].layers_total
    assert swapped[-1].num_bytes == 5 * rank.cache.layout.payload_bytes
    rank.assert_nothing_held()
    rank.close()


def test_resident_blocks_take_only_the_snapshot_from_kvd(kvd: FakeKvd, cold: dict[int, bytes]) -> None:
    rank = RankHarness(kvd_config(kvd.socket))
    run_whole(rank, make_submit(tiny_tokens(LONG), attempt=2))
    copied = count(rank, "kv_swapin_bytes")
    third = make_submit(tiny_tokens(LONG), attempt=3)
    assert run_whole(rank, third) == cold
    assert rank.event(third, Computed).replayed_tokens == 0
    assert count(rank, "kv_swapin_bytes") == copied
    rank.assert_nothing_held()
    rank.close()


def test_late_group_poisons_the_step_once_and_the_attempt_runs_when_it_is_whole(
    kvd: FakeKvd, cold: dict[int, bytes]
) -> None:
    rank = RankHarness(kvd_config(kvd.socket, gate_seconds=0.05))
    last = len(rank.cache.layout.sources) - 1
    kvd.held = {last: 2}
    again = make_submit(tiny_tokens(LONG), attempt=2)
    rank.submit(again)
    rank.run_until(lambda: count(rank, "kv_gate_poisoned") == 1)
    rank.turn()
    assert rank.attempt(again).phase is AttemptPhase.LOADING
    assert not any(isinstance(e, ChunkFinished | FirstTokenReady | Computed) for e in rank.events_of(again))
    assert rank.kv.blocks.match(rank.attempt(again).keys) == ()
    kvd.let_through()
    assert computed_bytes(rank, again) == cold
    assert [type(e) for e in rank.events_of(again)].count(Started) == 1
    assert count(rank, "kv_gate_poisoned") == 1
    settle(rank, again)
    rank.assert_nothing_held()
    rank.close()


def test_late_hit_holds_up_nobody_else(kvd: FakeKvd, cold: dict[int, bytes]) -> None:
    rank = RankHarness(kvd_config(kvd.socket, gate_seconds=0.05))
    kvd.held = {len(rank.cache.layout.sources) - 1: 0}
    late, other = make_submit(tiny_tokens(LONG), attempt=2), make_submit(tiny_tokens(180, seed=4), attempt=3)
    rank.submit(late)
    rank.submit(other)
    other_bytes = computed_bytes(rank, other)
    assert not any(isinstance(e, Computed) for e in rank.events_of(late))
    kvd.let_through()
    assert computed_bytes(rank, late) == cold
    for submit in (late, other):
        settle(rank, submit)
    alone = RankHarness(kvd_config(kvd.socket))
    assert run_whole(alone, make_submit(tiny_tokens(180, seed=4), attempt=4)) == other_bytes
    for each in (rank, alone):
        each.assert_nothing_held()
        each.close()


def test_hit_that_kvd_cut_for_want_of_room_is_counted(kvd: FakeKvd) -> None:
    rank = RankHarness(kvd_config(kvd.socket))
    kvd.room = 2
    again = make_submit(tiny_tokens(LONG), attempt=2)
    assert run_whole(rank, again) == replayed_bytes(256)
    assert rank.event(again, Computed).cached_tokens == 256
    assert count(rank, "kv_open_shrunk") == 1
    kvd.room = None
    rank.assert_nothing_held()
    rank.close()


@pytest.mark.parametrize("how", ["too-late", "read-failed", "lease-lost"])
def test_hit_that_stops_coming_is_cut_to_what_is_there(kvd: FakeKvd, how: str) -> None:
    seconds = 4.0 if how == "too-late" else 20.0  # group 0 must have come by then, on a busy machine, too
    rank = RankHarness(kvd_config(kvd.socket, swap_in_seconds=seconds, gate_seconds=0.05))
    kvd.held = {1: 2}
    again = make_submit(tiny_tokens(LONG), attempt=2)
    rank.submit(again)
    groups = len(rank.cache.layout.sources)
    rank.run_until(lambda: any(isinstance(e, SwappedIn) for e in rank.events_of(again)))  # group 0 is there
    if how != "too-late":  # its seconds may be over before a step of a busy machine has come to the gate
        rank.run_until(lambda: count(rank, "kv_gate_poisoned") == 1)
    if how == "read-failed":
        kvd.cut_leases(2)
    elif how == "lease-lost":
        kvd.lose_leases()
    data = computed_bytes(rank, again)
    cut = rank.event(again, Computed).cached_tokens
    assert rank.event(again, SwappedIn).hit_shrunk_to == cut
    assert cut == (256 if groups > 1 else 0)
    kvd.held = {}
    assert data == replayed_bytes(cut)
    settle(rank, again)
    rank.assert_nothing_held()
    rank.close()


def test_reused_slot_is_a_miss(cold: dict[int, bytes]) -> None:
    fake = FakeKvd()
    fill(fake)
    rank = RankHarness(kvd_config(fake.socket))
    fake.held = dict.fromkeys(range(4), 0)
    again = make_submit(tiny_tokens(LONG), attempt=2)
    rank.finish(again, until=Resolved)
    rank.run_until(lambda: rank.attempt(again).phase is AttemptPhase.LOADING)
    fake.reuse_slots()
    fake.let_through()
    assert computed_bytes(rank, again) == cold
    assert rank.event(again, Computed).cached_tokens == 0
    settle(rank, again)
    rank.assert_nothing_held()
    rank.close()
    fake.close()


# --- snapshots
def test_missing_snapshot_replays_and_leaves_shared_blocks_untouched(kvd: FakeKvd, replayed: dict[int, bytes]) -> None:
    rank = RankHarness(kvd_config(kvd.socket))
    snapshots, kvd.snapshots = kvd.snapshots, {}
    before = {key: bytes(kvd.pool.record(slot)) for key, slot in kvd.blocks.items()}
    again = make_submit(tiny_tokens(LONG), attempt=2)
    rank.cache._rings.fill_(0x3A)
    assert run_whole(rank, again) == replayed
    assert rank.event(again, Resolved).swa_source == "replay"
    third = make_submit(tiny_tokens(LONG), attempt=3)
    kvd.snapshots = {}
    assert run_whole(rank, third) == replayed  # bug 3: the resident hit blocks are as they were
    assert {key: bytes(kvd.pool.record(slot)) for key, slot in kvd.blocks.items()} == before
    kvd.snapshots = snapshots
    rank.assert_nothing_held()
    rank.close()


def test_pulled_snapshot_that_arrives_before_the_first_chunk_spares_the_replay(
    kvd: FakeKvd, cold: dict[int, bytes]
) -> None:
    rank = RankHarness(kvd_config(kvd.socket))
    kvd.held, kvd.pulling = {0: 0}, True
    again = make_submit(tiny_tokens(LONG), attempt=2)
    rank.finish(again, until=Resolved)
    assert (rank.event(again, Resolved).swa_source, rank.event(again, Resolved).replay_rows) == ("peer", 16)
    rank.run_until(lambda: rank.attempt(again).phase is AttemptPhase.LOADING)
    kvd.deliver_snapshots()
    rank.run_until(lambda: rank.attempt(again).snapshot is not None)
    kvd.let_through()
    assert computed_bytes(rank, again) == cold
    assert rank.event(again, Computed).replayed_tokens == 0
    settle(rank, again)
    rank.assert_nothing_held()
    rank.close()


def test_pulled_snapshot_that_arrives_during_the_first_chunk_changes_nothing(
    kvd: FakeKvd, replayed: dict[int, bytes]
) -> None:
    """Rows that were computed by replay are told as such: never as exact because the snapshot came while they were computed."""
    rank = RankHarness(kvd_config(kvd.socket))
    kvd.pulling, kvd.held = True, {len(rank.cache.layout.sources) - 1: 2}
    again = make_submit(tiny_tokens(LONG), attempt=2)

    def deliver_in_the_step() -> None:
        wait_until(lambda: any(isinstance(e, Started) for e in rank.events_of(again)), "the step")
        kvd.deliver_snapshots()
        wait_until(lambda: count(rank, "kv_snapshot_taken") == 1, "the snapshot")
        kvd.let_through()

    deliverer = threading.Thread(target=deliver_in_the_step)
    deliverer.start()
    rank.submit(again)
    assert computed_bytes(rank, again) == replayed
    deliverer.join(60)
    assert not deliverer.is_alive(), "the snapshots' delivery has not ended within 60 s"
    computed = rank.event(again, Computed)
    assert (computed.cached_tokens, computed.replayed_tokens, computed.provenance) == (HIT, 16, 1)
    settle(rank, again)
    rank.assert_nothing_held()
    rank.close()


def test_damaged_snapshot_replays(kvd: FakeKvd, replayed: dict[int, bytes]) -> None:
    rank = RankHarness(kvd_config(kvd.socket))
    records = [kvd.pool.snapshot(slot) for slot in kvd.snapshots.values()]
    for record in records:
        record[5000] ^= 1
    again = make_submit(tiny_tokens(LONG), attempt=2)
    assert run_whole(rank, again) == replayed
    for record in records:
        record[5000] ^= 1
    assert rank.event(again, Resolved).replay_rows == 0  # kvd said that it holds one
    assert rank.event(again, Computed).replayed_tokens == 16
    rank.assert_nothing_held()
    rank.close()
