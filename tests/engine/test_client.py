"""PrefillClient against a small server on loopback: events, options, error mapping."""

from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.duration_pb2 import Duration

from prefill_engine import timeline
from prefill_engine.client import PrefillAttempt, PrefillClient, PrefillOptions, build_request
from prefill_engine.rpc import common_pb2, prefill_pb2
from prefill_engine.rpc.status import Failure
from prefill_plan.errors import CallFailed
from prefill_testing.scripted_engine import ROW, SECRET, USAGE, Engine, call, ticket_message


def event(seq: int, **body: Any) -> prefill_pb2.PrefillEvent:
    return prefill_pb2.PrefillEvent(seq=seq, since_accept=Duration(nanos=seq * 1_000_000), **body)


def prefill(engine: Engine) -> PrefillAttempt:
    async def scenario(endpoint: str) -> PrefillAttempt:
        async with PrefillClient(endpoint) as client:
            attempt = client.prefill([1, 2, 3], PrefillOptions(), request_id="r-1", timeout_seconds=10.0)
            await attempt.finish()
            return attempt

    return call(scenario, engine=engine)


ALL_EVENTS = [
    event(1, accepted=prefill_pb2.Accepted(dp_rank=1, effective_hit=0, compute_rows=3)),
    event(2, queued=prefill_pb2.Queued(ahead_requests=2, ahead_rows=7, waiting_for=common_pb2.PHASE_QUEUE)),
    event(3, image=prefill_pb2.ImageState(index=0, ready=True, rows=3, took=Duration(seconds=1))),
    event(4, swap_in=prefill_pb2.SwapIn(layers_ready=1, layers_total=2, bytes=10)),
    event(5, chunk=prefill_pb2.ChunkDone(rows_done=3, rows_total=3, chunk_rows=3, step=Duration(nanos=5), step_id=6)),
    event(6, first_token=prefill_pb2.FirstToken(token=9, logprob=-0.5)),
    event(7, ticket=ticket_message()),
    event(8, store=prefill_pb2.StoreState(blocks_committed=1, blocks_total=2, swa_published=[128], blocks_failed=1)),
    event(9, handoff=prefill_pb2.HandoffState(state=prefill_pb2.HandoffState.CLAIMED, bytes_done=1, bytes_total=2)),
    event(10),
    event(
        11,
        completed=prefill_pb2.Completed(
            usage=USAGE,
            timeline=[prefill_pb2.Stage(phase=common_pb2.PHASE_COMPUTE, length=Duration(seconds=2), note="n")],
        ),
    ),
]


def test_events_become_records_in_order_and_unknown_ones_are_skipped() -> None:
    attempt = prefill(Engine(ALL_EVENTS))
    assert [type(event.body).__name__ for event in attempt.events] == [
        "Accepted",
        "Queued",
        "ImageReady",
        "SwapIn",
        "ChunkDone",
        "FirstToken",
        "TicketOffered",
        "StoreState",
        "HandoffState",
        "Completed",
    ]
    assert attempt.events[-1].seq == 11
    assert attempt.events[-1].since_accept_seconds == pytest.approx(0.011)
    assert attempt.events[-1].body == timeline.Completed(
        usage=timeline.Usage(
            prompt_tokens=3,
            cached_tokens=0,
            computed_tokens=3,
            replayed_tokens=0,
            image_tokens=0,
            kv_bytes_moved=0,
        ),
        stages=(timeline.Stage(phase="COMPUTE", start_seconds=0.0, length_seconds=2.0, note="n"),),
        handoff=None,
        store=None,
    )


def test_ticket_is_kept_apart_from_the_printable_record() -> None:
    attempt = prefill(Engine(ALL_EVENTS))
    assert attempt.ticket is not None
    assert attempt.ticket.ticket_id == SECRET
    assert attempt.ticket.component_bytes == {common_pb2.COMPONENT_KIND_REQUEST_ROW: len(ROW)}
    assert (attempt.ticket.record_format, attempt.ticket.window_rows) == ("fp4", 134)
    printable = repr(attempt.ticket) + repr(attempt.record("r"))
    assert "ssss" not in printable
    offered = timeline.last_event(attempt.record("r"), timeline.TicketOffered)
    assert offered == timeline.TicketOffered(kv_tokens=3, lease_seconds=30.0, components=(("REQUEST_ROW", len(ROW)),))


