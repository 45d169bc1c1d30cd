"""`prefill-engine ve-sweep`: a vision encoder alone, over sizes and batches. Exit 0 done, 1 an encoder failed, 2 wrong input."""

import argparse
import asyncio
import json
import platform
import re
import secrets
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path

from prefill_engine.vision.encoder_client import EncoderClient
from prefill_engine.vision.sweep_plot import check_plot, draw_sweep
from prefill_engine.vision.sweep_points import CACHED, SweepCase, SweepFit, SweepPoint, fit_points
from prefill_plan.config import Device
from prefill_plan.encoder_config import ENCODER_ACTIVATIONS, BatchingConfig
from prefill_plan.errors import CallFailed, ConfigError
from prefill_plan.model_spec import load_model_spec

_SIZES = "544x544,640x480,1024x768,1280x720,1920x1080,42882x42"
"""From the fewest patches that an image of the release has, 1,521, to the most, 9,189."""
_ENDPOINT_SIZES = "544x544,640x480,1024x768,1280x720,1920x1080"
"""A side above 8,192 is refused unless it is the declared final size."""
_MAX_CASES = 64  # batch_cost.BatchCost keeps the last 64 batches, so a fit over more would be of the last sizes only.


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sweep:
    """subject: what was measured, and on what."""

    subject: str
    points: tuple[SweepPoint, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--model", type=Path, metavar="DIR", help="measure this checkpoint's tower in this process")
    what.add_argument("--endpoint", metavar="HOST:PORT", help="measure a running encoder, cache off and on")
    parser.add_argument("--device", choices=[each.value for each in Device], help="with --model (default: gpu)")
    parser.add_argument("--ops", choices=("triton", "ref"), help="with --model (default: triton on gpu, ref on cpu)")
    parser.add_argument("--activation", choices=ENCODER_ACTIVATIONS, help="with --model (default: bf16)")
    parser.add_argument("--sizes", metavar="WxH,..", help=f"images (default: {_SIZES}; --endpoint: without the last)")
    parser.add_argument("--batches", default="1,2,4,8", metavar="N,..", help="images at once (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="times each case is measured (default: 5)")
    parser.add_argument("--timeout-seconds", type=float, default=60.0, metavar="N", help="with --endpoint, per image")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw it; needs the extra `plots`")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def cmd_ve_sweep(args: argparse.Namespace) -> int:
    """Raises PrefillError for what is wrong with the input."""
    sizes, batches = _parse(args)
    if args.plot is not None:
        check_plot(args.plot)
    try:
        if args.model is not None:
            sweep = _sweep_tower(args, sizes, batches)
        else:
            sweep = asyncio.run(_sweep_encoder(args, sizes, batches))
    except CallFailed as error:
        print(f"prefill-engine ve-sweep: {error}; nothing is printed", file=sys.stderr)
        return 1
    fits = [fit_points(tuple(points)) for _, points in groupby(sweep.points, key=lambda point: point.way)]
    print(_render_json(sweep, fits, args.rounds) if args.json else _render_table(sweep, fits, args.rounds))
    if args.plot is not None:
        try:
            draw_sweep(args.plot, sweep.points, fits, title=sweep.subject)
        except OSError as error:
            print(f"prefill-engine ve-sweep: --plot {args.plot}: {error.strerror}; not drawn", file=sys.stderr)
            return 1
    return 0


def _parse(args: argparse.Namespace) -> tuple[list[tuple[int, int]], list[int]]:
    """Sizes and batches. Raises ConfigError."""
    if args.endpoint is not None and (args.device or args.ops or args.activation):
        raise ConfigError("--device, --ops and --activation belong to --model; nothing was measured")
    if args.rounds < 1:
        raise ConfigError(f"--rounds {args.rounds}: expected at least 1; nothing was measured")
    text = args.sizes or (_SIZES if args.endpoint is None else _ENDPOINT_SIZES)
    sizes = [re.fullmatch(r"([1-9]\d{0,5})x([1-9]\d{0,5})", word) for word in text.split(",")]
    batches = [re.fullmatch(r"[1-9]\d{0,2}", word) for word in args.batches.split(",")]
    pairs = [(int(found[1]), int(found[2])) for found in sizes if found]
    counts = sorted({int(found[0]) for found in batches if found})
    if len(pairs) < len(sizes) or not all(batches):
        wrong = f"--sizes {text} --batches {args.batches}"
        raise ConfigError(f"{wrong}: expected such as --sizes 640x480,1920x1080 --batches 1,4; nothing was measured")
    return pairs, counts


def _check_cases(cases: Sequence[SweepCase]) -> None:
    if not 1 <= len(cases) <= _MAX_CASES:
        raise ConfigError(
            f"{len(cases)} cases of a size and a batch that an encoder takes, expected 1 to {_MAX_CASES}: give other "
            "--sizes or --batches; nothing was measured"
        )


def _sweep_tower(args: argparse.Namespace, sizes: Sequence[tuple[int, int]], batches: Sequence[int]) -> _Sweep:
    # Here, since --endpoint does without torch.
    import torch

    from prefill_engine.vision.sweep import SweepLimits, measure_tower, plan_cases
    from prefill_engine.vision.tower import VisionTower
    from prefill_engine.vision.weights import load_vision_parameters
    from prefill_kernels.vision_ops import load_vision_ops

    model = load_model_spec(args.model)
    if model.vision is None:
        raise ConfigError(f"{args.model}: config.json has no vision_config; nothing was measured")
    batching = BatchingConfig()
    limits = SweepLimits(max_patches=batching.max_patches_per_batch, max_images=batching.max_images_per_batch)
    cases = plan_cases(sizes, batches, spec=model.vision, limits=limits)
    _check_cases(cases)
    is_gpu = (args.device or Device.GPU.value) == Device.GPU.value
    if is_gpu and not torch.cuda.is_available():
        raise ConfigError("--device gpu, but torch finds no CUDA device here; --device cpu measures this machine's CPU")
    name = args.ops or ("triton" if is_gpu else "ref")
    try:
        ops = load_vision_ops(name)
    except ValueError as error:
        raise ConfigError(f"--ops: {error}; nothing was measured") from error
    device = torch.device("cuda" if is_gpu else "cpu")
    activation = {"bf16": torch.bfloat16, "fp32": torch.float32}[args.activation or "bf16"]
    parameters = load_vision_parameters(args.model, model, device=device)
    tower = VisionTower(model.vision, parameters, ops=ops, activation=activation)
    points = measure_tower(tower, cases, rounds=args.rounds, on_case=_show)
    _show(None)
    chip = (
        torch.cuda.get_device_name(device) if is_gpu else f"{platform.machine()} CPU, {torch.get_num_threads()} thread"
    )
    sizes_text = f"{model.vision.num_layers} layers of {model.vision.hidden_size}"
    subject = f"tower of {args.model} ({sizes_text}), {args.activation or 'bf16'}, {name} ops, {chip}"
    return _Sweep(subject=subject, points=points)


async def _sweep_encoder(args: argparse.Namespace, sizes: Sequence[tuple[int, int]], batches: Sequence[int]) -> _Sweep:
    from prefill_engine.vision.sweep_service import EncoderSweep

    async with EncoderClient(args.endpoint) as client:
        info, load = await client.info(), await client.load()
        seconds = args.timeout_seconds
        sweep = EncoderSweep(client, seed=secrets.randbits(64), timeout_seconds=seconds, on_case=_show)
        cases = await sweep.plan_cases(sizes, batches, max_patches=load.patches_limit)
        _check_cases(cases)
        points = await sweep.measure(cases, rounds=args.rounds)
    _show(None)
    subject = f"encoder {info.engine_id} at {args.endpoint} ({info.model_id}, {info.build}), on {info.device}"
    return _Sweep(subject=subject, points=points)


def _show(case: SweepCase | None) -> None:
    if sys.stderr.isatty():
        text = f"{case.images} x {case.width}x{case.height}" if case is not None else ""
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def _render_table(sweep: _Sweep, fits: Sequence[SweepFit], rounds: int) -> str:
    has_peak = any(point.peak_bytes is not None for point in sweep.points)
    head = f"{'image':<13}{'tokens':>7}{'patches':>9}{'at once':>9}{'ms (least..most)':>32}{'patches/s':>12}{'images/s':>11}"
    lines = [f"{sweep.subject}; {rounds} rounds"]
    for fit in fits:
        ours = [point for point in sweep.points if point.way == fit.way]
        lines += ["", _title(ours), head + (f"{'peak MB':>10}" if has_peak else "")]
        lines += [_row(point) for point in ours]
        lines.append(
            f"fit: ms = {fit.a_ms:.2f} ({fit.a_range[0]:.2f}..{fit.a_range[1]:.2f}) + patches x {fit.b_ms:.6f} "
            f"({fit.b_range[0]:.6f}..{fit.b_range[1]:.6f}); farthest median {100 * fit.worst_share:.0f} % off"
        )
    return "\n".join(lines)


def _title(points: Sequence[SweepPoint]) -> str:
    if points[0].way != CACHED:
        return f"{points[0].way}:"
    images = sum(point.case.images * len(point.ms) for point in points)
    return f"cached: the same images again, {sum(point.hits for point in points)} of {images} from the encoder's cache"


def _row(point: SweepPoint) -> str:
    case = point.case
    spread = f"{point.median_ms:.2f} ({min(point.ms):.2f}..{max(point.ms):.2f})"
    peak = f"{point.peak_bytes / 1e6:>10,.0f}" if point.peak_bytes is not None else ""
    return (
        f"{f'{case.width}x{case.height}':<13}{case.tokens:>7,}{case.patches:>9,}{case.images:>9}  {spread:>30}"
        f"{point.patches_per_second:>12,.0f}{point.images_per_second:>11,.2f}{peak}"
    )


def _render_json(sweep: _Sweep, fits: Sequence[SweepFit], rounds: int) -> str:
    points = [
        {
            **asdict(point.case),
            "way": point.way,
            "ms": point.ms,
            "median_ms": point.median_ms,
            "patches_per_second": point.patches_per_second,
            "images_per_second": point.images_per_second,
            "peak_bytes": point.peak_bytes,
            "hits": point.hits,
        }
        for point in sweep.points
    ]
    fitted = [asdict(fit) for fit in fits]
    return json.dumps({"subject": sweep.subject, "rounds": rounds, "points": points, "fits": fitted})
