"""One contract for every transport: tcp, tcp over TLS, loop, and nixl, with and without staging.

nixl runs on a fake of its library, and on the real one where that is installed (else skipped with the reason).
"""

import asyncio
import mmap
import os
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

import pytest

from prefill_engine.kv.transport.choose import build_transport
from prefill_engine.kv.transport.contract import PullState, Source, Transport, protocol_of
from prefill_engine.kv.transport.loop import LoopHub, LoopTransport
from prefill_engine.kv.transport.nixl import NixlTransport, StagingSize
from prefill_engine.kv.transport.nixl_agent import load_library
from prefill_engine.kv.transport.rdma import find_devices
from prefill_plan.config import TlsConfig, TransportKind
from prefill_plan.errors import ConfigError
from prefill_plan.kvd_config import TransportConfig
from prefill_testing.certificates import make_tls
from prefill_testing.fake_nixl import FakeFabric, FakeLibrary
from prefill_testing.in_loop import in_loop

KINDS = ("tcp", "tcp+tls", "loop", "nixl-fake", "nixl-fake+tls", "nixl-fake-staged", "nixl", "nixl-staged")
STAGING = StagingSize(num_bytes=64 << 20, window_bytes=8 << 20)
_SECONDS = 20.0
_KEY = bytes(range(32))


@dataclass
class Shelf:
    """What a side serves: named bytes in a shared-memory file, with a count of pins that must come back to 0."""

    items: dict[bytes, tuple[memoryview, int, int]] = field(default_factory=dict)
    pinned: int = 0

    def put(self, key: bytes, data: bytes) -> memoryview:
        fd = os.memfd_create("shelf")
        offset = mmap.PAGESIZE
        os.ftruncate(fd, offset + max(1, len(data)))
        view = memoryview(mmap.mmap(fd, offset + max(1, len(data))))[offset : offset + len(data)]
        view[:] = data
        self.items[key] = (view, fd, offset)
        return view

    def find(self, key: bytes) -> Source | None:
        if key not in self.items:
            return None
        self.pinned += 1
        view, fd, offset = self.items[key]
        return Source(view=view, fd=fd, offset=offset, release=self._release)

    def _release(self) -> None:
        self.pinned -= 1


@dataclass
class Pair:
    """Two sides: `near` pulls from and pushes to `far`."""

    near: Transport
    far: Transport
    endpoint: str
    shelf: Shelf


MakePair = Callable[[], "AsyncPair"]


class AsyncPair:
    def __init__(self, name: str, tls: TlsConfig) -> None:
        self.name, self._tls = name, tls
        self._library = FakeLibrary(FakeFabric())

    def build(self, hub: LoopHub) -> Transport:
        if self.name == "loop":
            return LoopTransport(hub)
        kind = TransportKind.NIXL if self.name.startswith("nixl") else TransportKind.TCP
        config = TransportConfig(kind=kind, host="127.0.0.1", tls=self._tls)
        staging = STAGING if self.name.endswith("staged") else None
        if self.name.startswith("nixl-fake"):
            return NixlTransport(config, library=self._library, staging=staging)
        return build_transport(config, staging=staging)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Pair]:
        hub = LoopHub()
        near, far, shelf = self.build(hub), self.build(hub), Shelf()
        try:
            await near.listen(lambda _key: None)
            yield Pair(near, far, await far.listen(shelf.find), shelf)
        finally:
            await near.close()
            await far.close()
        assert shelf.pinned == 0


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncPair:
    if request.param in ("nixl", "nixl-staged"):
        try:
            load_library()
        except ConfigError as error:
            pytest.skip(error.message)
    tls = make_tls(tmp_path_factory.mktemp("tls")) if request.param.endswith("+tls") else TlsConfig()
    return AsyncPair(request.param, tls)


def key(number: int) -> bytes:
    return number.to_bytes(33, "big")


@pytest.mark.parametrize("size", [1, 4096, 1_419_136, 5_000_001])
@in_loop
async def test_pull_copies_every_byte(pair: AsyncPair, size: int) -> None:
    data = random.Random(size).randbytes(size)
    async with pair.open() as sides:
        sides.shelf.put(_KEY, data)
        target = bytearray(size)
        outcome = await sides.near.pull(sides.endpoint, _KEY, memoryview(target), deadline_seconds=_SECONDS)
        assert (outcome.state, outcome.settled()) == (PullState.DONE, True), outcome
        assert target == data


