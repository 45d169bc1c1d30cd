"""The servicer's streams against callers that take nothing, or go: what is held for them is bounded, and freed."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc.aio

from prefill_engine.rpc import vision_pb2, vision_pb2_grpc
from prefill_engine.rpc.convert_vision import ServedTower
from prefill_engine.vision.encode_call import Encoded
from prefill_engine.vision.encoder_client import open_encoder_channel
from prefill_engine.vision.encoder_messages import EncoderReady
from prefill_engine.vision.service import MAX_UNREAD_RESULTS, VisionEncoderService
from prefill_engine.vision.ve_front import VisionFront
from prefill_testing.encode_scene import SPEC, EncodeScene, run_scene
from prefill_testing.ve_process import encode_request, png

TOKENS = 17
"""Of 168 x 126."""


def service_of(it: EncodeScene) -> VisionEncoderService:
    """One that is ready, on the scene's queue."""

    def served(ready: EncoderReady) -> ServedTower:
        assert SPEC is not None
        return ServedTower(
            spec=SPEC,
            vision_digest=ready.vision_digest,
            numerics_class=ready.numerics_class,
            columns=ready.columns,
            dtype=ready.dtype,
            device="cpu",
            engine_id="e",
            epoch=1,
            model_id="tiny",
            build="b",
            rows_path=it.rows.path,
            host_id=it.rows.host_id,
            max_patches_per_image=576,
            max_patches_per_batch=16_384,
            max_image_bytes=1,
        )

    front = VisionFront(
        it.queue,
        pool=it.decoder,  # type: ignore[arg-type]
        telemetry=it.seen,  # type: ignore[arg-type]
        build_served=served,
        epoch=1,
        clock=it.queue.clock,
    )
    row_bytes = it.queue.flights.row_bytes
    front.receive(
        EncoderReady(
            vision_digest=b"d" * 32,
            numerics_class="n",
            columns=row_bytes // 2,
            dtype="bf16",
            device="cpu",
            num_layers=3,
            load_seconds=1.0,
        )
    )
    front.ready.set()
    return VisionEncoderService(front, drain_seconds=1.0)


async def encoded(it: EncodeScene) -> Encoded:
    """One image, its rows held by a ticket."""
    item = await it.submit(it.call())
    await it.decoder.end()
    await it.encode_batch()
    outcome = await item.outcome
    assert isinstance(outcome, Encoded)
    return outcome


def test_a_caller_that_takes_no_results_is_not_read_any_further() -> None:
    async def scenario(it: EncodeScene) -> None:
        service = service_of(it)
        it.queue.cache.cache_bytes = it.rows.num_bytes
        ticket = (await encoded(it)).ticket
        assert ticket is not None
        it.queue.release(ticket.ticket_id)
        count = 3 * MAX_UNREAD_RESULTS
        read = 0

        async def requests() -> AsyncIterator[vision_pb2.EncodeRequest]:
            nonlocal read
            for _ in range(count):
                read += 1
                delivery = vision_pb2.Delivery(mode=vision_pb2.Delivery.INLINE)
                yield encode_request(png(168, 126), delivery=delivery)

        results = service.EncodeMany(requests(), None)  # type: ignore[arg-type]
        taken = [await anext(results)]
        for _ in range(10 * count):
            await asyncio.sleep(0)
        # One more was read and waits for room; room for the one that was taken comes with the next that is asked for.
        assert read == MAX_UNREAD_RESULTS + 1
        taken += [result async for result in results]
        assert (len(taken), read) == (count, count)
        assert all(len(result.image.inline_rows) == TOKENS * it.queue.flights.row_bytes for result in taken)

    run_scene(scenario)


@asynccontextmanager
async def served_at(service: VisionEncoderService) -> AsyncIterator[str]:
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    vision_pb2_grpc.add_VisionEncoderServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


def test_a_caller_killed_while_it_pulls_gives_the_rows_back() -> None:
    """More bytes than the connection holds, so the stream stands still in its midst."""

    async def scenario(it: EncodeScene) -> None:
        async with served_at(service_of(it)) as endpoint:
            held = await encoded(it)
            assert held.ticket is not None
            async with open_encoder_channel(endpoint) as channel:
                stub = vision_pb2_grpc.VisionEncoderStub(channel)  # type: ignore[no-untyped-call]
                claim = stub.Claim(vision_pb2.ClaimRequest(ticket_id=held.ticket.ticket_id))
                assert (await claim.read()).offset == 0
                # Its hold ends meanwhile: what is being read stays.
                assert it.queue.release(held.ticket.ticket_id)
                assert it.seen.sent_bytes < held.rows.region.length
                assert it.rows.used_bytes
            while it.rows.used_bytes:
                await asyncio.sleep(0.01)
            await it.assert_nothing_left()

    run_scene(scenario, row_bytes=2 << 20, rows_bytes=TOKENS * 2 << 20)
