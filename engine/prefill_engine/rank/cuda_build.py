"""Makes the CUDA parts of swap-in, saves and hand-over out of torch and the Triton copies. NEVER RUN on a GPU so far.

Called by build.py for a cache in device memory.
"""

import ctypes
import threading
from collections.abc import Sequence

import torch

from prefill_engine.kv_cache import KvCache
from prefill_engine.rank.block_copy import BlockMovers
from prefill_engine.rank.cuda_driver import CudaDriver, LibCuda
from prefill_engine.rank.cuda_gates import CudaGates
from prefill_engine.rank.cuda_payloads import DevicePayloads
from prefill_engine.rank.cuda_pools import PinnedPools
from prefill_engine.rank.cuda_save import CudaSaver
from prefill_engine.rank.cuda_swap_in import CudaCopier
from prefill_engine.rank.swap_counters import SwapCounters


class CudaParts:
    """A rank's streams beside the computing one, its driver, and what is made of them. Built on a thread that has used the
    device."""

    def __init__(self, cache: KvCache, *, gate_seconds: float) -> None:
        self._cache = cache
        self._gate_seconds = gate_seconds
        self._device = cache.blocks.device
        self._driver: CudaDriver = LibCuda(ctypes.CDLL("libcuda.so.1"))
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._save_stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._read_stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        pools = PinnedPools(self._driver, record_bytes=cache.layout.record_bytes)
        copier = CudaCopier(
            self._driver,
            pools=pools,
            layout=cache.layout,
            cache_address=cache.blocks.data_ptr(),
            stream=self._stream.cuda_stream,
            gather=self._gather,
        )
        saver = CudaSaver(
            self._driver,
            pools=pools,
            layout=cache.layout,
            cache_address=cache.blocks.data_ptr(),
            compute_stream=self._compute_stream,
            stream=self._save_stream.cuda_stream,
            scatter=self._scatter,
        )
        self.movers = BlockMovers(copier=copier, saver=saver)
        self.payloads = DevicePayloads(
            self._driver,
            layout=cache.layout,
            cache_address=cache.blocks.data_ptr(),
            stream=self._read_stream.cuda_stream,
        )

    def make_gates(self, changed: threading.Condition, counters: SwapCounters) -> CudaGates:
        """Gates on whatever stream is current when a step asks."""
        return CudaGates(
            self._driver,
            changed=changed,
            source_layers=tuple(source.layer for source in self._cache.layout.sources),
            gate_seconds=self._gate_seconds,
            compute_stream=self._compute_stream,
            counters=counters,
        )

    def wait_for_device(self) -> None:
        """Returns when everything that the calling thread has queued is done."""
        self._driver.synchronize(self._compute_stream())

    def _compute_stream(self) -> int:
        return int(torch.cuda.current_stream(self._device).cuda_stream)

    def _gather(
        self, source_address: int, sources: Sequence[int], targets: Sequence[int], *, offset: int, num_bytes: int
    ) -> None:
        # Here, because triton is no part of a CPU install.
        from prefill_kernels.gpu.gather_blocks import gather_blocks

        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            slots = torch.tensor([list(sources), list(targets)], dtype=torch.int32).pin_memory()
            slots = slots.to(self._device, non_blocking=True)
            gather_blocks(
                source_address,
                slots[0],
                self._cache.blocks,
                slots[1],
                source_stride_bytes=self._cache.layout.record_bytes,
                target_offset_bytes=offset,
                num_bytes=num_bytes,
            )

    def _scatter(self, sources: Sequence[int], target_address: int, targets: Sequence[int], *, num_bytes: int) -> None:
        from prefill_kernels.gpu.gather_blocks import save_blocks

        with torch.cuda.device(self._device), torch.cuda.stream(self._save_stream):
            slots = torch.tensor([list(sources), list(targets)], dtype=torch.int32).pin_memory()
            slots = slots.to(self._device, non_blocking=True)
            save_blocks(
                self._cache.blocks,
                slots[0],
                target_address,
                slots[1],
                source_offset_bytes=0,
                target_stride_bytes=self._cache.layout.record_bytes,
                num_bytes=num_bytes,
            )