@in_loop
async def test_pull_into_a_region_and_after_it_was_changed(pair: AsyncPair) -> None:
    async with pair.open() as sides:
        for number in range(2):
            sides.shelf.put(_KEY, bytes([number]) * 5000)
            region = memoryview(bytearray(20_000))
            await sides.near.use_region(region)
            await sides.far.use_region(memoryview(bytearray(4096)))  # not where the thing stands: that works, too
            outcome = await sides.near.pull(sides.endpoint, _KEY, region[8192:13_192], deadline_seconds=_SECONDS)
            assert outcome.state is PullState.DONE, outcome
            assert bytes(region[8192:13_192]) == bytes([number]) * 5000


@in_loop
async def test_pull_of_an_unknown_key_is_absent_and_the_next_works(pair: AsyncPair) -> None:
    async with pair.open() as sides:
        sides.shelf.put(_KEY, b"there")
        target = bytearray(b"-" * 5)
        outcome = await sides.near.pull(sides.endpoint, key(7), memoryview(target), deadline_seconds=_SECONDS)
        assert (outcome.state, outcome.settled(), target) == (PullState.ABSENT, True, b"-----")
        outcome = await sides.near.pull(sides.endpoint, _KEY, memoryview(target), deadline_seconds=_SECONDS)
        assert (outcome.state, target) == (PullState.DONE, b"there")


@pytest.mark.parametrize("size", [4, 6])
@in_loop
async def test_a_thing_of_another_size_is_refused_before_a_byte_moves(pair: AsyncPair, size: int) -> None:
    async with pair.open() as sides:
        sides.shelf.put(_KEY, b"there")
        target = bytearray(b"-" * size)
        outcome = await sides.near.pull(sides.endpoint, _KEY, memoryview(target), deadline_seconds=_SECONDS)
        assert (outcome.state, outcome.settled(), target) == (PullState.FAILED, True, b"-" * size)


@in_loop
async def test_many_pulls_at_once_do_not_mix(pair: AsyncPair) -> None:
    async with pair.open() as sides:
        data = {number: random.Random(number).randbytes(50_000 + number) for number in range(40)}
        for number, one in data.items():
            sides.shelf.put(key(number), one)
        targets = {number: bytearray(len(one)) for number, one in data.items()}
        outcomes = await asyncio.gather(
            *(
                sides.near.pull(sides.endpoint, key(number), memoryview(target), deadline_seconds=_SECONDS)
                for number, target in targets.items()
            )
        )
        assert {one.state for one in outcomes} == {PullState.DONE}, outcomes
        assert targets == data


@in_loop
async def test_pull_from_nobody_fails(pair: AsyncPair) -> None:
    async with pair.open() as sides:
        endpoint = "127.0.0.1:1" if not sides.endpoint.startswith("loop") else "loop:99"
        outcome = await sides.near.pull(endpoint, _KEY, memoryview(bytearray(5)), deadline_seconds=_SECONDS)
        assert (outcome.state, outcome.settled()) == (PullState.FAILED, True)
        assert outcome.reason


@in_loop
async def test_a_side_that_closed_is_a_failure_and_one_that_came_back_is_none(pair: AsyncPair) -> None:
    hub = LoopHub()
    shelf = Shelf()
    shelf.put(_KEY, b"there")
    near, far = pair.build(hub), pair.build(hub)
    await near.listen(lambda _key: None)
    endpoint = await far.listen(shelf.find)
    target = memoryview(bytearray(5))
    try:
        assert (await near.pull(endpoint, _KEY, target, deadline_seconds=_SECONDS)).state is PullState.DONE
        await far.close()
        assert (await near.pull(endpoint, _KEY, target, deadline_seconds=_SECONDS)).state is PullState.FAILED
        far = pair.build(hub)
        endpoint = await far.listen(shelf.find)
        assert (await near.pull(endpoint, _KEY, target, deadline_seconds=_SECONDS)).state is PullState.DONE
    finally:
        await near.close()
        await far.close()


