"""Serves ReadKv bytes of computed attempts on a thread of its own, so that a read never waits for a step (C42).

An export is opened when all rows are computed and closed before its blocks are freed. Reads copy under the lock, so when
`close` has returned no read of that attempt is in flight: that is the "read in flight is one more reason not to free".
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import crc32c

from prefill_engine.messages import ReadRange, ReadReply, Region
from prefill_engine.rank.lanes import DataLane


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """One component of a hand-over. kind: pe.v1.ComponentKind number. pieces: consecutive, all but the last equally long."""

    kind: int
    pieces: Sequence[bytes | memoryview]

    @property
    def num_bytes(self) -> int:
        return sum(len(piece) for piece in self.pieces)

    def read(self, offset: int, length: int) -> bytes:
        """Copy of bytes [offset, offset + length), clipped to the component."""
        size = len(self.pieces[0]) if self.pieces else 0
        end = min(offset + length, self.num_bytes)
        if size == 0 or offset >= end:
            return b""
        parts = []
        for index in range(offset // size, (end - 1) // size + 1):
            base = index * size
            parts.append(self.pieces[index][max(0, offset - base) : end - base])
        return b"".join(parts)


class ReadServer:
    """Owner of the open exports and of the data lane's thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._exports: dict[bytes, dict[int, Component]] = {}
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, lane: DataLane) -> None:
        """Starts serving; the lane belongs to the new thread from here on."""
        self._thread = threading.Thread(target=self._run, args=(lane,), name="read-server", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

    def open(self, attempt_id: bytes, components: Sequence[Component]) -> tuple[Region, ...]:
        """Makes components readable; empty ones are left out."""
        table = {component.kind: component for component in components if component.num_bytes}
        with self._lock:
            self._exports[attempt_id] = table
        return tuple(Region(kind=kind, num_bytes=component.num_bytes) for kind, component in table.items())

    def close(self, attempt_id: bytes) -> None:
        """Ends reads of an attempt; its memory may be reused when this returns. Unknown attempts are fine."""
        with self._lock:
            self._exports.pop(attempt_id, None)

    def read(self, request: ReadRange) -> ReadReply:
        """The asked bytes, or an error text."""
        with self._lock:
            component = self._exports.get(request.attempt_id, {}).get(request.kind)
            data = component.read(request.offset, request.length) if component is not None else b""
        error = (
            ""
            if component is not None
            else f"component kind {request.kind} of this attempt is not readable (released or never there)"
        )
        return ReadReply(read_id=request.read_id, data=data, crc32c=crc32c.crc32c(data), error=error)

    def _run(self, lane: DataLane) -> None:
        while not self._stopping.is_set():
            request = lane.receive(timeout_seconds=0.2)
            if request is not None:
                lane.reply(self.read(request))
