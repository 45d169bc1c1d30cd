"""3FS's USRBIO C API through ctypes, opened at run time (kv.md 3.1): thin calls, errors as OSError.

Used by usrbio_ring and usrbio only. Signatures follow src/lib/api/hf3fs_usrbio.h of 3FS e2cef82. The trap: three conventions of
failure live side by side: -errno (most), +errno (reg_fd, whose success is <= 0), and 3FS status codes in completions.
"""

import ctypes
import errno
import logging
import os
import resource
import time
from collections.abc import Callable
from ctypes import POINTER, byref
from typing import Any

from prefill_plan.errors import ConfigError

logger = logging.getLogger(__name__)

# The library's table of descriptors is as long as the hard limit is when it is opened, with 16 bytes for each (kv.md 3.2).
MAX_OPEN_FILES = 1_048_576
FORBID_READ_HOLES = 2  # HF3FS_IOR_FORBID_READ_HOLES: without it a lost chunk reads as zeros
HOLE_STATUS = 8001  # ClientAgentCode::kHoleInIoOutcome, in completions as -8001
_MOUNT_BYTES = 256
_ANY_NUMA = -1


class Iov(ctypes.Structure):
    """struct hf3fs_iov: memory that the FUSE process has registered."""

    _fields_ = (
        ("base", ctypes.c_void_p),
        ("iovh", ctypes.c_void_p),
        ("id", ctypes.c_char * 16),
        ("mount_point", ctypes.c_char * _MOUNT_BYTES),
        ("size", ctypes.c_size_t),
        ("block_size", ctypes.c_size_t),
        ("numa", ctypes.c_int),
    )


class Ior(ctypes.Structure):
    """struct hf3fs_ior: a ring."""

    _fields_ = (
        ("iov", Iov),
        ("iorh", ctypes.c_void_p),
        ("mount_point", ctypes.c_char * _MOUNT_BYTES),
        ("for_read", ctypes.c_bool),
        ("io_depth", ctypes.c_int),
        ("priority", ctypes.c_int),
        ("timeout", ctypes.c_int),
        ("flags", ctypes.c_uint64),
    )


