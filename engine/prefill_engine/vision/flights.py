"""Images on their way: decoded, gathered into batches, encoded. One flight per content key, however many calls wait for it.

    open -> DECODING (a task in the decode pool) -> READY (canvas in the slab) -> ENCODING (in the one batch under way) -> on_end

Owned by encode_queue, in its loop. The traps: patches count from open to end, so everything behind them is bounded by them; a
flight that nobody waits for is dropped until its batch has started, later its rows go into the cache.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from prefill_engine.rpc.status import Failure, ServingFailure
from prefill_engine.vision.batch_cost import BatchCost
from prefill_engine.vision.batch_plan import BatchLimits, ReadyImage, plan_batch, seconds_until_due
from prefill_engine.vision.decode_queue import DecodedImage
from prefill_engine.vision.embedding_cache import EmbeddingCache, Rows
from prefill_engine.vision.encoder_messages import BatchDone, BatchJob, ImageJob
from prefill_engine.vision.image_intake import PixelPolicy
from prefill_engine.vision.plan import ImagePlan
from prefill_engine.vision.slab import Region, Slab
from prefill_engine.vision.worker_pool import DecodeTimeout
from prefill_engine.vision.worker_process import WorkerLost
from prefill_plan.encoder_config import EncoderConfig
from prefill_plan.errors import CapacityError, ImageRejected

logger = logging.getLogger(__name__)

_MIN_RETRY_SECONDS = 0.05


class Decoder(Protocol):
    """What is needed of worker_pool.DecodePool."""

    async def decode(
        self, data: bytes, *, policy: PixelPolicy, final: tuple[int, int] | None, into: memoryview, deadline: float
    ) -> DecodedImage: ...


class FlightState(Enum):
    DECODING = auto()
    READY = auto()
    ENCODING = auto()
    ENDED = auto()


@dataclass(slots=True, eq=False, kw_only=True)
class Flight:
    """data: until it is decoded. deadline: of the decoding. Times are the loop's; ready_at, sent_at: 0 until they come."""

    key: bytes
    data: bytes
    policy: PixelPolicy
    final: tuple[int, int] | None
    plan: ImagePlan
    rows: Rows
    canvas: Region
    deadline: float
    state: FlightState = FlightState.DECODING
    num_waiting: int = 0
    passed_patches: int = 0
    decode_seconds: float = 0.0
    decode_queued_seconds: float = 0.0
    ready_at: float = 0.0
    sent_at: float = 0.0
    gpu_seconds: float = 0.0
    task: "asyncio.Task[None] | None" = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    batch_id: int
    flights: tuple[Flight, ...]
    sent_at: float

    @property
    def patches(self) -> int:
        return sum(flight.plan.num_patches for flight in self.flights)


