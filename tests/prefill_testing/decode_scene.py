"""A running decode pool for tests: small canvases, one worker, calls with long deadlines. Needs Pillow; no torch."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from prefill_engine.vision.decode import decode_canvas
from prefill_engine.vision.decode_queue import DecodedImage
from prefill_engine.vision.image_intake import DEFAULT_POLICY
from prefill_engine.vision.worker_pool import DecodeLimits, DecodePool
from prefill_testing.encoded_images import SMALL_SPEC, encode_image, noise

LIMITS = DecodeLimits(num_workers=1, max_waiting=20)
SMALL = encode_image(noise(50, 60), "PNG")
SMALL_CANVAS = decode_canvas(SMALL, policy=DEFAULT_POLICY, final=None, spec=SMALL_SPEC).pixels
ROOM = 64 * 42 * 42 * 3
FAR = 60.0
POISON = 0xA5


@asynccontextmanager
async def running_pool(limits: DecodeLimits = LIMITS) -> AsyncIterator[DecodePool]:
    pool = DecodePool(limits, SMALL_SPEC)
    await pool.start()
    try:
        yield pool
    finally:
        await pool.close()


async def decode(
    pool: DecodePool, data: bytes = SMALL, *, into: bytearray | None = None, seconds: float = FAR
) -> DecodedImage:
    return await pool.decode(
        data,
        policy=DEFAULT_POLICY,
        final=None,
        into=memoryview(bytearray(ROOM) if into is None else into),
        deadline=asyncio.get_running_loop().time() + seconds,
    )


async def until(is_true: Callable[[], bool]) -> None:
    """Waits for a state of the pool or of a process."""
    async with asyncio.timeout(FAR):
        while not is_true():
            await asyncio.sleep(0.01)
