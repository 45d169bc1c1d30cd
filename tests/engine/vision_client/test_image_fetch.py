"""One image from an encoder into our memory: every wrong answer is dropped, tried once elsewhere, and told by its right name."""

import asyncio
import contextlib
import dataclasses
import os
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from prefill_engine.rpc import vision_pb2
from prefill_engine.rpc.status import Failure, ServingFailure
from prefill_engine.vision.slab import host_id
from prefill_engine.vision_client.choose import EncoderLoad
from prefill_engine.vision_client.encoder_set import EncoderSet
from prefill_engine.vision_client.image_fetch import Fetched, ImageFetcher, Owner
from prefill_engine.vision_client.image_source import ImageSource, TicketSource
from prefill_testing.fake_encoder import FakeEncoder, rows_of
from prefill_testing.in_loop import in_loop

DIGEST = bytes(range(32))
COLUMNS, TOKENS = 64, 40
PIXELS = b"an encoded image"
ROWS = rows_of(PIXELS, tokens=TOKENS, columns=COLUMNS)
OWNER = Owner(request_id="r", attempt=1, attempt_id=b"a" * 16, tenant="t", cache_scope=b"s" * 32)
SOURCE = ImageSource(index=3, tokens=TOKENS, patches=360, width=280, height=210, content_key=b"k" * 32, pixels=PIXELS)


@dataclass(slots=True)
class Scene:
    """Two encoders and a fetcher; `target` is where rows go."""

    first: FakeEncoder
    second: FakeEncoder
    encoders: EncoderSet
    fetcher: ImageFetcher
    target: bytearray

    async def fetch(self, source: ImageSource = SOURCE, *, seconds: float = 30.0) -> Fetched:
        deadline = time.monotonic() + seconds
        return await self.fetcher.fetch(source, OWNER, target=memoryview(self.target), deadline=deadline)

    async def failure(self, source: ImageSource = SOURCE, *, seconds: float = 30.0) -> Failure:
        with pytest.raises(ServingFailure) as caught:
            await self.fetch(source, seconds=seconds)
        return caught.value.failure

    async def acked(self) -> None:
        """Until no encoder holds rows."""
        await until(lambda: self.first.num_held + self.second.num_held == 0)


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.005)


def load_of(s: "Scene", encoder: FakeEncoder) -> EncoderLoad:
    peer = s.encoders.peer(encoder.address)
    assert peer is not None
    load = peer.load()
    assert load is not None
    return load


@contextlib.asynccontextmanager
async def scene(*, image_seconds: float = 20.0, num_encoders: int = 2, **first: object) -> AsyncIterator[Scene]:
    """`first` are knobs of the first encoder, which is preferred as long as it is usable."""
    a = FakeEncoder(digest=DIGEST, columns=COLUMNS)
    b = FakeEncoder(digest=DIGEST, columns=COLUMNS, patches_queued=100_000)
    for name, value in first.items():
        setattr(a, name, value)
    async with a, b:
        addresses = [a.address, b.address][:num_encoders]
        encoders = EncoderSet(lambda: addresses, digest=DIGEST, columns=COLUMNS, clock=time.monotonic)
        watching = asyncio.create_task(encoders.run())
        fetcher = ImageFetcher(
            encoders, digest=DIGEST, columns=COLUMNS, image_seconds=image_seconds, clock=time.monotonic
        )
        expected = num_encoders - (a.digest != DIGEST or a.columns != COLUMNS or a.state != "READY")
        await until(lambda: encoders.num_usable == expected)
        try:
            yield Scene(a, b, encoders, fetcher, bytearray(b"\xee" * len(ROWS)))
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await fetcher.close()


def failing(reason: str, *, times: int = 1 << 30) -> Callable[[vision_pb2.EncodeRequest], Failure | None]:
    left = [times]

    def fail(_request: vision_pb2.EncodeRequest) -> Failure | None:
        left[0] -= 1
        return Failure(reason=reason, public_message="because", retry_after_seconds=0.02) if left[0] >= 0 else None

    return fail


def spoil_checksum(image: vision_pb2.EncodedImage) -> None:
    image.checksum = b"\0\0\0\1"


