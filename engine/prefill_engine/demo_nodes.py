"""The demo's cluster on loopback: two nodes, each an engine with its kvd; for both one block store, directory service and vision
encoder.

Owner of every process and of the directory in /dev/shm; used by demo.py as a context manager, which leaves none of them behind.
The trap: the deadlines below are for a busy laptop, where a process may not run for 100 ms; a pod's are the defaults.
"""

import json
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from prefill_engine.local_engine import LocalEngine
from prefill_engine.local_kv import LocalDirectory, LocalKvd
from prefill_engine.local_process import held_signals
from prefill_engine.local_ve import LocalVe
from prefill_engine.vision.slab import SHM_DIR, remove_orphans
from prefill_plan.errors import ConfigError, PeerError
from prefill_plan.kvd_config import DirectoryConfig, KvdConfig, KvdStoreConfig, KvdStoreKind, TransportConfig

NODE_NAMES = ("A", "B")
_LOOPBACK = "127.0.0.1"
_MEMORY = Path("/dev/shm")
_POOL_BYTES = 16 << 20
_SNAPSHOT_BYTES = 2 << 20
_DIRECTORY_SECONDS = 1.0
PULL_SECONDS = 0.5
_ENGINE_DEADLINES = (
    "kvd.open_seconds=2.0",
    "kvd.swap_in_seconds=10.0",
    "kvd.snapshot_seconds=1.0",
    "kvd.gate_seconds=2.0",
    "vision.image_seconds=60.0",
)
STORE_BYTES_PER_SECOND = 250e3
"""What kvd reads from the store, at most (demo_kvd.py): slow enough for the layer groups of a hit to come apart."""
_ROWS_BYTES = 2 << 20
"""Of the screenshot's rows, on either side; /dev/shm has 64 MB in a container."""
_ENCODER_SETTINGS = (
    "decode.workers=1",
    "batching.max_patches_per_batch=9216",
    "queue.max_patches=9216",
    f"rows.memory_bytes={_ROWS_BYTES}",
    f"rows.cache_bytes={_ROWS_BYTES // 2}",
    "image_seconds=60.0",
    "server.drain_seconds=5.0",
)
_START_SECONDS = 120.0
_STOP_SECONDS = 30.0
_POLL_SECONDS = 0.02


def _free_image_memory(pids: Sequence[int]) -> None:
    """Removes the image memory of killed encoders and engines, which their children hold until they are gone, too."""
    deadline = time.monotonic() + _STOP_SECONDS
    while any(list(SHM_DIR.glob(f"prefill-ve.*.{pid}.*")) for pid in pids):
        remove_orphans()
        if time.monotonic() > deadline:
            return
        time.sleep(_POLL_SECONDS)


class Node:
    """An engine and its kvd. name: one of NODE_NAMES."""

    def __init__(self, name: str, *, model: Path, run_dir: Path, config: KvdConfig, overrides: Sequence[str]) -> None:
        run_dir.mkdir()
        self.name = name
        self.kvd = LocalKvd(f"node-{name.lower()}", config, run_dir=run_dir, bytes_per_second=STORE_BYTES_PER_SECOND)
        self.engine = LocalEngine(
            model,
            run_dir=run_dir,
            store=None,
            overrides=(f"kvd.socket={config.socket}", *_ENGINE_DEADLINES, *overrides),
            name=f"the engine of node {name}",
            temp_dir=Path(config.socket).parent,
        )

    def log_tails(self) -> str:
        return f"kvd of node {self.name}:\n{self.kvd.log_tail()}\nengine of node {self.name}:\n{self.engine.log_tail()}"


