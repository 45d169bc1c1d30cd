"""Ranks and a real kvd process: what one leaves another finds, and kvd killed (-9) or frozen at any moment costs hits only."""

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from prefill_engine.messages import ChunkFinished, Computed, Resolved, StoreProgress
from prefill_engine.rank.attempt import AttemptPhase
from prefill_engine.rpc.common_pb2 import COMPONENT_KIND_REQUEST_ROW as REQUEST_ROW
from prefill_testing.kvd_process import KvdProcess, wait_until
from prefill_testing.kvd_rig import (
    HIT,
    LONG,
    cold_bytes,
    computed_bytes,
    count,
    kvd_config,
    replayed_bytes,
    run_whole,
    settle,
)
from prefill_testing.rank_harness import RankHarness, make_submit, tiny_tokens


@pytest.fixture(scope="module")
def kvd() -> Iterator[KvdProcess]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="kvd") as directory:
        process = KvdProcess(Path(directory), pool_bytes=24 << 20, snapshot_bytes=6 << 20)
        yield process
        process.kill()


@pytest.fixture
def rank(kvd: KvdProcess) -> Iterator[RankHarness]:
    """Snapshots and blocks are in kvd or nowhere."""
    harness = RankHarness(kvd_config(kvd.socket))
    yield harness
    harness.assert_nothing_held()
    harness.close()
    wait_until(lambda: kvd.num_leases() == 0, "kvd holds no lease")


def test_a_rank_finds_what_another_left(kvd: KvdProcess, rank: RankHarness) -> None:
    first, again = make_submit(tiny_tokens(LONG)), make_submit(tiny_tokens(LONG), attempt=2)
    assert run_whole(rank, first) == cold_bytes()
    store = rank.event(first, StoreProgress)
    assert (store.committed, store.failed, store.snapshots) == (5, 0, (HIT,))
    other = RankHarness(kvd_config(kvd.socket))
    assert run_whole(other, again) == cold_bytes()
    assert (other.event(again, Computed).cached_tokens, other.event(again, Computed).replayed_tokens) == (HIT, 0)
    other.assert_nothing_held()
    other.close()


def test_blocks_outlive_kvd_in_its_store_and_the_lost_snapshot_is_replayed(kvd: KvdProcess, rank: RankHarness) -> None:
    run_whole(rank, make_submit(tiny_tokens(LONG)))
    kvd.kill()
    Path(kvd.config["pool_path"]).unlink()
    kvd.start()
    other = RankHarness(kvd_config(kvd.socket))
    again = make_submit(tiny_tokens(LONG), attempt=2)
    assert run_whole(other, again) == replayed_bytes(HIT)
    assert other.event(again, Computed).replayed_tokens == 16
    other.assert_nothing_held()
    other.close()
    rank.run_until(lambda: rank.source.is_ok)


@pytest.mark.parametrize(
    ("how", "phase"),
    [
        (signal.SIGKILL, "resolving"),
        (signal.SIGKILL, "loading"),
        (signal.SIGKILL, "running"),
        (signal.SIGKILL, "saving"),
        (signal.SIGSTOP, "resolving"),
        (signal.SIGSTOP, "running"),
    ],
)
def test_kvd_lost_in_every_phase_costs_the_hit_only(kvd: KvdProcess, phase: str, how: signal.Signals) -> None:
    rank = RankHarness(kvd_config(kvd.socket, open_seconds=0.5, swap_in_seconds=0.5, gate_seconds=0.1))
    submit = make_submit(tiny_tokens(LONG + (200 if phase == "saving" else 0)), attempt=2)
    rank.submit(submit)
    match phase:
        case "resolving":
            os.kill(kvd.process.pid, how)
        case "loading":
            rank.run_until(lambda: any(isinstance(e, Resolved) for e in rank.events_of(submit)))
            os.kill(kvd.process.pid, how)
        case "running":
            running = (AttemptPhase.RUNNING, AttemptPhase.COMPUTED)
            rank.run_until(lambda: submit.attempt_id in rank.engine.attempts and rank.attempt(submit).phase in running)
            os.kill(kvd.process.pid, how)
        case "saving":
            rank.run_until(lambda: any(isinstance(e, ChunkFinished) for e in rank.events_of(submit)))
            os.kill(kvd.process.pid, how)
    data, computed = computed_bytes(rank, submit), rank.event(submit, Computed)
    if how is signal.SIGSTOP:
        os.kill(kvd.process.pid, signal.SIGCONT)
    else:
        kvd.kill()
        kvd.start()
    if phase != "saving":
        expected = replayed_bytes(computed.cached_tokens) if computed.provenance else cold_bytes()
        # The row alone tells a replay from a snapshot that an earlier replay has left.
        assert {**data, REQUEST_ROW: b""} == {**expected, REQUEST_ROW: b""}, computed
    settle(rank, submit)
    rank.run_until(lambda: rank.source.is_ok)
    after = make_submit(tiny_tokens(LONG), attempt=3)
    run_whole(rank, after)
    rank.assert_nothing_held()
    rank.close()
    wait_until(lambda: kvd.num_leases() == 0, "kvd holds no lease")


def test_rank_restart_leaves_nothing_behind(kvd: KvdProcess, rank: RankHarness) -> None:
    for attempt in range(5, 8):
        run_whole(rank, make_submit(tiny_tokens(300, seed=attempt), attempt=attempt))
    assert count(rank, "kv_gate_poisoned") == 0
    wait_until(lambda: kvd.num_usable_blocks() == kvd.num_blocks(), "every slot is free or findable")
