"""What is let in: the limits of serving.md 4.3 on an image's bytes and header, and its plan, before anything is decoded.

Called in the RPC process (for Inspect and before an image is queued) and again in decode workers on their own copy of the bytes.
Pure Python and no Pillow. The trap: an image that comes at its declared final size may be wider than max_side, as deepseek-recipe
makes 16380x28 of 8192x1; what bounds it then is the plan.
"""

from dataclasses import dataclass

from prefill_engine.vision.image_header import ImageHeader, read_header
from prefill_engine.vision.plan import ImagePlan, plan_image
from prefill_plan.config import Struct
from prefill_plan.errors import ImageRejected
from prefill_plan.model_parts import VisionSpec

MAX_IMAGE_BYTES = 32_000_000
MAX_IMAGE_SIDE = 8192
MAX_IMAGE_PIXELS = 8192 * 8192
WHITE = 0xFFFFFF
_SWAPPING_ORIENTATION = 5
"""Orientations from here on turn by a quarter."""


class PixelPolicy(Struct):
    """How the caller wants pixels made; enters the content key. The limits can only lower ours; 0 = ours."""

    apply_exif_orientation: bool = False
    background_rgb: int = WHITE
    """Below transparent pixels, 0xRRGGBB."""
    first_frame_of_animation: bool = True
    """False: animations are refused."""
    max_pixels: int = 0
    max_side: int = 0
    max_bytes: int = 0


DEFAULT_POLICY = PixelPolicy()


@dataclass(frozen=True, slots=True, kw_only=True)
class Intake:
    """An image that may be decoded. width, height: pixels after the orientation that the policy asks for."""

    header: ImageHeader
    width: int
    height: int
    plan: ImagePlan

    @property
    def num_pixels(self) -> int:
        return self.width * self.height


def examine(
    data: bytes, *, policy: PixelPolicy, final: tuple[int, int] | None, spec: VisionSpec, total_bytes: int | None = None
) -> Intake:
    """Header, size and plan of an image within the limits.

    Args:
        data: the encoded image, or its beginning.
        final: width and height that the caller counted tokens for; None lets the plan decide.
        total_bytes: of the image, where `data` is its beginning only.

    Raises:
        ImageRejected: no image of ours, a limit passed, an animation where the policy wants none. With reason
            IMAGE_TOKEN_MISMATCH: the plan's size is not `final`.
    """
    num_bytes = len(data) if total_bytes is None else total_bytes
    max_bytes = _lower(policy.max_bytes, MAX_IMAGE_BYTES)
    if num_bytes > max_bytes:
        raise ImageRejected(f"image of {num_bytes} bytes, limit {max_bytes}; not decoded", num_bytes=num_bytes)
    header = read_header(data)
    _check_size(header, policy, final)
    if header.is_animated and not policy.first_frame_of_animation:
        raise ImageRejected(f"{header.format} is an animation and the policy takes none; not decoded")
    width, height = header.width, header.height
    if policy.apply_exif_orientation and header.exif_orientation >= _SWAPPING_ORIENTATION:
        width, height = height, width
    plan = plan_image(width, height, spec)
    if final is not None and final != (plan.width, plan.height):
        raise ImageRejected(
            f"image of {width}x{height} pixels has the final size {plan.width}x{plan.height} ({plan.tokens} tokens), but "
            f"{final[0]}x{final[1]} was declared; not decoded",
            reason="IMAGE_TOKEN_MISMATCH",
        )
    return Intake(header=header, width=width, height=height, plan=plan)


def _check_size(header: ImageHeader, policy: PixelPolicy, final: tuple[int, int] | None) -> None:
    size = f"{header.format} of {header.width}x{header.height} pixels"
    pixels, max_pixels = header.width * header.height, _lower(policy.max_pixels, MAX_IMAGE_PIXELS)
    if pixels > max_pixels:
        raise ImageRejected(f"{size} has {pixels}, limit {max_pixels}; not decoded", pixels=pixels)
    is_final = final == (header.width, header.height)
    max_side = _lower(policy.max_side, MAX_IMAGE_SIDE)
    if max(header.width, header.height) > max_side and not (is_final and not policy.max_side):
        raise ImageRejected(f"{size}, limit {max_side} a side; not decoded", width=header.width, height=header.height)


def _lower(asked: int, ours: int) -> int:
    return min(asked, ours) if asked else ours
