"""prefill_operator.engine_client: calls to engines, and their messages against the engine's own."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import grpc.aio
import pytest
from google.protobuf.descriptor import FieldDescriptor

from prefill_engine.rpc import prefill_pb2, vision_pb2, vision_pb2_grpc
from prefill_operator.engine_client import GrpcEngineClient
from prefill_operator.engine_load import EngineReport, PatchCount
from prefill_operator.engine_wire import (
    DRAIN_METHOD,
    ENCODER_DRAIN_METHOD,
    ENCODER_LOAD_METHOD,
    GET_LOAD_METHOD,
    EngineMessages,
    LoadState,
)
from prefill_operator.model import LoadProgress
from prefill_operator.names import Kind
from prefill_testing.fake_encoder import FakeEncoder
from prefill_testing.in_loop import in_loop

Script = Callable[[prefill_pb2.DrainRequest], AsyncIterator[prefill_pb2.DrainStatus]]
Load = Callable[[], Awaitable[prefill_pb2.LoadReport]]


async def _no_drain(_: prefill_pb2.DrainRequest) -> AsyncIterator[prefill_pb2.DrainStatus]:
    raise AssertionError("nobody asked for a drain")
    yield


async def _no_load() -> prefill_pb2.LoadReport:
    raise AssertionError("nobody asked for the load")


@asynccontextmanager
async def _engine(script: Script = _no_drain, load: Load = _no_load) -> AsyncIterator[str]:
    """A gRPC server with the engine's own messages and methods; yields its address."""

    async def drain(request: prefill_pb2.DrainRequest, _: object) -> AsyncIterator[prefill_pb2.DrainStatus]:
        async for status in script(request):
            yield status

    async def get_load(_: prefill_pb2.GetLoadRequest, __: object) -> prefill_pb2.LoadReport:
        return await load()

    handlers = {
        DRAIN_METHOD.rpartition("/")[2]: grpc.unary_stream_rpc_method_handler(
            drain,
            request_deserializer=prefill_pb2.DrainRequest.FromString,
            response_serializer=prefill_pb2.DrainStatus.SerializeToString,
        ),
        GET_LOAD_METHOD.rpartition("/")[2]: grpc.unary_unary_rpc_method_handler(
            get_load,
            request_deserializer=prefill_pb2.GetLoadRequest.FromString,
            response_serializer=prefill_pb2.LoadReport.SerializeToString,
        ),
    }
    server = grpc.aio.server()
    service = DRAIN_METHOD.strip("/").partition("/")[0]
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


def _fields(descriptor: object) -> list[tuple[str, int, int, bool]]:
    fields: list[FieldDescriptor] = descriptor.fields  # type: ignore[attr-defined]
    return [(field.name, field.number, field.type, field.is_repeated) for field in fields]


@pytest.mark.parametrize(
    ("ours", "engines"),
    [
        ("drain_request", "DrainRequest"),
        ("drain_status", "DrainStatus"),
        ("load_request", "GetLoadRequest"),
        ("encoder_drain_request", "VisionDrainRequest"),
        ("encoder_drain_status", "VisionDrainStatus"),
        ("encoder_load_request", "VisionWatchRequest"),
    ],
)
def test_messages_are_those_of_the_engine(ours: str, engines: str) -> None:
    own = getattr(EngineMessages(), ours)
    file = vision_pb2 if engines.startswith("Vision") else prefill_pb2
    theirs = file.DESCRIPTOR.message_types_by_name[engines]

    assert _fields(own.DESCRIPTOR) == _fields(theirs)
    assert own.DESCRIPTOR.full_name == theirs.full_name


def test_load_reports_are_parts_of_the_engines() -> None:
    for own, theirs in (
        (EngineMessages().load_report.DESCRIPTOR, prefill_pb2.DESCRIPTOR.message_types_by_name["LoadReport"]),
        (EngineMessages().encoder_load.DESCRIPTOR, vision_pb2.DESCRIPTOR.message_types_by_name["VisionLoad"]),
    ):
        assert own.full_name == theirs.full_name
        assert set(_fields(own)) <= set(_fields(theirs))


def test_states_are_the_engines() -> None:
    theirs = prefill_pb2.DESCRIPTOR.message_types_by_name["LoadReport"]
    states = {value.name: value.number for value in theirs.enum_types_by_name["State"].values}
    assert {state.name: state.value for state in LoadState} == states


@pytest.mark.parametrize(
    ("path", "is_stream"),
    [(DRAIN_METHOD, True), (GET_LOAD_METHOD, False), (ENCODER_DRAIN_METHOD, True), (ENCODER_LOAD_METHOD, True)],
)
def test_methods_are_the_engines(path: str, is_stream: bool) -> None:
    services = {**prefill_pb2.DESCRIPTOR.services_by_name, **vision_pb2.DESCRIPTOR.services_by_name}
    service = services[path.strip("/").split("/")[0].removeprefix("pe.v1.")]
    name, method = path.strip("/").split("/")

    assert name == service.full_name
    assert service.methods_by_name[method].server_streaming == is_stream


