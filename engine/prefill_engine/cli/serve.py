"""`prefill-engine serve`: runs an engine in the foreground until SIGTERM. Its exit codes are those of k8s.md 4.6 (C31)."""

import argparse
import sys
from pathlib import Path

from prefill_engine.front.exits import Ending, termination_json, write_termination
from prefill_engine.front.rank_process import RANK_ENTRY
from prefill_engine.log import setup_logging
from prefill_engine.serve import ServeOptions, run_serve
from prefill_engine.settings import load_config, load_identity
from prefill_plan.errors import ConfigError, ExitCode

TERMINATION_LOG = Path("/dev/termination-log")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE", help="EngineConfig as JSON")
    parser.add_argument(
        "--set", action="append", default=[], metavar="PART.FIELD=VALUE", dest="overrides", help="override one value"
    )
    parser.add_argument("--model", metavar="DIR", help="same as --set model.path=DIR")
    parser.add_argument("--ready-file", type=Path, metavar="PATH", help="written with the bound ports once ready")
    parser.add_argument(
        "--termination-log", type=Path, default=TERMINATION_LOG, metavar="PATH", help="written if it exists"
    )
    parser.add_argument("--log-level", default="INFO", choices=("DEBUG", "INFO", "WARNING", "ERROR"))
    # Test hooks: exit=CODE[@PHASE] in every rank; another rank main.
    parser.add_argument("--fault", default="", help=argparse.SUPPRESS)
    parser.add_argument("--rank-entry", default=RANK_ENTRY, help=argparse.SUPPRESS)


def cmd_serve(args: argparse.Namespace) -> int:
    identity = load_identity()
    setup_logging(level=args.log_level, constants={"engine_id": identity.engine_id})
    overrides = [*([f"model.path={args.model}"] if args.model else []), *args.overrides]
    try:
        config = load_config(args.config, overrides)
    except ConfigError as error:
        ending = Ending(exit_code=ExitCode.CONFIG, phase="start", rank=None, detail=error.message)
        write_termination(args.termination_log, termination_json(ending, plan_hash=identity.plan_hash))
    else:
        options = ServeOptions(
            termination_log=args.termination_log,
            ready_file=args.ready_file,
            rank_entry=args.rank_entry,
            fault=args.fault,
            announce=_announce,
        )
        ending = run_serve(config, identity, options)
    if ending.exit_code is not ExitCode.DRAINED:
        print(f"prefill-engine serve: {ending.detail}", file=sys.stderr)
    return int(ending.exit_code)


def _announce(line: str) -> None:
    print(line, flush=True)
