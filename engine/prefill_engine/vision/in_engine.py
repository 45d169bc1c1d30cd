"""The process of in-engine vision: a whole VE, started by front/local_encoder.py, that tells its port and ends with its engine.

The trap: it is in a process group of its own, so that a terminal's Ctrl-C reaches the engine alone, which then drains both.
"""

import logging
import os
import signal
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from prefill_engine.log import setup_logging
from prefill_engine.settings import HostIdentity
from prefill_engine.vision.encoder_link import ENCODER_ENTRY
from prefill_engine.vision.process import VeOptions, run_ve
from prefill_plan.encoder_config import EncoderConfig

logger = logging.getLogger(__name__)

_END_SECONDS = 10.0


def local_encoder_main(config_json: bytes, pipe: Connection) -> None:
    """Serves until the engine's end of the pipe closes; never returns."""
    os.setpgrp()
    setup_logging(level="INFO", constants={"process": "in-engine encoder"})
    config = msgspec.json.decode(config_json, type=EncoderConfig)
    threading.Thread(target=_end_with_parent, args=(pipe,), name="parent-watch", daemon=True).start()

    def announce(line: str) -> None:
        with suppress(OSError):
            pipe.send_bytes(line.encode())

    options = VeOptions(
        termination_log=Path(os.devnull),
        ready_file=None,
        encoder_entry=ENCODER_ENTRY,
        fault="",
        announce=announce,
    )
    identity = HostIdentity(engine_id=f"in-engine-{os.getppid()}", pod_ip="", zone="", plan_hash="")
    ending = run_ve(config, identity, options)
    if ending.exit_code:
        logger.error("in-engine encoder ends", extra={"detail": ending.detail})
    logging.shutdown()
    os._exit(int(ending.exit_code))


def _end_with_parent(pipe: Connection) -> None:
    """Drains when the engine's end of the pipe closes, and ends at once if that takes too long."""
    with suppress(EOFError, OSError):
        pipe.recv_bytes()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_END_SECONDS)
    os._exit(1)
