"""Memory on huge pages: the cache of a CPU rank, and what direct reads pass through on their way into a pool.

Used by PosixData with O_DIRECT: a pool in /dev/shm has pages of 4 KiB, and a device that is given a list of those is slower than
one that fills a few huge pages which stay in the cache: 1.1 against 1.8 GB/s on a virtual disk (docs/kv_store.md). The copy costs
less than the longer lists. Used by KvCache, because copies of whole blocks miss the TLB on every small page. The trap: it is
advice; a kernel that gives none is no error, and for direct reads there is then nothing to gain (`HugePieces.of_system`).
"""

import ctypes
import mmap
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prefill_engine.kv.pool_file import load_madvise

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
    view = memoryview(mmap.mmap(-1, 2 * PIECE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    advise(address, view.nbytes)
    start = -address % PIECE_BYTES
    return view[start : start + PIECE_BYTES]


def advise(address: int, num_bytes: int) -> None:
    """Asks for huge pages in a range of anonymous memory of this process; best before it is written for the first time."""
    start, end = -(-address // PIECE_BYTES) * PIECE_BYTES, (address + num_bytes) // PIECE_BYTES * PIECE_BYTES
    if start < end:
        load_madvise()(start, end - start, mmap.MADV_HUGEPAGE)
