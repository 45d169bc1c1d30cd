"""Format and size of an encoded image from its first bytes, in pure Python: no C decoder sees them (serving.md 4.3).

Called in the RPC process before anything is queued, and again in decode workers. The trap: a header promises, it does not prove;
the decoder compares what it finds with it. Every walk is bounded in steps, so that no bytes make it slow.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from prefill_plan.errors import ImageRejected

FORMATS = ("png", "jpeg", "webp", "gif")
_MAX_STEPS = 16_384
"""Chunks or segments; a png of 32 MB in libpng's pieces of 8 KiB has 4,096."""
_MAX_GIF_BLOCKS = 200_000
"""A gif of 32 MB has 131,072 full ones."""
_ORIENTATION_TAG = 0x0112
_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
# Start of frame: all of C0..CF but DHT, JPG and DAC.
_JPEG_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_JPEG_BARE = frozenset(range(0xD0, 0xD9)) | {0x01}
_JPEG_SCAN = 0xDA
_JPEG_APP1 = 0xE1


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageHeader:
    """What the header says.

    width, height: pixels as stored, before any orientation. bits: of one channel. is_animated: has a second frame; of a gif
    that shows only if the bytes reach that far. exif_orientation: 1..8, 1 where there is none. box: left, top, width, height
    of a gif's first frame on its screen; the whole image for other formats.
    """

    format: str
    width: int
    height: int
    bits: int
    is_animated: bool
    exif_orientation: int
    box: tuple[int, int, int, int]


def read_header(data: bytes) -> ImageHeader:
    """The header of a png, jpeg, webp or gif, told apart by content.

    Args:
        data: the image, or so much of its beginning as holds the header.

    Raises:
        ImageRejected: empty, another format, a header that is cut off or makes no sense.
    """
    image_format = sniff_format(data)
    try:
        match image_format:
            case "png":
                return _read_png(data)
            case "jpeg":
                return _read_jpeg(data)
            case "webp":
                return _read_webp(data)
            case _:
                return _read_gif(data)
    except (struct.error, IndexError):
        raise ImageRejected(
            f"{image_format} header is cut off: {len(data)} bytes do not hold it; not decoded"
        ) from None


def sniff_format(data: bytes) -> str:
    """One of FORMATS.

    Raises:
        ImageRejected: none of them.
    """
    if not data:
        raise ImageRejected("image is empty (0 bytes); not decoded")
    if data.startswith(_PNG_SIGNATURE):
        return "png"
    if data.startswith(b"\xff\xd8\xff"):
        return "jpeg"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "webp"
    if data[:6] in (b"GIF87a", b"GIF89a"):
        return "gif"
    raise ImageRejected(f"{len(data)} bytes are no image of a known format, expected {', '.join(FORMATS)}; not decoded")


def jpeg_segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """(marker, start, end) of each segment before the first scan; `data[start]` is the 0xFF of its marker.

    Raises:
        ImageRejected: more segments or more bytes between them than any real file has.
        struct.error, IndexError: the data ends before the first scan.
    """
    at = 2
    for _ in range(_MAX_STEPS):
        # Fill bytes and, as libjpeg forgives them, stray bytes; each costs a step.
        if data[at] != 0xFF or data[at + 1] in (0x00, 0xFF):
            at += 1
            continue
        marker = data[at + 1]
        if marker in _JPEG_BARE:
            at += 2
            continue
        if marker == _JPEG_SCAN:
            return
        end = at + 2 + int(struct.unpack_from(">H", data, at + 2)[0])
        yield marker, at, end
        at = end
    raise ImageRejected(f"jpeg has no scan within its first {_MAX_STEPS} segments; not decoded")


def read_orientation(exif: bytes) -> int:
    """Orientation 1..8 of an EXIF block (a TIFF file with one directory); 1 where it says nothing usable."""
    exif = exif.removeprefix(b"Exif\x00\x00")
    order = {b"II": "<", b"MM": ">"}.get(exif[:2])
    if order is None:
        return 1
    try:
        (directory,) = struct.unpack_from(order + "I", exif, 4)
        (entries,) = struct.unpack_from(order + "H", exif, directory)
        for index in range(entries):
            tag, kind, _, value = struct.unpack_from(order + "HHIH", exif, directory + 2 + 12 * index)
            if tag == _ORIENTATION_TAG:
                return int(value) if kind == 3 and 1 <= value <= 8 else 1
    except struct.error:
        pass
    return 1


def _read_png(data: bytes) -> ImageHeader:
    length, kind, width, height, bits = struct.unpack_from(">I4sIIB", data, 8)
    if kind != b"IHDR" or length != 13:
        raise ImageRejected("png does not begin with its IHDR chunk; not decoded")
    is_animated, orientation, has_pixels = False, 1, False
    at = 8
    for _ in range(_MAX_STEPS):
        if at + 8 > len(data):
            break
        length, kind = struct.unpack_from(">I4s", data, at)
        if kind == b"acTL" and not has_pixels and length >= 4 and at + 12 <= len(data):
            is_animated = struct.unpack_from(">I", data, at + 8)[0] > 1
        elif kind == b"eXIf":
            orientation = read_orientation(data[at + 8 : at + 8 + length])
        elif kind == b"IDAT":
            has_pixels = True
        elif kind == b"IEND":
            break
        at += 12 + length
    return _header("png", width, height, bits=bits, is_animated=is_animated, orientation=orientation)


