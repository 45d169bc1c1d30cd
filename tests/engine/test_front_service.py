"""Prefill, Attach and Cancel over gRPC against a fake rank: joining, cancels, lost streams, deadlines, refusals."""

import asyncio
import contextlib
from collections.abc import Callable

import grpc
import grpc.aio
import pytest

from prefill_engine.messages import Cancel, Submit
from prefill_engine.rpc import prefill_pb2
from prefill_plan.config import HandoffConfig, ParallelConfig, ServerConfig
from prefill_testing.engine_rig import Rig, play, prefill_request, tiny_config
from prefill_testing.fake_rank import failed_message
from prefill_testing.rpc_calls import claim, failure_of, next_of, read_stream, settle

CANCELLED = prefill_pb2.CancelResponse


async def cancel(rig: Rig, attempt_id: bytes, *, wait: bool = False, generation: int = 0) -> prefill_pb2.CancelResponse:
    request = prefill_pb2.CancelRequest(attempt_id=attempt_id, wait_drained=wait, generation=generation)
    return await rig.stub.Cancel(request)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def test_joining_stream_gets_all_events_from_one_marked_deduplicated():
    async def scenario(rig: Rig) -> None:
        rig.ranks[0].hold.add("computed")
        request = prefill_request()
        first = rig.stub.Prefill(request)
        await next_of(first, "first_token")
        second = rig.stub.Prefill(request)
        accepted = await next_of(second, "accepted")
        rig.ranks[0].resume("computed")
        ticket = (await next_of(second, "ticket")).ticket
        claimed = await claim(rig, ticket)
        await settle(rig, ticket, claimed.claim_id)
        rest, failure = await read_stream(second)
        assert failure is None
        assert (accepted.seq, accepted.accepted.deduplicated) == (1, True)
        assert rest[-1].HasField("completed")
        assert len(rig.ranks[0].messages(Submit)) == 1

    play(scenario)


def test_finished_id_replays_its_failure():
    async def scenario(rig: Rig) -> None:
        rig.ranks[0].hold.add("start")
        request = prefill_request()
        call = rig.stub.Prefill(request)
        await next_of(call, "queued")
        await rig.ranks[0].send(failed_message(request.key.attempt_id))
        _, failure = await read_stream(call)
        events, again = await read_stream(rig.stub.Prefill(request))
        assert failure == again
        assert failure is not None
        assert (failure.reason, failure.rows_computed) == ("KERNEL_FAULT", 5)
        assert [event.WhichOneof("body") for event in events] == ["accepted", "queued"]
        assert len(rig.ranks[0].messages(Submit)) == 1

    play(scenario)


def test_same_id_with_other_content_is_a_conflict():
    async def scenario(rig: Rig) -> None:
        rig.ranks[0].hold.add("start")
        request = prefill_request()
        call = rig.stub.Prefill(request)
        await next_of(call, "accepted")
        other = prefill_request(301, attempt_id=request.key.attempt_id)
        _, failure = await read_stream(rig.stub.Prefill(other))
        assert failure is not None
        assert failure.code is grpc.StatusCode.ALREADY_EXISTS
        call.cancel()

    play(scenario)


def test_attach_continues_exactly_after_the_given_number():
    async def scenario(rig: Rig) -> None:
        rig.ranks[0].hold.add("computed")
        request = prefill_request()
        call = rig.stub.Prefill(request)
        token = await next_of(call, "first_token")
        attached = rig.stub.Attach(
            prefill_pb2.AttachRequest(attempt_id=request.key.attempt_id, after_seq=token.seq - 1)
        )
        again = await next_of(attached, "first_token")
        rig.ranks[0].resume("computed")
        assert again == token
        assert (await next_of(attached, "ticket")).seq == token.seq + 1
        call.cancel()
        attached.cancel()

    play(scenario)


@pytest.mark.parametrize(("attempt_id", "after"), [(b"?" * 16, 0), (None, 99)], ids=["unknown", "beyond"])
def test_attach_to_nothing_is_not_found(attempt_id: bytes | None, after: int):
    async def scenario(rig: Rig) -> None:
        rig.ranks[0].hold.add("start")
        request = prefill_request()
        call = rig.stub.Prefill(request)
        await next_of(call, "accepted")
        attach = prefill_pb2.AttachRequest(attempt_id=attempt_id or request.key.attempt_id, after_seq=after)
        _, failure = await read_stream(rig.stub.Attach(attach))
        assert failure is not None
        assert (failure.reason, failure.code) == ("ATTEMPT_UNKNOWN", grpc.StatusCode.NOT_FOUND)
        call.cancel()

    play(scenario)


