"""Checks and times the Triton kernels and the whole step on one GPU, within a time budget."""

import argparse
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
from gpu_run.report import write_report
from gpu_run.run_clock import RunLog
from gpu_run.sections import Bench, calibrate, check_ops, run_part, time_ops
from gpu_run.step_checks import check_step
from gpu_run.steps import build_model, fit_steps, time_steps
from gpu_run.stopwatch import Stopwatch
from gpu_run.tiny_model_check import check_tiny_model
from gpu_run.variants import time_variants
from gpu_run.vision_check import check_vision_ops
from gpu_run.vision_sweep import sweep_vision

from prefill_kernels.gpu.chip import Chip
from prefill_kernels.gpu.triton_ops import triton_ops
from prefill_kernels.gpu.triton_vision_ops import triton_vision_ops
from prefill_kernels.op_sets import load_ops
from prefill_kernels.vision_ops import load_vision_ops

RESULTS = Path(__file__).parents[2] / "bench" / "results"


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests/gpu/run.sh", description=__doc__)
    parser.add_argument(
        "--budget", type=float, default=560.0, metavar="SECONDS", help="stop starting parts after this time"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help="where the JSON and the table go")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help='no GPU: run everything on the "meta" device, launches counted, no figures',
    )
    args = parser.parse_args()
    if not args.dry_run and not torch.cuda.is_available():
        print("tests/gpu/run.sh: torch sees no CUDA device; nothing was measured (try --dry-run)", file=sys.stderr)
        return 1
    log = RunLog(budget=args.budget)
    device = torch.device("meta" if args.dry_run else "cuda")
    with _launches(is_dry=args.dry_run) as launches:
        run(log, device, is_dry=args.dry_run)
    if launches is not None:
        log.results["dry_run_launches"] = len(launches)
        log.say(f"{len(launches)} launches recorded, none run")
    paths = write_report(log, device, args.out)
    print(f"wrote {' and '.join(map(str, paths))}")
    wrong = [name for name, verdict in log.results.get("correctness", {}).items() if verdict not in ("ok", "dry run")]
    failed = [name for name in log.results if name.endswith(" failed")]
    return 1 if wrong or failed else 0


def run(log: RunLog, device: torch.device, *, is_dry: bool) -> None:
    """All parts, those that tell most first (perf.md 7.2)."""
    ops = triton_ops(Chip.SM_90) if is_dry else load_ops("triton")
    bench = Bench(device=device, ops=ops, ref=load_ops("ref"), watch=Stopwatch(device), log=log, is_dry=is_dry)
    run_part(bench, "calibration", 20, lambda: calibrate(bench))
    run_part(bench, "correctness", 60, lambda: check_ops(bench))
    if not is_dry:
        run_part(bench, "tiny model", 40, lambda: check_tiny_model(bench))
    run_part(bench, "steps", 90, lambda: _steps(bench))
    run_part(bench, "fit", 0, lambda: fit_steps(bench))
    if not is_dry:
        run_part(bench, "kernels at 32k", 60, lambda: time_ops(bench, 32768))
        run_part(bench, "kv", 20, lambda: _check_kv(bench))
    run_part(bench, "vision ops", 40, lambda: _check_vision(bench))
    if not is_dry:
        run_part(bench, "vision", 60, lambda: sweep_vision(bench))
    run_part(bench, "kernels at 8k", 60, lambda: time_ops(bench, 8192))
    run_part(bench, "second configurations", 40, lambda: time_variants(bench, 32768))


def _check_kv(bench: Bench) -> None:
    try:
        from gpu_run.kv_check import check_kv
    except ModuleNotFoundError as error:  # grpc, protobuf or crc32c
        bench.log.skipped.append(f"kv: {error}; see make gpu-site")
        bench.log.say(f"skipped {bench.log.skipped[-1]}")
        return
    check_kv(bench)


def _check_vision(bench: Bench) -> None:
    ops = triton_vision_ops(Chip.SM_90) if bench.is_dry else load_vision_ops("triton")
    check_vision_ops(bench, ref=load_vision_ops("ref"), ops=ops)


def _steps(bench: Bench) -> None:
    model = build_model(bench)
    time_steps(bench, model, (4096,) if bench.is_dry else (8192, 32768, 4096, 16384))
    if bench.log.has_time("step checks", 30):
        check_step(bench, model)


def _launches(*, is_dry: bool):  # type: ignore[no-untyped-def]
    if not is_dry:
        return nullcontext(None)
    from prefill_testing.launch_recorder import recorded_launches

    return recorded_launches()


if __name__ == "__main__":
    sys.exit(main())
