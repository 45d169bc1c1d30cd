"""The running middle of a VE: joins the encoder process, the decode workers, the queue, load and health, as the PE's Front.

The servicer calls it; process.py builds and runs it. All its state is touched by one event loop only, so nothing is locked.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from prefill_engine.front.health import EngineState, RankPulse, judge_state
from prefill_engine.rpc.convert_vision import ServedTower, VisionLoadView
from prefill_engine.rpc.status import refuse
from prefill_engine.vision.encode_queue import EncodeQueue
from prefill_engine.vision.encoder_messages import BatchDone, Beat, EncoderReady, FromEncoder, Loading
from prefill_engine.vision.ve_telemetry import VeTelemetry
from prefill_engine.vision.worker_pool import PoolCounters
from prefill_plan.config import Device

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.02
_REFRESH_SECONDS = 0.25
# Health takes ten times the layer's time; a layer of the largest image takes seconds on the CPUs of a laptop.
_CPU_LAYER_MS = 6000.0


class Pool(Protocol):
    """What is needed of worker_pool.DecodePool beside decode."""

    def counters(self) -> PoolCounters: ...


class VisionFront:
    """build_served: makes the served tower of the encoder's report. clock: the loop's.

    tower_loaded: the encoder process is ready. ready: a decode worker as well. stopping: a signal asked us to end.
    """

    def __init__(
        self,
        queue: EncodeQueue,
        *,
        pool: Pool,
        telemetry: VeTelemetry,
        build_served: Callable[[EncoderReady], ServedTower],
        epoch: int,
        clock: Callable[[], float],
    ) -> None:
        self.queue = queue
        self.telemetry = telemetry
        self.clock = clock
        self.tower_loaded = asyncio.Event()
        self.ready = asyncio.Event()
        self.stopping = asyncio.Event()
        self._pool = pool
        self._build_served = build_served
        self._epoch = epoch
        self._encoder: EncoderReady | None = None
        self._served: ServedTower | None = None
        self._phase = "start"
        self._last_progress = clock()
        self._last_beat = 0.0

    @property
    def served(self) -> ServedTower:
        """What this VE serves.

        Raises:
            ServingFailure: STARTING, until it is ready.
        """
        if self._served is None or not self.ready.is_set():
            refuse("STARTING", "this encoder still starts; its tower or its decode workers are not ready")
        return self._served

    @property
    def phase(self) -> str:
        """For the termination message: start, load, warmup, serve, drain."""
        return "drain" if self.queue.drain.is_draining else self._phase

    @property
    def seconds_without_progress(self) -> float:
        return self.clock() - self._last_progress

    def receive(self, message: FromEncoder) -> None:
        """Takes in one message of the encoder process."""
        match message:
            case Beat():
                self._last_beat = self.clock()
            case Loading():
                self._phase = message.stage
                self._last_progress = self.clock()
                self.telemetry.loading(message, now=self.clock())
            case EncoderReady():
                self._note_ready(message)
            case BatchDone():
                self.queue.flights.batch_done(message)

    def view(self) -> VisionLoadView:
        """Load and state of this moment."""
        queue, flights = self.queue, self.queue.flights
        a_ms, b_ms = flights.cost.fit()
        state = judge_state(
            ready=self.ready.is_set() and not queue.is_lost,
            draining=queue.drain.is_draining,
            degraded=False,
            pulses=self._pulses(),
            now=self.clock(),
        )
        return VisionLoadView(
            epoch=self._epoch,
            state=state,
            patches_queued=flights.patches,
            patches_limit=queue.config.max_queued_patches,
            images_queued=flights.num_images,
            images_in_cpu=flights.num_decoding,
            a_ms=a_ms,
            b_ms=b_ms,
            cache_bytes=queue.cache.cached_bytes,
            tickets_open=queue.tickets.num_open,
            step_counter=flights.num_batches,
            patches_encoded=flights.patches_encoded,
        )

    @property
    def is_serving(self) -> bool:
        return self.view().state is EngineState.READY

    async def run(self) -> None:
        """Serves the timers; ends only by cancellation or an error."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._tick())
            tasks.create_task(self._refresh())

    async def _tick(self) -> None:
        while True:
            due = self.clock() + TICK_SECONDS
            await asyncio.sleep(TICK_SECONDS)
            self.telemetry.loop_delay(max(0.0, self.clock() - due))
            self.queue.tick()

    async def _refresh(self) -> None:
        while True:
            queue = self.queue
            self.telemetry.refresh(self.view(), cache=queue.cache, tickets=queue.tickets, pool=self._pool.counters())
            await asyncio.sleep(_REFRESH_SECONDS)

    def _pulses(self) -> list[RankPulse]:
        batch = self.queue.flights.batch
        if batch is None or self._encoder is None:
            return []
        batch_ms = self.queue.flights.cost.predicted_ms(batch.patches, batch_patches=batch.patches)
        layer_ms = batch_ms / self._encoder.num_layers
        if self.queue.config.device is Device.CPU:
            layer_ms = max(layer_ms, _CPU_LAYER_MS)
        return [RankPulse(last_sign=max(self._last_beat, batch.sent_at), predicted_layer_ms=layer_ms)]

    def _note_ready(self, message: EncoderReady) -> None:
        self._encoder = message
        self._served = self._build_served(message)
        self._phase = "serve"
        self._last_progress = self.clock()
        self.queue.vision_digest = message.vision_digest
        self.queue.flights.row_bytes = message.columns * ROW_VALUE_BYTES[message.dtype]
        self.telemetry.ready(self._served)
        extra = {"device": message.device, "columns": message.columns, "load_seconds": round(message.load_seconds, 3)}
        logger.info("tower loaded", extra=extra)
        self.tower_loaded.set()


ROW_VALUE_BYTES = {"bf16": 2, "fp32": 4}
"""Bytes of one value of a row, by the dtype's name on the wire."""