def spoil_tokens(image: vision_pb2.EncodedImage) -> None:
    image.tokens += 1


def spoil_type(image: vision_pb2.EncodedImage) -> None:
    image.dtype = "fp32"


def spoil_key(image: vision_pb2.EncodedImage) -> None:
    image.content_key = b"o" * 32


def spoil_data(frame: vision_pb2.EmbeddingBytes) -> None:
    frame.data = bytes(len(frame.data))


def spoil_order(frame: vision_pb2.EmbeddingBytes) -> None:
    frame.offset += 1


@pytest.mark.parametrize(("shared", "transport"), [(False, "grpc"), (True, "shm")], ids=["grpc", "shm"])
@in_loop
async def test_rows_come_verified_and_the_ticket_goes_back(shared: bool, transport: str) -> None:
    async with scene(shared=shared) as s:
        fetched = await s.fetch()
        assert (fetched.encoder, fetched.transport, fetched.tries) == (s.first.address, transport, 1)
        assert bytes(s.target) == ROWS
        assert s.first.num_held == 0
        assert [ack.ok for ack in s.first.acks] == [True]
        request = s.first.requests[0]
        assert (request.width, request.height, request.tokens, request.content_key) == (280, 210, TOKENS, b"k" * 32)
        assert (request.vision_digest, request.tenant.cache_scope) == (DIGEST, b"s" * 32)
        assert request.parent.attempt_id == b"a" * 16


@pytest.mark.parametrize(
    "spoiled",
    [
        {"spoil": spoil_checksum},
        {"spoil": spoil_checksum, "shared": True},
        {"spoil": spoil_tokens},
        {"spoil": spoil_type},
        {"spoil": spoil_key},
        {"spoil_frame": spoil_data},
        {"spoil_frame": spoil_order},
        {"released": False, "shared": True},
    ],
    ids=["checksum", "checksum-shm", "tokens", "type", "other-image", "damaged-frame", "lost-frame", "hold-ended"],
)
@in_loop
async def test_wrong_rows_are_dropped_and_had_elsewhere(spoiled: dict[str, object]) -> None:
    async with scene(**spoiled) as s:
        fetched = await s.fetch()
        assert (fetched.encoder, fetched.tries) == (s.second.address, 2)
        assert bytes(s.target) == ROWS
        await s.acked()


@pytest.mark.parametrize("reason", ["ENGINE_LOST", "DRAINING", "KERNEL_FAULT", "ENCODER_TIMEOUT", "MODEL_MISMATCH"])
@in_loop
async def test_failure_of_one_encoder_is_tried_once_on_another(reason: str) -> None:
    async with scene(fail=failing(reason)) as s:
        assert (await s.fetch()).encoder == s.second.address
        assert (len(s.first.requests), len(s.second.requests)) == (1, 1)


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        ("KERNEL_FAULT", "KERNEL_FAULT"),
        ("EMBEDDING_CHECKSUM", "EMBEDDING_CHECKSUM"),
        # A router must not take an encoder's state for this engine's.
        ("DRAINING", "EMBEDDING_GONE"),
        ("RANK_LOST", "EMBEDDING_GONE"),
    ],
)
@in_loop
async def test_second_failure_is_the_last(reason: str, told: str) -> None:
    async with scene(fail=failing(reason)) as s:
        s.second.fail = failing(reason)
        failure = await s.failure()
        assert (failure.reason, failure.phase, failure.image_index) == (told, "IMAGES", 3)
        assert reason in failure.operator_detail
        assert (len(s.first.requests), len(s.second.requests)) == (1, 1)


@pytest.mark.parametrize("reason", ["IMAGE_REJECTED", "IMAGE_TOKEN_MISMATCH"])
@in_loop
async def test_image_that_nobody_can_encode_is_sent_once(reason: str) -> None:
    async with scene(fail=failing(reason)) as s:
        failure = await s.failure()
        assert (failure.reason, failure.image_index, failure.public_message) == (reason, 3, "image 3: because")
        assert (len(s.first.requests), len(s.second.requests)) == (1, 0)


