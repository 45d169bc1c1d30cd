"""Payloads of a cache in device memory, through one pinned staging buffer. Tested with a stub driver; NEVER RUN on a GPU so far.

Made by cuda_build.py. A hand-over is read piece by piece when the peer asks for it, so it takes no host memory but the buffer's.
The trap: the copies are queued on a stream of their own, which waits for nobody: only what a finished step has written may be
read, and only slots that no step computes may be filled.
"""

import ctypes
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from prefill_engine.rank.cuda_driver import CudaDriver
from prefill_engine.rank.payloads import Part, PartsOfSlots
from prefill_plan.kv_layout import BlockLayout

T = TypeVar("T")


class DevicePayloads:
    """Owner of the staging buffer, which has room for one payload."""

    def __init__(self, driver: CudaDriver, *, layout: BlockLayout, cache_address: int, stream: int) -> None:
        """stream: used by nobody else."""
        self.num_bytes = layout.payload_bytes
        self._driver = driver
        self._stride = layout.stride_bytes
        self._cache_address = cache_address
        self._stream = stream
        self._lock = threading.Lock()
        self._staging = driver.allocate_words(-(-layout.payload_bytes // 4))

    def parts(self, slots: Sequence[int]) -> Sequence[Part]:
        """As Payloads."""
        return PartsOfSlots(slots, partial(_DevicePart, self))

    def fill(self, slot: int, read: Callable[[memoryview], T | None]) -> T | None:
        """As Payloads; nobody waits for `read`."""
        data = bytearray(self.num_bytes)
        found = read(memoryview(data))
        if found is not None:
            with self._lock:
                ctypes.memmove(self._staging, bytes(data), self.num_bytes)
                self._driver.copy_to_device(self._stream, self._address(slot), self._staging, self.num_bytes)
                self._driver.synchronize(self._stream)
        return found

    def read(self, slot: int, start: int, end: int) -> bytes:
        """Copy of bytes [start, end) of the payload of a slot."""
        num_bytes = max(0, end - start)
        if num_bytes == 0:
            return b""
        with self._lock:
            self._driver.copy_from_device(self._stream, self._staging, self._address(slot) + start, num_bytes)
            self._driver.synchronize(self._stream)
            return ctypes.string_at(self._staging, num_bytes)

    def _address(self, slot: int) -> int:
        return self._cache_address + slot * self._stride


class _DevicePart:
    """One payload that is copied when it is sliced."""

    def __init__(self, payloads: DevicePayloads, slot: int) -> None:
        self._payloads = payloads
        self._slot = slot

    def __len__(self) -> int:
        return self._payloads.num_bytes

    def __getitem__(self, key: slice, /) -> bytes:
        start, end, _ = key.indices(self._payloads.num_bytes)
        return self._payloads.read(self._slot, start, end)
