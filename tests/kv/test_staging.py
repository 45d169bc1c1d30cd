"""Windows of registered memory: who gets one, who waits, and what a transfer that nobody can stop costs."""

import asyncio
import time

import pytest

from prefill_engine.kv.transport.staging import (
    IDLE_QUARANTINE_SECONDS,
    Staging,
    StagingState,
    Window,
    is_full_of_quarantine,
    may_recycle,
)
from prefill_testing.in_loop import in_loop

LONG = IDLE_QUARANTINE_SECONDS


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def staging(num_windows: int, *, clock: Clock | None = None) -> Staging:
    made = Staging(num_bytes=num_windows * 16 + 15, window_bytes=16)
    made.clock = clock or time.monotonic
    return made


def take_all(made: Staging) -> list[Window]:
    windows = []
    while (window := made.take_now(1)) is not None:
        windows.append(window)
    return windows


@pytest.mark.parametrize(
    ("num_windows", "held", "quarantined", "oldest", "expected"),
    [
        (64, 0, 0, 0.0, (False, False)),
        (64, 5, 15, 99.0, (False, False)),
        (64, 0, 15, LONG - 0.1, (False, False)),
        (64, 0, 1, LONG, (False, True)),
        (64, 1, 16, 99.0, (True, False)),
        (64, 0, 16, 0.0, (True, True)),
        (1, 0, 1, 0.0, (True, True)),
        (7, 0, 1, 0.0, (True, True)),
        (8, 0, 1, 0.0, (False, False)),
    ],
)
def test_an_agent_is_destroyed_for_quarantined_windows_only_when_it_fails_nobody(
    num_windows: int, held: int, quarantined: int, oldest: float, expected: tuple[bool, bool]
) -> None:
    state = StagingState(num_windows=num_windows, held=held, quarantined=quarantined, oldest_seconds=oldest)
    assert (is_full_of_quarantine(state), may_recycle(state)) == expected


def test_windows_do_not_overlap_and_cover_the_memory() -> None:
    made = staging(3)
    windows = take_all(made)
    for number, window in enumerate(windows):
        window.fill(memoryview(bytes([number + 1]) * 16))
    assert sorted(bytes(made.memory[start : start + 16]) for start in (0, 16, 32)) == [
        bytes([number]) * 16 for number in (1, 2, 3)
    ]
    assert (len(windows), len(made.memory)) == (3, 48)


def test_a_thing_that_is_longer_than_a_window_gets_none() -> None:
    made = staging(2)
    assert made.take_now(17) is None
    window = made.take_now(16)
    assert window is not None
    assert bytes(window.fill(memoryview(b"short"))) == b"short"


def test_staging_without_room_for_a_window_is_our_own_mistake() -> None:
    with pytest.raises(ValueError, match="expected at least one window of 16"):
        Staging(num_bytes=15, window_bytes=16)


def test_quarantined_windows_are_given_to_nobody_and_their_age_is_told() -> None:
    clock = Clock()
    made = staging(8, clock=clock)
    first, second = take_all(made)[:2]
    made.quarantine(first)
    clock.now = 3.0
    made.quarantine(second)
    assert made.state == StagingState(num_windows=8, held=6, quarantined=2, oldest_seconds=3.0)
    assert made.quarantined() == [first, second]
    made.give_back(first)
    assert made.take_now(1) is first


@in_loop
async def test_those_who_wait_are_served_in_turn() -> None:
    made = staging(1)
    held = made.take_now(1)
    assert held is not None
    order: list[int] = []

    async def taker(number: int) -> None:
        window = await made.take(1, seconds=30.0)
        assert window is not None
        order.append(number)
        made.give_back(window)

    takers = [asyncio.create_task(taker(number)) for number in range(3)]
    await asyncio.sleep(0)
    assert made.take_now(1) is None
    made.give_back(held)
    assert made.take_now(1) is None, "overtook those who wait"
    await asyncio.gather(*takers)
    assert (order, made.state.held) == ([0, 1, 2], 0)


@in_loop
async def test_those_who_waited_too_long_or_were_cancelled_leave_nothing_behind() -> None:
    made = staging(1)
    held = made.take_now(1)
    assert held is not None
    assert await made.take(1, seconds=0.01) is None
    waiting = asyncio.create_task(made.take(1, seconds=30.0))
    await asyncio.sleep(0)
    made.give_back(held)  # the window is the task's now, and it never gets to know
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert made.take_now(1) is held


@in_loop
async def test_while_a_quarter_is_quarantined_nobody_gets_a_window_or_waits_for_one() -> None:
    made = staging(4)
    lost, held, free = take_all(made)[:3]
    made.quarantine(lost)
    made.give_back(free)
    assert made.take_now(1) is None
    assert await made.take(1, seconds=30.0) is None
    made.give_back(held)
    made.give_back(lost)
    assert await made.take(1, seconds=30.0) is not None
