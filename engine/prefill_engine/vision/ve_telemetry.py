"""Counts and logs what happens to images: the Observer of the encode queue.

One INFO line per ended call holds its stages. The trap: nothing of an image in lines, no content keys, no ticket ids; sizes only.
"""

import logging

from prefill_engine.front.health import EngineState
from prefill_engine.log import bind
from prefill_engine.rpc.convert_vision import ServedTower, VisionLoadView
from prefill_engine.rpc.status import Failure
from prefill_engine.vision.embedding_cache import EmbeddingCache
from prefill_engine.vision.encode_call import Outcome
from prefill_engine.vision.encode_queue import Item
from prefill_engine.vision.encoder_messages import BatchDone, Loading
from prefill_engine.vision.flights import Batch
from prefill_engine.vision.tickets import Tickets
from prefill_engine.vision.ve_metrics import VeMetrics
from prefill_engine.vision.worker_pool import PoolCounters

logger = logging.getLogger(__name__)

_POOL_EVENTS = ("decoded", "rejected", "slow", "crashed", "lost", "hung", "expired", "recycled", "workers_started")


class VeTelemetry:
    """Owner of nothing but the metric values. started: monotonic seconds of the VE's start."""

    def __init__(self, metrics: VeMetrics, *, started: float) -> None:
        self._metrics = metrics
        self._started = started
        self._lost_workers = 0
        self._evicted = 0
        self._expired = 0

    def looked_up(self, result: str) -> None:
        self._metrics.cache.labels(result).inc()

    def item_ended(self, item: Item, outcome: Outcome, *, seconds: float) -> None:
        metrics, call, plan = self._metrics, item.call, item.plan
        metrics.image_seconds.observe(seconds)
        end: dict[str, object]
        ids = {
            "request_id": call.request_id,
            "attempt_id": call.parent_attempt_id.hex(),
            "item_id": call.item_id.hex(),
        }
        size = {"tokens": plan.tokens, "patches": plan.num_patches, "image_bytes": len(call.data)}
        if isinstance(outcome, Failure):
            name = "cancelled" if outcome.reason == "CALLER_CANCELLED" else "failed"
            metrics.images.labels(name, outcome.reason).inc()
            end = {"outcome": name, "reason": outcome.reason, "detail": outcome.public_message}
        else:
            metrics.images.labels("encoded", "").inc()
            end = {"outcome": "encoded", "from_cache": outcome.from_cache}
            if not outcome.from_cache:
                metrics.stage_seconds.labels("queue").observe(outcome.queued_seconds)
                metrics.stage_seconds.labels("decode").observe(outcome.preprocess_seconds)
                stages = {
                    "queue_seconds": outcome.queued_seconds,
                    "decode_seconds": outcome.preprocess_seconds,
                    "gpu_seconds": outcome.gpu_seconds,
                }
                end |= {name: round(value, 6) for name, value in stages.items()}
        bind(logger, ids).info("image ended", extra={**size, **end, "seconds": round(seconds, 6)})

    def refused(self, failure: Failure, *, request_id: str, item_id: bytes) -> None:
        """A call that was never admitted; a full queue would fill the log, so that is counted only."""
        self._metrics.images.labels("refused", failure.reason).inc()
        if failure.reason not in ("PATCH_QUEUE_FULL", "DRAINING", "STARTING"):
            extra = {"request_id": request_id, "item_id": item_id[:16].hex(), "reason": failure.reason}
            logger.info("image refused", extra={**extra, "detail": failure.public_message})

    def batch_done(self, batch: Batch, message: BatchDone) -> None:
        metrics = self._metrics
        metrics.patches.inc(batch.patches)
        metrics.batches.inc()
        metrics.batch_patches.observe(batch.patches)
        for stage, seconds in message.seconds.items():
            metrics.stage_seconds.labels(stage).observe(seconds)

    def loading(self, message: Loading, *, now: float) -> None:
        self._metrics.startup_seconds.labels(message.stage).set(now - self._started)
        if message.stage == "load":
            self._metrics.weight_load_bytes.set(message.done)

    def ready(self, served: ServedTower) -> None:
        self._metrics.info.labels(served.device, served.model_id, served.build).set(1)
        self._metrics.epoch.set(served.epoch)

    def sent(self, num_bytes: int) -> None:
        self._metrics.sent_bytes.inc(num_bytes)

    def loop_delay(self, seconds: float) -> None:
        self._metrics.loop_delay_seconds.observe(seconds)

    def refresh(self, view: VisionLoadView, *, cache: EmbeddingCache, tickets: Tickets, pool: PoolCounters) -> None:
        """Gauges, four times a second."""
        metrics = self._metrics
        for state in EngineState:
            if state is not EngineState.DEGRADED:
                metrics.state.labels(state.value).set(int(view.state is state))
        metrics.patches_queued.set(view.patches_queued)
        metrics.patches_limit.set(view.patches_limit)
        metrics.images_queued.set(view.images_queued)
        metrics.images_in_cpu.set(view.images_in_cpu)
        metrics.batch_model_ms.labels("a").set(view.a_ms)
        metrics.batch_model_ms.labels("b").set(view.b_ms)
        metrics.cache_bytes.set(view.cache_bytes)
        metrics.rows_bytes.set(cache.slab.used_bytes)
        metrics.rows_limit_bytes.set(cache.slab.num_bytes)
        metrics.tickets_open.set(view.tickets_open)
        metrics.ticket_expired.inc(tickets.num_expired - self._expired)
        metrics.cache_evicted.inc(cache.counters.evicted - self._evicted)
        metrics.worker_restarts.inc(_lost(pool) - self._lost_workers)
        self._expired, self._evicted, self._lost_workers = tickets.num_expired, cache.counters.evicted, _lost(pool)
        metrics.workers.set(pool.workers_ready)
        metrics.worker_rss_bytes.set(pool.rss_bytes)
        for name in _POOL_EVENTS:
            metrics.worker_events.labels(name).set(getattr(pool, name))


def _lost(pool: PoolCounters) -> int:
    return pool.lost + pool.slow + pool.crashed
