"""pe.v1.VisionEncoder of a real VE whose encoder process is a fake: real decode workers, real gRPC, real shared memory."""

import asyncio
import base64
import json
import secrets
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import crc32c
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from prefill_engine.rpc import common_pb2, vision_pb2, vision_pb2_grpc
from prefill_engine.rpc.convert import to_duration
from prefill_engine.rpc.status import DETAILS_KEY, Failure, decode_failure
from prefill_engine.vision.encoder_client import open_encoder_channel, read_shared
from prefill_testing.ve_process import VeProcess, encode_request, png, start_ve

COLUMNS = 96
WAIT_SECONDS = 30.0
Stub = vision_pb2_grpc.VisionEncoderStub


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VeProcess]:
    with start_ve(tmp_path_factory.mktemp("ve"), fault="slow=0.1") as started:
        yield started


@pytest.fixture(scope="module")
def tight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VeProcess]:
    """Room for one large image, and for the rows of eight."""
    settings = ("batching.max_patches_per_image=576", "queue.max_patches=600", "rows.cache_bytes=0")
    with start_ve(tmp_path_factory.mktemp("tight"), *settings, "rows.memory_bytes=98304", fault="slow=0.3") as started:
        yield started


@asynccontextmanager
async def stub_of(encoder: VeProcess) -> AsyncIterator[Stub]:
    async with open_encoder_channel(encoder.endpoint) as channel:
        yield Stub(channel)


def run(encoder: VeProcess, scenario: Callable[[Stub], Awaitable[None]]) -> None:
    async def inside() -> None:
        async with stub_of(encoder) as stub, asyncio.timeout(WAIT_SECONDS):
            await scenario(stub)

    asyncio.run(inside())


async def refusal(call: Awaitable[object]) -> Failure:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    details = dict(caught.value.trailing_metadata() or ())[DETAILS_KEY]
    failure = decode_failure(details)
    assert failure is not None
    assert failure.code is caught.value.code()
    return failure


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


def test_identity_limits_and_health(encoder: VeProcess) -> None:
    async def scenario(stub: Stub) -> None:
        info = await stub.GetInfo(vision_pb2.VisionInfoRequest())
        assert (info.columns, info.max_tokens, info.patch, info.downsample) == (COLUMNS, 64, 14, 3)
        assert (info.model_id, info.device, info.dtype, info.epoch > 0) == ("tiny", "cpu", "bf16", True)
        for port in ("port", "probe_port"):
            async with grpc.aio.insecure_channel(f"127.0.0.1:{encoder.ready()[port]}") as channel:
                check = health_pb2_grpc.HealthStub(channel).Check
                for service in ("", "pe.v1.VisionEncoder"):

                    async def serves(service: str = service, check: object = check) -> bool:
                        answer = await check(health_pb2.HealthCheckRequest(service=service))  # type: ignore[operator]
                        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

                    await until(serves)

    run(encoder, scenario)
    assert metrics(encoder)['ve_info{build="prefill 0.1.0",device="cpu",model="tiny"}'] == 1.0


def test_inspect_costs_an_image_by_its_head(encoder: VeProcess) -> None:
    async def scenario(stub: Stub) -> None:
        data = png(172, 90)
        found = await stub.Inspect(vision_pb2.InspectRequest(data_head=data[:64], total_bytes=len(data)))
        assert (found.format, found.width, found.height) == ("png", 172, 90)
        assert (found.final_width, found.final_height, found.tokens, found.patches) == (182, 98, 20, 91)
        big = await stub.Inspect(vision_pb2.InspectRequest(data_head=data[:64], total_bytes=40_000_000))
        assert big.error.reason == common_pb2.IMAGE_REJECTED
        assert "40000000 bytes, limit 32000000" in big.error.public_message

    run(encoder, scenario)


def test_same_image_fifty_times_is_encoded_once(encoder: VeProcess) -> None:
    data = png(168, 126, seed=50)
    before = metrics(encoder)["ve_patches_total"]

    async def scenario(stub: Stub) -> None:
        results = await asyncio.gather(*(stub.Encode(encode_request(data)) for _ in range(50)))
        images = [result.image for result in results]
        assert len({image.ticket_id for image in images}) == 50
        assert len({image.region.extents[0].offset for image in images}) == 1
        rows = await claimed(stub, images[0].ticket_id)
        assert {read_shared(image.region) for image in images} == {rows}
        assert [await ack(stub, image.ticket_id) for image in images] == [True] * 50
        later = (await stub.Encode(encode_request(data))).image
        assert later.from_cache
        assert await claimed(stub, later.ticket_id) == rows
        assert await ack(stub, later.ticket_id)

    run(encoder, scenario)
    assert metrics(encoder)["ve_patches_total"] - before == 108


