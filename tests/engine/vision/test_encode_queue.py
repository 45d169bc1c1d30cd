"""The encode queue with a decoder and an encoder that answer when the test says so: time-outs, joins, leavers, drain, leaks."""

import asyncio
import hashlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from prefill_engine.front.health import EngineState
from prefill_engine.rpc.status import Failure, ServingFailure
from prefill_engine.vision.content_key import content_key
from prefill_engine.vision.decode_queue import DecodedImage
from prefill_engine.vision.embedding_cache import EmbeddingCache
from prefill_engine.vision.encode_call import EncodeCall, Encoded, Outcome
from prefill_engine.vision.encode_queue import EncodeQueue, Item
from prefill_engine.vision.encoder_messages import BatchDone, BatchJob, Beat, EncoderReady
from prefill_engine.vision.flights import Batch, Flights
from prefill_engine.vision.image_intake import DEFAULT_POLICY, PixelPolicy, examine
from prefill_engine.vision.slab import Slab
from prefill_engine.vision.tickets import Tickets
from prefill_engine.vision.ve_front import VisionFront
from prefill_engine.vision.worker_pool import DecodeTimeout
from prefill_engine.vision.worker_process import WorkerLost
from prefill_plan.config import ModelConfig
from prefill_plan.encoder_config import EncoderConfig, QueueConfig
from prefill_plan.errors import CapacityError, ImageRejected
from prefill_plan.model_spec import load_model_spec
from prefill_testing.ve_process import TINY_VISION, png

SPEC = load_model_spec(TINY_VISION).vision
PATCHES = 108
"""Of 168 x 126."""


class Decoder:
    """Ends a decode when the test says how."""

    def __init__(self) -> None:
        self.waiting: list[asyncio.Future[Exception | None]] = []
        self.num_writing = 0

    async def decode(
        self, data: bytes, *, policy: PixelPolicy, final: tuple[int, int] | None, into: memoryview, deadline: float
    ) -> DecodedImage:
        end: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        self.waiting.append(end)
        self.num_writing += 1
        try:
            error = await end
        finally:
            self.num_writing -= 1
        if error is not None:
            raise error
        assert SPEC is not None
        intake = examine(data, policy=policy, final=final, spec=SPEC)
        return DecodedImage(intake=intake, queued_seconds=0.0, cpu_seconds=0.001)

    async def end(self, index: int = 0, error: Exception | None = None) -> None:
        while len(self.waiting) <= index:
            await asyncio.sleep(0)
        self.waiting[index].set_result(error)


@dataclass(slots=True)
class Seen:
    """What the observer was told."""

    looked: list[str] = field(default_factory=list)
    ended: list[Outcome] = field(default_factory=list)

    def ready(self, _served: object) -> None:
        """As telemetry."""

    def looked_up(self, result: str) -> None:
        self.looked.append(result)

    def item_ended(self, _item: Item, outcome: Outcome, *, seconds: float) -> None:
        assert seconds >= 0
        self.ended.append(outcome)


@dataclass(slots=True, kw_only=True)
class Scene:
    queue: EncodeQueue
    decoder: Decoder
    jobs: list[BatchJob]
    seen: Seen
    canvases: Slab
    rows: Slab

    def call(self, seed: int = 0, *, item_id: bytes = b"", parent: bytes = b"", seconds: float = 10.0) -> EncodeCall:
        return EncodeCall(
            item_id=item_id or secrets.token_bytes(16),
            parent_attempt_id=parent,
            request_id="r",
            cache_scope=b"",
            data=png(168, 126, seed=seed),
            policy=DEFAULT_POLICY,
            final=None,
            tokens=0,
            content_key=b"",
            deadline=self.queue.clock() + seconds,
            hold_seconds=0.0,
            inline=False,
        )

    async def submit(self, call: EncodeCall) -> Item:
        return self.queue.admit(await self.queue.prepare(call))

    async def encode_batch(self, *, checksum: int = 7) -> None:
        """Answers the batch under way."""
        while not self.jobs:
            await asyncio.sleep(0.001)
        job = self.jobs.pop()
        self.queue.flights.batch_done(
            BatchDone(batch_id=job.batch_id, crc32c=(checksum,) * len(job.images), seconds={})
        )

    async def assert_nothing_left(self) -> None:
        # Decode calls that were cancelled end in the next rounds of the loop; canvases are free only then.
        for _ in range(5):
            await asyncio.sleep(0)
        flights = self.queue.flights
        assert (flights.patches, self.queue.image_bytes, flights.num_images, self.queue.num_items) == (0, 0, 0, 0)
        assert self.decoder.num_writing == 0
        assert self.canvases.used_bytes == 0
        assert self.rows.used_bytes == self.queue.cache.cached_bytes + _held(self.queue)


