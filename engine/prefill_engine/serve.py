"""`prefill-engine serve`: builds every object of the front, starts the rank processes, and turns the end into an exit code.

Start order: checks -> ports -> lanes -> ranks -> READY. End order: drain -> ranks -> servers. The trap: ports open before the
weights are loaded, so that health answers while starting; until then every call is refused with STARTING.
"""

import asyncio
import json
import logging
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import msgspec
import zmq.asyncio
from prometheus_client import CollectorRegistry

from prefill_engine.front.attempts import Attempts
from prefill_engine.front.exits import Ending, judge_rank_loss
from prefill_engine.front.front import Front
from prefill_engine.front.grants import SinkCall
from prefill_engine.front.lanes import RankLanes
from prefill_engine.front.lifecycle import Lifecycle
from prefill_engine.front.listening import OpenPorts
from prefill_engine.front.load import LoadBoard
from prefill_engine.front.local_encoder import LocalEncoder, local_encoder_config
from prefill_engine.front.ports import open_ports
from prefill_engine.front.rank_process import RankProcess
from prefill_engine.front.served_model import EngineIdentity, ServedModel, build_served_model
from prefill_engine.front.serving import (
    announce_ready,
    drain_on_signals,
    drained,
    end_tasks,
    load_timeout,
    run_front,
    run_to_ending,
)
from prefill_engine.front.sink_calls import SinkCaller
from prefill_engine.front.socket_dir import make_socket_dir
from prefill_engine.front.telemetry import Telemetry
from prefill_engine.front.tickets import Ticket, Tickets
from prefill_engine.front.vision_side import VisionSide, check_vision
from prefill_engine.messages import RankArgs, RankReady, ToRank
from prefill_engine.metrics import Metrics
from prefill_engine.settings import HostIdentity
from prefill_engine.vision.slab import Slab, remove_orphans
from prefill_plan.config import EngineConfig, StoreKind, VisionMode
from prefill_plan.errors import CheckpointError, ConfigError, ExitCode
from prefill_plan.model_spec import ModelSpec, load_model_spec
from prefill_plan.positions import validate_keep
from prefill_plan.ranges import check_engine_ranges

logger = logging.getLogger(__name__)

_ATTEMPT_ID_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """What the command line adds to the configuration. rank_entry: `module:function` of a rank's main. fault: test hook (C31).
    announce: gets one JSON line when the ports are open and one when the engine is ready."""

    termination_log: Path
    ready_file: Path | None
    rank_entry: str
    fault: str
    announce: Callable[[str], None]


def run_serve(config: EngineConfig, identity: HostIdentity, options: ServeOptions) -> Ending:
    """Serves until SIGTERM, SIGINT or the loss of a rank; the termination message is written before it returns."""

    def run() -> Ending:
        return asyncio.run(_serve(config, check_start(config), identity, options))

    return run_to_ending(run, termination_log=options.termination_log, plan_hash=identity.plan_hash)


def check_start(config: EngineConfig) -> ModelSpec:
    """Everything that can be refused before a process is started.

    Raises:
        ConfigError: keep tokens below window + rollback, store directory unusable, sizes that make no sense.
        CheckpointError: the model's config.json is missing or wrong.
    """
    check_engine_ranges(config)
    try:
        spec = load_model_spec(Path(config.model.path))
    except (ConfigError, OSError) as error:
        raise CheckpointError(f"model.path {config.model.path}: {error}") from error
    replay = config.replay
    validate_keep(replay.keep_tokens, spec.window_tokens, replay.max_rollback_tokens)
    if config.store.kind is StoreKind.FILE:
        _check_store(Path(config.store.path))
    check_vision(config.vision, spec)
    return spec


def _check_store(path: Path) -> None:
    if not path.name:
        raise ConfigError("store.path is empty, a file store needs a directory")
    try:
        path.mkdir(parents=True, exist_ok=True)
        # access() says yes to root whatever the medium; only a write proves that the directory takes one.
        with tempfile.TemporaryFile(dir=path):
            pass
        os.listdir(path)
    except OSError as error:
        raise ConfigError(f"store.path {path}: not a readable and writable directory: {error.strerror}") from error


