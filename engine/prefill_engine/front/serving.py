"""How a serving process of ours runs and ends: an engine's front and a vision encoder's alike (C43, C44, C46).

Called by serve.py and vision/process.py, which know what is started and in which order it ends. The trap: every function here
that watches for an end is a task of its own and returns an Ending, or never.
"""

import asyncio
import json
import logging
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from prefill_engine.front.exits import Ending, termination_json, write_termination
from prefill_plan.errors import CheckpointError, ConfigError, ExitCode

logger = logging.getLogger(__name__)

_STALL_SECONDS = 60.0  # C44: a load that makes progress may pass its time-out
_WATCH_SECONDS = 0.05


class Running(Protocol):
    """The middle of a process: Front or VisionFront. run: ends only by cancellation or an error."""

    ready: asyncio.Event
    stopping: asyncio.Event

    @property
    def phase(self) -> str: ...

    @property
    def seconds_without_progress(self) -> float: ...

    async def run(self) -> None: ...


def run_to_ending(run: Callable[[], Ending], *, termination_log: Path, plan_hash: str) -> Ending:
    """Runs a process; what refuses its start is an ending too. The termination message is written before it returns."""
    try:
        ending = run()
    except ConfigError as error:
        ending = Ending(exit_code=ExitCode.CONFIG, phase="start", rank=None, detail=error.message)
    except CheckpointError as error:
        ending = Ending(exit_code=ExitCode.CHECKPOINT, phase="start", rank=None, detail=error.message)
    write_termination(termination_log, termination_json(ending, plan_hash=plan_hash))
    return ending


def drain_on_signals(front: Running, *, seconds: float, begin_drain: Callable[[float], None]) -> None:
    """SIGTERM and SIGINT begin the drain, with the seconds it may take."""
    loop = asyncio.get_running_loop()

    def begin(number: signal.Signals) -> None:
        # A second Ctrl-C means now; a second SIGTERM changes nothing (C43).
        allowed = 0.0 if number is signal.SIGINT and front.stopping.is_set() else seconds
        logger.info("drain begins", extra={"signal": number.name, "seconds": allowed})
        begin_drain(allowed)
        front.stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, begin, number)


async def run_front(front: Running) -> Ending:
    """Our own bug, or ranks that disagree: said once in the log, then in the termination message."""
    try:
        await front.run()
    except ExceptionGroup as group:
        logger.exception("front failed")
        detail = "; ".join(f"{type(error).__name__}: {error}" for error in group.exceptions)
        return Ending(exit_code=ExitCode.UNKNOWN, phase=front.phase, rank=None, detail=detail)
    raise AssertionError("the front ended without a reason")


async def drained(front: Running, is_done: Callable[[], bool]) -> Ending:
    """After a signal, once nothing is left."""
    await front.stopping.wait()
    while not is_done():
        await asyncio.sleep(_WATCH_SECONDS)
    return Ending(exit_code=ExitCode.DRAINED, phase="drain", rank=None, detail="drained")


async def load_timeout(front: Running, *, seconds: float) -> Ending:
    """Not ready in time, and no progress either."""
    await asyncio.sleep(seconds)
    while not front.ready.is_set():
        stalled = front.seconds_without_progress
        if stalled > _STALL_SECONDS:
            detail = f"not ready after {seconds:.0f} s and no progress for {stalled:.0f} s"
            return Ending(exit_code=ExitCode.UNKNOWN, phase=front.phase, rank=None, detail=detail)
        await asyncio.sleep(1.0)
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


def announce_ready(facts: dict[str, object], *, ready_file: Path | None, announce: Callable[[str], None]) -> None:
    """Tells whoever waits for us: the ready file, one line for announce, one in the log."""
    line = json.dumps({"event": "ready", **facts})
    if ready_file is not None:
        # Renamed into place: who waits for the file never reads half of it.
        part = ready_file.with_name(ready_file.name + ".part")
        part.write_text(line + "\n")
        part.rename(ready_file)
    announce(line)
    logger.info("ready", extra=facts)


async def end_tasks(tasks: Sequence["asyncio.Task[Any]"]) -> None:
    """Cancels them and waits until they have ended, however that is."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
