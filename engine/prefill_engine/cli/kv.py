"""`prefill-engine kv serve`: runs a pod's KV sidecar in the foreground until SIGTERM. Exit codes are those of `serve`."""

import argparse
import logging
import os
import sys
from pathlib import Path

from prefill_engine.front.exits import Ending, termination_json, write_termination
from prefill_engine.kvd.process import KvdEnding, KvdOptions, run_kvd
from prefill_engine.log import setup_logging
from prefill_engine.settings import load_identity, load_kvd_config
from prefill_plan.errors import ConfigError, ExitCode

TERMINATION_LOG = Path("/dev/termination-log")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    serve = actions.add_parser(
        "serve", help="run kvd in the foreground", description="Serves until SIGTERM.", allow_abbrev=False
    )
    serve.add_argument("--config", type=Path, metavar="FILE", help="KvdConfig as JSON")
    serve.add_argument(
        "--set", action="append", default=[], metavar="PART.FIELD=VALUE", dest="overrides", help="override one value"
    )
    serve.add_argument(
        "--drain-seconds",
        type=float,
        default=20.0,
        help="after SIGTERM, longest wait for blocks that are not in the store yet (default: %(default)g)",
    )
    serve.add_argument(
        "--termination-log", type=Path, default=TERMINATION_LOG, metavar="PATH", help="written if it exists"
    )
    serve.add_argument("--log-level", default="INFO", choices=("DEBUG", "INFO", "WARNING", "ERROR"))


def cmd_kv(args: argparse.Namespace) -> int:
    identity = load_identity()
    setup_logging(level=args.log_level, constants={"engine_id": identity.engine_id, "service": "kvd"})
    try:
        config = load_kvd_config(args.config, args.overrides)
    except ConfigError as error:
        ending = KvdEnding(exit_code=ExitCode.CONFIG, detail=error.message)
    else:
        ending = run_kvd(config, identity, KvdOptions(drain_seconds=args.drain_seconds, announce=_announce))
    if ending.exit_code is not ExitCode.DRAINED:
        message = Ending(exit_code=ending.exit_code, phase="start", rank=None, detail=ending.detail)
        write_termination(args.termination_log, termination_json(message, plan_hash=identity.plan_hash))
    if ending.detail:
        print(f"prefill-engine kv: {ending.detail}", file=sys.stderr)
    sys.stdout.flush()
    logging.shutdown()
    # Not by return: a thread stuck in a dead mount would keep the process.
    os._exit(int(ending.exit_code))


def _announce(line: str) -> None:
    print(line, flush=True)
