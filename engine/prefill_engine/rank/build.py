"""Builds a rank: every object, by name, in the order of its dependencies. The one place that chooses implementations.

Called by the rank process, and by tests with a mailbox of their own.
"""

import logging
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from prefill_engine.block_pool import BlockPool
from prefill_engine.kv.file_store import FileStore
from prefill_engine.kv.memory_store import MemoryStore
from prefill_engine.kv.store import BlockStore
from prefill_engine.kv.transport.contract import protocol_of
from prefill_engine.kv_cache import KvCache
from prefill_engine.memory_check import check_memory
from prefill_engine.messages import FromRank, Progress, RankReady
from prefill_engine.model.flash import DeepseekV41Flash
from prefill_engine.model.load_progress import LoadProgress, console_progress
from prefill_engine.parallel.exchange import LocalExchange
from prefill_engine.rank.block_copy import BlockMovers, CpuCopier
from prefill_engine.rank.block_save import CpuSaver
from prefill_engine.rank.block_source import BlockSource
from prefill_engine.rank.calibration import calibrate
from prefill_engine.rank.courier import Courier
from prefill_engine.rank.cuda_gates import CudaGates
from prefill_engine.rank.engine import RankEngine
from prefill_engine.rank.image_rows import RankImages
from prefill_engine.rank.kv_keeper import KvKeeper
from prefill_engine.rank.kvd_source import KvdSource
from prefill_engine.rank.lanes import Mailbox
from prefill_engine.rank.loop import StepLoop
from prefill_engine.rank.model_runner import ModelDigests, ModelRunner, build_cache, load_model, read_digests
from prefill_engine.rank.payloads import HostPayloads, Payloads
from prefill_engine.rank.planner import RankPlanner
from prefill_engine.rank.push_sender import PushSender
from prefill_engine.rank.read_server import ReadServer
from prefill_engine.rank.stepper import Stepper
from prefill_engine.rank.store_worker import StoreWorker
from prefill_engine.rank.swap_counters import SwapCounters
from prefill_engine.scheduler import check_scheduler_config
from prefill_engine.swa_pool import SwaPool
from prefill_kernels.op_sets import ops_identity
from prefill_plan.config import Device, EngineConfig, StoreConfig, StoreKind, VisionMode
from prefill_plan.errors import ConfigError
from prefill_plan.kv_layout import BlockLayout, StateLayout, block_layout, state_layout
from prefill_plan.model_spec import ModelSpec, load_model_spec
from prefill_plan.positions import validate_keep

logger = logging.getLogger(__name__)

_PROGRESS_SECONDS = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class _Design:
    """What the configuration and the model's config.json say, checked against each other."""

    config: EngineConfig
    spec: ModelSpec
    layout: BlockLayout
    state: StateLayout
    device: torch.device


@dataclass(frozen=True, slots=True, kw_only=True)
class _Access:
    """How threads of the host reach the cache, and the step thread its device. make_gates None: KvdSource's own."""

    payloads: Payloads
    movers: BlockMovers
    make_gates: Callable[[threading.Condition, SwapCounters], CudaGates] | None
    wait_for_device: Callable[[], None]


