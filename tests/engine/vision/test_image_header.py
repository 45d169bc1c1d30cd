"""Headers read in pure Python: what Pillow sees in whole files, seen in their first bytes; walks that end."""

import io
import random
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

import pytest
from PIL import Image

from prefill_engine.vision.image_header import read_header, read_orientation
from prefill_plan.errors import ImageRejected
from prefill_testing.encoded_images import (
    animation,
    build_gif,
    build_png,
    encode_image,
    exif_block,
    jpeg_segment,
    noise,
    png_chunk,
)

FILES = {
    "png": (encode_image(noise(37, 21), "PNG"), "png"),
    "png of 16 bits": (build_png(5, 3, bits=16, color=0, rows=(b"\0" + bytes(10)) * 3), "png"),
    "jpeg": (encode_image(noise(37, 21), "JPEG"), "jpeg"),
    "progressive jpeg": (encode_image(noise(37, 21), "JPEG", progressive=True), "jpeg"),
    "jpeg of four colours": (encode_image(noise(37, 21, "CMYK"), "JPEG"), "jpeg"),
    "lossy webp": (encode_image(noise(37, 21), "WEBP"), "webp"),
    "lossless webp": (encode_image(noise(37, 21), "WEBP", lossless=True), "webp"),
    "webp with alpha": (encode_image(noise(37, 21, "RGBA"), "WEBP"), "webp"),
    "gif": (encode_image(noise(37, 21), "GIF"), "gif"),
    "part of a gif's screen": (build_gif((300, 200), (100, 50, 60, 70)), "gif"),
}


@pytest.mark.parametrize(("data", "image_format"), FILES.values(), ids=FILES)
def test_header_agrees_with_pillow(data: bytes, image_format: str) -> None:
    header = read_header(data)
    with Image.open(io.BytesIO(data)) as image:
        assert (header.format, header.width, header.height) == (image.format.lower(), *image.size)
    assert header.format == image_format
    assert not header.is_animated
    assert header.exif_orientation == 1


def test_bits_and_first_frame() -> None:
    assert read_header(FILES["png of 16 bits"][0]).bits == 16
    assert read_header(FILES["part of a gif's screen"][0]).box == (100, 50, 60, 70)
    assert read_header(FILES["jpeg"][0]).box == (0, 0, 37, 21)


@pytest.mark.parametrize("image_format", ["PNG", "WEBP", "GIF"])
def test_animations_are_seen(image_format: str) -> None:
    assert read_header(animation(image_format)).is_animated
    assert not read_header(animation(image_format, frames=1)).is_animated


