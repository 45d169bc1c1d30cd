"""An engine whose data port speaks mutual TLS: decode peers with a certificate of its authority pull by it, others by gRPC."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from prefill_engine.client import PrefillClient, PrefillOptions
from prefill_engine.handoff_client import GRPC
from prefill_engine.kv.transport.tcp import TcpTransport
from prefill_engine.local_engine import LocalEngine
from prefill_engine.takeover import DecodeSide, TakenOver, follow
from prefill_plan.config import TlsConfig
from prefill_plan.errors import CallFailed
from prefill_plan.kvd_config import TransportConfig
from prefill_testing.certificates import make_tls
from prefill_testing.handoff_scene import OVERRIDES, prompt

GOLDEN = Path(__file__).parents[1] / "golden" / "tiny_quant"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engine")


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[LocalEngine]:
    tls = make_tls(folder)
    files = [f"handoff.tls.{name}={getattr(tls, name)}" for name in ("certificate", "key", "authority")]
    with LocalEngine(GOLDEN, run_dir=folder, store=folder / "store", overrides=(*OVERRIDES, *files)) as running:
        running.start(timeout_seconds=180.0)
        yield running


def pull(engine: LocalEngine, tls: TlsConfig, *, required: bool) -> TakenOver:
    async def run() -> TakenOver:
        transport = TcpTransport(TransportConfig(host="127.0.0.1", tls=tls))
        try:
            async with PrefillClient(engine.endpoint) as client:
                attempt = client.prefill(prompt("tls"), PrefillOptions(), timeout_seconds=60.0)
                side = DecodeSide(transport=transport, required=required)
                outcome = await follow(attempt, endpoint=engine.endpoint, side=side)
        finally:
            await transport.close()
        assert outcome.taken_over is not None
        return outcome.taken_over

    return asyncio.run(run())


def test_peer_of_the_same_authority_pulls_by_tls_what_grpc_gives_too(engine: LocalEngine, folder: Path) -> None:
    by_tls = pull(engine, make_tls(folder, name="decode"), required=True)
    by_grpc = pull(engine, TlsConfig(), required=False)
    assert (by_tls.transport, by_grpc.transport) == ("tcp+tls", GRPC)
    assert by_tls.components == by_grpc.components


@pytest.mark.parametrize("who", ["plain", "another-authority"])
def test_peer_without_a_certificate_of_its_authority_gets_nothing_by_tcp(
    engine: LocalEngine, folder: Path, who: str
) -> None:
    tls = TlsConfig() if who == "plain" else make_tls(folder, name="stranger", authority="stranger")
    with pytest.raises(CallFailed):
        pull(engine, tls, required=True)