def _held(queue: EncodeQueue) -> int:
    return queue.tickets.num_open * 4096


@asynccontextmanager
async def scene(**config: object) -> AsyncIterator[Scene]:
    settings = EncoderConfig(model=ModelConfig(path=str(TINY_VISION)), **config)  # type: ignore[arg-type]
    clock = asyncio.get_running_loop().time
    canvases, rows = Slab("test.canvas", 1 << 20, key="c"), Slab("test.rows", 1 << 16, key="r")
    assert SPEC is not None
    cache = EmbeddingCache(slab=rows, cache_bytes=0)
    tickets = Tickets(cache, hold_seconds=60, max_hold_seconds=600, clock=clock, new_id=lambda: secrets.token_bytes(16))
    seen, decoder, jobs = Seen(), Decoder(), list[BatchJob]()
    queue = EncodeQueue(
        config=settings, spec=SPEC, cache=cache, tickets=tickets, observer=seen, clock=clock, vision_digest=b"d" * 32
    )

    def batch_seen(_batch: Batch, _message: BatchDone) -> None:
        pass

    queue.flights = Flights(
        settings,
        decoder=decoder,
        canvases=canvases,
        cache=cache,
        send=jobs.append,
        on_end=queue.flight_ended,
        on_batch=batch_seen,
    )
    queue.flights.row_bytes = 96 * 2
    try:
        yield Scene(queue=queue, decoder=decoder, jobs=jobs, seen=seen, canvases=canvases, rows=rows)
    finally:
        canvases.close()
        rows.close()


def run(scenario: Callable[[Scene], Awaitable[None]], **config: object) -> None:
    async def inside() -> None:
        async with scene(**config) as each, asyncio.timeout(20):
            await scenario(each)

    asyncio.run(inside())


def reason(outcome: Outcome) -> str:
    return outcome.reason if isinstance(outcome, Failure) else "encoded"


def test_image_goes_its_way_and_leaves_nothing() -> None:
    async def scenario(it: Scene) -> None:
        item = await it.submit(it.call())
        assert (it.queue.flights.patches, it.queue.flights.num_decoding) == (PATCHES, 1)
        await it.decoder.end()
        await it.encode_batch()
        outcome = await item.outcome
        assert isinstance(outcome, Encoded)
        assert outcome.ticket is not None
        assert (outcome.rows.crc32c, outcome.preprocess_seconds) == (7, 0.001)
        it.queue.leave(item)
        assert it.queue.tickets.release(outcome.ticket.ticket_id)
        await it.assert_nothing_left()

    run(scenario)


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
    async def scenario(it: Scene) -> None:
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

    run(scenario)


def test_values_that_are_not_finite_are_no_rows_and_not_remembered() -> None:
    async def scenario(it: Scene) -> None:
        item = await it.submit(it.call())
        await it.decoder.end()
        await it.encode_batch(checksum=-1)
        assert reason(await item.outcome) == "NONFINITE_OUTPUT"
        await it.assert_nothing_left()
        await it.submit(it.call())
        assert it.seen.looked == ["miss", "miss"]

    run(scenario)


