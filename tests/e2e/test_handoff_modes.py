"""Every hand-off mode over every transport on a real engine: the decode probe finds bytes and logits right, nothing leaks.

An engine's data port speaks tcp or nixl; nixl cases are skipped with the reason where it is not installed.
"""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from prefill_engine.__main__ import main
from prefill_engine.client import PrefillClient, PrefillOptions
from prefill_engine.client_ticket import HANDOFF_MODES
from prefill_engine.decode_probe import DecodeProbe, join_components, load_probe
from prefill_engine.handoff_sink import DecodeSink
from prefill_engine.kv.transport.choose import build_transport
from prefill_engine.kv.transport.rdma import find_devices
from prefill_engine.kv.transport.tcp import TcpTransport
from prefill_engine.local_engine import LocalEngine
from prefill_engine.takeover import Outcome, follow_push
from prefill_engine.takeover_way import TakeOverWay, send_and_take_over
from prefill_plan.config import RecordFormat, TransportKind
from prefill_plan.errors import CallFailed, KvError
from prefill_plan.kv_layout import BLOCK_TOKENS
from prefill_plan.kvd_config import TransportConfig
from prefill_testing.handoff_scene import OVERRIDES, free_tokens, prompt, wait_until_free
from prefill_testing.nixl_there import need_transport

GOLDEN = Path(__file__).parents[1] / "golden" / "tiny_quant"
WAYS = [
    pytest.param("pull", "grpc", id="pull-grpc"),
    pytest.param("pull", "data", id="pull-data"),
    pytest.param("push", "data", id="push-data"),
    pytest.param("store-only", "grpc", id="store-only-grpc"),
    pytest.param("store-only", "data", id="store-only-data"),
]


@pytest.fixture(scope="module", params=TransportKind)
def data(request: pytest.FixtureRequest) -> Iterator[str]:
    """What the engine's data port speaks."""
    with pytest.MonkeyPatch.context() as patch:
        need_transport(request.param, patch)
        yield request.param.value


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory, data: str) -> Path:
    return tmp_path_factory.mktemp(f"engine-{data}")


@pytest.fixture(scope="module")
def engine(run_dir: Path, data: str) -> Iterator[LocalEngine]:
    overrides = (*OVERRIDES, f"handoff.transport={data}")
    with LocalEngine(GOLDEN, run_dir=run_dir, store=run_dir / "store", overrides=overrides) as running:
        running.start(timeout_seconds=180.0)
        yield running


@pytest.fixture(scope="module")
def idle(engine: LocalEngine) -> tuple[int, int, int]:
    return asyncio.run(free_tokens(engine))


@pytest.fixture(scope="module")
def probe() -> DecodeProbe:
    return load_probe(GOLDEN, record_format=RecordFormat.FP4, keep_tokens=24, window_rows=22)


def hand_over(engine: LocalEngine, store: Path, tokens: list[int], mode: str, transport: str) -> Outcome:
    async def run() -> Outcome:
        async with PrefillClient(engine.endpoint) as client:
            info = await client.server_info()
            way = TakeOverWay(mode=mode, transport=transport, model=GOLDEN, store=store, kv_format=info.format)
            attempt = client.prefill(tokens, PrefillOptions(mode=mode), timeout_seconds=60.0)
            return await send_and_take_over(attempt, way, endpoint=client.endpoint)

    return asyncio.run(run())


def problems(probe: DecodeProbe, outcome: Outcome, tokens: list[int]) -> tuple[str, ...]:
    assert outcome.taken_over is not None
    usage = outcome.completed.usage
    handed = join_components(outcome.taken_over.components, probe.state)
    replayed_hit = usage.cached_tokens if usage.replayed_tokens else None
    return probe.verify(handed, tokens, replayed_hit=replayed_hit).problems


@pytest.mark.parametrize("length", [100, 256, 700])
@pytest.mark.parametrize(("mode", "transport"), WAYS)
def test_every_way_hands_over_right_bytes_and_frees_everything(
    engine: LocalEngine,
    idle: tuple[int, int, int],
    run_dir: Path,
    probe: DecodeProbe,
    data: str,
    mode: str,
    transport: str,
    length: int,
) -> None:
    transport = data if transport == "data" else transport
    tokens = prompt(f"{mode} {transport} {length}", length)
    outcome = hand_over(engine, run_dir / "store", tokens, mode, transport)
    taken = outcome.taken_over
    assert taken is not None
    assert outcome.completed.handoff is not None
    assert (outcome.completed.handoff.state, taken.transport) == ("DELIVERED", transport)
    assert outcome.completed.handoff.bytes_done == taken.num_bytes
    assert problems(probe, outcome, tokens) == ()
    if mode == "store-only":
        whole, payload = length // BLOCK_TOKENS, 10_176
        assert taken.stored_bytes == whole * payload
        assert taken.num_bytes < 2 * payload + probe.state.handover_bytes
    wait_until_free(engine, idle)


