"""A nixl transport destroys an agent to end what a vanished peer began: what that frees, and what else it must leave alone.

On a fake of NIXL's library with UCX's habits, where transfers and the ends of agents can be held; nothing here depends on time.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field

import pytest

from prefill_engine.kv.transport.contract import PullOutcome, PullState, Source
from prefill_engine.kv.transport.frame import Frame, Op, encode
from prefill_engine.kv.transport.nixl import NixlTransport, StagingSize
from prefill_engine.kv.transport.nixl_agent import NixlAgent
from prefill_engine.kv.transport.staging import IDLE_QUARANTINE_SECONDS
from prefill_plan.config import TransportKind
from prefill_plan.kvd_config import TransportConfig
from prefill_testing.fake_nixl import FakeFabric, FakeLibrary
from prefill_testing.in_loop import in_loop
from prefill_testing.raw_peer import raw_client, read_frame, until

CONFIG = TransportConfig(kind=TransportKind.NIXL, host="127.0.0.1")
WINDOW = 4096
LONG = 30.0


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def thing(number: int) -> bytes:
    return bytes([number + 1]) * WINDOW


@dataclass
class Ends:
    """Ends of agents: those of a held role wait. arrived: how many do."""

    arrived: int = 0
    _role: str | None = None
    _free: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def held(self, role: str) -> Iterator[None]:
        self._role = role
        try:
            yield
        finally:
            self._role = None
            self._free.set()

    def wait_in_thread(self, agent: NixlAgent) -> None:
        if self._role is not None and agent.name.startswith(self._role):
            self.arrived += 1
            assert self._free.wait(LONG), "an agent's end was held for too long"


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Ends:
    made = Ends()
    real = NixlAgent._destroy_in_thread

    def end(agent: NixlAgent) -> None:
        made.wait_in_thread(agent)
        real(agent)

    monkeypatch.setattr(NixlAgent, "_destroy_in_thread", end)
    return made


@dataclass
class Clock:
    """Of a staging; stands. A loop that never lets others run asks it without end: it breaks then."""

    now: float = 1000.0
    asked: int = 0
    is_broken: bool = False

    def __call__(self) -> float:
        self.asked += 1
        self.is_broken = self.is_broken or self.asked > 2000
        assert not self.is_broken
        return self.now


@dataclass
class Scene:
    """near pushes to far. memory: of what far granted. library: far's."""

    fabric: FakeFabric
    library: FakeLibrary
    far: NixlTransport
    near: NixlTransport
    endpoint: str = ""
    memory: dict[int, bytearray] = field(default_factory=dict)

    def grant(self, number: int) -> Callable[[], bool]:
        self.memory[number] = bytearray(WINDOW)
        return self.far.accept(key(number), memoryview(self.memory[number]), lambda: None)

    async def push(self, number: int) -> PullOutcome:
        return await self.near.push(self.endpoint, key(number), memoryview(thing(number)), deadline_seconds=LONG)

    async def push_held(self, number: int) -> "asyncio.Task[PullOutcome]":
        """The push, with its WRITE under way until the fabric lands it."""
        self.fabric.hold = True
        before = len(self.fabric.under_way)
        task = asyncio.create_task(self.push(number))
        await until(lambda: len(self.fabric.under_way) > before)
        return task

    @asynccontextmanager
    async def frozen(self, op: Op, number: int) -> AsyncIterator[None]:
        """A peer that asks, learns the place and says nothing more; at the end it vanishes."""
        async with raw_client(self.endpoint) as (reader, writer):
            writer.write(encode(Frame(op=op, exchange=1, key=key(number), length=WINDOW, patience_ms=30_000)))
            answer = await read_frame(reader)
            assert answer.op is Op.PLACE
            await reader.readexactly(answer.length)
            yield

    @asynccontextmanager
    async def losing_a_peer(self) -> AsyncIterator[None]:
        """At the end far has seen that one more peer vanished."""
        before = self.far.counters.get("lost", 0)
        yield
        await until(lambda: self.far.counters.get("lost", 0) > before)

    async def lose_a_writer(self, number: int) -> None:
        async with self.losing_a_peer(), self.frozen(Op.OFFER, number):
            pass


