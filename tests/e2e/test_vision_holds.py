"""Who holds what of a real VE, and who gets it back: cancelled, forgotten, left behind; queues and memory that are full.

Its encoder process is a fake that answers no batch while its gate is closed, so what a test says is under way is under way.
"""

import asyncio
import secrets
from collections.abc import Iterator

import pytest

from prefill_engine.rpc import common_pb2, vision_pb2
from prefill_engine.rpc.convert import to_duration
from prefill_testing.rpc_calls import refused
from prefill_testing.ve_calls import Stub, ack, claimed, metrics, run_calls, tickets_open, until, until_queued
from prefill_testing.ve_process import VeProcess, closed_gate, encode_request, png, start_gated_ve

CANCELLED = 've_images_total{outcome="cancelled",reason="CALLER_CANCELLED"}'


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VeProcess]:
    with start_gated_ve(tmp_path_factory.mktemp("ve")) as started:
        yield started


@pytest.fixture(scope="module")
def tight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VeProcess]:
    """Room for one large image, and for the rows of eight."""
    settings = ("batching.max_patches_per_image=576", "queue.max_patches=600", "rows.cache_bytes=0")
    with start_gated_ve(tmp_path_factory.mktemp("tight"), *settings, "rows.memory_bytes=98304") as started:
        yield started


def test_cancel_ends_running_held_and_coming_items(encoder: VeProcess) -> None:
    async def scenario(stub: Stub) -> None:
        parent = common_pb2.AttemptKey(attempt_id=secrets.token_bytes(16))
        held = (await stub.Encode(encode_request(png(168, 126, seed=90), parent=parent))).image
        with closed_gate(encoder):
            running = asyncio.ensure_future(stub.Encode(encode_request(png(168, 126, seed=91), parent=parent)))
            await until_queued(stub, 1)
            answer = await stub.Cancel(vision_pb2.CancelEncodeRequest(parent_attempt_id=parent.attempt_id))
            assert answer.cancelled == 2
            assert (await refused(running)).reason == "CALLER_CANCELLED"
        assert (await refused(claimed(stub, held.ticket_id))).reason == "EMBEDDING_GONE"
        late = encode_request(png(168, 126, seed=92), parent=parent)
        assert (await refused(stub.Encode(late))).reason == "CALLER_CANCELLED"

    run_calls(encoder, scenario)


def test_rows_that_nobody_acknowledges_are_freed(encoder: VeProcess) -> None:
    async def scenario(stub: Stub) -> None:
        short = vision_pb2.Delivery(hold=to_duration(0.3))
        forgotten = (await stub.Encode(encode_request(png(168, 126, seed=100), delivery=short))).image
        longer = vision_pb2.Delivery(hold=to_duration(20.0))
        renewed = (await stub.Encode(encode_request(png(168, 126, seed=101), delivery=longer))).image
        renewal = vision_pb2.RenewHoldRequest(ticket_ids=[renewed.ticket_id, b"x" * 16], hold=to_duration(30.0))
        assert list((await stub.Renew(renewal)).lost) == [b"x" * 16]

        async def is_one_left() -> bool:
            return await tickets_open(stub) == 1

        await until(is_one_left)
        assert not await ack(stub, forgotten.ticket_id)
        assert await ack(stub, renewed.ticket_id)

    run_calls(encoder, scenario)


def test_caller_that_leaves_takes_its_image_along(encoder: VeProcess) -> None:
    item_id = secrets.token_bytes(16)

    async def scenario(stub: Stub) -> None:
        with closed_gate(encoder):
            blocker = asyncio.ensure_future(stub.Encode(encode_request(png(168, 126, seed=110))))
            call = stub.Encode(encode_request(png(168, 126, seed=111), item_id=item_id))
            await until_queued(stub, 2)
            call.cancel()

            async def is_logged() -> bool:
                return any(line["item_id"] == item_id.hex() for line in encoder.log("image ended"))

            await until(is_logged)
        await ack(stub, (await blocker).image.ticket_id)
        assert await tickets_open(stub) == 0

    run_calls(encoder, scenario)
    (line,) = [line for line in encoder.log("image ended") if line["item_id"] == item_id.hex()]
    assert (line["outcome"], line["reason"]) == ("cancelled", "CALLER_CANCELLED")


def test_stream_that_breaks_takes_its_images_along(encoder: VeProcess) -> None:
    parent = common_pb2.AttemptKey(attempt_id=secrets.token_bytes(16))
    requests = [encode_request(png(168, 126, seed=130 + index), parent=parent) for index in range(20)]
    before = metrics(encoder).get(CANCELLED, 0.0)

    async def scenario(stub: Stub) -> None:
        call = stub.EncodeMany()
        await call.write(requests[0])
        assert (await call.read()).HasField("image")
        with closed_gate(encoder):
            for request in requests[1:]:
                await call.write(request)
            await until_queued(stub, 19)
            call.cancel()

            async def are_cancelled() -> bool:
                return metrics(encoder).get(CANCELLED, 0.0) - before == 19

            await until(are_cancelled)
        await until_queued(stub, 0)
        report = await stub.WatchLoad(vision_pb2.VisionWatchRequest()).read()
        assert report.patches_queued == 0
        # The rows that were done before the break wait for an Ack that can't come; their attempt's Cancel frees them at once.
        assert report.tickets_open == 1
        await stub.Cancel(vision_pb2.CancelEncodeRequest(parent_attempt_id=parent.attempt_id))
        assert await tickets_open(stub) == 0

    run_calls(encoder, scenario)


def test_full_queue_says_when_to_come_again_and_a_stream_waits(tight: VeProcess) -> None:
    async def scenario(stub: Stub) -> None:
        with closed_gate(tight):
            first = asyncio.ensure_future(stub.Encode(encode_request(png(290, 290, seed=0))))
            await until_queued(stub, 1)
            failure = await refused(stub.Encode(encode_request(png(290, 290, seed=1))))
        assert (failure.reason, failure.retry_scope) == ("PATCH_QUEUE_FULL", "SAME_LATER")
        assert failure.retry_after_seconds > 0
        assert "limit 600" in failure.public_message
        assert await ack(stub, (await first).image.ticket_id)
        requests = [encode_request(png(290, 290, seed=10 + index)) for index in range(4)]
        async for result in stub.EncodeMany(iter(requests)):
            assert result.WhichOneof("outcome") == "image", result
            assert await ack(stub, result.image.ticket_id)

    run_calls(tight, scenario)


def test_rows_that_fill_the_shared_memory_push_back(tight: VeProcess) -> None:
    async def scenario(stub: Stub) -> None:
        tickets = []
        for index in range(8):
            image = (await stub.Encode(encode_request(png(290, 290, seed=200 + index)))).image
            tickets.append(image.ticket_id)
        failure = await refused(stub.Encode(encode_request(png(290, 290, seed=208))))
        assert failure.reason == "PATCH_QUEUE_FULL"
        assert "shared memory" in failure.public_message
        # A stream waits for room instead, and gets it by an Ack.
        results = stub.EncodeMany(iter([encode_request(png(290, 290, seed=300))]))
        first = asyncio.ensure_future(results.read())
        done, _ = await asyncio.wait([first], timeout=0.3)
        assert not done
        assert await ack(stub, tickets.pop())
        image = (await first).image
        for ticket_id in [*tickets, image.ticket_id]:
            assert await ack(stub, ticket_id)

    run_calls(tight, scenario)