@pytest.mark.parametrize("stage", ["resolve", "start", "chunk", "computed"])
def test_cancel_in_any_phase_ends_the_stream_and_drains(stage: str):
    async def scenario(rig: Rig) -> None:
        rig.ranks[0].hold.add(stage)
        request = prefill_request()
        call = rig.stub.Prefill(request)
        reader = asyncio.create_task(read_stream(call))
        await until(lambda: bool(rig.ranks[0].messages(Submit)))
        reply = await cancel(rig, request.key.attempt_id, wait=True, generation=7)
        _, failure = await reader
        assert (reply.result, reply.drained, reply.generation) == (CANCELLED.CANCELLED, True, 7)
        assert failure is not None
        assert (failure.reason, failure.code) == ("CALLER_CANCELLED", grpc.StatusCode.CANCELLED)
        assert len(rig.ranks[0].messages(Cancel)) == 1
        assert (await cancel(rig, request.key.attempt_id)).result == CANCELLED.CANCELLED

    play(scenario)


def test_cancel_of_a_claimed_ticket_is_too_late():
    async def scenario(rig: Rig) -> None:
        request = prefill_request()
        call = rig.stub.Prefill(request)
        ticket = (await next_of(call, "ticket")).ticket
        claimed = await claim(rig, ticket)
        assert (await cancel(rig, request.key.attempt_id)).result == CANCELLED.TOO_LATE_TICKET_CLAIMED
        assert await settle(rig, ticket, claimed.claim_id)
        await read_stream(call)
        assert (await cancel(rig, request.key.attempt_id)).result == CANCELLED.ALREADY_FINISHED

    play(scenario)


def test_cancel_of_an_unknown_id_keeps_it_out():
    async def scenario(rig: Rig) -> None:
        request = prefill_request()
        reply = await cancel(rig, request.key.attempt_id, wait=True)
        _, failure = await read_stream(rig.stub.Prefill(request))
        assert (reply.result, reply.drained) == (CANCELLED.UNKNOWN, True)
        assert failure is not None
        assert failure.reason == "CALLER_CANCELLED"

    play(scenario)


def test_lost_stream_before_a_claim_cancels_at_the_rank():
    async def scenario(rig: Rig) -> None:
        rig.ranks[0].hold.add("computed")
        call = rig.stub.Prefill(prefill_request())
        await next_of(call, "first_token")
        call.cancel()
        await until(lambda: len(rig.ranks[0].messages(Cancel)) == 1)

    play(scenario)


def test_lost_stream_after_a_claim_lets_the_handoff_end():
    async def scenario(rig: Rig) -> None:
        request = prefill_request()
        call = rig.stub.Prefill(request)
        ticket = (await next_of(call, "ticket")).ticket
        claimed = await claim(rig, ticket)
        call.cancel()
        await until(lambda: not rig.front.lifecycle.attempts.find(request.key.attempt_id).streams)
        assert await settle(rig, ticket, claimed.claim_id)
        events, failure = await read_stream(rig.stub.Prefill(request))
        assert failure is None
        assert events[-1].completed.handoff.state == prefill_pb2.HandoffState.DELIVERED
        assert not rig.ranks[0].messages(Cancel)

    play(scenario)


@pytest.mark.parametrize(
    ("stage", "reason"),
    [("start", "QUEUE_WAIT_EXCEEDED"), ("computed", "COMPUTE_DEADLINE")],
    ids=["queued", "computing"],
)
def test_own_timer_answers_before_the_caller_s_deadline(stage: str, reason: str):
    async def scenario(rig: Rig) -> None:
        rig.ranks[0].hold.add(stage)
        _, failure = await read_stream(rig.stub.Prefill(prefill_request(), timeout=0.6))
        assert failure is not None
        assert (failure.reason, failure.code) == (reason, grpc.StatusCode.DEADLINE_EXCEEDED)
        await until(lambda: len(rig.ranks[0].messages(Cancel)) == 1)

    play(scenario)


def test_queue_wait_budget_is_kept():
    async def scenario(rig: Rig) -> None:
        rig.ranks[0].hold.add("start")
        request = prefill_request()
        request.budget.max_queue_wait.FromMilliseconds(100)
        _, failure = await read_stream(rig.stub.Prefill(request))
        assert failure is not None
        assert failure.reason == "QUEUE_WAIT_EXCEEDED"

    play(scenario)


