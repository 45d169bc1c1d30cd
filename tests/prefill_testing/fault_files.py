"""FileOperations that fail on command, and store writers that run as processes of their own."""

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Generic, ParamSpec, TypeVar

from prefill_engine.kv.file_operations import FileOperations
from prefill_engine.kv.file_store import FileStore
from prefill_testing.blocks import make_key, make_payload, tiny_layout

P = ParamSpec("P")
R = TypeVar("R")


class FaultyCall(Generic[P, R]):
    """Passes calls on; after arm(error, at=n) the n-th call from then on raises OSError instead, once."""

    def __init__(self, real: Callable[P, R]) -> None:
        self._real = real
        self._error = 0
        self._calls_left = 0
        self.num_calls = 0

    def arm(self, error: int, *, at: int = 1) -> None:
        self._error, self._calls_left = error, at

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        self.num_calls += 1
        if self._calls_left > 0:
            self._calls_left -= 1
            if self._calls_left == 0:
                raise OSError(self._error, os.strerror(self._error), args[0])
        return self._real(*args, **kwargs)


def limit_bytes(real: Callable[..., int], max_bytes: int) -> Callable[..., int]:
    """preadv or writev that moves at most `max_bytes` per call, as POSIX allows."""

    def limited(fd: int, buffers: list[memoryview], *rest: int) -> int:
        return real(fd, [buffers[0][:max_bytes]], *rest)

    return limited


def write_blocks(path: Path, writer: str, labels: list[str], barrier: Barrier) -> None:
    """Process: publishes a payload of its own under every label's key, at the same time as the others."""
    layout = tiny_layout()
    store = FileStore(path, layout)
    barrier.wait()
    for index, label in enumerate(labels):
        store.write(make_key(label), make_payload(layout, f"{label} by {writer}"), block_index=index, provenance=0)


def die_writing(path: Path, label: str) -> None:
    """Process: is killed when the record is written but not yet synced."""
    layout = tiny_layout()
    armed: list[bool] = []

    def fsync(fd: int) -> None:
        if armed:
            os.kill(os.getpid(), signal.SIGKILL)
        os.fsync(fd)

    store = FileStore(path, layout, files=replace(FileOperations(), fsync=fsync))
    armed.append(True)
    store.write(make_key(label), make_payload(layout, label), block_index=0, provenance=0)
