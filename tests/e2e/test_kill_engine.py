"""Engines that are killed, and stores that are full, on real processes: a restart serves the same result, never a wrong byte."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from prefill_engine.client import PrefillClient, PrefillOptions
from prefill_engine.local_engine import LocalEngine
from prefill_engine.rpc import common_pb2
from prefill_engine.takeover import Outcome, follow
from prefill_engine.timeline import ChunkDone, FirstToken, StoreState, last_event
from prefill_plan.errors import CallFailed

GOLDEN = Path(__file__).parents[1] / "golden" / "tiny_quant"
TOKENS = [3 + (17 * i * i + 5 * i) % 470 for i in range(1500)]
OVERRIDES = (
    "replay.keep_tokens=24",
    "kv.pool_tokens=16384",
    "kv.state_slots=3",
    "max_context_tokens=4096",
    "scheduler.chunk_cap_tokens=256",
    "scheduler.min_chunk_tokens=16",
)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[LocalEngine]:
    with LocalEngine(GOLDEN, run_dir=tmp_path, store=tmp_path / "store", overrides=OVERRIDES) as running:
        running.start(timeout_seconds=180.0)
        yield running


def finish(engine: LocalEngine) -> tuple[Outcome, int]:
    """Sends the prompt, takes it over; the outcome and the first token."""

    async def run() -> tuple[Outcome, int]:
        async with PrefillClient(engine.endpoint) as client:
            attempt = client.prefill(TOKENS, PrefillOptions(store="required"), timeout_seconds=120.0)
            outcome = await follow(attempt, endpoint=client.endpoint)
            first = last_event(attempt.record("x"), FirstToken)
            assert first is not None
            return outcome, first.token

    return asyncio.run(run())


def kill_when(engine: LocalEngine, kind: type[ChunkDone] | type[StoreState], *, least: int) -> None:
    """Sends the prompt and kills the engine as soon as an event says that rows or blocks have reached `least`."""

    async def run() -> None:
        async with PrefillClient(engine.endpoint) as client:
            attempt = client.prefill(TOKENS, PrefillOptions(), timeout_seconds=120.0)
            async for received in attempt:
                event = received.body
                if isinstance(event, kind):
                    done = event.rows_done if isinstance(event, ChunkDone) else event.blocks_committed
                    if done >= least:
                        engine.kill()

    with pytest.raises(CallFailed):
        asyncio.run(run())


def block_bytes(outcome: Outcome) -> bytes:
    assert outcome.taken_over is not None
    return bytes(outcome.taken_over.components[common_pb2.COMPONENT_KIND_BLOCK_KV])


def store_is_sound(store: Path) -> bool:
    """No half-written record under a final name: every record has the full length."""
    sizes = {path.stat().st_size for path in store.rglob("*.kv")}
    return len(sizes) <= 1


@pytest.mark.parametrize(
    ("kind", "least"),
    [pytest.param(ChunkDone, 512, id="mid-request"), pytest.param(StoreState, 1, id="mid-store")],
)
def test_killed_engine_serves_the_same_result_after_restart(
    engine: LocalEngine, tmp_path: Path, kind: type[ChunkDone] | type[StoreState], least: int
) -> None:
    kill_when(engine, kind, least=least)
    assert store_is_sound(tmp_path / "store")
    engine.start(timeout_seconds=180.0)
    restarted, token = finish(engine)
    with LocalEngine(GOLDEN, run_dir=tmp_path, store=tmp_path / "fresh-store", overrides=OVERRIDES) as fresh:
        fresh.start(timeout_seconds=180.0)
        cold, cold_token = finish(fresh)
    hit = restarted.completed.usage.cached_tokens
    assert hit >= 128  # finished chunks of the killed attempt were kept
    payload = len(block_bytes(cold)) // -(-len(TOKENS) // 128)
    assert block_bytes(restarted)[: hit // 128 * payload] == block_bytes(cold)[: hit // 128 * payload]
    if restarted.completed.usage.replayed_tokens == 0:
        assert (block_bytes(restarted), token) == (block_bytes(cold), cold_token)


def test_lost_medium_degrades_to_recompute_and_required_store_fails_the_attempt(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with LocalEngine(GOLDEN, run_dir=tmp_path, store=store, overrides=OVERRIDES) as engine:
        engine.start(timeout_seconds=180.0)
        make_unwritable(store)

        async def run(durability: str, tokens: list[int]) -> StoreState | None:
            async with PrefillClient(engine.endpoint) as client:
                options = PrefillOptions(store=durability, handoff=False)
                attempt = client.prefill(tokens, options, timeout_seconds=120.0)
                async for _ in attempt:
                    pass
                return last_event(attempt.record("x"), StoreState)

        best_effort = asyncio.run(run("best-effort", TOKENS[:600]))
        assert best_effort is not None
        assert best_effort.blocks_committed == 0
        assert best_effort.blocks_failed == 4
        with pytest.raises(CallFailed, match="STORE_WRITE_FAILED"):
            asyncio.run(run("required", TOKENS[600:1200]))
        assert list(store.rglob("*.kv")) == []


def make_unwritable(store: Path) -> None:
    """Root ignores permissions, so the store's folders give way to files: every open of a record fails."""
    for folder in sorted(store.iterdir()):
        moved = folder.with_name(folder.name + ".gone")
        os.rename(folder, moved)
        folder.write_bytes(b"")
