"""A small gRPC engine and hand-off source on loopback that play a script; for tests of clients."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import crc32c
import grpc
import grpc.aio
from google.protobuf.duration_pb2 import Duration

from prefill_engine.client_ticket import Ticket
from prefill_engine.rpc import common_pb2, handoff_pb2, handoff_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from prefill_engine.rpc.status import Failure, abort_with

T = TypeVar("T")
SECRET = b"s" * 16
ROW = bytes(range(200))
USAGE = prefill_pb2.Usage(prompt_tokens=3, cached_tokens=0, computed_tokens=3)


def region(kind: int, num_bytes: int) -> prefill_pb2.ComponentRegions:
    return prefill_pb2.ComponentRegions(
        kind=common_pb2.ComponentKind.Name(kind),
        region=common_pb2.RegionRef(extents=[common_pb2.Extent(length=num_bytes)]),
    )


def ticket_message() -> prefill_pb2.Ticket:
    return prefill_pb2.Ticket(
        ticket_id=SECRET,
        lease=common_pb2.Lease(ttl=Duration(seconds=30)),
        format=common_pb2.KvFormat(
            fingerprint=b"f" * 32,
            components=[
                common_pb2.ComponentFormat(
                    kind=common_pb2.COMPONENT_KIND_BLOCK_KV, layout=common_pb2.RECORD_LAYOUT_FP4_ROW
                ),
                common_pb2.ComponentFormat(kind=common_pb2.COMPONENT_KIND_SWA_ENCODER, positions=134),
            ],
        ),
        kv_tokens=3,
        regions=[region(common_pb2.COMPONENT_KIND_REQUEST_ROW, len(ROW))],
        source_endpoint="127.0.0.1:1",
    )


class Engine(prefill_pb2_grpc.PrefillEngineServicer):
    """Plays a script: events to send, then a failure or none."""

    def __init__(
        self, events: list[prefill_pb2.PrefillEvent], failure: Failure | grpc.StatusCode | None = None
    ) -> None:
        self.events = events
        self.failure = failure
        self.requests: list[prefill_pb2.PrefillRequest] = []

    async def Prefill(
        self, request: prefill_pb2.PrefillRequest, context: Any
    ) -> AsyncIterator[prefill_pb2.PrefillEvent]:
        self.requests.append(request)
        for event in self.events:
            yield event
        if isinstance(self.failure, Failure):
            await abort_with(context, self.failure)
        elif self.failure is not None:
            await context.abort(self.failure, "from the transport")

    async def Cancel(self, request: prefill_pb2.CancelRequest, context: Any) -> prefill_pb2.CancelResponse:
        del context
        known = request.attempt_id == SECRET
        result = prefill_pb2.CancelResponse.CANCELLED if known else prefill_pb2.CancelResponse.UNKNOWN
        return prefill_pb2.CancelResponse(result=result, drained=request.wait_drained)


class Source(handoff_pb2_grpc.HandoffSourceServicer):
    """Hands ROW over in the given pieces."""

    def __init__(
        self, pieces: list[handoff_pb2.KvBytes], failure: Failure | None = None, *, still_owned: bool = True
    ) -> None:
        self.pieces = pieces
        self.failure = failure
        self.still_owned = still_owned
        self.settled: list[handoff_pb2.SettleRequest] = []

    async def Hello(self, request: handoff_pb2.HelloRequest, context: Any) -> handoff_pb2.HelloResponse:
        del context
        return handoff_pb2.HelloResponse(protocol=request.protocol_max, epoch=77)

    async def Claim(self, request: handoff_pb2.ClaimTicketRequest, context: Any) -> handoff_pb2.ClaimTicketResponse:
        if self.failure is not None:
            await abort_with(context, self.failure)
        return handoff_pb2.ClaimTicketResponse(
            ticket=ticket_message(), first_token=prefill_pb2.FirstToken(token=9), claim_id=request.ticket_id[::-1]
        )

    async def ReadKv(self, request: handoff_pb2.ReadKvRequest, context: Any) -> AsyncIterator[handoff_pb2.KvBytes]:
        del request, context
        for piece in self.pieces:
            yield piece

    async def Settle(self, request: handoff_pb2.SettleRequest, context: Any) -> handoff_pb2.SettleResponse:
        del context
        self.settled.append(request)
        return handoff_pb2.SettleResponse(still_owned=self.still_owned)

    async def Abort(self, request: handoff_pb2.AbortTicketRequest, context: Any) -> handoff_pb2.AbortTicketResponse:
        del request, context
        return handoff_pb2.AbortTicketResponse(drained=True, known=True)


def piece(
    data: bytes, offset: int, *, crc: int | None = None, kind: int = common_pb2.COMPONENT_KIND_REQUEST_ROW
) -> handoff_pb2.KvBytes:
    return handoff_pb2.KvBytes(
        kind=common_pb2.ComponentKind.Name(kind),
        offset=offset,
        data=data,
        crc32c=crc32c.crc32c(data) if crc is None else crc,
    )


def call(scenario: Callable[[str], Awaitable[T]], *, engine: Engine | None = None, source: Source | None = None) -> T:
    """Runs a scenario against a server on a free port."""

    async def run() -> T:
        server = grpc.aio.server()
        prefill_pb2_grpc.add_PrefillEngineServicer_to_server(engine or Engine([]), server)  # type: ignore[no-untyped-call]
        handoff_pb2_grpc.add_HandoffSourceServicer_to_server(source or Source([]), server)  # type: ignore[no-untyped-call]
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            return await scenario(f"127.0.0.1:{port}")
        finally:
            await server.stop(None)

    return asyncio.run(run())


TICKET = Ticket(
    ticket_id=SECRET,
    fingerprint=b"f" * 32,
    kv_tokens=3,
    lease_seconds=30.0,
    source_endpoint="",
    component_bytes={common_pb2.COMPONENT_KIND_REQUEST_ROW: len(ROW)},
    record_format="fp4",
    window_rows=134,
)