def test_a_gif_cut_after_its_first_frame_shows_no_second() -> None:
    assert not read_header(animation("GIF")[:900]).is_animated


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("image_format", ["PNG", "JPEG", "WEBP"])
def test_orientation_is_found_in_every_format(image_format: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    assert read_header(encode_image(noise(9, 7), image_format, exif=exif)).exif_orientation == orientation


def test_orientation_behind_the_pixels_of_a_png_is_found() -> None:
    chunk = png_chunk(b"eXIf", exif_block(6))
    assert read_header(build_png(2, 1, bits=8, color=0, rows=b"\0ab", after=chunk)).exif_orientation == 6


@pytest.mark.parametrize(
    ("block", "orientation"),
    [
        (exif_block(6), 6),
        (exif_block(8, ">"), 8),
        (exif_block(9), 1),
        (exif_block(0), 1),
        (exif_block(6)[:18], 1),
        (b"II*\0\xff\xff\xff\x7f", 1),
        (b"", 1),
        (b"no TIFF at all", 1),
    ],
    ids=["little", "big", "nine", "zero", "cut", "far", "empty", "other"],
)
def test_orientation_of_a_block(block: bytes, orientation: int) -> None:
    assert read_orientation(block) == orientation


@pytest.mark.parametrize("name", FILES)
def test_every_cut_is_a_header_or_a_refusal(name: str) -> None:
    data, _ = FILES[name]
    whole = read_header(data)
    for length in range(len(data)):
        try:
            header = read_header(data[:length])
        except ImageRejected:
            continue
        assert (header.width, header.height) == (whole.width, whole.height)


def test_other_formats_are_refused_by_content() -> None:
    image = noise(8, 8)
    for other in ("BMP", "TIFF", "PPM", "ICO", "TGA"):
        with pytest.raises(ImageRejected, match="no image of a known format"):
            read_header(encode_image(image, other))
    for text in (
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        b"%PDF-1.7",
        b"data:image/png;base64,iVBORw0KGgo=",
        b"\0" * 99,
    ):
        with pytest.raises(ImageRejected, match="no image of a known format"):
            read_header(text)
    with pytest.raises(ImageRejected, match="empty"):
        read_header(b"")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\x89PNG\r\n\x1a\n" + png_chunk(b"IDAT", bytes(13)) + bytes(20), "IHDR"),
        (build_png(0, 5, bits=8, color=0, rows=b""), "0x5"),
        (b"\xff\xd8" + jpeg_segment(0xDA, bytes(8)) + bytes(9), "no frame header"),
        (b"RIFF\x10\0\0\0WEBPVP8 " + bytes(40), "key frame"),
        (b"RIFF\x10\0\0\0WEBPVP8L" + bytes(40), "signature"),
        (b"RIFF\x10\0\0\0WEBPJUNK" + bytes(40), "VP8"),
        (b"GIF89a" + struct.pack("<HHBBB", 9, 9, 0, 0, 0) + b";", "no frame"),
        (build_gif((50, 50), (30, 30, 21, 5)), "does not lie on its screen"),
    ],
    ids=["png", "no width", "jpeg", "lossy", "lossless", "webp", "gif", "gif frame"],
)
def test_senseless_headers_are_refused(data: bytes, reason: str) -> None:
    with pytest.raises(ImageRejected, match=reason):
        read_header(data)


def _small_blocks_gif() -> bytes:
    whole = encode_image(noise(4, 4), "GIF")
    return whole[:-1] + b"!\xfe" + b"\x01a" * 2_000_000


SLOW_WALKS = {
    "jpeg of empty segments": b"\xff\xd8" + jpeg_segment(0xFE, b"") * 2_000_000,
    "jpeg of fill bytes": b"\xff\xd8" + b"\xff" * 8_000_000,
    "jpeg of stray bytes": b"\xff\xd8\xff\xe0\0\x02" + b"\0" * 8_000_000,
    "png of empty chunks": encode_image(noise(4, 4), "PNG")[:-12] + png_chunk(b"tEXt", b"") * 1_000_000,
    "webp of empty chunks": encode_image(noise(4, 4, "RGBA"), "WEBP", exif=exif_block(3)) + b"JUNK\0\0\0\0" * 1_000_000,
    "gif of small blocks": _small_blocks_gif(),
}


def lines_run(data: bytes) -> int:
    """Lines of Python that reading this header takes; what decides it is not the machine."""
    lines = 0

    def count(frame: FrameType, event: str, argument: object) -> Callable[..., object]:
        nonlocal lines
        lines += event == "line"
        return count

    sys.settrace(count)
    try:
        with suppress(ImageRejected):
            read_header(data)
    finally:
        sys.settrace(None)
    return lines


@pytest.mark.parametrize("data", SLOW_WALKS.values(), ids=SLOW_WALKS)
def test_no_bytes_make_a_walk_long(data: bytes) -> None:
    assert lines_run(data) < 1_000_000


def test_random_bytes_behind_a_signature_are_a_header_or_a_refusal() -> None:
    source = random.Random(7)
    signatures = (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", b"\xff\xd8\xff\xc0", b"RIFF\0\0\0\0WEBPVP8X", b"GIF89a")
    for _ in range(5000):
        data = source.choice(signatures) + source.randbytes(source.randrange(80))
        try:
            header = read_header(data)
        except ImageRejected:
            continue
        assert header.width > 0
        assert header.height > 0
        assert 1 <= header.exif_orientation <= 8
