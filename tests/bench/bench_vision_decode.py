"""Images per second and core of our preprocessing, beside Pillow alone and beside the official front door (issue 7).

    python tests/bench/bench_vision_decode.py [--rounds N] [--results FILE]

Ways: `pillow` = open, convert, ImageOps.pad into the canvas, as the engines do it, in this process; `ours` = decode_canvas in
this process; `pool` = the same through a decode worker, copies and messages included; `recipe` = deepseek-recipe's preprocess,
which also encodes WebP, so it does more. Seconds are CPU seconds of all threads and processes, so a busy machine changes little;
ways alternate within a round and ratios are taken within it. Checks first that ours equals Pillow byte for byte.
"""

import argparse
import asyncio
import io
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import deepseek_recipe
import numpy as np
import PIL
from PIL import Image, ImageDraw, ImageOps

from prefill_engine.vision.decode import decode_canvas
from prefill_engine.vision.image_intake import DEFAULT_POLICY
from prefill_engine.vision.plan import plan_image
from prefill_engine.vision.worker_pool import DecodeLimits, DecodePool
from prefill_testing.bench_results import machine_line, write_section
from prefill_testing.encoded_images import RELEASE_SPEC, encode_image, noise

_ROOM = 1024 * 42 * 42 * 3
_OPTIONS = deepseek_recipe.PreprocessOptions("high", 8192, 512)
_RECIPE = deepseek_recipe.OpenCvImagePreprocessor()
Way = Callable[[bytes, tuple[int, int] | None], float]


