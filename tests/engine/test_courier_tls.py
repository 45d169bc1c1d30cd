"""Pushes of a rank over mutual TLS: the bytes that a decode peer granted arrive, and at a stranger's nothing does."""

import asyncio
import queue
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from prefill_engine.handoff_pieces import PushRegion, cut_pieces
from prefill_engine.kv.transport.tcp import TcpTransport
from prefill_engine.messages import PushReport
from prefill_engine.rank.courier import Courier
from prefill_plan.config import TlsConfig
from prefill_plan.kvd_config import TransportConfig
from prefill_testing.certificates import make_tls
from prefill_testing.kvd_process import wait_until

KEY, PIECE_BYTES = b"k" * 32, 65_536
DATA = random.Random(5).randbytes(5 * PIECE_BYTES + 77)
SECONDS = 20.0


def transport(tls: TlsConfig) -> TcpTransport:
    return TcpTransport(TransportConfig(host="127.0.0.1", tls=tls))


@pytest.fixture
def reports() -> "queue.SimpleQueue[PushReport]":
    return queue.SimpleQueue()


@pytest.fixture
def courier(tmp_path: Path, reports: "queue.SimpleQueue[PushReport]") -> Iterator[Courier]:
    tls = make_tls(tmp_path, name="rank")
    courier = Courier(lambda: transport(tls), piece_seconds=SECONDS, report=reports.put, wake=lambda: None)
    courier.start(lambda _key: None)
    yield courier
    courier.stop()


async def push_to(peer: TcpTransport, courier: Courier, memory: bytearray) -> list[int]:
    """A decode peer that granted `memory`; number of pieces that landed when the push has drained."""
    landed: list[int] = []
    endpoint = await peer.listen(lambda _key: None)
    try:
        for piece in cut_pieces(KEY, num_bytes=len(DATA), piece_bytes=PIECE_BYTES):
            target = memoryview(memory)[piece.start : piece.end]
            peer.accept(piece.key, target, lambda index=piece.index: landed.append(index))  # type: ignore[misc]
        region = PushRegion(
            kind=1,
            transport="tcp+tls",
            endpoint=endpoint,
            key=KEY,
            piece_bytes=PIECE_BYTES,
            offset=0,
            num_bytes=len(DATA),
        )
        courier.begin(b"a", (region,))
        courier.add(b"a", 1, [DATA])
        courier.finish(b"a")
        await asyncio.to_thread(wait_until, lambda: b"a" in list(courier.collect()), "the push's end")
    finally:
        await peer.close()
    return landed


def test_push_lands_at_a_peer_of_the_same_authority(
    courier: Courier, reports: "queue.SimpleQueue[PushReport]", tmp_path: Path
) -> None:
    memory = bytearray(len(DATA))
    landed = asyncio.run(push_to(transport(make_tls(tmp_path, name="decode")), courier, memory))
    assert (sorted(landed), bytes(memory) == DATA) == ([0, 1, 2, 3, 4, 5], True)
    assert reports.get(timeout=SECONDS).state == "landed"
    assert courier.kind == "tcp+tls"


@pytest.mark.parametrize("who", ["stranger", "plain"])
def test_push_to_a_stranger_writes_nothing_and_is_told(
    courier: Courier, reports: "queue.SimpleQueue[PushReport]", tmp_path: Path, who: str
) -> None:
    tls = TlsConfig() if who == "plain" else make_tls(tmp_path, name="decode", authority="stranger")
    memory = bytearray(len(DATA))
    landed = asyncio.run(push_to(transport(tls), courier, memory))
    assert (landed, bytes(memory)) == ([], bytes(len(DATA)))
    assert [reports.get(timeout=SECONDS).state for _ in range(2)] == ["failed", "drained"]
