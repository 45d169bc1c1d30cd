"""Two nodes and a directory as real processes, for tests that kill them: each node an engine and its kvd, one store for both.

`far` computes first, so that `near` finds blocks in the store and a snapshot at its peer. A request is brought into a phase by
holding whatever would end the phase: a system call of near's store (fault_shim.py), far's kvd, the directory.
"""

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from prefill_engine.client import PrefillClient, ServerInfo, block_keys_of
from prefill_engine.kv.directory import Holder
from prefill_engine.kv.lease_record import LeaseState, SnapshotState
from prefill_engine.kv.pool_file import read_header
from prefill_engine.kv.pool_memory import NUM_LEASES, PoolMemory
from prefill_engine.kvd.directory_client import RemoteDirectory
from prefill_engine.local_engine import LocalEngine
from prefill_engine.rpc import prefill_pb2
from prefill_plan.block_keys import snapshot_key
from prefill_plan.config import TlsConfig
from prefill_plan.kv_layout import BLOCK_TOKENS
from prefill_plan.kvd_config import DirectoryConfig
from prefill_testing.fault_shim import FaultShim
from prefill_testing.handoff_scene import free_tokens
from prefill_testing.kill_request import KillRequest, Verifier
from prefill_testing.kvd_process import KvdProcess, wait_until

MODEL = Path(__file__).parents[1] / "golden" / "tiny_quant"
START_SECONDS = 180.0
ENGINE = (
    "replay.keep_tokens=24",
    "kv.pool_tokens=16384",
    "kv.state_slots=8",
    "max_context_tokens=4096",
    "scheduler.chunk_cap_tokens=256",
    "scheduler.min_chunk_tokens=16",
    "handoff.ticket_seconds=60",
    "kvd.open_seconds=4",
    "kvd.swap_in_seconds=4",
    "kvd.gate_seconds=0.5",
)
"""Limits that a busy machine keeps, and that a test can wait for."""
POOL = {"pool_bytes": 24 << 20, "snapshot_bytes": 6 << 20}
VICTIMS = ("engine", "kvd", "peer", "directory")
PHASES = ("open", "loading", "pull", "running", "saving", "handoff")
BASE_BLOCKS = 5
"""Of what far has computed before near is asked."""


class DirectoryProcess:
    """`prefill-engine directory serve` on a port of its own, kept over restarts."""

    def __init__(self, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.address = f"127.0.0.1:{probe.getsockname()[1]}"
        self._log = folder / "directory.log"
        self.start()

    def start(self) -> None:
        command = [
            *(sys.executable, "-m", "prefill_engine", "directory", "serve", "--host", "127.0.0.1"),
            *("--port", self.address.rpartition(":")[2], "--metrics-port", "0"),
            *("--heartbeat-seconds", "0.3", "--expiry-seconds", "60"),
        ]
        with self._log.open("a") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        assert self.process.stdout is not None
        with self.process.stdout as stdout:
            assert stdout.readline(), self._log.read_text()[-3000:]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)


