"""Valid images of every kind that Pillow writes, and damage to them: flips, cuts, splices, edited headers. Needs Pillow.

The trap: most random damage to a png dies at the first checksum, so half of the damaged ones get right checksums again.
"""

import random
import struct
import zlib
from collections.abc import Callable

from PIL.PngImagePlugin import PngInfo

from prefill_testing.encoded_images import animation, build_gif, build_png, encode_image, exif_block, noise, png_chunk

_SIZES = (0, 1, 2, 7, 255, 256, 600, 1500, 4096, 8192, 8193, 16383, 16384, 32767, 65535)
"""Sides that headers are edited to."""


def valid_images() -> list[bytes]:
    """Small ones, each of another kind."""
    rgb, smooth = noise(40, 30), noise(8, 6).resize((64, 48))
    palette = smooth.quantize(32)
    pngs = [
        encode_image(smooth, "PNG"),
        encode_image(palette, "PNG", transparency=b"\x00\x80\xff"),
        encode_image(noise(40, 30, "RGBA"), "PNG"),
        encode_image(noise(40, 30, "LA"), "PNG"),
        encode_image(rgb.convert("1"), "PNG"),
        build_png(
            20, 10, bits=16, color=0, rows=(b"\x01" + bytes(range(40))) * 10, before=png_chunk(b"eXIf", exif_block(6))
        ),
        build_png(
            20, 10, bits=16, color=2, rows=(b"\x04" + bytes(range(120))) * 10, before=png_chunk(b"tRNS", bytes(6))
        ),
        encode_image(smooth, "PNG", pnginfo=_text()),
        animation("PNG", width=24, height=20),
    ]
    jpegs = [
        encode_image(smooth, "JPEG"),
        encode_image(smooth, "JPEG", progressive=True, exif=b"Exif\0\0" + exif_block(8, ">")),
        encode_image(rgb.convert("L"), "JPEG", restart_marker_rows=1),
        encode_image(rgb.convert("CMYK"), "JPEG"),
        encode_image(smooth, "JPEG", subsampling=0, comment=b"made for a test", icc_profile=bytes(200)),
    ]
    webps = [
        encode_image(smooth, "WEBP"),
        encode_image(rgb, "WEBP", lossless=True),
        encode_image(noise(24, 20, "RGBA"), "WEBP", exif=exif_block(3)),
        encode_image(noise(24, 20, "RGBA"), "WEBP", lossless=True),
        animation("WEBP", width=24, height=20),
    ]
    gifs = [
        encode_image(palette, "GIF"),
        encode_image(palette, "GIF", interlace=1, transparency=3, comment=b"made for a test"),
        build_gif((60, 50), (10, 5, 30, 40)),
        encode_image(rgb.convert("L"), "GIF"),
        animation("GIF", width=24, height=20),
    ]
    return pngs + jpegs + webps + gifs


def _text() -> PngInfo:
    info = PngInfo()
    info.add_text("Title", "made for a test")
    info.add_text("Long", "a" * 2000, zip=True)
    info.add_itxt("Other", "more", lang="en")
    return info


def mutate(source: random.Random, seeds: list[bytes]) -> bytes:
    """One to three kinds of damage to one of the seeds."""
    data = bytearray(source.choice(seeds))
    for _ in range(source.choice((1, 1, 2, 3))):
        data = source.choice(_DAMAGES)(source, data, seeds)
    if data.startswith(b"\x89PNG") and source.random() < 0.5:
        data = _with_checksums(data)
    return bytes(data)


def _flip_bits(source: random.Random, data: bytearray, seeds: list[bytes]) -> bytearray:
    for _ in range(source.choice((1, 2, 8, 40))):
        if data:
            data[source.randrange(len(data))] ^= 1 << source.randrange(8)
    return data


def _cut(source: random.Random, data: bytearray, seeds: list[bytes]) -> bytearray:
    return data[: source.randrange(len(data) + 1)]


def _splice(source: random.Random, data: bytearray, seeds: list[bytes]) -> bytearray:
    """The beginning of one, the end of another."""
    other = source.choice(seeds)
    return data[: source.randrange(len(data) + 1)] + other[source.randrange(len(other)) :]


def _repeat(source: random.Random, data: bytearray, seeds: list[bytes]) -> bytearray:
    start = source.randrange(len(data) + 1)
    piece = data[start : start + source.randrange(1, 200)]
    return data[:start] + piece * source.choice((1, 2, 50)) + data[start:]


def _drop(source: random.Random, data: bytearray, seeds: list[bytes]) -> bytearray:
    start = source.randrange(len(data) + 1)
    return data[:start] + data[start + source.randrange(1, 60) :]


def _random_bytes(source: random.Random, data: bytearray, seeds: list[bytes]) -> bytearray:
    start = source.randrange(len(data) + 1)
    piece = source.randbytes(source.randrange(1, 40))
    return data[:start] + piece + data[start + len(piece) :]


def _edit_header(source: random.Random, data: bytearray, seeds: list[bytes]) -> bytearray:
    """A byte of the first 64 to an extreme."""
    if data:
        data[source.randrange(min(64, len(data)))] = source.choice((0, 1, 2, 3, 4, 8, 16, 127, 128, 254, 255))
    return data


def _edit_size(source: random.Random, data: bytearray, seeds: list[bytes]) -> bytearray:
    """Another width or height where the format keeps it."""
    side = source.choice(_SIZES)
    which = source.randrange(2)
    if data.startswith(b"\x89PNG") and len(data) > 24:
        data[16 + 4 * which : 20 + 4 * which] = struct.pack(">I", side)
        return _with_checksums(data)
    if data.startswith(b"GIF"):
        data[6 + 2 * which : 8 + 2 * which] = struct.pack("<H", side)
    elif data[12:16] == b"VP8X":
        data[24 + 3 * which : 27 + 3 * which] = struct.pack("<I", max(0, side - 1))[:3]
    elif data[12:16] == b"VP8 ":
        data[26 + 2 * which : 28 + 2 * which] = struct.pack("<H", side & 0x3FFF)
    else:
        at = max(data.find(b"\xff\xc0"), data.find(b"\xff\xc2"))
        if at >= 0:
            data[at + 5 + 2 * which : at + 7 + 2 * which] = struct.pack(">H", side)
    return data


def _with_checksums(data: bytearray) -> bytearray:
    at = 8
    while at + 12 <= len(data):
        (length,) = struct.unpack_from(">I", data, at)
        if at + 12 + length > len(data):
            break
        struct.pack_into(">I", data, at + 8 + length, zlib.crc32(data[at + 4 : at + 8 + length]))
        at += 12 + length
    return data


_DAMAGES: tuple[Callable[[random.Random, bytearray, list[bytes]], bytearray], ...] = (
    _flip_bits,
    _flip_bits,
    _cut,
    _splice,
    _repeat,
    _drop,
    _random_bytes,
    _edit_header,
    _edit_header,
    _edit_size,
)
