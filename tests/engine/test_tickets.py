"""Ticket state machine: one claimant, leases by the source's clock, sticky endings, idempotent settles."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from prefill_engine.front.tickets import Ticket, Tickets, TicketState
from prefill_engine.messages import Region
from prefill_engine.rpc.status import ServingFailure

TICKET = b"t" * 16
LEASE = b"l" * 16
REGIONS = (Region(kind=1, num_bytes=100), Region(kind=7, num_bytes=8))


def offered(*, ttl: float | None = None, now: float = 0.0) -> tuple[Tickets, Ticket]:
    tickets = Tickets(ttl_seconds=30.0, max_seconds=100.0, keep_seconds=50.0)
    ticket = tickets.offer(
        ids=(TICKET, LEASE),
        attempt_id=b"a",
        rank=0,
        kv_tokens=10,
        regions=REGIONS,
        first_token=None,
        ttl_seconds=ttl,
        now=now,
    )
    return tickets, ticket


def claim(tickets: Tickets, *, engine: str = "d1", epoch: int = 1, claim_id: bytes = b"c1", now: float = 1.0) -> Ticket:
    return tickets.claim(TICKET, engine_id=engine, epoch=epoch, claim_id=claim_id, now=now)


def refusal(call: object, **arguments: object) -> str:
    with pytest.raises(ServingFailure) as error:
        call(**arguments)  # type: ignore[operator]
    return error.value.failure.reason


def test_second_claimant_is_told_that_the_ticket_is_claimed():
    tickets, _ = offered()
    claim(tickets)
    assert refusal(lambda: claim(tickets, engine="d2", claim_id=b"c2")) == "TICKET_CLAIMED"
    assert refusal(lambda: claim(tickets, epoch=2, claim_id=b"c2")) == "TICKET_CLAIMED"


def test_repeated_claim_of_the_same_engine_and_epoch_gets_the_same_claim():
    tickets, _ = offered()
    claim(tickets)
    assert claim(tickets, claim_id=b"c2").claim_id == b"c1"


def test_claim_after_the_lease_is_refused_and_the_ticket_expires():
    tickets, ticket = offered()
    assert refusal(lambda: claim(tickets, now=30.0)) == "TICKET_GONE"
    assert tickets.expire_due(now=30.0) == [ticket]
    assert ticket.state is TicketState.EXPIRED


def test_settle_in_time_delivers_and_repeats_its_answer():
    tickets, ticket = offered()
    claim(tickets)
    assert tickets.settle(TICKET, claim_id=b"c1", delivered=True, now=5.0)
    assert tickets.settle(TICKET, claim_id=b"c1", delivered=True, now=500.0)
    assert ticket.state is TicketState.DELIVERED


def test_settle_after_expiry_says_no_longer_owned():
    tickets, ticket = offered()
    claim(tickets, now=1.0)
    assert not tickets.settle(TICKET, claim_id=b"c1", delivered=True, now=31.0)
    assert ticket.state is TicketState.EXPIRED


def test_settle_by_a_stranger_changes_nothing():
    tickets, ticket = offered()
    claim(tickets)
    assert not tickets.settle(TICKET, claim_id=b"zz", delivered=True, now=2.0)
    assert ticket.state is TicketState.CLAIMED


def test_settle_failed_aborts():
    tickets, ticket = offered()
    claim(tickets)
    assert tickets.settle(TICKET, claim_id=b"c1", delivered=False, now=2.0)
    assert ticket.state is TicketState.ABORTED


def test_settle_delivered_after_abort_says_no_longer_owned():
    tickets, _ = offered()
    claim(tickets)
    tickets.abort(TICKET, now=2.0)
    assert not tickets.settle(TICKET, claim_id=b"c1", delivered=True, now=3.0)


def test_claim_and_renewals_extend_the_lease_up_to_the_total_life():
    tickets, ticket = offered()
    claim(tickets, now=20.0)
    assert ticket.expires == 50.0
    for now in (45.0, 70.0, 90.0, 99.0):
        assert tickets.renew([TICKET], engine_id="d1", now=now) == ()
    assert ticket.expires == 100.0
    assert tickets.renew([TICKET], engine_id="d1", now=100.0) == (TICKET,)


def test_renewal_by_another_engine_or_of_an_unknown_ticket_is_lost():
    tickets, _ = offered()
    claim(tickets)
    assert tickets.renew([TICKET, b"?"], engine_id="d2", now=2.0) == (TICKET, b"?")


def test_requested_ttl_is_kept_within_the_total_life():
    assert offered(ttl=10.0)[1].expires == 10.0
    assert offered(ttl=1e6)[1].expires == 100.0


def test_drain_caps_present_and_future_leases():
    tickets, ticket = offered()
    tickets.cap_expiry(12.0)
    claim(tickets, now=5.0)
    assert ticket.expires == 12.0


def test_read_needs_the_claim_and_moves_the_ticket():
    tickets, ticket = offered()
    assert refusal(lambda: tickets.begin_read(TICKET, claim_id=b"", now=1.0)) == "TICKET_CLAIMED"
    claim(tickets)
    assert refusal(lambda: tickets.begin_read(TICKET, claim_id=b"c2", now=1.0)) == "TICKET_CLAIMED"
    tickets.begin_read(TICKET, claim_id=b"c1", now=1.0)
    assert (ticket.state, tickets.num_reads) == (TicketState.MOVING, 1)
    assert refusal(lambda: tickets.begin_read(TICKET, claim_id=b"c1", now=99.0)) == "TICKET_GONE"


def test_ended_ticket_is_remembered_then_forgotten_but_not_while_read():
    tickets, ticket = offered()
    claim(tickets)
    tickets.begin_read(TICKET, claim_id=b"c1", now=1.0)
    tickets.abort(TICKET, now=2.0)
    tickets.expire_due(now=60.0)
    assert tickets.find(TICKET) is ticket
    tickets.end_read(ticket)
    tickets.expire_due(now=60.0)
    assert tickets.find(TICKET) is None
    assert tickets.abort(TICKET, now=61.0) is None


class TicketLife(RuleBasedStateMachine):
    """Random peers and times: at most one claimant ever, endings stick, an owned settle was in time."""

    @initialize()
    def start(self) -> None:
        self.tickets, self.ticket = offered()
        self.now = 0.0
        self.winners: set[tuple[str, int]] = set()
        self.ending: TicketState | None = None

    @rule(step=st.floats(0, 40))
    def pass_time(self, step: float) -> None:
        self.now += step

    @rule(engine=st.sampled_from(["d1", "d2"]), epoch=st.integers(1, 2))
    def try_claim(self, engine: str, epoch: int) -> None:
        try:
            self.tickets.claim(
                TICKET, engine_id=engine, epoch=epoch, claim_id=f"{engine}{epoch}".encode(), now=self.now
            )
        except ServingFailure:
            return
        self.winners.add((engine, epoch))

    @rule(engine=st.sampled_from(["d1", "d2"]))
    def renew(self, engine: str) -> None:
        self.tickets.renew([TICKET], engine_id=engine, now=self.now)

    @rule(claim_id=st.sampled_from([b"d11", b"d12", b"d21", b"d22"]), delivered=st.booleans())
    def settle(self, claim_id: bytes, delivered: bool) -> None:
        in_time = self.now < self.ticket.expires
        was_open = self.ticket.is_open
        owned = self.tickets.settle(TICKET, claim_id=claim_id, delivered=delivered, now=self.now)
        assert not (owned and was_open and not in_time)

    @rule()
    def abort(self) -> None:
        self.tickets.abort(TICKET, now=self.now)

    @rule()
    def expire(self) -> None:
        self.tickets.expire_due(now=self.now)

    @invariant()
    def one_winner_and_sticky_end(self) -> None:
        if not hasattr(self, "ticket"):
            return
        assert len(self.winners) <= 1
        if self.ending is not None:
            assert self.ticket.state is self.ending
        elif not self.ticket.is_open:
            self.ending = self.ticket.state
        assert self.ticket.expires <= self.ticket.created + 100.0


TestTicketLife = TicketLife.TestCase
TestTicketLife.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