class Flights:
    """Owner of the flights and of the canvas slab. on_end: told of each flight that ends, with None or what went wrong.
    row_bytes: of one row, known once the encoder is ready."""

    def __init__(
        self,
        config: EncoderConfig,
        *,
        decoder: Decoder,
        canvases: Slab,
        cache: EmbeddingCache,
        send: Callable[[BatchJob], None],
        on_end: Callable[[Flight, Failure | None], None],
        on_batch: Callable[[Batch, BatchDone], None],
    ) -> None:
        batching = config.batching
        self._limits = BatchLimits(
            max_patches=batching.max_patches_per_batch,
            max_images=batching.max_images_per_batch,
            max_delay=batching.max_delay_milliseconds / 1e3,
        )
        self._max_patches = config.max_queued_patches
        self._max_patches_per_image = batching.max_patches_per_image
        self._decoder = decoder
        self._canvases = canvases
        self._cache = cache
        self._send = send
        self._on_end = on_end
        self._on_batch = on_batch
        self._flights: dict[bytes, Flight] = {}
        self._ready: list[Flight] = []
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self.row_bytes = 0
        self.batch: Batch | None = None
        self.cost = BatchCost()
        self.num_batches = 0
        self.patches_encoded = 0
        self.patches = 0
        """Of all flights."""

    @property
    def num_images(self) -> int:
        return len(self._flights)

    @property
    def num_decoding(self) -> int:
        return sum(flight.state is FlightState.DECODING for flight in self._flights.values())

    def find(self, key: bytes) -> Flight | None:
        return self._flights.get(key)

    def open(
        self,
        key: bytes,
        *,
        data: bytes,
        policy: PixelPolicy,
        final: tuple[int, int] | None,
        plan: ImagePlan,
        deadline: float,
    ) -> Flight:
        """Takes an image in.

        Raises:
            ServingFailure: PATCH_QUEUE_FULL, with what is full and when to come again; IMAGE_REJECTED, too many patches.
        """
        patches = plan.num_patches
        if patches > self._max_patches_per_image:
            text = f"image has {patches} patches, limit batching.max_patches_per_image = {self._max_patches_per_image}"
            raise ServingFailure(Failure(reason="IMAGE_REJECTED", public_message=f"{text}; not encoded"))
        if self.patches + patches > self._max_patches:
            raise self.full(f"{self.patches} patches wait here, limit {self._max_patches}, the image has {patches}")
        canvas = self._canvases.allocate(plan.width * plan.height * 3)
        if canvas is None:
            raise self.full("no room for another canvas")
        rows = self._cache.reserve(key, plan, plan.tokens * self.row_bytes)
        if rows is None:
            self._canvases.free(canvas)
            raise self.full("rows that callers hold fill the shared memory")
        flight = Flight(
            key=key, data=data, policy=policy, final=final, plan=plan, rows=rows, canvas=canvas, deadline=deadline
        )
        self._flights[key] = flight
        self.patches += patches
        flight.task = asyncio.create_task(self._decode(flight))
        return flight

    def full(self, what: str) -> ServingFailure:
        """The refusal of an image for which there is no room now."""
        wait = self.cost.predicted_ms(self.patches, batch_patches=self._limits.max_patches) / 1e3
        return ServingFailure(
            Failure(
                reason="PATCH_QUEUE_FULL",
                public_message=f"this encoder is full: {what}; not queued",
                retry_after_seconds=max(_MIN_RETRY_SECONDS, wait),
            )
        )

    def leave(self, flight: Flight) -> None:
        """A call does not wait for it any more; nobody left = it is dropped, unless its batch has started."""
        flight.num_waiting -= 1
        if not flight.num_waiting and flight.state in (FlightState.DECODING, FlightState.READY):
            self._close(flight)
            self._plan()

    def batch_done(self, message: BatchDone) -> None:
        """The encoder's answer to the batch under way."""
        batch = self.batch
        assert batch is not None, "answer without a batch"
        assert batch.batch_id == message.batch_id, "answer to another batch"
        self.batch = None
        self.num_batches += 1
        self.patches_encoded += batch.patches
        seconds = self._loop.time() - batch.sent_at
        self.cost.note(patches=batch.patches, ms=seconds * 1e3)
        self._on_batch(batch, message)
        for flight, checksum in zip(batch.flights, message.crc32c, strict=True):
            flight.gpu_seconds = seconds
            if checksum < 0:
                text = "the encoder gave values that are not finite for this image"
                self._end(flight, Failure(reason="NONFINITE_OUTPUT", public_message=text, phase="IMAGES"))
            else:
                self._cache.fill(flight.rows, crc32c=checksum)
                self._end(flight, None)
        self._plan()

    def fail_all(self, failure: Failure) -> None:
        """The encoder is lost, or the time of a drain is over."""
        for flight in list(self._flights.values()):
            if flight.state is not FlightState.ENCODING or failure.reason == "RANK_LOST":
                self._end(flight, failure)

    async def _decode(self, flight: Flight) -> None:
        try:
            image = await self._decoder.decode(
                flight.data,
                policy=flight.policy,
                final=flight.final,
                into=self._canvases.view(flight.canvas),
                deadline=flight.deadline,
            )
        # Whatever it is, it must not leave callers waiting.
        except Exception as error:
            if not isinstance(error, ImageRejected | DecodeTimeout | WorkerLost | CapacityError):
                logger.exception("decoding failed")
            self._end(flight, decode_failure(error))
            self._plan()
            return
        if flight.state is not FlightState.DECODING:
            return
        flight.data = b""
        flight.decode_seconds, flight.decode_queued_seconds = image.cpu_seconds, image.queued_seconds
        flight.state, flight.ready_at = FlightState.READY, self._loop.time()
        self._ready.append(flight)
        self._plan()

    def _plan(self) -> None:
        """Starts the next batch if it is time for one, or looks again when it is."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.batch is not None:
            return
        images = [
            ReadyImage(patches=flight.plan.num_patches, passed_patches=flight.passed_patches, ready_at=flight.ready_at)
            for flight in self._ready
        ]
        now = self._loop.time()
        wait = seconds_until_due(images, self._limits, now=now, more_to_come=self.num_decoding > 0)
        if wait is None:
            return
        if wait > 0:
            self._timer = self._loop.call_later(wait, self._plan)
            return
        plan = plan_batch(images, self._limits)
        for index, passed in plan.passed.items():
            self._ready[index].passed_patches = passed
        flights = tuple(self._ready[index] for index in plan.chosen)
        self._ready = [flight for flight in self._ready if flight not in flights]
        self.batch = Batch(batch_id=self.num_batches, flights=flights, sent_at=now)
        for flight in flights:
            flight.state, flight.sent_at = FlightState.ENCODING, now
        self._send(BatchJob(batch_id=self.batch.batch_id, images=tuple(_image_job(flight) for flight in flights)))

    def _end(self, flight: Flight, failure: Failure | None) -> None:
        if flight.state is FlightState.ENDED:
            return
        # The rows stay pinned while callers get their tickets.
        self._cache.pin(flight.rows)
        self._close(flight)
        self._on_end(flight, failure)
        self._cache.unpin(flight.rows)

    def _close(self, flight: Flight) -> None:
        was_decoding = flight.state is FlightState.DECODING
        if flight.state is FlightState.READY:
            self._ready.remove(flight)
        flight.state = FlightState.ENDED
        del self._flights[flight.key]
        self.patches -= flight.plan.num_patches
        task = flight.task
        if was_decoding and task is not None and task is not asyncio.current_task():
            # The pool writes nothing after its call has ended; only then may the canvas be another image's.
            task.cancel()
            task.add_done_callback(lambda _: self._canvases.free(flight.canvas))
        else:
            self._canvases.free(flight.canvas)
        self._cache.unpin(flight.rows)


def decode_failure(error: Exception) -> Failure:
    """What a caller is told of an image that was not decoded."""
    match error:
        case ImageRejected():
            return Failure(reason=error.reason, public_message=error.message, phase="IMAGES")
        case DecodeTimeout():
            return Failure(reason="ENCODER_TIMEOUT", public_message=error.message, phase="IMAGES")
        case CapacityError():
            after = error.details.get("retry_after_seconds")
            seconds = after if isinstance(after, float) else _MIN_RETRY_SECONDS
            return Failure(
                reason="PATCH_QUEUE_FULL",
                public_message=error.message,
                phase="IMAGES",
                retry_after_seconds=max(_MIN_RETRY_SECONDS, seconds),
            )
        case WorkerLost():
            text = "the process that decoded this image was lost; the encoder goes on"
            return Failure(
                reason="ENGINE_LOST",
                retry="ONCE_THEN_FAIL",
                public_message=text,
                phase="IMAGES",
                operator_detail=error.message,
            )
        case _:
            text = "the encoder failed on this image; it is in the encoder's log"
            return Failure(reason="INVARIANT", public_message=text, phase="IMAGES")


def _image_job(flight: Flight) -> ImageJob:
    return ImageJob(
        width=flight.plan.width,
        height=flight.plan.height,
        canvas_offset=flight.canvas.offset,
        rows_offset=flight.rows.region.offset,
    )
