"""TcpTransport with mutual TLS: who has no certificate of the authority gets nothing."""

import asyncio
import ssl
from pathlib import Path

import pytest

from prefill_engine.kv.transport.contract import PullState
from prefill_engine.kv.transport.frame import Frame, Op, encode
from prefill_plan.config import TlsConfig
from prefill_plan.errors import ConfigError
from prefill_testing.certificates import make_tls
from prefill_testing.in_loop import in_loop
from prefill_testing.tcp_scene import KEY, find, pull, transport


@pytest.mark.parametrize("who", ["another authority", "plain caller", "plain listener"])
@in_loop
async def test_without_a_certificate_of_the_authority_nothing_is_served(who: str, tmp_path: Path) -> None:
    ours = make_tls(tmp_path)
    listener_tls, caller_tls = {
        "another authority": (ours, make_tls(tmp_path, authority="stranger")),
        "plain caller": (ours, TlsConfig()),
        "plain listener": (TlsConfig(), ours),
    }[who]
    server, side = transport(listener_tls), transport(caller_tls)
    endpoint = await server.listen(find)
    try:
        target = bytearray(8)
        outcome = await pull(side, endpoint, target, seconds=3.0)
        assert outcome.state in (PullState.FAILED, PullState.LATE)
        assert (target, outcome.settled()) == (bytes(8), True)
    finally:
        await side.close()
        await server.close()
    assert server.counters.get("served", 0) == 0


@in_loop
async def test_a_caller_without_a_certificate_gets_nothing(tmp_path: Path) -> None:
    ours = make_tls(tmp_path)
    server = transport(ours)
    host, _, port = (await server.listen(find)).rpartition(":")
    bare = ssl.create_default_context(cafile=ours.authority)
    try:
        reader, writer = await asyncio.open_connection(host, int(port), ssl=bare)
        writer.write(encode(Frame(op=Op.GET, exchange=1, key=KEY, length=8)))
        with pytest.raises((asyncio.IncompleteReadError, OSError)):
            await reader.readexactly(1)
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)
    finally:
        await server.close()
    assert server.counters.get("served", 0) == 0


@pytest.mark.parametrize("missing", ["certificate", "key", "authority"])
def test_tls_files_come_all_or_none(missing: str, tmp_path: Path) -> None:
    files = make_tls(tmp_path)
    parts = {name: getattr(files, name) for name in ("certificate", "key", "authority")}
    with pytest.raises(ConfigError, match="or none of them"):
        transport(TlsConfig(**{**parts, missing: ""}))
    with pytest.raises(ConfigError, match="expected PEM files"):
        transport(TlsConfig(**{**parts, missing: str(tmp_path / "absent")}))
