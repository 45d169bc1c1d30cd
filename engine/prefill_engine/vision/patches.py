"""Plans of the images of a batch -> the index arrays of one pass through the tower. Host integers only.

Called by tower.py. Every image of the batch lies behind the one before it: pixels, patches, cells and span rows alike; that
offset is all an image knows of its batch. The trap: a cell that hangs over the right or lower edge has patches of index -1,
which are zero vectors after the last norm, not grey patches (vision.md 5).

Legend: N patches, G cells, M patches per cell, T span rows, B images.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from prefill_engine.vision.plan import ROLE_END, ROLE_IMAGE, ROLE_NEWLINE, ROLE_START, ImagePlan, span_roles
from prefill_kernels.vision_ops import SPAN_END, SPAN_NEWLINE, SPAN_START
from prefill_plan.model_spec import VisionSpec

Int32 = npt.NDArray[np.int32]

_SOURCES = {ROLE_START: SPAN_START, ROLE_NEWLINE: SPAN_NEWLINE, ROLE_END: SPAN_END}


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedImages:
    """Arguments of the vision ops, by their names there.

    origins [N] int64, strides [N], positions [N, 2], cu_rows [B + 1], cells [G, M], sources [T]: int32. cu_tokens: span rows of
    image b are cu_tokens[b]..cu_tokens[b + 1]. max_rows: most patches of an image.
    """

    origins: npt.NDArray[np.int64]
    strides: Int32
    positions: Int32
    cu_rows: Int32
    cells: Int32
    sources: Int32
    cu_tokens: tuple[int, ...]
    max_rows: int


def pack_images(plans: Sequence[ImagePlan], spec: VisionSpec) -> PackedImages:
    """Index arrays of a batch whose canvases lie back to back as [height, width, 3] bytes; at least one image."""
    first_pixels = _starts(3 * plan.width * plan.height for plan in plans)
    cu_rows = _starts(plan.num_patches for plan in plans)
    cu_cells = _starts(plan.num_cells for plan in plans)
    positions = [_positions(plan) for plan in plans]
    strides = [np.full(plan.num_patches, 3 * plan.width, dtype=np.int32) for plan in plans]
    origins = [
        start + spec.patch_size * (rows[:, 0].astype(np.int64) * 3 * plan.width + 3 * rows[:, 1])
        for start, rows, plan in zip(first_pixels, positions, plans, strict=False)
    ]
    return PackedImages(
        origins=np.concatenate(origins),
        strides=np.concatenate(strides),
        positions=np.concatenate(positions),
        cu_rows=np.array(cu_rows, dtype=np.int32),
        cells=np.concatenate([_cells(plan, spec, first_row=row) for plan, row in zip(plans, cu_rows, strict=False)]),
        sources=np.concatenate([_sources(plan, first_cell=cell) for plan, cell in zip(plans, cu_cells, strict=False)]),
        cu_tokens=tuple(_starts(plan.tokens for plan in plans)),
        max_rows=max(plan.num_patches for plan in plans),
    )


def _starts(sizes: Iterable[int]) -> list[int]:
    return list(accumulate(sizes, initial=0))


def _positions(plan: ImagePlan) -> Int32:
    """[patches, 2] row and column in reading order."""
    grid = np.indices((plan.patches_h, plan.patches_w), dtype=np.int32)
    return grid.reshape(2, -1).T


def _cells(plan: ImagePlan, spec: VisionSpec, *, first_row: int) -> Int32:
    """[cells, side * side] rows of the batch, cell by cell in reading order, row-major inside a cell."""
    side = spec.downsample_ratio
    grid = np.full((plan.grid_h * side, plan.grid_w * side), -1, dtype=np.int32)
    patches = np.arange(plan.num_patches, dtype=np.int32).reshape(plan.patches_h, plan.patches_w)
    grid[: plan.patches_h, : plan.patches_w] = first_row + patches
    return grid.reshape(plan.grid_h, side, plan.grid_w, side).transpose(0, 2, 1, 3).reshape(-1, side * side)


def _sources(plan: ImagePlan, *, first_cell: int) -> Int32:
    """[tokens] row of the features, or which of the three delimiters."""
    roles = span_roles(plan)
    sources = np.empty(plan.tokens, dtype=np.int32)
    sources[roles == ROLE_IMAGE] = first_cell + np.arange(plan.num_cells)
    for role, source in _SOURCES.items():
        sources[roles == role] = source
    return sources