@in_loop
async def test_full_queue_is_no_failure_and_another_encoder_is_asked_first() -> None:
    async with scene(fail=failing("PATCH_QUEUE_FULL")) as s:
        fetched = await s.fetch()
        assert (fetched.encoder, fetched.tries) == (s.second.address, 1)


@in_loop
async def test_encoder_that_is_full_for_a_while_is_asked_again() -> None:
    async with scene(num_encoders=1, fail=failing("PATCH_QUEUE_FULL", times=3)) as s:
        fetched = await s.fetch()
        assert (fetched.tries, len(s.first.requests)) == (1, 4)


@in_loop
async def test_queues_that_stay_full_are_told_as_what_they_are() -> None:
    async with scene(num_encoders=1, image_seconds=0.2, fail=failing("PATCH_QUEUE_FULL")) as s:
        failure = await s.failure()
        assert failure.reason in ("PATCH_QUEUE_FULL", "ENCODER_TIMEOUT")
        assert failure.retry_after_seconds > 0 or failure.reason == "ENCODER_TIMEOUT"


@in_loop
async def test_hung_encoder_is_left_after_its_time_and_told_so() -> None:
    async with scene(image_seconds=1.0) as s:
        s.first.running.clear()
        assert (await s.fetch()).encoder == s.second.address
        await until(lambda: s.first.num_left == 1 and len(s.first.cancels) == 1)
        s.first.requests.clear()
        s.second.running.clear()
        failure = await s.failure()
        assert (failure.reason, failure.phase, failure.image_index) == ("ENCODER_TIMEOUT", "IMAGES", 3)
        assert failure.code.name == "DEADLINE_EXCEEDED"


@in_loop
async def test_time_of_the_attempt_ends_the_tries() -> None:
    async with scene() as s:
        s.first.running.clear()
        failure = await s.failure(seconds=0.2)
        assert failure.reason == "ENCODER_TIMEOUT"
        assert s.second.requests == []


@in_loop
async def test_encoder_killed_with_an_image_is_replaced() -> None:
    async with scene() as s:
        s.first.running.clear()
        fetching = asyncio.create_task(s.fetch())
        await until(lambda: len(s.first.requests) == 1)
        await s.first.die()
        fetched = await fetching
        assert (fetched.encoder, fetched.tries) == (s.second.address, 2)
        assert bytes(s.target) == ROWS


@pytest.mark.parametrize(
    "wrong", [{"digest": b"o" * 32}, {"columns": 128}, {"state": "DRAINING"}, {"state": "WEDGED"}], ids=repr
)
@in_loop
async def test_encoder_of_another_tower_or_not_ready_never_gets_an_image(wrong: dict[str, object]) -> None:
    async with scene(**wrong) as s:
        assert (await s.fetch()).encoder == s.second.address
        assert s.first.requests == []


@in_loop
async def test_encoder_that_comes_back_with_another_tower_is_found_out_by_its_epoch() -> None:
    async with scene() as s:
        s.first.digest, s.first.epoch = b"o" * 32, 2
        await until(lambda: s.encoders.num_usable == 1)
        assert (await s.fetch()).encoder == s.second.address
        assert s.first.requests == []


@in_loop
async def test_without_any_encoder_an_image_waits_its_time_and_the_cause_is_told() -> None:
    async with scene(image_seconds=0.2, num_encoders=1, state="STARTING") as s:
        failure = await s.failure()
        assert failure.reason == "ENCODER_TIMEOUT"
        assert "no vision encoder took it" in failure.public_message
        assert "state STARTING" in failure.operator_detail


@in_loop
async def test_images_spread_by_what_was_sent_since_the_last_report() -> None:
    async with scene() as s:
        s.second.patches_queued = 0
        await until(lambda: load_of(s, s.second).patches == 0)
        await asyncio.gather(*(s.fetch() for _ in range(6)))
        counts = (len(s.first.requests), len(s.second.requests))
        assert min(counts) >= 2, counts


@in_loop
async def test_caller_that_leaves_takes_its_image_back() -> None:
    async with scene() as s:
        s.first.running.clear()
        fetching = asyncio.create_task(s.fetch())
        await until(lambda: len(s.first.requests) == 1)
        fetching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetching
        await until(lambda: s.first.num_left == 1)
        assert s.second.requests == []


