"""HandoffClient: what a decode peer calls on an engine to take over a prefill's KV (`pe.v1.HandoffSource`). No torch.

Used by `request`, the demo and the tests. The trap: what was read counts only after `settle` answered that the lease
was still ours; else the source may have reused the memory while we read (serving.md 0, fact 5).
"""

from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import crc32c
import grpc
import grpc.aio

from prefill_engine.client import PROTOCOL, call_failed, call_unary, open_channel
from prefill_engine.client_events import component_name, to_duration, to_seconds
from prefill_engine.client_ticket import Ticket, ticket_from_proto
from prefill_engine.kv.transport.contract import Transport, protocol_of
from prefill_engine.peer_pull import PeerBusy, pull_component
from prefill_engine.rpc import common_pb2, handoff_pb2, handoff_pb2_grpc
from prefill_plan.errors import BlockCorrupt

GRPC = "grpc"
"""The transport that every source speaks: ReadKv."""
_STREAM = "stream"
"""Its name in Hello and Claim."""
PIECE_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A won ticket. first_token: -1 = none. claim_id is as secret as the ticket. transport: what its bytes will come by."""

    ticket: Ticket
    claim_id: bytes = field(repr=False)
    first_token: int
    transport: str = GRPC


class HandoffClient:
    """Calls one engine's `pe.v1.HandoffSource`. engine_id and epoch name the decode peer, not the source.

    transport: preferred to ReadKv wherever the source speaks it too; None = ReadKv only. renew_seconds: set by hello.
    num_fallbacks: components that were read by ReadKv, since the source was too busy to give them by the claim's transport.
    """

    def __init__(self, endpoint: str, *, engine_id: str, epoch: int, transport: Transport | None = None) -> None:
        self.endpoint = endpoint
        self.engine_id = engine_id
        self.epoch = epoch
        self.renew_seconds = 0.0
        self.num_fallbacks = 0
        self._transport = transport
        self._protocol = protocol_of(transport.kind) if transport is not None else GRPC
        self._names = [_STREAM] if transport is None else [self._protocol, _STREAM]
        self._channel = open_channel(endpoint)
        self.stub: Any = handoff_pb2_grpc.HandoffSourceStub(self._channel)  # type: ignore[no-untyped-call]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._channel.close(None)

    async def hello(self, *, timeout_seconds: float = 10.0) -> int:
        """Agrees on a protocol; the source's epoch. Raises CallFailed."""
        request = handoff_pb2.HelloRequest(
            protocol_min=PROTOCOL,
            protocol_max=PROTOCOL,
            engine_id=self.engine_id,
            epoch=self.epoch,
            transports=self._names,
        )
        reply = await call_unary(self.stub.Hello, request, endpoint=self.endpoint, timeout_seconds=timeout_seconds)
        self.renew_seconds = to_seconds(reply.renew_every)
        return int(reply.epoch)

    async def claim(self, ticket: Ticket, *, timeout_seconds: float = 10.0) -> Claim:
        """Claims a ticket; exactly one claimant wins.

        Raises:
            CallFailed: reason TICKET_CLAIMED (another peer won), TICKET_GONE, KV_FORMAT_MISMATCH, ...
        """
        request = handoff_pb2.ClaimTicketRequest(
            ticket_id=ticket.ticket_id,
            engine_id=self.engine_id,
            epoch=self.epoch,
            format_fingerprint=ticket.fingerprint,
            transports=self._names,
        )
        reply = await call_unary(self.stub.Claim, request, endpoint=self.endpoint, timeout_seconds=timeout_seconds)
        claimed = ticket_from_proto(reply.ticket) if reply.HasField("ticket") else ticket
        mine = self._transport is not None and claimed.component_bytes.keys() <= {
            kind for kind, place in claimed.places.items() if place.kind == self._protocol
        }
        return Claim(
            ticket=claimed,
            claim_id=reply.claim_id,
            first_token=reply.first_token.token if reply.HasField("first_token") else -1,
            transport=self._protocol if mine else GRPC,
        )

    async def renew(self, claim: Claim, *, timeout_seconds: float = 10.0) -> bool:
        """Extends the lease; False = it is lost. Raises CallFailed."""
        request = handoff_pb2.RenewTicketsRequest(engine_id=self.engine_id, ticket_ids=[claim.ticket.ticket_id])
        reply = await call_unary(
            self.stub.RenewTickets, request, endpoint=self.endpoint, timeout_seconds=timeout_seconds
        )
        return not reply.lost

    async def read_component(self, claim: Claim, kind: int, *, timeout_seconds: float = 60.0) -> bytes:
        """All bytes of one component, each piece checked against its CRC32C and the total against the ticket.

        Raises:
            CallFailed: the source failed.
            BlockCorrupt: a piece, its place or the total length is not what the source announced; nothing was used.
        """
        request = handoff_pb2.ReadKvRequest(
            ticket_id=claim.ticket.ticket_id, claim_id=claim.claim_id, kind=common_pb2.ComponentKind.Name(kind)
        )
        expected = claim.ticket.component_bytes[kind]
        data = bytearray()
        try:
            async for piece in self.stub.ReadKv(request, timeout=timeout_seconds):
                _check_piece(piece, kind=kind, offset=len(data))
                data += piece.data
        except grpc.aio.AioRpcError as error:
            raise call_failed(self.endpoint, error) from error
        if len(data) != expected:
            raise BlockCorrupt(
                f"hand-over of {component_name(kind)}: {len(data)} bytes, ticket says {expected}; dropped"
            )
        return bytes(data)

    async def read(self, claim: Claim, kind: int) -> bytes:
        """One component by the claim's transport, or by ReadKv where that is busy. Raises as read_component."""
        if claim.transport == GRPC:
            return await self.read_component(claim, kind)
        assert self._transport is not None
        try:
            return await pull_component(
                self._transport,
                claim.ticket.places[kind],
                num_bytes=claim.ticket.component_bytes[kind],
                name=component_name(kind),
                piece_seconds=PIECE_SECONDS,
            )
        except PeerBusy:
            self.num_fallbacks += 1
            return await self.read_component(claim, kind)

    async def read_all(self, claim: Claim) -> dict[int, bytes]:
        """Every component of the ticket, by pe.v1.ComponentKind number. Raises as read_component."""
        return {kind: await self.read(claim, kind) for kind in claim.ticket.component_bytes}

    async def settle(
        self, claim: Claim, *, delivered: bool, num_bytes: int, took_seconds: float, timeout_seconds: float = 10.0
    ) -> bool:
        """Ends the hand-off. False = the lease had expired: what was read must be discarded. Raises CallFailed."""
        request = handoff_pb2.SettleRequest(
            ticket_id=claim.ticket.ticket_id,
            claim_id=claim.claim_id,
            delivered=delivered,
            bytes=num_bytes,
            took=to_duration(took_seconds),
        )
        reply = await call_unary(self.stub.Settle, request, endpoint=self.endpoint, timeout_seconds=timeout_seconds)
        return bool(reply.still_owned)

    async def abort(self, ticket: Ticket, *, reason: str, timeout_seconds: float = 10.0) -> bool:
        """Gives a ticket up; True = the source has drained it. Raises CallFailed."""
        request = handoff_pb2.AbortTicketRequest(ticket_id=ticket.ticket_id, reason=reason)
        reply = await call_unary(self.stub.Abort, request, endpoint=self.endpoint, timeout_seconds=timeout_seconds)
        return bool(reply.drained)


def _check_piece(piece: handoff_pb2.KvBytes, *, kind: int, offset: int) -> None:
    name = component_name(kind)
    if piece.kind != kind or piece.offset != offset:
        found_name = component_name(piece.kind)
        raise BlockCorrupt(
            f"hand-over of {name}: got a piece of {found_name} at {piece.offset}, expected offset {offset}; dropped"
        )
    found = crc32c.crc32c(piece.data)
    if found != piece.crc32c:
        raise BlockCorrupt(
            f"hand-over of {name}: piece of {len(piece.data)} bytes at {offset} has CRC32C {found:08x}, "
            f"announced {piece.crc32c:08x}; dropped"
        )
