"""pe.v1.HandoffSource over grpc.aio: decode peers claim, read and settle tickets. KV bytes come from the rank's data lane.

The trap: the lease is judged before every piece, so that nothing is sent of memory which the rank may have given away.
"""

import asyncio
import secrets
from collections import deque
from collections.abc import AsyncIterator, Callable

from prefill_engine.front.front import Front
from prefill_engine.front.lanes import RankLanes
from prefill_engine.front.served_model import PROTOCOL_MAX, PROTOCOL_MIN, ServedModel
from prefill_engine.front.tickets import Ticket
from prefill_engine.handoff_pieces import KEY_BYTES, ComponentKey
from prefill_engine.messages import ReadReply
from prefill_engine.rpc import common_pb2, handoff_pb2, handoff_pb2_grpc
from prefill_engine.rpc.convert import TRANSPORT, first_token_message, format_message, to_duration
from prefill_engine.rpc.convert_handoff import claimed_ticket_message
from prefill_engine.rpc.parse_handoff import check_format
from prefill_engine.rpc.status import Context, Failure, ServingFailure, abort_with, refuse
from prefill_plan.errors import PeerError

PIECE_BYTES = 1 << 20
# Pieces asked of the rank ahead of the one being sent, so that the lane's round trip is hidden.
_PIECES_AHEAD = 4
_RENEWALS_PER_LEASE = 3


