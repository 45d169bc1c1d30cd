"""`ve-sweep` with the tower in this process: no decoding, no queue, no transport; canvases in host memory, as a VE has them.

Called by cli/ve_sweep.py. The trap: rounds go over all cases in turn, so that a machine that slows down meanwhile shows as spread
of every case and not as a slope over sizes.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from prefill_engine.vision.plan import plan_image
from prefill_engine.vision.sweep_points import TOWER, SweepCase, SweepPoint
from prefill_engine.vision.tower import VisionTower
from prefill_plan.model_parts import VisionSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepLimits:
    """Of a batch, as a VE's."""

    max_patches: int
    max_images: int


def plan_cases(
    sizes: Sequence[tuple[int, int]], batches: Sequence[int], *, spec: VisionSpec, limits: SweepLimits
) -> tuple[SweepCase, ...]:
    """Every size in every batch that a VE would form of it, at final sizes; two sizes of one final size are one.

    Raises:
        ImageRejected: a size that no image can have.
    """
    plans = {(plan.width, plan.height): plan for plan in (plan_image(*size, spec) for size in sizes)}
    return tuple(
        SweepCase(width=plan.width, height=plan.height, patches=plan.num_patches, tokens=plan.tokens, images=images)
        for plan in plans.values()
        for images in batches
        if images <= limits.max_images and images * plan.num_patches <= limits.max_patches
    )


def measure_tower(
    tower: VisionTower,
    cases: Sequence[SweepCase],
    *,
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
    on_case: Callable[[SweepCase], None],
) -> tuple[SweepPoint, ...]:
    """Times of every case, after one pass that is not counted. From canvases on the host to rows on the device."""
    generator = torch.Generator().manual_seed(0)
    seconds: list[list[float]] = [[] for _ in cases]
    peaks: list[int | None] = [None for _ in cases]
    for number in range(rounds + 1):
        for index, case in enumerate(cases):
            on_case(case)
            canvases = [_canvas(case, generator) for _ in range(case.images)]
            started = _start(tower, clock)
            _encode(tower, canvases, case)
            spent = clock() - started
            if number:
                seconds[index].append(spent)
            peaks[index] = _peak_bytes(tower)
    return tuple(
        SweepPoint(case=case, way=TOWER, ms=tuple(1e3 * each for each in spent), peak_bytes=peak)
        for case, spent, peak in zip(cases, seconds, peaks, strict=True)
    )


def _canvas(case: SweepCase, generator: torch.Generator) -> Tensor:
    return torch.randint(0, 256, (case.height, case.width, 3), dtype=torch.uint8, generator=generator)


def _start(tower: VisionTower, clock: Callable[[], float]) -> float:
    if tower.device.type == "cuda":
        torch.cuda.synchronize(tower.device)
        torch.cuda.reset_peak_memory_stats(tower.device)
    return clock()


def _encode(tower: VisionTower, canvases: Sequence[Tensor], case: SweepCase) -> None:
    plan = plan_image(case.width, case.height, tower.spec)
    tower.encode(canvases, [plan] * len(canvases))
    if tower.device.type == "cuda":
        torch.cuda.synchronize(tower.device)


def _peak_bytes(tower: VisionTower) -> int | None:
    return torch.cuda.max_memory_allocated(tower.device) if tower.device.type == "cuda" else None
