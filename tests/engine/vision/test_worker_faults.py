"""Decode workers killed, hung, slow, hungry and lying: each costs its image and nobody else's."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from prefill_engine.vision.decode_messages import CanvasReady, DecodeJob
from prefill_engine.vision.image_intake import DEFAULT_POLICY
from prefill_engine.vision.worker_pool import DecodePool, DecodeTimeout
from prefill_engine.vision.worker_process import WORKER_MODULE, WorkerLost, WorkerProcess
from prefill_plan.errors import ConfigError, ImageRejected
from prefill_testing.decode_scene import (
    LIMITS,
    decode,
    running_pool,
    until,
)
from prefill_testing.encoded_images import RELEASE_SPEC, SMALL_SPEC, encode_image, noise
from prefill_testing.in_loop import in_loop

LARGE = encode_image(Image.new("RGB", (5000, 5000)), "PNG")


@in_loop
async def test_a_killed_worker_fails_its_image_only() -> None:
    async with running_pool() as pool:
        (pid,) = pool.worker_pids
        os.kill(pid, signal.SIGSTOP)
        hit = asyncio.create_task(decode(pool))
        await until(lambda: pool.counters().running == 1)
        others = [asyncio.create_task(decode(pool)) for _ in range(5)]
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerLost, match="ended with code -9") as caught:
            await hit
        assert caught.value.exit_code == -9
        await asyncio.gather(*others)
        counters = pool.counters()
        assert (counters.lost, counters.decoded, counters.workers_started) == (1, 5, 2)


@in_loop
async def test_a_worker_killed_while_idle_fails_no_image() -> None:
    async with running_pool() as pool:
        await decode(pool)
        (pid,) = pool.worker_pids
        os.kill(pid, signal.SIGKILL)
        await until(lambda: pool.counters().workers_started == 2)
        await decode(pool)
        assert pool.worker_pids != (pid,)
        assert pool.counters().lost == 1


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT], ids=lambda number: number.name)
@in_loop
async def test_an_image_the_decoder_crashes_on_is_refused(number: signal.Signals) -> None:
    async with running_pool() as pool:
        (pid,) = pool.worker_pids
        os.kill(pid, signal.SIGSTOP)
        hit = asyncio.create_task(decode(pool))
        await until(lambda: pool.counters().running == 1)
        os.kill(pid, number)
        os.kill(pid, signal.SIGCONT)
        with pytest.raises(ImageRejected, match=f"the decoder ends on it .{number.name}."):
            await hit
        await decode(pool)
        assert pool.counters().crashed == 1


@in_loop
async def test_a_hung_worker_is_killed_and_fails_its_image_only() -> None:
    async with running_pool(replace(LIMITS, image_wall_seconds=1.0)) as pool:
        (pid,) = pool.worker_pids
        os.kill(pid, signal.SIGSTOP)
        hit = asyncio.create_task(decode(pool))
        await until(lambda: pool.counters().running == 1)
        other = asyncio.create_task(decode(pool))
        with pytest.raises(DecodeTimeout, match="no answer within 1 s and was killed"):
            await hit
        await other
        await until(lambda: not Path(f"/proc/{pid}").exists())
        assert (pool.counters().hung, pool.counters().lost) == (1, 1)


@in_loop
async def test_an_image_that_takes_too_much_cpu_is_refused() -> None:
    async with running_pool(replace(LIMITS, image_cpu_seconds=0.03)) as pool:
        with pytest.raises(ImageRejected, match=r"png of 5000x5000 pixels takes more than 0\.03 s of CPU"):
            await decode(pool, LARGE)
        await decode(pool)
        counters = pool.counters()
        assert (counters.slow, counters.rejected, counters.lost, counters.workers_started) == (1, 1, 0, 2)


@in_loop
async def test_an_image_that_takes_too_much_memory_is_refused() -> None:
    async with running_pool(replace(LIMITS, worker_memory_bytes=130 << 20)) as pool:
        with pytest.raises(ImageRejected, match="needs more than the 130 MiB a decoder has"):
            await decode(pool, LARGE)
        await decode(pool)
        assert pool.counters().recycled == 1


@in_loop
async def test_workers_that_cannot_start_are_a_configuration_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")

    pool = DecodePool(replace(LIMITS, start_seconds=1.0), SMALL_SPEC)
    with pytest.raises(ConfigError, match="no decode worker was ready after 1 s"):
        await pool.start()


@asynccontextmanager
async def running_worker(module: str) -> AsyncIterator[WorkerProcess]:
    worker = WorkerProcess(RELEASE_SPEC, module=module, memory_bytes=2 << 30, image_cpu_seconds=5.0)
    try:
        await worker.ready()
        yield worker
    finally:
        await worker.end()


async def decode_and_copy(worker: WorkerProcess, data: bytes) -> None:
    await worker.decode(data, DecodeJob(num_bytes=len(data), policy=DEFAULT_POLICY, final=None))
    await worker.read_canvas(memoryview(bytearray(3)), is_wanted=lambda: True)


@pytest.mark.parametrize("lie", [b"garbage", b"ready again", b"no canvas", b"hang up"], ids=bytes.decode)
@in_loop
async def test_a_lying_worker_is_ended(lie: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefill_engine.vision.worker_process._END_SECONDS", 0.5)

    async with running_worker("prefill_testing.lying_worker") as worker:
        with pytest.raises(WorkerLost, match="broke the protocol"):
            await decode_and_copy(worker, lie)
        assert await worker.wait() == -signal.SIGKILL


@in_loop
async def test_copying_stops_when_the_caller_leaves() -> None:
    data = encode_image(noise(1280, 720), "JPEG")

    async with running_worker(WORKER_MODULE) as worker:
        answer = await worker.decode(data, DecodeJob(num_bytes=len(data), policy=DEFAULT_POLICY, final=None))
        assert isinstance(answer, CanvasReady)
        into = bytearray(answer.width * answer.height * 3)
        wanted = iter([True, False])
        assert not await worker.read_canvas(memoryview(into), is_wanted=lambda: next(wanted))
        assert any(into[: 1 << 20])
        assert not any(into[1 << 20 :])


ABANDON = """
import asyncio, os, signal
from prefill_testing.decode_scene import running_pool

async def main():
    async with running_pool() as pool:
        print(*pool.worker_pids, flush=True)
        os.kill(pool.worker_pids[0], signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


@in_loop
async def test_no_worker_outlives_its_pool_however_that_ends() -> None:
    done = subprocess.run([sys.executable, "-c", ABANDON], stdout=subprocess.PIPE, check=False)
    assert done.returncode == -signal.SIGKILL
    await until(lambda: is_gone(int(done.stdout)))


def is_gone(pid: int) -> bool:
    """Ended; whoever adopted it may take a while to reap it."""
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