def _read_jpeg(data: bytes) -> ImageHeader:
    orientation, frame = 1, None
    for marker, start, end in jpeg_segments(data):
        if marker in _JPEG_FRAMES:
            frame = struct.unpack_from(">BHH", data, start + 4)
            break
        if marker == _JPEG_APP1 and data[start + 4 : start + 10] == b"Exif\x00\x00":
            orientation = read_orientation(data[start + 4 : end])
    if frame is None:
        raise ImageRejected("jpeg has no frame header before its first scan; not decoded")
    bits, height, width = frame
    return _header("jpeg", width, height, bits=bits, is_animated=False, orientation=orientation)


def _read_webp(data: bytes) -> ImageHeader:
    kind = data[12:16]
    if kind == b"VP8X":
        flags = data[20]
        width = 1 + int.from_bytes(struct.unpack_from("3s", data, 24)[0], "little")
        height = 1 + int.from_bytes(struct.unpack_from("3s", data, 27)[0], "little")
        orientation = _find_webp_orientation(data) if flags & 0x08 else 1
        return _header("webp", width, height, bits=8, is_animated=bool(flags & 0x02), orientation=orientation)
    if kind == b"VP8L":
        signature, packed = struct.unpack_from("<BI", data, 20)
        if signature != 0x2F:
            raise ImageRejected("webp: its lossless part has another signature; not decoded")
        return _header("webp", 1 + (packed & 0x3FFF), 1 + (packed >> 14 & 0x3FFF), bits=8)
    if kind == b"VP8 ":
        code, width, height = struct.unpack_from("<3sHH", data, 23)
        if code != b"\x9d\x01\x2a":
            raise ImageRejected("webp: its lossy part does not begin with a key frame; not decoded")
        return _header("webp", width & 0x3FFF, height & 0x3FFF, bits=8)
    if len(data) < 16:
        raise IndexError
    raise ImageRejected("webp begins with no VP8, VP8L or VP8X chunk; not decoded")


def _find_webp_orientation(data: bytes) -> int:
    at = 12
    for _ in range(_MAX_STEPS):
        if at + 8 > len(data):
            break
        kind, length = struct.unpack_from("<4sI", data, at)
        if kind == b"EXIF":
            return read_orientation(data[at + 8 : at + 8 + length])
        at += 8 + length + (length & 1)
    return 1


def _read_gif(data: bytes) -> ImageHeader:
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    at = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
    walk = _GifWalk(data, at)
    if not walk.to_frame():
        raise ImageRejected("gif has no frame; not decoded")
    left, top, frame_width, frame_height = struct.unpack_from("<HHHH", data, walk.at + 1)
    if not (frame_width and frame_height and left + frame_width <= width and top + frame_height <= height):
        raise ImageRejected(
            f"gif: its first frame, {frame_width}x{frame_height} at {left},{top}, does not lie on its screen of "
            f"{width}x{height}; not decoded"
        )
    box = (left, top, frame_width, frame_height)
    return _header("gif", width, height, bits=8, is_animated=walk.has_another(), box=box)


class _GifWalk:
    """A place in the blocks of a gif. Owner of the steps that are left."""

    def __init__(self, data: bytes, at: int) -> None:
        self.at = at
        self._data = data
        self._blocks_left = _MAX_GIF_BLOCKS

    def to_frame(self) -> bool:
        """Moves to the next image descriptor; False if the trailer or something unknown comes first. IndexError: cut off."""
        while self._data[self.at] == 0x21:
            self.at += 2
            if not self._skip_blocks():
                return False
        return self._data[self.at] == 0x2C

    def has_another(self) -> bool:
        """Whether a frame follows the one this stands at, as far as the bytes and the steps reach."""
        try:
            flags = self._data[self.at + 9]
            self.at += 11 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
            return self._skip_blocks() and self.to_frame()
        except IndexError:
            return False

    def _skip_blocks(self) -> bool:
        data, at = self._data, self.at
        for left in range(self._blocks_left, 0, -1):
            length = data[at]
            at += 1 + length
            if not length:
                self.at, self._blocks_left = at, left
                return True
        return False


def _header(
    image_format: str,
    width: int,
    height: int,
    *,
    bits: int,
    is_animated: bool = False,
    orientation: int = 1,
    box: tuple[int, int, int, int] | None = None,
) -> ImageHeader:
    if width < 1 or height < 1:
        raise ImageRejected(f"{image_format} of {width}x{height} pixels, expected at least 1x1; not decoded")
    return ImageHeader(
        format=image_format,
        width=width,
        height=height,
        bits=bits,
        is_animated=is_animated,
        exif_orientation=orientation,
        box=box or (0, 0, width, height),
    )
