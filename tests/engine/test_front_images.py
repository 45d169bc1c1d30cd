"""Images through the front: a fake rank asks, fake encoders answer, rows lie where the rank is told; and what goes wrong."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
from prometheus_client import generate_latest

from prefill_engine.front import image_desk
from prefill_engine.image_messages import ImageRows, ImageRowsDone, ImagesWanted
from prefill_engine.messages import Cancel, Released, Submit
from prefill_engine.rpc import common_pb2, prefill_pb2
from prefill_engine.rpc.status import Failure
from prefill_engine.vision.plan import plan_image
from prefill_engine.vision_client import hold_renewal
from prefill_plan.config import VisionConfig, VisionMode
from prefill_plan.model_spec import load_model_spec
from prefill_testing.engine_rig import TINY_MODEL, Rig, engine_rig, prefill_request, tiny_config
from prefill_testing.fake_encoder import FakeEncoder, rows_of
from prefill_testing.fake_rank import VISION_DIGEST
from prefill_testing.in_loop import in_loop
from prefill_testing.rpc_calls import next_of, read_stream

SPEC = load_model_spec(TINY_MODEL)
COLUMNS = SPEC.hidden_size
IMAGE_TOKEN = SPEC.image_token_id
WIDTH, HEIGHT = 154, 126
SLAB_BYTES = 64 * COLUMNS * 2 * 4
"""A few images."""


@dataclass(slots=True)
class Scene:
    rig: Rig
    encoders: list[FakeEncoder]

    @property
    def rank(self) -> Any:
        return self.rig.ranks[0]

    async def until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            await asyncio.sleep(0.005)

    async def submitted(self) -> Submit:
        await self.until(lambda: bool(self.rank.messages(Submit)))
        return self.rank.messages(Submit)[-1]

    async def want(self, submit: Submit, indices: Iterable[int], *, round: int = 1) -> None:
        wanted = ImagesWanted(
            attempt_id=submit.attempt_id, indices=tuple(indices), round=round, at_ns=time.monotonic_ns()
        )
        await self.rank.send(wanted)

    async def told(self, count: int) -> list[ImageRows]:
        await self.until(lambda: len(self.rank.messages(ImageRows)) >= count)
        return self.rank.messages(ImageRows)

    @property
    def used_bytes(self) -> int:
        assert self.rig.front.vision is not None
        return self.rig.front.vision.used_bytes

    def requests(self) -> int:
        return sum(len(encoder.requests) for encoder in self.encoders)


@contextlib.asynccontextmanager
async def scene(*, image_seconds: float = 20.0) -> AsyncIterator[Scene]:
    """An engine of one fake rank, whose attempts do not start by themselves, and two encoders."""
    first, second = (
        FakeEncoder(digest=VISION_DIGEST, columns=COLUMNS),
        FakeEncoder(digest=VISION_DIGEST, columns=COLUMNS),
    )
    async with first, second:
        vision = VisionConfig(
            mode=VisionMode.REMOTE,
            endpoints=(first.address, second.address),
            rows_bytes=SLAB_BYTES,
            image_seconds=image_seconds,
        )
        async with engine_rig(tiny_config(vision=vision)) as rig:
            rig.ranks[0].hold.add("start")
            made = Scene(rig, [first, second])
            assert rig.front.vision is not None
            await made.until(lambda: rig.front.vision.num_encoders == 2)
            yield made


def request_with(num_images: int, *, tokens: int = 0) -> prefill_pb2.PrefillRequest:
    """Images of the same size and other bytes, one behind the other from token 10 on."""
    request = prefill_request(300)
    spec_tokens = tokens or image_tokens()
    request.tokens.extend([5] * (num_images * spec_tokens))
    for index in range(num_images):
        start = 10 + index * spec_tokens
        request.tokens[start : start + spec_tokens] = [IMAGE_TOKEN] * spec_tokens
        request.images.add(
            index=index,
            start=start,
            length=spec_tokens,
            width=WIDTH,
            height=HEIGHT,
            content_key=bytes([index % 251]) * 32,
            pixels=b"image %d" % index,
        )
    request.events.timeline = True
    request.handoff.mode = prefill_pb2.HandoffPlan.NONE
    return request


def image_tokens() -> int:
    return plan_image(WIDTH, HEIGHT, SPEC.vision).tokens


def read_rows(message: ImageRows) -> bytes:
    with open(message.path, "rb") as file:
        file.seek(message.offset)
        return file.read(message.rows * message.columns * 2)


@in_loop
async def test_wanted_images_are_encoded_and_the_rank_is_told_where_their_rows_lie() -> None:
    async with scene() as s:
        reading = asyncio.create_task(read_stream(s.rig.stub.Prefill(request_with(3), timeout=20)))
        submit = await s.submitted()
        assert [item.has_source for item in submit.images] == [True, True, True]
        await s.want(submit, (0, 2))
        told = await s.told(2)
        assert {message.index for message in told} == {0, 2}
        assert s.requests() == 2
        for message in told:
            pixels = b"image %d" % message.index
            assert read_rows(message) == rows_of(pixels, tokens=message.rows, columns=COLUMNS)
        for message in told:
            await s.rank.send(ImageRowsDone(attempt_id=submit.attempt_id, index=message.index))
        await s.until(lambda: s.used_bytes == 0)
        s.rank.resume("start")
        events, failure = await asyncio.wait_for(reading, 15)
        assert failure is None
        states = [event.image for event in events if event.HasField("image")]
        assert sorted((state.index, state.ready, state.rows) for state in states) == [
            (0, True, image_tokens()),
            (2, True, image_tokens()),
        ]
        phases = {prefill_phase(stage.phase) for stage in events[-1].completed.timeline}
        assert "IMAGES" in phases
        assert b'pe_images_total{outcome="ok"} 2.0' in generate_latest(s.rig.registry)
        assert all(encoder.num_held == 0 for encoder in s.encoders)


@in_loop
async def test_rejected_image_fails_the_request_and_takes_the_others_back() -> None:
    async with scene() as s:
        reading = asyncio.create_task(read_stream(s.rig.stub.Prefill(request_with(2), timeout=20)))
        submit = await s.submitted()

        def fail(request: Any) -> Failure | None:
            text = "png of 154x126 pixels is damaged; not encoded"
            return Failure(reason="IMAGE_REJECTED", public_message=text) if request.data == b"image 1" else None

        for encoder in s.encoders:
            encoder.running.clear()
            encoder.fail = fail
        await s.want(submit, (0, 1))
        await s.until(lambda: s.requests() == 2)
        holder = next(e for e in s.encoders if any(r.data == b"image 1" for r in e.requests))
        other = next((e for e in s.encoders if e is not holder), None)
        assert other is not None
        holder.running.set()
        _, failure = await reading
        assert failure is not None
        assert (failure.reason, failure.code.name, failure.image_index) == ("IMAGE_REJECTED", "INVALID_ARGUMENT", 1)
        assert failure.retry_scope == "NEVER"
        assert failure.public_message.startswith("image 1: png of 154x126")
        await s.until(lambda: any(m.attempt_id == submit.attempt_id for m in s.rank.messages(Cancel)))
        await s.until(lambda: s.used_bytes == 0)
        # The other image was waiting at an encoder, or had already come back: in no case it stays there.
        other.running.set()
        await s.until(lambda: all(encoder.num_held == 0 for encoder in s.encoders))
        assert s.requests() == 2


@in_loop
async def test_image_that_is_not_wanted_never_reaches_an_encoder() -> None:
    async with scene() as s:
        request = request_with(1)
        image = s.encoders[0].hold(b"image 0", tokens=image_tokens())
        request.images[0].ticket.ticket_id = image.ticket_id
        request.images[0].ticket.ve_endpoint = s.encoders[0].address
        reading = asyncio.create_task(read_stream(s.rig.stub.Prefill(request, timeout=20)))
        await s.submitted()
        s.rank.resume("start")
        _, failure = await asyncio.wait_for(reading, 15)
        assert failure is None
        assert s.requests() == 0
        # Its ticket goes back, so that the encoder need not hold the rows for a minute.
        await s.until(lambda: s.encoders[0].num_held == 0)
        assert [ack.ok for ack in s.encoders[0].acks] == [False]


@in_loop
async def test_ticket_is_held_while_its_attempt_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """An attempt may wait in the queue for longer than its encoder holds the rows."""
    monkeypatch.setattr(hold_renewal, "RENEW_SECONDS", 0.02)
    async with scene() as s:
        request, encoder = request_with(2), s.encoders[0]
        for index in range(2):
            image = encoder.hold(b"image %d" % index, tokens=image_tokens())
            request.images[index].ticket.ticket_id = image.ticket_id
            request.images[index].ticket.ve_endpoint = encoder.address
        call = s.rig.stub.Prefill(request, timeout=20)
        await next_of(call, "accepted")
        submit = await s.submitted()
        await s.until(lambda: len(encoder.renewals) >= 3)
        assert sorted(encoder.renewals[-1].ticket_ids) == sorted(span.ticket.ticket_id for span in request.images)
        # What is fetched is held no longer, the other one is.
        await s.want(submit, (0,))
        await s.told(1)
        await s.until(lambda: list(encoder.renewals[-1].ticket_ids) == [request.images[1].ticket.ticket_id])
        call.cancel()
        await s.until(lambda: encoder.num_held == 0)
        assert [ack.ok for ack in encoder.acks] == [True, False]


@in_loop
async def test_caller_that_goes_takes_its_images_with_it() -> None:
    async with scene() as s:
        for encoder in s.encoders:
            encoder.running.clear()
        call = s.rig.stub.Prefill(request_with(2), timeout=20)
        await next_of(call, "accepted")
        await s.want(await s.submitted(), (0, 1))
        await s.until(lambda: s.requests() == 2)
        call.cancel()
        await s.until(lambda: sum(encoder.num_left for encoder in s.encoders) == 2)
        await s.until(lambda: s.used_bytes == 0)


@in_loop
async def test_hung_encoders_end_the_attempt_with_their_reason() -> None:
    async with scene(image_seconds=1.0) as s:
        for encoder in s.encoders:
            encoder.running.clear()
        reading = asyncio.create_task(read_stream(s.rig.stub.Prefill(request_with(1), timeout=20)))
        await s.want(await s.submitted(), (0,))
        _, failure = await reading
        assert failure is not None
        assert (failure.reason, failure.phase, failure.retry_scope) == ("ENCODER_TIMEOUT", "IMAGES", "OTHER_PE")
        assert s.requests() == 2


@in_loop
async def test_time_to_first_token_bounds_the_wait() -> None:
    async with scene() as s:
        for encoder in s.encoders:
            encoder.running.clear()
        request = request_with(1)
        request.budget.ttft_target.FromMilliseconds(700)
        reading = asyncio.create_task(read_stream(s.rig.stub.Prefill(request, timeout=20)))
        await s.want(await s.submitted(), (0,))
        _, failure = await asyncio.wait_for(reading, 10)
        assert failure is not None
        assert failure.reason == "ENCODER_TIMEOUT"


@in_loop
async def test_rows_that_a_rank_knows_are_kept_until_it_lets_go() -> None:
    async with scene() as s:
        call = s.rig.stub.Prefill(request_with(1), timeout=20)
        await next_of(call, "accepted")
        submit = await s.submitted()
        await s.want(submit, (0,))
        await s.told(1)
        held = s.used_bytes
        assert held > 0
        s.rank.send_released = False
        call.cancel()
        await s.until(lambda: bool(s.rank.messages(Cancel)))
        assert s.used_bytes == held
        await s.rank.send(Released(attempt_id=submit.attempt_id, at_ns=time.monotonic_ns()))
        await s.until(lambda: s.used_bytes == 0)


@in_loop
async def test_image_no_longer_wanted_is_let_go_and_may_be_wanted_again() -> None:
    async with scene() as s:
        call = s.rig.stub.Prefill(request_with(2), timeout=20)
        await next_of(call, "accepted")
        submit = await s.submitted()
        await s.want(submit, (0, 1))
        await s.told(2)
        both = s.used_bytes
        await s.want(submit, (1,), round=2)
        await s.until(lambda: s.used_bytes == both // 2)
        await s.want(submit, (0, 1), round=3)
        told = await s.told(3)
        assert (told[2].index, told[2].round) == (0, 3)
        call.cancel()


@in_loop
async def test_hundred_images_pass_through_a_slab_of_a_few() -> None:
    async with scene() as s:
        request = request_with(100, tokens=image_tokens())
        assert len(request.tokens) < 4096
        call = s.rig.stub.Prefill(request, timeout=40)
        await next_of(call, "accepted")
        submit = await s.submitted()
        await s.want(submit, range(100))
        for count in range(1, 101):
            told = (await s.told(count))[count - 1]
            # In the order of the prompt, up to those that were reserved together.
            await s.rank.send(ImageRowsDone(attempt_id=submit.attempt_id, index=told.index))
            assert s.used_bytes <= SLAB_BYTES
        await s.until(lambda: s.used_bytes == 0)
        assert s.requests() == 100
        call.cancel()


@in_loop
async def test_slab_in_which_nothing_moves_refuses_instead_of_waiting_for_ever() -> None:
    async with scene(image_seconds=1.0) as s:
        reading = asyncio.create_task(read_stream(s.rig.stub.Prefill(request_with(30), timeout=20)))
        await s.want(await s.submitted(), range(30))
        _, failure = await reading
        assert failure is not None
        assert failure.reason == "ENCODER_TIMEOUT"
        assert "no room" in failure.public_message
        await s.until(lambda: s.used_bytes == 0)


@in_loop
async def test_pixels_of_all_attempts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_desk, "MAX_HELD_PIXEL_BYTES", 10)
    async with scene() as s:
        call = s.rig.stub.Prefill(request_with(1), timeout=20)
        await next_of(call, "accepted")
        events, failure = await read_stream(s.rig.stub.Prefill(request_with(1), timeout=20))
        assert events == []
        assert failure is not None
        assert (failure.reason, failure.retry_after_seconds) == ("QUEUE_FULL", 1.0)
        call.cancel()
        submit = await s.submitted()
        await s.until(lambda: any(m.attempt_id == submit.attempt_id for m in s.rank.messages(Cancel)))
        again = s.rig.stub.Prefill(request_with(1), timeout=20)
        await next_of(again, "accepted")
        again.cancel()


@in_loop
async def test_engine_says_that_it_takes_images_and_whose() -> None:
    async with scene() as s:
        info = await s.rig.stub.GetServerInfo(prefill_pb2.GetServerInfoRequest())
        assert info.model.vision_digest == VISION_DIGEST
        assert "images" in info.features
    async with engine_rig(tiny_config()) as rig:
        info = await rig.stub.GetServerInfo(prefill_pb2.GetServerInfoRequest())
        assert info.model.vision_digest == b""
        assert "images" not in info.features


def prefill_phase(number: int) -> str:
    return common_pb2.Phase.Name(number).removeprefix("PHASE_")
