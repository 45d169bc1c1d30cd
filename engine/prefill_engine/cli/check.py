"""`prefill-engine check`: our forward pass against golden data. Exit 0 within tolerance, 1 out of it, 2 no golden data."""

import argparse
import sys
from pathlib import Path

from prefill_engine.check.golden import check_golden
from prefill_engine.check.regimes import REGIMES
from prefill_engine.check.report import render_json, render_table
from prefill_kernels.op_sets import load_ops
from prefill_kernels.vision_ops import load_vision_ops
from prefill_plan.errors import PrefillError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--golden", type=Path, required=True, metavar="DIR", help="golden set, or a directory of golden sets"
    )
    parser.add_argument(
        "--regime",
        choices=[regime.name for regime in REGIMES],
        action="append",
        default=[],
        help="run only this regime (repeatable); default: all that have expected values",
    )
    parser.add_argument("--json", action="store_true", help="every comparison as one JSON object")


def cmd_check(args: argparse.Namespace) -> int:
    def show(name: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\x1b[K{name}", end="", file=sys.stderr, flush=True)

    try:
        report = check_golden(
            args.golden,
            ops=load_ops("ref"),
            vision_ops=load_vision_ops("ref"),
            regimes=args.regime,
            on_case=show,
        )
    except (PrefillError, ValueError) as error:
        print(f"prefill-engine check: {error}", file=sys.stderr)
        return 2
    show("")
    print(render_json(report) if args.json else render_table(report))
    return 0 if report.passed else 1
