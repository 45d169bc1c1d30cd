"""How large an image becomes: canvas, patches, grid of cells, tokens. Pure arithmetic on two sides and a VisionSpec; no torch.

Everyone who counts image tokens comes here: decode workers, the VE's queue, the PE's client, `check`. The trap: the release plans
once, deepseek-recipe repeats the plan until the size stands still, and for one size in a few thousand they differ. We count at
that fixed point (decisions C53), so a plan's canvas is its image's final size and planning it again changes nothing.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from prefill_plan.errors import ImageRejected
from prefill_plan.model_spec import VisionSpec

ROLE_START, ROLE_IMAGE, ROLE_NEWLINE, ROLE_END = range(4)
"""Roles of span rows, as the golden data's token_types number them; text is -1."""

_MAX_ROUNDS = 16
"""deepseek-recipe needed at most 8 on 60,000 random sizes (vision.md 10.1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePlan:
    """Sizes of one image on its way to rows.

    width, height: pixels of the canvas, which is the final size: multiples of the patch side. patches_w, patches_h: patches of
    the canvas. grid_w, grid_h: cells, i.e. feature rows; the last ones may hang over the edge. tokens: rows of the span,
    delimiters included. is_stretched: the source is too wide to keep its aspect (only with max_wh_ratio).
    """

    width: int
    height: int
    patches_w: int
    patches_h: int
    grid_w: int
    grid_h: int
    tokens: int
    is_stretched: bool = False

    @property
    def canvas_width(self) -> int:
        return self.width

    @property
    def canvas_height(self) -> int:
        return self.height

    @property
    def num_patches(self) -> int:
        return self.patches_w * self.patches_h

    @property
    def num_cells(self) -> int:
        return self.grid_w * self.grid_h


@dataclass(frozen=True, slots=True, kw_only=True)
class ContentBox:
    """Where the resized image lies on its canvas, in pixels."""

    width: int
    height: int
    left: int
    top: int


def plan_image(width: int, height: int, spec: VisionSpec) -> ImagePlan:
    """The plan of an image of this size, at its fixed point.

    Raises:
        ImageRejected: a side below 1; a shape so thin that a side would round to no pixel; a size that never stands still.
    """
    plan = plan_once(width, height, spec)
    final = plan
    for _ in range(_MAX_ROUNDS):
        again = plan_once(final.width, final.height, spec)
        if (again.width, again.height) == (final.width, final.height):
            break
        final = again
    else:
        raise ImageRejected(
            f"image of {width}x{height} pixels: its size still changes after {_MAX_ROUNDS} rounds of the resize plan, last "
            f"{final.width}x{final.height}; not encoded"
        )
    final = replace(final, is_stretched=plan.is_stretched)
    fit_content(width, height, final)
    return final


def plan_once(width: int, height: int, spec: VisionSpec) -> ImagePlan:
    """One round of the plan, as the release computes it (vision.md 2). For the fixed point and for golden data.

    Raises:
        ImageRejected: a side below 1.
    """
    if width < 1 or height < 1:
        raise ImageRejected(f"image of {width}x{height} pixels, expected at least 1x1; not encoded")
    wide, high = float(width), float(height)
    ratio = spec.max_wh_ratio
    if ratio is not None and wide > high * ratio:
        wide = high * ratio
    if wide * high < spec.min_pixels:
        factor = math.sqrt(spec.min_pixels / (wide * high))
        wide, high = float(int(wide * factor)), float(int(high * factor))
    patch = spec.patch_size
    is_stretched = ratio is not None and width >= height * ratio
    plan = _build_plan(
        math.ceil(wide / patch) * patch, math.ceil(high / patch) * patch, spec, is_stretched=is_stretched
    )
    if plan.tokens <= spec.max_image_tokens:
        return plan
    return _build_plan(*_shrink(wide, high, spec), spec, is_stretched=is_stretched)


def fit_content(width: int, height: int, plan: ImagePlan) -> ContentBox:
    """Box of an image of this size on the plan's canvas: aspect kept, one side exact; other side and offset half to even.

    Raises:
        ImageRejected: a side would round to no pixel.
    """
    if plan.is_stretched:
        return ContentBox(width=plan.width, height=plan.height, left=0, top=0)
    content_width, content_height = plan.width, plan.height
    # Float by float as Pillow's ImageOps.contain: another order of operations can round a half the other way.
    if width / height > plan.width / plan.height:
        content_height = round(height / width * plan.width)
    elif width / height < plan.width / plan.height:
        content_width = round(width / height * plan.height)
    if content_width < 1 or content_height < 1:
        raise ImageRejected(
            f"image of {width}x{height} pixels is too thin: on its canvas of {plan.width}x{plan.height} it would be "
            f"{content_width}x{content_height}; not encoded"
        )
    return ContentBox(
        width=content_width,
        height=content_height,
        left=round((plan.width - content_width) * 0.5),
        top=round((plan.height - content_height) * 0.5),
    )


def span_roles(plan: ImagePlan) -> npt.NDArray[np.uint8]:
    """Role of each row of the span, [tokens] uint8: start, then each row of cells closed by a newline, then end (vision.md 6)."""
    row = [ROLE_IMAGE] * plan.grid_w + [ROLE_NEWLINE]
    return np.array([ROLE_START, *row * plan.grid_h, ROLE_END], dtype=np.uint8)


def _build_plan(width: int, height: int, spec: VisionSpec, *, is_stretched: bool) -> ImagePlan:
    patches_w, patches_h = width // spec.patch_size, height // spec.patch_size
    grid_w, grid_h = -(-patches_w // spec.downsample_ratio), -(-patches_h // spec.downsample_ratio)
    return ImagePlan(
        width=width,
        height=height,
        patches_w=patches_w,
        patches_h=patches_h,
        grid_w=grid_w,
        grid_h=grid_h,
        tokens=grid_h * (grid_w + 1) + 2,
        is_stretched=is_stretched,
    )


def _shrink(width: float, height: float, spec: VisionSpec) -> tuple[int, int]:
    """Canvas of an image that would cost too many tokens: a row or a column of cells, or the largest that keeps the aspect."""
    patch, budget = spec.patch_size, spec.max_image_tokens
    cell = patch * spec.downsample_ratio
    # Columns of cells that make columns * aspect rows, each with its newline, fill the budget.
    aspect = height / width
    columns = math.sqrt((budget - 2) / aspect + 0.25) - 0.5
    rows = columns * aspect
    if columns < 1.0:
        return cell, (budget - 2) // 2 * cell
    if rows < 1.0:
        return (budget - 3) * cell, cell
    factor = min(math.floor(columns) * cell / width, math.floor(rows) * cell / height)
    return math.floor(width * factor / patch) * patch, math.floor(height * factor / patch) * patch
