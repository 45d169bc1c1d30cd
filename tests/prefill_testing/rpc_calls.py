"""Short forms of calls on an engine rig: streams read to their end, failures as plain values."""

from collections.abc import Awaitable
from typing import Any

import grpc
import grpc.aio

from prefill_engine.rpc import handoff_pb2, prefill_pb2
from prefill_engine.rpc.status import DETAILS_KEY, Failure, decode_failure
from prefill_testing.engine_rig import Rig


def failure_of(error: grpc.aio.AioRpcError) -> tuple[grpc.StatusCode, Failure]:
    """Code and ServingError of a failed call; exactly one detail must have come."""
    details = [value for key, value in error.trailing_metadata() or () if key == DETAILS_KEY]
    assert len(details) == 1, error
    assert len(details[0]) < 2048
    failure = decode_failure(details[0])
    assert failure is not None
    assert failure.code is error.code()
    return error.code(), failure


async def refused(call: Awaitable[Any]) -> Failure:
    """The failure of a unary call."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return failure_of(error)[1]
    raise AssertionError("the call did not fail")


async def read_stream(call: Any) -> tuple[list[prefill_pb2.PrefillEvent], Failure | None]:
    """All events of a stream and its failure, None when it ended well."""
    events = []
    try:
        async for event in call:
            events.append(event)
    except grpc.aio.AioRpcError as error:
        return events, failure_of(error)[1]
    return events, None


async def next_of(call: Any, kind: str) -> prefill_pb2.PrefillEvent:
    """Reads until an event of a kind comes."""
    async for event in call:
        if event.WhichOneof("body") == kind:
            return event
    raise AssertionError(f"the stream ended without {kind}")


async def claim(rig: Rig, ticket: prefill_pb2.Ticket, *, engine_id: str = "d1", epoch: int = 1) -> Any:
    request = handoff_pb2.ClaimTicketRequest(ticket_id=ticket.ticket_id, engine_id=engine_id, epoch=epoch)
    return await rig.source.Claim(request)


async def settle(rig: Rig, ticket: prefill_pb2.Ticket, claim_id: bytes, *, delivered: bool = True) -> bool:
    request = handoff_pb2.SettleRequest(ticket_id=ticket.ticket_id, claim_id=claim_id, delivered=delivered)
    return bool((await rig.source.Settle(request)).still_owned)


async def read_kv(rig: Rig, ticket: prefill_pb2.Ticket, claim_id: bytes, kind: int, *, offset: int = 0) -> bytes:
    request = handoff_pb2.ReadKvRequest(ticket_id=ticket.ticket_id, claim_id=claim_id, kind=kind, offset=offset)
    data = b""
    async for piece in rig.source.ReadKv(request):
        assert piece.offset == offset + len(data)
        data += piece.data
    return data