class Cluster:
    """Use as a context manager: leaving it kills what still runs and frees the shared memory."""

    def __init__(self, model: Path, *, work_dir: Path, overrides: Sequence[str]) -> None:
        """work_dir gets logs and the block store. overrides: `--set` values of both engines."""
        self.store = work_dir / "store"
        self.directory = LocalDirectory(run_dir=work_dir)
        self.encoder = LocalVe(model, run_dir=work_dir, overrides=_ENCODER_SETTINGS)
        self.nodes: dict[str, Node] = {}
        self._model, self._work_dir, self._overrides = model, work_dir, overrides
        self._memory: Path | None = None

    def __enter__(self) -> Self:
        with held_signals():
            try:
                self._memory = Path(tempfile.mkdtemp(prefix=f"prefill-demo-{os.getpid()}-", dir=_MEMORY))
            except OSError as error:
                raise ConfigError(
                    f"{_MEMORY}: {error.strerror}; kvd's pool needs a directory in memory; nothing was started"
                ) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with held_signals():
            for node in self.nodes.values():
                node.engine.kill()
                node.kvd.kill()
            self.directory.kill()
            self.encoder.kill()
            _free_image_memory(self.pids())
            if self._memory is not None:
                shutil.rmtree(self._memory, ignore_errors=True)

    def start(self) -> None:
        """Starts everything at once and waits until both engines take requests. Raises PeerError."""
        self.directory.launch()
        self.encoder.launch()
        self.directory.wait_listening(timeout_seconds=_START_SECONDS)
        self.encoder.wait_listening(timeout_seconds=_START_SECONDS)
        vision = ("vision.mode=remote", f"vision.endpoints={json.dumps([self.encoder.endpoint])}")
        for name in NODE_NAMES:
            self.nodes[name] = Node(
                name,
                model=self._model,
                run_dir=self._work_dir / f"node-{name.lower()}",
                config=self._kvd_config(name),
                overrides=(*vision, f"vision.rows_bytes={_ROWS_BYTES}", *self._overrides),
            )
        # An engine waits for its kvd; the checkpoint comes from the page cache for whoever reads it second.
        for node in self.nodes.values():
            node.kvd.launch()
            node.engine.launch()
        for node in self.nodes.values():
            node.kvd.wait_listening(timeout_seconds=_START_SECONDS)
        for node in self.nodes.values():
            self.wait_for_engine(node)
        self.encoder.wait_ready(timeout_seconds=_START_SECONDS)

    def wait_for_engine(self, node: Node) -> None:
        """Waits until it takes requests. Raises PeerError."""
        node.engine.wait_ready(timeout_seconds=_START_SECONDS)

    def stop(self) -> None:
        """SIGTERM to everything that runs, engines first, as a pod's end does.

        Raises:
            PeerError: a process did not end in time, or not with exit code 0.
        """
        for node in self.nodes.values():
            self._end(node.engine.stop(timeout_seconds=_STOP_SECONDS), node.engine.log_tail(), f"engine of {node.name}")
        for process in (self.encoder, *(node.kvd for node in self.nodes.values()), self.directory):
            if process.is_running:
                process.ask_to_end()
                self._end(process.wait_ended(timeout_seconds=_STOP_SECONDS), process.log_tail(), process.name)

    def log_tails(self) -> str:
        encoder = f"vision encoder:\n{self.encoder.log_tail()}"
        return "\n".join([*(node.log_tails() for node in self.nodes.values()), encoder])

    def pids(self) -> list[int]:
        """Of the processes of this cluster that were started, whether they still run or not."""
        started = [self.directory.pid, self.encoder.pid, *(node.engine.pid for node in self.nodes.values())]
        return [pid for pid in (*started, *(node.kvd.pid for node in self.nodes.values())) if pid]

    def _kvd_config(self, name: str) -> KvdConfig:
        assert self._memory is not None, "entered as a context manager"
        return KvdConfig(
            socket=str(self._memory / f"{name.lower()}.sock"),
            pool_path=str(self._memory / f"{name.lower()}.pool"),
            pool_bytes=_POOL_BYTES,
            snapshot_bytes=_SNAPSHOT_BYTES,
            probe_port=-1,
            store=KvdStoreConfig(kind=KvdStoreKind.FILE, path=str(self.store)),
            transport=TransportConfig(host=_LOOPBACK),
            directory=DirectoryConfig(address=self.directory.address, deadline_seconds=_DIRECTORY_SECONDS),
            pull_deadline_seconds=PULL_SECONDS,
        )

    @staticmethod
    def _end(exit_code: int, log_tail: str, name: str) -> None:
        if exit_code != 0:
            raise PeerError(f"{name} ended with exit code {exit_code} after SIGTERM, expected 0\n{log_tail}")