def test_tenants_do_not_share_rows(encoder: VeProcess) -> None:
    async def scenario(stub: Stub) -> None:
        data = png(168, 126, seed=51)
        keys = set()
        for scope in (b"a" * 32, b"b" * 32):
            tenant = common_pb2.TenantContext(cache_scope=scope)
            image = (await stub.Encode(encode_request(data, tenant=tenant))).image
            assert not image.from_cache
            keys.add(image.content_key)
            await ack(stub, image.ticket_id)
        assert len(keys) == 2

    run(encoder, scenario)


def test_hundred_images_on_one_stream(encoder: VeProcess) -> None:
    requests = [encode_request(png(60 + index, 40, seed=index)) for index in range(99)]
    requests.insert(40, encode_request(b"no image at all"))

    async def scenario(stub: Stub) -> None:
        results = {result.item_id: result async for result in stub.EncodeMany(iter(requests))}
        assert set(results) == {request.item_id for request in requests}
        failed = results.pop(requests[40].item_id)
        assert failed.error.reason == common_pb2.IMAGE_REJECTED
        images = [result.image for result in results.values()]
        for image in images:
            rows = read_shared(image.region)
            assert rows is not None
            assert crc32c.crc32c(rows).to_bytes(4, "little") == image.checksum
            assert await ack(stub, image.ticket_id)
        assert len({image.content_key for image in images}) == 99
        assert await tickets_open(stub) == 0

    run(encoder, scenario)


@pytest.mark.parametrize(
    ("fields", "reason", "text"),
    [
        ({"vision_digest": b"x" * 32}, "MODEL_MISMATCH", "vision_digest 7878"),
        ({"tokens": 18}, "IMAGE_TOKEN_MISMATCH", "has 17 tokens, 18 were declared"),
        ({"width": 182, "height": 126}, "IMAGE_TOKEN_MISMATCH", "182x126 was declared"),
        ({"content_key": b"k" * 32}, "MODEL_MISMATCH", "content_key"),
        ({"data": b""}, "IMAGE_REJECTED", "0 bytes"),
        ({"policy": vision_pb2.PixelPolicy(max_side=100)}, "IMAGE_REJECTED", "limit 100 a side"),
        ({"delivery": vision_pb2.Delivery(mode=vision_pb2.Delivery.PUSH)}, "TRANSPORT_UNSUPPORTED", "PUSH"),
        ({"shm": common_pb2.ShmRegion(handle="/etc/passwd")}, "TRANSPORT_UNSUPPORTED", "shm"),
        ({"item_id": b"short"}, "TOKENS_INVALID", "item_id of 5 bytes"),
    ],
)
def test_refusals_name_reason_and_values(encoder: VeProcess, fields: dict[str, object], reason: str, text: str) -> None:
    async def scenario(stub: Stub) -> None:
        failure = await refusal(stub.Encode(encode_request(png(168, 126), **fields)))
        assert (failure.reason, text in failure.public_message) == (reason, True), failure.public_message

    run(encoder, scenario)


def test_damaged_image_is_refused_and_remembered(encoder: VeProcess) -> None:
    data = png(168, 126, seed=60)[:-2000]

    async def scenario(stub: Stub) -> None:
        first = await refusal(stub.Encode(encode_request(data)))
        again = await refusal(stub.Encode(encode_request(data)))
        assert (first.reason, first.phase) == ("IMAGE_REJECTED", "IMAGES")
        assert (again.reason, again.phase, again.public_message) == (
            "IMAGE_REJECTED",
            "ADMISSION",
            first.public_message,
        )

    before = metrics(encoder).get('ve_cache_total{result="rejected"}', 0.0)
    run(encoder, scenario)
    assert metrics(encoder)['ve_cache_total{result="rejected"}'] - before == 1


def test_item_id_is_an_idempotency_key(encoder: VeProcess) -> None:
    async def scenario(stub: Stub) -> None:
        request = encode_request(png(168, 126, seed=70))
        both = await asyncio.gather(stub.Encode(request), stub.Encode(request))
        assert both[0].image.ticket_id == both[1].image.ticket_id
        assert (await stub.Encode(request)).image.ticket_id == both[0].image.ticket_id
        other = encode_request(png(168, 126, seed=71), item_id=request.item_id)
        assert (await refusal(stub.Encode(other))).reason == "IDEMPOTENCY_CONFLICT"
        assert await ack(stub, both[0].image.ticket_id)
        assert not await ack(stub, both[0].image.ticket_id)

    run(encoder, scenario)


