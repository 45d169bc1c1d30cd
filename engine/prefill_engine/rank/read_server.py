"""Serves the bytes of computed attempts on a thread of its own, so that a read never waits for a step (C42).

An export is opened when all rows are computed and closed before its blocks are freed. Every read, of the front (ReadKv) and of
the courier (data transport), copies under the lock: when `close` has returned no read of that attempt is in flight, and no
peer, however slow, can pin a page. That is the "read in flight is one more reason not to free".
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import crc32c

from prefill_engine.handoff_pieces import (
    CHECKS_INDEX,
    PIECE_BYTES,
    ComponentKey,
    PieceRange,
    checksum,
    cut_pieces,
    piece_key,
)
from prefill_engine.kv.transport.contract import Source
from prefill_engine.messages import Expose, ReadRange, ReadReply, Region
from prefill_engine.rank.courier import Courier
from prefill_engine.rank.lanes import DataLane
from prefill_engine.rank.payloads import Part, read_parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """One component of a hand-over. kind: pe.v1.ComponentKind number. pieces: consecutive, all but the last equally long.
    offset: where they begin in the whole component."""

    kind: int
    pieces: Sequence[Part]
    offset: int = 0

    @property
    def num_bytes(self) -> int:
        return len(self.pieces[0]) * (len(self.pieces) - 1) + len(self.pieces[-1]) if self.pieces else 0

    def read(self, offset: int, length: int) -> bytes:
        """Copy of bytes [offset, offset + length) of the pieces, clipped to them."""
        return read_parts(self.pieces, offset, offset + length)


@dataclass(slots=True)
class _Exposed:
    """A component on the data transport. checks: of the pieces served so far, by index; the courier's thread writes them."""

    component: Component
    pieces: tuple[PieceRange, ...]
    checks: dict[int, bytes] = field(default_factory=dict)


class ReadServer:
    """Owner of the open exports and of the data lane's thread. courier: None = this rank has no data transport."""

    def __init__(self, courier: Courier | None = None) -> None:
        self.courier = courier
        self._fault: Exception | None = None
        self._lock = threading.Lock()
        self._exports: dict[bytes, Mapping[int, Component]] = {}
        self._exposed: dict[bytes, tuple[_Exposed, int]] = {}
        self._keys_of: dict[bytes, list[bytes]] = {}
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, lane: DataLane) -> None:
        """Starts serving; the lane belongs to the new thread from here on."""
        self._thread = threading.Thread(target=self._run, args=(lane,), name="read-server", daemon=True)
        self._thread.start()

    def counters(self) -> dict[str, int]:
        """Of the data transport, for the load report."""
        found = self.courier.counters() if self.courier is not None else {}
        return {f"data_{name}": count for name, count in found.items()}

    def stop(self) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

    def open(self, attempt_id: bytes, components: Sequence[Component]) -> tuple[Region, ...]:
        """Makes components readable; empty ones are left out."""
        table = {component.kind: component for component in components if component.num_bytes}
        with self._lock:
            self._exports[attempt_id] = table
        return tuple(
            Region(kind=kind, num_bytes=component.num_bytes, offset=component.offset)
            for kind, component in table.items()
        )

    def check(self) -> None:
        """Raises what a read failed with: memory of ours that can't be read is a fault of the rank (step thread)."""
        if self._fault is not None:
            raise self._fault

    def close(self, attempt_id: bytes) -> None:
        """Ends reads of an attempt; its memory may be reused when this returns. Unknown attempts are fine."""
        with self._lock:
            self._exports.pop(attempt_id, None)
            for key in self._keys_of.pop(attempt_id, ()):
                del self._exposed[key]

    def read(self, request: ReadRange) -> ReadReply:
        """The asked bytes, or an error text."""
        with self._lock:
            component = self._exports.get(request.attempt_id, {}).get(request.kind)
            data = self._copy(component, request.offset, request.length) if component is not None else None
        error = ""
        if component is None:
            error = f"component kind {request.kind} of this attempt is not readable (released or never there)"
        elif data is None:
            error = f"component kind {request.kind} of this attempt cannot be read: {self._fault}; the engine ends"
        data = data or b""
        return ReadReply(read_id=request.read_id, data=data, crc32c=crc32c.crc32c(data), error=error)

    def expose(self, request: Expose) -> ReadReply:
        """Makes pieces of an open export findable by their keys; again is fine."""
        with self._lock:
            table = self._exports.get(request.attempt_id)
            if table is not None and request.attempt_id not in self._keys_of:
                self._keys_of[request.attempt_id] = [
                    key for named in request.keys if named.kind in table for key in self._expose(named, table)
                ]
        error = "" if table is not None else "the attempt has nothing to hand over (released or never there)"
        return ReadReply(read_id=request.read_id, data=b"", crc32c=0, error=error)

    def _expose(self, named: ComponentKey, table: Mapping[int, Component]) -> list[bytes]:
        component = table[named.kind]
        pieces = cut_pieces(named.key, num_bytes=component.num_bytes, piece_bytes=PIECE_BYTES)
        exposed = _Exposed(component, pieces)
        for piece in pieces:
            self._exposed[piece.key] = (exposed, piece.index)
        checks_key = piece_key(named.key, CHECKS_INDEX)
        self._exposed[checks_key] = (exposed, CHECKS_INDEX)
        return [*(piece.key for piece in pieces), checks_key]

    def find(self, key: bytes) -> Source | None:
        """A copy of the piece with this key, or the list of checksums, for the transport; None if no open export has it."""
        with self._lock:
            found = self._exposed.get(key)
        if found is None:
            return None
        exposed, index = found
        data = self._read_checks(key, exposed) if index == CHECKS_INDEX else self._read_piece(key, exposed, index)
        return None if data is None else Source(view=memoryview(data), fd=-1, offset=0, release=lambda: None)

    def _read_checks(self, key: bytes, exposed: _Exposed) -> bytes | None:
        for piece in exposed.pieces:
            if piece.index not in exposed.checks and self._read_piece(key, exposed, piece.index) is None:
                return None
        return b"".join(exposed.checks[piece.index] for piece in exposed.pieces)

    def _read_piece(self, key: bytes, exposed: _Exposed, index: int) -> bytes | None:
        """The lock is held for one piece at a time: the step thread takes it too."""
        with self._lock:
            if key not in self._exposed:
                return None
            piece = exposed.pieces[index]
            data = self._copy(exposed.component, piece.start, piece.end - piece.start)
        if data is not None:
            exposed.checks[index] = checksum(data)
        return data

    def _copy(self, component: Component, offset: int, length: int) -> bytes | None:
        """None: the memory can't be read, which `check` raises."""
        try:
            return component.read(offset, length)
        except Exception as error:
            self._fault = self._fault or error
            return None

    def _run(self, lane: DataLane) -> None:
        while not self._stopping.is_set():
            request = lane.receive(timeout_seconds=0.2)
            if isinstance(request, Expose):
                lane.reply(self.expose(request))
            elif request is not None:
                lane.reply(self.read(request))
