"""Brings payloads of new blocks from the KV cache into reserved slots of the shared pool. Used by the writer of a rank with kvd.

The step thread marks, the write thread waits for the mark and copies. The trap: addresses are plain numbers, so slots must have
been checked, and cache and pool must outlive the copy.
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import Protocol

from prefill_engine.kv.pool_memory import PoolMemory


class BlockSaver(Protocol):
    """How payloads get from the cache into the pool."""

    def mark(self) -> int:
        """The point that the device's work has reached: blocks that are complete by then. Called by the step thread, which does
        not wait; goes to one wait_for."""
        ...

    def wait_for(self, mark: int) -> None:
        """Copies from now on see what was complete at the mark."""
        ...

    def save(self, pool: PoolMemory, *, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies payloads of cache slots `sources` to pool slots `targets`, and returns when they are there."""
        ...

    def saved_payload(self, pool: PoolMemory, *, source: int, target: int) -> memoryview:
        """What the header of a saved record is computed from."""
        ...


class CpuSaver:
    """BlockSaver for a cache in host memory: what the step thread has written is complete."""

    def __init__(self, block_view: Callable[[int], memoryview]) -> None:
        """block_view: payload of a cache slot."""
        self._block_view = block_view

    def mark(self) -> int:
        """As BlockSaver."""
        return 0

    def wait_for(self, mark: int) -> None:
        """As BlockSaver."""

    def save(self, pool: PoolMemory, *, sources: Sequence[int], targets: Sequence[int]) -> None:
        """As BlockSaver; ctypes lets the step thread run meanwhile."""
        for source, target in zip(sources, targets, strict=True):
            payload = self._block_view(source)
            start = ctypes.addressof(ctypes.c_char.from_buffer(payload))
            ctypes.memmove(pool.payload_address(target), start, len(payload))

    def saved_payload(self, pool: PoolMemory, *, source: int, target: int) -> memoryview:  # noqa: ARG002 - as BlockSaver
        """As BlockSaver; of the cache, so that bytes which were damaged on their way are found."""
        return self._block_view(source)
