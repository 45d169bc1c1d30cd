"""An engine that is killed while decode peers are in every phase of pull and push: they discard, their memory comes back."""

import asyncio
from contextlib import ExitStack
from pathlib import Path

import pytest

from prefill_engine.local_engine import LocalEngine
from prefill_plan.config import TransportKind
from prefill_testing.decode_peer import start_decode_peer
from prefill_testing.handoff_scene import OVERRIDES, End, prompt, run_way
from prefill_testing.nixl_there import need_transport

GOLDEN = Path(__file__).parents[1] / "golden" / "tiny_quant"
# Nothing may time out on the engine's side before it is killed.
PATIENT = (
    "handoff.ticket_seconds=60",
    "handoff.piece_seconds=60",
    "kv.pool_tokens=16384",
)


def scenes_of(data: str) -> tuple[tuple[str, str], ...]:
    return (
        *((way, phase) for way in ("grpc", data) for phase in ("claimed", "reading", "read")),
        *((f"push-{data}", phase) for phase in ("reserved", "piece", "offer")),
    )


@pytest.mark.parametrize("kind", TransportKind)
@pytest.mark.slow
def test_peers_of_a_killed_engine_discard_and_free_everything_and_the_next_engine_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: TransportKind
) -> None:
    need_transport(kind, monkeypatch)
    data, scenes = kind.value, scenes_of(kind.value)
    tokens = prompt("lost with its engine")
    overrides = (*OVERRIDES, *PATIENT, f"handoff.transport={data}")
    with ExitStack() as stack:
        engine = stack.enter_context(
            LocalEngine(GOLDEN, run_dir=tmp_path, store=tmp_path / "store", overrides=overrides)
        )
        engine.start(timeout_seconds=180.0)
        with start_decode_peer() as first:
            assert asyncio.run(run_way(engine, first, data, tokens)) == End(handoff="DELIVERED")
            digest = first.expect("taken")["digest"]
        peers = {scene: stack.enter_context(start_decode_peer(scene[1], "wait")) for scene in scenes}

        async def run() -> list[End]:
            attempts = [
                asyncio.create_task(run_way(engine, peer, way, tokens, grant_seconds=5.0))
                for (way, _), peer in peers.items()
            ]
            for (_, phase), peer in peers.items():
                await asyncio.to_thread(peer.expect, phase)
            await asyncio.to_thread(engine.kill)
            return await asyncio.gather(*attempts)

        ends = asyncio.run(run())
        assert "DELIVERED" not in {end.handoff for end in ends}
        for peer in peers.values():
            peer.tell(op="go on")
        found = {scene: peer.expect("taken", "accepted", "failed") for scene, peer in peers.items()}
        # The one that had been offered everything may keep it: it has checked every byte.
        offered = found.pop((f"push-{data}", "offer"))
        assert (offered["event"], offered["digest"]) == ("accepted", digest)
        assert {scene: event["event"] for scene, event in found.items()} == dict.fromkeys(found, "failed")
        engine.start(timeout_seconds=180.0)
        for way in (data, f"push-{data}"):
            with start_decode_peer() as fresh:
                assert asyncio.run(run_way(engine, fresh, way, tokens)) == End(handoff="DELIVERED")
                fresh.expect("taken", "accepted")
