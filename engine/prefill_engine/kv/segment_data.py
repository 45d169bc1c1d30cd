"""How the bytes of segments reach and leave a medium: the protocol, and its POSIX side.

Called by the read and write paths of a segment store; metadata (names, links, deletions) goes through FileOperations in any
case. The trap: a read may end early at any byte, and only the records' own checksums say what it is worth.
"""

import ctypes
import errno
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Protocol

from prefill_engine.kv.file_operations import FileOperations
from prefill_engine.kv.huge_pages import PIECE_BYTES, HugePieces
from prefill_engine.kv.store import Buffer

FILE_MODE = 0o640  # kv.md 7.6
DIRECT_ALIGN = mmap.PAGESIZE


class HoleRead(OSError):
    """The medium says that bytes of the range were never written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRange:
    """Bytes of a file."""

    path: str
    offset: int
    num_bytes: int


Lend = Callable[[int, int, int], AbstractContextManager[memoryview | None]]
"""PosixData.lend."""


class SegmentReads(Protocol):
    """The reading side of a medium, for one job or for all. Thread-safe."""

    reads_pieces: bool
    """False: only whole records can be read (O_DIRECT, C17)."""

    def open(self, path: str) -> int:
        """A handle to read from. Raises OSError."""
        ...

    def read(self, handle: int, targets: Sequence[memoryview], offset: int) -> int:
        """Fills targets one after the other from `offset`; returns the bytes read, fewer at the file's end.

        When it returns or raises, nothing writes into targets any more. Raises OSError; HoleRead.
        """
        ...

    def close(self, handle: int) -> None:
        """Raises OSError; the handle is gone in any case."""
        ...


class SegmentData(SegmentReads, Protocol):
    """One medium. Thread-safe."""

    def job(self, ranges: Iterable[FileRange]) -> AbstractContextManager[SegmentReads]:
        """The reading side for a job that will ask for these, in about this order; a medium may begin with them at once. At the
        end of the context no other call is in progress."""
        ...

    def write(self, path: str, buffers: Sequence[Buffer]) -> None:
        """A new file with these bytes, on the medium when it returns. Raises OSError; the file may then be left behind."""
        ...

    def shut_down(self) -> None:
        """Ends what it runs; no call is in progress or follows."""
        ...


def skip_bytes(buffers: Sequence[memoryview], num_bytes: int) -> list[memoryview]:
    """What is left of buffers after their first bytes have been moved."""
    for index, buffer in enumerate(buffers):
        if num_bytes < buffer.nbytes:
            return [buffer[num_bytes:], *buffers[index + 1 :]]
        num_bytes -= buffer.nbytes
    return []


def address_of(buffer: memoryview) -> int:
    """Where a writable buffer lies in memory."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def scatter(source: memoryview, targets: Sequence[memoryview]) -> None:
    """Fills targets one after the other, as far as source goes."""
    start = 0
    for target in targets:
        # By slices, which keep the interpreter's lock: giving it away for each record costs more than the copies.
        part = source[start : start + target.nbytes]
        target[: part.nbytes] = part
        start += part.nbytes


class PosixData:
    """Plain system calls; the page cache unless direct_io."""

    def __init__(self, files: FileOperations, *, direct_io: bool) -> None:
        self._files = files
        self._open_flags = os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if direct_io else 0)
        self.reads_pieces = not direct_io
        self._pieces = HugePieces.of_system() if direct_io else None

    def job(self, ranges: Iterable[FileRange]) -> AbstractContextManager[SegmentReads]:  # noqa: ARG002
        return nullcontext(self)

    def open(self, path: str) -> int:
        return self._files.open(path, self._open_flags, 0)

    @contextmanager
    def lend(self, handle: int, num_bytes: int, offset: int) -> Iterator[memoryview | None]:
        """Bytes of a file, fewer at its end, in memory of its own which is lent for the context; None = there is none that would
        be faster than read(). Raises OSError."""
        if self._pieces is None or num_bytes > PIECE_BYTES:
            yield None
            return
        with self._pieces.borrow() as piece:
            yield piece[: self.read(handle, [piece[:num_bytes]], offset)]

    def read(self, handle: int, targets: Sequence[memoryview], offset: int) -> int:
        preadv = self._files.preadv
        done = preadv(handle, targets, offset)
        wanted = sum(target.nbytes for target in targets)
        # A direct read can't go on in the middle of a page; the records after it are short then.
        while 0 < done < wanted and (self.reads_pieces or done % DIRECT_ALIGN == 0):
            more = preadv(handle, skip_bytes(targets, done), offset + done)
            if more == 0:
                break
            done += more
        return done

    def close(self, handle: int) -> None:
        self._files.close(handle)

    def write(self, path: str, buffers: Sequence[Buffer]) -> None:
        write_file(self._files, path, buffers, sync=self._files.fsync)

    def shut_down(self) -> None:
        pass


def write_file(files: FileOperations, path: str, buffers: Sequence[Buffer], *, sync: Callable[[int], None]) -> None:
    """A new file with these bytes, synced. Raises OSError."""
    fd = files.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
    try:
        left = [memoryview(buffer) for buffer in buffers]
        while left:
            moved = files.writev(fd, left)
            if moved == 0:
                raise OSError(errno.EIO, "nothing was written", path)
            left = skip_bytes(left, moved)
        sync(fd)
    except BaseException:
        with suppress(OSError):
            files.close(fd)
        raise
    files.close(fd)
