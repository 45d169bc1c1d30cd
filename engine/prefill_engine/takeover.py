"""Follows one attempt to its end and, while its stream runs, takes the hand-off over as a decode peer would. No torch.

Used by `prefill-engine request`, the demo and the end-to-end tests. The trap: bytes that were read are the peer's only if
`settle` answered that the lease still held; bytes that were pushed only if the peer itself has accepted them.
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from prefill_engine.client import PrefillAttempt
from prefill_engine.client_ticket import Ticket
from prefill_engine.handoff_client import GRPC, Claim, HandoffClient
from prefill_engine.handoff_sink import DecodeSink
from prefill_engine.kv.transport.contract import Transport
from prefill_engine.rpc import common_pb2
from prefill_engine.stored_blocks import StoredBlocks, read_stored_blocks
from prefill_engine.timeline import Completed, TicketOffered
from prefill_plan.errors import CallFailed, KvError

_BLOCK_KV = common_pb2.COMPONENT_KIND_BLOCK_KV


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSide:
    """What the decode peer brings along. transport: None = ReadKv only. required: the transport must be used. store: where its
    node finds stored blocks, with payload_bytes each; for store-only hand-overs."""

    transport: Transport | None = None
    required: bool = False
    store: StoredBlocks | None = None
    payload_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenOver:
    """A hand-over that is ours. components: by pe.v1.ComponentKind number, blocks from the store included. num_bytes: that came
    from the engine; stored_bytes: from the store. took_seconds: from claim (push: from the ticket) to the end. num_fallbacks: of
    the components, that came by gRPC because the transport was busy.
    """

    ticket: Ticket
    components: dict[int, bytes]
    first_token: int
    num_bytes: int
    took_seconds: float
    transport: str = GRPC
    stored_bytes: int = 0
    num_fallbacks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """taken_over: None if no ticket was asked for."""

    completed: Completed
    taken_over: TakenOver | None


async def take_over(ticket: Ticket, *, endpoint: str, side: DecodeSide = DecodeSide()) -> TakenOver:
    """Claims, reads every component (and the blocks in the store), settles; the lease is renewed meanwhile.

    Raises:
        CallFailed: another peer won, the source failed, or the lease ran out before settling.
        KvError: bytes arrived damaged, or the store lacks a block; the ticket is settled as failed.
    """
    start = time.monotonic()
    peer = f"probe-{secrets.token_hex(4)}"
    async with HandoffClient(endpoint, engine_id=peer, epoch=1, transport=side.transport) as client:
        await client.hello()
        claim = await client.claim(ticket)
        try:
            async with _renewing(client, claim):
                if side.required and claim.transport == GRPC:
                    raise CallFailed(
                        f"{endpoint} does not hand over by {side.transport.kind if side.transport else 'any transport'}",
                        status="FAILED_PRECONDITION",
                        reason="TRANSPORT_UNSUPPORTED",
                    )
                components = await client.read_all(claim)
                num_bytes = sum(len(data) for data in components.values())
                stored = await _read_store(claim.ticket, side)
        except (KvError, CallFailed):
            await client.settle(claim, delivered=False, num_bytes=0, took_seconds=time.monotonic() - start)
            raise
        took_seconds = time.monotonic() - start
        if not await client.settle(claim, delivered=True, num_bytes=num_bytes, took_seconds=took_seconds):
            raise CallFailed(
                f"{endpoint}: the lease of {ticket.lease_seconds:.0f} s ran out while {num_bytes:,} bytes were read "
                f"({took_seconds:.1f} s); they are discarded",
                status="OK",
                reason="TICKET_GONE",
            )
    if stored:
        components[_BLOCK_KV] = stored + components.get(_BLOCK_KV, b"")
    return TakenOver(
        ticket=claim.ticket,
        components=components,
        first_token=claim.first_token,
        num_bytes=num_bytes,
        took_seconds=took_seconds,
        transport=claim.transport,
        stored_bytes=len(stored),
        num_fallbacks=client.num_fallbacks,
    )


async def follow(attempt: PrefillAttempt, *, endpoint: str, side: DecodeSide = DecodeSide()) -> Outcome:
    """Iterates the attempt; a ticket is taken over at once, from its source or, if it names none, from `endpoint`.

    Raises:
        CallFailed, KvError: the attempt or the take-over failed; attempt.events holds what came before.
    """
    transfer: asyncio.Task[TakenOver] | None = None
    completed: Completed | None = None
    try:
        async for event in attempt:
            if isinstance(event.body, TicketOffered) and attempt.ticket is not None:
                source = attempt.ticket.source_endpoint or endpoint
                transfer = asyncio.create_task(take_over(attempt.ticket, endpoint=source, side=side))
            elif isinstance(event.body, Completed):
                completed = event.body
        taken_over = await transfer if transfer is not None else None
    finally:
        if transfer is not None:
            transfer.cancel()
            await asyncio.gather(transfer, return_exceptions=True)
    assert completed is not None
    return Outcome(completed=completed, taken_over=taken_over)


async def follow_push(
    attempt: PrefillAttempt, sink: DecodeSink, *, early_send: bool = True, ttl_seconds: float = 30.0
) -> Outcome:
    """Reserves memory at our own decode peer, has the engine push into it, and takes what the peer has accepted.

    Raises:
        CallFailed: no room, the attempt failed, or the push was not accepted.
    """
    target = await sink.reserve(attempt.key, kv_tokens=attempt.num_tokens, ttl_seconds=ttl_seconds)
    if target is None:
        raise CallFailed(
            f"the decode peer has no room for {attempt.num_tokens} tokens ({sink.grants.free_bytes:,} bytes are free)",
            status="RESOURCE_EXHAUSTED",
            reason="KV_MEMORY",
        )
    attempt.push_to(target, endpoint=sink.endpoint, engine_id=sink.engine_id, early_send=early_send)
    offered = time.monotonic()
    completed: Completed | None = None
    async for event in attempt:
        if isinstance(event.body, TicketOffered):
            offered = time.monotonic()
        elif isinstance(event.body, Completed):
            completed = event.body
    assert completed is not None
    accepted = await sink.take(target.grant_id)
    if accepted is None or attempt.ticket is None:
        state = completed.handoff.state if completed.handoff is not None else "none"
        raise CallFailed(
            f"the push ended as {state}; the decode peer did not accept it", status="OK", reason="DECODE_ABORTED"
        )
    components, first_token = accepted
    taken = TakenOver(
        ticket=attempt.ticket,
        components=components,
        first_token=first_token,
        num_bytes=sum(map(len, components.values())),
        took_seconds=time.monotonic() - offered,
        transport=sink.transport_kind,
    )
    return Outcome(completed=completed, taken_over=taken)


async def _read_store(ticket: Ticket, side: DecodeSide) -> bytes:
    keys = ticket.stored_block_keys
    if not keys:
        return b""
    if side.store is None:
        raise KvError(f"store-only hand-over of {len(keys)} blocks, and no block store was given to read them from")
    return await asyncio.to_thread(read_stored_blocks, side.store, keys, payload_bytes=side.payload_bytes)


@contextlib.asynccontextmanager
async def _renewing(client: HandoffClient, claim: Claim) -> AsyncIterator[None]:
    """Keeps the lease while a read takes longer than it. A lost lease is found out by settling."""

    async def renew() -> None:
        while client.renew_seconds > 0:
            await asyncio.sleep(client.renew_seconds)
            with contextlib.suppress(CallFailed):
                if not await client.renew(claim):
                    return

    task = asyncio.create_task(renew())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