@asynccontextmanager
async def scene(num_windows: int = 0) -> AsyncIterator[Scene]:
    """num_windows: of far; 0 = without staging. far serves key(0) to key(99)."""
    fabric = FakeFabric()
    library = FakeLibrary(fabric)
    staging = StagingSize(num_bytes=num_windows * WINDOW, window_bytes=WINDOW) if num_windows else None
    far = NixlTransport(CONFIG, library=library, staging=staging)
    made = Scene(fabric, library, far, NixlTransport(CONFIG, library=FakeLibrary(fabric)))

    def find(wanted: bytes) -> Source | None:
        number = int.from_bytes(wanted, "big")
        if number > 99:
            return None
        return Source(view=memoryview(thing(number)), fd=-1, offset=0, release=lambda: None)

    made.endpoint = await far.listen(find)
    try:
        yield made
    finally:
        fabric.land()
        await made.near.close()
        await far.close()


async def end_by_another(made: Scene) -> Callable[[], bool]:
    """A push fails because another peer vanished and the agent of both was destroyed; how to revoke the push's grant."""
    first, second = made.grant(1), made.grant(2)
    pushing = await made.push_held(2)
    await made.lose_a_writer(1)
    await made.far.close_peer("")
    assert first()
    async with made.losing_a_peer():
        assert made.fabric.land() == 0, "a WRITE went on after the agent it writes through was destroyed"
        assert (await pushing).state is PullState.FAILED
    return second


@in_loop
async def test_end_of_one_agent_frees_no_grant_that_is_written_through_another(ends: Ends) -> None:
    async with scene() as made:
        first, second = made.grant(1), made.grant(2)
        await made.lose_a_writer(1)
        with ends.held("owner"):
            closing = asyncio.create_task(made.far.close_peer(""))
            await until(lambda: ends.arrived == 1)
            async with made.losing_a_peer():
                pushing = await made.push_held(2)  # through the next agent
                pushing.cancel()
                await asyncio.gather(pushing, return_exceptions=True)
            assert not first()
            assert not second()
        await closing
        assert first()
        assert not second(), "freed while its WRITE is under way"
        await made.far.close_peer("")
        assert second()
        made.memory[2][:] = thing(50)
        assert made.fabric.land() == 0
        assert made.memory[2] == thing(50), "bytes landed after the grant was revoked"


@in_loop
async def test_grant_whose_agent_is_gone_when_its_write_fails_is_free() -> None:
    async with scene() as made:
        revoke = await end_by_another(made)
        assert revoke()
        assert made.far.counters["recycled"] == 1


@in_loop
async def test_later_push_is_not_failed_by_what_an_earlier_agent_left() -> None:
    async with scene() as made:
        await end_by_another(made)
        made.grant(3)
        pushing = await made.push_held(3)
        await made.far.close_peer("")  # as a sink's sweep does, for as long as a grant is stuck
        made.fabric.land()
        outcome = await pushing
        assert (outcome.state, made.memory[3]) == (PullState.DONE, thing(3)), outcome


@in_loop
async def test_second_close_for_a_stuck_grant_leaves_the_fresh_agent_alone(ends: Ends) -> None:
    async with scene() as made:
        made.grant(1)
        made.grant(2)
        await made.lose_a_writer(1)
        with ends.held("owner"):
            closing = [asyncio.create_task(made.far.close_peer(""))]
            await until(lambda: ends.arrived == 1)
            pushing = await made.push_held(2)
            closing.append(asyncio.create_task(made.far.close_peer("")))
            await asyncio.sleep(0)  # it has begun
        await asyncio.gather(*closing)
        made.fabric.land()
        outcome = await pushing
        assert (outcome.state, made.memory[2]) == (PullState.DONE, thing(2)), outcome
        assert made.far.counters["recycled"] == 1


