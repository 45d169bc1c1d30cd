"""The encode queue with a decoder and an encoder that answer when the test says so: time-outs, joins, leavers, drain, leaks."""

import asyncio
import hashlib

import pytest

from prefill_engine.front.health import EngineState
from prefill_engine.rpc.status import Failure, ServingFailure
from prefill_engine.vision.content_key import content_key
from prefill_engine.vision.encode_call import Encoded
from prefill_engine.vision.encoder_messages import Beat, EncoderReady
from prefill_engine.vision.image_intake import DEFAULT_POLICY
from prefill_engine.vision.ve_front import VisionFront
from prefill_engine.vision.worker_pool import DecodeTimeout
from prefill_engine.vision.worker_process import WorkerLost
from prefill_plan.encoder_config import QueueConfig
from prefill_plan.errors import CapacityError, ImageRejected
from prefill_testing.encode_scene import PATCHES, EncodeScene, reason, run_scene


def test_image_goes_its_way_and_leaves_nothing() -> None:
    async def scenario(it: EncodeScene) -> None:
        item = await it.submit(it.call())
        assert (it.queue.flights.patches, it.queue.flights.num_decoding) == (PATCHES, 1)
        await it.decoder.end()
        await it.encode_batch()
        outcome = await item.outcome
        assert isinstance(outcome, Encoded)
        assert outcome.ticket is not None
        assert (outcome.rows.crc32c, outcome.preprocess_seconds) == (7, 0.001)
        assert it.queue.flights.patches_encoded == PATCHES
        it.queue.leave(item)
        assert it.queue.tickets.release(outcome.ticket.ticket_id)
        await it.assert_nothing_left()

    run_scene(scenario)


@pytest.mark.parametrize(
    ("error", "expected", "retry"),
    [
        (ImageRejected("damaged"), "IMAGE_REJECTED", "NEVER"),
        (DecodeTimeout("slow"), "ENCODER_TIMEOUT", "OTHER_PE"),
        (WorkerLost("killed", exit_code=-9), "ENGINE_LOST", "ONCE_THEN_FAIL"),
        (CapacityError("full", reason="PATCH_QUEUE_FULL", retry_after_seconds=0.7), "PATCH_QUEUE_FULL", "SAME_LATER"),
        (RuntimeError("bug"), "INVARIANT", "ONCE_THEN_FAIL"),
    ],
)
def test_what_goes_wrong_in_decoding_is_told_and_cleaned_up(error: Exception, expected: str, retry: str) -> None:
    async def scenario(it: EncodeScene) -> None:
        item = await it.submit(it.call())
        await it.decoder.end(error=error)
        outcome = await item.outcome
        assert isinstance(outcome, Failure)
        assert (outcome.reason, outcome.retry_scope, outcome.phase) == (expected, retry, "IMAGES")
        await it.assert_nothing_left()
        remembered = expected == "IMAGE_REJECTED"
        if remembered:
            with pytest.raises(ServingFailure, match="damaged"):
                await it.submit(it.call())
        else:
            await it.submit(it.call())
        assert it.seen.looked == ["miss", "rejected" if remembered else "miss"]

    run_scene(scenario)


def test_values_that_are_not_finite_are_no_rows_and_not_remembered() -> None:
    async def scenario(it: EncodeScene) -> None:
        item = await it.submit(it.call())
        await it.decoder.end()
        await it.encode_batch(checksum=-1)
        assert reason(await item.outcome) == "NONFINITE_OUTPUT"
        await it.assert_nothing_left()
        await it.submit(it.call())
        assert it.seen.looked == ["miss", "miss"]

    run_scene(scenario)


def test_one_flight_serves_all_who_ask_and_one_who_leaves_harms_nobody() -> None:
    async def scenario(it: EncodeScene) -> None:
        items = [await it.submit(it.call()) for _ in range(3)]
        assert it.queue.flights.patches == PATCHES
        it.queue.leave(items[0])
        assert reason(await items[0].outcome) == "CALLER_CANCELLED"
        await it.decoder.end()
        await it.encode_batch()
        assert [reason(await item.outcome) for item in items[1:]] == ["encoded", "encoded"]
        assert (it.seen.looked, it.queue.tickets.num_open) == (["miss", "joined", "joined"], 2)

    run_scene(scenario)


@pytest.mark.parametrize("stage", ["decoding", "ready", "encoding"])
def test_last_caller_to_leave_ends_the_work_where_it_is(stage: str) -> None:
    async def scenario(it: EncodeScene) -> None:
        blocker = await it.submit(it.call(seed=1))
        await it.decoder.end(0)
        while not it.jobs:
            await asyncio.sleep(0.001)
        item = await it.submit(it.call(seed=2))
        if stage != "decoding":
            await it.decoder.end(1)
            while it.queue.flights.num_decoding:
                await asyncio.sleep(0)
        if stage == "encoding":
            await it.encode_batch()
            while not it.jobs:
                await asyncio.sleep(0.001)
        it.queue.leave(item)
        assert reason(await item.outcome) == "CALLER_CANCELLED"
        # One of the two is left: the blocker, or, once that is done, the batch that no one waits for.
        assert it.queue.flights.patches == PATCHES
        await it.encode_batch()
        assert reason(await blocker.outcome) == "encoded"
        await it.assert_nothing_left()

    run_scene(scenario)


