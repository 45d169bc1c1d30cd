"""Order, bound and the rule for large images, without processes."""

import asyncio

import pytest

from prefill_engine.vision.decode_queue import DecodeQueue, Job
from prefill_engine.vision.image_header import ImageHeader
from prefill_engine.vision.image_intake import DEFAULT_POLICY, Intake
from prefill_engine.vision.plan import plan_image
from prefill_plan.errors import CapacityError
from prefill_testing.encoded_images import RELEASE_SPEC
from prefill_testing.in_loop import in_loop


def job(side: int, *, loop: asyncio.AbstractEventLoop) -> Job:
    header = ImageHeader(
        format="png", width=side, height=side, bits=8, is_animated=False, exif_orientation=1, box=(0, 0, side, side)
    )
    intake = Intake(header=header, width=side, height=side, plan=plan_image(side, side, RELEASE_SPEC))
    return Job(
        data=b"",
        intake=intake,
        policy=DEFAULT_POLICY,
        final=None,
        into=memoryview(b""),
        put_at=0.0,
        outcome=loop.create_future(),
    )


async def queue_of(*sides: int, max_waiting: int = 100) -> tuple[DecodeQueue, list[Job]]:
    queue = DecodeQueue(max_waiting=max_waiting, large_pixels=1000 * 1000, max_large=2)
    jobs = [job(side, loop=asyncio.get_running_loop()) for side in sides]
    for each in jobs:
        queue.put(each, seconds_per_image=0.5)
    return queue, jobs


def test_large_images_wait_for_large_ones_and_hold_up_nobody_else() -> None:
    async def scene() -> list[int | None]:
        queue, (first, *_) = await queue_of(2000, 10, 2000, 2000, 20, 1000, 3000)
        taken = [queue.take() for _ in range(6)]
        queue.finish(first)
        taken += [queue.take(), queue.take()]
        return [each.intake.width if each else None for each in taken]

    assert asyncio.run(scene()) == [2000, 10, 2000, 20, 1000, None, 2000, None]


@in_loop
async def test_bound_is_told_with_the_time_to_wait() -> None:
    queue, (first, _) = await queue_of(10, 10, max_waiting=2)
    with pytest.raises(CapacityError, match="2 images wait to be decoded, limit 2") as caught:
        queue.put(first, seconds_per_image=0.5)
    assert caught.value.reason == "PATCH_QUEUE_FULL"
    assert caught.value.details["retry_after_seconds"] == 1.0
    queue.take()
    queue.put(first, seconds_per_image=0.5)


@in_loop
async def test_dropped_images_are_never_taken_and_make_room() -> None:
    queue, (first, second) = await queue_of(10, 20, max_waiting=2)
    queue.drop(first)
    queue.drop(first)
    assert queue.num_waiting == 1
    assert queue.take() is second
    queue.drop(second)
    assert queue.num_running == 1


@in_loop
async def test_whoever_waits_looks_again_after_every_change() -> None:
    queue, (first, _) = await queue_of(10, 10)
    queue.take()
    waiting = [asyncio.create_task(queue.changed()) for _ in range(3)]
    await asyncio.sleep(0)
    assert not any(each.done() for each in waiting)
    queue.finish(first)
    await asyncio.wait_for(asyncio.gather(*waiting), 5.0)