def build_rank(
    config: EngineConfig, *, rank: int, mailbox: Mailbox, reads: ReadServer, enter: Callable[[str], None]
) -> StepLoop:
    """A rank that has loaded its model, calibrated itself and said RankReady.

    Args:
        reads: serves the decode side once exports are open; the caller starts it.
        enter: called with each phase ("start", "load", "warmup") as it begins.

    Raises:
        ConfigError, CheckpointError, PlanError: the exit codes of errors_at_exit.
    """
    enter("start")
    design = _read_design(config)
    store = None if config.kvd.socket else open_store(config.store, design.layout)
    enter("load")
    digests = read_digests(config, design.spec, design.layout)
    model = load_model(config, design.spec, device=design.device, progress=_progress_sender(mailbox, rank))
    cache = build_cache(config, design.spec, layout=design.layout, state=design.state, device=design.device)
    access = _build_access(config, cache)
    source = _build_source(config, store, cache=cache, access=access, rank=rank, wake=mailbox.wake)
    pushes = PushSender(reads.courier, payloads=access.payloads)
    kv = _build_keeper(design, cache=cache, source=source, reads=reads, pushes=pushes, payloads=access.payloads)
    enter("warmup")
    mailbox.send(_progress(rank, "warmup", 0, 1, "passes", ""))
    runner = _build_runner(design, model, cache, wait_for_device=access.wait_for_device)
    cost = calibrate(runner, kv, vocab_size=design.spec.vocab_size, on_layer=lambda _step, _layer: None)
    planner = RankPlanner(scheduler=config.scheduler, kv=config.kv, truncation=config.replay.truncation, cost=cost)
    engine = RankEngine(
        kv=kv,
        planner=planner,
        source=source,
        pushes=pushes,
        images=_build_images(design, mailbox.send),
        digests=digests,
        num_sources=len(design.layout.sources),
        send=mailbox.send,
    )
    kv_tokens = kv.capacity_blocks * design.layout.block_tokens
    mailbox.send(_ready(rank, config, digests, kv_tokens=kv_tokens, courier=reads.courier))
    return StepLoop(
        config=config,
        rank=rank,
        num_layers=design.spec.num_layers,
        mailbox=mailbox,
        engine=engine,
        kv=kv,
        planner=planner,
        stepper=Stepper(engine=engine, kv=kv, runner=runner, send=mailbox.send),
        source=source,
        reads=reads,
        exchange=LocalExchange(),
    )


def _read_design(config: EngineConfig) -> _Design:
    device = _torch_device(config.device)
    _check_ops(config)
    spec = load_model_spec(Path(config.model.path) / "config.json")
    check_scheduler_config(config.scheduler)
    if config.parallel.ep_size != 1:
        raise ConfigError(
            f"parallel.ep_size = {config.parallel.ep_size}: ranks of this engine do not exchange experts yet, expected 1"
        )
    replay = config.replay
    validate_keep(replay.keep_tokens, spec.window_tokens, replay.max_rollback_tokens)
    _check_memory(config, spec, device)
    return _Design(
        config=config,
        spec=spec,
        layout=block_layout(spec, config.kv.record_format),
        state=state_layout(spec, keep_tokens=replay.keep_tokens, rollback_tokens=replay.max_rollback_tokens),
        device=device,
    )


def _build_runner(
    design: _Design, model: DeepseekV41Flash, cache: KvCache, *, wait_for_device: Callable[[], None]
) -> ModelRunner:
    truncation = design.config.replay.truncation
    return ModelRunner(model, cache, truncation=truncation, device=design.device, wait_for_device=wait_for_device)


def _build_images(design: _Design, send: Callable[[FromRank], None]) -> RankImages:
    return RankImages(
        has_encoder=design.config.vision.mode is not VisionMode.NONE,
        columns=design.spec.hidden_size,
        window_tokens=design.spec.window_tokens,
        send=send,
    )


def _build_access(config: EngineConfig, cache: KvCache) -> _Access:
    if cache.blocks.device.type != "cuda":
        movers = BlockMovers(copier=CpuCopier(cache), saver=CpuSaver(cache.block_view))
        return _Access(payloads=HostPayloads(cache), movers=movers, make_gates=None, wait_for_device=lambda: None)
    # Here, because it needs a CUDA driver.
    from prefill_engine.rank.cuda_build import CudaParts

    parts = CudaParts(cache, gate_seconds=config.kvd.gate_seconds)
    return _Access(
        payloads=parts.payloads,
        movers=parts.movers,
        make_gates=parts.make_gates,
        wait_for_device=parts.wait_for_device,
    )


def _build_source(
    config: EngineConfig,
    store: BlockStore | None,
    *,
    cache: KvCache,
    access: _Access,
    rank: int,
    wake: Callable[[], None],
) -> BlockSource:
    """The pod's kvd where one is configured, else the store of this process."""
    if store is not None:
        return StoreWorker(store, payloads=access.payloads, wake=wake)
    source = KvdSource(
        config.kvd,
        cache=cache,
        movers=access.movers,
        make_gates=access.make_gates,
        rank=rank,
        wake=wake,
        is_required=config.store.required,
    )
    source.start()
    return source