@pytest.mark.parametrize(("mode", "transport"), WAYS[1:4])
def test_hit_of_an_earlier_turn_is_handed_over_right(
    engine: LocalEngine, run_dir: Path, probe: DecodeProbe, data: str, mode: str, transport: str
) -> None:
    transport = data if transport == "data" else transport
    tokens = prompt(f"turns {mode} {transport}", 600)
    first = hand_over(engine, run_dir / "store", tokens[:300], "pull", "grpc")
    second = hand_over(engine, run_dir / "store", tokens, mode, transport)
    assert first.completed.usage.cached_tokens == 0
    assert second.completed.usage.cached_tokens == 256
    assert problems(probe, second, tokens) == ()


def test_push_without_early_send_is_right_too(engine: LocalEngine, probe: DecodeProbe, data: str) -> None:
    tokens = prompt("late push", 700)

    async def run() -> Outcome:
        async with PrefillClient(engine.endpoint) as client:
            info = await client.server_info()
            transport = build_transport(TransportConfig(kind=TransportKind(data), host="127.0.0.1"))
            async with DecodeSink(transport, info.format, engine_id="d", piece_bytes=1 << 14) as sink:
                attempt = client.prefill(tokens, PrefillOptions(mode="push"), timeout_seconds=60.0)
                return await follow_push(attempt, sink, early_send=False)

    assert problems(probe, asyncio.run(run()), tokens) == ()


def test_block_that_left_the_store_refuses_the_hand_over_and_frees_it(
    engine: LocalEngine, idle: tuple[int, int, int], tmp_path: Path, data: str
) -> None:
    with pytest.raises(KvError, match="block 0 of 5 is missing"):
        hand_over(engine, tmp_path, prompt("not in this store", 700), "store-only", data)
    wait_until_free(engine, idle)


def test_push_to_a_peer_without_room_is_refused_before_anything_is_sent(engine: LocalEngine) -> None:
    async def run() -> None:
        async with PrefillClient(engine.endpoint) as client:
            info = await client.server_info()
            assert set(info.handoff_modes) == {"PULL", "PUSH", "STORE_ONLY", "NONE"}
            transport = TcpTransport(TransportConfig(host="127.0.0.1"))
            async with DecodeSink(transport, info.format, engine_id="d", capacity_bytes=10) as sink:
                attempt = client.prefill(prompt("big"), PrefillOptions(mode="push"), timeout_seconds=60.0)
                with pytest.raises(CallFailed, match="no room"):
                    await follow_push(attempt, sink)

    asyncio.run(run())


@pytest.mark.parametrize("mode", HANDOFF_MODES)
def test_request_verb_takes_over_by_every_mode(
    engine: LocalEngine, run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], data: str, mode: str
) -> None:
    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps(prompt(f"verb {mode}", 300)))
    arguments = ["--endpoint", engine.endpoint, "--token-ids", str(ids), "--handoff", mode, "--probe"]
    code = main(["request", *arguments, "--model", str(GOLDEN), "--block-store", str(run_dir / "store"), "--json"])
    report = json.loads(capsys.readouterr().out)
    assert (code, report["error"], report["handoff_transport"], report["handoff_fallbacks"]) == (0, "", data, 0)
    assert (report["stored_bytes"] > 0) == (mode == "store-only")
    assert report["probe"]["problems"] == []


def test_metric_tells_what_the_data_port_moves_bytes_by(engine: LocalEngine, data: str) -> None:
    found = [name for name in engine.figures() if name.startswith("kv_handoff_transport_info")]
    kind = {"tcp": "tcp", "nixl": "nixl-ucx-any" if find_devices() else "nixl-ucx-tcp"}[data]
    assert len(found) == 1
    assert f'kind="{kind}"' in found[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--handoff", "push", "--transport", "grpc"], "gRPC cannot push"),
        (["--handoff", "store-only"], "--block-store DIR"),
    ],
)
def test_request_verb_refuses_ways_that_do_not_exist(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    ids = tmp_path / "ids.json"
    ids.write_text("[1, 2, 3]")
    assert main(["request", "--endpoint", "127.0.0.1:1", "--token-ids", str(ids), *options]) == 2
    assert message in capsys.readouterr().err
