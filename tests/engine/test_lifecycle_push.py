"""Life of a pushed attempt at the front: when the ticket, the offer, the release and the abandon come, whatever ends it."""

from collections.abc import Callable

import pytest

from prefill_engine.front.call import PrefillCall, PushPlan
from prefill_engine.front.events import Completed
from prefill_engine.front.grants import CallKind, SinkAnswer, SinkCall
from prefill_engine.front.tickets import TicketState
from prefill_engine.handoff_pieces import PieceChecks, PushRegion
from prefill_engine.messages import PushReport
from prefill_engine.rpc.status import ServingFailure
from prefill_testing.lifecycle_rig import LifecycleRig, call_of, kinds_of, reason_of

REGION = PushRegion(kind=1, transport="tcp", endpoint="d:2", key=b"k" * 32, piece_bytes=8, offset=0, num_bytes=10)
PLAN = PushPlan(
    endpoint="d:1",
    engine_id="d1",
    grant_id=b"g" * 16,
    lease_seconds=30.0,
    regions=(REGION,),
    early_send=True,
    already_cached_tokens=128,
)


def push_call(**changes: object) -> PrefillCall:
    call = call_of(store="skip")
    fields = {name: getattr(call, name) for name in PrefillCall.__dataclass_fields__}
    return PrefillCall(**{**fields, "mode": "push", "push": PLAN, **changes})  # type: ignore[arg-type]


def report(rig: LifecycleRig, state: str, *, reason: str = "") -> None:
    rig.lifecycle.apply(
        PushReport(
            attempt_id=b"a",
            state=state,
            num_bytes=10,
            reason=reason,
            detail="peer lost",
            checks=(PieceChecks(kind=1, checks=b"abcd"),) if state == "landed" else (),
            at_ns=rig.at_ns(),
        )
    )


def pushed(rig: LifecycleRig) -> None:
    """From submitted to an offer that waits for its verdict."""
    rig.submit(push_call())
    rig.run_to_ticket()
    report(rig, "landed")
    rig.lifecycle.tick()


def sink_call(rig: LifecycleRig) -> SinkCall:
    return rig.sink_calls[-1][0]


def calls_made(rig: LifecycleRig) -> list[str]:
    return [call.kind.value for call, _ in rig.sink_calls]


def answer(rig: LifecycleRig, **fields: object) -> None:
    rig.lifecycle.sink_answered(sink_call(rig), SinkAnswer(answered=True, **fields))  # type: ignore[arg-type]


def test_accepted_push_releases_the_rank_and_completes_delivered():
    rig = LifecycleRig()
    pushed(rig)
    call, ticket = rig.sink_calls[-1]
    assert (call.kind, ticket is not None) == (CallKind.OFFER, True)
    assert "Release" not in rig.kinds_sent()
    answer(rig, verdict="ACCEPTED")
    attempt = rig.ledger.finished[0]
    assert isinstance(attempt.outcome, Completed)
    assert attempt.outcome.handoff is not None
    assert (attempt.outcome.handoff.state, attempt.outcome.handoff.bytes_done) == ("DELIVERED", 10)
    assert attempt.outcome.usage.already_cached_tokens == 128
    assert (rig.kinds_sent(), calls_made(rig)) == (["Submit", "Release"], ["offer"])
    assert rig.lifecycle.grants.num_open == 0


def test_ticket_of_a_push_begins_moving_and_nobody_can_claim_it():
    rig = LifecycleRig()
    rig.submit(push_call())
    ticket = rig.run_to_ticket()
    assert ticket.state is TicketState.MOVING
    with pytest.raises(ServingFailure) as error:
        rig.claim(ticket)
    assert error.value.failure.reason == "TICKET_CLAIMED"


def test_bytes_that_land_before_the_ticket_are_offered_when_it_is_there():
    rig = LifecycleRig()
    rig.submit(push_call())
    rig.resolve()
    rig.start()
    rig.chunk(done=300)
    report(rig, "landed")
    rig.lifecycle.tick()
    assert rig.sink_calls == []
    rig.token()
    rig.computed()
    rig.lifecycle.tick()
    assert calls_made(rig) == ["offer"]


@pytest.mark.parametrize("verdict", ["REFUSED_EXPIRED", "REFUSED_FORMAT", "REFUSED_CHECKSUM", "VERDICT_UNSPECIFIED"])
def test_refused_push_ends_ok_as_aborted_and_is_abandoned(verdict: str):
    rig = LifecycleRig()
    pushed(rig)
    answer(rig, verdict=verdict)
    rig.lifecycle.tick()
    outcome = rig.ledger.finished[0].outcome
    assert isinstance(outcome, Completed)
    assert outcome.handoff is not None
    assert outcome.handoff.state == "ABORTED"
    assert (rig.kinds_sent(), calls_made(rig)) == (["Submit", "Release"], ["offer", "abandon"])
    assert sink_call(rig).writes_drained