@in_loop
async def test_second_close_for_a_late_push_leaves_the_fresh_agent_alone(ends: Ends) -> None:
    """near drains a peer that froze, and again before the first draining has ended."""
    async with scene() as made, AsyncExitStack() as stack:
        frozen = NixlTransport(CONFIG, library=made.library)
        stack.push_async_callback(frozen.close)
        endpoint = await frozen.listen(lambda _key: None)
        frozen.accept(key(1), memoryview(bytearray(WINDOW)), lambda: None)
        made.fabric.hold = True
        late = asyncio.create_task(made.near.push(endpoint, key(1), memoryview(thing(1)), deadline_seconds=LONG))
        await until(lambda: made.fabric.under_way)
        late.cancel()
        await asyncio.gather(late, return_exceptions=True)
        made.grant(2)
        with ends.held("reader"):
            closing = [asyncio.create_task(made.near.close_peer(endpoint))]
            await until(lambda: ends.arrived == 1)
            pushing = await made.push_held(2)
            closing.append(asyncio.create_task(made.near.close_peer(endpoint)))
            for _ in range(20):
                await asyncio.sleep(0)
            assert not closing[1].done(), "it settles what the first one has not settled yet"
        await asyncio.gather(*closing)
        made.fabric.land()
        outcome = await pushing
        assert (outcome.state, made.memory[2]) == (PullState.DONE, thing(2)), outcome
        assert made.near.counters["recycled"] == 1


@in_loop
async def test_close_ends_with_a_quarantined_and_a_held_window(ends: Ends) -> None:
    """The relief of quarantined windows goes on while close destroys the agent: it must let the loop run."""
    async with scene(16) as made:
        clock = Clock()
        staging = made.far._staging["owner"]
        staging.clock = clock
        async with made.frozen(Op.LOCATE, 1):
            async with made.frozen(Op.LOCATE, 2):
                pass
            await until(lambda: made.far.counters.get("quarantined") == 1)
            with ends.held("owner"):
                closing = asyncio.create_task(made.far.close())
                await until(lambda: ends.arrived == 1)
                clock.now += 2 * IDLE_QUARANTINE_SECONDS
                asked = clock.asked
                await until(lambda: clock.asked > asked)
            async with asyncio.timeout(LONG):
                await closing
        assert not clock.is_broken, "the relief kept the loop to itself"
        assert (staging.state.held, staging.state.quarantined) == (0, 0)


@in_loop
async def test_close_waits_for_the_end_of_an_agent_that_is_under_way(ends: Ends) -> None:
    """Else its caller would unmap memory that peers still touch."""
    async with scene(16) as made:
        clock = Clock()
        staging = made.far._staging["owner"]
        staging.clock = clock
        owner, reader = made.far._agents["owner"], made.far._agents["reader"]
        async with made.frozen(Op.LOCATE, 1):
            pass
        await until(lambda: made.far.counters.get("quarantined") == 1)
        with ends.held("owner"):
            clock.now += 2 * IDLE_QUARANTINE_SECONDS
            await until(lambda: ends.arrived == 1)
            closing = asyncio.create_task(made.far.close())
            await until(reader.gone.is_set)
            for _ in range(50):  # what else close does takes a few turns of the loop
                await asyncio.sleep(0)
            assert not closing.done()
        async with asyncio.timeout(LONG):
            await closing
        assert owner.gone.is_set()
        assert staging.state.quarantined == 0


@in_loop
async def test_offer_while_no_agent_can_be_made_leaves_its_grant_usable() -> None:
    async with scene() as made:
        made.grant(1)
        await made.lose_a_writer(1)
        await made.far.close_peer("")  # the next question needs another agent
        made.grant(2)
        third = made.grant(3)
        with pytest.MonkeyPatch.context() as patch:

            def fail(name: str, config: object) -> None:
                raise RuntimeError("NIXL_ERR_BACKEND")

            patch.setattr(made.library, "nixl_agent", fail)
            for number in (2, 3):
                assert (await made.push(number)).state is PullState.FAILED
        await made.far.close_peer("")
        assert third(), "stuck, and nobody was told where to write"
        outcome = await made.push(2)
        assert (outcome.state, made.memory[2]) == (PullState.DONE, thing(2)), outcome


@in_loop
async def test_unknown_key_is_absent_while_every_window_is_taken() -> None:
    async with scene(1) as made:
        target = memoryview(bytearray(WINDOW))
        async with made.frozen(Op.LOCATE, 1):
            for number, state in [(100, PullState.ABSENT), (2, PullState.BUSY), (101, PullState.ABSENT)]:
                outcome = await made.near.pull(made.endpoint, key(number), target, deadline_seconds=LONG)
                assert outcome.state is state, outcome
        # Who knows no key did not even wait for a window.
        assert made.far.counters["no_window"] == 1
