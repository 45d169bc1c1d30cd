"""pe.v1.VisionEncoder of a real VE whose encoder process is a fake: real decode workers, real gRPC, real shared memory."""

import asyncio
import base64
import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import crc32c
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from prefill_engine.rpc import common_pb2, vision_pb2
from prefill_engine.vision.encoder_client import read_shared
from prefill_testing.image_mutations import mutate, valid_images
from prefill_testing.rpc_calls import refused
from prefill_testing.ve_calls import Stub, ack, claimed, metrics, run_calls, tickets_open, until
from prefill_testing.ve_process import VeProcess, encode_request, png, start_ve

COLUMNS = 96


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VeProcess]:
    with start_ve(tmp_path_factory.mktemp("ve"), "image_seconds=60") as started:
        yield started


def test_identity_limits_and_health(encoder: VeProcess) -> None:
    async def scenario(stub: Stub) -> None:
        info = await stub.GetInfo(vision_pb2.VisionInfoRequest())
        assert (info.columns, info.max_tokens, info.patch, info.downsample) == (COLUMNS, 64, 14, 3)
        assert (info.model_id, info.device, info.dtype, info.numerics_class) == ("tiny", "cpu", "bf16", "fake")
        assert info.epoch > 0
        for port in ("port", "probe_port"):
            async with grpc.aio.insecure_channel(f"127.0.0.1:{encoder.ready()[port]}") as channel:
                check = health_pb2_grpc.HealthStub(channel).Check
                for service in ("", "pe.v1.VisionEncoder"):

                    async def serves(service: str = service, check: object = check) -> bool:
                        answer = await check(health_pb2.HealthCheckRequest(service=service))  # type: ignore[operator]
                        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

                    await until(serves)

    run_calls(encoder, scenario)
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

    run_calls(encoder, scenario)


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

    run_calls(encoder, scenario)
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

    run_calls(encoder, scenario)


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

    run_calls(encoder, scenario)


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
        failure = await refused(stub.Encode(encode_request(png(168, 126), **fields)))
        assert (failure.reason, text in failure.public_message) == (reason, True), failure.public_message

    run_calls(encoder, scenario)


def test_damaged_image_is_refused_and_remembered(encoder: VeProcess) -> None:
    data = png(168, 126, seed=60)[:-2000]

    async def scenario(stub: Stub) -> None:
        first = await refused(stub.Encode(encode_request(data)))
        again = await refused(stub.Encode(encode_request(data)))
        assert (first.reason, first.phase) == ("IMAGE_REJECTED", "IMAGES")
        assert (again.reason, again.phase, again.public_message) == (
            "IMAGE_REJECTED",
            "ADMISSION",
            first.public_message,
        )

    before = metrics(encoder).get('ve_cache_total{result="rejected"}', 0.0)
    run_calls(encoder, scenario)
    assert metrics(encoder)['ve_cache_total{result="rejected"}'] - before == 1


def test_mutated_images_end_as_rows_or_as_refusals(encoder: VeProcess) -> None:
    """A few of the ten thousand of test_decode_fuzz.py through the service: never an internal error, and it goes on."""
    source, seeds = random.Random(7), valid_images()
    images = [mutate(source, seeds) for _ in range(320)]
    reasons: Counter[str] = Counter()

    async def scenario(stub: Stub) -> None:
        for start in range(0, len(images), 8):
            requests = [encode_request(data) for data in images[start : start + 8]]
            async for result in stub.EncodeMany(iter(requests)):
                if result.HasField("image"):
                    reasons["encoded"] += 1
                    assert await ack(stub, result.image.ticket_id)
                else:
                    reasons[common_pb2.ErrorReason.Name(result.error.reason)] += 1
                    assert result.error.public_message.isascii()
        for data in images:
            found = await stub.Inspect(vision_pb2.InspectRequest(data_head=data))
            assert found.tokens or found.error.reason == common_pb2.IMAGE_REJECTED
        assert await tickets_open(stub) == 0

    run_calls(encoder, scenario)
    assert sum(reasons.values()) == len(images)
    assert set(reasons) == {"encoded", "IMAGE_REJECTED"}
    # Else the fuzzing reached no decoder.
    assert reasons["encoded"] > 10
    assert encoder.log("decoding failed") + encoder.log("handler failed") == []


def test_item_id_is_an_idempotency_key(encoder: VeProcess) -> None:
    async def scenario(stub: Stub) -> None:
        request = encode_request(png(168, 126, seed=70))
        both = await asyncio.gather(stub.Encode(request), stub.Encode(request))
        assert both[0].image.ticket_id == both[1].image.ticket_id
        assert (await stub.Encode(request)).image.ticket_id == both[0].image.ticket_id
        other = encode_request(png(168, 126, seed=71), item_id=request.item_id)
        assert (await refused(stub.Encode(other))).reason == "IDEMPOTENCY_CONFLICT"
        assert await ack(stub, both[0].image.ticket_id)
        assert not await ack(stub, both[0].image.ticket_id)

    run_calls(encoder, scenario)


def test_inline_rows_need_no_ticket(encoder: VeProcess) -> None:
    async def scenario(stub: Stub) -> None:
        delivery = vision_pb2.Delivery(mode=vision_pb2.Delivery.INLINE)
        image = (await stub.Encode(encode_request(png(168, 126, seed=80), delivery=delivery))).image
        assert (len(image.inline_rows), image.ticket_id) == (17 * COLUMNS * 2, b"")
        assert crc32c.crc32c(image.inline_rows).to_bytes(4, "little") == image.checksum

    run_calls(encoder, scenario)


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
        await refused(stub.Encode(encode_request(data[: len(data) // 2])))
        await refused(stub.Encode(encode_request(data[3:])))

    run_calls(encoder, scenario)
    log = encoder.stderr()
    for piece in (data[:24], data[100:124], data[3:27]):
        assert piece.hex() not in log
        assert base64.b64encode(piece).decode()[:24] not in log
        assert repr(piece)[2:20] not in log
