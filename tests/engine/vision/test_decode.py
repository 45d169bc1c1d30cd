"""What becomes of an image's pixels: serving.md 4.3 row by row, in this process; the pool's side is in test_worker_pool.py."""

import io
import struct
import subprocess
import sys
from pathlib import Path

import deepseek_recipe
import numpy as np
import pytest
from PIL import Image

from prefill_engine.vision.decode import decode_canvas, decode_rgb
from prefill_engine.vision.image_header import read_header
from prefill_engine.vision.image_intake import DEFAULT_POLICY, PixelPolicy
from prefill_plan.errors import ImageRejected
from prefill_testing.encoded_images import (
    RELEASE_SPEC,
    animation,
    build_gif,
    build_png,
    encode_image,
    exif_block,
    jpeg_segment,
    noise,
    png_chunk,
    with_segment,
)

ROOT = Path(__file__).parents[3]
WHITE = 0xFFFFFF


def rgb(data: bytes, *, background_rgb: int = WHITE) -> np.ndarray:
    """[height, width, 3] uint8."""
    return np.asarray(decode_rgb(data, read_header(data), background_rgb=background_rgb))


def official(data: bytes) -> np.ndarray:
    """Pixels of the official front door: [height, width, 3], as far as its lossy output tells."""
    options = deepseek_recipe.PreprocessOptions("high", 8192, 512)
    made = deepseek_recipe.OpenCvImagePreprocessor().preprocess(data, options)
    with Image.open(io.BytesIO(made.data)) as image:
        return np.asarray(image.convert("RGB"))


@pytest.mark.parametrize(
    ("image_format", "options"),
    [("PNG", {}), ("WEBP", {"lossless": True}), ("WEBP", {}), ("JPEG", {}), ("JPEG", {"progressive": True})],
    ids=["png", "lossless webp", "lossy webp", "jpeg", "progressive jpeg"],
)
def test_every_format_decodes_to_what_pillow_makes(image_format: str, options: dict[str, object]) -> None:
    data = encode_image(noise(75, 50), image_format, **options)
    with Image.open(io.BytesIO(data)) as image:
        assert np.array_equal(rgb(data), np.asarray(image.convert("RGB")))


def test_interlaced_gif_and_palette_png() -> None:
    image = noise(75, 50).quantize(64)
    expected = np.asarray(image.convert("RGB"))
    assert np.array_equal(rgb(encode_image(image, "GIF", interlace=1)), expected)
    assert np.array_equal(rgb(encode_image(image, "PNG")), expected)


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
@pytest.mark.parametrize("image_format", ["PNG", "WEBP"])
@pytest.mark.parametrize("background", [WHITE, 0x102030])
def test_alpha_lies_on_the_background(mode: str, image_format: str, background: int) -> None:
    image = noise(75, 50, mode)
    options = {"lossless": True, "exact": True} if image_format == "WEBP" else {}
    pixels = np.asarray(image.convert("RGBA")).astype(np.int64)
    below = np.array([background >> 16, background >> 8 & 255, background & 255])
    alpha = pixels[..., 3:]
    expected = np.rint((pixels[..., :3] * alpha + below * (255 - alpha)) / 255)
    made = rgb(encode_image(image, image_format, **options), background_rgb=background)
    assert np.array_equal(made, expected.astype(np.uint8))


def test_transparent_palette_entries_lie_on_the_background() -> None:
    image = Image.new("P", (4, 2), 2)
    image.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255])
    image.putpixel((1, 1), 1)
    for data in (encode_image(image, "PNG", transparency=2), encode_image(image, "GIF", transparency=2)):
        made = rgb(data)
        assert made[0, 0].tolist() == [255, 255, 255]
        assert made[1, 1].tolist() == [0, 255, 0]
    half = rgb(encode_image(image, "PNG", transparency=b"\xff\x80\x00"))
    assert half[1, 1].tolist() == [127, 255, 127]


@pytest.mark.parametrize(
    ("bits", "color", "pixels", "key"),
    [
        (8, 2, bytes([64, 128, 32]), struct.pack(">HHH", 64, 128, 32)),
        (16, 2, struct.pack(">HHH", 0x4010, 0x8020, 0x2030), struct.pack(">HHH", 0x4010, 0x8020, 0x2030)),
        (8, 0, b"\x40", b"\x00\x40"),
        (16, 0, b"\x40\x10", b"\x40\x10"),
    ],
    ids=["rgb", "rgb of 16 bits", "grey", "grey of 16 bits"],
)
def test_key_colours_of_png_are_what_the_front_door_makes_of_them(
    bits: int, color: int, pixels: bytes, key: bytes
) -> None:
    """At the final size, so that nothing is resized; the front door's output is lossy."""
    data = build_png(
        546, 546, bits=bits, color=color, rows=(b"\0" + pixels * 546) * 546, before=png_chunk(b"tRNS", key)
    )
    assert np.abs(rgb(data).astype(int) - official(data)).max() <= 3


