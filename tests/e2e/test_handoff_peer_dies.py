"""Decode peers that are killed or stopped in every phase of pull and push: nothing leaks, and no wrong byte is ever used."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from prefill_engine.client import PrefillClient, PrefillOptions
from prefill_engine.local_engine import LocalEngine
from prefill_engine.takeover import follow
from prefill_plan.config import TransportKind
from prefill_testing.decode_peer import DecodePeer, digest_of, start_decode_peer
from prefill_testing.handoff_scene import OVERRIDES, End, free_tokens, prompt, run_way, wait_until_free
from prefill_testing.nixl_there import need_transport

GOLDEN = Path(__file__).parents[1] / "golden" / "tiny_quant"
TOKENS = prompt("handed over")
PULL_PHASES = ("claimed", "reading", "read")
PUSH_PHASES = ("reserved", "piece", "offer")


@pytest.fixture(scope="module", params=TransportKind)
def data(request: pytest.FixtureRequest) -> Iterator[str]:
    """What the engine's data port speaks; nixl is skipped with the reason where it is not installed."""
    with pytest.MonkeyPatch.context() as patch:
        need_transport(request.param, patch)
        yield request.param.value


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, data: str) -> Iterator[LocalEngine]:
    run_dir = tmp_path_factory.mktemp("engine")
    # Three processes that connect by UCX at once have read nothing when the usual lease of 1.5 s ends.
    patience = ("handoff.ticket_seconds=8",) if data == "nixl" else ()
    overrides = (*OVERRIDES, f"handoff.transport={data}", *patience)
    with LocalEngine(GOLDEN, run_dir=run_dir, store=run_dir / "store", overrides=overrides) as running:
        running.start(timeout_seconds=180.0)
        yield running


@pytest.fixture(scope="module")
def idle(engine: LocalEngine) -> tuple[int, int, int]:
    return asyncio.run(free_tokens(engine))


@pytest.fixture(scope="module")
def digest(engine: LocalEngine, idle: tuple[int, int, int]) -> str:
    """Of the right bytes: an undisturbed hand-over of the same prompt."""
    del idle

    async def run() -> str:
        async with PrefillClient(engine.endpoint) as client:
            attempt = client.prefill(TOKENS, PrefillOptions(), timeout_seconds=60.0)
            outcome = await follow(attempt, endpoint=client.endpoint)
            assert outcome.taken_over is not None
            return digest_of(outcome.taken_over.components)

    return asyncio.run(run())


def run_all(engine: LocalEngine, scenes: Mapping[tuple[str, str], DecodePeer]) -> dict[tuple[str, str], End]:
    """One attempt per (way, phase), all at once."""

    async def run() -> dict[tuple[str, str], End]:
        ends = await asyncio.gather(*(run_way(engine, peer, way, TOKENS) for (way, _), peer in scenes.items()))
        return dict(zip(scenes, ends, strict=True))

    return asyncio.run(run())


@contextmanager
def peers(ways: Sequence[str], phases: Sequence[str], action: str) -> Iterator[dict[tuple[str, str], DecodePeer]]:
    with ExitStack() as stack:
        yield {(way, phase): stack.enter_context(start_decode_peer(phase, action)) for way in ways for phase in phases}


def fill_pool(engine: LocalEngine) -> None:
    """Other prompts go through every block of the pool: whoever reads freed memory now reads their bytes."""

    async def send() -> None:
        async with PrefillClient(engine.endpoint) as client:
            for seed in ("x", "y", "z"):
                options = PrefillOptions(handoff=False, store="skip")
                await client.prefill(prompt(seed, 1900), options, timeout_seconds=60.0).finish()

    asyncio.run(send())


def test_undisturbed_hand_overs_to_processes_of_their_own(
    engine: LocalEngine, idle: tuple[int, int, int], digest: str, data: str
) -> None:
    with peers(["grpc", data, f"push-{data}"], ["-"], "-") as scenes:
        assert set(run_all(engine, scenes).values()) == {End(handoff="DELIVERED")}
        assert {peer.expect("taken", "accepted")["digest"] for peer in scenes.values()} == {digest}
    wait_until_free(engine, idle)


def test_killed_pullers_cost_the_lease_and_nothing_else(
    engine: LocalEngine, idle: tuple[int, int, int], data: str
) -> None:
    with peers(["grpc", data], PULL_PHASES, "kill") as scenes:
        ends = run_all(engine, scenes)
        assert ends == dict.fromkeys(scenes, End(handoff="EXPIRED"))
        assert [peer.expect(phase)["event"] for (_, phase), peer in scenes.items()] == [*PULL_PHASES, *PULL_PHASES]
    wait_until_free(engine, idle)


def test_pullers_that_stall_beyond_their_lease_discard_what_they_read(
    engine: LocalEngine, idle: tuple[int, int, int], data: str
) -> None:
    with peers(["grpc", data], PULL_PHASES, "stop") as scenes:
        ends = run_all(engine, scenes)
        assert ends == dict.fromkeys(scenes, End(handoff="EXPIRED"))
        wait_until_free(engine, idle)
        fill_pool(engine)
        for (_, phase), peer in scenes.items():
            peer.expect(phase)
            peer.go_on()
        assert {key: peer.expect("taken", "failed")["event"] for key, peer in scenes.items()} == dict.fromkeys(
            scenes, "failed"
        )
    wait_until_free(engine, idle)


@pytest.mark.parametrize("action", ["kill", "stop"])
def test_pushes_to_peers_that_die_or_hang_end_and_free_both_sides(
    engine: LocalEngine, idle: tuple[int, int, int], data: str, action: str
) -> None:
    with peers([f"push-{data}"], PUSH_PHASES, action) as scenes:
        for end in run_all(engine, scenes).values():
            failed = end.reason in ("DECODE_ABORTED", "HANDOFF_TIMEOUT")
            assert failed or end.handoff in ("ABORTED", "EXPIRED"), end
        wait_until_free(engine, idle)
        for (_, phase), peer in scenes.items():
            peer.expect(phase)
            if action == "stop":
                peer.go_on()
                assert peer.expect("accepted", "failed")["event"] == "failed"


def test_peer_that_hangs_after_accepting_keeps_right_bytes(
    engine: LocalEngine, idle: tuple[int, int, int], digest: str, data: str
) -> None:
    with peers([f"push-{data}"], ["offered"], "stop") as scenes:
        (end,) = run_all(engine, scenes).values()
        assert end.handoff in ("ABORTED", "EXPIRED")
        wait_until_free(engine, idle)
        (peer,) = scenes.values()
        peer.go_on()
        assert peer.expect("accepted")["digest"] == digest
