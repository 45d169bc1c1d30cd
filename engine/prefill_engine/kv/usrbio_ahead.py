"""The reads of one job on USRBIO: started before they are asked for, many with one submit, so that 3FS sees depth (kv.md 3.1).

Made by UsrbioClient.job, used by the threads of that job. The plan is a guess: what is asked for and was not started is read at
once, and what was started and passed by is dropped. The trap: a segment is opened here and closed by whoever asked for it, else
by `finish`.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from prefill_engine.kv.segment_data import FileRange
from prefill_engine.kv.usrbio_lane import Extent, Lane, Piece, Started

# Reads of one job that are out at a time; the next ones follow when half of them have been taken.
WINDOW = 32


class ReadAhead:
    """SegmentReads of one job. ranges: what will be asked for, in about this order. keep: buffers that are never taken ahead."""

    reads_pieces = True

    def __init__(
        self,
        lane: Lane,
        ranges: Iterable[FileRange],
        *,
        open_file: Callable[[str], int],
        close_file: Callable[[int], None],
        keep: int,
    ) -> None:
        self._lane, self._keep = lane, keep
        self._open_file, self._close_file = open_file, close_file
        plan = [piece for one in ranges for piece in _cut(one, lane.piece_bytes)]
        self._number = {piece: number for number, piece in enumerate(plan)}
        self._left = deque(plan)
        self._furthest = -1
        self._lock = threading.Lock()
        self._started: dict[FileRange, Started] = {}
        self._handles: dict[str, int | OSError] = {}
        self._paths: dict[int, str] = {}
        with self._lock:
            self._start_next()

    def open(self, path: str) -> int:
        """As SegmentData; of a job it comes once for each path."""
        with self._lock:
            handle = self._handle(path)
        if isinstance(handle, OSError):
            raise handle
        return handle

    def read(self, handle: int, targets: Sequence[memoryview], offset: int) -> int:
        """As SegmentData. Raises OSError ETIMEDOUT for a lost completion; targets are then as they were."""
        return self._lane.fill(handle, targets, offset, self._fetch)

    def close(self, handle: int) -> None:
        """As SegmentData."""
        with self._lock:
            path = self._paths.pop(handle)
            self._drop([piece for piece in self._started if piece.path == path])
        self._close_file(handle)

    def finish(self) -> None:
        """At the job's end, when no other call is in progress."""
        with self._lock:
            self._left.clear()
            self._drop(list(self._started))
        for handle in list(self._paths):
            with suppress(OSError):
                self.close(handle)

    def _fetch(self, extent: Extent) -> tuple[Piece, int]:
        with self._lock:
            piece = FileRange(path=self._paths[extent.handle], offset=extent.offset, num_bytes=extent.num_bytes)
            started = self._started.pop(piece, None)
            self._furthest = max(self._furthest, self._number.get(piece, -1))
            passed = self._furthest - WINDOW
            self._drop([one for one in self._started if self._number[one] < passed])
            if len(self._started) <= WINDOW // 2:
                self._start_next()
        return self._lane.transfer(extent) if started is None else self._lane.finish(started)

    def _start_next(self) -> None:
        """Fills the window, with one submit."""
        next_ones: dict[FileRange, Extent] = {}
        while self._left and len(self._started) + len(next_ones) < WINDOW:
            piece = self._left.popleft()
            # A record that is wanted twice is started once; one that was asked for already is too late.
            if self._number[piece] <= self._furthest or piece in self._started or piece in next_ones:
                continue
            handle = self._handle(piece.path)
            if not isinstance(handle, OSError):
                next_ones[piece] = Extent(handle=handle, offset=piece.offset, num_bytes=piece.num_bytes)
        started = self._lane.start_ahead(list(next_ones.values()), keep=self._keep)
        self._started.update(zip(next_ones, started, strict=False))
        self._left.extendleft(reversed(list(next_ones)[len(started) :]))

    def _handle(self, path: str) -> int | OSError:
        """Opens it once; a segment that could not be opened is not tried again."""
        if path not in self._handles:
            try:
                handle = self._open_file(path)
            except OSError as error:
                self._handles[path] = error
            else:
                self._handles[path] = handle
                self._paths[handle] = path
        return self._handles[path]

    def _drop(self, pieces: Iterable[FileRange]) -> None:
        for piece in pieces:
            self._lane.drop(self._started.pop(piece))


def _cut(whole: FileRange, most_bytes: int) -> list[FileRange]:
    stop = whole.offset + whole.num_bytes
    return [
        FileRange(path=whole.path, offset=start, num_bytes=min(most_bytes, stop - start))
        for start in range(whole.offset, stop, most_bytes)
    ]