def _build_keeper(
    design: _Design,
    *,
    cache: KvCache,
    source: BlockSource,
    reads: ReadServer,
    pushes: PushSender,
    payloads: Payloads,
) -> KvKeeper:
    kv = design.config.kv
    return KvKeeper(
        cache=cache,
        blocks=BlockPool(kv.pool_tokens // design.layout.block_tokens),
        # With kvd, snapshots stand in its pool, where other ranks and nodes find them.
        states=SwaPool(kv.state_slots, 0 if design.config.kvd.socket else kv.snapshot_bytes),
        source=source,
        reads=reads,
        pushes=pushes,
        payloads=payloads,
        state_layout=design.state,
        keep_tokens=design.config.replay.keep_tokens,
        has_encoder=design.config.vision.mode is not VisionMode.NONE,
    )


def _ready(
    rank: int, config: EngineConfig, digests: ModelDigests, *, kv_tokens: int, courier: Courier | None
) -> RankReady:
    logger.info("rank ready", extra={"kv_tokens": kv_tokens, "device": config.device.value})
    return RankReady(
        rank=rank,
        kv_tokens_total=kv_tokens,
        state_slots_total=config.kv.state_slots,
        weights_digest=digests.weights,
        tokenizer_digest=digests.tokenizer,
        layout_digest=digests.layout,
        numerics_class=digests.numerics_class,
        store_kind="kvd" if config.kvd.socket else config.store.kind.value,
        data_transport=protocol_of(courier.kind) if courier is not None else "",
        data_transport_kind=courier.kind if courier is not None else "",
        data_port=courier.port if courier is not None else -1,
        vision_digest=digests.vision,
    )


def open_store(config: StoreConfig, layout: BlockLayout) -> BlockStore:
    """The configured block store.

    Raises:
        ConfigError: a directory that cannot be used, with its path and the system's reason.
    """
    match config.kind:
        case StoreKind.MEMORY:
            return MemoryStore(layout, max_bytes=config.max_bytes)
        case StoreKind.FILE:
            return FileStore(Path(config.path), layout)


def _progress_sender(mailbox: Mailbox, rank: int) -> Callable[[LoadProgress], None]:
    # Rank 0 speaks for all on a terminal; elsewhere each rank logs its shards.
    show = console_progress(sys.stderr) if rank == 0 or not sys.stderr.isatty() else None

    sent_seconds = -_PROGRESS_SECONDS

    def report(progress: LoadProgress) -> None:
        nonlocal sent_seconds
        if show is not None:
            show(progress)
        now = time.monotonic()
        if now - sent_seconds < _PROGRESS_SECONDS and not progress.shard_done:
            return  # a checkpoint has 100,000 tensors
        sent_seconds = now
        mailbox.send(_progress(rank, "load", progress.done_bytes, progress.total_bytes, "bytes", progress.name))

    return report


def _progress(rank: int, stage: str, done: int, total: int, unit: str, item: str) -> Progress:
    return Progress(rank=rank, stage=stage, done=done, total=total, unit=unit, item=item, at_ns=time.monotonic_ns())


def _check_ops(config: EngineConfig) -> None:
    """Said before a checkpoint of hundreds of gigabytes is read."""
    if config.ops == "triton" and config.device is Device.CPU:
        raise ConfigError(
            "ops = triton with device = cpu: Triton kernels run on a GPU; set ops = ref for the CPU profile"
        )
    try:
        ops_identity(config.ops)
    except ValueError as error:
        raise ConfigError(f"ops = {config.ops}: {error}") from error


def _check_memory(config: EngineConfig, spec: ModelSpec, device: torch.device) -> None:
    """The operator's plan, made again here (k8s.md 4.3); its hash is in the front's line "listening"."""
    if device.type != "cuda":
        logger.info("memory plan not checked: the CPU profile has none", extra={"device": device.type})
        return
    plan = check_memory(config, spec, usable_bytes=torch.cuda.get_device_properties(device).total_memory)
    level = logging.INFO if plan.fits else logging.WARNING
    logger.log(level, "memory plan checked", extra={"need_bytes": plan.need_bytes, "plan": plan.explain()})


def _torch_device(device: Device) -> torch.device:
    if device is Device.CPU:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("device = gpu, but this machine shows no CUDA device; set device = cpu for the CPU profile")
    return torch.device("cuda", torch.cuda.current_device())
