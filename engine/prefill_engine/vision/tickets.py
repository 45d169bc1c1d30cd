"""Tickets: rows that wait for their caller, freed by Ack, Cancel or the end of their hold (serving.md 1.1 "who frees what").

Called by encode_queue and the service. The trap: a ticket id is a bearer secret, it never goes into logs or metrics.
"""

from collections.abc import Callable
from dataclasses import dataclass

from prefill_engine.vision.embedding_cache import EmbeddingCache, Rows


@dataclass(slots=True, eq=False, kw_only=True)
class Ticket:
    """expires, last_end: seconds; no renewal reaches beyond last_end."""

    ticket_id: bytes
    item_id: bytes
    parent_attempt_id: bytes
    rows: Rows
    expires: float
    last_end: float


class Tickets:
    """Owner of the open tickets and of their pins. clock: monotonic seconds; new_id: 16 random bytes."""

    def __init__(
        self,
        cache: EmbeddingCache,
        *,
        hold_seconds: float,
        max_hold_seconds: float,
        clock: Callable[[], float],
        new_id: Callable[[], bytes],
    ) -> None:
        self._cache = cache
        self._hold_seconds = hold_seconds
        self._max_hold_seconds = max_hold_seconds
        self._clock = clock
        self._new_id = new_id
        self._tickets: dict[bytes, Ticket] = {}
        self._by_item: dict[bytes, Ticket] = {}
        self._latest_end: float | None = None
        self.num_expired = 0

    @property
    def num_open(self) -> int:
        return len(self._tickets)

    def open(self, rows: Rows, *, item_id: bytes, parent_attempt_id: bytes, hold_seconds: float) -> Ticket:
        """Takes over one pin of the rows. hold_seconds: 0 = ours."""
        now = self._clock()
        last_end = now + self._max_hold_seconds
        ticket = Ticket(
            ticket_id=self._new_id(),
            item_id=item_id,
            parent_attempt_id=parent_attempt_id,
            rows=rows,
            expires=now,
            last_end=last_end if self._latest_end is None else min(last_end, self._latest_end),
        )
        self._hold(ticket, hold_seconds)
        self._tickets[ticket.ticket_id] = self._by_item[item_id] = ticket
        return ticket

    def find(self, ticket_id: bytes) -> Ticket | None:
        """None: unknown, acknowledged, or its hold has ended."""
        self.expire()
        return self._tickets.get(ticket_id)

    def of_item(self, item_id: bytes) -> Ticket | None:
        """The open ticket of an item."""
        self.expire()
        return self._by_item.get(item_id)

    def seconds_left(self, ticket: Ticket) -> float:
        return max(0.0, ticket.expires - self._clock())

    def renew(self, ticket_id: bytes, hold_seconds: float) -> bool:
        """False: there is no such ticket any more."""
        ticket = self.find(ticket_id)
        if ticket is not None:
            self._hold(ticket, hold_seconds)
        return ticket is not None

    def release(self, ticket_id: bytes) -> bool:
        """Ack. False: the hold had ended before."""
        self.expire()
        ticket = self._tickets.get(ticket_id)
        if ticket is not None:
            self._close(ticket)
        return ticket is not None

    def release_of(self, *, item_id: bytes, parent_attempt_id: bytes) -> int:
        """Frees the tickets of an item, or of all items of an attempt; how many."""
        ids = [ticket.ticket_id for ticket in self._tickets.values() if _belongs(ticket, item_id, parent_attempt_id)]
        for ticket_id in ids:
            self.release(ticket_id)
        return len(ids)

    def expire(self) -> int:
        """Frees what is over; how many."""
        now = self._clock()
        over = [ticket for ticket in self._tickets.values() if ticket.expires <= now]
        for ticket in over:
            self._close(ticket)
        self.num_expired += len(over)
        return len(over)

    def end_by(self, when: float) -> None:
        """A drain: nothing is held beyond `when` (C43). A later call can only shorten."""
        self._latest_end = when if self._latest_end is None else min(self._latest_end, when)
        for ticket in self._tickets.values():
            ticket.last_end = min(ticket.last_end, self._latest_end)
            ticket.expires = min(ticket.expires, ticket.last_end)

    def _close(self, ticket: Ticket) -> None:
        del self._tickets[ticket.ticket_id]
        if self._by_item.get(ticket.item_id) is ticket:
            del self._by_item[ticket.item_id]
        self._cache.unpin(ticket.rows)

    def _hold(self, ticket: Ticket, hold_seconds: float) -> None:
        ticket.expires = min(self._clock() + (hold_seconds or self._hold_seconds), ticket.last_end)


def _belongs(ticket: Ticket, item_id: bytes, parent_attempt_id: bytes) -> bool:
    if item_id and ticket.item_id == item_id:
        return True
    return bool(parent_attempt_id) and ticket.parent_attempt_id == parent_attempt_id
