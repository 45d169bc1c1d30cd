"""The copy thread's way into device memory (C18). Compiled and tested with a stub driver; NEVER RUN on a GPU so far.

It queues on a stream of its own and waits there, so a watermark that gates see is of bytes that have arrived.
"""

from collections.abc import Sequence
from typing import Protocol

from prefill_engine.kv.pool_memory import RECORDS_OFFSET, PoolMemory
from prefill_engine.rank.cuda_driver import CudaDriver
from prefill_engine.rank.cuda_plan import CopyPath, choose_copy_path
from prefill_engine.rank.cuda_pools import PinnedPools
from prefill_plan.kv_layout import BlockLayout


class Gather(Protocol):
    """Launches prefill_kernels' gather_blocks on the copy stream, slots moved to the device first."""

    def __call__(
        self, source_address: int, sources: Sequence[int], targets: Sequence[int], *, offset: int, num_bytes: int
    ) -> None: ...


class CudaCopier:
    """GroupCopier for a cache in device memory. Used by the copy thread only. The first group goes alone: a step on a GPU may
    need it before the others have crossed the link (kv.md 6.2)."""

    lone_groups = 1
    most_blocks = 256

    def __init__(
        self,
        driver: CudaDriver,
        *,
        pools: PinnedPools,
        layout: BlockLayout,
        cache_address: int,
        stream: int,
        gather: Gather,
    ) -> None:
        self._driver = driver
        self._pools = pools
        self._layout = layout
        self._offsets = (*(source.group_offset for source in layout.sources), layout.payload_bytes)
        self._cache_address = cache_address
        self._stream = stream
        self._gather = gather

    def copy(self, pool: PoolMemory, *, groups: range, sources: Sequence[int], targets: Sequence[int]) -> int:
        """As GroupCopier."""
        offset = self._offsets[groups.start]
        num_bytes = self._offsets[groups.stop] - offset
        base = RECORDS_OFFSET + self._layout.header_bytes + offset
        device_base = self._pools.device_address(pool)
        if choose_copy_path(num_bytes) is CopyPath.GATHER:
            self._gather(device_base + base, sources, targets, offset=offset, num_bytes=num_bytes)
        else:
            for source, target in zip(sources, targets, strict=True):
                self._driver.copy_to_device(
                    self._stream,
                    self._cache_address + target * self._layout.stride_bytes + offset,
                    pool.address + base + source * self._layout.record_bytes,
                    num_bytes,
                )
        self._driver.synchronize(self._stream)
        return num_bytes * len(sources)
