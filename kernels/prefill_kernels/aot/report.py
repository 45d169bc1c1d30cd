"""Results of the AOT gate as a table for people and as JSON for machines."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import msgspec

from prefill_kernels.aot.gate import Result, occupancy, violations
from prefill_kernels.aot.limits import LIMITS, best_time, bound_text

_HEADER = (
    "case",
    "chip",
    "warps x stages",
    "regs",
    "spills",
    "shared B",
    "tmem",
    "per SM",
    "waves",
    "matrix instructions",
    "MB",
    "GFLOP",
    "at best",
    "cpu s",
)


def render_table(results: Sequence[Result], problems: Sequence[str], *, triton_version: str) -> str:
    """One line per result, then every violation, then the verdict."""
    rows = [_HEADER, *(_row(result) for result in results)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    found = [
        f"{result.case.name} {result.chip.name.lower()}: {text}" for result in results for text in violations(result)
    ]
    lines += [f"VIOLATION  {text}" for text in (*found, *problems)]
    verdict = f"{len(found) + len(problems)} VIOLATIONS" if found or problems else "no violations"
    lines.append(f"triton {triton_version}: {len(results)} compilations, {verdict}")
    return "\n".join(lines)


def render_json(results: Sequence[Result], problems: Sequence[str], *, triton_version: str) -> str:
    """{"triton", "passed", "problems", "results": [{case, chip, launch, figures, estimates, violations}, ..]}."""
    passed = not problems and not any(violations(result) for result in results)
    report = {
        "triton": triton_version,
        "passed": passed,
        "problems": list(problems),
        "results": [_as_dict(result) for result in results],
    }
    return msgspec.json.format(msgspec.json.encode(report), indent=1).decode()


def waves(result: Result) -> float:
    """Programs of the launch per program that the chip holds at a time; infinite if it holds none."""
    resident = occupancy(result.chip, result.figures) if result.figures else 0
    return result.case.num_programs / (resident * LIMITS[result.chip].num_sms) if resident else math.inf


def _row(result: Result) -> tuple[str, ...]:
    case, figures = result.case, result.figures
    name = case.name if case.default else f"({case.name})"
    launch = f"{case.num_warps} x {case.num_stages}"
    work = (f"{case.bytes_moved / 1e6:.1f}", f"{case.flops / 1e9:.1f}", bound_text(case, result.chip))
    if figures is None:
        return name, result.chip.name.lower(), launch, "failed", *["-"] * 6, *work, "-"
    matrix = ", ".join(f"{name} x{count}" for name, count in figures.mma.items()) or "-"
    return (
        name,
        result.chip.name.lower(),
        launch,
        str(figures.registers),
        str(figures.spills),
        str(figures.shared_bytes),
        str(figures.tensor_memory_columns),
        str(occupancy(result.chip, figures)),
        f"{waves(result):.1f}",
        matrix,
        *work,
        f"{figures.compile_cpu_s:.1f}",
    )


def _as_dict(result: Result) -> dict[str, Any]:
    case = result.case
    seconds, bound = best_time(case, result.chip)
    return {
        "op": case.op,
        "case": case.name,
        "shape": case.shape,
        "chip": result.chip.name.lower(),
        "default": case.default,
        "num_warps": case.num_warps,
        "num_stages": case.num_stages,
        "num_programs": case.num_programs,
        "bytes": case.bytes_moved,
        "flops": case.flops,
        "expected_mma": case.mma.value,
        "bound": bound,
        "least_seconds": seconds,
        "figures": None if result.figures is None else asdict(result.figures),
        "programs_per_sm": occupancy(result.chip, result.figures) if result.figures else 0,
        "failure": result.failure,
        "violations": violations(result),
    }
