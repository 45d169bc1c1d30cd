"""Ranks on a fake kvd, and what the tiny model hands over for one long prompt, with and without a cache."""

from collections.abc import Callable
from functools import cache

import msgspec

from prefill_engine.messages import Computed, ReadRange, Release, Resolved, StoreProgress, Submit
from prefill_plan.config import EngineConfig, KvdLink
from prefill_testing.fake_kvd import FakeKvd
from prefill_testing.rank_harness import RankHarness, make_submit, tiny_engine_config, tiny_tokens

LONG = 700  # 5 blocks, snapshot at 640
HIT = 640


def kvd_config(socket: str, **changes: float) -> EngineConfig:
    """Patient enough for a busy machine; tests of a limit set that limit."""
    link = {"connect_seconds": 20.0, "open_seconds": 20.0, "swap_in_seconds": 20.0, "gate_seconds": 20.0} | changes
    return msgspec.structs.replace(tiny_engine_config(), kvd=KvdLink(socket=socket, **link))


def read_all(rank: RankHarness, submit: Submit) -> dict[int, bytes]:
    """Every byte a decode peer would get, by component."""
    kinds = [region.kind for region in rank.event(submit, Computed).regions]
    reads = [ReadRange(read_id=1, attempt_id=submit.attempt_id, kind=kind, offset=0, length=1 << 30) for kind in kinds]
    return {read.kind: rank.reads.read(read).data for read in reads}


def settle(rank: RankHarness, submit: Submit) -> None:
    rank.run_until(lambda: any(isinstance(e, StoreProgress) and e.done for e in rank.events_of(submit)))
    rank.send(Release(attempt_id=submit.attempt_id))
    rank.run_until(lambda: rank.is_released(submit))


def resolve_and_lose_residents(rank: RankHarness, submit: Submit) -> Callable[[], None]:
    """Resolves an attempt that is held back for want of a state slot, and evicts its resident hit: its load will ask for a lease
    of its own. Returns what lets it go on."""
    slots = [rank.kv.states.allocate_state() for _ in range(4)]
    rank.finish(submit, until=Resolved)
    rank.kv.unpin(rank.attempt(submit))
    taken = rank.kv.blocks.allocate(rank.kv.blocks.num_free)
    rank.kv.blocks.release(taken)

    def let_go() -> None:
        for slot in slots:
            rank.kv.states.release_state(slot)

    return let_go


def computed_bytes(rank: RankHarness, submit: Submit) -> dict[int, bytes]:
    """Turns until a submitted attempt is computed."""
    rank.run_until(lambda: any(isinstance(e, Computed) for e in rank.events_of(submit)))
    return read_all(rank, submit)


def run_whole(rank: RankHarness, submit: Submit) -> dict[int, bytes]:
    rank.submit(submit)
    data = computed_bytes(rank, submit)
    settle(rank, submit)
    return data


def fill(kvd: FakeKvd) -> None:
    """A first rank computes the long prompt and leaves blocks and snapshot in kvd."""
    rank = RankHarness(kvd_config(kvd.socket))
    first = make_submit(tiny_tokens(LONG))
    run_whole(rank, first)
    store = rank.event(first, StoreProgress)
    assert (store.committed, store.failed, store.snapshots) == (5, 0, (HIT,))
    rank.assert_nothing_held()
    rank.close()
    assert kvd.leases == {}


def hand_over(config: EngineConfig, *, offered_hit: int | None) -> dict[int, bytes]:
    """The long prompt's second run on a rank of that configuration; offered_hit None = its first run."""
    rank = RankHarness(config)
    data = run_whole(rank, make_submit(tiny_tokens(LONG)))
    if offered_hit is not None:
        data = run_whole(rank, make_submit(tiny_tokens(LONG), attempt=2, offered_hit=offered_hit))
    rank.close()
    return data


@cache
def cold_bytes() -> dict[int, bytes]:
    return hand_over(tiny_engine_config(), offered_hit=None)


@cache
def replayed_bytes(hit: int) -> dict[int, bytes]:
    """Block KV of `hit` tokens reused, the window before it replayed."""
    return hand_over(tiny_engine_config(snapshot_bytes=0), offered_hit=hit)


def count(rank: RankHarness, name: str) -> int:
    return rank.source.counters().get(name, 0)
