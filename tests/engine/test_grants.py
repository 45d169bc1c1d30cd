"""Grants of decode peers that are pushed to: when is which call made, and what does each answer mean. A hand-moved clock."""

import itertools

import pytest

from prefill_engine.front.call import PushPlan
from prefill_engine.front.grants import (
    CallKind,
    Effect,
    Grant,
    Grants,
    GrantState,
    SinkAnswer,
    SinkCall,
)
from prefill_engine.handoff_pieces import PieceChecks

LEASE = 30.0
CHECKS = (PieceChecks(kind=1, checks=b"abcd"),)
SILENCE = SinkAnswer(answered=False, text="UNAVAILABLE")
GONE = SinkAnswer(answered=True, gone=True, text="NOT_FOUND")


def opened() -> tuple[Grants, Grant]:
    plan = PushPlan(
        endpoint="d:1", engine_id="d1", grant_id=b"g" * 16, lease_seconds=LEASE, regions=(), early_send=True
    )
    grants = Grants()
    return grants, grants.open(plan, key=("r", 1, b"a"), kv_tokens=300, rank=0, now=0.0)


def landed() -> tuple[Grants, Grant]:
    grants, grant = opened()
    grants.landed(b"a", CHECKS)
    grants.offerable(b"a")
    return grants, grant


def one_call(grants: Grants, now: float) -> SinkCall:
    calls = grants.due(now)
    assert len(calls) == 1, calls
    return calls[0]


def verdict(name: str) -> SinkAnswer:
    return SinkAnswer(answered=True, verdict=name)


def test_nothing_is_called_while_bytes_move_until_a_third_of_the_lease():
    grants, _ = opened()
    assert grants.due(9.9) == []
    assert one_call(grants, 10.0).kind is CallKind.RENEW


def test_renewal_extends_the_lease_from_when_it_was_sent():
    grants, grant = opened()
    call = one_call(grants, 10.0)
    assert grants.due(11.0) == []  # one call at a time
    assert grants.answer(call, SinkAnswer(answered=True), now=11.0) is Effect.NOTHING
    assert (grant.expires, grant.renew_at) == (40.0, 20.0)


@pytest.mark.parametrize(
    ("answer", "now", "effect"),
    [
        pytest.param(SILENCE, 11.0, Effect.NOTHING, id="silence-in-time"),
        pytest.param(SILENCE, 30.0, Effect.LOST, id="silence-past-the-lease"),
        pytest.param(GONE, 11.0, Effect.LOST, id="unknown-grant"),
    ],
)
def test_renewal_without_success_is_repeated_until_the_lease_is_over(answer: SinkAnswer, now: float, effect: Effect):
    grants, grant = opened()
    assert grants.answer(one_call(grants, 10.0), answer, now=now) is effect
    assert grant.renew_at == now + 0.5


@pytest.mark.parametrize("order", ["landed first", "ticket first"])
def test_offer_needs_both_the_bytes_and_the_ticket(order: str):
    grants, _ = opened()
    steps = [lambda: grants.landed(b"a", CHECKS), lambda: grants.offerable(b"a")]
    for step in steps if order == "landed first" else reversed(steps):
        assert grants.due(1.0) == []
        step()
    call = one_call(grants, 1.0)
    assert (call.kind, call.grant.checks) == (CallKind.OFFER, CHECKS)


@pytest.mark.parametrize(
    ("answer", "effect"),
    [
        pytest.param(verdict("ACCEPTED"), Effect.DELIVERED, id="accepted"),
        pytest.param(verdict("DUPLICATE"), Effect.DELIVERED, id="duplicate"),
        pytest.param(verdict("REFUSED_BUSY"), Effect.NOTHING, id="busy"),
        pytest.param(verdict("REFUSED_EXPIRED"), Effect.LOST, id="expired"),
        pytest.param(verdict("REFUSED_FORMAT"), Effect.LOST, id="format"),
        pytest.param(verdict("REFUSED_CHECKSUM"), Effect.LOST, id="checksum"),
        pytest.param(verdict("verdict 77"), Effect.LOST, id="unknown-verdict"),
        pytest.param(verdict("VERDICT_UNSPECIFIED"), Effect.LOST, id="no-verdict"),
        pytest.param(SILENCE, Effect.NOTHING, id="silence"),
        pytest.param(GONE, Effect.LOST, id="gone"),
    ],
)
def test_each_verdict_has_one_meaning(answer: SinkAnswer, effect: Effect):
    grants, _ = landed()
    assert grants.answer(one_call(grants, 1.0), answer, now=1.5) is effect


