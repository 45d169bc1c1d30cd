"""A nixl transport that shows copies in windows: what is registered, and what peers that vanish in mid-transfer cost the others.

On a fake of NIXL's library with UCX's habits, so transfers can be held; a peer that froze is a connection that says no more.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from prefill_engine.kv.transport.contract import PullOutcome, PullState, Source
from prefill_engine.kv.transport.frame import HEADER_BYTES, Frame, Op, decode, encode
from prefill_engine.kv.transport.nixl import NixlTransport, StagingSize
from prefill_plan.config import TransportKind
from prefill_plan.kvd_config import TransportConfig
from prefill_testing.fake_nixl import FakeFabric, FakeLibrary
from prefill_testing.in_loop import in_loop
from prefill_testing.raw_peer import until

CONFIG = TransportConfig(kind=TransportKind.NIXL, host="127.0.0.1")
WINDOW = 4096
LONG = 30.0


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def thing(number: int) -> bytes:
    return bytes([number + 1]) * WINDOW


@dataclass
class Scene:
    """near pulls from far, whose windows are `num_windows`. pinned: things that far has found and not released."""

    fabric: FakeFabric
    far: NixlTransport
    near: NixlTransport
    endpoint: str
    pinned: list[bytes] = field(default_factory=list)

    async def relief(self) -> None:
        """Waits until no window is quarantined any more; that cost one agent."""
        await until(lambda: self.far.counters.get("recycled") == 1)
        await until(lambda: self.far._staging["owner"].state.quarantined == 0)

    async def pull(self, number: int, *, seconds: float = LONG) -> tuple[PullOutcome, bytearray]:
        target = bytearray(WINDOW)
        outcome = await self.near.pull(self.endpoint, key(number), memoryview(target), deadline_seconds=seconds)
        return outcome, target

    async def freeze_a_reader(self, number: int) -> asyncio.StreamWriter:
        """Asks, learns the place, says nothing more."""
        host, _, port = self.endpoint.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(encode(Frame(op=Op.LOCATE, exchange=1, key=key(number), length=WINDOW, patience_ms=30_000)))
        answer = decode(await reader.readexactly(HEADER_BYTES))
        assert answer.op is Op.PLACE
        await reader.readexactly(answer.length)
        return writer


@asynccontextmanager
async def scene(num_windows: int) -> AsyncIterator[Scene]:
    fabric = FakeFabric()
    library = FakeLibrary(fabric)
    staging = StagingSize(num_bytes=num_windows * WINDOW, window_bytes=WINDOW)
    far = NixlTransport(CONFIG, library=library, staging=staging)
    near = NixlTransport(CONFIG, library=library)
    made = Scene(fabric, far, near, "")

    def find(wanted: bytes) -> Source | None:
        number = int.from_bytes(wanted, "big")
        if number > 99:
            return None
        made.pinned.append(wanted)
        data = memoryview(thing(number))
        return Source(view=data, fd=-1, offset=0, release=lambda: made.pinned.remove(wanted))

    made.endpoint = await far.listen(find)
    try:
        yield made
    finally:
        fabric.land()
        await near.close()
        await far.close()
    assert made.pinned == []


@in_loop
async def test_nothing_but_windows_is_registered_and_the_thing_itself_is_free_at_once() -> None:
    async with scene(8) as made:
        made.fabric.hold = True
        pulling = asyncio.create_task(made.pull(1))
        await until(lambda: made.fabric.under_way)
        assert made.fabric.registered("owner") == [8 * WINDOW]
        assert made.pinned == []
        made.fabric.land()
        outcome, target = await pulling
        assert (outcome.state, target) == (PullState.DONE, thing(1))
        # Nobody takes the notes of READs: they would pile up for as long as the owner lives.
        assert [agent.notes for agent in made.fabric.agents.values()] == [{}, {}, {}]


@in_loop
async def test_reader_waits_for_a_window_and_then_is_told_to_go_another_way() -> None:
    async with scene(2) as made:
        frozen = [await made.freeze_a_reader(number) for number in range(2)]
        outcome, target = await made.pull(5, seconds=4.0)
        assert (outcome.state, outcome.settled(), target) == (PullState.BUSY, True, bytes(WINDOW)), outcome
        assert made.far.counters.get("no_window") == 1
        waiting = asyncio.create_task(made.pull(6))
        for writer in frozen:
            writer.close()
        outcome, target = await waiting
        # Both windows were lost to readers that may still read: it was busy, or got one after the agent had been destroyed.
        assert outcome.state in (PullState.BUSY, PullState.DONE), outcome
        await made.relief()
        outcome, target = await made.pull(7)
        assert (outcome.state, target) == (PullState.DONE, thing(7))


@in_loop
async def test_window_of_a_reader_that_vanished_is_used_again_only_after_the_agent_is_gone() -> None:
    """Else that reader's READ, which nobody can stop, would bring it another hand-over's bytes."""
    async with scene(1) as made:
        made.fabric.hold = True
        outcome, target = await made.pull(1, seconds=5.0)
        assert (outcome.state, outcome.settled()) == (PullState.LATE, False)
        await made.relief()
        assert made.fabric.land() == 0, "a READ went on after its owner's agent was destroyed"
        outcome, again = await made.pull(2)
        assert (outcome.state, again, target) == (PullState.DONE, thing(2), bytes(WINDOW))


@in_loop
async def test_other_readers_are_not_failed_by_one_that_vanished() -> None:
    async with scene(4) as made:
        made.fabric.hold = True
        patient = asyncio.create_task(made.pull(1))
        await until(lambda: made.fabric.under_way)
        (await made.freeze_a_reader(2)).close()
        await until(lambda: made.far.counters.get("quarantined") == 1)
        outcome, _ = await made.pull(3)
        assert outcome.state is PullState.BUSY, "a quarter of the windows is lost: no more are given out"
        assert "recycled" not in made.far.counters
        made.fabric.land()
        outcome, target = await patient
        assert (outcome.state, target) == (PullState.DONE, thing(1))
        await made.relief()
        outcome, target = await made.pull(4)
        assert (outcome.state, target) == (PullState.DONE, thing(4))


@in_loop
async def test_unknown_keys_and_other_lengths_take_no_window() -> None:
    async with scene(1) as made:
        for _ in range(3):
            assert (await made.pull(100))[0].state is PullState.ABSENT
            short = memoryview(bytearray(5))
            outcome = await made.near.pull(made.endpoint, key(1), short, deadline_seconds=LONG)
            assert outcome.state is PullState.FAILED
        outcome, target = await made.pull(1)
        assert (outcome.state, target) == (PullState.DONE, thing(1))


@pytest.mark.parametrize("what", ["done", "refused", "late"])
@in_loop
async def test_pushes_go_out_of_windows_that_come_back(what: str) -> None:
    """far pushes to near; more pushes than windows, so lost ones would be missed."""
    async with scene(2) as made:
        endpoint = await made.near.listen(lambda _key: None)
        made.fabric.hold = what == "late"
        for number in range(3):
            target = bytearray(WINDOW)
            if what != "refused":
                made.near.accept(key(number), memoryview(target), lambda: None)
            seconds = 5.0 if what == "late" else LONG
            outcome = await made.far.push(endpoint, key(number), memoryview(thing(number)), deadline_seconds=seconds)
            expected = {"done": PullState.DONE, "refused": PullState.FAILED, "late": PullState.LATE}
            assert outcome.state is expected[what], outcome
            assert outcome.settled() is (what != "late")
            assert (target == thing(number)) is (what == "done")
        assert made.fabric.registered("reader").count(2 * WINDOW) == 1
        if what == "late":
            await made.far.close_peer(endpoint)
            assert outcome.settled()
            assert made.fabric.land() == 0
        await until(lambda: made.far._staging["reader"].state.held == 0)
        made.fabric.hold = True
        held = [asyncio.create_task(_push_held(made, endpoint, number)) for number in (7, 8)]
        await until(lambda: len(made.fabric.under_way) == 2)
        # Both come out of windows: nothing else of this side is registered.
        lengths = made.fabric.registered("reader")
        assert lengths.count(2 * WINDOW) == 1
        assert WINDOW not in lengths
        made.fabric.land()
        assert {outcome.state for outcome in await asyncio.gather(*held)} == {PullState.DONE}


async def _push_held(made: Scene, endpoint: str, number: int) -> PullOutcome:
    made.near.accept(key(number), memoryview(bytearray(WINDOW)), lambda: None)
    return await made.far.push(endpoint, key(number), memoryview(thing(number)), deadline_seconds=LONG)