@pytest.mark.parametrize("size", [1, 3_128_928])
@in_loop
async def test_push_fills_a_granted_target_once(pair: AsyncPair, size: int) -> None:
    data = random.Random(size).randbytes(size)
    done: list[int] = []
    async with pair.open() as sides:
        target = bytearray(size)
        revoke = sides.far.accept(_KEY, memoryview(target), partial(done.append, 1))
        outcome = await sides.near.push(sides.endpoint, _KEY, memoryview(data), deadline_seconds=_SECONDS)
        assert (outcome.state, done) == (PullState.DONE, [1]), outcome
        assert target == data
        again = await sides.near.push(sides.endpoint, _KEY, memoryview(bytes(size)), deadline_seconds=_SECONDS)
        assert (again.state, target == data, done) == (PullState.FAILED, True, [1])
        assert revoke()


@pytest.mark.parametrize("what", ["no grant", "revoked", "other size"])
@in_loop
async def test_push_without_a_fitting_grant_writes_nothing(pair: AsyncPair, what: str) -> None:
    async with pair.open() as sides:
        target = bytearray(b"-" * (6 if what == "other size" else 5))
        done: list[int] = []
        revoke = sides.far.accept(key(1) if what == "no grant" else _KEY, memoryview(target), partial(done.append, 1))
        if what == "revoked":
            assert revoke()
        outcome = await sides.near.push(sides.endpoint, _KEY, memoryview(b"there"), deadline_seconds=_SECONDS)
        assert (outcome.state, set(target), done) == (PullState.FAILED, {ord("-")}, [])
        assert revoke()
        fresh = bytearray(5)
        sides.far.accept(_KEY, memoryview(fresh), partial(done.append, 2))
        outcome = await sides.near.push(sides.endpoint, _KEY, memoryview(b"there"), deadline_seconds=_SECONDS)
        assert (outcome.state, fresh, done) == (PullState.DONE, b"there", [2]), outcome


@in_loop
async def test_a_second_grant_for_a_key_is_our_own_mistake(pair: AsyncPair) -> None:
    async with pair.open() as sides:
        sides.far.accept(_KEY, memoryview(bytearray(1)), lambda: None)
        with pytest.raises(ValueError, match="has one already"):
            sides.far.accept(_KEY, memoryview(bytearray(1)), lambda: None)
        with pytest.raises(ValueError, match="key of 5 bytes"):
            sides.far.accept(b"short", memoryview(bytearray(1)), lambda: None)
        with pytest.raises(ValueError, match="key of 5 bytes"):
            await sides.near.pull(sides.endpoint, b"short", memoryview(bytearray(1)), deadline_seconds=1.0)


@in_loop
async def test_closing_a_peer_leaves_it_usable(pair: AsyncPair) -> None:
    async with pair.open() as sides:
        sides.shelf.put(_KEY, b"there")
        target = memoryview(bytearray(5))
        for _ in range(3):
            outcome = await sides.near.pull(sides.endpoint, _KEY, target, deadline_seconds=_SECONDS)
            assert outcome.state is PullState.DONE
            await sides.near.close_peer(sides.endpoint)


def test_kind_names_what_is_in_use(pair: AsyncPair) -> None:
    """Not the one that was asked for by any other name. A device leaves UCX its choice: tests do not require RDMA."""
    nixl = "nixl-ucx-any" if find_devices() else "nixl-ucx-tcp"
    expected = {"tcp": "tcp", "tcp+tls": "tcp+tls", "loop": "loop", "nixl": nixl, "nixl-staged": nixl}
    expected |= {"nixl-fake": "nixl-ucx-tcp", "nixl-fake-staged": "nixl-ucx-tcp", "nixl-fake+tls": "nixl+tls-ucx-tcp"}
    kind = pair.build(LoopHub()).kind
    assert kind == expected[pair.name]
    # What peers compare: with TLS it is another protocol, whatever UCX uses below it is not.
    spoken = pair.name.replace("-fake", "").replace("-staged", "")
    assert protocol_of(kind) == spoken
