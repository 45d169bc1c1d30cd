"""The decode pool in its daily work: canvases, refusals, bounds, deadlines, callers that leave, workers that wear out."""

import asyncio
import os
import resource
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from prefill_engine.vision.worker_pool import DecodeTimeout
from prefill_engine.vision.worker_process import WorkerLost
from prefill_plan.errors import CapacityError, ImageRejected
from prefill_testing.decode_scene import (
    LIMITS,
    POISON,
    ROOM,
    SMALL,
    SMALL_CANVAS,
    decode,
    running_pool,
    until,
)
from prefill_testing.encoded_images import encode_image
from prefill_testing.in_loop import in_loop


@in_loop
async def test_canvas_lands_in_the_callers_memory() -> None:
    async with running_pool() as pool:
        into = bytearray([POISON]) * ROOM
        image = await decode(pool, into=into)
        plan = image.plan
        size = plan.width * plan.height * 3
        made = np.frombuffer(into, np.uint8, size).reshape(plan.height, plan.width, 3)
        assert np.array_equal(made, SMALL_CANVAS)
        assert set(into[size:]) == {POISON}
        assert image.cpu_seconds > 0
        counters = pool.counters()
        assert (counters.decoded, counters.pixels, counters.workers_ready) == (1, 50 * 60, 1)
        assert 0 < counters.rss_bytes < 300 << 20


@in_loop
async def test_refusals_come_from_the_header_or_from_the_worker() -> None:
    async with running_pool() as pool:
        with pytest.raises(ImageRejected, match="no image of a known format"):
            await decode(pool, b"nothing")
        with pytest.raises(ImageRejected, match="png of 50x60 pixels is damaged"):
            await decode(pool, SMALL[:-100])
        await decode(pool)
        counters = pool.counters()
        assert (counters.rejected, counters.decoded, counters.lost, counters.workers_started) == (2, 1, 0, 1)


@in_loop
async def test_too_little_room_is_the_callers_mistake() -> None:
    async with running_pool() as pool:
        with pytest.raises(ValueError, match="room for 10 bytes"):
            await decode(pool, into=bytearray(10))


@in_loop
async def test_workers_are_replaced_after_their_share_of_images() -> None:
    async with running_pool(replace(LIMITS, worker_images=3)) as pool:
        await asyncio.gather(*(decode(pool) for _ in range(10)))
        counters = pool.counters()
        assert (counters.decoded, counters.recycled, counters.lost) == (10, 3, 0)


@in_loop
async def test_workers_that_grew_are_replaced() -> None:
    async with running_pool(replace(LIMITS, worker_rss_bytes=1 << 20)) as pool:
        await asyncio.gather(*(decode(pool) for _ in range(2)))
        assert pool.counters().recycled == 2


@in_loop
async def test_images_beyond_the_queue_are_refused_at_once() -> None:
    async with running_pool(replace(LIMITS, max_waiting=2)) as pool:
        (pid,) = pool.worker_pids
        os.kill(pid, signal.SIGSTOP)
        tasks = [asyncio.create_task(decode(pool))]
        await until(lambda: pool.counters().running == 1)
        tasks += [asyncio.create_task(decode(pool)) for _ in range(2)]
        await until(lambda: pool.counters().waiting == 2)
        with pytest.raises(CapacityError, match="2 images wait"):
            await decode(pool)
        os.kill(pid, signal.SIGCONT)
        await asyncio.gather(*tasks)


@in_loop
async def test_a_deadline_costs_the_caller_its_image_and_not_the_worker() -> None:
    async with running_pool() as pool:
        pids = pool.worker_pids
        os.kill(pids[0], signal.SIGSTOP)
        into = bytearray([POISON]) * ROOM
        running = asyncio.create_task(decode(pool, into=into, seconds=0.3))
        await until(lambda: pool.counters().running == 1)
        with pytest.raises(DecodeTimeout, match="was not decoded in the"):
            await decode(pool, seconds=0.1)
        with pytest.raises(DecodeTimeout):
            await running
        os.kill(pids[0], signal.SIGCONT)
        await decode(pool)
        assert set(into) == {POISON}
        counters = pool.counters()
        assert pool.worker_pids == pids
        assert (counters.expired, counters.lost, counters.waiting) == (2, 0, 0)


@in_loop
async def test_cancelled_images_are_dropped_and_nothing_is_written() -> None:
    async with running_pool() as pool:
        pids = pool.worker_pids
        os.kill(pids[0], signal.SIGSTOP)
        into = [bytearray([POISON]) * ROOM for _ in range(3)]
        tasks = [asyncio.create_task(decode(pool, into=each)) for each in into]
        await until(lambda: pool.counters().running == 1)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert all(task.cancelled() for task in tasks)
        assert pool.counters().waiting == 0
        os.kill(pids[0], signal.SIGCONT)
        await decode(pool)
        assert [set(each) for each in into] == [{POISON}] * 3
        assert pool.worker_pids == pids
        # The one at work was decoded to its end, the two that waited never began.
        assert pool.counters().decoded == 2


@in_loop
async def test_closing_tells_every_caller_and_leaves_no_process() -> None:
    async with running_pool() as pool:
        pids = pool.worker_pids
        os.kill(pids[0], signal.SIGSTOP)
        tasks = [asyncio.create_task(decode(pool)) for _ in range(3)]
        await until(lambda: pool.counters().running == 1)
        await pool.close()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(each) for each in outcomes] == [WorkerLost] * 3
        assert not Path(f"/proc/{pids[0]}").exists()


def test_a_pool_gives_back_every_descriptor() -> None:
    async def scene() -> None:
        async with running_pool() as pool:
            await decode(pool)

    asyncio.run(scene())
    before = sorted(os.listdir("/proc/self/fd"))
    asyncio.run(scene())
    assert sorted(os.listdir("/proc/self/fd")) == before


@in_loop
async def test_workers_are_confined_and_know_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGISTRY_PASSWORD", "hunter2")

    async with running_pool() as pool:
        process = Path(f"/proc/{pool.worker_pids[0]}")
        status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
        assert (status["NoNewPrivs"].strip(), status["Seccomp"].strip(), status["Threads"].strip()) == (
            "1",
            "2",
            "1",
        )
        assert b"hunter2" not in (process / "environ").read_bytes()
        limit, _ = resource.prlimit(pool.worker_pids[0], resource.RLIMIT_AS)
        assert limit == LIMITS.worker_memory_bytes
        # Standard streams, its socket, its memory file, its own statm.
        assert len(os.listdir(process / "fd")) == 6


@pytest.mark.slow
@in_loop
async def test_the_hungriest_image_within_the_limits_fits_a_worker() -> None:
    """A webp of the largest size; the others take less (DecodeLimits)."""
    data = encode_image(Image.new("RGBA", (8192, 8192), (1, 2, 3, 4)), "WEBP", lossless=True, quality=0, method=0)
    async with running_pool(replace(LIMITS, image_wall_seconds=60.0)) as pool:
        await decode(pool, data)
        counters = pool.counters()
        assert (counters.decoded, counters.recycled, counters.lost) == (1, 0, 0)
        assert counters.rss_bytes < 300 << 20
