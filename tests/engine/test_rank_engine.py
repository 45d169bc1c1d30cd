"""Life of an attempt on a rank: hits, replay, refusals, cancel, failures; the tiny quantised model on the CPU."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from prefill_engine.messages import (
    AttemptFailed,
    Cancel,
    ChunkFinished,
    Computed,
    FirstTokenReady,
    ImageItem,
    ReadRange,
    Release,
    Resolved,
    StoreProgress,
    Submit,
    SwappedIn,
)
from prefill_engine.rank.attempt import AttemptPhase
from prefill_engine.rank.model_runner import ModelRunner, StepResult
from prefill_engine.rpc import common_pb2
from prefill_plan.block_keys import BlockKey
from prefill_testing.rank_harness import RankHarness, make_submit, tiny_engine_config, tiny_tokens

BLOCK_KV = common_pb2.COMPONENT_KIND_BLOCK_KV


@pytest.fixture
def rank() -> Iterator[RankHarness]:
    harness = RankHarness(tiny_engine_config())
    yield harness
    harness.close()


def settle(rank: RankHarness, submit: Submit) -> None:
    """The hand-off ends; everything of the attempt goes back."""
    rank.run_until(lambda: rank.event(submit, StoreProgress).done)
    rank.send(Release(attempt_id=submit.attempt_id))
    rank.run_until(lambda: rank.is_released(submit))


def read_blocks(rank: RankHarness, submit: Submit) -> bytes:
    request = ReadRange(read_id=1, attempt_id=submit.attempt_id, kind=BLOCK_KV, offset=0, length=1 << 30)
    return rank.reads.read(request).data


def test_cold_attempt_reports_its_whole_life_in_order(rank: RankHarness) -> None:
    submit = make_submit(tiny_tokens(700))
    rank.finish(submit, until=Computed)
    settle(rank, submit)
    life = [name for name in rank.names(submit) if name != "StoreProgress"]
    assert life == [
        "Resolved",
        "Waiting",
        "Started",
        "ChunkFinished",
        "ChunkFinished",
        "ChunkFinished",
        "FirstTokenReady",
        "Computed",
        "Released",
    ]
    assert [e.rows_done for e in rank.events_of(submit) if isinstance(e, ChunkFinished)] == [256, 512, 700]
    store = rank.event(submit, StoreProgress)
    assert (store.committed, store.total, store.failed, store.snapshots) == (5, 5, 0, (640,))
    rank.assert_nothing_held()


def test_second_attempt_hits_pool_and_snapshot_and_gives_the_same_bytes(rank: RankHarness) -> None:
    first, second = make_submit(tiny_tokens(700)), make_submit(tiny_tokens(700), attempt=2)
    rank.finish(first, until=Computed)
    cold = read_blocks(rank, first)
    settle(rank, first)
    rank.finish(second, until=Computed)
    resolved, computed = rank.event(second, Resolved), rank.event(second, Computed)
    assert (resolved.effective_hit, resolved.replay_rows, resolved.swa_source) == (640, 0, "local")
    assert (computed.cached_tokens, computed.computed_tokens, computed.provenance) == (640, 60, 0)
    assert read_blocks(rank, second) == cold
    assert rank.event(second, FirstTokenReady).token == rank.event(first, FirstTokenReady).token
    settle(rank, second)
    rank.assert_nothing_held()


def test_lost_snapshot_replays_the_window_and_leaves_hit_blocks_untouched(rank: RankHarness) -> None:
    first, second = make_submit(tiny_tokens(700)), make_submit(tiny_tokens(900), attempt=2)
    rank.finish(first, until=Computed)
    cold = read_blocks(rank, first)
    settle(rank, first)
    rank.kv.states.drop_all()
    rank.finish(second, until=Computed)
    resolved, computed = rank.event(second, Resolved), rank.event(second, Computed)
    assert (resolved.effective_hit, resolved.replay_rows, resolved.swa_source) == (640, 16, "replay")
    assert (computed.replayed_tokens, computed.computed_tokens, computed.provenance) == (16, 260, 1)
    hit_bytes = 5 * rank.cache.layout.payload_bytes
    assert read_blocks(rank, second)[:hit_bytes] == cold[:hit_bytes]
    settle(rank, second)
    rank.assert_nothing_held()


def test_blocks_after_a_replay_keep_their_provenance_through_the_store(tmp_path: Path) -> None:
    config = tiny_engine_config(store_path=tmp_path)
    before = RankHarness(config)
    first, second = make_submit(tiny_tokens(700)), make_submit(tiny_tokens(900), attempt=2)
    before.finish(first, until=Computed)
    settle(before, first)
    before.kv.states.drop_all()
    before.finish(second, until=Computed)
    settle(before, second)
    before.close()
    after = RankHarness(config)
    third = make_submit(tiny_tokens(1100), attempt=3)
    after.finish(third, until=Computed)
    swapped, computed = after.event(third, SwappedIn), after.event(third, Computed)
    assert swapped.num_bytes == 7 * after.cache.layout.payload_bytes
    assert (swapped.hit_shrunk_to, computed.cached_tokens, computed.provenance) == (-1, 896, 1)
    after.close()


def test_corrupt_block_shortens_the_hit_and_is_recomputed(tmp_path: Path) -> None:
    config = tiny_engine_config(store_path=tmp_path)
    before = RankHarness(config)
    first = make_submit(tiny_tokens(700))
    before.finish(first, until=Computed)
    cold, keys = read_blocks(before, first), before.attempt(first).keys
    settle(before, first)
    before.close()
    (record,) = tmp_path.rglob(f"*{keys[2].hex()}*")
    content = bytearray(record.read_bytes())
    content[-7] ^= 0x10
    record.write_bytes(content)
    after = RankHarness(config)
    again = make_submit(tiny_tokens(700), attempt=2)
    after.finish(again, until=Computed)
    assert after.event(again, Resolved).effective_hit == 640
    assert after.event(again, SwappedIn).hit_shrunk_to == 256
    assert after.event(again, Computed).cached_tokens == 256
    hit_bytes = 2 * after.cache.layout.payload_bytes
    assert read_blocks(after, again)[:hit_bytes] == cold[:hit_bytes]
    settle(after, again)
    after.assert_nothing_held()
    after.close()


def test_offered_hit_bounds_the_hit(rank: RankHarness) -> None:
    first, second = make_submit(tiny_tokens(700)), make_submit(tiny_tokens(700), attempt=2, offered_hit=256)
    rank.finish(first, until=Computed)
    settle(rank, first)
    rank.finish(second, until=Computed)
    assert rank.event(second, Resolved).effective_hit == 256
    settle(rank, second)
    rank.assert_nothing_held()


def test_without_handoff_everything_is_freed_after_the_store(rank: RankHarness) -> None:
    submit = make_submit(tiny_tokens(300), handoff=False)
    rank.submit(submit)
    rank.run_until(lambda: rank.is_released(submit))
    assert rank.event(submit, StoreProgress).done
    rank.assert_nothing_held()


def test_store_skip_writes_nothing(rank: RankHarness) -> None:
    submit = make_submit(tiny_tokens(300), store="skip", handoff=False)
    rank.submit(submit)
    rank.run_until(lambda: rank.is_released(submit))
    assert rank.event(submit, StoreProgress).total == 0
    assert rank.source.counters()["store_writes"] == 0


@pytest.mark.parametrize(
    "phase",
    [AttemptPhase.RESOLVING, AttemptPhase.WAITING, AttemptPhase.LOADING, AttemptPhase.RUNNING, AttemptPhase.COMPUTED],
)
def test_cancel_in_every_phase_returns_every_slot(phase: AttemptPhase, tmp_path: Path) -> None:
    config = tiny_engine_config(store_path=tmp_path, state_slots=1)
    before = RankHarness(config)
    first = make_submit(tiny_tokens(700))
    before.finish(first, until=Computed)
    settle(before, first)
    before.close()
    rank = RankHarness(config)
    blocker = make_submit(tiny_tokens(2000, seed=9), attempt=7)
    if phase is AttemptPhase.WAITING:  # the only state slot is taken
        rank.finish(blocker, until=ChunkFinished)
    victim = make_submit(tiny_tokens(1200), attempt=2)
    rank.submit(victim)
    rank.run_until(lambda: victim.attempt_id in rank.engine.attempts and rank.attempt(victim).phase is phase)
    rank.send(Cancel(attempt_id=victim.attempt_id))
    rank.run_until(lambda: rank.is_released(victim))
    computed = [e for e in rank.events_of(victim) if isinstance(e, Computed)]
    assert bool(computed) == (phase is AttemptPhase.COMPUTED)
    if phase is AttemptPhase.WAITING:
        rank.run_until(lambda: any(isinstance(e, Computed) for e in rank.events_of(blocker)))
        settle(rank, blocker)
    rank.assert_nothing_held()
    rank.close()


def test_cancel_of_an_unknown_attempt_is_answered(rank: RankHarness) -> None:
    submit = make_submit(tiny_tokens(10))
    rank.send(Cancel(attempt_id=submit.attempt_id))
    rank.run_until(lambda: rank.is_released(submit))


@pytest.mark.parametrize(
    ("submit", "reason", "retry", "words"),
    [
        pytest.param(make_submit(tiny_tokens(9000)), "KV_MEMORY", "NEVER", "9000 tokens", id="longer-than-kv-memory"),
        pytest.param(
            make_submit(tiny_tokens(300), max_compute_rows=100), "HIT_LEASE_GONE", "REPLAN", "300 rows", id="rows-limit"
        ),
        pytest.param(
            make_submit(tiny_tokens(300), step_cap_ms=0.001), "BUDGET_IMPOSSIBLE", "OTHER_PE", "step_cap", id="step-cap"
        ),
        pytest.param(
            make_submit(tiny_tokens(300), images=(ImageItem(start=10, length=20, content_key=b"k" * 32),)),
            "IMAGE_REJECTED",
            "OTHER_PE",
            "no vision encoder",
            id="image-without-encoder",
        ),
    ],
)
def test_refusal_names_reason_values_and_retry(
    rank: RankHarness, submit: Submit, reason: str, retry: str, words: str
) -> None:
    rank.finish(submit, until=AttemptFailed)
    failed = rank.event(submit, AttemptFailed)
    assert (failed.reason, failed.retry) == (reason, retry)
    assert words in failed.public_message
    rank.run_until(lambda: rank.is_released(submit))
    rank.assert_nothing_held()


def test_nonfinite_logits_fail_the_attempt_and_publish_nothing(
    rank: RankHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_run = ModelRunner.run

    def poisoned(self: ModelRunner, *args: object, **kwargs: object) -> StepResult:
        result = real_run(self, *args, **kwargs)  # type: ignore[arg-type]
        return replace(result, logits=torch.full_like(result.logits, float("nan")))

    monkeypatch.setattr(ModelRunner, "run", poisoned)
    submit = make_submit(tiny_tokens(200))
    rank.finish(submit, until=AttemptFailed)
    assert rank.event(submit, AttemptFailed).reason == "NONFINITE_OUTPUT"
    rank.run_until(lambda: rank.is_released(submit))
    rank.assert_nothing_held()
    assert rank.kv.blocks.num_cached == 0
    assert rank.source.counters()["store_writes"] == 0


def test_concurrent_attempts_share_steps_and_give_the_bytes_of_lone_runs(rank: RankHarness) -> None:
    submits = [make_submit(tiny_tokens(n, seed=n), attempt=n) for n in (150, 90, 333)]
    for submit in submits:
        rank.submit(submit)
    rank.run_until(lambda: all(any(isinstance(e, Computed) for e in rank.events_of(s)) for s in submits))
    together = [read_blocks(rank, submit) for submit in submits]
    for submit in submits:
        settle(rank, submit)
    rank.assert_nothing_held()
    alone = RankHarness(tiny_engine_config())
    for submit, expected in zip(submits, together, strict=True):
        alone.finish(submit, until=Computed)
        assert read_blocks(alone, submit) == expected
    alone.close()


def test_idle_rank_runs_canaries_that_write_nothing() -> None:
    rank = RankHarness(tiny_engine_config(canary_seconds=0.0))
    before = [tensor.clone() for tensor in (rank.cache.blocks, rank.cache._rings, rank.cache._pairs)]
    rank.run_until(lambda: any(load.step is not None for load in rank.loads()))
    step = next(load.step for load in rank.loads() if load.step is not None)
    assert (step.kind, step.encoder_rows) == ("canary", 0)
    after = (rank.cache.blocks, rank.cache._rings, rank.cache._pairs)
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    rank.close()


def test_full_pool_makes_attempts_wait_until_a_ticket_ends() -> None:
    rank = RankHarness(tiny_engine_config(pool_tokens=1024))
    first, second = make_submit(tiny_tokens(500)), make_submit(tiny_tokens(900, seed=2), attempt=2)
    rank.finish(first, until=Computed)
    rank.finish(second, until=Resolved)
    for _ in range(5):
        rank.turn()
    assert rank.attempt(second).phase is AttemptPhase.WAITING
    settle(rank, first)
    rank.run_until(lambda: any(isinstance(e, Computed) for e in rank.events_of(second)))
    settle(rank, second)
    rank.assert_nothing_held()
    rank.close()


def test_load_report_counts_rows_slots_and_tickets(rank: RankHarness) -> None:
    submit = make_submit(tiny_tokens(300))
    rank.finish(submit, until=Computed)
    rank.loop._report(None)
    load = rank.loads()[-1]
    assert (load.running, load.waiting, load.waiting_rows, load.running_rows_left) == (0, 0, 0, 0)
    assert load.kv_tokens_held_by_tickets == 384
    assert load.kv_tokens_free == load.kv_tokens_total - 384
    settle(rank, submit)


def test_replayed_rows_never_get_a_store_slot_beyond_new_blocks(rank: RankHarness) -> None:
    first, second = (
        make_submit(tiny_tokens(400)),
        make_submit(np.concatenate([tiny_tokens(400), tiny_tokens(120, seed=5)]), attempt=2),
    )
    rank.finish(first, until=Computed)
    settle(rank, first)
    rank.kv.states.drop_all()
    written = rank.source.counters()["store_writes"]
    rank.finish(second, until=Computed)
    settle(rank, second)
    assert rank.source.counters()["store_writes"] - written == 1  # blocks 0..2 are the hit, block 3 is new


def test_hit_blocks_that_never_reached_the_store_are_stored_by_the_next_attempt(rank: RankHarness) -> None:
    first, second = (
        make_submit(tiny_tokens(400), store="skip"),
        make_submit(tiny_tokens(400), attempt=2, store="required"),
    )
    rank.finish(first, until=Computed)
    settle(rank, first)
    rank.finish(second, until=Computed)
    settle(rank, second)
    store = rank.event(second, StoreProgress)
    assert (rank.event(second, Computed).cached_tokens, store.committed, store.total) == (256, 3, 3)
    assert rank.source._store.count_present(rank_keys(rank, second)) == 3


def rank_keys(rank: RankHarness, submit: Submit) -> tuple[BlockKey, ...]:
    return rank.engine._keys(submit)
