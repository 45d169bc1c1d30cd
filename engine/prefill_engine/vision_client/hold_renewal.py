"""Holds of tickets that living attempts came with: renewed until their rows are fetched or the attempt ends (serving.md 4.5).

Owner of which tickets those are; ImageDesk adds and drops them, VisionSide runs the task. Rows that we have encoded ourselves
are pulled at once and need no renewal. The trap: a hold that is lost is not an error here. Whether its rows are needed at all is
the rank's to say, and then the fetch ends with EMBEDDING_GONE.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable

import grpc.aio

from prefill_engine.rpc import vision_pb2
from prefill_engine.vision_client.encoder_set import EncoderSet
from prefill_engine.vision_client.image_source import TicketSource

logger = logging.getLogger(__name__)

RENEW_SECONDS = 10.0  # serving.md 1.1; a hold lasts 60 s
_CALL_SECONDS = 2.0


class HoldRenewal:
    """Run `run` as a task. clock: monotonic seconds."""

    def __init__(self, encoders: EncoderSet, *, clock: Callable[[], float]) -> None:
        self._encoders = encoders
        self._clock = clock
        self._held: dict[bytes, TicketSource] = {}
        self._renew_at: dict[bytes, float] = {}
        self._added = asyncio.Event()

    @property
    def num_held(self) -> int:
        return len(self._held)

    def add(self, tickets: Iterable[TicketSource]) -> None:
        """Renewed at once, since nobody knows how old they are, and again and again."""
        for ticket in tickets:
            self._held[ticket.ticket_id] = ticket
            self._renew_at[ticket.ticket_id] = self._clock()
            self._added.set()

    def drop(self, ticket: TicketSource) -> None:
        """Fetched, given back, or its attempt has ended."""
        self._held.pop(ticket.ticket_id, None)
        self._renew_at.pop(ticket.ticket_id, None)

    async def run(self) -> None:
        """Renews what is due, without end."""
        while True:
            self._added.clear()
            due = self._take_due(self._clock())
            await asyncio.gather(*(self._renew(address, ids) for address, ids in due.items()))
            wait = min(self._renew_at.values(), default=self._clock() + RENEW_SECONDS) - self._clock()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, wait)):
                    await self._added.wait()

    def _take_due(self, now: float) -> dict[str, list[bytes]]:
        """Address -> ids that are to be renewed now; they are due again a period later, whatever comes of it."""
        due: dict[str, list[bytes]] = {}
        for ticket_id, at in self._renew_at.items():
            if at <= now:
                due.setdefault(self._held[ticket_id].address, []).append(ticket_id)
                self._renew_at[ticket_id] = now + RENEW_SECONDS
        return due

    async def _renew(self, address: str, ticket_ids: list[bytes]) -> None:
        peer = self._encoders.peer(address)
        if peer is None:
            return
        request = vision_pb2.RenewHoldRequest(ticket_ids=ticket_ids)
        try:
            reply = await peer.stub.Renew(request, timeout=_CALL_SECONDS)
        except grpc.aio.AioRpcError as error:
            extra = {"encoder": address, "holds": len(ticket_ids), "detail": f"{error.code().name}: {error.details()}"}
            logger.warning("holds were not renewed", extra=extra)
            return
        lost = [self._held[ticket_id] for ticket_id in reply.lost if ticket_id in self._held]
        for ticket in lost:
            self.drop(ticket)
        if lost:
            logger.warning("holds are gone", extra={"encoder": address, "holds": len(lost)})
