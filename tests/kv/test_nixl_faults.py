"""Real NIXL with an owner that shows copies in windows, as ranks do: either side stopped or killed in mid-READ.

Skipped with the reason where NIXL is not installed (`make test-nixl` has it); UCX is held to tcp, as between nodes.
"""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from prefill_engine.kv.transport.choose import build_transport
from prefill_engine.kv.transport.contract import PullState, Source
from prefill_engine.kv.transport.nixl import NixlTransport, StagingSize
from prefill_plan.config import TransportKind
from prefill_plan.kvd_config import TransportConfig
from prefill_testing.in_loop import in_loop
from prefill_testing.kv_peer import BLOB_BYTE, BLOB_KEY, CODEC, RECORD_BYTES, PeerArgs, PeerProcess, key_of
from prefill_testing.nixl_there import need_transport
from prefill_testing.raw_peer import until

CONFIG = TransportConfig(kind=TransportKind.NIXL, host="127.0.0.1")
BLOB_BYTES = 96 << 20
OTHER_KEY, OTHER_BYTE = b"o" * 32, 0x33
SECONDS = 20.0


@pytest.fixture(autouse=True)
def _nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    need_transport(TransportKind.NIXL, monkeypatch)


def owner_args() -> PeerArgs:
    return PeerArgs(transport=CONFIG, blob_bytes=BLOB_BYTES, window_bytes=BLOB_BYTES)


@asynccontextmanager
async def opened(transport: NixlTransport) -> AsyncIterator[tuple[NixlTransport, str]]:
    """Serves a thing of BLOB_BYTE and another one."""

    def find(key: bytes) -> Source | None:
        byte = {BLOB_KEY: BLOB_BYTE, OTHER_KEY: OTHER_BYTE}.get(key)
        if byte is None:
            return None
        return Source(view=memoryview(bytes([byte]) * BLOB_BYTES), fd=-1, offset=0, release=lambda: None)

    endpoint = await transport.listen(find)
    try:
        yield transport, endpoint
    finally:
        await transport.close()


def reader() -> NixlTransport:
    transport = build_transport(CONFIG)
    assert isinstance(transport, NixlTransport)
    return transport


def owner() -> NixlTransport:
    transport = build_transport(CONFIG, staging=StagingSize(num_bytes=2 * BLOB_BYTES, window_bytes=BLOB_BYTES))
    assert isinstance(transport, NixlTransport)
    return transport


async def pull_record(side: NixlTransport, endpoint: str) -> PullState:
    """A small thing, verified if it comes."""
    record = bytearray(RECORD_BYTES)
    outcome = await side.pull(endpoint, key_of(1), memoryview(record), deadline_seconds=SECONDS)
    assert outcome.state is not PullState.DONE or CODEC.verify(record, key=key_of(1)) is None
    return outcome.state


@in_loop
async def test_owner_stopped_in_mid_read_lands_nothing_after_the_reader_closed_it() -> None:
    with PeerProcess(owner_args()) as peer:
        async with opened(reader()) as (side, _):
            target = bytearray(BLOB_BYTES)
            pull = side.pull(peer.endpoint, BLOB_KEY, memoryview(target), deadline_seconds=2.0)
            pulling = asyncio.create_task(pull)
            await until(lambda: BLOB_BYTE in (target[0], target[1 << 20], target[-1]))
            peer.send(signal.SIGSTOP)
            outcome = await pulling
            assert outcome.state is PullState.LATE, outcome
            assert target.count(BLOB_BYTE) < BLOB_BYTES, "too fast to be stopped: a larger blob is needed"
            await side.close_peer(peer.endpoint)
            assert outcome.settled()
            target[:] = bytes(BLOB_BYTES)
            peer.send(signal.SIGCONT)
            if await pull_record(side, peer.endpoint) is not PullState.DONE:
                # UCX aborts an owner that was stopped for long and finds its reader gone.
                assert peer.process.wait() == -signal.SIGABRT
            assert BLOB_BYTE not in target, "bytes landed after the pull was settled"


@in_loop
async def test_owner_killed_in_mid_read_is_a_failure_and_its_successor_serves() -> None:
    async with opened(reader()) as (side, _):
        with PeerProcess(owner_args()) as peer:
            target = bytearray(BLOB_BYTES)
            pull = side.pull(peer.endpoint, BLOB_KEY, memoryview(target), deadline_seconds=SECONDS)
            pulling = asyncio.create_task(pull)
            await until(lambda: BLOB_BYTE in (target[0], target[1 << 20], target[-1]))
            peer.kill()
            outcome = await pulling
            assert outcome.state is PullState.FAILED, outcome
            await until(outcome.settled)
        with PeerProcess(owner_args()) as peer:
            assert await pull_record(side, peer.endpoint) is PullState.DONE


@pytest.mark.parametrize("action", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@in_loop
async def test_reader_gone_in_mid_read_gets_no_other_bytes_and_costs_no_window(action: signal.Signals) -> None:
    async with opened(owner()) as (side, endpoint):
        args = PeerArgs(transport=CONFIG, blob_bytes=BLOB_BYTES, pull_from=endpoint)
        with PeerProcess(args) as peer:
            assert await asyncio.to_thread(peer.read_line) == {"begun": True}
            peer.send(action)
            # Its connection ends, or its patience: then nobody will ever say that the READ is over.
            await until(lambda: side.counters.get("quarantined", 0) == 1, seconds=SECONDS)
            await until(lambda: side._staging["owner"].state.quarantined == 0, seconds=SECONDS)
            async with opened(reader()) as (other, _):
                for _ in range(2):  # both windows hold something else now
                    target = bytearray(BLOB_BYTES)
                    outcome = await other.pull(endpoint, OTHER_KEY, memoryview(target), deadline_seconds=SECONDS)
                    assert outcome.state is PullState.DONE, outcome
                    assert target.count(OTHER_BYTE) == BLOB_BYTES
            if action is signal.SIGSTOP:
                peer.send(signal.SIGCONT)
                found = await asyncio.to_thread(peer.read_line)
                assert (found["settled"], found["strange"]) == (True, 0), found
                assert found["state"] != PullState.DONE, found
