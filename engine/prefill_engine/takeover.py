"""Follows one attempt to its end and, while its stream runs, takes the hand-off over as a decode peer would. No torch.

Used by `prefill-engine request`, the demo and the end-to-end tests. The trap: bytes that were read are the peer's only if
`settle` answers that the lease still held.
"""

import asyncio
import secrets
import time
from dataclasses import dataclass

from prefill_engine.client import PrefillAttempt, Ticket
from prefill_engine.handoff_client import HandoffClient
from prefill_engine.timeline import Completed, TicketOffered
from prefill_plan.errors import BlockCorrupt, CallFailed


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenOver:
    """A hand-over that is ours. components: by pe.v1.ComponentKind number. took_seconds: from claim to settle."""

    ticket: Ticket
    components: dict[int, bytes]
    first_token: int
    num_bytes: int
    took_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """taken_over: None if no ticket was asked for."""

    completed: Completed
    taken_over: TakenOver | None


async def take_over(ticket: Ticket, *, endpoint: str) -> TakenOver:
    """Claims, reads every component, settles.

    Raises:
        CallFailed: another peer won, the source failed, or the lease ran out before settling.
        BlockCorrupt: bytes arrived damaged; the ticket is settled as failed.
    """
    start = time.monotonic()
    peer = f"probe-{secrets.token_hex(4)}"
    async with HandoffClient(endpoint, engine_id=peer, epoch=1) as client:
        await client.hello()
        claim = await client.claim(ticket)
        try:
            components = await client.read_all(claim)
        except (BlockCorrupt, CallFailed):
            await client.settle(claim, delivered=False, num_bytes=0, took_seconds=time.monotonic() - start)
            raise
        num_bytes = sum(len(data) for data in components.values())
        took_seconds = time.monotonic() - start
        if not await client.settle(claim, delivered=True, num_bytes=num_bytes, took_seconds=took_seconds):
            raise CallFailed(
                f"{endpoint}: the lease of {ticket.lease_seconds:.0f} s ran out while {num_bytes:,} bytes were read "
                f"({took_seconds:.1f} s); they are discarded",
                status="OK",
                reason="TICKET_GONE",
            )
    return TakenOver(
        ticket=claim.ticket,
        components=components,
        first_token=claim.first_token,
        num_bytes=num_bytes,
        took_seconds=took_seconds,
    )


async def follow(attempt: PrefillAttempt, *, endpoint: str) -> Outcome:
    """Iterates the attempt; a ticket is taken over at once, from its source or, if it names none, from `endpoint`.

    Raises:
        CallFailed, BlockCorrupt: the attempt or the take-over failed; attempt.events holds what came before.
    """
    transfer: asyncio.Task[TakenOver] | None = None
    completed: Completed | None = None
    try:
        async for event in attempt:
            if isinstance(event.body, TicketOffered) and attempt.ticket is not None:
                source = attempt.ticket.source_endpoint or endpoint
                transfer = asyncio.create_task(take_over(attempt.ticket, endpoint=source))
            elif isinstance(event.body, Completed):
                completed = event.body
        taken_over = await transfer if transfer is not None else None
    finally:
        if transfer is not None:
            transfer.cancel()
            await asyncio.gather(transfer, return_exceptions=True)
    assert completed is not None
    return Outcome(completed=completed, taken_over=taken_over)
