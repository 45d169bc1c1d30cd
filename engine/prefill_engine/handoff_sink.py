"""A small decode peer that takes pushes: serves pe.v1.HandoffSink and a data transport's listener. No torch.

Used by `prefill-engine request --handoff push`, the demo and the tests: what a decode engine has to do, with plain memory for
pages. Decides nothing itself: the rules are in sink_grants.py. The trap: `Offer` says that everything has landed, and is believed
only if every piece is there and its checksum is right.
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self

import grpc
import grpc.aio

from prefill_engine.client import MAX_MESSAGE_BYTES
from prefill_engine.client_events import to_duration, to_seconds
from prefill_engine.handoff_pieces import KEY_BYTES, component_lengths, cut_pieces
from prefill_engine.kv.transport.contract import Transport, protocol_of
from prefill_engine.rpc import common_pb2, handoff_pb2, handoff_pb2_grpc, prefill_pb2
from prefill_engine.rpc.status import Context, Failure, abort_with
from prefill_engine.sink_grants import Reservation, Room, SinkGrants, SinkState

_GRANT_ID_BYTES = 16
_SWEEP_SECONDS = 0.05
_STUCK_SECONDS = 2.0
_PIECE_BYTES = 1 << 20
_BLOCK_KV = common_pb2.COMPONENT_KIND_BLOCK_KV
_STOP_SECONDS = 0.5


class DecodeSink(handoff_pb2_grpc.HandoffSinkServicer):
    """One decode peer. Use as `async with DecodeSink(...)`; endpoint and data_endpoint are set then.

    kv_format: the only one it reads. capacity_bytes: of all its memory. piece_bytes: of granted memory, blocks rounded down to
    whole ones. phase: called with "reserved", "piece", "offer" (before the verdict), "offered" and "abandoned" as they happen
    (tests stop or kill it there).
    """

    def __init__(
        self,
        transport: Transport,
        kv_format: common_pb2.KvFormat,
        *,
        engine_id: str,
        host: str = "127.0.0.1",
        capacity_bytes: int = 1 << 30,
        piece_bytes: int = _PIECE_BYTES,
        clock: Callable[[], float] = time.monotonic,
        phase: Callable[[str], None] = lambda _name: None,
    ) -> None:
        self.engine_id = engine_id
        self.endpoint = ""
        self.data_endpoint = ""
        self.grants = SinkGrants(capacity_bytes)
        self._transport = transport
        self._format = kv_format
        self._host = host
        self._piece_bytes = piece_bytes
        self._clock = clock
        self._phase = phase
        self._server: grpc.aio.Server | None = None
        self._sweeper: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    async def __aenter__(self) -> Self:
        self.data_endpoint = await self._transport.listen(lambda _key: None)
        options = [
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.so_reuseport", 0),
            # The engine pings every 30 s while a push is open.
            ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ]
        self._server = grpc.aio.server(options=options)
        handoff_pb2_grpc.add_HandoffSinkServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        port = self._server.add_insecure_port(f"{self._host}:0")
        self.endpoint = f"{self._host}:{port}"
        await self._server.start()
        self._sweeper = asyncio.create_task(self._sweep())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._server is not None
        assert self._sweeper is not None
        self._sweeper.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._sweeper
        await self._server.stop(_STOP_SECONDS)
        await self._transport.close()

    @property
    def transport_kind(self) -> str:
        """What engines push by."""
        return protocol_of(self._transport.kind)

    # --- pe.v1.HandoffSink
    async def Reserve(self, request: handoff_pb2.ReserveRequest, context: Context) -> handoff_pb2.ReserveResponse:
        """Grants memory for a prompt; again for the same attempt gives the same grant. With grant_id it only renews."""
        if request.format_fingerprint not in (b"", self._format.fingerprint):
            text = "this decode peer reads another KV format"
            await abort_with(context, Failure(reason="KV_FORMAT_MISMATCH", phase="HANDOFF", public_message=text))
        now = self._clock()
        if request.grant_id:
            if not self.grants.renew(request.grant_id, now=now):
                text = "this decode peer no longer holds the grant"
                await abort_with(context, Failure(reason="TICKET_GONE", phase="HANDOFF", public_message=text))
            return handoff_pb2.ReserveResponse(grant_id=request.grant_id)
        reservation = self.grants.of_attempt(request.key.attempt_id) or self._reserve(request, now)
        if reservation is None:
            text = f"no room for {request.kv_tokens} tokens; {self.grants.free_bytes} bytes are free"
            await abort_with(context, Failure(reason="KV_MEMORY", phase="HANDOFF", public_message=text))
        self._phase("reserved")
        return handoff_pb2.ReserveResponse(grant_id=reservation.grant_id, target=self._target(reservation))

    async def Offer(self, request: handoff_pb2.OfferRequest, _context: Context) -> handoff_pb2.OfferResponse:
        """Everything has landed, says the engine: the verdict."""
        self._phase("offer")
        verdict = "REFUSED_FORMAT"
        if request.ticket.format.fingerprint == self._format.fingerprint and request.data_landed:
            verdict = self.grants.offer(
                request.grant_id,
                attempt_id=request.key.attempt_id,
                checks={part.kind: part.value for part in request.checksums},
                kv_tokens=request.ticket.kv_tokens,
                first_token=request.first_token.token if request.HasField("first_token") else -1,
                now=self._clock(),
            )
        self._changed.set()
        self._phase("offered")
        return handoff_pb2.OfferResponse(verdict=verdict)

    async def Abandon(self, request: handoff_pb2.AbandonRequest, _context: Context) -> handoff_pb2.AbandonResponse:
        """The engine gave up. released: the pages are free again."""
        released = self.grants.abandon(request.grant_id, writes_drained=request.writes_drained, now=self._clock())
        self._changed.set()
        self._phase("abandoned")
        return handoff_pb2.AbandonResponse(released=released)

    # --- for its owner
    async def reserve(
        self, key: common_pb2.AttemptKey, *, kv_tokens: int, ttl_seconds: float = 30.0
    ) -> prefill_pb2.PushTarget | None:
        """What a router would ask for by Reserve; None = no room."""
        request = handoff_pb2.ReserveRequest(key=key, kv_tokens=kv_tokens, ttl=to_duration(ttl_seconds))
        reservation = self.grants.of_attempt(key.attempt_id) or self._reserve(request, self._clock())
        if reservation is None:
            return None
        self._phase("reserved")
        return self._target(reservation)

    async def take(self, grant_id: bytes) -> tuple[dict[int, bytes], int] | None:
        """Waits until a push has ended; components by kind and first token, None if it was not accepted."""
        while (reservation := self.grants.find(grant_id)) is not None:
            if reservation.state is SinkState.ACCEPTED:
                return {kind: bytes(room.memory) for kind, room in reservation.rooms.items()}, reservation.first_token
            if reservation.state is not SinkState.RESERVED:
                return None
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), _SWEEP_SECONDS)
        return None

    def _reserve(self, request: handoff_pb2.ReserveRequest, now: float) -> Reservation | None:
        lengths = component_lengths(
            self._format.components, block_tokens=self._format.block_tokens, num_tokens=request.kv_tokens
        )
        if sum(lengths.values()) > self.grants.free_bytes:
            return None
        ttl = to_seconds(request.ttl)
        reservation = Reservation(
            grant_id=secrets.token_bytes(_GRANT_ID_BYTES),
            attempt_id=request.key.attempt_id,
            kv_tokens=request.kv_tokens,
            rooms=self._rooms(lengths),
            ttl_seconds=ttl,
            expires=now + ttl,
        )
        for room in reservation.rooms.values():
            view = memoryview(room.memory)
            for piece in room.pieces:
                target = view[piece.start : piece.end]
                reservation.missing += 1
                reservation.revokes.append(
                    self._transport.accept(piece.key, target, lambda: self._piece_landed(reservation))
                )
        self.grants.add(reservation)
        return reservation

    def _rooms(self, lengths: Mapping[int, int]) -> dict[int, Room]:
        unit = next((part.unit_align for part in self._format.components if part.kind == _BLOCK_KV), 1)
        rooms = {}
        for kind, length in lengths.items():
            piece_bytes = max(unit, self._piece_bytes // unit * unit) if kind == _BLOCK_KV else self._piece_bytes
            key = secrets.token_bytes(KEY_BYTES)
            rooms[kind] = Room(
                kind=kind,
                memory=bytearray(length),
                offset=0,
                piece_bytes=piece_bytes,
                pieces=cut_pieces(key, num_bytes=length, piece_bytes=piece_bytes),
                component_key=key,
            )
        return rooms

    def _piece_landed(self, reservation: Reservation) -> None:
        self.grants.landed(reservation)
        self._phase("piece")

    def _target(self, reservation: Reservation) -> prefill_pb2.PushTarget:
        target = prefill_pb2.PushTarget(
            grant_id=reservation.grant_id, lease=common_pb2.Lease(ttl=to_duration(reservation.ttl_seconds))
        )
        for room in reservation.rooms.values():
            place = common_pb2.PeerRegion(
                kind=self.transport_kind,
                endpoint=self.data_endpoint,
                key=room.component_key,
                piece_bytes=room.piece_bytes,
            )
            extent = common_pb2.Extent(offset=room.offset, length=len(room.memory))
            target.regions.add(
                kind=common_pb2.ComponentKind.Name(room.kind),
                region=common_pb2.RegionRef(peer=place, extents=[extent]),
            )
        return target

    async def _sweep(self) -> None:
        while True:
            if self.grants.sweep(now=self._clock()):
                self._changed.set()
            if self.grants.is_stuck(now=self._clock(), seconds=_STUCK_SECONDS):
                # An engine vanished in mid-write. That ends it at our side, at the price of other writes through the same agent.
                await self._transport.close_peer("")
            await asyncio.sleep(_SWEEP_SECONDS)
