"""Encoded bytes -> the canvas of an image's plan: Pillow with four plug-ins, then pixels.fit_canvas (serving.md 4.3). No torch.

Called in decode workers. The traps: Image.open is never used, since it would load and try every plug-in; a jpeg's metadata is cut
out first, since Pillow reads EXIF with its TIFF plug-in; transparency goes before the resize, 16 bits are shifted, not clipped.
Where Pillow leaves a choice we follow deepseek-recipe: a gif's screen outside its first frame is background, and the transparent
value of a grey png is ignored.
"""

import io
import warnings
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile

from prefill_engine.vision.image_header import ImageHeader, jpeg_segments
from prefill_engine.vision.image_intake import Intake, PixelPolicy, examine
from prefill_engine.vision.pixels import fit_canvas
from prefill_plan.errors import ImageRejected
from prefill_plan.model_parts import VisionSpec

_READERS: dict[str, type[ImageFile.ImageFile]] = {
    "png": PngImageFile,
    "jpeg": JpegImageFile,
    "webp": WebPImageFile,
    "gif": GifImageFile,
}
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""EXIF orientation -> what shows the image upright."""
# Application segments and comments but JFIF's and Adobe's, which name the colours.
_JPEG_METADATA = (frozenset(range(0xE0, 0xF0)) | {0xFE}) - {0xE0, 0xEE}
_MAX_REASON = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Canvas:
    """pixels: [plan.height, plan.width, 3] uint8."""

    intake: Intake
    pixels: npt.NDArray[np.uint8]


def decode_canvas(data: bytes, *, policy: PixelPolicy, final: tuple[int, int] | None, spec: VisionSpec) -> Canvas:
    """Decodes one image and fits it on its canvas.

    Raises:
        ImageRejected: as examine; bytes that Pillow can't decode to the end.
        MemoryError: the process may not have that much.
    """
    intake = examine(data, policy=policy, final=final, spec=spec)
    image = decode_rgb(data, intake.header, background_rgb=policy.background_rgb)
    if policy.apply_exif_orientation and intake.header.exif_orientation in _TURNS:
        image = image.transpose(_TURNS[intake.header.exif_orientation])
    return Canvas(intake=intake, pixels=fit_canvas(image, intake.plan))


def decode_rgb(data: bytes, header: ImageHeader, *, background_rgb: int) -> Image.Image:
    """The first frame as RGB, nothing of it transparent, in its stored orientation.

    Raises:
        ImageRejected: Pillow can't decode it, or finds another size than the header's.
        MemoryError: the process may not have that much.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            image = _READERS[header.format](io.BytesIO(_cut_metadata(data) if header.format == "jpeg" else data))
            if image.size != (header.width, header.height):
                raise ValueError(f"size {image.width}x{image.height}, its header says {header.width}x{header.height}")
            image.load()
            return _flatten(image, header, _color(background_rgb))
        except MemoryError:
            raise
        # Pillow's parsers end in any exception on damaged bytes; whichever it is, these bytes are no image.
        except Exception as error:
            text = f"{type(error).__name__}: {_plain(str(error))}"
            size = f"{header.width}x{header.height}"
            raise ImageRejected(f"{header.format} of {size} pixels is damaged ({text}); not encoded") from None


def _cut_metadata(data: bytes) -> bytes:
    view = memoryview(data)
    kept, end = [view[:2]], 2
    for marker, start, end in jpeg_segments(data):
        if marker not in _JPEG_METADATA:
            kept.append(view[start:end])
    return b"".join([*kept, view[end:]])


def _flatten(image: Image.Image, header: ImageHeader, background: tuple[int, int, int]) -> Image.Image:
    opaque = _composite(image, header, background)
    if header.box == (0, 0, header.width, header.height):
        return opaque
    left, top, width, height = header.box
    screen = Image.new("RGB", opaque.size, background)
    screen.paste(opaque.crop((left, top, left + width, top + height)), (left, top))
    return screen


def _composite(image: Image.Image, header: ImageHeader, background: tuple[int, int, int]) -> Image.Image:
    if image.mode == "I;16":
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode not in ("LA", "RGBA"):
        key = image.info.get("transparency")
        if key is None or (header.format == "png" and image.mode in ("1", "L")):
            image.info.pop("transparency", None)
            return image.convert("RGB")
        if isinstance(key, tuple) and header.bits == 16:
            # Pillow keeps the upper bytes of 16-bit colours only, so that is where they can be compared.
            image.info["transparency"] = tuple(value >> 8 for value in key)
        image = image.convert("RGBA")
    canvas = Image.new("RGB", image.size, background)
    canvas.paste(image, mask=image)
    return canvas


def _color(rgb: int) -> tuple[int, int, int]:
    return rgb >> 16 & 0xFF, rgb >> 8 & 0xFF, rgb & 0xFF


def _plain(text: str) -> str:
    """Nothing of the image in messages: whatever is not plain text goes, and few characters stay."""
    return "".join(char for char in text if char.isascii() and char.isprintable())[:_MAX_REASON]
