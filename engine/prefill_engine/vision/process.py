"""`prefill-engine ve serve`: builds every object of a VE, starts its processes, and turns the end into an exit code (C46).

Start order: checks -> shared memory -> ports -> encoder process and decode workers -> READY. End order: drain -> encoder, workers
-> servers -> shared memory. The trap: ports open before the weights are loaded, so that health answers while starting.
"""

import asyncio
import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import msgspec
from prometheus_client import CollectorRegistry

from prefill_engine.front.exits import Ending, judge_rank_loss
from prefill_engine.front.front import STOP_SECONDS
from prefill_engine.front.listening import OpenPorts
from prefill_engine.front.serving import (
    announce_ready,
    drain_on_signals,
    drained,
    end_tasks,
    load_timeout,
    run_front,
    run_to_ending,
)
from prefill_engine.settings import HostIdentity
from prefill_engine.vision.encoder_link import EncoderLink
from prefill_engine.vision.encoder_messages import ENCODER_RANK, EncoderArgs
from prefill_engine.vision.image_intake import MAX_IMAGE_BYTES
from prefill_engine.vision.slab import Slab, remove_orphans
from prefill_engine.vision.ve_build import BuiltVe, build_ve
from prefill_engine.vision.ve_front import ROW_VALUE_BYTES, VisionFront
from prefill_engine.vision.ve_ports import open_ve_ports
from prefill_engine.vision.worker_pool import DecodePool
from prefill_plan.encoder_config import CANVAS_BYTES_PER_PIXEL, EncoderConfig, check_encoder_config
from prefill_plan.errors import CheckpointError, ConfigError, ExitCode
from prefill_plan.model_spec import ModelSpec, load_model_spec

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class VeOptions:
    """What the command line adds to the configuration. encoder_entry: `module:function` of the encoder's main. fault: test hook
    (C31). announce: gets one JSON line when the ports are open and one when the VE is ready."""

    termination_log: Path
    ready_file: Path | None
    encoder_entry: str
    fault: str
    announce: Callable[[str], None]


def run_ve(config: EncoderConfig, identity: HostIdentity, options: VeOptions) -> Ending:
    """Serves until SIGTERM, SIGINT or the loss of the encoder; the termination message is written before it returns."""

    def run() -> Ending:
        return asyncio.run(_Process(config, check_ve_start(config), identity, options).serve())

    return run_to_ending(run, termination_log=options.termination_log, plan_hash=identity.plan_hash)


def check_ve_start(config: EncoderConfig) -> ModelSpec:
    """Everything that can be refused before a process is started.

    Raises:
        ConfigError: sizes that make no sense, or have no room for an image that is let in. CheckpointError: config.json is
            missing, wrong, or has no vision part.
    """
    check_encoder_config(config)
    try:
        model = load_model_spec(Path(config.model.path))
    except (ConfigError, OSError) as error:
        raise CheckpointError(f"model.path {config.model.path}: {error}") from error
    if model.vision is None:
        raise CheckpointError(
            f"model.path {config.model.path}: config.json has no vision_config, there is nothing to serve"
        )
    _check_room(
        config, image_rows_bytes=model.vision.max_image_tokens * model.hidden_size * ROW_VALUE_BYTES[config.activation]
    )
    return model


def _check_room(config: EncoderConfig, *, image_rows_bytes: int) -> None:
    """With less, the largest image would be told for ever to come again later."""
    rows, queue = config.rows.memory_bytes, config.queue.max_image_bytes
    if rows < image_rows_bytes:
        expected = f"at least one image of {image_rows_bytes} bytes"
        raise ConfigError(f"rows.memory_bytes = {rows}, expected {expected}", key="rows.memory_bytes")
    if queue < MAX_IMAGE_BYTES:
        expected = f"at least one image of {MAX_IMAGE_BYTES} bytes"
        raise ConfigError(f"queue.max_image_bytes = {queue}, expected {expected}", key="queue.max_image_bytes")