async def _serve(config: EngineConfig, spec: ModelSpec, host: HostIdentity, options: ServeOptions) -> Ending:
    rows = open_rows(config, host)
    socket_dir = str(make_socket_dir())
    context = zmq.asyncio.Context()
    registry = CollectorRegistry()
    epoch = time.time_ns() // 1_000_000
    front = build_front(
        config, spec, context=context, socket_dir=socket_dir, registry=registry, epoch=epoch, host=host, rows=rows
    )
    ports: OpenPorts | None = None
    processes: list[RankProcess] = []
    encoding: asyncio.Task[None] | None = None
    try:
        ports = await open_ports(front, config, registry=registry)
        front.endpoint = f"{host.pod_ip or config.server.host}:{ports.port}"
        if front.vision is not None and front.vision.local is not None:
            encoding = asyncio.create_task(front.vision.local.run())
        processes = [
            RankProcess(
                RankArgs(config=msgspec.json.encode(config), dp_rank=rank, socket_dir=socket_dir, fault=options.fault),
                entry=options.rank_entry,
            )
            for rank in front.lanes
        ]
        facts = _facts(config, host, ports, processes, epoch)
        options.announce(json.dumps({"event": "listening", **facts}))
        logger.info("listening", extra={**facts, "plan_hash": host.plan_hash, "config": msgspec.to_builtins(config)})
        return await _run_until_end(front, config, options, processes, facts)
    finally:
        for process in processes:
            process.kill()
        if ports is not None:
            await ports.close()
        await front.sink_caller.close()
        if encoding is not None:
            await end_tasks([encoding])
        if front.vision is not None:
            await front.vision.close()
        for lanes in front.lanes.values():
            lanes.close()
        context.term()
        shutil.rmtree(socket_dir, ignore_errors=True)
        if options.ready_file is not None:
            options.ready_file.unlink(missing_ok=True)


def build_front(
    config: EngineConfig,
    spec: ModelSpec,
    *,
    context: zmq.asyncio.Context,
    socket_dir: str,
    registry: CollectorRegistry,
    epoch: int,
    host: HostIdentity,
    rows: Slab | None,
) -> Front:
    """Every object of the front, by name. Call it inside the running loop. rows: of open_rows."""
    clock = time.monotonic
    started = clock()
    lanes = {rank: RankLanes(context, socket_dir=socket_dir, rank=rank) for rank in range(config.parallel.dp_size)}
    board = LoadBoard(num_ranks=len(lanes), chunk_rows=config.scheduler.chunk_cap_tokens, epoch=epoch, started=started)
    telemetry = Telemetry(Metrics(registry), board, started=started)

    def send(rank: int, message: ToRank) -> None:
        lanes[rank].send(message)

    def call_sink(call: SinkCall, ticket: Ticket | None) -> None:
        front.sink_caller.start(call, ticket, front.served)

    lifecycle = _build_lifecycle(config, tuple(lanes), board=board, telemetry=telemetry, send=send, call_sink=call_sink)

    def build_served(ranks: Sequence[RankReady], endpoint: str) -> ServedModel:
        return build_served_model(config, spec, identity=_engine_identity(host, epoch, endpoint), ranks=ranks)

    front = Front(
        lanes=lanes,
        lifecycle=lifecycle,
        board=board,
        telemetry=telemetry,
        build_served=build_served,
        sink_caller=SinkCaller(lifecycle.sink_answered),
        clock=clock,
        vision=None if rows is None else _build_vision(config, lifecycle, rows=rows, send=send, telemetry=telemetry),
    )
    return front


def _build_lifecycle(
    config: EngineConfig,
    ranks: tuple[int, ...],
    *,
    board: LoadBoard,
    telemetry: Telemetry,
    send: Callable[[int, ToRank], None],
    call_sink: Callable[[SinkCall, Ticket | None], None],
) -> Lifecycle:
    handoff = config.handoff
    return Lifecycle(
        limits=config.server,
        ranks=ranks,
        attempts=Attempts(result_seconds=handoff.result_seconds),
        tickets=Tickets(
            ttl_seconds=handoff.ticket_seconds,
            max_seconds=handoff.ticket_max_seconds,
            keep_seconds=handoff.result_seconds,
        ),
        send=send,
        clock=time.monotonic,
        new_id=new_id,
        wait_of=board.wait_seconds,
        observer=telemetry,
        call_sink=call_sink,
    )


