"""An encode queue in the test's loop, with a decoder and an encoder that answer when the test says so."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from prefill_engine.rpc.status import Failure
from prefill_engine.vision.decode_queue import DecodedImage
from prefill_engine.vision.embedding_cache import EmbeddingCache
from prefill_engine.vision.encode_call import EncodeCall, Outcome
from prefill_engine.vision.encode_queue import EncodeQueue, Item
from prefill_engine.vision.encoder_messages import BatchDone, BatchJob
from prefill_engine.vision.flights import Batch, Flights
from prefill_engine.vision.image_intake import DEFAULT_POLICY, PixelPolicy, examine
from prefill_engine.vision.slab import Slab
from prefill_engine.vision.tickets import Tickets
from prefill_plan.config import ModelConfig
from prefill_plan.encoder_config import EncoderConfig
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
    sent_bytes: int = 0

    def ready(self, _served: object) -> None:
        """As telemetry."""

    def looked_up(self, result: str) -> None:
        self.looked.append(result)

    def sent(self, num_bytes: int) -> None:
        """As telemetry."""
        self.sent_bytes += num_bytes

    def item_ended(self, _item: Item, outcome: Outcome, *, seconds: float) -> None:
        assert seconds >= 0
        self.ended.append(outcome)


@dataclass(slots=True, kw_only=True)
class EncodeScene:
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
async def encode_scene(
    *, row_bytes: int = 96 * 2, rows_bytes: int = 1 << 16, **config: object
) -> AsyncIterator[EncodeScene]:
    """row_bytes: of one row. rows_bytes: of the slab."""
    settings = EncoderConfig(model=ModelConfig(path=str(TINY_VISION)), **config)  # type: ignore[arg-type]
    clock = asyncio.get_running_loop().time
    canvases, rows = Slab("test.canvas", 1 << 20, key="c"), Slab("test.rows", rows_bytes, key="r")
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
    queue.flights.row_bytes = row_bytes
    try:
        yield EncodeScene(queue=queue, decoder=decoder, jobs=jobs, seen=seen, canvases=canvases, rows=rows)
    finally:
        canvases.close()
        rows.close()


def run_scene(scenario: Callable[[EncodeScene], Awaitable[None]], **config: object) -> None:
    """config: arguments of encode_scene."""

    async def inside() -> None:
        async with encode_scene(**config) as each, asyncio.timeout(60):
            await scenario(each)

    asyncio.run(inside())


def reason(outcome: Outcome) -> str:
    return outcome.reason if isinstance(outcome, Failure) else "encoded"
