"""Limits and declared sizes, before anything is decoded (serving.md 4.3, decisions C53)."""

import pytest

from prefill_engine.vision.image_intake import DEFAULT_POLICY, PixelPolicy, examine
from prefill_plan.errors import ImageRejected
from prefill_testing.encoded_images import RELEASE_SPEC, animation, build_png, encode_image, exif_block, noise


def header_only(width: int, height: int) -> bytes:
    """A png that promises a size; its pixels are nothing."""
    return build_png(width, height, bits=8, color=2, rows=b"")


@pytest.mark.parametrize(
    ("size", "policy", "reason"),
    [
        ((30000, 30000), DEFAULT_POLICY, "30000x30000 pixels has 900000000, limit 67108864"),
        ((8193, 10), DEFAULT_POLICY, "8193x10 pixels, limit 8192 a side"),
        ((10, 8193), DEFAULT_POLICY, "limit 8192 a side"),
        ((2**31, 2**31), DEFAULT_POLICY, "limit 67108864"),
        ((101, 50), PixelPolicy(max_side=100), "limit 100 a side"),
        ((100, 51), PixelPolicy(max_pixels=5000), "has 5100, limit 5000"),
        ((9000, 50), PixelPolicy(max_side=100_000), "limit 8192 a side"),
        ((9000, 9000), PixelPolicy(max_pixels=1 << 31, max_side=10_000), "limit 67108864"),
    ],
    ids=["bomb", "wide", "tall", "huge", "own side", "own pixels", "no higher side", "no more pixels"],
)
def test_limits_are_refused_from_the_header(size: tuple[int, int], policy: PixelPolicy, reason: str) -> None:
    with pytest.raises(ImageRejected, match=reason) as caught:
        examine(header_only(*size), policy=policy, final=None, spec=RELEASE_SPEC)
    assert caught.value.reason == "IMAGE_REJECTED"


def test_largest_allowed_size_passes() -> None:
    intake = examine(header_only(8192, 8192), policy=DEFAULT_POLICY, final=None, spec=RELEASE_SPEC)
    assert intake.num_pixels == 8192 * 8192


def test_byte_limits() -> None:
    data = encode_image(noise(64, 64), "PNG")
    with pytest.raises(ImageRejected, match=f"image of {len(data)} bytes, limit 1000"):
        examine(data, policy=PixelPolicy(max_bytes=1000), final=None, spec=RELEASE_SPEC)
    with pytest.raises(ImageRejected, match="image of 32000001 bytes, limit 32000000"):
        examine(data[:100], policy=DEFAULT_POLICY, final=None, spec=RELEASE_SPEC, total_bytes=32_000_001)
    assert examine(data[:100], policy=DEFAULT_POLICY, final=None, spec=RELEASE_SPEC, total_bytes=len(data)).width == 64


def test_front_doors_long_images_pass_at_their_final_size_only() -> None:
    """deepseek-recipe makes 16380x28 of 8192x1 (vision.md 9)."""
    data = header_only(16380, 28)
    intake = examine(data, policy=DEFAULT_POLICY, final=(16380, 28), spec=RELEASE_SPEC)
    assert (intake.plan.width, intake.plan.height, intake.plan.tokens) == (16380, 28, 393)
    with pytest.raises(ImageRejected, match="limit 8192 a side"):
        examine(data, policy=DEFAULT_POLICY, final=None, spec=RELEASE_SPEC)
    with pytest.raises(ImageRejected, match="limit 5000 a side"):
        examine(data, policy=PixelPolicy(max_side=5000), final=(16380, 28), spec=RELEASE_SPEC)


@pytest.mark.parametrize("final", [(1036, 770), (1024, 768), (0, 0)], ids=["other image", "not final", "zero"])
def test_another_declared_size_is_a_mismatch(final: tuple[int, int]) -> None:
    with pytest.raises(ImageRejected, match="final size 644x490") as caught:
        examine(header_only(640, 480), policy=DEFAULT_POLICY, final=final, spec=RELEASE_SPEC)
    assert caught.value.reason == "IMAGE_TOKEN_MISMATCH"


def test_declared_size_of_an_image_that_is_still_to_be_resized() -> None:
    intake = examine(header_only(640, 480), policy=DEFAULT_POLICY, final=(644, 490), spec=RELEASE_SPEC)
    assert (intake.width, intake.height, intake.plan.tokens) == (640, 480, 206)


def test_orientation_turns_the_plan_only_by_policy() -> None:
    data = encode_image(noise(640, 480), "JPEG", exif=b"Exif\0\0" + exif_block(6))
    plain = examine(data, policy=DEFAULT_POLICY, final=None, spec=RELEASE_SPEC)
    turned = examine(data, policy=PixelPolicy(apply_exif_orientation=True), final=None, spec=RELEASE_SPEC)
    assert (plain.plan.width, plain.plan.height) == (644, 490)
    assert (turned.plan.width, turned.plan.height) == (490, 644)


def test_animations_are_refused_only_by_policy() -> None:
    data = animation("GIF")
    assert examine(data, policy=DEFAULT_POLICY, final=None, spec=RELEASE_SPEC).header.is_animated
    with pytest.raises(ImageRejected, match="gif is an animation"):
        examine(data, policy=PixelPolicy(first_frame_of_animation=False), final=None, spec=RELEASE_SPEC)
