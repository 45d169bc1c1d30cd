"""Time to pull one SWA snapshot (1,419,136 B) from another process; goal <= 1.5 x raw sendfile and recv_into (C19).

    python tests/bench/bench_kv_transport.py [--runs N]

Owner and reader are two processes joined by loopback; each run pulls once by every way, in turn, and the ratio is taken within
the run, so a busy machine hits both. Bytes are compared first. The goal holds for plain TCP; TLS copies and is only printed, as
is NIXL (UCX over tcp) where it is installed. Not in the figures: a network, verification.
"""

import argparse
import asyncio
import os
import platform
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

from prefill_engine.kv.transport.choose import build_transport
from prefill_engine.kv.transport.contract import PullState, Source, Transport
from prefill_engine.kv.transport.nixl_agent import load_library
from prefill_plan.config import TlsConfig, TransportKind
from prefill_plan.errors import ConfigError
from prefill_plan.kvd_config import TransportConfig
from prefill_testing.certificates import make_tls

_GOAL = 1.5
_BYTES = 1_419_136  # 4,096 B header + 1,415,040 B payload (kv.md 1.4, 2.3)
_KEY = bytes(range(33))
_DEADLINE_SECONDS = 30.0

Pull = Callable[[memoryview], Awaitable[None]]


def make_file() -> int:
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.write(random.Random(1).randbytes(_BYTES))
        file.flush()
        return os.dup(file.fileno())


def serve_raw(fd: int, port: Connection) -> None:
    """The bound: one byte asks, sendfile answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port.send(listening.getsockname()[1])
        sock, _ = listening.accept()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while sock.recv(1):
            sent = 0
            while sent < _BYTES:
                sent += os.sendfile(sock.fileno(), fd, sent, _BYTES - sent)


def serve_transport(config: TransportConfig, fd: int, endpoint: Connection) -> None:
    import mmap

    view = memoryview(mmap.mmap(fd, _BYTES))
    source = Source(view=view, fd=fd, offset=0, release=lambda: None)

    async def serve() -> None:
        transport = build_transport(config, regions=[view])
        endpoint.send(await transport.listen(lambda key: source if key == _KEY else None))
        await asyncio.Event().wait()

    asyncio.run(serve())


def start(target: Callable[..., None], *arguments: object) -> object:
    """Runs an owner as a process; what it sends first."""
    ours, theirs = get_context("fork").Pipe()
    get_context("fork").Process(target=target, args=(*arguments, theirs), daemon=True).start()
    return ours.recv()


def connect_raw(port: int) -> Pull:
    sock = socket.create_connection(("127.0.0.1", port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    async def pull(target: memoryview) -> None:
        sock.sendall(b"x")
        filled = 0
        while filled < _BYTES:
            filled += sock.recv_into(target[filled:])

    return pull


def connect_transport(transport: Transport, endpoint: str) -> Pull:
    async def pull(target: memoryview) -> None:
        outcome = await transport.pull(endpoint, _KEY, target, deadline_seconds=_DEADLINE_SECONDS)
        if outcome.state is not PullState.DONE:
            raise SystemExit(f"{transport.kind}: {outcome}")

    return pull


def configs(folder: Path) -> dict[str, TransportConfig]:
    found = {
        "tcp": TransportConfig(host="127.0.0.1"),
        "tcp+tls": TransportConfig(host="127.0.0.1", tls=make_tls(folder)),
    }
    try:
        load_library()
        found["nixl"] = TransportConfig(kind=TransportKind.NIXL, host="127.0.0.1", tls=TlsConfig())
    except ConfigError as error:
        print(f"nixl: skipped, {error.message}")
    return found


async def measure(runs: int, folder: Path) -> dict[str, list[float]]:
    """Microseconds of each way, run by run."""
    fd = make_file()
    expected = os.pread(fd, _BYTES, 0)
    target = memoryview(bytearray(_BYTES))
    # Owners first: they are forked, and nothing here runs threads yet.
    kinds = configs(folder)
    port = start(serve_raw, fd)
    endpoints = {name: str(start(serve_transport, config, fd)) for name, config in kinds.items()}
    transports = [build_transport(config, regions=[target]) for config in kinds.values()]
    ways = {"raw sendfile": connect_raw(int(str(port)))}
    for (name, endpoint), transport in zip(endpoints.items(), transports, strict=True):
        ways[name] = connect_transport(transport, endpoint)
    for name, pull in ways.items():
        for _ in range(5):
            target[:] = bytes(_BYTES)
            await pull(target)
            if target != expected:
                raise SystemExit(f"{name}: bytes differ")
    microseconds: dict[str, list[float]] = {name: [] for name in ways}
    for run in range(runs):
        # Who comes first is another one each time: the scheduler favours who has waited.
        for name, pull in (list(ways.items()) * 2)[run % len(ways) : run % len(ways) + len(ways)]:
            started = time.perf_counter_ns()
            await pull(target)
            microseconds[name].append((time.perf_counter_ns() - started) / 1e3)
    for transport in transports:
        await transport.close()
    return microseconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    runs = parser.parse_args().runs
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
    with tempfile.TemporaryDirectory() as folder:
        microseconds = asyncio.run(measure(runs, Path(folder)))
    print(
        f"pull of {_BYTES} B over loopback, {runs} runs, Python {platform.python_version()}, {platform.machine()}, "
        f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}, commit {commit.strip()}"
    )
    raw = microseconds["raw sendfile"]
    for name, times in microseconds.items():
        deciles = statistics.quantiles(times, n=10)
        ratio = statistics.median(one / base for one, base in zip(times, raw, strict=True))
        verdict = ""
        if name == "tcp":
            verdict = f": {'meets' if ratio <= _GOAL else 'misses'} the goal of {_GOAL:g} x"
        median = statistics.median(times)
        print(
            f"{name:12s} median {median:7.0f} us, p20 {deciles[1]:7.0f}, p80 {deciles[7]:7.0f}, "
            f"{_BYTES / median / 1e3:5.2f} GB/s, {ratio:5.2f} x raw{verdict}"
        )


if __name__ == "__main__":
    sys.exit(main())