def held(s: Scene, *, address: str | None = None, checksum: bool = True) -> ImageSource:
    """The image as a ticket that its caller got from the first encoder."""
    image = s.first.hold(PIXELS, tokens=TOKENS)
    extents = image.region.extents
    ticket = TicketSource(
        ticket_id=image.ticket_id,
        address=s.first.address if address is None else address,
        path=image.region.shm.handle,
        host_id=image.region.shm.host_id,
        offset=extents[0].offset if extents else 0,
        checksum=int.from_bytes(image.checksum, "little") if checksum else None,
    )
    return ImageSource(index=0, tokens=TOKENS, patches=360, width=0, height=0, content_key=b"k" * 32, ticket=ticket)


@pytest.mark.parametrize("shared", [False, True], ids=["grpc", "shm"])
@in_loop
async def test_ticket_is_claimed_and_acknowledged(shared: bool) -> None:
    async with scene(shared=shared) as s:
        assert (await s.fetch(held(s))).encoder == s.first.address
        assert bytes(s.target) == ROWS
        assert s.first.num_held == 0


@pytest.mark.parametrize(
    ("path", "offset"),
    [
        ("{path}", 1 << 63),
        ("{path}", 1 << 40),
        ("{path}\0", 0),
        ("/dev/shm/../..{path}", 0),
        ("{pipe}", 0),
        ("{link}", 0),
        ("", 0),
    ],
    ids=["offset-of-64-bits", "offset-behind-the-end", "null-byte", "way-up", "pipe", "other-name", "none"],
)
@in_loop
async def test_callers_word_for_a_place_in_memory_is_looked_at_first(path: str, offset: int, tmp_path: Path) -> None:
    """Rows come by gRPC then; a pipe that was opened would hold a thread for ever."""
    async with scene(shared=True) as s:
        source = held(s)
        assert source.ticket is not None
        place = {"path": source.ticket.path, "pipe": tmp_path / "pipe", "link": tmp_path / "link"}
        os.mkfifo(place["pipe"])
        os.symlink(source.ticket.path, place["link"])
        spoiled = path.format(**place)
        host = host_id(spoiled) if spoiled and "\0" not in spoiled else source.ticket.host_id
        ticket = dataclasses.replace(source.ticket, path=spoiled, host_id=host, offset=offset)
        fetched = await s.fetch(dataclasses.replace(source, ticket=ticket))
        assert (fetched.transport, bytes(s.target), s.first.num_held) == ("grpc", ROWS, 0)


@in_loop
async def test_ticket_whose_rows_are_gone_is_told_to_plan_again() -> None:
    async with scene() as s:
        source = held(s)
        s.first._held.clear()
        failure = await s.failure(source)
        assert (failure.reason, failure.retry_scope, failure.image_index) == ("EMBEDDING_GONE", "REPLAN", 0)


@in_loop
async def test_ticket_of_an_encoder_that_is_not_ours_is_never_called() -> None:
    async with scene(num_encoders=1) as s:
        failure = await s.failure(held(s, address=s.second.address))
        assert failure.reason == "EMBEDDING_GONE"
        assert "does not know" in failure.public_message


@in_loop
async def test_ticket_of_other_arithmetic_is_not_taken() -> None:
    """The encoder is one of ours by its name; that it can't be used for new images says nothing of a ticket's."""
    async with scene(num_encoders=2, digest=b"o" * 32, numerics_class="gpu-triton-sm_90-bf16") as s:
        failure = await s.failure(held(s))
        assert (failure.reason, failure.retry_scope) == ("EMBEDDING_GONE", "REPLAN")
        assert "other arithmetic" in failure.public_message
        assert "its numerics_class is gpu-triton-sm_90-bf16" in failure.operator_detail
        assert bytes(s.target) == b"\xee" * len(ROWS)


@in_loop
async def test_ticket_that_is_not_needed_is_given_back() -> None:
    async with scene() as s:
        s.fetcher.give_up(held(s))
        await s.acked()
        assert [ack.ok for ack in s.first.acks] == [False]
