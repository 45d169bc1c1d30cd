"""Room for rows: first come, first served, nothing lost on any way out."""

import asyncio
import time
from collections.abc import Iterator

import pytest

from prefill_engine.vision.slab import Slab
from prefill_engine.vision_client.slab_room import SlabRoom
from prefill_testing.in_loop import in_loop

PAGE = 4096


@pytest.fixture
def slab() -> Iterator[Slab]:
    slab = Slab("test-room", 4 * PAGE, key="test")
    yield slab
    slab.close()


def room_of(slab: Slab, *, patience_seconds: float = 30.0) -> SlabRoom:
    return SlabRoom(slab, patience_seconds=patience_seconds, clock=time.monotonic)


@in_loop
async def test_large_image_is_not_overtaken_by_small_ones_behind_it(slab: Slab) -> None:
    room = room_of(slab)
    first = await room.reserve(3 * PAGE)
    large = asyncio.create_task(room.reserve(4 * PAGE))
    small = asyncio.create_task(room.reserve(PAGE))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not small.done()
    room.free(first)
    room.free(await large)
    room.free(await small)
    assert slab.used_bytes == 0


@in_loop
async def test_waiter_that_is_cancelled_makes_room_for_the_next(slab: Slab) -> None:
    room = room_of(slab)
    first = await room.reserve(3 * PAGE)
    large = asyncio.create_task(room.reserve(4 * PAGE))
    small = asyncio.create_task(room.reserve(PAGE))
    await asyncio.sleep(0)
    large.cancel()
    room.free(await small)
    room.free(first)
    assert slab.used_bytes == 0


@in_loop
async def test_waiter_cancelled_after_the_grant_gives_the_region_back(slab: Slab) -> None:
    room = room_of(slab)
    first = await room.reserve(4 * PAGE)
    waiter = asyncio.create_task(room.reserve(4 * PAGE))
    await asyncio.sleep(0)
    room.free(first)
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert slab.used_bytes == 0


@in_loop
async def test_wait_in_which_nothing_moves_ends(slab: Slab) -> None:
    room = room_of(slab, patience_seconds=0.05)
    region = await room.reserve(4 * PAGE)
    with pytest.raises(TimeoutError, match="no room for 4096 bytes"):
        await room.reserve(PAGE)
    room.free(region)
    room.free(await room.reserve(4 * PAGE))


@in_loop
async def test_more_than_the_whole_slab_is_refused_at_once(slab: Slab) -> None:
    with pytest.raises(ValueError, match=r"vision\.rows_bytes"):
        await room_of(slab).reserve(5 * PAGE)
