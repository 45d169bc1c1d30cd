"""Channels of the engine's calls to decode peers: few are kept, and none is closed under a call."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest

from prefill_engine.front.call import PushPlan
from prefill_engine.front.grants import CallKind, Grants, SinkAnswer, SinkCall
from prefill_engine.front.sink_calls import SinkCaller
from prefill_engine.rpc import handoff_pb2, handoff_pb2_grpc
from prefill_testing.engine_rig import tiny_config
from prefill_testing.fake_rank import tiny_served_model
from prefill_testing.in_loop import in_loop
from prefill_testing.raw_peer import until

GRANT = b"g" * 16
SERVED = tiny_served_model(tiny_config())


class Sink(handoff_pb2_grpc.HandoffSinkServicer):
    """may_answer: renewals wait for it."""

    def __init__(self) -> None:
        self.is_asked, self.may_answer = asyncio.Event(), asyncio.Event()
        self.peers: set[str] = set()

    async def Reserve(self, request: handoff_pb2.ReserveRequest, context: Any) -> handoff_pb2.ReserveResponse:
        self.peers.add(context.peer())
        self.is_asked.set()
        await self.may_answer.wait()
        return handoff_pb2.ReserveResponse(grant_id=GRANT)


@asynccontextmanager
async def serving(sink: Sink) -> AsyncIterator[str]:
    server = grpc.aio.server()
    handoff_pb2_grpc.add_HandoffSinkServicer_to_server(sink, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


def renewal(endpoint: str) -> SinkCall:
    plan = PushPlan(endpoint=endpoint, engine_id="d", grant_id=GRANT, lease_seconds=30.0, regions=(), early_send=True)
    grant = Grants().open(plan, key=("r", 1, b"a" * 16), kv_tokens=300, rank=0, now=0.0)
    return SinkCall(kind=CallKind.RENEW, grant=grant, sent_at=0.0, writes_drained=True, generation=1)


@in_loop
async def test_channel_with_a_call_on_it_outlives_any_number_of_other_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefill_engine.front.sink_calls.CALL_SECONDS", 60.0)
    slow, other = Sink(), Sink()
    other.may_answer.set()
    answers: list[tuple[SinkCall, SinkAnswer]] = []
    async with serving(slow) as slow_endpoint, serving(other) as other_endpoint:
        caller = SinkCaller(lambda call, answer: answers.append((call, answer)), most_channels=1)
        caller.start(renewal(slow_endpoint), None, SERVED)
        await slow.is_asked.wait()
        for number in range(1, 3):
            caller.start(renewal(other_endpoint), None, SERVED)
            await until(lambda number=number: len(answers) == number)
        slow.may_answer.set()
        await until(lambda: len(answers) == 3)
        await caller.close()
    assert [(answer.answered, answer.gone) for _, answer in answers] == [(True, False)] * 3
    assert answers[2][0].grant.plan.endpoint == slow_endpoint


@in_loop
async def test_channels_beyond_the_limit_are_closed_when_idle() -> None:
    first, second = Sink(), Sink()
    answers: list[SinkAnswer] = []
    async with serving(first) as one, serving(second) as two:
        caller = SinkCaller(lambda _call, answer: answers.append(answer), most_channels=1)
        for sink in (first, second):
            sink.may_answer.set()
        for number, endpoint in enumerate((one, two, one), 1):
            caller.start(renewal(endpoint), None, SERVED)
            await until(lambda number=number: len(answers) == number)
        await caller.close()
    assert len(first.peers) == 2, "its first channel was closed for the second peer's"