def draw_screenshot(width: int, height: int) -> Image.Image:
    """Flat areas, lines of text and one picture, as a desktop has them."""
    image = Image.new("RGB", (width, height), (246, 247, 249))
    draw = ImageDraw.Draw(image)
    draw.rectangle((0, 0, width // 5, height), (32, 36, 44))
    for row in range(20, height - 20, 18):
        draw.text(
            (width // 5 + 24, row),
            f"{row:5d}  def line_{row}(argument): return argument * {row} + offset",
            (30, 30, 34),
        )
    picture = noise(width // 12, height // 12).resize((width // 3, height // 3), Image.Resampling.BICUBIC)
    image.paste(picture, (width - width // 3 - 20, 20))
    return image


def build_cases() -> dict[str, tuple[bytes, tuple[int, int] | None]]:
    """Name -> (encoded image, declared final size)."""
    desktop = draw_screenshot(1920, 1080)
    phone = draw_screenshot(1080, 2400)
    photo = noise(300, 200).resize((3000, 2000), Image.Resampling.BICUBIC)
    final = plan_image(1920, 1080, RELEASE_SPEC)
    front_door = _RECIPE.preprocess(encode_image(desktop, "PNG"), _OPTIONS)
    return {
        "1920x1080 png": (encode_image(desktop, "PNG"), None),
        "1920x1080 webp": (encode_image(desktop, "WEBP"), None),
        "1080x2400 png": (encode_image(phone, "PNG"), None),
        "3000x2000 jpeg": (encode_image(photo, "JPEG", quality=90), None),
        "640x480 gif": (encode_image(draw_screenshot(640, 480), "GIF"), None),
        "front door's webp": (front_door.data, (final.width, final.height)),
    }


def with_pillow(data: bytes, final: tuple[int, int] | None) -> float:
    started = time.process_time()
    with Image.open(io.BytesIO(data)) as image:
        plan = plan_image(*image.size, RELEASE_SPEC)
        canvas = ImageOps.pad(
            image.convert("RGB"), (plan.width, plan.height), Image.Resampling.BICUBIC, color=(127, 127, 127)
        )
        np.asarray(canvas)
    return time.process_time() - started


def with_ours(data: bytes, final: tuple[int, int] | None) -> float:
    started = time.process_time()
    decode_canvas(data, policy=DEFAULT_POLICY, final=final, spec=RELEASE_SPEC)
    return time.process_time() - started


def with_recipe(data: bytes, final: tuple[int, int] | None) -> float:
    started = time.process_time()
    _RECIPE.preprocess(data, _OPTIONS)
    return time.process_time() - started


def check_equal(data: bytes, final: tuple[int, int] | None) -> None:
    """Raises SystemExit if ours and Pillow's canvases differ."""
    ours = decode_canvas(data, policy=DEFAULT_POLICY, final=final, spec=RELEASE_SPEC).pixels
    with Image.open(io.BytesIO(data)) as image:
        size = (ours.shape[1], ours.shape[0])
        canvas = ImageOps.pad(image.convert("RGB"), size, Image.Resampling.BICUBIC, color=(127, 127, 127))
    if not np.array_equal(ours, np.asarray(canvas)):
        raise SystemExit("our canvas differs from Pillow's")


async def measure(
    pool: DecodePool, data: bytes, final: tuple[int, int] | None, *, rounds: int
) -> dict[str, list[float]]:
    """CPU seconds per image of each way, one entry a round."""
    into = memoryview(bytearray(_ROOM))
    ways: dict[str, Way] = {"pillow": with_pillow, "ours": with_ours, "recipe": with_recipe}
    seconds: dict[str, list[float]] = {name: [] for name in ("pillow", "ours", "pool", "recipe")}
    for round_index in range(rounds + 1):
        spent = {name: way(data, final) for name, way in ways.items()}
        started = time.process_time()
        deadline = asyncio.get_running_loop().time() + 60
        image = await pool.decode(data, policy=DEFAULT_POLICY, final=final, into=into, deadline=deadline)
        spent["pool"] = time.process_time() - started + image.cpu_seconds
        if round_index:  # The first round warms caches and pages.
            for name, value in spent.items():
                seconds[name].append(value)
    return seconds


async def run(rounds: int) -> list[str]:
    """The table."""
    pool = DecodePool(DecodeLimits(num_workers=1, max_waiting=4), RELEASE_SPEC)
    await pool.start()
    lines = ["| image | bytes | pillow /s | ours /s | pool /s | recipe /s | ours/pillow | pool/pillow | pool/recipe |"]
    lines.append("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, (data, final) in build_cases().items():
        check_equal(data, final)
        seconds = await measure(pool, data, final, rounds=rounds)
        rates = [f"{1 / statistics.median(seconds[way]):.1f}" for way in ("pillow", "ours", "pool", "recipe")]
        ratios = [
            _ratio(seconds[below], seconds[way])
            for way, below in (("ours", "pillow"), ("pool", "pillow"), ("pool", "recipe"))
        ]
        lines.append(f"| {name} | {len(data)} | {' | '.join(rates)} | {' | '.join(ratios)} |")
    await pool.close()
    return lines


def _ratio(below: list[float], above: list[float]) -> str:
    """How many times as many images: median and the middle 60 % over the rounds."""
    deciles = statistics.quantiles([one / other for one, other in zip(below, above, strict=True)], n=10)
    return f"{deciles[4]:.2f} ({deciles[1]:.2f}-{deciles[7]:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument(
        "--results", type=Path, metavar="FILE", help="write the section into this Markdown file as well"
    )
    args = parser.parse_args()
    where = machine_line()
    lines = asyncio.run(run(args.rounds))
    versions = f"Pillow {PIL.__version__}, deepseek-recipe {deepseek_recipe.__version__}"
    text = [
        f"`tests/bench/bench_vision_decode.py`, {where}, {versions}.",
        f"Images per CPU second, medians of {args.rounds} rounds; ratios within a round, median (p20-p80). pillow: alone, in",
        "the bench's process. ours: our decoder there. pool: the same through a confined worker, copies and messages included.",
        "recipe: deepseek-recipe's OpenCvImagePreprocessor, which also encodes the result as WebP; it needs no torchvision.",
        "",
        *lines,
    ]
    print("\n".join(text))
    if args.results is not None:
        write_section(args.results, "Decoding and resizing", text, heading="Vision: benchmarks")


if __name__ == "__main__":
    main()
