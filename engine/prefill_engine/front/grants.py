"""Memory that decode peers granted us to push into, until they accept it or have let go of it (serving.md 1.1 "who frees what").

    FILLING -> LANDED -> DELIVERED | GIVEN_UP -> (forgotten)
Plain state, no I/O: time and answers come in, calls to make come out (sink_calls.py makes them). The trap: the peer's pages are
free only when it accepted them, or when it knows that nothing of ours is in flight (Abandon with writes_drained) or has revoked
the keys itself; so giving up is not the end of a grant, and no timer of ours is.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from prefill_engine.front.call import PushPlan
from prefill_engine.handoff_pieces import PieceChecks

CALL_SECONDS = 2.0
RETRY_SECONDS = 0.5  # serving.md 1.1: abort ack
_RENEWALS_PER_LEASE = 3
_MOST_ABANDONS = 20


class GrantState(StrEnum):
    FILLING = "filling"
    """The rank moves bytes, or will."""
    LANDED = "landed"
    """The peer has every byte; it is asked for its verdict until it answers."""
    DELIVERED = "delivered"
    GIVEN_UP = "given_up"
    """It is told so until it has let go."""


class CallKind(StrEnum):
    RENEW = "renew"
    OFFER = "offer"
    ABANDON = "abandon"


class Effect(StrEnum):
    """What an answer means for the attempt."""

    NOTHING = "nothing"
    DELIVERED = "delivered"
    LOST = "lost"


@dataclass(slots=True, kw_only=True)
class Grant:
    """drained: nothing of ours is in flight at the peer. expires: of the peer's lease, by our clock, counted from sending."""

    attempt_id: bytes
    request_id: str
    attempt: int
    kv_tokens: int
    rank: int
    plan: PushPlan
    expires: float
    renew_at: float
    state: GrantState = GrantState.FILLING
    drained: bool = False
    checks: tuple[PieceChecks, ...] = ()
    num_bytes: int = 0
    is_offerable: bool = False
    next_call: float = 0.0
    in_call: bool = False
    generation: int = 0
    abandons: int = 0
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkCall:
    """A call to make now. writes_drained, generation: of an Abandon. sent_at: when it was decided."""

    kind: CallKind
    grant: Grant
    sent_at: float
    writes_drained: bool = False
    generation: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkAnswer:
    """answered: False = no answer came (then `gone` is False). gone: the peer does not know the grant. verdict: of an Offer, name
    of OfferResponse.Verdict. released: of an Abandon. text: for people."""

    answered: bool
    gone: bool = False
    verdict: str = ""
    released: bool = False
    text: str = ""


