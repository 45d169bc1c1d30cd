"""Ten thousand damaged images through one worker: each becomes a canvas or IMAGE_REJECTED, the worker and the memory stay.

The seed is fixed and printed; `pytest -k fuzz -s` shows the tally.
"""

import asyncio
import random
import resource
from collections import Counter
from pathlib import Path

import pytest

from prefill_engine.vision.image_intake import DEFAULT_POLICY, PixelPolicy
from prefill_engine.vision.worker_pool import DecodePool
from prefill_plan.errors import ImageRejected
from prefill_testing.decode_scene import ROOM, running_pool
from prefill_testing.image_mutations import mutate, valid_images

SEED = 20261130
NUM_IMAGES = 10_000
AT_ONCE = 16
UPRIGHT = PixelPolicy(apply_exif_orientation=True)
# A decoded image of the edited sizes takes up to 300 MB for a moment; what stays must not grow with the number of images.
MAX_PEAK_BYTES = 1400 << 20
MAX_GROWTH_BYTES = 150 << 20


async def outcome_of(pool: DecodePool, data: bytes, policy: PixelPolicy, into: memoryview) -> str:
    """What an image came to; anything that is neither a canvas nor a refusal fails the test."""
    deadline = asyncio.get_running_loop().time() + 60.0
    try:
        image = await pool.decode(data, policy=policy, final=None, into=into, deadline=deadline)
    except ImageRejected as error:
        is_clear = error.reason == "IMAGE_REJECTED" and error.message.isascii() and len(error.message) < 400
        return "refused" if is_clear else f"unclear: {error.message!r}"
    assert image.plan.tokens <= 64
    return image.intake.header.format


def status_bytes(pid: int, field: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field + ":"))


async def decode_all(pool: DecodePool, tally: Counter[str], *, num_images: int) -> int:
    """Returns the largest peak of memory that a worker was seen with."""
    source, seeds = random.Random(SEED), valid_images()
    rooms = [memoryview(bytearray(ROOM)) for _ in range(AT_ONCE)]
    peak = 0
    for _ in range(0, num_images, AT_ONCE):
        batch = [(mutate(source, seeds), source.choice((DEFAULT_POLICY, UPRIGHT))) for _ in range(AT_ONCE)]
        tally.update(
            await asyncio.gather(
                *(outcome_of(pool, data, policy, into) for (data, policy), into in zip(batch, rooms, strict=True))
            )
        )
        peak = max([peak, *(status_bytes(pid, "VmHWM") for pid in pool.worker_pids)])
    return peak


def test_fuzz_seeds_are_valid() -> None:
    async def scene() -> Counter[str]:
        async with running_pool() as pool:
            return Counter(
                [await outcome_of(pool, data, DEFAULT_POLICY, memoryview(bytearray(ROOM))) for data in valid_images()]
            )

    assert asyncio.run(scene()) == {"png": 9, "jpeg": 5, "webp": 5, "gif": 5}


@pytest.mark.slow
def test_fuzz_ten_thousand_damaged_images() -> None:
    async def scene() -> None:
        async with running_pool() as pool:
            tally: Counter[str] = Counter()
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
            peak = await decode_all(pool, tally, num_images=NUM_IMAGES)
            growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10) - before
            counters = pool.counters()
            print(
                f"seed {SEED}: {dict(tally)}, worker peak {peak >> 20} MiB, own growth {growth >> 20} MiB, {counters}"
            )
            assert sum(tally.values()) >= NUM_IMAGES
            assert set(tally) == {"png", "jpeg", "webp", "gif", "refused"}
            # Damage that leaves an image must be among them, or the fuzzing reached no decoder.
            assert min(tally.values()) > 100
            assert (counters.lost, counters.hung, counters.crashed, counters.expired) == (0, 0, 0, 0)
            assert counters.decoded + counters.rejected == sum(tally.values())
            assert peak < MAX_PEAK_BYTES
            assert growth < MAX_GROWTH_BYTES
            assert counters.rss_bytes < MAX_GROWTH_BYTES

    asyncio.run(scene())
