"""`prefill-engine directory serve` as a real process: killed, stopped, restarted; and holders that die."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

from prefill_engine.kv.directory import Holder
from prefill_engine.kv.segments import SegmentInfo
from prefill_engine.kv.transport.choose import build_transport
from prefill_engine.kv.transport.contract import PullState
from prefill_engine.kvd.directory_client import RemoteDirectory
from prefill_plan.block_keys import BlockKey
from prefill_plan.config import TlsConfig
from prefill_plan.kvd_config import DirectoryConfig, TransportConfig
from prefill_testing.in_loop import in_loop
from prefill_testing.kv_peer import RECORD_BYTES, PeerArgs, PeerProcess, key_of
from prefill_testing.kvd_process import read_line
from prefill_testing.raw_peer import until

_LAYOUT = b"layout-1"
_SEGMENT = SegmentInfo(name="s", layout_id=_LAYOUT, keys=(BlockKey(bytes(32)),), num_bytes=1)
_LOOPBACK = TransportConfig(host="127.0.0.1")


class DirectoryProcess:
    """A running directory on a fixed port. Use as a context manager; it is killed at the end."""

    def __init__(self, port: int, *, heartbeat: float = 0.2, expiry: float = 2.0) -> None:
        command = [
            *(sys.executable, "-m", "prefill_engine", "directory", "serve", "--host", "127.0.0.1"),
            *("--port", str(port), "--metrics-port", "0", "--log-level", "WARNING"),
            *("--heartbeat-seconds", str(heartbeat), "--expiry-seconds", str(expiry)),
        ]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = read_line(self.process.stdout, "a directory that is ready")
        assert line, self.process.communicate()
        self.facts = json.loads(line)

    def __enter__(self) -> "DirectoryProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()

    def metric(self, name: str) -> float:
        url = f"http://127.0.0.1:{self.facts['metrics_port']}/metrics"
        with urllib.request.urlopen(url, timeout=20) as answer:
            lines = answer.read().decode().splitlines()
        return float(next(line.split()[-1] for line in lines if line.startswith(name)))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def client(port: int, *, seconds: float = 10.0) -> tuple[RemoteDirectory, list[int]]:
    resyncs: list[int] = []
    directory = RemoteDirectory(
        DirectoryConfig(address=f"127.0.0.1:{port}", deadline_seconds=seconds),
        Holder(holder_id="asker", epoch=1, endpoint="127.0.0.1:2"),
        snapshot_keys=lambda: [],
        on_resync=lambda: resyncs.append(1),
        tls=TlsConfig(),
    )
    return directory, resyncs


async def find(directory: RemoteDirectory, number: int, *, expected: bool) -> None:
    """Asks until a snapshot is found, or no more."""
    async with asyncio.timeout(30):
        while bool(await directory.lookup_snapshot(key_of(number))) is not expected:
            await asyncio.sleep(0.02)


@in_loop
async def test_a_killed_and_restarted_directory_learns_everything_again() -> None:
    port = free_port()
    asker, resyncs = client(port)
    try:
        with DirectoryProcess(port) as first, PeerProcess(PeerArgs(transport=_LOOPBACK, directory=f"127.0.0.1:{port}")):
            await find(asker, 1, expected=True)
            await asker.publish_segments("store", [_SEGMENT])
            first.kill()
            assert await asker.lookup_snapshot(key_of(1)) == ()
            assert await asker.lookup_blocks("store", _LAYOUT, _SEGMENT.keys) == ()
            await until(lambda: not asker.is_joined)
            with DirectoryProcess(port):
                await find(asker, 1, expected=True)
                await until(lambda: len(resyncs) == 2)
                await asker.publish_segments("store", [_SEGMENT])
                assert len(await asker.lookup_blocks("store", _LAYOUT, _SEGMENT.keys)) == 1
    finally:
        await asker.close()


@in_loop
async def test_a_killed_holder_is_withdrawn_after_failures_and_expires() -> None:
    port = free_port()
    asker, _ = client(port)
    transport = build_transport(_LOOPBACK)
    try:
        with DirectoryProcess(port, expiry=4.0) as directory:
            args = PeerArgs(transport=_LOOPBACK, directory=f"127.0.0.1:{port}", num_records=3)
            with PeerProcess(args) as peer:
                for number in range(3):
                    await find(asker, number, expected=True)
                (location,) = await asker.lookup_snapshot(key_of(0))
                assert location.holder.endpoint == peer.endpoint
            target = memoryview(bytearray(RECORD_BYTES))
            for _ in range(3):
                outcome = await transport.pull(location.holder.endpoint, location.key, target, deadline_seconds=5.0)
                assert outcome.state is PullState.FAILED
                await asker.report_failure(location)
            assert await asker.lookup_snapshot(key_of(0)) == ()
            assert directory.metric("kv_directory_snapshots") == 2
            await find(asker, 1, expected=False)
            await find(asker, 2, expected=False)
            async with asyncio.timeout(30):
                while directory.metric("kv_directory_expired_total") < 1:
                    await asyncio.sleep(0.05)
            assert directory.metric("kv_directory_snapshots") == 0
            assert directory.metric("kv_directory_holders") == 1
    finally:
        await transport.close()
        await asker.close()


@in_loop
async def test_a_stopped_directory_costs_a_deadline_each_and_then_nothing() -> None:
    port = free_port()
    asker, _ = client(port, seconds=0.1)
    try:
        with DirectoryProcess(port, expiry=60.0) as directory:
            await until(lambda: asker.is_joined)
            directory.process.send_signal(signal.SIGSTOP)
            late = asker.counters["calls"]
            async with asyncio.timeout(30):
                while asker.is_joined:
                    assert await asker.lookup_snapshot(key_of(1)) == ()
            assert asker.counters["calls"] > late
            asked = asker.counters["calls"]
            for _ in range(100):
                assert await asker.lookup_snapshot(key_of(1)) == ()
            assert asker.counters["calls"] == asked
            directory.process.send_signal(signal.SIGCONT)
            await until(lambda: asker.is_joined)
    finally:
        await asker.close()


def test_sigterm_ends_it_well_and_a_taken_port_is_an_error_in_one_line() -> None:
    with DirectoryProcess(0) as directory:
        command = [sys.executable, "-m", "prefill_engine", "directory", "serve", "--host", "127.0.0.1", "--port"]
        taken = subprocess.run(
            [*command, str(directory.facts["port"])], capture_output=True, text=True, check=False, timeout=60
        )
        assert taken.returncode == 2
        assert f"cannot listen on 127.0.0.1:{directory.facts['port']}" in taken.stderr
        assert "Traceback" not in taken.stderr
        wrong = subprocess.run(
            [*command, "0", "--expiry-seconds", "1"], capture_output=True, text=True, check=False, timeout=60
        )
        assert (wrong.returncode, "expected the expiry to be longer" in wrong.stderr) == (2, True)
        started = time.monotonic()
        os.kill(directory.process.pid, signal.SIGTERM)
        assert directory.process.wait(timeout=30) == 0
        assert time.monotonic() - started < 30


@pytest.mark.parametrize("module", ["torch", "numpy"])
def test_the_directory_is_a_light_process(module: str) -> None:
    program = f"import sys, prefill_engine.cli.directory; sys.exit({module!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