@dataclass(slots=True)
class Grants:
    """Owner of all grants, by attempt id."""

    _by_attempt: dict[bytes, Grant] = field(default_factory=dict)

    def open(self, plan: PushPlan, *, key: tuple[str, int, bytes], kv_tokens: int, rank: int, now: float) -> Grant:
        """A new grant. key: request id, attempt, attempt id."""
        grant = Grant(
            attempt_id=key[2],
            request_id=key[0],
            attempt=key[1],
            kv_tokens=kv_tokens,
            rank=rank,
            plan=plan,
            expires=now + plan.lease_seconds,
            renew_at=now + plan.lease_seconds / _RENEWALS_PER_LEASE,
        )
        self._by_attempt[grant.attempt_id] = grant
        return grant

    def find(self, attempt_id: bytes) -> Grant | None:
        return self._by_attempt.get(attempt_id)

    @property
    def num_open(self) -> int:
        """Grants that a peer may still hold memory for."""
        return len(self._by_attempt)

    def landed(self, attempt_id: bytes, checks: tuple[PieceChecks, ...]) -> None:
        """The rank has moved everything."""
        grant = self._by_attempt.get(attempt_id)
        if grant is not None:
            grant.drained = True
            grant.checks = checks
            if grant.state is GrantState.FILLING:
                grant.state = GrantState.LANDED

    def drained(self, attempt_id: bytes) -> None:
        """The rank has stopped, and nothing of it is in flight."""
        grant = self._by_attempt.get(attempt_id)
        if grant is not None:
            grant.drained = True
            grant.next_call = 0.0

    def offerable(self, attempt_id: bytes) -> None:
        """The ticket exists: as soon as everything has landed it is offered."""
        grant = self._by_attempt.get(attempt_id)
        if grant is not None:
            grant.is_offerable = True

    def deliver(self, attempt_id: bytes) -> None:
        """The peer has accepted: the memory is its own."""
        grant = self._by_attempt.pop(attempt_id, None)
        if grant is not None:
            grant.state = GrantState.DELIVERED

    def give_up(self, attempt_id: bytes) -> None:
        """The hand-off has ended otherwise; the peer is told now, and again when nothing is in flight any more."""
        grant = self._by_attempt.get(attempt_id)
        if grant is not None and grant.state is not GrantState.GIVEN_UP:
            grant.state = GrantState.GIVEN_UP
            grant.next_call = 0.0

    def due(self, now: float) -> list[SinkCall]:
        """Calls to make now; each grant has at most one under way."""
        calls = []
        for grant in self._by_attempt.values():
            kind = None if grant.in_call else _next_call(grant, now)
            if kind is not None:
                calls.append(_start_call(grant, kind, now))
        return calls

    def answer(self, call: SinkCall, answer: SinkAnswer, *, now: float) -> Effect:
        """Takes in how a call ended."""
        grant = call.grant
        grant.in_call = False
        if grant.state is GrantState.GIVEN_UP:
            self._abandoned(call, answer, now)
            return Effect.NOTHING
        match call.kind:
            case CallKind.RENEW:
                return _renewed(grant, call, answer, now)
            case CallKind.OFFER:
                return _offered(grant, answer, now)
            case CallKind.ABANDON:
                return Effect.NOTHING

    def _abandoned(self, call: SinkCall, answer: SinkAnswer, now: float) -> None:
        grant = call.grant
        if call.kind is not CallKind.ABANDON:
            grant.next_call = now
            return
        # What the peer said before it knew that we are drained is no last word, unless it has let go by itself.
        if answer.released or answer.gone or grant.abandons >= _MOST_ABANDONS:
            self._by_attempt.pop(grant.attempt_id, None)
        else:
            grant.next_call = now if grant.drained and not call.writes_drained else now + RETRY_SECONDS


def _next_call(grant: Grant, now: float) -> CallKind | None:
    if grant.state is GrantState.GIVEN_UP:
        return CallKind.ABANDON if now >= grant.next_call else None
    if grant.state is GrantState.LANDED and grant.is_offerable and now >= grant.next_call:
        return CallKind.OFFER
    return CallKind.RENEW if now >= grant.renew_at else None


def _start_call(grant: Grant, kind: CallKind, now: float) -> SinkCall:
    grant.in_call = True
    if kind is CallKind.ABANDON:
        grant.generation += 1
        grant.abandons += 1
    return SinkCall(kind=kind, grant=grant, sent_at=now, writes_drained=grant.drained, generation=grant.generation)


def _renewed(grant: Grant, call: SinkCall, answer: SinkAnswer, now: float) -> Effect:
    if answer.answered and not answer.gone:
        grant.expires = call.sent_at + grant.plan.lease_seconds
        grant.renew_at = call.sent_at + grant.plan.lease_seconds / _RENEWALS_PER_LEASE
        return Effect.NOTHING
    grant.renew_at = now + RETRY_SECONDS
    return _lost(grant, answer) if answer.gone or now >= grant.expires else Effect.NOTHING


def _offered(grant: Grant, answer: SinkAnswer, now: float) -> Effect:
    if answer.verdict in ("ACCEPTED", "DUPLICATE"):
        return Effect.DELIVERED
    if answer.answered and answer.verdict != "REFUSED_BUSY":
        return _lost(grant, answer)
    grant.next_call = now + RETRY_SECONDS
    return _lost(grant, answer) if now >= grant.expires else Effect.NOTHING


def _lost(grant: Grant, answer: SinkAnswer) -> Effect:
    grant.detail = answer.verdict or answer.text
    return Effect.LOST
