"""The parts of a GPU run (perf.md 7.2). Each adds to RunLog.results under its own name."""

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from gpu_run.op_case import OpCase, Scale
from gpu_run.op_cases import op_cases
from gpu_run.op_inputs import Maker
from gpu_run.run_clock import RunLog
from gpu_run.stopwatch import Stopwatch
from torch import Tensor

from prefill_kernels.ops import Ops
from prefill_testing.shapes import RELEASED, OpShapes

SEED = 20261130
RELATIVE_L2 = 1e-2
"""Of an op's output against `ref` in bf16: other summation order, one or two roundings (one alone: 4e-3 in numeric.py)."""
_EQUAL_SHARE = 0.999
"""Of integer outputs (selected entries, experts): a score that rounds the other way moves a few."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What all parts share. ops: under test. is_dry: on "meta", nothing computed."""

    device: torch.device
    ops: Ops
    ref: Ops
    watch: Stopwatch
    log: RunLog
    is_dry: bool


def calibrate(bench: Bench) -> None:
    """Peaks that everything later is a share of: bf16 GEMM through torch, and a device copy."""
    size = 8192
    maker = Maker.seeded(bench.device, SEED) if not bench.is_dry else None
    a, b = (_normal(maker, bench.device, size, size) for _ in range(2))
    gemm = bench.watch.time(lambda: a @ b, runs=20)
    source = torch.empty(1 << 30, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    copy = bench.watch.time(lambda: target.copy_(source), runs=20)
    bench.log.results["calibration"] = {
        "bf16_gemm_8192_ms": gemm.median,
        "bf16_tflops": _rate(2.0 * size**3, gemm.median, 1e9),
        "copy_1GiB_ms": copy.median,
        "copy_gb_per_s": _rate(2.0 * (1 << 30), copy.median, 1e6),
    }


def check_ops(bench: Bench, *, shapes: OpShapes = RELEASED, rows: int = 300, entries: int = 4096) -> None:
    """Every op case at a few rows against `ref` on the same device."""
    verdicts: dict[str, str] = {}
    for case in op_cases(shapes, Scale(rows=rows, entries=entries, experts=8)):
        if not bench.log.has_time(f"check {case.name}", 15):
            break
        verdicts[case.name] = verdict_of(bench, case)
        if verdicts[case.name] != "ok":
            bench.log.say(f"{case.name}: {verdicts[case.name]}")
    wrong = {name: verdict for name, verdict in verdicts.items() if verdict not in ("ok", "dry run")}
    bench.log.say(f"checked {len(verdicts)} ops against ref: {len(wrong)} differ")
    bench.log.results["correctness"] = verdicts


def time_ops(bench: Bench, num_rows: int, *, shapes: OpShapes = RELEASED) -> None:
    """Kernel times at the model's shapes, with the share of the calibrated peak that bounds each."""
    for case in op_cases(shapes, Scale(rows=num_rows, entries=65536, experts=52)):
        if bench.log.has_time(f"time {case.name} at {num_rows} rows", 12):
            time_case(bench, case, num_rows)


def time_case(bench: Bench, case: OpCase, num_rows: int) -> None:
    """One row of the results' kernel table."""
    row = _timed(bench, case, num_rows, bench.log.results.get("calibration", {}))
    bench.log.results.setdefault("kernels", []).append(row)
    bench.log.say(
        f"{case.name}, {num_rows} rows: {show(row['ms'])} ms, {show(row['share'])} of {row['bound'] or 'peak'}"
    )


def _timed(bench: Bench, case: OpCase, num_rows: int, peaks: dict[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {"op": case.name, "rows": num_rows, "flops": case.flops, "bytes": case.bytes}
    row |= {"ms": None, "low": None, "high": None, "bound": "", "share": None}
    try:
        call = case.build(make_inputs(bench))
        timing = bench.watch.time(lambda: call(bench.ops), runs=5)
    except Exception as error:  # one op that fails must not take the other figures with it
        row["error"] = f"{type(error).__name__}: {error}"
        bench.log.say(f"{case.name} failed: {row['error'][:300]}")
        return row
    finally:
        _free(bench)
    row |= {"ms": timing.median, "low": timing.low, "high": timing.high}
    return row | roofline(case.flops, case.bytes, timing.median, peaks)


def roofline(flops: float, num_bytes: float, millis: float | None, peaks: dict[str, Any]) -> dict[str, Any]:
    """Which calibrated peak bounds the op, and the share of it that was reached. bf16 peak for all products: exact path."""
    tflops, bandwidth = peaks.get("bf16_tflops"), peaks.get("copy_gb_per_s")
    if not (millis and tflops and bandwidth):
        return {"bound": "", "share": None}
    compute, memory = flops / (tflops * 1e9), num_bytes / (bandwidth * 1e6)
    return {"bound": "bf16 MMA" if compute >= memory else "memory", "share": max(compute, memory) / millis}


def show(value: float | None) -> str:
    """Four digits; "-" for a figure that was not measured."""
    return "-" if value is None else f"{value:.4g}"


def verdict_of(bench: Bench, case: OpCase) -> str:
    """ "ok", "dry run", or how the op differs from `ref` or failed."""
    if bench.is_dry:
        case.build(make_inputs(bench))(bench.ops)
        return "dry run"
    try:
        call = case.build(make_inputs(bench))
        return compare(call(bench.ops), call(bench.ref), exact=case.exact)
    except Exception as error:  # told, and the next op is tried
        return f"{type(error).__name__}: {str(error)[:300]}"
    finally:
        _free(bench)


def compare(actual: Sequence[Tensor], expected: Sequence[Tensor], *, exact: bool) -> str:
    """ "ok", or what differs."""
    for index, (got, want) in enumerate(zip(actual, expected, strict=True)):
        if got.shape != want.shape or got.dtype != want.dtype:
            return f"output {index}: {got.dtype} {tuple(got.shape)}, ref {want.dtype} {tuple(want.shape)}"
        if exact or not want.is_floating_point():
            share = float((got == want).double().mean()) if want.numel() else 1.0
            if share < (1.0 if exact else _EQUAL_SHARE):
                return f"output {index}: {100 * share:.3f} % of values equal"
            continue
        norm = torch.linalg.vector_norm(want.double()).clamp_min(1e-30)
        error = float(torch.linalg.vector_norm(got.double() - want.double()) / norm)
        if not error <= RELATIVE_L2:
            return f"output {index}: relative L2 error {error:.3e}, limit {RELATIVE_L2:.0e}"
    return "ok"


class MetaMaker(Maker):
    """Inputs without values, for the dry run."""

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)


def make_inputs(bench: Bench) -> Maker:
    """The run's source of inputs, from its first seed."""
    if bench.is_dry:
        return MetaMaker(bench.device, torch.Generator())
    return Maker.seeded(bench.device, SEED)


def _normal(maker: Maker | None, device: torch.device, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device=device) if maker is None else maker.normal(*shape)


def _rate(amount: float, millis: float | None, scale: float) -> float | None:
    return None if millis is None else amount / millis / scale


def _free(bench: Bench) -> None:
    if bench.device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def run_part(bench: Bench, name: str, seconds: float, part: Callable[[], None]) -> None:
    """One part if its time is left; a failure is recorded and the run goes on."""
    if not bench.log.has_time(name, seconds):
        return
    begin = time.monotonic()
    try:
        part()
    except Exception as error:
        bench.log.results[f"{name} failed"] = f"{type(error).__name__}: {error}"
        bench.log.say(f"{name} failed: {type(error).__name__}: {str(error)[:500]}")
    bench.log.say(f"{name}: {time.monotonic() - begin:.1f} s")