class Node:
    """An engine and its kvd."""

    def __init__(
        self,
        name: str,
        folder: Path,
        *,
        store: Path,
        directory: str,
        library: Path,
        engine: Sequence[str],
        kvd: Mapping[str, object],
    ) -> None:
        """folder: on a memory file system, since the pool is in it. engine, kvd: their settings."""
        home = folder / name
        home.mkdir()
        self.faults = FaultShim(library, home / "faults", store=store)
        self.kvd = KvdProcess(
            home,
            pod=name,
            wrapper=self.faults.wrapper,
            store={"kind": "file", "path": str(store)},
            directory={"address": directory, "deadline_seconds": 4.0},
            pull_deadline_seconds=4.0,
            **kvd,
        )
        self.engine = LocalEngine(
            MODEL, run_dir=home, store=home / "unused", overrides=(*engine, f"kvd.socket={self.kvd.socket}")
        )

    def leases(self) -> list[tuple[LeaseState, int, int, SnapshotState]]:
        """Of kvd's table as a rank sees it: state, blocks, the fewest ready ones of a group, snapshot."""
        path = str(self.kvd.config["pool_path"])
        fd = os.open(path, os.O_RDONLY)
        try:
            nonce = read_header(fd)[5]
        finally:
            os.close(fd)
        pool = PoolMemory.attach(path, nonce=nonce)
        try:
            assert pool.geometry is not None
            num_groups = len(pool.geometry.group_bytes)
            rows = [pool.lease(row) for row in range(NUM_LEASES)]
            return [
                (row.state, row.num_blocks, min(row.ready[:num_groups]), row.snapshot_state)
                for row in rows
                if row.lease_id and row.state is LeaseState.LIVE
            ]
        finally:
            del rows
            pool.close()

    def signal_engine(self, number: signal.Signals) -> None:
        os.killpg(self.engine.pid, number)

    def num_waiting(self) -> int:
        """Attempts that wait for memory or for their hit."""

        async def ask() -> int:
            async with PrefillClient(self.engine.endpoint) as client:
                report = await client.stub.GetLoad(prefill_pb2.GetLoadRequest(), timeout=10.0)
                return int(report.ranks[0].waiting)

        return asyncio.run(ask())

    def is_clean(self, idle: tuple[int, int, int]) -> bool:
        """No lease, no slot and no ticket is held."""
        kinds = ("block", "snapshot")
        busy = sum(
            self.kvd.metric(f'slots{{kind="{kind}",state="{state}"}}')
            for kind in kinds
            for state in ("filling", "quarantined")
        )
        return (
            self.kvd.num_leases() == 0
            and busy == 0
            and self.kvd.metric("quarantined_slots") == 0
            and self.kvd.metric("sessions") == 1
            and asyncio.run(free_tokens(self.engine)) == idle
        )


