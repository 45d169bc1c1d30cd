"""A front with real gRPC ports and lanes, and fake ranks behind them, inside one event loop: for tests of the servicers."""

import asyncio
import contextlib
import secrets
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
import msgspec
import zmq.asyncio
from prometheus_client import CollectorRegistry

from prefill_engine.front.front import Front
from prefill_engine.front.ports import open_ports
from prefill_engine.rpc import common_pb2, handoff_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from prefill_engine.serve import build_front, open_rows
from prefill_engine.settings import HostIdentity
from prefill_plan.config import EngineConfig, HandoffConfig, KvConfig, ModelConfig, ReplayConfig, ServerConfig
from prefill_plan.model_spec import load_model_spec
from prefill_testing.fake_rank import FakeRank, ready_message

TINY_MODEL = Path(__file__).parents[1] / "golden" / "tiny_dense"
IDENTITY = HostIdentity(engine_id="pe-test", pod_ip="", zone="zone-a", plan_hash="plan-1")


def tiny_config(**parts: object) -> EngineConfig:
    """The tiny model on any free ports; parts replace whole parts of the configuration."""
    config = EngineConfig(
        model=ModelConfig(path=str(TINY_MODEL), name="tiny"),
        server=ServerConfig(port=0, metrics_port=-1, probe_port=-1),
        replay=ReplayConfig(keep_tokens=24),
        handoff=HandoffConfig(ticket_seconds=5.0),
        kv=KvConfig(pool_tokens=8192, state_slots=4),
        max_context_tokens=4096,
    )
    return msgspec.structs.replace(config, **parts)


@dataclass(slots=True, kw_only=True)
class Rig:
    """What a test talks to. stub, source: clients of both services on one channel."""

    front: Front
    ranks: Sequence[FakeRank]
    channel: grpc.aio.Channel
    stub: prefill_pb2_grpc.PrefillEngineStub
    source: handoff_pb2_grpc.HandoffSourceStub
    port: int
    registry: CollectorRegistry


@contextlib.asynccontextmanager
async def engine_rig(
    config: EngineConfig, *, ready: bool = True, data_port: int = -1, data_transport: str = "tcp"
) -> AsyncIterator[Rig]:
    """Everything up; with ready the fake ranks have reported. data_port: of their data transport, -1 = none."""
    spec = load_model_spec(Path(config.model.path))
    registry = CollectorRegistry()
    async with contextlib.AsyncExitStack() as stack:
        socket_dir = stack.enter_context(tempfile.TemporaryDirectory(prefix="pe-"))
        context = zmq.asyncio.Context()
        stack.callback(context.term)
        front = build_front(
            config,
            spec,
            context=context,
            socket_dir=socket_dir,
            registry=registry,
            epoch=1_000_123,
            host=IDENTITY,
            rows=open_rows(config, IDENTITY),
        )
        for lanes in front.lanes.values():
            stack.callback(lanes.close)
        if front.vision is not None:
            stack.push_async_callback(front.vision.close)
        ranks = [await stack.enter_async_context(FakeRank(socket_dir=socket_dir, rank=rank)) for rank in front.lanes]
        stack.push_async_callback(_end, asyncio.create_task(front.run()))
        ports = await open_ports(front, config, registry=registry)
        stack.push_async_callback(ports.close)
        stack.push_async_callback(front.sink_caller.close)
        front.endpoint = f"127.0.0.1:{ports.port}"
        if ready:
            for fake in ranks:
                message = ready_message(fake.rank, spec, config, data_port=data_port, data_transport=data_transport)
                await fake.send(message)
            await asyncio.wait_for(front.ready.wait(), 5)
        options = [("grpc.max_receive_message_length", 16 << 20), ("grpc.max_send_message_length", 16 << 20)]
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(front.endpoint, options=options))
        yield Rig(
            front=front,
            ranks=ranks,
            channel=channel,
            stub=prefill_pb2_grpc.PrefillEngineStub(channel),
            source=handoff_pb2_grpc.HandoffSourceStub(channel),
            port=ports.port,
            registry=registry,
        )


def play(scenario: Callable[[Rig], Awaitable[None]], config: EngineConfig | None = None, *, ready: bool = True) -> None:
    """Runs a scenario of at most 15 s on a rig of its own."""

    async def run() -> None:
        async with engine_rig(config or tiny_config(), ready=ready) as rig:
            await asyncio.wait_for(scenario(rig), 15)

    asyncio.run(run())


async def _end(task: "asyncio.Task[None]") -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def prefill_request(
    num_tokens: int = 300, *, request_id: str = "r1", attempt: int = 1, attempt_id: bytes = b""
) -> prefill_pb2.PrefillRequest:
    """A valid request of the tiny model: PULL hand-off, store best effort."""
    return prefill_pb2.PrefillRequest(
        protocol=1,
        key=common_pb2.AttemptKey(
            request_id=request_id, attempt=attempt, attempt_id=attempt_id or secrets.token_bytes(16)
        ),
        tokens=[3 + i % 50 for i in range(num_tokens)],
    )
