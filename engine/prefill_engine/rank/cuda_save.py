"""Saves new blocks from device memory into kvd's pool. Compiled and tested with a stub driver; NEVER RUN on a GPU so far.

The step thread records an event behind the step that completed the blocks and goes on; the copies run on a stream of their own
that waits for the event, and the write thread waits for that stream. The trap: a checksum read before the stream is done would
be of what stood in the slot before.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from prefill_engine.kv.pool_memory import RECORDS_OFFSET, PoolMemory
from prefill_engine.rank.cuda_driver import CudaDriver
from prefill_engine.rank.cuda_plan import CopyPath, choose_copy_path
from prefill_engine.rank.cuda_pools import PinnedPools
from prefill_plan.kv_layout import BlockLayout


class Scatter(Protocol):
    """Launches prefill_kernels' save_blocks on the save stream, slots moved to the device first."""

    def __call__(
        self, sources: Sequence[int], target_address: int, targets: Sequence[int], *, num_bytes: int
    ) -> None: ...


class CudaSaver:
    """BlockSaver for a cache in device memory. mark() is the step thread's, everything else the write thread's."""

    def __init__(
        self,
        driver: CudaDriver,
        *,
        pools: PinnedPools,
        layout: BlockLayout,
        cache_address: int,
        compute_stream: Callable[[], int],
        stream: int,
        scatter: Scatter,
    ) -> None:
        """compute_stream: current stream of the thread that asks. stream: the one of saves."""
        self._driver = driver
        self._pools = pools
        self._layout = layout
        self._cache_address = cache_address
        self._compute_stream = compute_stream
        self._stream = stream
        self._scatter = scatter
        self._free_events: deque[int] = deque()

    def mark(self) -> int:
        """As BlockSaver: an event behind everything that has been queued so far."""
        event = self._free_events.popleft() if self._free_events else self._driver.create_event()
        self._driver.record_event(event, self._compute_stream())
        return event

    def wait_for(self, mark: int) -> None:
        """As BlockSaver; the stream waits, no thread. The event may be recorded anew at once: a wait is for what was recorded
        when it was queued."""
        self._driver.wait_event(self._stream, mark)
        self._free_events.append(mark)

    def save(self, pool: PoolMemory, *, sources: Sequence[int], targets: Sequence[int]) -> None:
        """As BlockSaver."""
        num_bytes, base = self._layout.payload_bytes, RECORDS_OFFSET + self._layout.header_bytes
        device_base = self._pools.device_address(pool)
        if choose_copy_path(num_bytes) is CopyPath.GATHER:
            self._scatter(sources, device_base + base, targets, num_bytes=num_bytes)
        else:
            for source, target in zip(sources, targets, strict=True):
                self._driver.copy_from_device(
                    self._stream,
                    pool.address + base + target * self._layout.record_bytes,
                    self._cache_address + source * self._layout.stride_bytes,
                    num_bytes,
                )
        self._driver.synchronize(self._stream)

    def saved_payload(self, pool: PoolMemory, *, source: int, target: int) -> memoryview:  # noqa: ARG002 - as BlockSaver
        """As BlockSaver; of the pool, the only place where the host can read it."""
        return pool.payload(target)
