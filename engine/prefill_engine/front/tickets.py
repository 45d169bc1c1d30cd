"""Hand-off tickets of this engine: who may read an attempt's KV, and until when (serving.md 1.1-1.2, C7, C41, C45).

States OFFERED -> CLAIMED -> MOVING -> DELIVERED | ABORTED | EXPIRED; terminal states are sticky. The source's clock alone judges
a lease: a receiver that finds still_owned false must discard what it read. A pushed ticket begins MOVING and can't be claimed:
its peer is the one that granted memory (grants.py). Plain state, no I/O: time comes in with each call.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from prefill_engine.front.events import FirstToken, HandoffState, TicketOffer
from prefill_engine.handoff_pieces import ComponentKey
from prefill_engine.messages import Region
from prefill_engine.rpc.status import Failure, ServingFailure


class TicketState(StrEnum):
    """Names of pe.v1.HandoffState.S."""

    OFFERED = "OFFERED"
    CLAIMED = "CLAIMED"
    MOVING = "MOVING"
    DELIVERED = "DELIVERED"
    ABORTED = "ABORTED"
    EXPIRED = "EXPIRED"


_OPEN = (TicketState.OFFERED, TicketState.CLAIMED, TicketState.MOVING)


@dataclass(slots=True)
class Ticket:
    """One ticket. Times are monotonic seconds. claimant: (engine_id, epoch) of the decode peer that won, or was offered a push.

    mode: as PrefillCall. transport: "grpc", or what the data transport that the peer uses is. keys: of the components on it.
    stored_block_keys: blocks that the peer reads from the store.
    """

    ticket_id: bytes
    lease_id: bytes
    fence: int
    attempt_id: bytes
    rank: int
    kv_tokens: int
    regions: tuple[Region, ...]
    first_token: FirstToken | None
    mode: str
    stored_block_keys: bytes
    ttl_seconds: float
    created: float
    expires: float
    state: TicketState = TicketState.OFFERED
    claim_id: bytes = b""
    claimant: tuple[str, int] | None = None
    claimed_at: float = 0.0
    bytes_read: int = 0
    reads_in_flight: int = 0
    transport: str = "grpc"
    keys: tuple[ComponentKey, ...] = ()
    ended: float = field(default=0.0)

    @property
    def is_open(self) -> bool:
        return self.state in _OPEN

    @property
    def num_bytes(self) -> int:
        return sum(region.num_bytes for region in self.regions)

    def region_bytes(self, kind: int) -> int | None:
        """Length of a component; None if the hand-over has none of that kind."""
        return next((region.num_bytes for region in self.regions if region.kind == kind), None)

    def offer(self, now: float) -> TicketOffer:
        return TicketOffer(
            ticket_id=self.ticket_id,
            lease_id=self.lease_id,
            fence=self.fence,
            ttl_seconds=max(0.0, self.expires - now),
            kv_tokens=self.kv_tokens,
            regions=self.regions,
            mode=self.mode,
        )

    def handoff_state(self) -> HandoffState:
        return HandoffState(state=self.state.value, bytes_done=self.bytes_read, bytes_total=self.num_bytes)


def _gone(detail: str) -> ServingFailure:
    return ServingFailure(Failure(reason="TICKET_GONE", phase="HANDOFF", public_message=detail))


class Tickets:
    """Owner of all tickets. keep_seconds: how long an ended ticket is remembered, so that late messages find it ended."""

    def __init__(self, *, ttl_seconds: float, max_seconds: float, keep_seconds: float) -> None:
        self._ttl = ttl_seconds
        self._max = max_seconds
        self._keep = keep_seconds
        self._by_id: dict[bytes, Ticket] = {}
        self._fence = 0
        self._cap = float("inf")

    def offer(
        self,
        *,
        ids: tuple[bytes, bytes],
        attempt_id: bytes,
        rank: int,
        kv_tokens: int,
        regions: tuple[Region, ...],
        first_token: FirstToken | None,
        ttl_seconds: float | None,
        now: float,
        mode: str = "pull",
        stored_block_keys: bytes = b"",
    ) -> Ticket:
        """A new ticket. ids: ticket id and lease id, 16 random bytes each. ttl_seconds None = the configured one."""
        ttl = min(self._ttl if ttl_seconds is None else ttl_seconds, self._max)
        self._fence += 1
        ticket = Ticket(
            ticket_id=ids[0],
            lease_id=ids[1],
            fence=self._fence,
            attempt_id=attempt_id,
            rank=rank,
            kv_tokens=kv_tokens,
            regions=regions,
            first_token=first_token,
            mode=mode,
            stored_block_keys=stored_block_keys,
            state=TicketState.MOVING if mode == "push" else TicketState.OFFERED,
            ttl_seconds=ttl,
            created=now,
            expires=min(now + ttl, self._cap),
        )
        self._by_id[ticket.ticket_id] = ticket
        return ticket

    def find(self, ticket_id: bytes) -> Ticket | None:
        """Also an ended one, while it is remembered."""
        return self._by_id.get(ticket_id)

    def open_tickets(self) -> list[Ticket]:
        return [ticket for ticket in self._by_id.values() if ticket.is_open]

    @property
    def num_reads(self) -> int:
        """Reads in flight, of ended tickets too."""
        return sum(ticket.reads_in_flight for ticket in self._by_id.values())

    def claim(self, ticket_id: bytes, *, engine_id: str, epoch: int, claim_id: bytes, now: float) -> Ticket:
        """Exactly one claimant wins; the same engine_id and epoch gets the same claim again. A claim renews the lease.

        Raises:
            ServingFailure: TICKET_GONE (unknown or ended), TICKET_CLAIMED (another peer was first).
        """
        ticket = self._by_id.get(ticket_id)
        if ticket is None or not ticket.is_open or now >= ticket.expires:
            raise _gone("the ticket is unknown, expired or ended; nothing was handed over")
        if ticket.mode != "push" and ticket.claimant is None:
            ticket.claimant = (engine_id, epoch)
            ticket.claim_id = claim_id
            ticket.claimed_at = now
            ticket.state = TicketState.CLAIMED
            self._extend(ticket, now)
        elif ticket.claimant != (engine_id, epoch):
            raise ServingFailure(
                Failure(
                    reason="TICKET_CLAIMED", phase="HANDOFF", public_message="another decode engine holds this ticket"
                )
            )
        return ticket

    def renew(self, ticket_ids: Iterable[bytes], *, engine_id: str, now: float) -> tuple[bytes, ...]:
        """Extends leases by their TTL, never past their total life or the drain's end. Returns the ids that are lost."""
        lost = []
        for ticket_id in ticket_ids:
            ticket = self._by_id.get(ticket_id)
            foreign = ticket is not None and ticket.claimant is not None and ticket.claimant[0] != engine_id
            if ticket is None or not ticket.is_open or now >= ticket.expires or foreign:
                lost.append(ticket_id)
            else:
                self._extend(ticket, now)
        return tuple(lost)

    def begin_read(self, ticket_id: bytes, *, claim_id: bytes, now: float) -> Ticket:
        """The claimant reads one component; `end_read` must follow.

        Raises:
            ServingFailure: TICKET_GONE, or TICKET_CLAIMED if the claim is not this reader's.
        """
        ticket = self._by_id.get(ticket_id)
        if ticket is None or not ticket.is_open or now >= ticket.expires:
            raise _gone("the ticket is unknown, expired or ended; nothing was read")
        if not ticket.claim_id or ticket.claim_id != claim_id:
            raise ServingFailure(
                Failure(reason="TICKET_CLAIMED", phase="HANDOFF", public_message="this claim does not hold the ticket")
            )
        ticket.state = TicketState.MOVING
        ticket.reads_in_flight += 1
        return ticket

    def end_read(self, ticket: Ticket) -> None:
        ticket.reads_in_flight -= 1

    def begin_push_offer(self, ticket: Ticket, *, engine_id: str, now: float) -> None:
        """The peer of a push is asked for its verdict: from now on the hand-off is its to end."""
        if ticket.claimant is None:
            ticket.claimant = (engine_id, 0)
            ticket.claimed_at = now

    def end_push(self, ticket: Ticket, *, delivered: bool, now: float) -> None:
        """The peer has given its verdict, or is lost. An ended ticket stays as it is."""
        if ticket.is_open:
            self._end(ticket, TicketState.DELIVERED if delivered else TicketState.ABORTED, now)

    def settle(self, ticket_id: bytes, *, claim_id: bytes, delivered: bool, now: float) -> bool:
        """Ends a claimed ticket; returns still_owned: False if the lease had expired or the claim is not the holder's.
        A repeated call gets the same answer."""
        ticket = self._by_id.get(ticket_id)
        if ticket is None or not ticket.claim_id or ticket.claim_id != claim_id:
            return False
        ending = TicketState.DELIVERED if delivered else TicketState.ABORTED
        if ticket.is_open:
            self._end(ticket, TicketState.EXPIRED if now >= ticket.expires else ending, now)
        return ticket.state is ending

    def abort(self, ticket_id: bytes, *, now: float) -> Ticket | None:
        """Ends an open ticket; an ended one is returned as it is, an unknown one is None."""
        ticket = self._by_id.get(ticket_id)
        if ticket is not None and ticket.is_open:
            self._end(ticket, TicketState.ABORTED, now)
        return ticket

    def expire_due(self, *, now: float) -> list[Ticket]:
        """Expires what is due and forgets what has long ended; returns the newly expired."""
        due = [ticket for ticket in self.open_tickets() if now >= ticket.expires]
        for ticket in due:
            self._end(ticket, TicketState.EXPIRED, now)
        old = [
            t for t in self._by_id.values() if not t.is_open and now - t.ended > self._keep and not t.reads_in_flight
        ]
        for ticket in old:
            del self._by_id[ticket.ticket_id]
        return due

    def cap_expiry(self, end: float) -> None:
        """No lease, present or future, outlives `end` (drain, C43)."""
        self._cap = min(self._cap, end)
        for ticket in self.open_tickets():
            ticket.expires = min(ticket.expires, self._cap)

    def _extend(self, ticket: Ticket, now: float) -> None:
        ticket.expires = max(ticket.expires, min(now + ticket.ttl_seconds, ticket.created + self._max, self._cap))

    @staticmethod
    def _end(ticket: Ticket, state: TicketState, now: float) -> None:
        ticket.state = state
        ticket.ended = now