def test_one_flight_serves_all_who_ask_and_one_who_leaves_harms_nobody() -> None:
    async def scenario(it: Scene) -> None:
        items = [await it.submit(it.call()) for _ in range(3)]
        assert it.queue.flights.patches == PATCHES
        it.queue.leave(items[0])
        assert reason(await items[0].outcome) == "CALLER_CANCELLED"
        await it.decoder.end()
        await it.encode_batch()
        assert [reason(await item.outcome) for item in items[1:]] == ["encoded", "encoded"]
        assert (it.seen.looked, it.queue.tickets.num_open) == (["miss", "joined", "joined"], 2)

    run(scenario)


@pytest.mark.parametrize("stage", ["decoding", "ready", "encoding"])
def test_last_caller_to_leave_ends_the_work_where_it_is(stage: str) -> None:
    async def scenario(it: Scene) -> None:
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

    run(scenario)


def test_time_is_up_in_every_stage_of_one_deadline() -> None:
    async def scenario(it: Scene) -> None:
        item = await it.submit(it.call(seconds=0.05))
        outcome = await item.outcome
        assert isinstance(outcome, Failure)
        assert (outcome.reason, "it was decoding" in outcome.public_message) == ("ENCODER_TIMEOUT", True)
        await it.assert_nothing_left()

    run(scenario)


def test_item_id_is_one_item_for_all_its_calls() -> None:
    async def scenario(it: Scene) -> None:
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

    run(scenario)


def test_drain_finishes_what_is_here_and_its_deadline_ends_the_rest() -> None:
    async def scenario(it: Scene) -> None:
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

    run(scenario)


def test_loss_of_the_encoder_answers_everyone() -> None:
    async def scenario(it: Scene) -> None:
        items = [await it.submit(it.call(seed=seed)) for seed in range(3)]
        await it.decoder.end(0)
        while not it.jobs:
            await asyncio.sleep(0.001)
        it.queue.lose_encoder()
        assert [reason(await item.outcome) for item in items] == ["RANK_LOST"] * 3
        with pytest.raises(ServingFailure):
            await it.submit(it.call(seed=4))
        await it.assert_nothing_left()

    run(scenario)


def test_bytes_in_memory_are_bounded_also_for_calls_that_share_an_image() -> None:
    async def scenario(it: Scene) -> None:
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

    run(scenario, queue=QueueConfig(max_image_bytes=200_000))


def test_health_follows_the_beats_of_the_batch_under_way() -> None:
    async def scenario(it: Scene) -> None:
        ahead = [0.0]
        clock = it.queue.clock
        front = VisionFront(
            it.queue,
            pool=it.decoder,  # type: ignore[arg-type]
            telemetry=it.seen,  # type: ignore[arg-type]
            build_served=lambda ready: ready,  # type: ignore[arg-type, return-value]
            epoch=1,
            clock=lambda: clock() + ahead[0],
        )
        assert front.view().state is EngineState.STARTING
        front.receive(
            EncoderReady(
                vision_digest=b"d" * 32, columns=96, dtype="bf16", device="cuda", num_layers=3, load_seconds=1.0
            )
        )
        assert front.view().state is EngineState.STARTING  # no decode worker yet
        front.ready.set()
        await it.submit(it.call())
        ahead[0] += 100.0
        assert front.view().state is EngineState.READY  # decoding has limits of its own
        ahead[0] = 0.0
        await it.decoder.end()
        while not it.jobs:
            await asyncio.sleep(0.001)
        ahead[0] = 4.0
        assert front.view().state is EngineState.READY
        front.receive(Beat())
        ahead[0] = 8.0
        assert front.view().state is EngineState.READY
        ahead[0] = 10.0
        assert front.view().state is EngineState.WEDGED
        it.queue.begin_drain(10.0)
        assert front.view().state is EngineState.WEDGED
        await it.encode_batch()
        assert front.view().state is EngineState.DRAINING

    run(scenario)


def test_declared_content_key_must_be_ours() -> None:
    async def scenario(it: Scene) -> None:
        call = it.call()
        right = content_key(
            hashlib.sha256(call.data).digest(),
            final_width=168,
            final_height=126,
            vision_digest=b"d" * 32,
            policy=DEFAULT_POLICY,
        )
        assert (await it.submit(call)).key == right

    run(scenario)
