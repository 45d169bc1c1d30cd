"""What `serve` and `ve serve` have in common on the command line: options, configuration, exit code."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from prefill_engine.front.exits import Ending, termination_json, write_termination
from prefill_engine.log import setup_logging
from prefill_engine.settings import HostIdentity, load_identity
from prefill_plan.errors import ConfigError, ExitCode

TERMINATION_LOG = Path("/dev/termination-log")
_Config = TypeVar("_Config")


def add_serve_arguments(parser: argparse.ArgumentParser, *, config_name: str, entry_option: str, entry: str) -> None:
    """entry_option, entry: hidden option that names another main of the computing process, and its default."""
    parser.add_argument("--config", type=Path, metavar="FILE", help=f"{config_name} as JSON")
    parser.add_argument(
        "--set", action="append", default=[], metavar="PART.FIELD=VALUE", dest="overrides", help="override one value"
    )
    parser.add_argument("--model", metavar="DIR", help="same as --set model.path=DIR")
    parser.add_argument("--ready-file", type=Path, metavar="PATH", help="written with the bound ports once ready")
    parser.add_argument(
        "--termination-log", type=Path, default=TERMINATION_LOG, metavar="PATH", help="written if it exists"
    )
    parser.add_argument("--log-level", default="INFO", choices=("DEBUG", "INFO", "WARNING", "ERROR"))
    # Test hooks: exit=CODE[@PHASE] in every computing process; another main of it.
    parser.add_argument("--fault", default="", help=argparse.SUPPRESS)
    parser.add_argument(entry_option, default=entry, help=argparse.SUPPRESS)


def serve_until_end(
    args: argparse.Namespace,
    *,
    verb: str,
    constants: dict[str, str],
    load: Callable[[Path | None, Sequence[str]], _Config],
    run: Callable[[_Config, HostIdentity], Ending],
) -> int:
    """Exit code of the process (k8s.md 4.6). constants: of every log line, beside the engine's id."""
    identity = load_identity()
    setup_logging(level=args.log_level, constants={"engine_id": identity.engine_id, **constants})
    overrides = [*([f"model.path={args.model}"] if args.model else []), *args.overrides]
    try:
        config = load(args.config, overrides)
    except ConfigError as error:
        ending = Ending(exit_code=ExitCode.CONFIG, phase="start", rank=None, detail=error.message)
        write_termination(args.termination_log, termination_json(ending, plan_hash=identity.plan_hash))
    else:
        ending = run(config, identity)
    if ending.exit_code is not ExitCode.DRAINED:
        print(f"prefill-engine {verb}: {ending.detail}", file=sys.stderr)
    return int(ending.exit_code)


def announce(line: str) -> None:
    """For scripts that wait for the ports."""
    print(line, flush=True)
