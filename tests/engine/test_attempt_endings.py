"""How attempts end: cancels, lost streams, deadlines, full queues, rank loss, drain. No I/O, a hand-moved clock."""

import pytest

from prefill_engine.front.events import Completed
from prefill_engine.rpc.status import ServingFailure
from prefill_plan.config import ServerConfig
from prefill_testing.lifecycle_rig import LifecycleRig, call_of, kinds_of, reason_of


def refusal(rig: LifecycleRig, **fields: object) -> str:
    with pytest.raises(ServingFailure) as error:
        rig.submit(call_of(**fields))  # type: ignore[arg-type]
    return error.value.failure.reason


@pytest.mark.parametrize("phase", ["submitted", "queued", "computing", "offered"])
def test_cancel_ends_the_attempt_and_tells_the_rank_once(phase: str):
    rig = LifecycleRig()
    attempt = rig.submit()
    if phase == "queued":
        rig.resolve()
    elif phase == "computing":
        rig.resolve()
        rig.start()
        rig.chunk(done=100)
    elif phase == "offered":
        rig.run_to_ticket()
    assert rig.lifecycle.cancel(b"a") == "CANCELLED"
    assert rig.lifecycle.cancel(b"a") == "CANCELLED"
    assert reason_of(attempt) == "CALLER_CANCELLED"
    assert rig.kinds_sent() == ["Submit", "Cancel"]
    assert rig.lifecycle.tickets.open_tickets() == []
    assert not attempt.released
    rig.released()
    assert attempt.released


def test_cancel_after_a_claim_is_too_late():
    rig = LifecycleRig()
    attempt = rig.submit()
    rig.claim(rig.run_to_ticket())
    assert rig.lifecycle.cancel(b"a") == "TOO_LATE_TICKET_CLAIMED"
    assert attempt.is_live


def test_cancel_of_a_finished_attempt_says_so():
    rig = LifecycleRig()
    rig.submit()
    rig.failed()
    assert rig.lifecycle.cancel(b"a") == "ALREADY_FINISHED"


def test_cancel_of_an_unknown_id_keeps_it_from_starting_for_a_minute():
    rig = LifecycleRig()
    assert rig.lifecycle.cancel(b"a") == "UNKNOWN"
    assert refusal(rig) == "CALLER_CANCELLED"
    rig.now += 60.0
    assert rig.submit().is_live


def test_lost_stream_before_a_claim_cancels_only_when_it_was_the_last():
    rig = LifecycleRig()
    attempt = rig.submit()
    attempt.streams += 1
    attempt.streams -= 1
    rig.lifecycle.stream_lost(attempt)
    assert attempt.is_live
    attempt.streams -= 1
    rig.lifecycle.stream_lost(attempt)
    assert reason_of(attempt) == "CALLER_CANCELLED"


def test_lost_stream_after_a_claim_changes_nothing():
    rig = LifecycleRig()
    attempt = rig.submit()
    ticket = rig.run_to_ticket()
    rig.claim(ticket)
    attempt.streams -= 1
    rig.lifecycle.stream_lost(attempt)
    rig.settle(ticket)
    rig.stored()
    assert isinstance(attempt.outcome, Completed)


@pytest.mark.parametrize(
    ("started", "reason"), [(False, "QUEUE_WAIT_EXCEEDED"), (True, "COMPUTE_DEADLINE")], ids=["queued", "computing"]
)
def test_deadline_fires_a_tenth_of_a_second_early_with_the_reason_of_the_phase(started: bool, reason: str):
    rig = LifecycleRig()
    attempt = rig.submit(deadline=rig.now + 1.0)
    rig.resolve()
    if started:
        rig.start()
    rig.now += 0.89
    rig.lifecycle.tick()
    assert attempt.is_live
    rig.now += 0.02
    rig.lifecycle.tick()
    assert reason_of(attempt) == reason
    assert rig.kinds_sent() == ["Submit", "Cancel"]


def test_deadline_ends_with_the_ticket():
    rig = LifecycleRig()
    attempt = rig.submit(deadline=rig.now + 1.0)
    rig.run_to_ticket()
    rig.now += 5.0
    rig.lifecycle.tick()
    assert attempt.is_live


def test_queue_wait_limit_stops_counting_when_the_attempt_starts():
    rig = LifecycleRig()
    waits = rig.submit(call_of("a", request_id="r1", queue_wait=0.5))
    starts = rig.submit(call_of("b", request_id="r2", queue_wait=0.5))
    rig.resolve("b")
    rig.start("b")
    rig.now += 0.6
    rig.lifecycle.tick()
    assert reason_of(waits) == "QUEUE_WAIT_EXCEEDED"
    assert starts.is_live


def test_joiner_extends_the_deadline():
    rig = LifecycleRig()
    attempt = rig.submit(deadline=rig.now + 1.0)
    rig.lifecycle.submit(call_of(), deadline=rig.now + 3.0)
    rig.now += 2.0
    rig.lifecycle.tick()
    assert attempt.is_live
    rig.now += 1.0
    rig.lifecycle.tick()
    assert reason_of(attempt) == "QUEUE_WAIT_EXCEEDED"


def test_target_that_an_empty_engine_could_not_meet_is_refused_before_accepted():
    rig = LifecycleRig()
    attempt = rig.submit(call_of(ttft_target=0.3))
    rig.resolve(compute_seconds=0.5)
    assert reason_of(attempt) == "BUDGET_IMPOSSIBLE"
    assert kinds_of(attempt) == []


