"""Decode workers and the images they are given. Owned by the RPC process's service; lives in its loop (serving.md 4.1).

    decode() -> examine -> DecodeQueue -> a slot takes it: one worker process -> canvas copied into the caller's memory

A slot is a task that keeps one worker alive and gives it image after image. The traps: a worker that dies, hangs or talks
nonsense fails its image only, and the slot starts another; an image whose caller is gone is decoded to its end, since stopping it
would cost a worker, and its canvas is dropped: nothing is written into memory that may be someone else's by then.
"""

import asyncio
import logging
import signal
from contextlib import suppress
from dataclasses import dataclass, replace

from prefill_engine.vision.decode_messages import CanvasReady, DecodeJob, JobRejected
from prefill_engine.vision.decode_queue import DecodedImage, DecodeQueue, Job
from prefill_engine.vision.image_intake import PixelPolicy, examine
from prefill_engine.vision.worker_process import WORKER_MODULE, WorkerLost, WorkerProcess
from prefill_plan.errors import ConfigError, ExitCode, ImageRejected, PrefillError
from prefill_plan.model_parts import VisionSpec

logger = logging.getLogger(__name__)

_FIRST_BACKOFF_SECONDS, _MAX_BACKOFF_SECONDS = 0.5, 10.0
_GUESSED_SECONDS = 0.1
"""Of an image, until one was decoded: a screenshot on one core."""
_NEW_SAMPLE_SHARE = 0.1
_CRASHES = frozenset(
    -number for number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE, signal.SIGTRAP)
)


class DecodeTimeout(PrefillError):
    """The caller's deadline passed, or a worker gave no answer in time. Not the image's fault as far as one can tell."""

    code = "DECODE_TIMEOUT"
    retryable = True


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeLimits:
    """Limits of the pool; the numbers are serving.md 4.1 and 4.3's.

    worker_memory_bytes: address space of one worker; a webp of the largest size takes 1.2 GB, others up to 0.7 GB.
    image_wall_seconds: after which a worker is taken for hung; far above image_cpu_seconds, as cores may be busy.
    worker_rss_bytes: above it a worker is replaced after its image.
    """

    num_workers: int
    max_waiting: int
    large_pixels: int = 16_000_000
    max_large: int = 2
    image_cpu_seconds: float = 5.0
    image_wall_seconds: float = 20.0
    worker_memory_bytes: int = 2560 << 20
    worker_rss_bytes: int = 1 << 30
    worker_images: int = 1000
    start_seconds: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolCounters:
    """For metrics. Counts since the start; waiting, running, workers_ready and rss_bytes (of the worker heard last) are now.
    rejected includes slow (CPU limit) and crashed; lost includes hung."""

    decoded: int = 0
    rejected: int = 0
    slow: int = 0
    crashed: int = 0
    lost: int = 0
    hung: int = 0
    expired: int = 0
    recycled: int = 0
    workers_started: int = 0
    cpu_seconds: float = 0.0
    pixels: int = 0
    waiting: int = 0
    running: int = 0
    workers_ready: int = 0
    rss_bytes: int = 0


