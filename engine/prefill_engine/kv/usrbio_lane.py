"""One direction of USRBIO: a ring, and the registered buffers that its data passes (kv.md 3.1).

Used by usrbio and usrbio_ahead, from any thread. The trap: the buffer of an IO whose completion has not come belongs to 3FS, so
one that was given up comes back by itself, when that has settled, or never.
"""

import ctypes
import errno
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from prefill_engine.kv.segment_data import HoleRead, scatter, skip_bytes
from prefill_engine.kv.usrbio_library import HOLE_STATUS, Iov, UsrbioLibrary, completion_error
from prefill_engine.kv.usrbio_ring import Batch, RingIo, UsrbioRing


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """Bytes of a registered file, at most one buffer of them."""

    handle: int
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One registered buffer."""

    address: int
    view: memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """One IO that was handed in. until: when it counts as lost, monotonic seconds."""

    piece: Piece
    batch: Batch
    until: float


class Lane:
    """Owner of one ring and its buffers."""

    def __init__(
        self,
        library: UsrbioLibrary,
        mount: str,
        *,
        entries: int,
        for_read: bool,
        flags: int,
        num_pieces: int,
        piece_bytes: int,
        deadline_seconds: float,
    ) -> None:
        """deadline_seconds: for one IO, from when it is handed in. Raises OSError."""
        self._library, self._deadline_seconds = library, deadline_seconds
        self.piece_bytes = piece_bytes
        self._ring = UsrbioRing(library, mount, entries=entries, for_read=for_read, flags=flags)
        try:
            # One block (block_size 0): no IO can cross a margin between blocks.
            self._iov: Iov = library.create_iov(mount, num_pieces * piece_bytes)
        except OSError:
            self._ring.close()
            raise
        base = int(self._iov.base)
        region = memoryview((ctypes.c_ubyte * (num_pieces * piece_bytes)).from_address(base)).cast("B")
        starts = range(0, num_pieces * piece_bytes, piece_bytes)
        self._free = [Piece(address=base + start, view=region[start : start + piece_bytes]) for start in starts]
        self._condition = threading.Condition()

    def transfer(self, extent: Extent, source: Sequence[memoryview] = ()) -> tuple[Piece, int]:
        """One IO through a buffer, which the caller gives back. Raises OSError; the buffer then returns by itself."""
        until = time.monotonic() + self._deadline_seconds
        piece = self._take()
        start = 0
        for part in source:
            piece.view[start : start + part.nbytes] = part
            start += part.nbytes
        return self.finish(Started(piece=piece, batch=self._ring.start([self._io(piece, extent)]), until=until))

    def start_ahead(self, extents: Sequence[Extent], *, keep: int) -> list[Started]:
        """Starts the first of these reads with one submit: as many as there are free buffers beyond `keep`."""
        with self._condition:
            num = max(0, min(len(extents), len(self._free) - keep))
            pieces = [self._free.pop() for _ in range(num)]
        if not pieces:
            return []
        until = time.monotonic() + self._deadline_seconds
        ios = [[self._io(piece, extent)] for piece, extent in zip(pieces, extents, strict=False)]
        batches = self._ring.start_together(ios)
        return [Started(piece=piece, batch=batch, until=until) for piece, batch in zip(pieces, batches, strict=True)]

    def finish(self, started: Started) -> tuple[Piece, int]:
        """Waits for its end; as `transfer`."""
        is_done = started.batch.wait(max(0.0, started.until - time.monotonic()))
        give_back = partial(self.give_back, started.piece)
        if not is_done and self._ring.abandon(started.batch, give_back):
            raise OSError(errno.ETIMEDOUT, f"no USRBIO completion within {self._deadline_seconds:g} s")
        result = started.batch.results[0]
        if result >= 0:
            return started.piece, result
        give_back()
        if result == -HOLE_STATUS:
            raise HoleRead(errno.EIO, "hole in the file")
        raise completion_error(result)

    def drop(self, started: Started) -> None:
        """For one that nobody wants any more."""
        give_back = partial(self.give_back, started.piece)
        if not self._ring.abandon(started.batch, give_back):
            give_back()

    def fill(
        self,
        handle: int,
        targets: Sequence[memoryview],
        offset: int,
        fetch: Callable[[Extent], tuple[Piece, int]],
    ) -> int:
        """Fills targets from what fetch brings, as SegmentData.read. Raises OSError."""
        wanted = sum(target.nbytes for target in targets)
        done = 0
        left = list(targets)
        while done < wanted:
            num_bytes = min(wanted - done, self.piece_bytes)
            piece, got = fetch(Extent(handle=handle, offset=offset + done, num_bytes=num_bytes))
            try:
                scatter(piece.view[:got], left)
            finally:
                self.give_back(piece)
            left = skip_bytes(left, got)
            done += got
            if got < num_bytes:
                break
        return done

    def give_back(self, piece: Piece) -> None:
        with self._condition:
            self._free.append(piece)
            self._condition.notify()

    def close(self) -> None:
        """Once nobody uses it. The memory stays where IOs are still out."""
        if self._ring.close():
            self._library.destroy_iov(self._iov)

    def _take(self) -> Piece:
        """Raises OSError EBUSY if none came back in time."""
        seconds = self._deadline_seconds
        with self._condition:
            if not self._condition.wait_for(lambda: bool(self._free), seconds):
                raise OSError(errno.EBUSY, f"no USRBIO buffer was free for {seconds:g} s; completions are missing")
            return self._free.pop()

    def _io(self, piece: Piece, extent: Extent) -> RingIo:
        return RingIo(
            iov=self._iov,
            address=piece.address,
            fd=extent.handle,
            offset=extent.offset,
            num_bytes=extent.num_bytes,
        )