def test_inline_rows_need_no_ticket(encoder: VeProcess) -> None:
    async def scenario(stub: Stub) -> None:
        delivery = vision_pb2.Delivery(mode=vision_pb2.Delivery.INLINE)
        image = (await stub.Encode(encode_request(png(168, 126, seed=80), delivery=delivery))).image
        assert (len(image.inline_rows), image.ticket_id) == (17 * COLUMNS * 2, b"")
        assert crc32c.crc32c(image.inline_rows).to_bytes(4, "little") == image.checksum

    run(encoder, scenario)


def test_cancel_ends_running_held_and_coming_items(encoder: VeProcess) -> None:
    async def scenario(stub: Stub) -> None:
        parent = common_pb2.AttemptKey(attempt_id=secrets.token_bytes(16))
        held = (await stub.Encode(encode_request(png(168, 126, seed=90), parent=parent))).image
        running = asyncio.ensure_future(stub.Encode(encode_request(png(168, 126, seed=91), parent=parent)))

        async def is_queued() -> bool:
            report = await stub.WatchLoad(vision_pb2.VisionWatchRequest()).read()
            return bool(report.images_queued)

        await until(is_queued)
        answer = await stub.Cancel(vision_pb2.CancelEncodeRequest(parent_attempt_id=parent.attempt_id))
        assert answer.cancelled == 2
        assert (await refusal(running)).reason == "CALLER_CANCELLED"
        gone = [frame async for frame in _frames(stub, held.ticket_id)]
        assert gone == ["EMBEDDING_GONE"]
        late = encode_request(png(168, 126, seed=92), parent=parent)
        assert (await refusal(stub.Encode(late))).reason == "CALLER_CANCELLED"

    run(encoder, scenario)


async def _frames(stub: Stub, ticket_id: bytes) -> AsyncIterator[str]:
    async def read() -> None:
        async for _ in stub.Claim(vision_pb2.ClaimRequest(ticket_id=ticket_id)):
            pass

    yield (await refusal(read())).reason


def test_rows_that_nobody_acknowledges_are_freed(encoder: VeProcess) -> None:
    async def scenario(stub: Stub) -> None:
        short = vision_pb2.Delivery(hold=to_duration(0.3))
        forgotten = (await stub.Encode(encode_request(png(168, 126, seed=100), delivery=short))).image
        renewed = (await stub.Encode(encode_request(png(168, 126, seed=101), delivery=short))).image
        renewal = vision_pb2.RenewHoldRequest(ticket_ids=[renewed.ticket_id, b"x" * 16], hold=to_duration(30.0))
        assert list((await stub.Renew(renewal)).lost) == [b"x" * 16]

        async def is_one_left() -> bool:
            return await tickets_open(stub) == 1

        await until(is_one_left)
        assert not await ack(stub, forgotten.ticket_id)
        assert await ack(stub, renewed.ticket_id)

    run(encoder, scenario)


def test_caller_that_leaves_takes_its_image_along(encoder: VeProcess) -> None:
    item_id = secrets.token_bytes(16)

    async def scenario(stub: Stub) -> None:
        blocker = asyncio.ensure_future(stub.Encode(encode_request(png(168, 126, seed=110))))
        call = stub.Encode(encode_request(png(168, 126, seed=111), item_id=item_id))

        async def are_two_queued() -> bool:
            return bool((await stub.WatchLoad(vision_pb2.VisionWatchRequest()).read()).images_queued == 2)

        await until(are_two_queued)
        call.cancel()

        async def is_logged() -> bool:
            return any(line["item_id"] == item_id.hex() for line in encoder.log("image ended"))

        await until(is_logged)
        await ack(stub, (await blocker).image.ticket_id)
        assert await tickets_open(stub) == 0

    run(encoder, scenario)
    (line,) = [line for line in encoder.log("image ended") if line["item_id"] == item_id.hex()]
    assert (line["outcome"], line["reason"]) == ("cancelled", "CALLER_CANCELLED")