@in_loop
async def test_engine_hears_the_deadline_and_tells_when_it_is_done() -> None:
    heard = []

    async def script(request: prefill_pb2.DrainRequest) -> AsyncIterator[prefill_pb2.DrainStatus]:
        heard.append((request.deadline.ToNanoseconds() / 1e9, request.finish_queued))
        yield prefill_pb2.DrainStatus(running=2, waiting=1)
        yield prefill_pb2.DrainStatus(tickets_open=1)
        yield prefill_pb2.DrainStatus(done=True, sent_back=1)

    async with _engine(script) as address:
        reports = [
            done async for done in GrpcEngineClient().drain(address, kind=Kind.PREFILL_POOL, timeout_seconds=1.5)
        ]

    assert reports == [False, False, True]
    assert heard == [(1.5, False)]


class _Encoder(vision_pb2_grpc.VisionEncoderServicer):
    """An encoder that drains; it serves nothing of an engine."""

    def __init__(self) -> None:
        self.heard: list[float] = []

    async def Drain(
        self, request: vision_pb2.VisionDrainRequest, _: object
    ) -> AsyncIterator[vision_pb2.VisionDrainStatus]:
        self.heard.append(request.deadline.ToNanoseconds() / 1e9)
        yield vision_pb2.VisionDrainStatus(patches_left=9_000, tickets_open=2)
        yield vision_pb2.VisionDrainStatus(done=True)


@in_loop
async def test_encoder_is_drained_by_its_own_service() -> None:
    server, encoder = grpc.aio.server(), _Encoder()
    vision_pb2_grpc.add_VisionEncoderServicer_to_server(encoder, server)  # type: ignore[no-untyped-call]
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        calls = GrpcEngineClient().drain(address, kind=Kind.VE_POOL, timeout_seconds=2.5)
        reports = [done async for done in calls]
        with pytest.raises(ConnectionError, match="UNIMPLEMENTED"):
            await anext(GrpcEngineClient().drain(address, kind=Kind.PREFILL_POOL, timeout_seconds=2.5))
    finally:
        await server.stop(None)

    assert reports == [False, True]
    assert encoder.heard == [2.5]


@in_loop
async def test_refused_connection_is_an_engine_out_of_reach() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(ConnectionError, match="UNAVAILABLE"):
            await anext(GrpcEngineClient().drain(address, kind=Kind.PREFILL_POOL, timeout_seconds=1.0))


@in_loop
async def test_silent_engine_is_out_of_reach() -> None:
    async def script(_: prefill_pb2.DrainRequest) -> AsyncIterator[prefill_pb2.DrainStatus]:
        yield prefill_pb2.DrainStatus(running=1)
        await asyncio.sleep(60)

    async with _engine(script) as address:
        reports = GrpcEngineClient(silence_seconds=0.1).drain(address, kind=Kind.PREFILL_POOL, timeout_seconds=1.0)
        assert await anext(reports) is False
        with pytest.raises(ConnectionError, match="no report"):
            await anext(reports)


@pytest.mark.parametrize(
    ("said", "heard"), [(3, LoadState.DEGRADED), (2, LoadState.READY), (99, LoadState.STATE_UNSPECIFIED)]
)
@in_loop
async def test_state_is_read_out_of_a_whole_report(said: int, heard: LoadState) -> None:
    async def load() -> prefill_pb2.LoadReport:
        ranks = [prefill_pb2.RankLoad(rank=1, waiting_rows=7)]
        return prefill_pb2.LoadReport(epoch=1, state=said, ranks=ranks, known_attempts=[b"a"])  # type: ignore[arg-type]

    async with _engine(load=load) as address:
        assert await GrpcEngineClient().report(address, kind=Kind.PREFILL_POOL) == EngineReport(state=heard)


@pytest.mark.parametrize(
    ("state", "progress"),
    [("STARTING", LoadProgress(loaded_bytes=301 * 10**9, total_bytes=510 * 10**9)), ("READY", None)],
)
@in_loop
async def test_backlog_and_progress_are_read_out_of_a_report(state: str, progress: LoadProgress | None) -> None:
    async def load() -> prefill_pb2.LoadReport:
        report = prefill_pb2.LoadReport(weight_bytes_loaded=301 * 10**9, weight_bytes_total=510 * 10**9)
        report.state = prefill_pb2.LoadReport.State.Value(state)
        report.backlog.FromMilliseconds(1500)
        return report

    async with _engine(load=load) as address:
        report = await GrpcEngineClient().report(address, kind=Kind.PREFILL_POOL)
    assert (report.backlog_milliseconds, report.progress) == (1500.0, progress)


@in_loop
async def test_encoder_is_asked_for_its_first_report_only() -> None:
    """A real gRPC server with the encoder's own messages."""
    async with FakeEncoder(digest=b"", columns=2, patches_queued=900, b_ms=0.5, epoch=7) as encoder:
        report = await GrpcEngineClient().report(encoder.address, kind=Kind.VE_POOL)

    assert report.patches == PatchCount(epoch=7, queued=900, encoded=0)
    assert report.backlog_milliseconds == 450.0


@in_loop
async def test_engine_that_is_not_there_has_no_state() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with pytest.raises(ConnectionError, match="UNAVAILABLE"):
            await GrpcEngineClient().report(f"127.0.0.1:{unused.getsockname()[1]}", kind=Kind.PREFILL_POOL)


@in_loop
async def test_frozen_engine_has_no_state() -> None:
    async def load() -> prefill_pb2.LoadReport:
        await asyncio.sleep(60)
        raise AssertionError

    async with _engine(load=load) as address:
        with pytest.raises(ConnectionError, match="DEADLINE_EXCEEDED"):
            await GrpcEngineClient().report(address, kind=Kind.PREFILL_POOL)
