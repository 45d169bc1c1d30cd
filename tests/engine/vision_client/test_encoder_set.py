"""Encoders come and go by their names; who has an image under way is kept until it is done."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

import pytest

from prefill_engine.vision_client import encoder_set
from prefill_engine.vision_client.encoder_set import EncoderSet
from prefill_testing.fake_encoder import FakeEncoder
from prefill_testing.in_loop import in_loop

DIGEST, COLUMNS = bytes(range(32)), 64


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def running(names: list[str]) -> AsyncIterator[EncoderSet]:
    encoders = EncoderSet(lambda: tuple(names), digest=DIGEST, columns=COLUMNS, clock=time.monotonic)
    task = asyncio.create_task(encoders.run())
    try:
        yield encoders
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder_set, "LOOK_UP_SECONDS", 0.02)


@in_loop
async def test_name_that_is_not_found_costs_the_others_nothing() -> None:
    async with FakeEncoder(digest=DIGEST, columns=COLUMNS) as fake:
        names = ["no-such-host.invalid:1", fake.address]
        async with running(names) as encoders:
            await until(lambda: encoders.num_usable == 1)
            # Nor does it when the name server fails altogether.
            names.remove(fake.address)
            await asyncio.sleep(0.1)
            assert encoders.num_usable == 1


@in_loop
async def test_encoder_that_is_no_longer_named_ends_its_image_first() -> None:
    async with FakeEncoder(digest=DIGEST, columns=COLUMNS) as fake:
        names = [fake.address]
        async with running(names) as encoders:
            await until(lambda: encoders.num_usable == 1)
            peer = encoders.peer(fake.address)
            assert peer is not None
            peer.num_images = 1
            names.clear()
            await until(lambda: encoders.num_usable == 0)
            assert encoders.peer(fake.address) is peer
            assert "leads elsewhere" in encoders.describe()
            peer.num_images = 0
            await until(lambda: encoders.num_known == 0)


@in_loop
async def test_encoder_that_is_killed_and_comes_back_is_used_again() -> None:
    fake = FakeEncoder(digest=DIGEST, columns=COLUMNS)
    async with fake, running([fake.address]) as encoders:
        await until(lambda: encoders.num_usable == 1)
        await fake.die()
        await until(lambda: encoders.num_usable == 0)
        fake.epoch = 2
        async with fake:
            await until(lambda: encoders.num_usable == 1)


@in_loop
async def test_name_of_one_encoder_may_stand_in_a_ticket() -> None:
    async with FakeEncoder(digest=DIGEST, columns=COLUMNS) as fake:
        name = fake.address.replace("127.0.0.1", "127.1")
        async with running([name]) as encoders:
            await until(lambda: encoders.num_usable == 1)
            peer = encoders.peer(fake.address)
            assert peer is not None
            assert encoders.peer(name) is peer
            assert encoders.peer("10.9.8.7:1") is None