def _engine_identity(host: HostIdentity, epoch: int, endpoint: str) -> EngineIdentity:
    return EngineIdentity(
        engine_id=host.engine_id,
        epoch=epoch,
        endpoint=endpoint,
        zone=host.zone,
        build=f"prefill {metadata.version('prefill')}",
    )


def open_rows(config: EngineConfig, host: HostIdentity) -> Slab | None:
    """Shared memory for rows of images on their way to the ranks; None without vision.

    Raises:
        ConfigError: /dev/shm has not that much.
    """
    vision = config.vision
    if vision.mode is VisionMode.NONE:
        return None
    orphans = remove_orphans()
    if orphans:
        logger.warning("removed shared memory of processes that are gone", extra={"files": orphans})
    return Slab(f"{host.engine_id}.{os.getpid()}.pe", vision.rows_bytes, key="vision.rows_bytes")


def _build_vision(
    config: EngineConfig,
    lifecycle: Lifecycle,
    *,
    rows: Slab,
    send: Callable[[int, ToRank], None],
    telemetry: Telemetry,
) -> VisionSide:
    is_local = config.vision.mode is VisionMode.IN_ENGINE
    return VisionSide(
        config.vision,
        slab=rows,
        local=LocalEncoder(local_encoder_config(config)) if is_local else None,
        send=send,
        fail=lifecycle.fail,
        observer=telemetry,
        clock=time.monotonic,
    )


def new_id() -> bytes:
    """A fresh random 128-bit id."""
    return secrets.token_bytes(_ATTEMPT_ID_BYTES)


async def _run_until_end(
    front: Front,
    config: EngineConfig,
    options: ServeOptions,
    processes: Sequence[RankProcess],
    facts: dict[str, object],
) -> Ending:
    """The first of: a rank lost, drained after a signal, load time-out, an error of the front itself."""

    def begin_drain(seconds: float) -> None:
        front.lifecycle.begin_drain(seconds=seconds, finish_queued=False)

    drain_on_signals(front, seconds=config.server.drain_seconds, begin_drain=begin_drain)
    running = asyncio.create_task(run_front(front))
    endings: list[Coroutine[None, None, Ending]] = [
        front.rank_loss(processes),
        drained(front, lambda: front.lifecycle.drain_status().done),
        load_timeout(front, seconds=config.server.load_timeout_seconds),
    ]
    watching = [asyncio.create_task(ending) for ending in endings]
    announcing = asyncio.create_task(_announce_ready(front, options, facts))
    tasks = [running, announcing, *watching]
    try:
        done, _ = await asyncio.wait([running, *watching], return_when=asyncio.FIRST_COMPLETED)
        ending = next(iter(done)).result()
        if ending.exit_code is ExitCode.DRAINED:
            # From here on the end of a rank is what we asked for; the front runs on to hear its last words.
            await end_tasks(watching)
            failed = await front.stop_ranks(processes)
            if failed:
                ending = judge_rank_loss(exit_codes=failed, reports=front.reports, phase="drain")
    finally:
        await end_tasks(tasks)
    level = logging.INFO if ending.exit_code is ExitCode.DRAINED else logging.ERROR
    extra = {"exit": int(ending.exit_code), "phase": ending.phase, "dp_rank": ending.rank, "detail": ending.detail}
    logger.log(level, "engine ended", extra=extra)
    return ending


async def _announce_ready(front: Front, options: ServeOptions, facts: dict[str, object]) -> None:
    await front.ready.wait()
    announce_ready(facts, ready_file=options.ready_file, announce=options.announce)


def _facts(
    config: EngineConfig, host: HostIdentity, ports: OpenPorts, processes: Sequence[RankProcess], epoch: int
) -> dict[str, object]:
    return {
        "engine_id": host.engine_id,
        "epoch": epoch,
        "device": config.device.value,
        "host": config.server.host,
        "port": ports.port,
        "probe_port": ports.probe_port,
        "metrics_port": ports.metrics_port,
        "pid": os.getpid(),
        "rank_pids": [process.pid for process in processes],
    }
