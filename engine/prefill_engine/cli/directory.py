"""`prefill-engine directory serve`: the cluster's directory of snapshots and segments, until SIGTERM. Soft state, no files."""

import argparse

from prefill_engine.kvd.directory_server import DirectoryOptions, run_directory
from prefill_engine.kvd.directory_state import DirectoryLimits
from prefill_engine.log import setup_logging
from prefill_plan.config import TlsConfig

_LIMITS = DirectoryLimits()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    serve = actions.add_parser(
        "serve", help="run the directory in the foreground", description="Serves until SIGTERM.", allow_abbrev=False
    )
    serve.add_argument("--host", default="0.0.0.0")
    serve.add_argument("--port", type=int, default=50061, help="0 = any free port, printed at start")
    serve.add_argument("--metrics-port", type=int, default=-1, help="Prometheus; 0 = any free port, -1 = none")
    serve.add_argument("--heartbeat-seconds", type=float, default=3.0, help="asked of every holder")
    serve.add_argument(
        "--expiry-seconds",
        type=float,
        default=_LIMITS.expiry_seconds,
        help="a holder silent for longer is forgotten (default: %(default)g)",
    )
    serve.add_argument("--max-snapshots", type=int, default=_LIMITS.max_snapshots, help="default: %(default)d")
    serve.add_argument("--max-blocks", type=int, default=_LIMITS.max_blocks, help="default: %(default)d")
    for name, text in (
        ("certificate", "PEM; all three = mutual TLS"),
        ("key", "PEM"),
        ("authority", "PEM that signed every holder's certificate"),
    ):
        serve.add_argument(f"--tls-{name}", default="", metavar="FILE", help=text)
    serve.add_argument("--log-level", default="INFO", choices=("DEBUG", "INFO", "WARNING", "ERROR"))


def cmd_directory(args: argparse.Namespace) -> int:
    setup_logging(level=args.log_level, constants={"service": "directory"})
    run_directory(
        DirectoryOptions(
            host=args.host,
            port=args.port,
            metrics_port=args.metrics_port,
            heartbeat_seconds=args.heartbeat_seconds,
            limits=DirectoryLimits(
                expiry_seconds=args.expiry_seconds, max_snapshots=args.max_snapshots, max_blocks=args.max_blocks
            ),
            tls=TlsConfig(certificate=args.tls_certificate, key=args.tls_key, authority=args.tls_authority),
            announce=_announce,
        )
    )
    return 0


def _announce(line: str) -> None:
    print(line, flush=True)
