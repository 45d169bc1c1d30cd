"""prefill_operator.drain: the call to the engine, its messages, and what is known of drains under way."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc.aio
import pytest
from google.protobuf.descriptor import FieldDescriptor

from prefill_engine.rpc import prefill_pb2
from prefill_operator.drain import Drains, DrainState, GrpcEngineClient
from prefill_operator.drain_wire import DRAIN_METHOD, DrainMessages
from prefill_operator.resources import PoolKey
from prefill_testing.fake_cluster import FakeEngines
from prefill_testing.in_loop import in_loop
from prefill_testing.operator_rig import KEY

Script = Callable[[prefill_pb2.DrainRequest], AsyncIterator[prefill_pb2.DrainStatus]]


@asynccontextmanager
async def _engine(script: Script) -> AsyncIterator[str]:
    """A gRPC server with the engine's own messages and method; yields its address."""

    async def drain(request: prefill_pb2.DrainRequest, _: object) -> AsyncIterator[prefill_pb2.DrainStatus]:
        async for status in script(request):
            yield status

    handler = grpc.unary_stream_rpc_method_handler(
        drain,
        request_deserializer=prefill_pb2.DrainRequest.FromString,
        response_serializer=prefill_pb2.DrainStatus.SerializeToString,
    )
    service, method = DRAIN_METHOD.strip("/").split("/")
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


def _fields(descriptor: object) -> list[tuple[str, int, int, bool]]:
    fields: list[FieldDescriptor] = descriptor.fields  # type: ignore[attr-defined]
    return [(field.name, field.number, field.type, field.is_repeated) for field in fields]


@pytest.mark.parametrize(("ours", "engines"), [("request", "DrainRequest"), ("status", "DrainStatus")])
def test_messages_are_those_of_the_engine(ours: str, engines: str) -> None:
    messages = DrainMessages()
    own = messages.request if ours == "request" else messages.status
    theirs = prefill_pb2.DESCRIPTOR.message_types_by_name[engines]

    assert _fields(own.DESCRIPTOR) == _fields(theirs)
    assert own.DESCRIPTOR.full_name == theirs.full_name


def test_method_is_the_engines() -> None:
    service = prefill_pb2.DESCRIPTOR.services_by_name["PrefillEngine"]

    assert f"/{service.full_name}/Drain" == DRAIN_METHOD
    assert service.methods_by_name["Drain"].server_streaming


@in_loop
async def test_engine_hears_the_deadline_and_tells_when_it_is_done() -> None:
    heard = []

    async def script(request: prefill_pb2.DrainRequest) -> AsyncIterator[prefill_pb2.DrainStatus]:
        heard.append((request.deadline.ToNanoseconds() / 1e9, request.finish_queued))
        yield prefill_pb2.DrainStatus(running=2, waiting=1)
        yield prefill_pb2.DrainStatus(tickets_open=1)
        yield prefill_pb2.DrainStatus(done=True, sent_back=1)

    async with _engine(script) as address:
        reports = [done async for done in GrpcEngineClient().drain(address, timeout_seconds=1.5)]

    assert reports == [False, False, True]
    assert heard == [(1.5, False)]


@in_loop
async def test_refused_connection_is_an_engine_out_of_reach() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(ConnectionError, match="UNAVAILABLE"):
            await anext(GrpcEngineClient().drain(address, timeout_seconds=1.0))


@in_loop
async def test_silent_engine_is_out_of_reach() -> None:
    async def script(_: prefill_pb2.DrainRequest) -> AsyncIterator[prefill_pb2.DrainStatus]:
        yield prefill_pb2.DrainStatus(running=1)
        await asyncio.sleep(60)

    async with _engine(script) as address:
        reports = GrpcEngineClient(silence_seconds=0.1).drain(address, timeout_seconds=1.0)
        assert await anext(reports) is False
        with pytest.raises(ConnectionError, match="no report"):
            await anext(reports)


@in_loop
async def test_finished_drain_is_told_once() -> None:
    changed: list[PoolKey] = []
    drains = Drains(FakeEngines(), on_change=changed.append)
    drains.begin("u1", pool=KEY, address="10.0.0.1:50051", timeout_seconds=5.0)
    drains.begin("u1", pool=KEY, address="10.0.0.1:50051", timeout_seconds=5.0)
    await _until(lambda: changed)

    assert drains.state("u1") == DrainState(done=True)
    assert changed == [KEY]
    await drains.close()


@in_loop
async def test_engine_out_of_reach_is_told_with_the_time_it_began() -> None:
    now = [100.0]
    engines = FakeEngines()
    changed: list[PoolKey] = []
    engines.is_unreachable = True
    drains = Drains(engines, on_change=changed.append, clock=lambda: now[0], retry_seconds=0.001)
    drains.begin("u1", pool=KEY, address="10.0.0.1:50051", timeout_seconds=5.0)
    await _until(lambda: len(engines.calls) > 3)

    assert drains.state("u1") == DrainState(unreachable_since=100.0)
    assert changed == [KEY]
    now[0] = 103.0
    engines.is_unreachable = False
    await _until(lambda: len(changed) > 1)
    assert drains.state("u1") == DrainState(done=True)
    assert engines.calls[0] == ("10.0.0.1:50051", 5.0)
    assert engines.calls[-1] == ("10.0.0.1:50051", 2.0)
    await drains.close()


@in_loop
async def test_pod_without_an_address_is_out_of_reach_from_the_start() -> None:
    drains = Drains(FakeEngines(), on_change=lambda _: None, clock=lambda: 7.0)
    drains.begin("u1", pool=KEY, address="", timeout_seconds=5.0)

    assert drains.state("u1") == DrainState(unreachable_since=7.0)
    await drains.close()


@in_loop
async def test_calls_end_with_their_pods() -> None:
    engines = FakeEngines()
    engines.done.clear()
    drains = Drains(engines, on_change=lambda _: None)
    for uid in ("u1", "u2"):
        drains.begin(uid, pool=KEY, address="10.0.0.1:50051", timeout_seconds=5.0)

    drains.keep_only(KEY, ["u2"])

    assert drains.state("u1") is None
    assert drains.state("u2") is not None
    await drains.close()
    assert drains.state("u2") is None


async def _until(check: Callable[[], object]) -> None:
    while not check():
        await asyncio.sleep(0.001)
