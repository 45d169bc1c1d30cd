"""Makes the CUDA parts of a swap-in out of torch and the Triton gather. NEVER RUN on a GPU so far.

Called by build.py for a cache in device memory.
"""

import threading
from collections.abc import Sequence

import torch

from prefill_engine.kv_cache import KvCache
from prefill_engine.rank.cuda_driver import CudaDriver, LibCuda
from prefill_engine.rank.cuda_swap_in import CudaCopier, CudaGates
from prefill_engine.rank.swap_counters import SwapCounters


class CudaParts:
    """One rank's copy stream, driver and what is made of them."""

    def __init__(self, cache: KvCache, *, gate_seconds: float) -> None:
        self._cache = cache
        self._gate_seconds = gate_seconds
        self._device = cache.blocks.device
        self._driver: CudaDriver = LibCuda()
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self.copier = CudaCopier(
            self._driver,
            layout=cache.layout,
            cache_address=cache.blocks.data_ptr(),
            stream=self._stream.cuda_stream,
            gather=self._gather,
        )

    def make_gates(self, changed: threading.Condition, counters: SwapCounters) -> CudaGates:
        """Gates on whatever stream is current when a step asks."""
        return CudaGates(
            self._driver,
            changed=changed,
            source_layers=tuple(source.layer for source in self._cache.layout.sources),
            gate_seconds=self._gate_seconds,
            compute_stream=lambda: torch.cuda.current_stream(self._device).cuda_stream,
            counters=counters,
        )

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