class Cqe(ctypes.Structure):
    """struct hf3fs_cqe: a completion. result: bytes, or -errno, or minus a 3FS status."""

    _fields_ = (
        ("index", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("result", ctypes.c_int64),
        ("userdata", ctypes.c_void_p),
    )


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_SIGNATURES = {
    "hf3fs_is_hf3fs": (ctypes.c_bool, (ctypes.c_int,)),
    "hf3fs_extract_mount_point": (ctypes.c_int, (ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p)),
    "hf3fs_iovcreate": (
        ctypes.c_int,
        (POINTER(Iov), ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int),
    ),
    "hf3fs_iovwrap": (
        ctypes.c_int,
        (
            POINTER(Iov),
            ctypes.c_void_p,
            ctypes.c_char_p,
            ctypes.c_char_p,
            ctypes.c_size_t,
            ctypes.c_size_t,
            ctypes.c_int,
        ),
    ),
    "hf3fs_iovdestroy": (None, (POINTER(Iov),)),
    "hf3fs_iorcreate4": (
        ctypes.c_int,
        (
            POINTER(Ior),
            ctypes.c_char_p,
            ctypes.c_int,
            ctypes.c_bool,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_uint64,
        ),
    ),
    "hf3fs_iordestroy": (None, (POINTER(Ior),)),
    "hf3fs_reg_fd": (ctypes.c_int, (ctypes.c_int, ctypes.c_uint64)),
    "hf3fs_dereg_fd": (None, (ctypes.c_int,)),
    "hf3fs_prep_io": (
        ctypes.c_int,
        (
            POINTER(Ior),
            POINTER(Iov),
            ctypes.c_bool,
            ctypes.c_void_p,
            ctypes.c_int,
            ctypes.c_size_t,
            ctypes.c_uint64,
            ctypes.c_void_p,
        ),
    ),
    "hf3fs_submit_ios": (ctypes.c_int, (POINTER(Ior),)),
    "hf3fs_wait_for_ios": (
        ctypes.c_int,
        (POINTER(Ior), POINTER(Cqe), ctypes.c_int, ctypes.c_int, POINTER(_TimeSpec)),
    ),
}


class UsrbioLibrary:
    """The library of one path. Any thread may call; who may call what when is the ring's business."""

    def __init__(self, path: str, *, max_open_files: int = MAX_OPEN_FILES) -> None:
        """max_open_files: a higher hard limit of this process is lowered to it first. Raises ConfigError if it is absent or not
        that library."""
        _limit_open_files(max_open_files)
        try:
            library = ctypes.CDLL(path)
        except OSError as error:
            raise ConfigError(
                f"store.usrbio_library {path} can't be opened: {error}; expected 3FS's libhf3fs_api_shared.so, which comes with "
                f"its client; without it use store.kind=file on the same mount",
                path="store.usrbio_library",
            ) from error
        self._calls: dict[str, Callable[..., Any]] = {}
        for name, (result, arguments) in _SIGNATURES.items():
            try:
                function = library[name]
            except AttributeError as error:
                raise ConfigError(
                    f"store.usrbio_library {path} has no {name}: expected the USRBIO API with hf3fs_iorcreate4",
                    path="store.usrbio_library",
                ) from error
            function.restype, function.argtypes = result, arguments
            self._calls[name] = function

    def is_hf3fs(self, fd: int) -> bool:
        return bool(self._calls["hf3fs_is_hf3fs"](fd))

    def find_mount(self, path: str) -> str | None:
        """Mount point of the 3FS that `path` lies on; None if it lies on none."""
        buffer = ctypes.create_string_buffer(_MOUNT_BYTES)
        length = self._calls["hf3fs_extract_mount_point"](buffer, _MOUNT_BYTES, os.fsencode(path))
        return os.fsdecode(buffer.value) if 0 < length <= _MOUNT_BYTES and buffer.value else None

    def create_iov(self, mount: str, num_bytes: int) -> Iov:
        """Registered memory of our own, one block. Raises OSError."""
        iov = Iov()
        _check(
            self._calls["hf3fs_iovcreate"](byref(iov), os.fsencode(mount), num_bytes, 0, _ANY_NUMA), "hf3fs_iovcreate"
        )
        return iov

    def wrap_iov(self, mount: str, address: int, num_bytes: int, *, block_bytes: int, iov_id: bytes) -> Iov:
        """Memory that a link in `<mount>/3fs-virt/iovs` has registered under iov_id. Raises OSError."""
        iov = Iov()
        result = self._calls["hf3fs_iovwrap"](
            byref(iov), address, iov_id, os.fsencode(mount), num_bytes, block_bytes, _ANY_NUMA
        )
        _check(result, "hf3fs_iovwrap")
        return iov

    def destroy_iov(self, iov: Iov) -> None:
        """Of create_iov only; a wrapped one is its maker's."""
        self._calls["hf3fs_iovdestroy"](byref(iov))

    def create_ring(self, mount: str, *, entries: int, for_read: bool, flags: int) -> Ior:
        """Raises OSError.

        io_depth is 0, issue whatever is found: N > 0 waits for ever for the last few, and N < 0 with a timeout never issues a
        batch that is not full (IoRing.cc: lastCheck_ is overwritten before the test).
        """
        ring = Ior()
        result = self._calls["hf3fs_iorcreate4"](
            byref(ring), os.fsencode(mount), entries, for_read, 0, 0, _ANY_NUMA, flags
        )
        _check(result, "hf3fs_iorcreate4")
        return ring

    def destroy_ring(self, ring: Ior) -> None:
        """With flags, 3FS leaves the ring's link behind until the process ends (UsrbIo.cc: made as .f10, removed as .f2)."""
        self._calls["hf3fs_iordestroy"](byref(ring))

    def register(self, fd: int) -> None:
        """Before the first IO. Raises OSError; EINVAL also for an fd whose predecessor was not taken back before its close."""
        result = self._calls["hf3fs_reg_fd"](fd, 0)
        if result > 0:
            raise OSError(result, f"hf3fs_reg_fd: {os.strerror(result)}")

    def deregister(self, fd: int) -> None:
        """Before the close of fd, never after it."""
        self._calls["hf3fs_dereg_fd"](fd)

    def prepare(self, ring: Ior, iov: Iov, *, address: int, fd: int, offset: int, num_bytes: int, userdata: int) -> int:
        """Index of the IO, or -errno; -EAGAIN: the ring is full."""
        return int(
            self._calls["hf3fs_prep_io"](
                byref(ring), byref(iov), ring.for_read, address, fd, offset, num_bytes, userdata
            )
        )

    def submit(self, ring: Ior) -> int:
        """0 or -errno. Only a hint: prepared IOs may run before it, and without it."""
        return int(self._calls["hf3fs_submit_ios"](byref(ring)))

    def wait(self, ring: Ior, cqes: "ctypes.Array[Cqe]", *, timeout_seconds: float) -> int:
        """Number of completions put into cqes, at least one unless the time is over; or -errno."""
        nanoseconds = time.time_ns() + int(timeout_seconds * 1e9)
        until = _TimeSpec(nanoseconds // 10**9, nanoseconds % 10**9)
        return int(self._calls["hf3fs_wait_for_ios"](byref(ring), cqes, len(cqes), 1, byref(until)))


def _limit_open_files(most: int) -> None:
    """For this whole process, and for good. Lowering needs no privilege."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard <= most:
        return
    new_soft = most if soft == resource.RLIM_INFINITY else min(soft, most)
    resource.setrlimit(resource.RLIMIT_NOFILE, (new_soft, most))
    extra = {"old_soft": soft, "old_hard": hard, "new_soft": new_soft, "new_hard": most}
    logger.warning("limit of open files lowered: 3FS's library makes a table as long", extra=extra)


def _check(result: int, call: str) -> None:
    if result < 0:
        raise OSError(-result, f"{call}: {os.strerror(-result)}")


def completion_error(result: int) -> OSError:
    """What a negative completion means; 3FS statuses become EIO with their number."""
    status = -result
    if status in errno.errorcode:
        return OSError(status, os.strerror(status))
    return OSError(errno.EIO, f"3FS status {status}")