def test_time_is_up_in_every_stage_of_one_deadline() -> None:
    async def scenario(it: EncodeScene) -> None:
        item = await it.submit(it.call(seconds=0.05))
        outcome = await item.outcome
        assert isinstance(outcome, Failure)
        assert (outcome.reason, "it was decoding" in outcome.public_message) == ("ENCODER_TIMEOUT", True)
        await it.assert_nothing_left()

    run_scene(scenario)


def test_item_id_is_one_item_for_all_its_calls() -> None:
    async def scenario(it: EncodeScene) -> None:
        call = it.call(item_id=b"i" * 16)
        first, second = await it.submit(call), await it.submit(call)
        assert first is second
        it.queue.leave(first)
        with pytest.raises(ServingFailure) as caught:
            await it.submit(it.call(seed=1, item_id=b"i" * 16))
        assert caught.value.failure.reason == "IDEMPOTENCY_CONFLICT"
        await it.decoder.end()
        await it.encode_batch()
        assert reason(await second.outcome) == "encoded"
        later = await it.submit(call)
        assert (await later.outcome).ticket is (await second.outcome).ticket  # type: ignore[union-attr]

    run_scene(scenario)


def test_drain_finishes_what_is_here_and_its_deadline_ends_the_rest() -> None:
    async def scenario(it: EncodeScene) -> None:
        done, stuck = await it.submit(it.call(seed=1)), await it.submit(it.call(seed=2))
        await it.decoder.end(0)
        it.queue.begin_drain(0.3)
        it.queue.begin_drain(100.0)  # only ever shorter
        with pytest.raises(ServingFailure) as caught:
            await it.submit(it.call(seed=3))
        assert caught.value.failure.reason == "DRAINING"
        await it.encode_batch()
        assert reason(await done.outcome) == "encoded"
        status = it.queue.drain_status()
        assert (status.patches_left, status.tickets_open, status.done) == (PATCHES, 1, False)
        while not it.queue.drain_status().done:
            it.queue.tick()
            await asyncio.sleep(0.01)
        assert reason(await stuck.outcome) == "DRAINING"
        await it.assert_nothing_left()

    run_scene(scenario)


def test_loss_of_the_encoder_answers_everyone() -> None:
    async def scenario(it: EncodeScene) -> None:
        items = [await it.submit(it.call(seed=seed)) for seed in range(3)]
        await it.decoder.end(0)
        while not it.jobs:
            await asyncio.sleep(0.001)
        it.queue.lose_encoder()
        assert [reason(await item.outcome) for item in items] == ["RANK_LOST"] * 3
        with pytest.raises(ServingFailure):
            await it.submit(it.call(seed=4))
        await it.assert_nothing_left()

    run_scene(scenario)


def test_bytes_in_memory_are_bounded_also_for_calls_that_share_an_image() -> None:
    async def scenario(it: EncodeScene) -> None:
        size = len(it.call().data)
        limit = it.queue.config.queue.max_image_bytes
        items = [await it.submit(it.call()) for _ in range(limit // size)]
        with pytest.raises(ServingFailure) as caught:
            await it.submit(it.call())
        failure = caught.value.failure
        assert (failure.reason, failure.retry_after_seconds > 0) == ("PATCH_QUEUE_FULL", True)
        assert f"limit {limit}, the image has {size}" in failure.public_message
        for item in items:
            it.queue.leave(item)
        await it.assert_nothing_left()

    run_scene(scenario, queue=QueueConfig(max_image_bytes=200_000))


def test_health_follows_the_beats_of_the_batch_under_way() -> None:
    async def scenario(it: EncodeScene) -> None:
        now = [it.queue.clock()]
        front = VisionFront(
            it.queue,
            pool=it.decoder,  # type: ignore[arg-type]
            telemetry=it.seen,  # type: ignore[arg-type]
            build_served=lambda ready: ready,  # type: ignore[arg-type, return-value]
            epoch=1,
            clock=lambda: now[0],
        )
        assert front.view().state is EngineState.STARTING
        front.receive(
            EncoderReady(
                vision_digest=b"d" * 32,
                numerics_class="n",
                columns=96,
                dtype="bf16",
                device="cuda",
                num_layers=3,
                load_seconds=1.0,
            )
        )
        assert front.view().state is EngineState.STARTING  # no decode worker yet
        front.ready.set()
        await it.submit(it.call())
        now[0] += 100.0
        assert front.view().state is EngineState.READY  # decoding has limits of its own
        await it.decoder.end()
        while not it.jobs:
            await asyncio.sleep(0.001)
        batch = it.queue.flights.batch
        assert batch is not None
        now[0] = batch.sent_at + 4.0
        assert front.view().state is EngineState.READY
        front.receive(Beat())
        now[0] += 4.0
        assert front.view().state is EngineState.READY
        now[0] += 2.0
        assert front.view().state is EngineState.WEDGED
        it.queue.begin_drain(10.0)
        assert front.view().state is EngineState.WEDGED
        await it.encode_batch()
        assert front.view().state is EngineState.DRAINING

    run_scene(scenario)


def test_declared_content_key_must_be_ours() -> None:
    async def scenario(it: EncodeScene) -> None:
        call = it.call()
        right = content_key(
            hashlib.sha256(call.data).digest(),
            final_width=168,
            final_height=126,
            vision_digest=b"d" * 32,
            policy=DEFAULT_POLICY,
        )
        assert (await it.submit(call)).key == right

    run_scene(scenario)
