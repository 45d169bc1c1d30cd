"""Makes and joins the objects of a VE's RPC process, by name, in one function. Called by process.py."""

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from prefill_engine.rpc.convert_vision import ServedTower
from prefill_engine.vision.embedding_cache import EmbeddingCache
from prefill_engine.vision.encode_queue import EncodeQueue
from prefill_engine.vision.encoder_messages import EncoderReady, ToEncoder
from prefill_engine.vision.flights import Flights
from prefill_engine.vision.image_intake import MAX_IMAGE_BYTES
from prefill_engine.vision.slab import Slab
from prefill_engine.vision.tickets import Tickets
from prefill_engine.vision.ve_front import VisionFront
from prefill_engine.vision.ve_metrics import VeMetrics
from prefill_engine.vision.ve_telemetry import VeTelemetry
from prefill_engine.vision.worker_pool import DecodeLimits, DecodePool
from prefill_plan.encoder_config import EncoderConfig
from prefill_plan.model_spec import ModelSpec

_CPUS_PER_WORKER = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltVe:
    """send: how the encoder is reached, one function once it runs."""

    front: VisionFront
    pool: DecodePool
    send: list[Callable[[ToEncoder], None]]


def build_ve(
    config: EncoderConfig,
    model: ModelSpec,
    *,
    canvases: Slab,
    rows: Slab,
    registry: CollectorRegistry,
    epoch: int,
    engine_id: str,
    build: str,
    new_id: Callable[[], bytes],
) -> BuiltVe:
    """Every object of the RPC process. Call it inside the running loop; `model` has a vision part."""
    assert model.vision is not None
    clock = asyncio.get_running_loop().time
    send: list[Callable[[ToEncoder], None]] = []
    pool = DecodePool(_decode_limits(config), model.vision)
    cache = EmbeddingCache(slab=rows, cache_bytes=config.rows.cache_bytes)
    tickets = Tickets(
        cache,
        hold_seconds=config.rows.hold_seconds,
        max_hold_seconds=config.rows.max_hold_seconds,
        clock=clock,
        new_id=new_id,
    )
    telemetry = VeTelemetry(VeMetrics(registry), started=time.monotonic())
    queue = EncodeQueue(config=config, spec=model.vision, cache=cache, tickets=tickets, observer=telemetry, clock=clock)
    queue.flights = Flights(
        config,
        decoder=pool,
        canvases=canvases,
        cache=cache,
        send=lambda job: send[0](job),
        on_end=queue.flight_ended,
        on_batch=telemetry.batch_done,
    )

    def build_served(ready: EncoderReady) -> ServedTower:
        assert model.vision is not None
        return ServedTower(
            spec=model.vision,
            vision_digest=ready.vision_digest,
            numerics_class=ready.numerics_class,
            columns=ready.columns,
            dtype=ready.dtype,
            device=config.device.value,
            engine_id=engine_id,
            epoch=epoch,
            model_id=config.model.name,
            build=build,
            rows_path=rows.path,
            host_id=rows.host_id,
            max_patches_per_image=config.batching.max_patches_per_image,
            max_patches_per_batch=config.batching.max_patches_per_batch,
            max_image_bytes=MAX_IMAGE_BYTES,
        )

    front = VisionFront(queue, pool=pool, telemetry=telemetry, build_served=build_served, epoch=epoch, clock=clock)
    return BuiltVe(front=front, pool=pool, send=send)


def _decode_limits(config: EncoderConfig) -> DecodeLimits:
    decode = config.decode
    workers = decode.workers or max(1, len(os.sched_getaffinity(0)) // _CPUS_PER_WORKER)
    return DecodeLimits(
        num_workers=workers,
        # What waits is bounded by patches, before it comes here.
        max_waiting=config.queue.max_calls,
        image_cpu_seconds=decode.image_cpu_seconds,
        image_wall_seconds=config.image_seconds,
        worker_memory_bytes=decode.worker_memory_bytes,
    )
