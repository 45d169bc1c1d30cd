"""prefill_operator.work_queue: deduplication, exclusivity, wake-ups, back-off."""

import asyncio

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from prefill_operator.work_queue import WorkQueue
from prefill_testing.in_loop import in_loop


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


async def _take_all(queue: WorkQueue[str]) -> list[str]:
    """Everything that is due now; nothing is given back."""
    queue.release_due()
    return [await queue.take() for _ in range(queue.depth)]


@in_loop
async def test_key_added_twice_comes_once() -> None:
    queue = WorkQueue[str](clock=Clock())
    for key in ("a", "b", "a"):
        queue.add(key)

    assert await _take_all(queue) == ["a", "b"]


@in_loop
async def test_key_added_while_held_comes_again_after_it_was_given_back() -> None:
    queue = WorkQueue[str](clock=Clock())
    queue.add("a")
    held = await queue.take()
    queue.add("a")
    queue.release_due()
    assert not queue._ready

    queue.finish(held)

    assert await _take_all(queue) == ["a"]


@in_loop
async def test_later_wake_up_replaces_the_one_before() -> None:
    clock = Clock()
    queue = WorkQueue[str](clock=clock)
    queue.wake_after("a", 5.0)
    queue.wake_after("a", 10.0)

    clock.now = 6.0
    assert await _take_all(queue) == []
    clock.now = 10.0
    assert await _take_all(queue) == ["a"]


@in_loop
async def test_cancelled_wake_up_never_comes() -> None:
    clock = Clock()
    queue = WorkQueue[str](clock=clock)
    queue.wake_after("a", 5.0)
    queue.wake_after("a", None)
    clock.now = 100.0

    assert await _take_all(queue) == []


@in_loop
async def test_back_off_doubles_to_a_minute_and_ends_with_success() -> None:
    clock = Clock()
    queue = WorkQueue[str](clock=clock)
    pauses = []
    for _ in range(9):
        queue.add("a")
        pauses.append(queue.retry(await queue.take()))
    queue.add("a")
    queue.finish(await queue.take())
    queue.add("a")
    pauses.append(queue.retry(await queue.take()))

    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0, 1.0]


@in_loop
async def test_server_may_ask_for_a_longer_pause() -> None:
    queue = WorkQueue[str](clock=Clock())
    queue.add("a")

    assert queue.retry(await queue.take(), after=30.0) == 30.0


@in_loop
async def test_event_lets_a_failed_key_in_at_once() -> None:
    queue = WorkQueue[str](clock=Clock())
    queue.add("a")
    queue.retry(await queue.take())
    queue.add("a")

    assert await _take_all(queue) == ["a"]


@in_loop
async def test_take_waits_for_the_earliest_wake_up() -> None:
    queue = WorkQueue[str]()
    queue.wake_after("late", 30.0)
    taking = asyncio.create_task(queue.take())
    await asyncio.sleep(0)
    queue.wake_after("soon", 0.01)

    assert await taking == "soon"


@in_loop
async def test_age_and_depth_tell_of_waiting_keys() -> None:
    clock = Clock()
    queue = WorkQueue[str](clock=clock)
    assert (queue.depth, queue.oldest_seconds, queue.is_idle) == (0, 0.0, True)
    queue.add("a")
    clock.now = 3.0
    queue.add("b")
    clock.now = 5.0

    assert (queue.depth, queue.oldest_seconds) == (2, 5.0)
    await queue.take()
    assert (queue.depth, queue.oldest_seconds, queue.is_idle) == (1, 2.0, False)


@in_loop
async def test_replaced_wake_ups_do_not_pile_up() -> None:
    queue = WorkQueue[str](clock=Clock())
    for seconds in range(10_000):
        queue.wake_after("a", 1_000.0 + seconds)
        queue.release_due()

    assert len(queue._heap) < 200


class QueueMachine(RuleBasedStateMachine):
    """Against a plain model: which keys must still come, and which are out with a worker."""

    keys = st.sampled_from("abcd")

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.loop = asyncio.new_event_loop()
        self.queue = WorkQueue[str](clock=self.clock)
        self.held: set[str] = set()
        self.wanted: set[str] = set()
        self.wakeups: dict[str, float] = {}

    def teardown(self) -> None:
        self.loop.close()

    @rule(key=keys)
    def add(self, key: str) -> None:
        self.queue.add(key)
        self.wanted.add(key)

    @rule(key=keys, seconds=st.one_of(st.none(), st.integers(1, 5)))
    def wake(self, key: str, seconds: int | None) -> None:
        self.queue.wake_after(key, seconds)
        self.wakeups.pop(key, None)
        if seconds is not None:
            self.wakeups[key] = self.clock.now + seconds

    @rule(seconds=st.integers(1, 3))
    def pass_time(self, seconds: int) -> None:
        self.clock.now += seconds
        due = {key for key, when in self.wakeups.items() if when <= self.clock.now}
        self.wanted |= due
        self.wakeups = {key: when for key, when in self.wakeups.items() if key not in due}
        self.queue.release_due()

    @rule()
    def take(self) -> None:
        if self.wanted - self.held:
            key = self.loop.run_until_complete(self.queue.take())
            assert key in self.wanted, "taken without a reason"
            assert key not in self.held, "held by two workers"
            self.wanted.discard(key)
            self.held.add(key)

    @rule(key=keys)
    def give_back(self, key: str) -> None:
        if key in self.held:
            self.queue.finish(key)
            self.held.discard(key)

    @invariant()
    def depth_counts_what_waits(self) -> None:
        assert self.queue.depth == len(self.wanted)


TestQueue = QueueMachine.TestCase
TestQueue.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
