"""The file behind a pool: opened under a lock, its pages reserved and mapped before use.

Used by PoolMemory only. The trap: a write into a mapped page that a full tmpfs can't give is SIGBUS, not an error; so every
page is taken at start (3FS#296).
"""

import ctypes
import errno
import fcntl
import os
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from prefill_plan.errors import ConfigError

MAGIC = b"PEKVPOOL"
ABI = 1
# magic, abi, 1 = laid out, epoch, file bytes, nonce
HEADER = struct.Struct("<8sIIQQ16s")
NO_HEADER = (b"", 0, 0, 0, 0, b"")

_F_OFD_GETLK, _F_OFD_SETLK = 36, 37  # linux/fcntl.h
_FLOCK = struct.Struct("@hhqqi4x")  # struct flock of 64-bit Linux: type, whence, start, length, pid
_MADV_POPULATE_WRITE = 23  # linux/mman.h, since 5.14
_PREFAULT_BYTES = 64 << 20


def read_header(fd: int) -> tuple[bytes, int, int, int, int, bytes]:
    """Fields of HEADER; NO_HEADER if the file is shorter."""
    head = os.pread(fd, HEADER.size, 0)
    return HEADER.unpack(head) if len(head) == HEADER.size else NO_HEADER


def open_locked(path: str, num_bytes: int) -> tuple[int, bool]:
    """The file, locked for as long as it is open, and whether it is a good one of this size that stood there before."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise ConfigError(f"pool file {path} is held by another running kvd: expected one kvd per pool") from None
        found = os.fstat(fd)
        if not Path(path).exists() or os.stat(path).st_ino != found.st_ino:
            os.close(fd)  # replaced between open and lock
            continue
        if found.st_size == 0:
            return fd, False
        magic, abi, _, _, old_bytes, _ = read_header(fd)
        if magic == MAGIC and abi == ABI and found.st_size == old_bytes == num_bytes:
            return fd, True
        # Another form. Not cut in place: a rank that still maps the old file would meet SIGBUS.
        os.unlink(path)
        os.close(fd)


def reserve_room(path: str, fd: int, num_bytes: int) -> None:
    """Takes the pages now. A write into a mapped hole of a full tmpfs would be SIGBUS (3FS#296)."""
    stats = os.statvfs(path)
    free = stats.f_bavail * stats.f_frsize
    problem = f"{path}: pool_bytes = {num_bytes}, but its file system has {free} bytes free of {stats.f_blocks * stats.f_frsize}"
    advice = "make /dev/shm larger (emptyDir {medium: Memory, sizeLimit} in engine and kvd alike) or pool_bytes smaller"
    if free < num_bytes:
        raise ConfigError(f"{problem}; {advice}")
    try:
        os.posix_fallocate(fd, 0, num_bytes)
    except OSError as error:
        raise ConfigError(f"{problem}: {error.strerror}; {advice}") from error


def prefault(path: str, address: int, num_bytes: int, *, threads: int) -> None:
    """Makes every page present and mapped, so that no later write waits for the kernel. Contents stay.

    Raises:
        ConfigError: the kernel refused.
    """
    madvise = load_madvise()

    def populate(start: int) -> int:
        # Through ctypes, which lets other threads run; mmap.madvise does not.
        if madvise(address + start, min(_PREFAULT_BYTES, num_bytes - start), _MADV_POPULATE_WRITE) == 0:
            return 0
        return ctypes.get_errno()

    with ThreadPoolExecutor(threads) as pool:
        for failure in pool.map(populate, range(0, num_bytes, _PREFAULT_BYTES)):
            # EINVAL: a kernel before 5.14. The pages are reserved in any case, only page faults remain.
            if failure not in (0, errno.EINVAL):
                raise ConfigError(f"pool {path} can't be prefaulted: {os.strerror(failure)}")


def lock_range(fd: int, start: int, num_bytes: int) -> None:
    """Takes bytes of the file for this mapping until `fd` and its copies are closed, at the latest by the process's end.

    Open file description locks (fcntl(2)): a living or frozen process keeps them, a dead one can't. Raises OSError.
    """
    fcntl.fcntl(fd, _F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, num_bytes, 0))


def is_range_locked(fd: int, start: int, num_bytes: int) -> bool:
    """Whether another mapping holds it."""
    answer = fcntl.fcntl(fd, _F_OFD_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, num_bytes, 0))
    return int(_FLOCK.unpack(answer)[0]) != fcntl.F_UNLCK


def load_madvise() -> Callable[[int, int, int], int]:
    """madvise(2) by address, length and advice; lets other threads run. Sets ctypes.get_errno()."""
    function = ctypes.CDLL(None, use_errno=True).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function
