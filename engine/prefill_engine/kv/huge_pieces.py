"""Buffers on huge pages that direct reads pass through on their way to the slots of a pool.

Used by PosixData with O_DIRECT. A pool in /dev/shm has pages of 4 KiB, and a device that is given a list of those is slower than
one that fills a few huge pages which stay in the cache: 1.1 against 1.9 GB/s on a virtual disk (docs/kv_store.md). The copy costs
less than the longer lists. The trap: without huge pages there is nothing to gain, and `of_system` says so.
"""

import ctypes
import mmap
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PIECE_BYTES = 2 << 20
_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")


class HugePieces:
    """As many buffers of PIECE_BYTES as were ever needed at a time. Thread-safe."""

    def __init__(self) -> None:
        self._free: deque[memoryview] = deque()

    @classmethod
    def of_system(cls) -> "HugePieces | None":
        """None where the kernel gives no huge pages."""
        try:
            text = _ENABLED.read_text()
        except OSError:
            return None
        return None if "[never]" in text else cls()

    @contextmanager
    def borrow(self) -> Iterator[memoryview]:
        """One for the caller alone, aligned to its size; what it holds is anybody's."""
        try:
            piece = self._free.pop()
        except IndexError:
            piece = _make_piece()
        try:
            yield piece
        finally:
            self._free.append(piece)


def _make_piece() -> memoryview:
    """Twice the size is mapped, for the alignment; the rest is never touched."""
    memory = mmap.mmap(-1, 2 * PIECE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # then the pages are small, and the reads right
        memory.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(memory)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(view)) % PIECE_BYTES
    return view[start : start + PIECE_BYTES]