def test_each_request_has_a_fresh_attempt_id() -> None:
    first, second = (build_request([1], PrefillOptions(), request_id="r") for _ in range(2))
    assert len(first.key.attempt_id) == len(second.key.attempt_id) == 16
    assert first.key.attempt_id != second.key.attempt_id


def test_options_reach_the_request() -> None:
    options = PrefillOptions(
        store="required",
        handoff=False,
        hit_keys=(b"k" * 32, b"l" * 32),
        cache_scope=b"c" * 32,
        priority="interactive",
        step_cap_seconds=0.25,
        max_queue_wait_seconds=1.5,
        seed=7,
    )
    request = build_request([5, 6], options, request_id="r", attempt=2)
    assert list(request.tokens) == [5, 6]
    assert request.store.durability == prefill_pb2.StorePlan.REQUIRED
    assert request.handoff.mode == prefill_pb2.HandoffPlan.NONE
    assert request.hit.tokens == 256
    assert list(request.hit.block_keys) == [b"k" * 32, b"l" * 32]
    assert request.tenant.priority == common_pb2.PRIORITY_CLASS_INTERACTIVE
    assert request.budget.step_cap.ToMilliseconds() == 250
    assert request.budget.max_queue_wait.ToMilliseconds() == 1500
    assert request.first_token.seed == 7
    assert request.key.attempt == 2


def test_a_serving_error_is_readable_and_keeps_its_parts() -> None:
    failure = Failure(
        reason="QUEUE_FULL",
        retry="OTHER_PE",
        phase="ADMISSION",
        public_message="2,000,000 rows wait, limit 2,000,000",
        operator_detail="rank 1",
        retry_after_seconds=1.5,
    )
    with pytest.raises(CallFailed) as caught:
        prefill(Engine([], failure))
    error = caught.value
    assert (error.status, error.reason, error.retry, error.phase) == (
        "RESOURCE_EXHAUSTED",
        "QUEUE_FULL",
        "OTHER_PE",
        "ADMISSION",
    )
    assert (
        "QUEUE_FULL in phase ADMISSION: 2,000,000 rows wait, limit 2,000,000 (rank 1); retry: OTHER_PE after 1.5 s"
        in str(error)
    )


@pytest.mark.parametrize(
    ("status", "meaning"),
    [
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "over the size limit"),
        (grpc.StatusCode.UNAVAILABLE, "no engine answers there"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "our own deadline"),
        (grpc.StatusCode.UNIMPLEMENTED, "from the transport"),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_a_bare_status_says_what_it_alone_means(status: grpc.StatusCode, meaning: str) -> None:
    with pytest.raises(CallFailed, match=meaning) as caught:
        prefill(Engine([], status))
    assert caught.value.status == status.name
    assert caught.value.reason == ""


def test_events_before_a_failure_are_kept() -> None:
    failure = Failure(reason="RANK_LOST", public_message="rank 1 is gone", phase="COMPUTE")

    async def scenario(endpoint: str) -> tuple[PrefillAttempt, str]:
        async with PrefillClient(endpoint) as client:
            attempt = client.prefill([1, 2, 3], PrefillOptions())
            with pytest.raises(CallFailed) as caught:
                await attempt.finish()
            return attempt, caught.value.reason

    attempt, reason = call(scenario, engine=Engine(ALL_EVENTS[:5], failure))
    assert reason == "RANK_LOST"
    assert len(attempt.events) == 5


def test_a_stream_without_completed_is_an_error() -> None:
    with pytest.raises(CallFailed, match="ended the stream after 1 events without Completed"):
        prefill(Engine(ALL_EVENTS[:1]))


def test_nobody_listening_is_unavailable() -> None:
    async def scenario(endpoint: str) -> None:
        host = endpoint.split(":")[0]
        async with PrefillClient(f"{host}:1") as client:
            await client.server_info(timeout_seconds=5.0)

    with pytest.raises(CallFailed, match=r"127\.0\.0\.1:1: UNAVAILABLE"):
        call(scenario)


@pytest.mark.parametrize(("attempt_id", "result"), [(SECRET, "CANCELLED"), (b"x" * 16, "UNKNOWN")])
def test_cancel_names_its_result(attempt_id: bytes, result: str) -> None:
    async def scenario(endpoint: str) -> str:
        async with PrefillClient(endpoint) as client:
            return await client.cancel(attempt_id, wait_drained=True)

    assert call(scenario) == result
