"""Image plans against the release's tables, the golden manifest and the official front door."""

import json
import random
from dataclasses import replace
from pathlib import Path

import deepseek_recipe
import msgspec
import pytest
from PIL import Image, ImageOps

from prefill_engine.vision.plan import fit_content, plan_image, plan_once, span_roles
from prefill_plan.errors import ImageRejected
from prefill_plan.model_spec import VisionSpec, load_model_spec, released_model_spec

GOLDEN = Path(__file__).parents[2] / "golden" / "tiny_vision"
MANIFEST = json.loads((GOLDEN / "manifest.json").read_bytes())
RELEASE = released_model_spec().vision
TINY = load_model_spec(GOLDEN).vision


def official_tokens(width: int, height: int) -> int:
    image = deepseek_recipe.ImageInfo(b"", width, height)
    return deepseek_recipe.MultiModalData([image]).image_token_adjustment() + 1


def random_size(source: random.Random) -> tuple[int, int]:
    """Any size, or a thin one: there the one-pass plan is no fixed point most often."""
    if source.random() < 0.5:
        return source.randint(1, 8192), source.randint(1, 8192)
    sides = (source.randint(1, 8192), source.randint(1, 60))
    return sides if source.random() < 0.5 else sides[::-1]


@pytest.mark.parametrize(
    ("size", "final", "patches", "grid", "tokens"),
    [
        ((1, 1), (546, 546), (39, 39), (13, 13), 184),
        ((224, 224), (546, 546), (39, 39), (13, 13), 184),
        ((640, 480), (644, 490), (46, 35), (16, 12), 206),
        ((800, 600), (812, 602), (58, 43), (20, 15), 317),
        ((1024, 768), (1036, 770), (74, 55), (25, 19), 496),
        ((1280, 720), (1288, 728), (92, 52), (31, 18), 578),
        ((1366, 768), (1372, 770), (98, 55), (33, 19), 648),
        ((1920, 1080), (1708, 966), (122, 69), (41, 23), 968),
        ((3840, 2160), (1708, 966), (122, 69), (41, 23), 968),
        ((1080, 2400), (840, 1862), (60, 133), (20, 45), 947),
        ((2480, 3508), (1092, 1540), (78, 110), (26, 37), 1001),
        ((16380, 28), (16380, 28), (1170, 2), (390, 1), 393),
        ((8192, 1), (42882, 42), (3063, 3), (1021, 1), 1024),
        ((1, 8192), (42, 21462), (3, 1533), (1, 511), 1024),
        ((2095, 13), (7056, 42), (504, 3), (168, 1), 171),
    ],
    ids=str,
)
def test_release_plans_are_those_of_the_specification(size, final, patches, grid, tokens) -> None:
    plan = plan_image(*size, RELEASE)
    assert (plan.width, plan.height) == final == (plan.canvas_width, plan.canvas_height)
    assert (plan.patches_w, plan.patches_h) == patches
    assert (plan.grid_w, plan.grid_h) == grid
    assert (plan.tokens, plan.num_patches) == (tokens, patches[0] * patches[1])


@pytest.mark.parametrize("name", MANIFEST["images"])
@pytest.mark.parametrize(("section", "spec"), [("images", TINY), ("real_constants", RELEASE)], ids=["tiny", "release"])
def test_golden_plans_and_offsets_are_reproduced(name: str, section: str, spec: VisionSpec) -> None:
    entry = MANIFEST[section][name]
    plan = plan_image(entry["width"], entry["height"], spec)
    box = fit_content(entry["width"], entry["height"], plan)
    assert (plan.width, plan.height, plan.num_patches, plan.tokens) == tuple(
        entry[key] for key in ("canvas_w", "canvas_h", "n_patches", "n_tokens")
    )
    assert (box.width, box.height, box.left, box.top) == tuple(
        entry[key] for key in ("image_w", "image_h", "left", "top")
    )


def test_token_counts_agree_with_the_official_front_door() -> None:
    source = random.Random(20261130)
    sizes = [random_size(source) for _ in range(10_000)]
    ours = [plan_image(*size, RELEASE) for size in sizes]
    assert [
        (size, plan.tokens) for size, plan in zip(sizes, ours, strict=True) if plan.tokens != official_tokens(*size)
    ] == []
    finals = [(plan.width, plan.height) for plan in ours]
    assert [size for size, plan in zip(finals, ours, strict=True) if plan.tokens != official_tokens(*size)] == []
    # The sizes must tell the fixed point from one round, else this proves little.
    assert sum(plan_once(*size, RELEASE).tokens != plan.tokens for size, plan in zip(sizes, ours, strict=True)) > 20


def test_planning_a_final_size_changes_nothing_and_bounds_hold() -> None:
    source = random.Random(7)
    for _ in range(3000):
        plan = plan_image(*random_size(source), RELEASE)
        assert plan_image(plan.width, plan.height, RELEASE) == plan
        assert 167 <= plan.tokens <= 1024
        assert 1410 <= plan.num_patches <= 9189
        assert len(span_roles(plan)) == plan.tokens


def test_content_box_is_pillows() -> None:
    source = random.Random(3)
    for _ in range(400):
        size = (source.randint(1, 300), source.randint(1, 300))
        plan = plan_image(*size, TINY)
        box = fit_content(*size, plan)
        contained = ImageOps.contain(Image.new("L", size), (plan.width, plan.height), Image.Resampling.NEAREST)
        assert (box.width, box.height) == contained.size, size


@pytest.mark.parametrize("size", [(0, 5), (5, 0), (-1, 5)], ids=str)
def test_an_empty_image_is_rejected(size: tuple[int, int]) -> None:
    with pytest.raises(ImageRejected, match=r"expected at least 1x1; not encoded") as caught:
        plan_image(*size, RELEASE)
    assert caught.value.reason == "IMAGE_REJECTED"


@pytest.mark.parametrize("size", [(8192, 1), (1, 8192)], ids=str)
def test_an_image_whose_side_would_vanish_is_rejected(size: tuple[int, int]) -> None:
    with pytest.raises(ImageRejected, match="too thin: on its canvas of"):
        plan_image(*size, TINY)


def test_a_ratio_limit_narrows_wide_images_only_and_stretches_them() -> None:
    spec = msgspec.structs.replace(RELEASE, max_wh_ratio=3.0)
    wide, tall = plan_image(4000, 500, spec), plan_image(500, 4000, spec)
    assert (wide.width, wide.height) == (1512, 504)
    assert wide.is_stretched
    assert fit_content(4000, 500, wide).width == wide.width
    assert fit_content(4000, 500, wide).height == wide.height
    assert tall == plan_image(500, 4000, RELEASE)


def test_roles_close_every_row_of_cells_with_a_newline() -> None:
    plan = replace(plan_image(168, 126, TINY), grid_w=2, grid_h=2, tokens=8)
    assert span_roles(plan).tolist() == [0, 1, 1, 2, 1, 1, 2, 3]
