"""One file in /dev/shm, mapped by the RPC process, its owner, by the encoder process, and read by clients on this host.

The traps: space is taken with fallocate at start, since a tmpfs that runs full raises SIGBUS at the first touch; a process that
was killed leaves its file behind, so each file is locked by its owner, and files nobody locks are removed at the next start.
"""

import errno
import fcntl
import mmap
import os
import secrets
from bisect import insort
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from prefill_plan.errors import ConfigError

SHM_DIR = Path("/dev/shm")
_PREFIX = "prefill-ve."
_ALIGN = 4096


@dataclass(frozen=True, slots=True, order=True)
class Region:
    """[offset, offset + length) of a slab. length: as asked for; what is taken is rounded up to pages."""

    offset: int
    length: int


def host_id(path: str) -> str:
    """Names the file behind a path across mount name spaces: machine, device and inode. Equal = the same memory."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    status = os.stat(path)
    return f"{boot}:{status.st_dev}:{status.st_ino}"


def is_slab_path(path: str) -> bool:
    """Whether a path names a slab as this module makes them; it may not exist."""
    return path.startswith(f"{SHM_DIR}/{_PREFIX}") and "/" not in path[len(f"{SHM_DIR}/") :]


class FreeSpace:
    """Free parts of [0, size), first fit, neighbours joined. Pure bookkeeping."""

    def __init__(self, size: int) -> None:
        self._free = [(0, size)]
        self.free_bytes = size

    def take(self, length: int) -> int | None:
        """Offset of `length` bytes; None if no part is that long."""
        for index, (start, room) in enumerate(self._free):
            if room >= length:
                self._free[index : index + 1] = [(start + length, room - length)] if room > length else []
                self.free_bytes -= length
                return start
        return None

    def give(self, offset: int, length: int) -> None:
        """Must be a part that was taken."""
        insort(self._free, (offset, length))
        self.free_bytes += length
        index = self._free.index((offset, length))
        if index + 1 < len(self._free) and offset + length == self._free[index + 1][0]:
            self._free[index : index + 2] = [(offset, length + self._free[index + 1][1])]
        if index and sum(self._free[index - 1]) == self._free[index][0]:
            before = self._free[index - 1]
            self._free[index - 1 : index + 1] = [(before[0], before[1] + self._free[index][1])]


class Slab:
    """Owner of one file and of its free space. One event loop's."""

    def __init__(self, name: str, num_bytes: int, *, key: str) -> None:
        """key: of the setting that asks for the bytes.

        Raises:
            ConfigError: /dev/shm has not that much.
        """
        self.num_bytes = _round_up(num_bytes)
        self.path, self._fd = _create(name)
        try:
            os.posix_fallocate(self._fd, 0, self.num_bytes)
            self._map = mmap.mmap(self._fd, self.num_bytes)
        except OSError as error:
            room = os.statvfs(SHM_DIR)
            self._remove()
            free = room.f_bavail * room.f_frsize
            what = os.strerror(error.errno or errno.ENOSPC)
            raise ConfigError(
                f"{key} = {num_bytes}: {SHM_DIR} has {free} bytes free ({what}); make it larger or ask for less"
            ) from error
        self._space = FreeSpace(self.num_bytes)
        self.host_id = host_id(self.path)

    @property
    def used_bytes(self) -> int:
        return self.num_bytes - self._space.free_bytes

    def allocate(self, num_bytes: int) -> Region | None:
        """None: there is no room in one piece."""
        offset = self._space.take(_round_up(num_bytes))
        return None if offset is None else Region(offset, num_bytes)

    def free(self, region: Region) -> None:
        self._space.give(region.offset, _round_up(region.length))

    def view(self, region: Region) -> memoryview:
        """Writable; release it before close."""
        return memoryview(self._map)[region.offset : region.offset + region.length]

    def read(self, region: Region, *, offset: int, num_bytes: int) -> bytes:
        """A copy of part of a region."""
        start = region.offset + offset
        return self._map[start : start + min(num_bytes, region.length - offset)]

    def close(self) -> None:
        """Removes the file; who has it mapped keeps its memory until it lets go."""
        # A view that someone still holds would raise; the file goes all the same, and the process ends.
        with suppress(BufferError):
            self._map.close()
        self._remove()

    def _remove(self) -> None:
        with suppress(FileNotFoundError):
            os.unlink(self.path)
        os.close(self._fd)


class AttachedSlab:
    """Another process's slab, by path. writable: for the encoder process."""

    def __init__(self, path: str, *, writable: bool) -> None:
        """Raises OSError."""
        fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
        try:
            self.memory = mmap.mmap(fd, 0, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ)
        finally:
            os.close(fd)


def remove_orphans(directory: Path = SHM_DIR) -> list[str]:
    """Removes slabs whose owners are dead; returns their names."""
    removed = []
    for path in directory.glob(_PREFIX + "*"):
        with suppress(OSError):
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
                removed.append(path.name)
            finally:
                os.close(fd)
    return removed


def _create(name: str) -> tuple[str, int]:
    while True:
        path = str(SHM_DIR / f"{_PREFIX}{name}.{secrets.token_hex(4)}")
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"{path} can't be made: {error.strerror}") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # Another VE that starts takes it for an orphan, and removes it.
            os.close(fd)
            continue
        if os.path.exists(path):
            return path, fd
        os.close(fd)


def _round_up(num_bytes: int) -> int:
    return max(_ALIGN, -(-num_bytes // _ALIGN) * _ALIGN)