def test_bad_request_is_refused_with_a_serving_error_and_nothing_reaches_the_rank():
    async def scenario(rig: Rig) -> None:
        request = prefill_request(10)
        request.tokens[3] = 1 << 30
        _, failure = await read_stream(rig.stub.Prefill(request))
        assert failure is not None
        assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
        assert "at position 3" in failure.public_message
        assert not rig.ranks[0].received

    play(scenario)


def test_full_queue_answers_resource_exhausted_with_retry_after():
    async def scenario(rig: Rig) -> None:
        rig.ranks[0].hold.add("start")
        call = rig.stub.Prefill(prefill_request(request_id="a"))
        await next_of(call, "accepted")
        _, failure = await read_stream(rig.stub.Prefill(prefill_request(request_id="b")))
        assert failure is not None
        assert (failure.reason, failure.code) == ("QUEUE_FULL", grpc.StatusCode.RESOURCE_EXHAUSTED)
        assert failure.retry_after_seconds > 0
        call.cancel()

    play(scenario, tiny_config(server=ServerConfig(port=0, metrics_port=-1, probe_port=-1, max_waiting_requests=1)))


def test_message_over_the_limit_carries_no_serving_error():
    async def scenario(rig: Rig) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            async for _ in rig.stub.Prefill(prefill_request(60_000)):
                pass
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        with pytest.raises(AssertionError):
            failure_of(error.value)

    play(scenario, tiny_config(server=ServerConfig(port=0, metrics_port=-1, probe_port=-1, max_message_bytes=16_384)))


def test_handoff_none_completes_without_a_ticket():
    async def scenario(rig: Rig) -> None:
        request = prefill_request()
        request.handoff.mode = prefill_pb2.HandoffPlan.NONE
        events, failure = await read_stream(rig.stub.Prefill(request))
        kinds = [event.WhichOneof("body") for event in events]
        assert failure is None
        assert "ticket" not in kinds
        assert not events[-1].completed.HasField("handoff")

    play(scenario)


def test_ticket_that_nobody_claims_expires_and_the_stream_ends_well():
    async def scenario(rig: Rig) -> None:
        events, failure = await read_stream(rig.stub.Prefill(prefill_request()))
        assert failure is None
        assert events[-1].completed.handoff.state == prefill_pb2.HandoffState.EXPIRED

    play(scenario, tiny_config(handoff=HandoffConfig(ticket_seconds=0.2)))


def test_store_required_failure_is_unavailable_and_gives_no_ticket():
    async def scenario(rig: Rig) -> None:
        rig.ranks[0].fail_store = True
        request = prefill_request()
        request.store.durability = prefill_pb2.StorePlan.REQUIRED
        events, failure = await read_stream(rig.stub.Prefill(request))
        assert failure is not None
        assert (failure.reason, failure.code) == ("STORE_WRITE_FAILED", grpc.StatusCode.UNAVAILABLE)
        assert not any(event.HasField("ticket") for event in events)

    play(scenario)


def test_requests_spread_over_ranks_by_outstanding_rows():
    async def scenario(rig: Rig) -> None:
        for fake in rig.ranks:
            fake.hold.add("start")
        calls = [rig.stub.Prefill(prefill_request(request_id=name)) for name in ("a", "b", "c", "d")]
        ranks = [(await next_of(call, "accepted")).accepted.dp_rank for call in calls]
        assert sorted(ranks) == [0, 0, 1, 1]
        for call in calls:
            call.cancel()

    play(scenario, tiny_config(parallel=ParallelConfig(dp_size=2)))


def test_unary_call_cancelled_while_it_waits_for_the_drain_leaves_no_watcher():
    async def scenario(rig: Rig) -> None:
        rig.ranks[0].hold.add("start")
        request = prefill_request()
        call = rig.stub.Prefill(request)
        await next_of(call, "accepted")
        attempt = rig.front.lifecycle.attempts.find(request.key.attempt_id)
        rig.front.lanes[0].send = lambda _message: None  # the rank never hears of the cancel
        waiting = rig.stub.Cancel(prefill_pb2.CancelRequest(attempt_id=request.key.attempt_id, wait_drained=True))
        await until(lambda: not attempt.is_live)
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiting
        await read_stream(call)
        await until(lambda: not attempt.watchers)

    play(scenario)