def test_stream_that_breaks_takes_its_images_along(encoder: VeProcess) -> None:
    parent = common_pb2.AttemptKey(attempt_id=secrets.token_bytes(16))
    requests = [encode_request(png(168, 126, seed=130 + index), parent=parent) for index in range(20)]

    async def scenario(stub: Stub) -> None:
        call = stub.EncodeMany(iter(requests))
        first = await call.read()
        assert await ack(stub, first.image.ticket_id)
        call.cancel()

        async def is_idle() -> bool:
            return not (await stub.WatchLoad(vision_pb2.VisionWatchRequest()).read()).images_queued

        await until(is_idle)
        report = await stub.WatchLoad(vision_pb2.VisionWatchRequest()).read()
        assert report.patches_queued == 0
        # Rows that were done before the break wait for an Ack that can't come; their attempt's Cancel frees them at once.
        await stub.Cancel(vision_pb2.CancelEncodeRequest(parent_attempt_id=parent.attempt_id))
        assert await tickets_open(stub) == 0

    before = metrics(encoder).get('ve_images_total{outcome="cancelled",reason="CALLER_CANCELLED"}', 0.0)
    run(encoder, scenario)
    assert metrics(encoder)['ve_images_total{outcome="cancelled",reason="CALLER_CANCELLED"}'] > before


def test_full_queue_says_when_to_come_again_and_a_stream_waits(tight: VeProcess) -> None:
    async def scenario(stub: Stub) -> None:
        calls = [asyncio.ensure_future(stub.Encode(encode_request(png(290, 290, seed=index)))) for index in range(3)]
        done = await asyncio.gather(*calls, return_exceptions=True)
        images = [result.image for result in done if isinstance(result, vision_pb2.EncodeResult)]
        refused = [result for result in done if isinstance(result, grpc.aio.AioRpcError)]
        assert (len(images), len(refused)) == (1, 2)

        async def again() -> None:
            raise refused[0]

        failure = await refusal(again())
        assert (failure.reason, failure.retry_scope) == ("PATCH_QUEUE_FULL", "SAME_LATER")
        assert failure.retry_after_seconds > 0
        assert "limit 600" in failure.public_message
        await ack(stub, images[0].ticket_id)
        requests = [encode_request(png(290, 290, seed=10 + index)) for index in range(4)]
        async for result in stub.EncodeMany(iter(requests)):
            assert result.WhichOneof("outcome") == "image", result
            assert await ack(stub, result.image.ticket_id)

    run(tight, scenario)


def test_rows_that_fill_the_shared_memory_push_back(tight: VeProcess) -> None:
    async def scenario(stub: Stub) -> None:
        tickets = []
        failure = None
        for index in range(12):
            try:
                image = (await stub.Encode(encode_request(png(290, 290, seed=200 + index)))).image
                tickets.append(image.ticket_id)
            except grpc.aio.AioRpcError as error:
                failure = decode_failure(dict(error.trailing_metadata() or ())[DETAILS_KEY])
                break
        assert failure is not None
        assert (failure.reason, len(tickets)) == ("PATCH_QUEUE_FULL", 8)
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

    run(tight, scenario)


def test_command_line_tools_tell_what_happened(encoder: VeProcess, tmp_path: Path) -> None:
    picture, rows = tmp_path / "a.png", tmp_path / "rows"
    picture.write_bytes(png(168, 126, seed=140))
    endpoint = ("--endpoint", encoder.endpoint)

    def tool(*words: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "prefill_engine", "ve", *words, *endpoint]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    told = json.loads(tool("encode", str(picture), "--output", str(rows), "--json").stdout)
    assert (told["tokens"], told["patches"], told["num_bytes"], told["transport"]) == (17, 108, 17 * COLUMNS * 2, "shm")
    assert rows.stat().st_size == told["num_bytes"]
    text = tool("encode", str(picture), "--no-shm").stdout
    assert "168x126, 108 patches, 4x3 cells: 17 tokens" in text
    assert "by stream, checksum right" in text
    assert "from the cache" in text
    picture.write_bytes(b"GIF89a, or so it says")
    refused = tool("encode", str(picture))
    assert (refused.returncode, "IMAGE_REJECTED" in refused.stderr) == (2, True)
    info = json.loads(tool("info", "--json").stdout)
    assert (info["model_id"], info["load"]["state"], info["load"]["tickets_open"]) == ("tiny", "READY", 0)


def test_nothing_of_an_image_is_logged(encoder: VeProcess) -> None:
    data = png(168, 126, seed=120)

    async def scenario(stub: Stub) -> None:
        await ack(stub, (await stub.Encode(encode_request(data))).image.ticket_id)
        await refusal(stub.Encode(encode_request(data[: len(data) // 2])))
        await refusal(stub.Encode(encode_request(data[3:])))

    run(encoder, scenario)
    log = encoder.stderr()
    for piece in (data[:24], data[100:124], data[3:27]):
        assert piece.hex() not in log
        assert base64.b64encode(piece).decode()[:24] not in log
        assert repr(piece)[2:20] not in log