def test_16_bits_are_shifted_not_clipped() -> None:
    values = np.arange(0, 65536, 120, dtype=">u2")[:546]
    data = build_png(546, 546, bits=16, color=0, rows=(b"\0" + values.tobytes()) * 546)
    made = rgb(data)
    assert np.array_equal(made[0, :, 0], (values >> 8).astype(np.uint8))
    assert np.array_equal(made[..., 0], made[..., 2])
    assert np.abs(made.astype(int) - official(data)).max() <= 6


@pytest.mark.parametrize("color", [2, 4, 6], ids=["rgb", "grey with alpha", "rgb with alpha"])
def test_16_bits_of_every_colour_type_are_shifted(color: int) -> None:
    channels = {2: 3, 4: 2, 6: 4}[color]
    values = np.random.default_rng(3).integers(0, 65536, (20, 30, channels), dtype=np.uint16)
    if color != 2:
        values[..., -1] = 0xFFFF
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    made = rgb(build_png(30, 20, bits=16, color=color, rows=rows))
    expected = (values >> 8).astype(np.uint8)
    assert np.array_equal(made, expected[..., :3] if color != 4 else np.repeat(expected[..., :1], 3, axis=2))


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_few_bits_are_spread_over_the_whole_range(bits: int) -> None:
    made = rgb(build_png(8, 1, bits=bits, color=0, rows=b"\0" + bytes([0b11011000] * bits)))
    steps = (1 << bits) - 1
    bitstream = "11011000" * bits
    expected = [int(bitstream[index * bits : (index + 1) * bits], 2) * 255 // steps for index in range(8)]
    assert made[0, :, 0].tolist() == expected


def test_cmyk_is_converted_as_the_front_door_does() -> None:
    image = Image.new("CMYK", (546, 546), (20, 150, 90, 40))
    data = encode_image(image, "JPEG", quality=95)
    assert np.abs(rgb(data).astype(int) - official(data)).max() <= 6


def test_icc_profiles_change_nothing() -> None:
    from PIL import ImageCms

    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")).tobytes()
    image = noise(75, 50)
    for image_format, options in (("PNG", {}), ("JPEG", {}), ("WEBP", {"lossless": True})):
        plain = rgb(encode_image(image, image_format, **options))
        assert np.array_equal(rgb(encode_image(image, image_format, icc_profile=profile, **options)), plain)


@pytest.mark.parametrize("image_format", ["PNG", "WEBP", "GIF"])
def test_first_frame_of_an_animation(image_format: str) -> None:
    first = np.asarray(noise(48, 60, seed=0))
    made = rgb(animation(image_format)).astype(int)
    # A gif's palette is coarse; the other frames are as far from the first as noise from noise, 85 on average.
    assert np.abs(made - first).mean() < (25 if image_format == "GIF" else 0.01)


def test_screen_outside_a_gifs_frame_is_background() -> None:
    """As the front door and browsers do; Pillow fills it with an entry of the palette."""
    data = build_gif((546, 546), (100, 120, 200, 150))
    made = rgb(data)
    assert made[119, 100].tolist() == made[270, 299].tolist() == [255, 255, 255]
    assert made[120, 100].tolist() == made[269, 299].tolist() == [0, 0, 255]
    assert np.abs(made.astype(int) - official(data))[::7, ::7].mean() < 3
    assert rgb(data, background_rgb=0x010203)[0, 0].tolist() == [1, 2, 3]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_turns_pixels_only_by_policy(orientation: int) -> None:
    image = noise(644, 490)
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encode_image(image, "PNG", exif=exif)
    plain = decode_canvas(data, policy=DEFAULT_POLICY, final=None, spec=RELEASE_SPEC)
    assert np.array_equal(plain.pixels, np.asarray(image))
    turned = decode_canvas(data, policy=PixelPolicy(apply_exif_orientation=True), final=None, spec=RELEASE_SPEC)
    assert np.array_equal(turned.pixels, _upright(np.asarray(image), orientation))


def _upright(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """EXIF's definition: where the stored row 0 and column 0 lie on the visual image."""
    if orientation >= 5:
        pixels = pixels.swapaxes(0, 1)
    row_at_bottom, column_at_right = orientation in (3, 4, 7, 8), orientation in (2, 3, 6, 7)
    return pixels[:: -1 if row_at_bottom else 1, :: -1 if column_at_right else 1]


def test_declared_final_size_is_taken_byte_for_byte() -> None:
    image = noise(644, 490)
    canvas = decode_canvas(encode_image(image, "PNG"), policy=DEFAULT_POLICY, final=(644, 490), spec=RELEASE_SPEC)
    assert np.array_equal(canvas.pixels, np.asarray(image))


def test_alpha_goes_before_the_resize() -> None:
    """Black with a transparent half: resized first, black would bleed into the white."""
    image = Image.new("RGBA", (600, 600), (0, 0, 0, 0))
    canvas = decode_canvas(encode_image(image, "PNG"), policy=DEFAULT_POLICY, final=None, spec=RELEASE_SPEC)
    inside = canvas.pixels[10:-10, 10:-10]
    assert inside.min() == 255


def test_one_pixel_wide_images() -> None:
    image = noise(8192, 1)
    canvas = decode_canvas(encode_image(image, "PNG"), policy=DEFAULT_POLICY, final=None, spec=RELEASE_SPEC)
    assert canvas.pixels.shape == (canvas.intake.plan.height, canvas.intake.plan.width, 3)


def _whole_files() -> dict[str, bytes]:
    image = noise(160, 120)
    return {name: encode_image(image, name.upper()) for name in ("png", "jpeg", "webp", "gif")}


@pytest.mark.parametrize("name", ["png", "jpeg", "webp", "gif"])
@pytest.mark.parametrize("share", [0.99, 0.5, 0.05])
def test_cut_files_are_refused(name: str, share: float) -> None:
    data = _whole_files()[name]
    with pytest.raises(ImageRejected) as caught:
        decode_canvas(data[: int(len(data) * share)], policy=DEFAULT_POLICY, final=None, spec=RELEASE_SPEC)
    assert caught.value.reason == "IMAGE_REJECTED"


def test_refusals_hold_no_bytes_of_the_image() -> None:
    secret = b"TOPSECRETPIXELS" * 30
    data = build_png(20, 20, bits=8, color=0, rows=secret, before=png_chunk(b"tEXt", secret))
    with pytest.raises(ImageRejected) as caught:
        decode_canvas(data, policy=DEFAULT_POLICY, final=None, spec=RELEASE_SPEC)
    assert "SECRET" not in caught.value.message
    assert len(caught.value.message) < 300
    assert caught.value.message.isascii()


def test_a_header_that_lies_about_the_size_is_refused() -> None:
    """Two frame headers: the first counts for the limits, the last one for Pillow."""
    data = encode_image(noise(64, 64), "JPEG")
    lie = jpeg_segment(0xC0, struct.pack(">BHHB", 8, 16, 16, 1) + b"\x01\x11\x00")
    with pytest.raises(ImageRejected, match="its header says 16x16"):
        decode_canvas(with_segment(data, lie), policy=DEFAULT_POLICY, final=None, spec=RELEASE_SPEC)


def test_metadata_never_reaches_pillow() -> None:
    """An EXIF block makes Pillow's jpeg reader load its TIFF plug-in, and a multi-picture block another one."""
    exif = exif_block(6)
    data = encode_image(noise(64, 64), "JPEG")
    extended = with_segment(data, jpeg_segment(0xE1, b"Exif\0\0" + exif) + jpeg_segment(0xE2, b"MPF\0" + exif))
    program = (
        "import sys; from prefill_engine.vision.decode import decode_rgb; "
        "from prefill_engine.vision.image_header import read_header; data = sys.stdin.buffer.read(); "
        "decode_rgb(data, read_header(data), background_rgb=0xFFFFFF); "
        "print(*sorted(name[4:] for name in sys.modules if name.startswith('PIL.') and name.endswith('Plugin')))"
    )
    done = subprocess.run([sys.executable, "-c", program], input=extended, capture_output=True, cwd=ROOT, check=True)
    assert done.stdout.split() == [b"GifImagePlugin", b"JpegImagePlugin", b"PngImagePlugin", b"WebPImagePlugin"]
    assert np.array_equal(rgb(extended), rgb(data))


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("prefill_engine.vision.worker_pool", "PIL"),
        ("prefill_engine.vision.worker_pool", "torch"),
        ("prefill_engine.vision.decode_worker", "torch"),
        ("prefill_engine.vision.decode_worker", "grpc"),
    ],
)
def test_processes_stay_light(module: str, absent: str) -> None:
    program = f"import sys, {module}; sys.exit({absent!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0