def test_peer_that_never_answers_costs_the_lease_of_the_ticket_and_is_then_abandoned():
    rig = LifecycleRig()
    pushed(rig)
    while not rig.ledger.finished:
        rig.lifecycle.sink_answered(sink_call(rig), SinkAnswer(answered=False))
        rig.now += 1.0
        rig.lifecycle.tick()
        assert rig.now < 140.0
    outcome = rig.ledger.finished[0].outcome
    assert isinstance(outcome, Completed)
    assert outcome.handoff is not None
    assert outcome.handoff.state in ("EXPIRED", "ABORTED")
    rig.lifecycle.sink_answered(sink_call(rig), SinkAnswer(answered=False))
    rig.lifecycle.tick()
    assert calls_made(rig)[-1] == "abandon"
    assert rig.kinds_sent() == ["Submit", "Release"]


def test_push_that_fails_before_the_ticket_fails_the_attempt_with_its_reason():
    rig = LifecycleRig()
    attempt = rig.submit(push_call())
    rig.resolve()
    rig.start()
    report(rig, "failed", reason="HANDOFF_TIMEOUT")
    assert (reason_of(attempt), rig.kinds_sent()) == ("HANDOFF_TIMEOUT", ["Submit", "Cancel"])
    rig.lifecycle.tick()
    assert (calls_made(rig), sink_call(rig).writes_drained) == (["abandon"], False)
    answer(rig, released=False)
    report(rig, "drained")
    rig.lifecycle.tick()
    assert (calls_made(rig), sink_call(rig).writes_drained) == (["abandon", "abandon"], True)
    answer(rig, released=True)
    assert rig.lifecycle.grants.num_open == 0


def test_push_that_fails_after_the_ticket_ends_ok_as_aborted():
    rig = LifecycleRig()
    attempt = rig.submit(push_call())
    rig.run_to_ticket()
    report(rig, "failed", reason="DECODE_ABORTED")
    assert isinstance(attempt.outcome, Completed)
    assert kinds_of(attempt)[-1] == "Completed"
    assert rig.kinds_sent() == ["Submit", "Release"]


ENDS: dict[str, Callable[[LifecycleRig], object]] = {
    "cancel": lambda rig: rig.lifecycle.cancel(b"a"),
    "stream lost": lambda rig: _lose_stream(rig),
    "superseded": lambda rig: rig.lifecycle.submit(call_of("b", attempt=2), deadline=1e9),
    "failed on the rank": lambda rig: rig.failed(),
    "rank lost": lambda rig: rig.lifecycle.lose_rank(0),
    "drain over": lambda rig: _drain(rig),
}


def _lose_stream(rig: LifecycleRig) -> None:
    attempt = rig.lifecycle.attempts.find(b"a")
    assert attempt is not None
    attempt.streams = 0
    rig.lifecycle.stream_lost(attempt)


def _drain(rig: LifecycleRig) -> None:
    rig.lifecycle.begin_drain(seconds=1.0, finish_queued=True)
    rig.now += 1.0
    rig.lifecycle.tick()


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("point", ["admitted", "computing", "ticket"])
def test_every_end_before_the_offer_abandons_the_grant_exactly_until_let_go(end: str, point: str):
    rig = LifecycleRig()
    attempt = rig.submit(push_call())
    if point == "computing":
        rig.resolve()
        rig.start()
    elif point == "ticket":
        rig.run_to_ticket()
    ENDS[end](rig)
    rig.lifecycle.tick()
    assert attempt.outcome is not None
    assert calls_made(rig) == ["abandon"]
    assert rig.lifecycle.grants.num_open == 1
    answer(rig, released=True)
    rig.lifecycle.tick()
    assert (calls_made(rig), rig.lifecycle.grants.num_open) == (["abandon"], 0)


def test_cancel_while_the_peer_decides_comes_too_late():
    rig = LifecycleRig()
    pushed(rig)
    assert rig.lifecycle.cancel(b"a") == "TOO_LATE_TICKET_CLAIMED"
    _lose_stream(rig)
    answer(rig, verdict="ACCEPTED")
    outcome = rig.ledger.finished[0].outcome
    assert isinstance(outcome, Completed)


def test_drain_waits_for_the_peer_to_let_go_but_only_a_second_beyond_its_end():
    rig = LifecycleRig()
    rig.submit(push_call())
    rig.lifecycle.begin_drain(seconds=1.0, finish_queued=True)
    rig.lifecycle.cancel(b"a")
    assert not rig.lifecycle.drain_status().done
    rig.now += 2.5
    assert rig.lifecycle.drain_status().done


def test_store_only_ticket_waits_for_the_store():
    rig = LifecycleRig()
    call = push_call(mode="store_only", push=None, store="best_effort")
    attempt = rig.submit(call)
    rig.resolve()
    rig.start()
    rig.chunk(done=300)
    rig.token()
    rig.computed()
    rig.stored(done=False)
    assert attempt.ticket is None
    rig.stored()
    assert attempt.ticket is not None
    assert attempt.ticket.mode == "store_only"


def test_store_only_attempt_fails_when_a_block_could_not_be_stored():
    rig = LifecycleRig()
    attempt = rig.submit(push_call(mode="store_only", push=None, store="best_effort"))
    rig.resolve()
    rig.start()
    rig.stored(failed=1, done=False)
    assert (reason_of(attempt), rig.kinds_sent()) == ("STORE_WRITE_FAILED", ["Submit", "Cancel"])
