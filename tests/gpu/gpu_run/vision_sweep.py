"""The vision tower of the release, with random weights, over image and batch sizes: what `prefill-engine ve-sweep` measures."""

import tempfile
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from gpu_run.sections import Bench

from prefill_engine.model.vision_cutout import write_random_tower
from prefill_engine.vision.sweep import SweepLimits, measure_tower, plan_cases
from prefill_engine.vision.sweep_points import fit_points
from prefill_engine.vision.tower import VisionTower
from prefill_engine.vision.weights import load_vision_parameters
from prefill_kernels.vision_ops import VisionOps, load_vision_ops
from prefill_plan.model_spec import parse_model_spec

SIZES = ((544, 544), (1280, 720), (1920, 1080), (42882, 42))
BATCHES = (1, 2, 4, 8)
_LIMITS = SweepLimits(max_patches=16_384, max_images=8)


def sweep_vision(bench: Bench) -> None:
    """Times, device memory and the fit, from 1,521 patches to the most of an image, 9,189, and to a full batch."""
    config = (files("prefill_plan") / "released_config.json").read_bytes()
    swept = sweep_random_tower(config, device=bench.device, ops=load_vision_ops("triton"), sizes=SIZES, batches=BATCHES)
    bench.log.results["vision"] = swept
    fit = swept["fit"]
    bench.log.say(f"vision tower: {fit['a_ms']:.2f} ms + {fit['b_ms'] * 1e3:.2f} us per patch")


def sweep_random_tower(
    config: bytes,
    *,
    device: torch.device,
    ops: VisionOps,
    sizes: tuple[tuple[int, int], ...],
    batches: tuple[int, ...],
    rounds: int = 5,
) -> dict[str, Any]:
    """Points and fit of a tower of this config."""
    spec = parse_model_spec(config, source="config.json")
    assert spec.vision is not None
    with tempfile.TemporaryDirectory() as folder:
        write_random_tower(Path(folder), spec, config=config, seed=0, shard_bytes=1 << 32)
        parameters = load_vision_parameters(Path(folder), spec, device=device)
    tower = VisionTower(spec.vision, parameters, ops=ops, activation=torch.bfloat16)
    cases = plan_cases(sizes, batches, spec=spec.vision, limits=_LIMITS)
    points = measure_tower(tower, cases, rounds=rounds, on_case=lambda _case: None)
    rows = [{**asdict(point), "patches_per_s": point.patches_per_second} for point in points]
    return {"points": rows, "fit": asdict(fit_points(points))}
