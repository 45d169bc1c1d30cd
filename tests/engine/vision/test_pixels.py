"""Canvases are Pillow's own padded resize, byte for byte."""

import numpy as np
import pytest
from PIL import Image, ImageOps

from prefill_engine.vision.pixels import check_pillow, fit_canvas
from prefill_engine.vision.plan import plan_image
from prefill_plan.errors import ConfigError, ImageRejected
from prefill_plan.model_spec import VisionSpec

SPEC = VisionSpec(
    num_layers=1,
    hidden_size=8,
    num_heads=1,
    intermediate_size=8,
    patch_size=14,
    rope_theta=1e4,
    downsample_ratio=3,
    max_image_tokens=64,
    min_pixels=12544,
    max_wh_ratio=None,
)


def noise(width: int, height: int) -> Image.Image:
    values = np.random.default_rng(width * 10_000 + height).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


@pytest.mark.parametrize(
    "size",
    [(172, 90), (65, 211), (5, 3), (700, 500), (1500, 20), (20, 1500), (540, 1200), (113, 112), (1, 1)],
    ids=str,
)
def test_canvas_is_pillows_padded_resize(size: tuple[int, int]) -> None:
    image, plan = noise(*size), plan_image(*size, SPEC)
    canvas = fit_canvas(image, plan)
    padded = ImageOps.pad(image, (plan.width, plan.height), Image.Resampling.BICUBIC, color=(127, 127, 127))
    assert canvas.dtype == np.uint8
    assert np.array_equal(canvas, np.asarray(padded))


def test_an_image_of_the_final_size_is_taken_as_it_is() -> None:
    image = noise(168, 126)
    canvas = fit_canvas(image, plan_image(500, 375, SPEC))
    assert canvas.shape[:2] != (126, 168)
    canvas = fit_canvas(image, plan_image(168, 126, SPEC))
    assert np.array_equal(canvas, np.asarray(image))
    canvas[0, 0] = 0
    assert np.asarray(image)[0, 0].any()


def test_a_size_other_than_the_plans_source_is_fitted_too() -> None:
    """The front door's declared size decides the canvas, not the image's."""
    plan = plan_image(168, 126, SPEC)
    canvas = fit_canvas(noise(100, 100), plan)
    assert canvas.shape == (126, 168, 3)
    assert (canvas[:, :21] == 127).all()
    assert (canvas[:, -21:] == 127).all()
    assert not (canvas[:, 21:-21] == 127).all(axis=(0, 2)).any()


def test_an_image_too_thin_for_the_plan_is_rejected() -> None:
    with pytest.raises(ImageRejected, match="too thin"):
        fit_canvas(noise(9000, 1), plan_image(168, 126, SPEC))


def test_another_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="mode L, expected RGB"):
        fit_canvas(Image.new("L", (168, 126)), plan_image(168, 126, SPEC))


@pytest.mark.parametrize("version", ["11.3.0", "11.4", "12.3.0"])
def test_versions_with_the_releases_bytes_are_accepted(version: str) -> None:
    check_pillow(version)


@pytest.mark.parametrize("version", ["10.4.0", "11.2.1", "13.0.0", "13.0rc1", "unknown"])
def test_other_versions_are_refused(version: str) -> None:
    with pytest.raises(ConfigError, match=rf"Pillow {version} is installed, expected 11.3 or later and below 13"):
        check_pillow(version)


def test_the_installed_version_is_one_of_them() -> None:
    check_pillow()
