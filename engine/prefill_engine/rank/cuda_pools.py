"""Pools of shared memory pinned for a GPU: once each, for the copy thread and the write thread alike. NEVER RUN on a GPU so far.

Used by cuda_swap_in.py and cuda_save.py.
"""

import threading

from prefill_engine.kv.pool_memory import RECORDS_OFFSET, PoolMemory
from prefill_engine.rank.cuda_driver import CudaDriver
from prefill_engine.rank.cuda_plan import plan_registrations


class PinnedPools:
    """Owner of the registrations."""

    def __init__(self, driver: CudaDriver, *, record_bytes: int) -> None:
        self._driver = driver
        self._record_bytes = record_bytes
        self._lock = threading.Lock()
        self._registered: dict[int, int] = {}

    def device_address(self, pool: PoolMemory) -> int:
        """What kernels call the pool; pins it at its first use. A kvd that was restarted on the same file needs no new pinning.

        Chunks are registered apart but addressed as one: with unified addressing the device address of host memory is its
        host address, which is checked.
        """
        with self._lock:
            if pool.address not in self._registered:
                self._register(pool)
        return pool.address

    def close(self) -> None:
        """Unpins everything; no copy may run any more."""
        for address in self._registered:
            self._driver.unregister_host(address)
        self._registered.clear()

    def _register(self, pool: PoolMemory) -> None:
        chunks = plan_registrations(pool.num_bytes, first_record=RECORDS_OFFSET, record_bytes=self._record_bytes)
        for chunk in chunks:
            address = pool.address + chunk.start
            self._driver.register_host(address, chunk.end - chunk.start)
            if self._driver.device_address(address) != address:
                raise RuntimeError("registered host memory has another device address: expected unified addressing")
            self._registered[address] = chunk.end - chunk.start
