"""Transports with real processes behind them: stopped, killed and restarted peers, and slots rewritten under a pull.

Numbers are those of kv.md 8. nixl cases run where it is installed; UCX is then held to tcp, as between nodes.
"""

import asyncio
import os
import random
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from prefill_engine.kv.transport.choose import build_transport
from prefill_engine.kv.transport.contract import PullState, Transport
from prefill_engine.kv.transport.nixl_agent import LIBRARIES, load_library
from prefill_engine.kv.transport.rdma import find_devices
from prefill_plan.config import TransportKind
from prefill_plan.errors import ConfigError
from prefill_plan.kvd_config import TransportConfig
from prefill_testing.in_loop import in_loop
from prefill_testing.kv_peer import BLOB_BYTE, BLOB_KEY, CODEC, RECORD_BYTES, PeerArgs, PeerProcess, key_of, record_of
from prefill_testing.raw_peer import until

_BLOB_BYTES = 96 << 20
_SECONDS = 20.0


@pytest.fixture(params=TransportKind)
def config(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> TransportConfig:
    if request.param is TransportKind.NIXL:
        try:
            load_library()
        except ConfigError as error:
            pytest.skip(error.message)
        monkeypatch.setenv("UCX_TLS", "tcp,self")
    return TransportConfig(kind=request.param, host="127.0.0.1")


@asynccontextmanager
async def opened(config: TransportConfig) -> AsyncIterator[Transport]:
    side = build_transport(config)
    await side.listen(lambda _key: None)
    try:
        yield side
    finally:
        await side.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@in_loop
async def test_1_a_peer_stopped_before_it_answers(config: TransportConfig) -> None:
    with PeerProcess(PeerArgs(transport=config)) as peer:
        async with opened(config) as side:
            target = bytearray(RECORD_BYTES)
            view = memoryview(target)
            outcome = await side.pull(peer.endpoint, key_of(0), view, deadline_seconds=_SECONDS)
            assert (outcome.state, CODEC.verify(target, key=key_of(0))) == (PullState.DONE, None)
            peer.send(signal.SIGSTOP)
            outcome = await side.pull(peer.endpoint, key_of(0), view, deadline_seconds=0.05)
            assert outcome.state is PullState.LATE
            # Nothing was in flight yet on either transport: the answer never came.
            assert outcome.settled()
            reused = random.Random(1).randbytes(RECORD_BYTES)
            target[:] = reused
            peer.send(signal.SIGCONT)
            other = bytearray(RECORD_BYTES)
            outcome = await side.pull(peer.endpoint, key_of(1), memoryview(other), deadline_seconds=_SECONDS)
            assert (outcome.state, CODEC.verify(other, key=key_of(1))) == (PullState.DONE, None)
            assert target == reused


@pytest.mark.parametrize("ending", ["wait until settled", "close the peer"])
@in_loop
async def test_1_a_peer_stopped_in_mid_send(config: TransportConfig, ending: str) -> None:
    with PeerProcess(PeerArgs(transport=config, blob_bytes=_BLOB_BYTES)) as peer:
        async with opened(config) as side:
            target = bytearray(_BLOB_BYTES)
            pull = side.pull(peer.endpoint, BLOB_KEY, memoryview(target), deadline_seconds=2.0)
            pulling = asyncio.create_task(pull)
            await until(lambda: BLOB_BYTE in (target[0], target[1 << 20], target[-1]))
            peer.send(signal.SIGSTOP)
            outcome = await pulling
            assert outcome.state is PullState.LATE, outcome
            assert target.count(BLOB_BYTE) < _BLOB_BYTES, "it was too fast to be stopped: a larger blob is needed"
            if config.kind is TransportKind.TCP:
                assert outcome.settled()
            if ending == "close the peer":
                await side.close_peer(peer.endpoint)
                assert outcome.settled()
            if outcome.settled():
                # The owner of the destination takes it back now, and writes something else into it.
                target[:] = bytes(_BLOB_BYTES)
            peer.send(signal.SIGCONT)
            await until(outcome.settled)
            is_reused = BLOB_BYTE not in target
            small = bytearray(RECORD_BYTES)
            again = await side.pull(peer.endpoint, key_of(1), memoryview(small), deadline_seconds=_SECONDS)
            if again.state is not PullState.DONE:
                # UCX aborts an owner that was stopped for long and finds its reader gone ("unexpected error: Endpoint timeout").
                assert (config.kind, ending) == (TransportKind.NIXL, "close the peer"), again
                assert peer.process.wait() == -signal.SIGABRT
            else:
                assert CODEC.verify(small, key=key_of(1)) is None
            assert is_reused is (BLOB_BYTE not in target), "bytes landed after the pull was settled"


@in_loop
async def test_7_a_slot_rewritten_under_its_readers_is_never_believed() -> None:
    """Torn-read storm: the owner writes new generations while peers pull; the record's own checksum must tell every one."""
    config = TransportConfig(host="127.0.0.1")
    whole = [{record_of(number, generation=one) for one in (1, 2, 3)} for number in range(2)]
    seen: Counter[str] = Counter()
    with PeerProcess(PeerArgs(transport=config, rewrite=True)) as peer:
        async with opened(config) as side:

            async def reader(number: int) -> None:
                target = bytearray(RECORD_BYTES)
                while not (seen["whole"] >= 20 and seen["torn"] >= 20) and time.monotonic() < stop:
                    outcome = await side.pull(
                        peer.endpoint, key_of(number), memoryview(target), deadline_seconds=_SECONDS
                    )
                    assert outcome.state is PullState.DONE, outcome
                    if CODEC.verify(target, key=key_of(number)) is None:
                        assert bytes(target) in whole[number], "a torn record passed verification"
                        seen["whole"] += 1
                    else:
                        seen["torn"] += 1

            stop = time.monotonic() + 15.0
            await asyncio.gather(reader(0), reader(1))
    assert seen["whole"] > 0, seen
    assert seen["torn"] > 0, seen


@in_loop
async def test_11_a_peer_killed_while_it_is_read_is_a_failure_and_its_successor_serves(config: TransportConfig) -> None:
    target = bytearray(_BLOB_BYTES)
    async with opened(config) as side:
        with PeerProcess(PeerArgs(transport=config, blob_bytes=_BLOB_BYTES)) as peer:
            pull = side.pull(peer.endpoint, BLOB_KEY, memoryview(target), deadline_seconds=_SECONDS)
            pulling = asyncio.create_task(pull)
            await until(lambda: BLOB_BYTE in (target[0], target[1 << 20], target[-1]))
            peer.kill()
            outcome = await pulling
            assert outcome.state is PullState.FAILED, outcome
            await until(outcome.settled)
            gone = await side.pull(
                peer.endpoint, key_of(0), memoryview(bytearray(RECORD_BYTES)), deadline_seconds=_SECONDS
            )
            assert gone.state is PullState.FAILED
        with PeerProcess(PeerArgs(transport=config)) as peer:
            record = bytearray(RECORD_BYTES)
            outcome = await side.pull(peer.endpoint, key_of(0), memoryview(record), deadline_seconds=_SECONDS)
            assert (outcome.state, CODEC.verify(record, key=key_of(0))) == (PullState.DONE, None)


@in_loop
async def test_12_a_peer_restarted_fifty_times_on_one_address_under_concurrent_pulls(config: TransportConfig) -> None:
    # Two UCX agents per incarnation take half a second on this kind of machine.
    restarts = 50 if config.kind is TransportKind.TCP else 8
    port = free_port()
    endpoint = f"127.0.0.1:{port}"
    peer_config = TransportConfig(kind=config.kind, host="127.0.0.1", port=port)
    states: Counter[PullState] = Counter()
    is_over = False
    with PeerProcess(PeerArgs(transport=peer_config, respawn=True)) as parent:
        async with opened(config) as side:

            async def reader(number: int) -> None:
                target = bytearray(RECORD_BYTES)
                while not is_over:
                    outcome = await side.pull(endpoint, key_of(number), memoryview(target), deadline_seconds=5.0)
                    states[outcome.state] += 1
                    assert outcome.state in (PullState.DONE, PullState.FAILED), outcome
                    if outcome.state is PullState.DONE:
                        assert CODEC.verify(target, key=key_of(number)) is None
                    else:
                        await until(outcome.settled)
                        await asyncio.sleep(0.005)

            async def killer() -> None:
                nonlocal is_over
                for _ in range(restarts):
                    line: dict[str, object] = {}
                    while "pid" not in line:
                        line = await asyncio.to_thread(parent.read_line)
                    pid = int(str(line["pid"]))
                    served = states[PullState.DONE]
                    await until(lambda served=served: states[PullState.DONE] > served + 2)  # type: ignore[misc]
                    os.kill(pid, signal.SIGKILL)
                is_over = True

            await asyncio.gather(killer(), *(reader(number % 2) for number in range(4)))
    assert states[PullState.DONE] >= 3 * restarts
    assert states[PullState.FAILED] > 0


@pytest.mark.parametrize("kind", TransportKind)
@pytest.mark.parametrize("ports", [[], ["DOWN"]], ids=["no device", "port down"])
def test_17_rdma_that_is_asked_for_and_not_there_is_an_error_at_start(
    kind: TransportKind, ports: list[str], tmp_path: Path
) -> None:
    for number, state in enumerate(ports):
        port = tmp_path / "mlx5_0" / "ports" / str(number)
        port.mkdir(parents=True)
        (port / "state").write_text(f"1: {state}\n")
    wanted = TransportConfig(kind=kind, host="127.0.0.1", require_rdma=True)
    with pytest.raises(ConfigError, match="require_rdma"):
        build_transport(wanted, device_root=tmp_path)


def test_17_an_active_port_is_found(tmp_path: Path) -> None:
    for device, state in (("mlx5_0", "1: DOWN"), ("mlx5_1", "4: ACTIVE")):
        port = tmp_path / device / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(state + "\n")
    assert find_devices(tmp_path) == ("mlx5_1",)
    assert find_devices(tmp_path / "absent") == ()


def test_17_nixl_that_is_not_installed_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LIBRARIES:
        monkeypatch.setitem(sys.modules, f"{name}._api", None)
    with pytest.raises(ConfigError, match=r"nixl_cu12: .*nixl_cu13: .*--no-deps nixl-cu12"):
        build_transport(TransportConfig(kind=TransportKind.NIXL))