class DecodePool:
    """Owner of the workers and of the queue before them. Every method is for the loop it was started in."""

    def __init__(self, limits: DecodeLimits, spec: VisionSpec) -> None:
        self._limits = limits
        self._spec = spec
        self._queue = DecodeQueue(
            max_waiting=limits.max_waiting, large_pixels=limits.large_pixels, max_large=limits.max_large
        )
        self._workers: dict[int, WorkerProcess] = {}
        self._slots: list[asyncio.Task[None]] = []
        # Tasks of their own: a slot that is cancelled must not leave a worker half ended.
        self._endings: set[asyncio.Task[None]] = set()
        self._counters = PoolCounters()
        self._seconds_per_image = _GUESSED_SECONDS
        self._refusal: ConfigError | None = None

    async def start(self) -> None:
        """Starts the workers; returns when the first is ready.

        Raises:
            ConfigError: a worker refused to start (its reason is on standard error), or none was ready in time.
        """
        self._slots = [asyncio.create_task(self._run_slot(index)) for index in range(self._limits.num_workers)]
        try:
            async with asyncio.timeout(self._limits.start_seconds):
                while not self._workers:
                    await self._queue.changed()
                    if self._refusal is not None:
                        raise self._refusal
        except TimeoutError:
            await self.close()
            raise ConfigError(f"no decode worker was ready after {self._limits.start_seconds:g} s") from None
        except BaseException:
            await self.close()
            raise

    async def decode(
        self, data: bytes, *, policy: PixelPolicy, final: tuple[int, int] | None, into: memoryview, deadline: float
    ) -> DecodedImage:
        """Decodes one image into the caller's memory. May be cancelled at any time; nothing is written afterwards.

        Args:
            data: the encoded image. Of shared memory that another process may still write or cut, take a copy (os.pread).
            final: the size that the caller counted tokens for, or None.
            into: at least the plan's height x width x 3 bytes, writable; its beginning is written. plan_image gives the size
                beforehand; tokens bound it by canvas_bytes.
            deadline: of the loop's clock.

        Raises:
            ImageRejected: by its own fault, damaged, too large, too slow, or one that crashes the decoder.
            CapacityError: too many wait.
            DecodeTimeout: the deadline passed, or its worker hung and was killed.
            WorkerLost: its worker was killed.
            ValueError: `into` is too small.
        """
        try:
            intake = examine(data, policy=policy, final=final, spec=self._spec)
        except ImageRejected:
            self._count(rejected=1)
            raise
        num_bytes = intake.plan.width * intake.plan.height * 3
        if len(into) < num_bytes:
            raise ValueError(f"room for {len(into)} bytes, the canvas has {num_bytes}")
        loop = asyncio.get_running_loop()
        job = Job(
            data=data,
            intake=intake,
            policy=policy,
            final=final,
            into=into[:num_bytes],
            put_at=loop.time(),
            outcome=loop.create_future(),
        )
        self._queue.put(job, seconds_per_image=self._seconds_per_image / self._limits.num_workers)
        try:
            async with asyncio.timeout_at(deadline):
                return await job.outcome
        except TimeoutError:
            self._count(expired=1)
            waited = loop.time() - job.put_at
            raise DecodeTimeout(f"image of {len(data)} bytes was not decoded in the {waited:.3f} s it had") from None
        finally:
            self._queue.drop(job)

    def counters(self) -> PoolCounters:
        return replace(
            self._counters,
            waiting=self._queue.num_waiting,
            running=self._queue.num_running,
            workers_ready=len(self._workers),
        )

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Of the workers that are ready."""
        return tuple(worker.pid for worker in self._workers.values())

    async def close(self) -> None:
        """Ends the workers; images still here fail with WorkerLost."""
        for slot in self._slots:
            slot.cancel()
        await asyncio.gather(*self._slots, return_exceptions=True)
        self._slots = []
        await asyncio.gather(*self._endings)
        while (job := self._queue.take()) is not None:
            self._fail(job, WorkerLost("the decode pool was closed before the image was decoded", exit_code=None))
            self._queue.finish(job)

    async def _run_slot(self, index: int) -> None:
        backoff = _FIRST_BACKOFF_SECONDS
        while True:
            try:
                worker = await self._start_worker()
            except (OSError, WorkerLost, TimeoutError) as error:
                logger.warning("decode worker did not start", extra={"slot": index, "detail": str(error)})
                if isinstance(error, WorkerLost) and error.exit_code == ExitCode.CONFIG:
                    self._refusal = ConfigError("decode workers refuse to start; the reason is on standard error")
                    self._queue.wake()
                await asyncio.sleep(backoff)
                backoff = min(2 * backoff, _MAX_BACKOFF_SECONDS)
                continue
            backoff = _FIRST_BACKOFF_SECONDS
            self._workers[index] = worker
            self._queue.wake()
            try:
                await self._use(worker)
            # A fault of ours, or no memory for the image: its caller was told, and the others' images go on.
            except Exception:
                logger.exception("fault of a decode slot")
                self._count(lost=1)
            finally:
                del self._workers[index]
                self._end(worker)

    async def _start_worker(self) -> WorkerProcess:
        limits = self._limits
        worker = WorkerProcess(
            self._spec,
            module=WORKER_MODULE,
            memory_bytes=limits.worker_memory_bytes,
            image_cpu_seconds=limits.image_cpu_seconds,
        )
        try:
            async with asyncio.timeout(limits.start_seconds):
                ready = await worker.ready()
        except BaseException:
            self._end(worker)
            raise
        worker.on_end(self._queue.wake)
        self._count(workers_started=1)
        extra = {"worker_pid": worker.pid, "enforced": ",".join(ready.enforced), "pillow": ready.pillow}
        logger.info("decode worker ready", extra=extra)
        return worker

    def _end(self, worker: WorkerProcess) -> None:
        ending = asyncio.create_task(worker.end())
        self._endings.add(ending)
        ending.add_done_callback(self._endings.discard)

    async def _use(self, worker: WorkerProcess) -> None:
        """Gives it images until it has ended or is worn."""
        for _ in range(self._limits.worker_images):
            job = await self._take(worker)
            if job is None:
                logger.warning("idle decode worker ended", extra={"exit_code": await worker.wait()})
                self._count(lost=1)
                return
            try:
                if not await self._serve(worker, job):
                    return
            finally:
                self._fail(job, WorkerLost("the decoder stopped while it had the image", exit_code=None))
                self._queue.finish(job)
        self._count(recycled=1)

    async def _take(self, worker: WorkerProcess) -> Job | None:
        """The next job; None if the worker ended before there was one."""
        while not worker.has_ended:
            job = self._queue.take()
            if job is not None:
                return job
            await self._queue.changed()
        return None

    async def _serve(self, worker: WorkerProcess, job: Job) -> bool:
        """Decodes one image; False if the worker should not get another."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            async with asyncio.timeout(self._limits.image_wall_seconds):
                order = DecodeJob(num_bytes=len(job.data), policy=job.policy, final=job.final)
                message = await worker.decode(job.data, order)
                if isinstance(message, CanvasReady):
                    await self._deliver(worker, job, message, queued_seconds=started - job.put_at)
                else:
                    self._count(rejected=1)
                    self._fail(job, ImageRejected(message.message, reason=message.reason))
        except TimeoutError:
            self._count(lost=1, hung=1)
            text = f"a decoder gave no answer within {self._limits.image_wall_seconds:g} s and was killed; not decoded"
            self._fail(job, DecodeTimeout(text))
            self._log_lost(job, "hung")
            return False
        except WorkerLost as error:
            self._blame(job, error)
            return False
        spent = loop.time() - started
        self._seconds_per_image += _NEW_SAMPLE_SHARE * (spent - self._seconds_per_image)
        self._counters = replace(self._counters, rss_bytes=message.rss_bytes)
        is_worn = message.rss_bytes > self._limits.worker_rss_bytes or (
            isinstance(message, JobRejected) and message.is_worn
        )
        self._count(recycled=int(is_worn))
        return not is_worn

    async def _deliver(self, worker: WorkerProcess, job: Job, message: CanvasReady, *, queued_seconds: float) -> None:
        plan = job.intake.plan
        if (message.width, message.height) != (plan.width, plan.height):
            raise WorkerLost(
                f"a decoder made {message.width}x{message.height} pixels of a plan of {plan.width}x{plan.height}",
                exit_code=None,
            )
        self._count(decoded=1, cpu_seconds=message.cpu_seconds, pixels=job.intake.num_pixels)
        if await worker.read_canvas(job.into, is_wanted=lambda: job.is_wanted):
            image = DecodedImage(intake=job.intake, queued_seconds=queued_seconds, cpu_seconds=message.cpu_seconds)
            job.outcome.set_result(image)

    def _blame(self, job: Job, error: WorkerLost) -> None:
        """Decides whose fault the end of a worker was: signals of a limit or of a crash are the image's."""
        header, code = job.intake.header, error.exit_code
        name = f"{header.format} of {header.width}x{header.height} pixels"
        if code == -signal.SIGPROF:
            self._count(rejected=1, slow=1)
            limit = self._limits.image_cpu_seconds
            self._fail(job, ImageRejected(f"{name} takes more than {limit:g} s of CPU; not encoded"))
        elif code in _CRASHES:
            self._count(rejected=1, crashed=1)
            self._fail(
                job, ImageRejected(f"{name} is damaged: the decoder ends on it ({_signal_name(code)}); not encoded")
            )
        else:
            self._count(lost=1)
            self._fail(job, error)
        self._log_lost(job, str(code))

    def _log_lost(self, job: Job, detail: str) -> None:
        header = job.intake.header
        extra = {"format": header.format, "width": header.width, "height": header.height, "detail": detail}
        logger.warning("decode worker lost with an image", extra=extra)

    def _fail(self, job: Job, error: PrefillError) -> None:
        if job.is_wanted:
            job.outcome.set_exception(error)

    def _count(self, **more: float) -> None:
        now = self._counters
        self._counters = replace(now, **{name: getattr(now, name) + value for name, value in more.items()})


def _signal_name(exit_code: int | None) -> str:
    with suppress(ValueError):
        return signal.Signals(-(exit_code or 0)).name
    return str(exit_code)
