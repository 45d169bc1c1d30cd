"""In-engine vision: a vision encoder of our own beside the ranks, in processes of its own, reached as every other one is.

Started by serve.py for vision.mode = in-engine (single machines, benchmarks). Not on the path of a rank's step and not in the
front: decoders of attackers' bytes stay in their workers. The trap: it must not outlive this process, however that ends, and
a terminal's Ctrl-C must not drain it while we still finish prompts.
"""

import asyncio
import importlib
import json
import logging
import multiprocessing
import time
from multiprocessing.connection import Connection

import msgspec

from prefill_plan.config import EngineConfig, ServerConfig
from prefill_plan.encoder_config import EncoderConfig, RowsConfig

logger = logging.getLogger(__name__)

LOCAL_ENTRY = "prefill_engine.vision.in_engine:local_encoder_main"
DRAIN_SECONDS = 2.0
_END_SECONDS = 20.0
_BACK_OFF_SECONDS = (1.0, 30.0)
_OFF = -1


def local_encoder_config(config: EngineConfig) -> EncoderConfig:
    """The engine's model, device and kernels; any free port of this machine."""
    rows_bytes = config.vision.rows_bytes
    return EncoderConfig(
        model=config.model,
        device=config.device,
        ops=config.ops,
        server=ServerConfig(host="127.0.0.1", port=0, probe_port=_OFF, metrics_port=_OFF, drain_seconds=DRAIN_SECONDS),
        rows=RowsConfig(memory_bytes=rows_bytes, cache_bytes=rows_bytes // 2),
        image_seconds=config.vision.image_seconds,
    )


class LocalEncoder:
    """Run `run` as a task. endpoint: "" until it listens, and while it is being started again."""

    def __init__(self, config: EncoderConfig) -> None:
        self.endpoint = ""
        self.pid = 0
        self._config = msgspec.json.encode(config)

    async def run(self) -> None:
        """Keeps one running, without end; cancelled, it ends it."""
        pause = _BACK_OFF_SECONDS[0]
        while True:
            began = time.monotonic()
            code = await self._run_once()
            self.endpoint = ""
            logger.error("in-engine encoder ended", extra={"exit": code, "restart_seconds": pause})
            if time.monotonic() - began > _BACK_OFF_SECONDS[1]:
                pause = _BACK_OFF_SECONDS[0]
            await asyncio.sleep(pause)
            pause = min(2 * pause, _BACK_OFF_SECONDS[1])

    async def _run_once(self) -> int:
        context = multiprocessing.get_context("spawn")
        pipe, child_end = context.Pipe()
        process = context.Process(
            target=run_child, args=(LOCAL_ENTRY, self._config, child_end), name="prefill-ve-local"
        )
        process.start()
        child_end.close()
        self.pid = process.pid or 0
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        loop.add_reader(process.sentinel, ended.set)
        loop.add_reader(pipe.fileno(), self._hear, pipe)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(process.sentinel)
            loop.remove_reader(pipe.fileno())
            # It drains and ends when its pipe closes.
            pipe.close()
            await asyncio.to_thread(process.join, _END_SECONDS)
            if process.is_alive():
                process.kill()
                process.join()
        return process.exitcode or 0

    def _hear(self, pipe: Connection) -> None:
        try:
            facts = json.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            asyncio.get_running_loop().remove_reader(pipe.fileno())
            return
        self.endpoint = f"127.0.0.1:{facts['port']}"
        logger.info("in-engine encoder", extra={"event": facts["event"], "port": facts["port"], "ve_pid": self.pid})


def run_child(entry: str, config_json: bytes, pipe: Connection) -> None:
    """Child side; its code is imported there only."""
    module, _, name = entry.partition(":")
    main = getattr(importlib.import_module(module), name)
    main(config_json, pipe)
