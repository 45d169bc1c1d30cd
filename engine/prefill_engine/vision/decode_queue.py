"""Images that wait for a decode worker: bounded, in order, but for large ones that wait for other large ones. No processes here.

Owned by DecodePool and used in its loop. The trap: a job whose caller is gone is still here until it is taken or dropped.
"""

import asyncio
from collections import deque
from dataclasses import dataclass

from prefill_engine.vision.image_intake import Intake, PixelPolicy
from prefill_engine.vision.plan import ImagePlan
from prefill_plan.errors import CapacityError


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedImage:
    """intake: header, size, plan. queued_seconds: before a worker took it. cpu_seconds: the worker's."""

    intake: Intake
    queued_seconds: float
    cpu_seconds: float

    @property
    def plan(self) -> ImagePlan:
        return self.intake.plan


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Job:
    """into: [height, width, 3] uint8 of the plan, flat, to be written. outcome: done once the caller needs no more of it."""

    data: bytes
    intake: Intake
    policy: PixelPolicy
    final: tuple[int, int] | None
    into: memoryview
    put_at: float
    outcome: "asyncio.Future[DecodedImage]"

    @property
    def is_wanted(self) -> bool:
        return not self.outcome.done()


class DecodeQueue:
    """Owner of the waiting jobs and of how many large ones are being decoded.

    max_waiting: images. large_pixels: images above it are large. max_large: of them at once.
    """

    def __init__(self, *, max_waiting: int, large_pixels: int, max_large: int) -> None:
        self._max_waiting = max_waiting
        self._large_pixels = large_pixels
        self._max_large = max_large
        self._waiting: deque[Job] = deque()
        self._taken: set[Job] = set()
        self._changed = asyncio.Event()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._taken)

    def put(self, job: Job, *, seconds_per_image: float) -> None:
        """Raises CapacityError, with the time after which it may fit, when as many wait as may."""
        if len(self._waiting) >= self._max_waiting:
            raise CapacityError(
                f"{len(self._waiting)} images wait to be decoded, limit {self._max_waiting}; not queued",
                reason="PATCH_QUEUE_FULL",
                retry_after_seconds=seconds_per_image * len(self._waiting),
            )
        self._waiting.append(job)
        self.wake()

    def take(self) -> Job | None:
        """The first job that may start now; give it back with `finish`."""
        has_room = sum(map(self._is_large, self._taken)) < self._max_large
        for job in self._waiting:
            if has_room or not self._is_large(job):
                self._waiting.remove(job)
                self._taken.add(job)
                return job
        return None

    def finish(self, job: Job) -> None:
        self._taken.remove(job)
        self.wake()

    def drop(self, job: Job) -> None:
        """Its caller is gone; one that was taken runs on."""
        if job in self._waiting:
            self._waiting.remove(job)

    def wake(self) -> None:
        """Makes whoever waits look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def changed(self) -> None:
        """Returns once a job was put or finished, or someone called `wake`."""
        await self._changed.wait()

    def _is_large(self, job: Job) -> bool:
        return job.intake.num_pixels > self._large_pixels