def test_attempt_goes_to_the_rank_with_the_fewest_outstanding_rows():
    rig = LifecycleRig(ranks=2)
    first = rig.submit(call_of("a", request_id="r1", num_tokens=1000))
    second = rig.submit(call_of("b", request_id="r2", num_tokens=10))
    third = rig.submit(call_of("c", request_id="r3", num_tokens=10))
    assert [first.rank, second.rank, third.rank] == [0, 1, 1]


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        (ServerConfig(max_waiting_requests=1), "QUEUE_FULL"),
        (ServerConfig(max_waiting_rows=300), "QUEUE_FULL"),
        (ServerConfig(max_tenant_rows=300), "TENANT_QUOTA"),
    ],
    ids=["requests", "rows", "tenant"],
)
def test_full_queue_refuses_with_a_time_to_come_back(limits: ServerConfig, reason: str):
    rig = LifecycleRig(limits=limits)
    rig.submit(call_of("a", request_id="r1"))
    with pytest.raises(ServingFailure) as error:
        rig.submit(call_of("b", request_id="r2"))
    assert error.value.failure.reason == reason
    assert error.value.failure.retry_after_seconds == 0.25


def test_queue_limits_count_what_is_ahead_not_the_request_itself():
    rig = LifecycleRig(limits=ServerConfig(max_waiting_rows=10, max_tenant_rows=10))
    assert rig.submit(call_of(num_tokens=300)).is_live


def test_tenant_quota_spares_other_tenants():
    rig = LifecycleRig(limits=ServerConfig(max_tenant_rows=300))
    rig.submit(call_of("a", request_id="r1", fairness_key="x"))
    assert rig.submit(call_of("b", request_id="r2", fairness_key="y")).is_live


def test_rank_loss_answers_all_its_attempts_and_no_other_rank_s():
    rig = LifecycleRig(ranks=2)
    lost = rig.submit(call_of("a", request_id="r1"))
    ticket = rig.run_to_ticket("a")
    rig.claim(ticket)
    kept = rig.submit(call_of("b", request_id="r2"))
    kept.rank = 1
    rig.lifecycle.lose_rank(0)
    assert reason_of(lost) == "RANK_LOST"
    assert lost.released
    assert not ticket.is_open
    assert kept.is_live
    rig.lifecycle.lose_rank(1)
    assert refusal(rig, name="c", request_id="r3") == "RANK_LOST"


def test_drain_refuses_new_sends_back_queued_and_lets_running_end():
    rig = LifecycleRig()
    running = rig.submit(call_of("a", request_id="r1"))
    rig.resolve("a")
    rig.start("a")
    queued = rig.submit(call_of("b", request_id="r2"))
    rig.lifecycle.begin_drain(seconds=10.0, finish_queued=False)
    assert refusal(rig, name="c", request_id="r3") == "DRAINING"
    assert reason_of(queued) == "DRAINING"
    assert running.is_live
    status = rig.lifecycle.drain_status()
    assert (status.running, status.waiting, status.sent_back, status.done) == (1, 0, 1, False)


def test_drain_that_finishes_the_queue_keeps_it_until_a_later_one_gives_it_back():
    rig = LifecycleRig()
    queued = rig.submit()
    rig.lifecycle.begin_drain(seconds=10.0, finish_queued=True)
    assert queued.is_live
    rig.lifecycle.begin_drain(seconds=10.0, finish_queued=False)
    assert reason_of(queued) == "DRAINING"


def test_drain_still_lets_a_repeated_call_join():
    rig = LifecycleRig()
    rig.submit()
    rig.resolve()
    rig.start()
    rig.lifecycle.begin_drain(seconds=10.0, finish_queued=False)
    _, joined = rig.lifecycle.submit(call_of(), deadline=1e9)
    assert joined


def test_drain_deadline_is_only_ever_shortened_and_ends_everything():
    rig = LifecycleRig()
    running = rig.submit(call_of("a", request_id="r1"))
    rig.resolve("a")
    rig.start("a")
    offered = rig.submit(call_of("b", request_id="r2"))
    ticket = rig.run_to_ticket("b")
    rig.stored("b")
    rig.lifecycle.begin_drain(seconds=10.0, finish_queued=False)
    rig.lifecycle.begin_drain(seconds=60.0, finish_queued=False)
    rig.lifecycle.tickets.renew([ticket.ticket_id], engine_id="d", now=rig.now + 9.0)
    rig.now += 10.0
    rig.lifecycle.tick()
    assert reason_of(running) == "DRAINING"
    assert isinstance(offered.outcome, Completed)
    assert ticket.state.value == "EXPIRED"
    assert rig.lifecycle.drain_status().done


def test_late_rank_messages_of_an_ended_attempt_change_nothing():
    rig = LifecycleRig()
    attempt = rig.submit()
    rig.resolve()
    rig.lifecycle.cancel(b"a")
    before = kinds_of(attempt)
    rig.chunk(done=300)
    rig.computed()
    rig.failed()
    assert kinds_of(attempt) == before
    assert reason_of(attempt) == "CALLER_CANCELLED"
    assert rig.ledger.finished == [attempt]


def test_chunk_without_started_counts_as_the_start():
    rig = LifecycleRig()
    attempt = rig.submit()
    rig.resolve()
    rig.chunk(done=100)
    assert attempt.has_started
    assert attempt.rows_left == 200


def test_tokens_are_dropped_once_the_rank_has_them():
    rig = LifecycleRig()
    attempt = rig.submit()
    assert attempt.call.tokens == b""
    assert len(rig.sent[0][1].tokens) == 1200  # type: ignore[union-attr]
