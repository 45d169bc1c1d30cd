"""Encoded images for tests: by Pillow where it can write them, byte by byte where it can't. Needs Pillow; no torch."""

import io
import struct
import zlib

import msgspec
import numpy as np
from PIL import Image

from prefill_plan.model_parts import VisionSpec
from prefill_plan.model_spec import released_model_spec


def _released() -> VisionSpec:
    spec = released_model_spec().vision
    assert spec is not None
    return spec


RELEASE_SPEC = _released()
SMALL_SPEC = msgspec.structs.replace(RELEASE_SPEC, max_image_tokens=64, min_pixels=1764)
"""Cheap canvases: images of a cell or more are not enlarged, and 64 tokens bound them."""


def encode_image(image: Image.Image, image_format: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, image_format, **options)  # type: ignore[arg-type]
    return file.getvalue()


def noise(width: int, height: int, mode: str = "RGB", *, seed: int = 0) -> Image.Image:
    """The same random bytes for the same arguments."""
    channels = len(Image.new(mode, (1, 1)).getbands())
    data = np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)
    return Image.frombytes(mode, (width, height), data.tobytes())


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def build_png(
    width: int, height: int, *, bits: int, color: int, rows: bytes, before: bytes = b"", after: bytes = b""
) -> bytes:
    """rows: each with its filter byte. before, after: chunks around the pixels."""
    header = struct.pack(">IIBBBBB", width, height, bits, color, 0, 0, 0)
    pixels = png_chunk(b"IDAT", zlib.compress(rows))
    return b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", header) + before + pixels + after + png_chunk(b"IEND", b"")


def build_gif(screen: tuple[int, int], frame: tuple[int, int, int, int], *, background: int = 1) -> bytes:
    """A screen with one frame (left, top, width, height) of colour 2, blue; 0 is red, 1 green. Nothing is transparent."""
    image = Image.new("P", frame[2:], 2)
    image.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255])
    data = bytearray(encode_image(image, "GIF"))
    data[6:10] = struct.pack("<HH", *screen)
    data[11] = background
    descriptor = data.index(b"," + struct.pack("<HHHH", 0, 0, *frame[2:]))
    data[descriptor + 1 : descriptor + 9] = struct.pack("<HHHH", *frame)
    return bytes(data)


def exif_block(orientation: int, order: str = "<") -> bytes:
    """A TIFF file with one directory of one entry."""
    mark = {"<": b"II", ">": b"MM"}[order]
    return mark + struct.pack(order + "HIHHHIHHI", 42, 8, 1, 0x0112, 3, 1, orientation, 0, 0)


def jpeg_segment(marker: int, data: bytes) -> bytes:
    return b"\xff" + bytes([marker]) + struct.pack(">H", len(data) + 2) + data


def with_segment(jpeg: bytes, segment: bytes) -> bytes:
    """The segment right behind the start of the image."""
    return jpeg[:2] + segment + jpeg[2:]


def animation(image_format: str, *, frames: int = 3, width: int = 48, height: int = 60) -> bytes:
    """Frames of noise, the first with seed 0."""
    first, *others = [noise(width, height, seed=seed) for seed in range(frames)]
    options = {"lossless": True} if image_format == "WEBP" else {}
    return encode_image(first, image_format, save_all=True, append_images=others, duration=100, **options)
