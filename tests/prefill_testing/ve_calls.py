"""Calls to a running VE as tests make them: with a time limit, refusals as Failure, rows with their checksums."""

import asyncio
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import crc32c

from prefill_engine.rpc import vision_pb2, vision_pb2_grpc
from prefill_engine.rpc.convert import to_duration
from prefill_engine.vision.encoder_client import open_encoder_channel
from prefill_testing.ve_process import VeProcess

WAIT_SECONDS = 60.0
Stub = vision_pb2_grpc.VisionEncoderStub


@asynccontextmanager
async def stub_of(encoder: VeProcess) -> AsyncIterator[Stub]:
    async with open_encoder_channel(encoder.endpoint) as channel:
        yield Stub(channel)


def run_calls(encoder: VeProcess, scenario: Callable[[Stub], Awaitable[None]]) -> None:
    async def inside() -> None:
        async with stub_of(encoder) as stub, asyncio.timeout(WAIT_SECONDS):
            await scenario(stub)

    asyncio.run(inside())


async def claimed(stub: Stub, ticket_id: bytes) -> bytes:
    frames = [frame async for frame in stub.Claim(vision_pb2.ClaimRequest(ticket_id=ticket_id))]
    assert [crc32c.crc32c(frame.data) for frame in frames] == [frame.crc32c for frame in frames]
    assert frames[-1].last
    return b"".join(frame.data for frame in frames)


async def ack(stub: Stub, ticket_id: bytes) -> bool:
    return bool((await stub.Ack(vision_pb2.AckRequest(ticket_id=ticket_id, ok=True))).released)


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    while not await condition():
        await asyncio.sleep(0.02)


async def tickets_open(stub: Stub) -> int:
    call = stub.WatchLoad(vision_pb2.VisionWatchRequest())
    report = await call.read()
    call.cancel()
    return int(report.tickets_open)


def metrics(encoder: VeProcess) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{encoder.ready()['metrics_port']}/metrics") as reply:
        lines = [line for line in reply.read().decode().splitlines() if line and line[0] != "#"]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


async def until_queued(stub: Stub, count: int, *, in_cpu: int | None = None) -> None:
    """Until so many images are on their way, in_cpu of them not yet decoded."""
    async for report in stub.WatchLoad(vision_pb2.VisionWatchRequest(period=to_duration(0.02))):
        if report.images_queued == count and in_cpu in (None, report.images_in_cpu):
            return