class HandoffSourceService(handoff_pb2_grpc.HandoffSourceServicer):
    """Servicer of one engine. new_id: 16 random bytes."""

    def __init__(self, front: Front, *, ticket_seconds: float, new_id: Callable[[], bytes]) -> None:
        self._front = front
        self._ticket_seconds = ticket_seconds
        self._new_id = new_id

    async def Hello(self, request: handoff_pb2.HelloRequest, context: Context) -> handoff_pb2.HelloResponse:
        """Agrees on protocol, format and transport."""
        try:
            served = self._front.served
            if request.protocol_max < PROTOCOL_MIN:
                refuse("PROTOCOL_TOO_OLD", f"protocol up to {request.protocol_max}, this engine needs {PROTOCOL_MIN}")
            ours = (served.data_transport, TRANSPORT) if served.data_transport else (TRANSPORT,)
            common = [name for name in ours if name in (request.transports or (TRANSPORT,))]
            if not common:
                refuse("TRANSPORT_UNSUPPORTED", f"no common transport; this engine serves {', '.join(ours)}")
            readable = [peer.fingerprint for peer in request.readable]
            if readable and served.format.fingerprint not in readable:
                check_format(readable[0], served)
        except ServingFailure as error:
            await abort_with(context, error.failure)
        return handoff_pb2.HelloResponse(
            protocol=min(request.protocol_max, PROTOCOL_MAX),
            engine_id=served.identity.engine_id,
            epoch=served.identity.epoch,
            chosen=format_message(served.format),
            transport=common[0],
            renew_every=to_duration(self._ticket_seconds / _RENEWALS_PER_LEASE),
        )

    async def Claim(self, request: handoff_pb2.ClaimTicketRequest, context: Context) -> handoff_pb2.ClaimTicketResponse:
        """Exactly one claimant wins; it gets the ticket again, the first token and its claim id."""
        now = self._front.clock()
        lifecycle = self._front.lifecycle
        try:
            served = self._front.served
            check_format(request.format_fingerprint, served)
            ticket = lifecycle.tickets.claim(
                request.ticket_id,
                engine_id=request.engine_id,
                epoch=request.epoch,
                claim_id=self._new_id(),
                now=now,
            )
            lifecycle.handoff_changed(ticket)
            if served.data_transport and served.data_transport in request.transports:
                await self._expose(ticket, served)
        except ServingFailure as error:
            await abort_with(context, error.failure)
        first = ticket.first_token
        return handoff_pb2.ClaimTicketResponse(
            ticket=claimed_ticket_message(ticket, now=now, served=served),
            first_token=None if first is None else first_token_message(first),
            claim_id=ticket.claim_id,
        )

    async def _expose(self, ticket: Ticket, served: ServedModel) -> None:
        """Keys for the data transport, once per claim; they end with the attempt on its rank."""
        if ticket.keys:
            return
        keys = tuple(ComponentKey(kind=region.kind, key=secrets.token_bytes(KEY_BYTES)) for region in ticket.regions)
        lanes = self._front.lanes[ticket.rank]
        reply = await _reply_of(asyncio.ensure_future(lanes.expose(ticket.attempt_id, keys)), lanes)
        if reply.error:
            refuse("TICKET_GONE", f"the hand-off ended while it was claimed ({ticket.state.value})")
        if not ticket.keys:
            ticket.keys = keys
            ticket.transport = served.data_transport

    async def RenewTickets(
        self, request: handoff_pb2.RenewTicketsRequest, context: Context
    ) -> handoff_pb2.RenewTicketsResponse:
        """Extends leases; answers those that are lost."""
        try:
            epoch = self._front.served.identity.epoch
        except ServingFailure as error:
            await abort_with(context, error.failure)
        tickets = self._front.lifecycle.tickets
        lost = tickets.renew(request.ticket_ids, engine_id=request.engine_id, now=self._front.clock())
        return handoff_pb2.RenewTicketsResponse(lost=lost, source_epoch=epoch)

    async def Settle(self, request: handoff_pb2.SettleRequest, _context: Context) -> handoff_pb2.SettleResponse:
        """Ends the hand-off. still_owned false: the lease had expired, what was read must be discarded."""
        lifecycle = self._front.lifecycle
        ticket = lifecycle.tickets.find(request.ticket_id)
        was_open = ticket is not None and ticket.is_open
        owned = lifecycle.tickets.settle(
            request.ticket_id, claim_id=request.claim_id, delivered=request.delivered, now=self._front.clock()
        )
        if ticket is not None and was_open and not ticket.is_open:
            if owned:
                # Bytes that went over the data transport are known to their reader only.
                ticket.bytes_read = max(ticket.bytes_read, min(request.bytes, ticket.num_bytes))
            lifecycle.handoff_changed(ticket)
        return handoff_pb2.SettleResponse(still_owned=owned)

    async def Abort(
        self, request: handoff_pb2.AbortTicketRequest, _context: Context
    ) -> handoff_pb2.AbortTicketResponse:
        """Gives a ticket up; drained: no read of it is in flight. Repeat until drained (serving.md 1.1, abort ack)."""
        lifecycle = self._front.lifecycle
        known = lifecycle.tickets.find(request.ticket_id)
        was_open = known is not None and known.is_open
        ticket = lifecycle.tickets.abort(request.ticket_id, now=self._front.clock())
        if ticket is not None and was_open:
            lifecycle.handoff_changed(ticket)
        drained = ticket is None or ticket.reads_in_flight == 0
        return handoff_pb2.AbortTicketResponse(drained=drained, generation=request.generation, known=ticket is not None)

    async def ReadKv(self, request: handoff_pb2.ReadKvRequest, context: Context) -> AsyncIterator[handoff_pb2.KvBytes]:
        """Bytes of one component from `offset` to its end, in pieces of 1 MiB, each with its CRC32C."""
        lifecycle = self._front.lifecycle
        try:
            ticket = lifecycle.tickets.begin_read(request.ticket_id, claim_id=request.claim_id, now=self._front.clock())
        except ServingFailure as error:
            await abort_with(context, error.failure)
        try:
            lifecycle.handoff_changed(ticket)
            async for piece in self._pieces(ticket, kind=request.kind, offset=request.offset):
                yield piece
        except ServingFailure as error:
            await abort_with(context, error.failure)
        finally:
            lifecycle.tickets.end_read(ticket)

    async def _pieces(self, ticket: Ticket, *, kind: int, offset: int) -> AsyncIterator[handoff_pb2.KvBytes]:
        total = ticket.region_bytes(kind)
        if total is None or offset > total:
            what = "no such component" if total is None else f"{total} bytes"
            refuse("KV_FORMAT_MISMATCH", f"read of component {kind} at {offset}: the ticket has {what}")
        name = common_pb2.ComponentKind.Name(kind)
        if offset == total:
            yield handoff_pb2.KvBytes(kind=name, offset=offset, last=True)
            return
        lanes = self._front.lanes[ticket.rank]
        starts = iter(range(offset, total, PIECE_BYTES))
        reads: deque[asyncio.Task[ReadReply]] = deque()
        label = name.removeprefix("COMPONENT_KIND_").lower()

        def ask_next() -> None:
            start = next(starts, None)
            if start is not None:
                length = min(PIECE_BYTES, total - start)
                read = lanes.read(ticket.attempt_id, kind=kind, offset=start, length=length)
                reads.append(asyncio.create_task(read))

        try:
            for _ in range(_PIECES_AHEAD):
                ask_next()
            at = offset
            while reads:
                reply = await _reply_of(reads.popleft(), lanes)
                self._check_lease(ticket)
                if reply.error:
                    text = "the rank could not read the hand-over"
                    raise ServingFailure(
                        Failure(reason="INVARIANT", phase="HANDOFF", public_message=text, operator_detail=reply.error)
                    )
                ask_next()
                ticket.bytes_read += len(reply.data)
                self._front.telemetry.bytes_sent(label, len(reply.data))
                end = at + len(reply.data)
                yield handoff_pb2.KvBytes(kind=name, offset=at, data=reply.data, last=end == total, crc32c=reply.crc32c)
                at = end
        finally:
            for read in reads:
                read.cancel()

    def _check_lease(self, ticket: Ticket) -> None:
        if not ticket.is_open or self._front.clock() >= ticket.expires:
            refuse("TICKET_GONE", f"the hand-off ended while it was read ({ticket.state.value}); discard what was read")


async def _reply_of(read: "asyncio.Task[ReadReply]", lanes: RankLanes) -> ReadReply:
    try:
        return await read
    except PeerError as error:
        text = f"rank {lanes.rank} of this engine died while its KV was read"
        raise ServingFailure(Failure(reason="RANK_LOST", phase="HANDOFF", public_message=text)) from error
