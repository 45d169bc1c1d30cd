"""Life of attempts as a state machine without I/O: order of events, ticket, store, identity, superseding."""

import pytest

from prefill_engine.front.events import Completed, HandoffState
from prefill_engine.rpc.status import ServingFailure
from prefill_testing.lifecycle_rig import LifecycleRig, call_of, events_of, kinds_of, reason_of


def refusal(rig: LifecycleRig, **fields: object) -> str:
    with pytest.raises(ServingFailure) as error:
        rig.submit(call_of(**fields))  # type: ignore[arg-type]
    return error.value.failure.reason


def test_events_come_in_order_and_completed_waits_for_handoff_and_store():
    rig = LifecycleRig()
    attempt = rig.submit()
    ticket = rig.run_to_ticket()
    rig.claim(ticket)
    rig.settle(ticket)
    assert attempt.is_live
    rig.stored()
    assert kinds_of(attempt) == [
        "Accepted",
        "Queued",
        "ChunkDone",
        "FirstToken",
        "TicketOffer",
        "HandoffState",
        "HandoffState",
        "StoreState",
        "Completed",
    ]
    assert rig.kinds_sent() == ["Submit", "Release"]
    assert isinstance(attempt.outcome, Completed)
    assert rig.ledger.finished == [attempt]


def test_ticket_waits_for_the_first_token():
    rig = LifecycleRig()
    attempt = rig.submit()
    rig.resolve()
    rig.computed()
    assert attempt.ticket is None
    rig.token()
    assert attempt.ticket is not None


def test_no_token_wanted_gives_a_ticket_without_one():
    rig = LifecycleRig()
    attempt = rig.submit(call_of(sample=False))
    rig.resolve()
    rig.computed()
    assert kinds_of(attempt)[-1] == "TicketOffer"


def test_store_required_holds_the_ticket_until_the_commit():
    rig = LifecycleRig()
    attempt = rig.submit(call_of(store="required"))
    rig.resolve()
    rig.token()
    rig.computed()
    rig.stored(done=False)
    assert attempt.ticket is None
    rig.stored()
    assert attempt.ticket is not None


def test_store_required_failure_fails_the_attempt():
    rig = LifecycleRig()
    attempt = rig.submit(call_of(store="required"))
    rig.resolve()
    rig.token()
    rig.computed()
    rig.stored(failed=1)
    assert reason_of(attempt) == "STORE_WRITE_FAILED"
    assert rig.kinds_sent() == ["Submit", "Cancel"]


def test_store_best_effort_failure_does_not_fail_the_attempt():
    rig = LifecycleRig()
    attempt = rig.submit()
    ticket = rig.run_to_ticket()
    rig.stored(failed=2)
    rig.claim(ticket)
    rig.settle(ticket)
    assert isinstance(attempt.outcome, Completed)
    assert attempt.outcome.store.blocks_failed == 2


def test_store_skip_completes_without_a_word_of_the_store():
    rig = LifecycleRig()
    attempt = rig.submit(call_of(store="skip"))
    ticket = rig.run_to_ticket()
    rig.claim(ticket)
    rig.settle(ticket)
    assert isinstance(attempt.outcome, Completed)


def test_handoff_none_completes_after_the_store_without_ticket_or_release():
    rig = LifecycleRig()
    attempt = rig.submit(call_of(handoff=False))
    rig.resolve()
    rig.token()
    rig.computed()
    rig.stored()
    assert isinstance(attempt.outcome, Completed)
    assert attempt.outcome.handoff is None
    assert rig.kinds_sent() == ["Submit"]


@pytest.mark.parametrize("ending", ["EXPIRED", "ABORTED_BY_PEER", "SETTLED_FALSE"])
def test_ended_ticket_ends_the_stream_well_and_names_the_state(ending: str):
    rig = LifecycleRig()
    attempt = rig.submit()
    ticket = rig.run_to_ticket()
    rig.stored()
    if ending == "EXPIRED":
        rig.now += 30.0
        rig.lifecycle.tick()
    elif ending == "ABORTED_BY_PEER":
        rig.lifecycle.tickets.abort(ticket.ticket_id, now=rig.now)
        rig.lifecycle.handoff_changed(ticket)
    else:
        rig.claim(ticket)
        rig.settle(ticket, delivered=False)
    last = events_of(attempt)[-1].body
    assert isinstance(last, Completed)
    assert isinstance(last.handoff, HandoffState)
    assert last.handoff.state == ("EXPIRED" if ending == "EXPIRED" else "ABORTED")
    assert rig.kinds_sent() == ["Submit", "Release"]


def test_same_id_and_content_joins_the_running_attempt():
    rig = LifecycleRig()
    first = rig.submit()
    second, joined = rig.lifecycle.submit(call_of(), deadline=1e9)
    assert (second, joined) == (first, True)
    assert rig.kinds_sent() == ["Submit"]


def test_same_id_and_other_content_conflicts_and_leaves_the_first():
    rig = LifecycleRig()
    first = rig.submit()
    assert refusal(rig, digest=b"other") == "IDEMPOTENCY_CONFLICT"
    assert first.is_live


def test_finished_id_replays_its_outcome_errors_included():
    rig = LifecycleRig()
    rig.submit()
    rig.resolve()
    rig.failed()
    again, joined = rig.lifecycle.submit(call_of(), deadline=1e9)
    assert joined
    assert reason_of(again) == "KERNEL_FAULT"
    assert kinds_of(again) == ["Accepted", "Queued"]


def test_outcome_is_forgotten_after_its_time_and_the_id_is_new_again():
    rig = LifecycleRig()
    rig.submit()
    rig.failed()
    rig.now += 601.0
    rig.lifecycle.tick()
    _, joined = rig.lifecycle.submit(call_of(), deadline=1e9)
    assert not joined


def test_higher_attempt_supersedes_the_lower():
    rig = LifecycleRig()
    low = rig.submit(call_of("a", attempt=1))
    high = rig.submit(call_of("b", attempt=2))
    assert reason_of(low) == "ATTEMPT_SUPERSEDED"
    assert rig.kinds_sent("a") == ["Submit", "Cancel"]
    assert high.is_live


def test_higher_attempt_leaves_a_claimed_lower_alone():
    rig = LifecycleRig()
    low = rig.submit(call_of("a", attempt=1))
    rig.claim(rig.run_to_ticket("a"))
    rig.submit(call_of("b", attempt=2))
    assert low.is_live


def test_late_lower_attempt_is_refused():
    rig = LifecycleRig()
    rig.submit(call_of("b", attempt=2))
    assert refusal(rig, name="a", attempt=1) == "ATTEMPT_SUPERSEDED"


def test_same_attempt_number_under_another_id_conflicts_while_it_runs():
    rig = LifecycleRig()
    rig.submit(call_of("a"))
    assert refusal(rig, name="b") == "IDEMPOTENCY_CONFLICT"
    rig.failed("a")
    assert rig.submit(call_of("b")).is_live
