"""Writes a run's JSON and its table."""

import json
import platform
import statistics
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from gpu_run.run_clock import RunLog
from gpu_run.sections import show


def machine(device: torch.device) -> dict[str, str]:
    """Hardware, versions and commit of the figures."""
    import triton

    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type} (dry run, no figures)"
    return {
        "device": name,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "commit": commit.stdout.strip() or "unknown",
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def write_report(log: RunLog, device: torch.device, directory: Path) -> tuple[Path, Path]:
    """gpu_<device>_<date>.json and .md; returns both paths."""
    about = machine(device)
    words = about["device"].lower().replace("nvidia", "").split()
    stem = "gpu_" + "_".join(["".join(c for c in words[0] if c.isalnum()), about["date"]])
    directory.mkdir(parents=True, exist_ok=True)
    as_json, as_text = directory / f"{stem}.json", directory / f"{stem}.md"
    as_json.write_text(json.dumps({"machine": about, **log.results, "skipped": log.skipped}, indent=1) + "\n")
    as_text.write_text(report_text(about, log.results, log.skipped))
    return as_json, as_text


def report_text(about: dict[str, str], results: dict[str, Any], skipped: list[str]) -> str:
    """The readable table; a figure that was not measured is "-"."""
    lines = ["# GPU run", "", ", ".join(f"{key} {value}" for key, value in about.items()), ""]
    for name, value in results.get("calibration", {}).items():
        lines.append(f"- {name}: {show(value)}")
    verdicts = results.get("correctness", {})
    wrong = [f"{name} ({verdict})" for name, verdict in verdicts.items() if verdict not in ("ok", "dry run")]
    num_right = sum(verdict == "ok" for verdict in verdicts.values())
    lines += [
        "",
        f"Ops equal to `ref`: {num_right} of {len(verdicts)}. {'; '.join(wrong)}".rstrip(),
        "",
    ]
    lines += [
        "| op | rows | ms (low to high) | bound | share of the calibrated peak |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in results.get("kernels", []):
        spread = f"{show(row['ms'])} ({show(row['low'])} to {show(row['high'])})"
        lines.append(f"| {row['op']} | {row['rows']} | {spread} | {row['bound'] or '-'} | {show(row['share'])} |")
    lines += ["", "| step rows | replay | ms (low to high) | tokens/s |", "| --- | --- | --- | --- |"]
    for row in results.get("steps", []):
        spread = f"{show(row['ms'])} ({show(row['low'])} to {show(row['high'])})"
        lines.append(f"| {row['rows']} | {'yes' if row['replay'] else 'no'} | {spread} | {show(row['tokens_per_s'])} |")
    fit = results.get("fit", {})
    lines += ["", f"step = {show(fit.get('a_ms'))} ms + {show(fit.get('b_us_per_token'))} us x tokens"]
    if "graph_ms" in results:
        lines += ["", f"the step of 4,096 rows with replay as one CUDA graph: {show(results['graph_ms'])} ms"]
    if "vision" in results:
        lines += _vision_lines(results["vision"])
    lines += ["", "Skipped: " + ("; ".join(skipped) if skipped else "nothing")]
    lines += [f"Failed: {name[:-7]}: {value}" for name, value in results.items() if name.endswith(" failed")]
    return "\n".join(lines) + "\n"


def _vision_lines(vision: dict[str, Any]) -> list[str]:
    lines = ["", "| image | patches | images at once | ms (least to most) | patches/s | peak MB |"]
    lines.append("| --- | --- | --- | --- | --- | --- |")
    for point in vision["points"]:
        case, peak = point["case"], point["peak_bytes"]
        spread = f"{show(statistics.median(point['ms']))} ({show(min(point['ms']))} to {show(max(point['ms']))})"
        cells = (f"{case['width']}x{case['height']}", case["patches"], case["images"], spread)
        megabytes = show(None if peak is None else peak / 1e6)
        lines.append(f"| {' | '.join(map(str, cells))} | {show(point['patches_per_s'])} | {megabytes} |")
    fit = vision["fit"]
    return [*lines, "", f"tower = {show(fit['a_ms'])} ms + {show(fit['b_ms'] * 1e3)} us x patches"]
