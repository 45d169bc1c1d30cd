"""The few driver calls that swap-in and saves on CUDA need, as a protocol, and their real implementation on libcuda.

Used by the cuda_*.py beside it; tests have a stub. NEVER RUN on a GPU so far. The traps: every call returns a code, and
a call on a broken context fails from then on; such a failure is a GpuFault, not a miss. A thread has no context until it is
given one.
"""

import ctypes
import threading
from collections.abc import Callable
from typing import Protocol

from prefill_plan.errors import GpuFault

_PORTABLE_AND_MAPPED = 0x01 | 0x02  # CU_MEMHOSTREGISTER_PORTABLE | DEVICEMAP
_HOSTALLOC_PORTABLE_AND_MAPPED = 0x01 | 0x02
_WAIT_VALUE_GEQ = 0x0
_EVENT_DISABLE_TIMING = 0x2
_OUT_OF_MEMORY = 2
_NOT_READY = 600
# Unavailable, no device, invalid device, ECC, NVLink, illegal address, time-out, destroyed context, assert, peers, hardware stack
# to launch failed, unknown: after these every further call fails.
_FAULTS = frozenset((46, 100, 101, 214, 220, 700, 702, 709, 710, *range(714, 720), 999))


class CudaDriver(Protocol):
    """Streams are raw handles. Every call raises GpuFault, MemoryError or RuntimeError."""

    def register_host(self, address: int, num_bytes: int) -> None:
        """Pins and maps host memory that stays where it is."""
        ...

    def unregister_host(self, address: int) -> None: ...

    def device_address(self, address: int) -> int:
        """What kernels call registered or allocated host memory."""
        ...

    def allocate_words(self, num_words: int) -> int:
        """Host address of zeroed, pinned, mapped u32 words; they live until the process ends."""
        ...

    def wait_word(self, stream: int, device_address: int, value: int) -> None:
        """Work after this in the stream starts when the word is >= value; returns at once."""
        ...

    def copy_to_device(self, stream: int, target: int, source: int, num_bytes: int) -> None:
        """Queues one copy from registered or allocated host memory."""
        ...

    def copy_from_device(self, stream: int, target: int, source: int, num_bytes: int) -> None:
        """Queues one copy into registered or allocated host memory, in the stream's order."""
        ...

    def create_event(self) -> int:
        """Lives until the process ends."""
        ...

    def record_event(self, event: int, stream: int) -> None:
        """The event is behind everything queued in the stream so far."""
        ...

    def wait_event(self, stream: int, event: int) -> None:
        """Work after this in the stream starts when what was last recorded has happened; returns at once."""
        ...

    def is_reached(self, event: int) -> bool:
        """Whether what was last recorded has happened; returns at once."""
        ...

    def synchronize(self, stream: int) -> None:
        """Returns when everything in the stream is done; lets other Python threads run."""
        ...


class Library(Protocol):
    """libcuda: functions by name, each returning a CUresult. ctypes.CDLL is one."""

    def __getitem__(self, name: str) -> Callable[..., int]: ...


class _ThisThread(threading.local):
    has_context = False


class LibCuda:
    """CudaDriver on libcuda, in the context of the thread that builds it: torch's, once it has used the device. Every other
    thread gets that context at its first call."""

    def __init__(self, cuda: Library) -> None:
        """Raises RuntimeError on a thread without a context."""
        self._cuda = cuda
        self._thread = _ThisThread()
        self._thread.has_context = True
        context = ctypes.c_void_p()
        self._call("cuCtxGetCurrent", ctypes.byref(context))
        if context.value is None:
            raise RuntimeError("this thread has no CUDA context: expected torch to have used the device on it")
        self._context = context.value

    def register_host(self, address: int, num_bytes: int) -> None:
        """As CudaDriver."""
        self._call("cuMemHostRegister_v2", ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), _PORTABLE_AND_MAPPED)

    def unregister_host(self, address: int) -> None:
        """As CudaDriver."""
        self._call("cuMemHostUnregister", ctypes.c_void_p(address))

    def device_address(self, address: int) -> int:
        """As CudaDriver."""
        out = ctypes.c_uint64()
        self._call("cuMemHostGetDevicePointer_v2", ctypes.byref(out), ctypes.c_void_p(address), 0)
        return out.value

    def allocate_words(self, num_words: int) -> int:
        """As CudaDriver."""
        out = ctypes.c_void_p()
        flags = _HOSTALLOC_PORTABLE_AND_MAPPED
        self._call("cuMemHostAlloc", ctypes.byref(out), ctypes.c_size_t(4 * num_words), flags)
        assert out.value is not None, "cuMemHostAlloc gave no memory and no error"
        ctypes.memset(out.value, 0, 4 * num_words)
        return out.value

    def wait_word(self, stream: int, device_address: int, value: int) -> None:
        """As CudaDriver."""
        target = ctypes.c_uint64(device_address)
        self._call("cuStreamWaitValue32_v2", ctypes.c_void_p(stream), target, ctypes.c_uint32(value), _WAIT_VALUE_GEQ)

    def copy_to_device(self, stream: int, target: int, source: int, num_bytes: int) -> None:
        """As CudaDriver."""
        to, size = ctypes.c_uint64(target), ctypes.c_size_t(num_bytes)
        self._call("cuMemcpyHtoDAsync_v2", to, ctypes.c_void_p(source), size, ctypes.c_void_p(stream))

    def copy_from_device(self, stream: int, target: int, source: int, num_bytes: int) -> None:
        """As CudaDriver."""
        at, size = ctypes.c_uint64(source), ctypes.c_size_t(num_bytes)
        self._call("cuMemcpyDtoHAsync_v2", ctypes.c_void_p(target), at, size, ctypes.c_void_p(stream))

    def create_event(self) -> int:
        """As CudaDriver."""
        out = ctypes.c_void_p()
        self._call("cuEventCreate", ctypes.byref(out), _EVENT_DISABLE_TIMING)
        assert out.value is not None, "cuEventCreate gave no event and no error"
        return out.value

    def record_event(self, event: int, stream: int) -> None:
        """As CudaDriver."""
        self._call("cuEventRecord", ctypes.c_void_p(event), ctypes.c_void_p(stream))

    def wait_event(self, stream: int, event: int) -> None:
        """As CudaDriver."""
        self._call("cuStreamWaitEvent", ctypes.c_void_p(stream), ctypes.c_void_p(event), 0)

    def is_reached(self, event: int) -> bool:
        """As CudaDriver."""
        return self._ask("cuEventQuery", ctypes.c_void_p(event)) == 0

    def synchronize(self, stream: int) -> None:
        """As CudaDriver."""
        self._call("cuStreamSynchronize", ctypes.c_void_p(stream))

    def _call(self, name: str, *arguments: object) -> None:
        if self._ask(name, *arguments) == _NOT_READY:
            raise RuntimeError(f"{name} failed with CUresult {_NOT_READY}, expected 0")

    def _ask(self, name: str, *arguments: object) -> int:
        """0 or _NOT_READY."""
        if not self._thread.has_context:
            self._thread.has_context = True
            self._call("cuCtxSetCurrent", ctypes.c_void_p(self._context))
        code = self._cuda[name](*arguments)
        if code in _FAULTS:
            raise GpuFault(f"{name} failed with CUresult {code}: the GPU cannot be used any more; the rank ends")
        if code == _OUT_OF_MEMORY:
            raise MemoryError(f"{name} failed with CUresult {code}: no memory left that the GPU can use")
        if code not in (0, _NOT_READY):
            raise RuntimeError(f"{name} failed with CUresult {code}, expected 0")
        return code