class KillRig:
    """Use as a context manager."""

    def __init__(
        self,
        library: Path,
        disk: Path,
        *,
        seed: int,
        engine: Sequence[str] = ENGINE,
        kvd: Mapping[str, object] = POOL,
    ) -> None:
        """disk: a folder on a real disk, for the store. engine, kvd: settings of both nodes."""
        self.random = random.Random(seed)
        self.verifier = Verifier(MODEL)
        self._stack = ExitStack()
        memory = self._stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm", prefix="kill-rig-"))
        self.folder = Path(memory)
        self.store = disk / "store"
        self.directory = DirectoryProcess(self.folder)
        self._stack.callback(self.directory.kill)
        nodes = []
        for name in ("near", "far"):
            node = Node(
                name,
                self.folder,
                store=self.store,
                directory=self.directory.address,
                library=library,
                engine=engine,
                kvd=kvd,
            )
            self._stack.callback(node.kvd.kill)
            self._stack.callback(node.engine.kill)
            nodes.append(node)
        self.near, self.far = nodes
        self._start_engines(self.near, self.far)
        self.idle = asyncio.run(free_tokens(self.near.engine))
        self.info: ServerInfo = asyncio.run(_server_info(self.near.engine.endpoint))

    def __enter__(self) -> "KillRig":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    # --- prompts
    def prompt(self, length: int) -> list[int]:
        return [self.random.randrange(3, 480) for _ in range(length)]

    def finish(self, node: Node, tokens: list[int], *, hit_blocks: int | None = None) -> KillRequest:
        """An undisturbed request; its answer is verified."""
        request = KillRequest(node.engine.endpoint, tokens, hit_blocks=hit_blocks)
        request.end()
        self.verifier.check(request)
        return request

    def prepare(self) -> list[int]:
        """A prompt whose first blocks are in the store and whose snapshot is at far, and the directory knows of both."""
        for node in (self.near, self.far):
            wait_until(lambda node=node: node.kvd.metric("store_up") == 1, f"the store: {node.kvd.folder.name}")
        tokens = self.prompt(1200)
        base = tokens[: BASE_BLOCKS * BLOCK_TOKENS + 60]
        assert self.finish(self.far, base).is_whole
        keys = block_keys_of(self.info, base, cache_scope=b"")
        last = snapshot_key(keys[BASE_BLOCKS - 1])
        wait_until(lambda: asyncio.run(self._is_announced(last)), "the snapshot in the directory")
        return tokens

    async def _is_announced(self, key: bytes) -> bool:
        directory = RemoteDirectory(
            DirectoryConfig(address=self.directory.address, deadline_seconds=5.0),
            Holder(holder_id="observer", epoch=1, endpoint="127.0.0.1:2"),
            snapshot_keys=lambda: [],
            on_resync=lambda: None,
            tls=TlsConfig(),
        )
        try:
            for _ in range(200):
                if directory.is_joined:
                    return bool(await directory.lookup_snapshot(key))
                await asyncio.sleep(0.02)
            return False
        finally:
            await directory.close()

    # --- phases
    def reach(self, phase: str, tokens: list[int]) -> KillRequest:
        """A request to near that is in this phase and stays there until `release`, or for a while."""
        near, is_held = self.near, None
        match phase:
            case "open":
                self.directory.signal(signal.SIGSTOP)
            case "pull":
                self.far.kvd.process.send_signal(signal.SIGSTOP)
                is_held = near.faults.hold("read")
            case "loading":
                is_held = near.faults.hold("read")
            case "saving":
                is_held = near.faults.hold("fsync")
        request = KillRequest(near.engine.endpoint, tokens, hold_handoff=phase == "handoff")
        there: Callable[[], bool]
        match phase:
            case "open":
                there = lambda: near.num_waiting() == 1  # noqa: E731
            case "pull":
                there = lambda: any(lease[3] is SnapshotState.PULLING for lease in near.leases())  # noqa: E731
            case "loading":
                there = lambda: any(ready < blocks for _, blocks, ready, _ in near.leases())  # noqa: E731
            case "running":
                there = lambda: request.is_running  # noqa: E731
            case "saving":
                assert is_held is not None
                there = is_held
            case _:
                there = request.reading.is_set
        wait_until(lambda: there() or not request.is_alive(), f"phase {phase}")
        assert there(), f"the request ended before phase {phase}: {request.failure}, {request.events[-2:]}"
        return request

    def release(self, request: KillRequest) -> None:
        """Of everything that `reach` holds and that lives."""
        self.near.faults.clear()
        request.go_on.set()
        for process in (self.directory.process, self.far.kvd.process):
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)

    # --- victims
    def kill(self, victim: str) -> None:
        match victim:
            case "engine":
                self.near.engine.kill()
            case "kvd":
                self.near.kvd.kill()
            case "peer":
                self.far.kvd.kill()
            case "directory":
                self.directory.kill()

    def restart(self, victim: str) -> None:
        match victim:
            case "engine":
                self._start_engines(self.near)
            case "kvd":
                self.near.kvd.start()
            case "peer":
                self.far.kvd.start()
            case "directory":
                self.directory.start()

    def signal(self, victim: str, number: signal.Signals) -> None:
        match victim:
            case "engine":
                self.near.signal_engine(number)
            case "kvd":
                self.near.kvd.process.send_signal(number)
            case "peer":
                self.far.kvd.process.send_signal(number)
            case "directory":
                self.directory.signal(number)

    # --- the end
    def wait_until_clean(self) -> None:
        for node in (self.near, self.far):
            wait_until(lambda node=node: node.is_clean(self.idle), f"nothing is held: {node.kvd.folder.name}")

    @staticmethod
    def store_counts(node: Node) -> Counter[str]:
        """What its kvd has counted since it was started."""
        names = (
            'verify_fail_total{reason="crc"}',
            'verify_fail_total{reason="short"}',
            "writeback_dropped_total",
            'swapin_bytes_total{src="fs"}',
            'swapin_bytes_total{src="peer"}',
        )
        return Counter({f"kv_{name}": int(node.kvd.metric(name)) for name in names})

    @staticmethod
    def _start_engines(*nodes: Node) -> None:
        threads = [
            threading.Thread(target=node.engine.start, kwargs={"timeout_seconds": START_SECONDS}) for node in nodes
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(node.engine.endpoint for node in nodes)


async def _server_info(endpoint: str) -> ServerInfo:
    async with PrefillClient(endpoint) as client:
        return await client.server_info()