def test_offer_is_repeated_after_silence_and_the_lease_renewed_between():
    grants, _ = landed()
    grants.answer(one_call(grants, 10.0), SILENCE, now=12.0)
    assert one_call(grants, 12.1).kind is CallKind.RENEW
    grants.answer(
        SinkCall(kind=CallKind.RENEW, grant=grants.find(b"a"), sent_at=12.1), SinkAnswer(answered=True), now=12.2
    )
    assert grants.due(12.4) == []
    assert one_call(grants, 12.5).kind is CallKind.OFFER


def test_delivered_grant_is_forgotten_and_never_abandoned():
    grants, grant = landed()
    grants.answer(one_call(grants, 1.0), verdict("ACCEPTED"), now=1.5)
    grants.deliver(b"a")
    assert (grant.state, grants.num_open, grants.due(100.0)) == (GrantState.DELIVERED, 0, [])


def test_abandon_says_whether_something_is_in_flight_and_is_repeated_when_that_changes():
    grants, _ = opened()
    grants.give_up(b"a")
    first = one_call(grants, 1.0)
    assert (first.kind, first.writes_drained, first.generation) == (CallKind.ABANDON, False, 1)
    grants.drained(b"a")
    assert grants.answer(first, SinkAnswer(answered=True, released=False), now=1.1) is Effect.NOTHING
    second = one_call(grants, 1.1)
    assert (second.writes_drained, second.generation) == (True, 2)
    grants.answer(second, SinkAnswer(answered=True, released=True), now=1.2)
    assert grants.num_open == 0


@pytest.mark.parametrize(
    "last", [pytest.param(SinkAnswer(answered=True, released=True), id="released"), pytest.param(GONE, id="gone")]
)
def test_abandon_ends_when_the_peer_has_let_go(last: SinkAnswer):
    grants, _ = opened()
    grants.give_up(b"a")
    grants.answer(one_call(grants, 1.0), last, now=1.1)
    assert grants.num_open == 0


def test_abandon_is_repeated_every_half_second_and_not_for_ever():
    grants, _ = opened()
    grants.give_up(b"a")
    now, times = 0.0, []
    while grants.num_open:
        for call in grants.due(now):
            times.append(now)
            grants.answer(call, SILENCE, now=now)
        now += 0.25
        assert now < 60.0
    assert len(times) == 20
    assert {later - earlier for earlier, later in itertools.pairwise(times)} == {0.5}


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(verdict("ACCEPTED"), id="accepted-too-late"),
        pytest.param(verdict("REFUSED_EXPIRED"), id="refused"),
        pytest.param(SILENCE, id="silence"),
    ],
)
def test_answer_after_giving_up_changes_nothing_but_that_it_is_abandoned(answer: SinkAnswer):
    grants, grant = landed()
    offer = one_call(grants, 1.0)
    grants.give_up(b"a")
    assert grants.due(1.0) == []  # the offer is still under way
    assert grants.answer(offer, answer, now=1.5) is Effect.NOTHING
    assert (grant.state, one_call(grants, 1.5).kind) == (GrantState.GIVEN_UP, CallKind.ABANDON)


def test_late_reports_of_the_rank_do_not_bring_a_given_up_grant_back():
    grants, grant = opened()
    grants.give_up(b"a")
    grants.landed(b"a", CHECKS)
    assert (grant.state, grant.drained) == (GrantState.GIVEN_UP, True)
    assert one_call(grants, 0.0).kind is CallKind.ABANDON


def test_events_of_unknown_attempts_change_nothing():
    grants, _ = opened()
    for act in (grants.drained, grants.give_up, grants.deliver, grants.offerable):
        act(b"?")
    grants.landed(b"?", ())
    assert grants.num_open == 1
