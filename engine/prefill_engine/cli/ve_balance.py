"""`prefill-engine ve-balance`: latency of images by three ways to choose an encoder, simulated. Exit 0 done, 2 wrong input."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean

from prefill_engine.vision.balance import Fleet, PolicyResult, compare_policies
from prefill_engine.vision.balance_trace import SCREENSHOT_PATCHES, Arrival, Traffic, make_trace, read_trace
from prefill_engine.vision.batch_plan import BatchLimits
from prefill_plan.encoder_config import BatchingConfig
from prefill_plan.errors import ConfigError

_BATCHING = BatchingConfig()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--encoders", type=int, default=8, metavar="N", help="simulated encoders (default: 8)")
    parser.add_argument(
        "--ms-per-patch",
        type=float,
        nargs="+",
        default=[0.005],
        metavar="MS",
        help="of every encoder, or one value for each; ve-sweep measures it (default: 0.005, an assumption)",
    )
    parser.add_argument(
        "--batch-ms", type=float, default=0.0, metavar="MS", help="of a batch beside its patches (default: 0)"
    )
    parser.add_argument(
        "--batch-patches", type=int, default=_BATCHING.max_patches_per_batch, metavar="N", help="default: %(default)s"
    )
    parser.add_argument(
        "--batch-images", type=int, default=_BATCHING.max_images_per_batch, metavar="N", help="default: %(default)s"
    )
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help='replay this one: JSON lines such as {"time": 12.5, "patches": 8418}'
    )
    parser.add_argument("--load", type=float, default=0.9, help="made traces: share of what all can do (default: 0.9)")
    parser.add_argument(
        "--burst", type=int, default=6, metavar="N", help="made traces: screenshots that come at once (default: 6)"
    )
    parser.add_argument("--images", type=int, default=10_000, metavar="N", help="of a made trace (default: 10000)")
    parser.add_argument("--runs", type=int, default=5, metavar="N", help="made traces, each its own seed (default: 5)")
    parser.add_argument("--seed", type=int, default=0, help="of the first made trace (default: 0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def cmd_ve_balance(args: argparse.Namespace) -> int:
    """Raises ConfigError."""
    _check(args)
    fleet = _build_fleet(args)
    traces = _build_traces(args, fleet)
    results = compare_policies(traces, fleet)
    loads = [fleet.load_of(trace) for trace in traces]
    print(_render_json(args, fleet, loads, results) if args.json else _render_table(args, fleet, loads, results))
    return 0


def _check(args: argparse.Namespace) -> None:
    for option in ("encoders", "batch_patches", "batch_images", "burst", "images", "runs"):
        if getattr(args, option) < 1:
            name = option.replace("_", "-")
            raise ConfigError(f"--{name} {getattr(args, option)}: expected at least 1; nothing was simulated")
    if args.load <= 0 or args.batch_ms < 0 or min(args.ms_per_patch) <= 0:
        raise ConfigError(
            f"--load {args.load:g}, --batch-ms {args.batch_ms:g}, --ms-per-patch {min(args.ms_per_patch):g}: expected "
            "above 0, and --batch-ms at least 0; nothing was simulated"
        )
    if args.batch_patches < max(SCREENSHOT_PATCHES) and args.trace is None:
        raise ConfigError(
            f"--batch-patches {args.batch_patches}: a made trace has images of {max(SCREENSHOT_PATCHES)} patches and an "
            "image is never split; nothing was simulated"
        )
    if len(args.ms_per_patch) not in (1, args.encoders):
        raise ConfigError(
            f"--ms-per-patch has {len(args.ms_per_patch)} values for {args.encoders} encoders: expected one, or one "
            "for each; nothing was simulated"
        )


def _build_fleet(args: argparse.Namespace) -> Fleet:
    values = args.ms_per_patch if len(args.ms_per_patch) > 1 else args.ms_per_patch * args.encoders
    # Decoding is not simulated, so there is no company to wait for.
    limits = BatchLimits(max_patches=args.batch_patches, max_images=args.batch_images, max_delay=0.0)
    return Fleet(ms_per_patch=tuple(values), batch_ms=args.batch_ms, limits=limits)


def _build_traces(args: argparse.Namespace, fleet: Fleet) -> list[tuple[Arrival, ...]]:
    if args.trace is not None:
        try:
            lines = args.trace.read_bytes().splitlines()
        except OSError as error:
            raise ConfigError(f"--trace {args.trace} cannot be read: {error.strerror}; nothing was replayed") from error
        return [read_trace(lines, name=str(args.trace), max_patches=args.batch_patches)]
    traffic = Traffic(images=args.images, burst=args.burst, patches_per_second=args.load * fleet.patches_per_second)
    return [make_trace(traffic, seed=args.seed + run) for run in range(args.runs)]


def _render_table(
    args: argparse.Namespace, fleet: Fleet, loads: Sequence[float], results: Sequence[PolicyResult]
) -> str:
    if args.trace is not None:
        source = f"{args.trace}"
    else:
        last = args.seed + args.runs - 1
        source = f"{args.runs} made traces of {args.images} images, bursts of {args.burst}, seeds {args.seed} to {last}"
    speeds = sorted(set(fleet.ms_per_patch))
    speed = " to ".join(f"{ms:g}" for ms in (speeds if len(speeds) < 3 else (speeds[0], speeds[-1])))
    lines = [
        f"simulated: {args.encoders} encoders, {speed} ms per patch + {fleet.batch_ms:g} ms per batch of at most "
        f"{fleet.limits.max_patches} patches or {fleet.limits.max_images} images",
        f"trace:     {source}; load {_spread(loads, '.2f')}",
        "",
        f"{'chosen by':<12}{'p50 ms':>28}{'p99 ms':>28}{'mean ms':>28}{'p99 / round robin':>22}",
    ]
    for result in results:
        cells = "".join(f"{_spread(values, '.1f'):>28}" for values in (result.p50, result.p99, result.mean))
        ratios = [ours / theirs for ours, theirs in zip(result.p99, results[0].p99, strict=True)]
        cells += f"{_spread(ratios, '.2f'):>22}"
        lines.append(f"{result.policy:<12}{cells}")
    return "\n".join(lines)


def _spread(values: Sequence[float], form: str) -> str:
    """Mean, with least and most of several."""
    mean = format(fmean(values), form)
    return mean if len(values) == 1 else f"{mean} ({min(values):{form}}..{max(values):{form}})"


def _render_json(
    args: argparse.Namespace, fleet: Fleet, loads: Sequence[float], results: Sequence[PolicyResult]
) -> str:
    made = {"images": args.images, "burst": args.burst, "seed": args.seed, "runs": args.runs}
    return json.dumps(
        {
            "simulated": True,
            "fleet": asdict(fleet),
            "trace": str(args.trace) if args.trace is not None else made,
            "loads": loads,
            "policies": [asdict(result) for result in results],
        }
    )
