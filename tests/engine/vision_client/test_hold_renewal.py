"""Holds are renewed by encoder, at once and every period, until they are dropped or lost; a dead encoder disturbs nobody."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import pytest

from prefill_engine.vision_client import hold_renewal
from prefill_engine.vision_client.encoder_set import EncoderSet
from prefill_engine.vision_client.hold_renewal import HoldRenewal
from prefill_engine.vision_client.image_source import TicketSource
from prefill_testing.fake_encoder import FakeEncoder
from prefill_testing.in_loop import in_loop

DIGEST, COLUMNS = bytes(range(32)), 64


@dataclass(slots=True)
class Scene:
    first: FakeEncoder
    second: FakeEncoder
    holds: HoldRenewal
    now: list[float]
    """The clock. The task sleeps in real time, so a test that sets it adds a ticket to wake the task."""


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def scene(clock: Callable[[], float] | None = None) -> AsyncIterator[Scene]:
    now = [0.0]
    async with (
        FakeEncoder(digest=DIGEST, columns=COLUMNS) as first,
        FakeEncoder(digest=DIGEST, columns=COLUMNS) as second,
    ):
        names = (first.address, second.address)
        encoders = EncoderSet(lambda: names, digest=DIGEST, columns=COLUMNS, clock=time.monotonic)
        holds = HoldRenewal(encoders, clock=clock or (lambda: now[0]))
        tasks = [asyncio.create_task(encoders.run()), asyncio.create_task(holds.run())]
        await until(lambda: encoders.num_usable == 2)
        try:
            yield Scene(first, second, holds, now)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def ticket_of(encoder: FakeEncoder) -> TicketSource:
    image = encoder.hold(b"image", tokens=4)
    return TicketSource(
        ticket_id=image.ticket_id, address=encoder.address, path="", host_id="", offset=0, checksum=None
    )


def asked(encoder: FakeEncoder) -> list[list[bytes]]:
    return [sorted(request.ticket_ids) for request in encoder.renewals]


def ids(*tickets: TicketSource) -> list[bytes]:
    return sorted(ticket.ticket_id for ticket in tickets)


@in_loop
async def test_new_tickets_are_renewed_at_once_with_one_call_per_encoder() -> None:
    async with scene() as s:
        a, b, c = ticket_of(s.first), ticket_of(s.first), ticket_of(s.second)
        s.holds.add([a, b, c])
        await until(lambda: bool(s.first.renewals and s.second.renewals))
        assert (asked(s.first), asked(s.second)) == ([ids(a, b)], [ids(c)])


@in_loop
async def test_tickets_are_renewed_again_after_a_period_but_not_what_was_dropped() -> None:
    async with scene() as s:
        kept, dropped = ticket_of(s.first), ticket_of(s.first)
        s.holds.add([kept, dropped])
        await until(lambda: len(s.first.renewals) == 1)
        s.holds.drop(dropped)
        s.now[0] = hold_renewal.RENEW_SECONDS / 2
        early = ticket_of(s.first)
        s.holds.add([early])
        await until(lambda: len(s.first.renewals) == 2)
        s.now[0] = hold_renewal.RENEW_SECONDS
        late = ticket_of(s.first)
        s.holds.add([late])
        await until(lambda: len(s.first.renewals) == 3)
        assert asked(s.first) == [ids(kept, dropped), ids(early), ids(kept, late)]
        assert s.holds.num_held == 3


@in_loop
async def test_the_task_wakes_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hold_renewal, "RENEW_SECONDS", 0.02)
    async with scene(clock=time.monotonic) as s:
        s.holds.add([ticket_of(s.first)])
        await until(lambda: len(s.first.renewals) >= 3)


@in_loop
async def test_hold_that_is_lost_is_not_asked_for_again() -> None:
    async with scene() as s:
        ticket = ticket_of(s.first)
        s.first._held.clear()
        s.holds.add([ticket])
        await until(lambda: s.holds.num_held == 0 and len(s.first.renewals) == 1)


@in_loop
async def test_encoder_that_is_dead_or_unknown_disturbs_no_other() -> None:
    async with scene() as s:
        dead, alive = ticket_of(s.first), ticket_of(s.second)
        unknown = TicketSource(ticket_id=b"u" * 16, address="10.9.8.7:1", path="", host_id="", offset=0, checksum=None)
        await s.first.die()
        s.holds.add([unknown, dead, alive])
        await until(lambda: asked(s.second) == [ids(alive)])
        assert s.holds.num_held == 3