class _Process:
    """What is open, so that the end can close it in order."""

    def __init__(self, config: EncoderConfig, model: ModelSpec, host: HostIdentity, options: VeOptions) -> None:
        self._config = config
        self._model = model
        self._host = host
        self._options = options
        self._epoch = time.time_ns() // 1_000_000
        self._registry = CollectorRegistry()

    async def serve(self) -> Ending:
        """Raises ConfigError, CheckpointError."""
        assert self._model.vision is not None
        orphans = remove_orphans()
        if orphans:
            logger.warning("removed shared memory of encoders that are gone", extra={"files": orphans})
        patches = self._config.max_queued_patches
        canvas_bytes = patches * self._model.vision.patch_size**2 * CANVAS_BYTES_PER_PIXEL
        name = f"{self._host.engine_id}.{os.getpid()}"
        canvases = Slab(f"{name}.canvas", canvas_bytes, key="queue.max_patches")
        try:
            rows = await asyncio.to_thread(
                Slab, f"{name}.rows", self._config.rows.memory_bytes, key="rows.memory_bytes"
            )
            try:
                return await self._serve_with(canvases, rows)
            finally:
                rows.close()
        finally:
            canvases.close()
            if self._options.ready_file is not None:
                self._options.ready_file.unlink(missing_ok=True)

    async def _serve_with(self, canvases: Slab, rows: Slab) -> Ending:
        built = build_ve(
            self._config,
            self._model,
            canvases=canvases,
            rows=rows,
            registry=self._registry,
            epoch=self._epoch,
            engine_id=self._host.engine_id,
            build=f"prefill {metadata.version('prefill')}",
            new_id=lambda: secrets.token_bytes(16),
        )
        ports: OpenPorts | None = None
        link: EncoderLink | None = None
        try:
            ports = await open_ve_ports(built.front, self._config, registry=self._registry)
            args = EncoderArgs(
                config=msgspec.json.encode(self._config),
                canvas_path=canvases.path,
                rows_path=rows.path,
                fault=self._options.fault,
            )
            link = EncoderLink(args, entry=self._options.encoder_entry, receive=built.front.receive)
            built.send.append(link.send)
            facts = self._facts(ports, link)
            self._options.announce(json.dumps({"event": "listening", **facts}))
            logger.info("listening", extra={**facts, "config": msgspec.to_builtins(self._config)})
            return await self._run_until_end(built, link, facts)
        finally:
            if link is not None:
                link.kill()
            await built.pool.close()
            if ports is not None:
                await ports.close()

    async def _run_until_end(self, built: BuiltVe, link: EncoderLink, facts: dict[str, object]) -> Ending:
        """The first of: the encoder lost, drained after a signal, load time-out, an error of ours."""
        front = built.front
        drain_on_signals(front, seconds=self._config.server.drain_seconds, begin_drain=front.queue.begin_drain)
        running = asyncio.create_task(run_front(front))
        endings: list[Coroutine[None, None, Ending]] = [
            _encoder_lost(front, link),
            drained(front, lambda: front.queue.drain_status().done),
            load_timeout(front, seconds=self._config.server.load_timeout_seconds),
        ]
        watching = [asyncio.create_task(ending) for ending in endings]
        watching.append(asyncio.create_task(self._start(front, built.pool, facts)))
        tasks = [running, *watching]
        try:
            done, _ = await asyncio.wait([running, *watching], return_when=asyncio.FIRST_COMPLETED)
            ending = next(iter(done)).result()
            if ending.exit_code is ExitCode.DRAINED:
                await end_tasks(watching)
                code = await link.stop(seconds=STOP_SECONDS if front.ready.is_set() else 0.0)
                if code:
                    ending = judge_rank_loss(exit_codes=[(ENCODER_RANK, code)], reports=link.last_words, phase="drain")
        finally:
            await end_tasks(tasks)
        level = logging.INFO if ending.exit_code is ExitCode.DRAINED else logging.ERROR
        extra = {"exit": int(ending.exit_code), "phase": ending.phase, "detail": ending.detail}
        logger.log(level, "encoder ended", extra=extra)
        return ending

    async def _start(self, front: VisionFront, pool: DecodePool, facts: dict[str, object]) -> Ending:
        """Workers, then the tower; READY when both are, and it never returns. Raises ConfigError: no worker starts."""
        await pool.start()
        await front.tower_loaded.wait()
        front.ready.set()
        announce_ready(facts, ready_file=self._options.ready_file, announce=self._options.announce)
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    def _facts(self, ports: OpenPorts, link: EncoderLink) -> dict[str, object]:
        return {
            "engine_id": self._host.engine_id,
            "epoch": self._epoch,
            "device": self._config.device.value,
            "host": self._config.server.host,
            "port": ports.port,
            "probe_port": ports.probe_port,
            "metrics_port": ports.metrics_port,
            "pid": os.getpid(),
            "encoder_pid": link.pid,
        }


async def _encoder_lost(front: VisionFront, link: EncoderLink) -> Ending:
    code = await link.wait()
    phase = front.phase
    logger.error("encoder process lost", extra={"exit_code": code})
    front.queue.lose_encoder()
    return judge_rank_loss(exit_codes=[(ENCODER_RANK, code)], reports=link.last_words, phase=phase)
