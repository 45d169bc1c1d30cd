"""One push: the pieces of an attempt's hand-over that a decode peer granted, sent as they become complete.

Lives on the courier's loop. A piece is copied out of the pool when its turn comes, so what travels can't change under way. The
trap: a transfer that failed or came late may still write at the peer until it is settled; `drain` waits for that.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from prefill_engine.handoff_pieces import PieceChecks, PieceRange, PushRegion, checksum, cut_pieces
from prefill_engine.kv.transport.contract import PullOutcome, PullState, Transport
from prefill_engine.rank.payloads import Part, read_parts

_WINDOW = 4
"""Pieces under way at once: enough to hide round trips, and few enough to be fair to other peers."""
_SETTLE_POLL_SECONDS = 0.02


@dataclass(slots=True)
class _Lane:
    """One component on its way. parts: consecutive bytes from the component's start, all but the last equally long."""

    region: PushRegion
    pieces: tuple[PieceRange, ...]
    parts: list[Part] = field(default_factory=list)
    num_added: int = 0
    next_piece: int = 0
    checks: dict[int, bytes] = field(default_factory=dict)

    def take(self) -> tuple[PieceRange, bytes] | None:
        """The next piece whose bytes are all there, and a copy of them."""
        if self.next_piece == len(self.pieces):
            return None
        piece = self.pieces[self.next_piece]
        start, end = self.region.offset + piece.start, self.region.offset + piece.end
        if end > self.num_added:
            return None
        self.next_piece += 1
        data = read_parts(self.parts, start, end)
        self.checks[piece.index] = checksum(data)
        return piece, data


class Push:
    """Owner of one attempt's transfers. reason, detail: why it failed, "" while it has not."""

    def __init__(
        self, attempt_id: bytes, regions: Sequence[PushRegion], *, transport: Transport, piece_seconds: float
    ) -> None:
        self.attempt_id = attempt_id
        self.num_bytes = 0
        self.reason = ""
        self.detail = ""
        self._transport = transport
        self._piece_seconds = piece_seconds
        self._lanes = {
            region.kind: _Lane(
                region, cut_pieces(region.key, num_bytes=region.num_bytes, piece_bytes=region.piece_bytes)
            )
            for region in regions
        }
        self._endpoints = {region.endpoint for region in regions}
        self._changed = asyncio.Event()
        self._is_finished = False
        self._is_cancelled = False
        self._under_way: set[asyncio.Task[None]] = set()
        self._unsettled: list[PullOutcome] = []

    def add(self, kind: int, parts: Sequence[Part]) -> None:
        """Further bytes of a component; one that was not granted fails the push."""
        lane = self._lanes.get(kind)
        if lane is None:
            if sum(map(len, parts)):
                self._fail("KV_FORMAT_MISMATCH", f"the decode peer granted no memory for component {kind}")
            return
        lane.parts.extend(parts)
        lane.num_added += sum(map(len, parts))
        self._changed.set()

    def finish(self) -> None:
        """Nothing more comes. A component of another length than granted fails the push."""
        for kind, lane in self._lanes.items():
            expected = lane.region.offset + lane.region.num_bytes
            if lane.num_added != expected:
                text = f"component {kind} has {lane.num_added} bytes, the decode peer granted up to byte {expected}"
                self._fail("KV_FORMAT_MISMATCH", text)
        self._is_finished = True
        self._changed.set()

    def cancel(self) -> None:
        self._is_cancelled = True
        self._changed.set()

    async def send_all(self) -> bool:
        """Sends what becomes complete; True = everything has landed. False: cancelled, or failed for `reason`."""
        while not (self._is_cancelled or self.reason):
            self._start_pieces()
            if self._is_finished and not self._under_way:
                return True
            await self._changed.wait()
            self._changed.clear()
        return False

    async def drain(self) -> None:
        """Returns when nothing can be written at the peer any more; connections that hang are closed for that."""
        if self._under_way:
            await asyncio.wait(self._under_way)
        if any(not outcome.settled() for outcome in self._unsettled):
            for endpoint in self._endpoints:
                await self._transport.close_peer(endpoint)
        while any(not outcome.settled() for outcome in self._unsettled):
            await asyncio.sleep(_SETTLE_POLL_SECONDS)

    def checks(self) -> tuple[PieceChecks, ...]:
        """Checksums of all pieces, as they were sent."""
        return tuple(
            PieceChecks(kind=kind, checks=b"".join(lane.checks[piece.index] for piece in lane.pieces))
            for kind, lane in self._lanes.items()
        )

    def _start_pieces(self) -> None:
        for lane in self._lanes.values():
            while len(self._under_way) < _WINDOW and (taken := lane.take()) is not None:
                piece, data = taken
                task = asyncio.get_running_loop().create_task(self._send(lane.region, piece, data))
                self._under_way.add(task)
                task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._under_way.discard(task)
        self._changed.set()

    async def _send(self, region: PushRegion, piece: PieceRange, data: bytes) -> None:
        try:
            outcome = await self._transport.push(
                region.endpoint, piece.key, memoryview(data), deadline_seconds=self._piece_seconds
            )
        except Exception as error:  # a transport that cannot even post is an end like any other (vllm#50754)
            self._fail("DECODE_ABORTED", f"posting piece {piece.index} of component {region.kind} failed: {error}")
            return
        if outcome.state is PullState.DONE:
            self.num_bytes += len(data)
            return
        self._unsettled.append(outcome)
        text = f"piece {piece.index} of component {region.kind} did not arrive: {outcome.state}, {outcome.reason}"
        self._fail("HANDOFF_TIMEOUT" if outcome.state is PullState.LATE else "DECODE_ABORTED", text)

    def _fail(self, reason: str, detail: str) -> None:
        if not self.reason:
            self.reason, self.detail = reason, detail
        self._changed.set()
