"""One push over a transport that holds, refuses and delays writes: order, early pieces, failures, and when it is drained."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable

import pytest

from prefill_engine.handoff_pieces import PushRegion, checksums, cut_pieces
from prefill_engine.rank.push import Push
from prefill_testing.fake_transport import FakeNetwork, FakeTransport

BLOCKS = [bytes([index]) * 10 for index in range(7)]
ROW = bytes(range(30))


class Rig:
    """An engine's push of 7 blocks of 10 bytes and a row of 30 into a decode peer."""

    def __init__(self, *, offset: int = 0, piece_seconds: float = 30.0, piece_bytes: int = 20) -> None:
        self.network = FakeNetwork()
        self.offset, self.piece_seconds, self.piece_bytes = offset, piece_seconds, piece_bytes
        self.memory = {1: bytearray(70 - offset), 7: bytearray(30)}
        self.keys = {1: b"b" * 32, 7: b"r" * 32}
        self.missing = 0
        self.revokes: list[Callable[[], bool]] = []

    async def start(self) -> None:
        self.engine, self.peer = FakeTransport(self.network), FakeTransport(self.network)
        await self.engine.listen(lambda _key: None)
        endpoint = await self.peer.listen(lambda _key: None)
        regions = []
        for kind, memory in self.memory.items():
            view = memoryview(memory)
            for piece in cut_pieces(self.keys[kind], num_bytes=len(memory), piece_bytes=self.piece_bytes):
                self.missing += 1
                self.revokes.append(self.peer.accept(piece.key, view[piece.start : piece.end], self._landed))
            regions.append(
                PushRegion(
                    kind=kind,
                    transport="tcp",
                    endpoint=endpoint,
                    key=self.keys[kind],
                    piece_bytes=self.piece_bytes,
                    offset=self.offset if kind == 1 else 0,
                    num_bytes=len(memory),
                )
            )
        self.push = Push(b"a", regions, transport=self.engine, piece_seconds=self.piece_seconds)

    def _landed(self) -> None:
        self.missing -= 1

    def add_all(self) -> None:
        self.push.add(1, BLOCKS)
        self.push.add(7, [ROW])
        self.push.finish()

    async def run(self) -> bool:
        return await asyncio.wait_for(self.push.send_all(), 10)


def play(scenario: Callable[[Rig], Awaitable[None]], **terms: object) -> Rig:
    rig = Rig(**terms)  # type: ignore[arg-type]

    async def run() -> None:
        await rig.start()
        await scenario(rig)

    asyncio.run(run())
    return rig


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0)


@pytest.mark.parametrize("piece_bytes", [1, 7, 10, 20, 64, 1000])
def test_everything_arrives_whatever_the_size_of_a_piece(piece_bytes: int):
    async def scenario(rig: Rig) -> None:
        rig.add_all()
        assert await rig.run()

    rig = play(scenario, piece_bytes=piece_bytes)
    assert (bytes(rig.memory[1]), bytes(rig.memory[7]), rig.missing) == (b"".join(BLOCKS), ROW, 0)
    assert rig.push.num_bytes == 100
    checks = {part.kind: part.checks for part in rig.push.checks()}
    assert checks == {
        1: checksums(b"".join(BLOCKS), piece_bytes=piece_bytes),
        7: checksums(ROW, piece_bytes=piece_bytes),
    }


def test_blocks_that_the_peer_has_already_are_left_out():
    async def scenario(rig: Rig) -> None:
        rig.add_all()
        assert await rig.run()

    rig = play(scenario, offset=30)
    assert bytes(rig.memory[1]) == b"".join(BLOCKS[3:])


def test_complete_pieces_go_out_before_the_rest_is_there():
    async def scenario(rig: Rig) -> None:
        sending = asyncio.create_task(rig.run())
        rig.push.add(1, BLOCKS[:3])
        await until(lambda: len(rig.network.pushed) == 1)
        assert bytes(rig.memory[1]) == b"".join(BLOCKS[:2]) + bytes(50)
        assert not sending.done()
        rig.push.add(1, BLOCKS[3:])
        rig.push.add(7, [ROW])
        rig.push.finish()
        assert await sending

    assert bytes(play(scenario).memory[1]) == b"".join(BLOCKS)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        pytest.param(lambda rig: rig.push.add(3, [b"x"]), "KV_FORMAT_MISMATCH", id="component-not-granted"),
        pytest.param(lambda rig: rig.push.add(7, [b"x"]), "KV_FORMAT_MISMATCH", id="too-long"),
        pytest.param(lambda rig: setattr(rig.network, "refuse", True), "DECODE_ABORTED", id="refused"),
        pytest.param(lambda rig: setattr(rig.network, "post_error", True), "DECODE_ABORTED", id="cannot-post"),
        pytest.param(lambda rig: rig.network.transports.clear(), "DECODE_ABORTED", id="peer-gone"),
        pytest.param(lambda rig: [revoke() for revoke in rig.revokes], "DECODE_ABORTED", id="revoked"),
    ],
)
def test_what_cannot_be_pushed_is_a_failure_with_a_reason(spoil: Callable[[Rig], object], reason: str):
    async def scenario(rig: Rig) -> None:
        spoil(rig)
        rig.add_all()
        assert not await rig.run()
        await asyncio.wait_for(rig.push.drain(), 10)

    rig = play(scenario)
    assert rig.push.reason == reason
    assert rig.push.detail


def test_too_few_bytes_are_a_failure():
    async def scenario(rig: Rig) -> None:
        rig.push.add(1, BLOCKS)
        rig.push.finish()
        assert not await rig.run()

    assert play(scenario).push.reason == "KV_FORMAT_MISMATCH"


def test_push_that_came_late_is_drained_only_when_nothing_can_be_written_any_more():
    async def scenario(rig: Rig) -> None:
        rig.network.hold = True
        rig.network.closes_late = False
        rig.add_all()
        assert not await rig.run()
        assert rig.push.reason == "HANDOFF_TIMEOUT"
        draining = asyncio.create_task(rig.push.drain())
        await until(lambda: rig.engine.closed_peers != [])
        await asyncio.sleep(0.05)
        assert not draining.done()  # a write is still in flight
        assert not all(revoke() for revoke in rig.revokes)
        rig.network.release()
        await asyncio.wait_for(draining, 10)
        assert all(revoke() for revoke in rig.revokes)

    play(scenario, piece_seconds=0.02)


def test_late_push_is_drained_at_once_when_closing_the_connection_ends_its_writes():
    async def scenario(rig: Rig) -> None:
        rig.network.hold = True
        rig.add_all()
        assert not await rig.run()
        await asyncio.wait_for(rig.push.drain(), 10)
        rig.network.release()
        await asyncio.sleep(0)
        assert rig.missing == 6

    rig = play(scenario, piece_seconds=0.02)
    assert bytes(rig.memory[1]) == bytes(70)


def test_cancelled_push_starts_nothing_more_and_waits_for_what_is_under_way():
    async def scenario(rig: Rig) -> None:
        rig.network.hold = True
        rig.add_all()
        sending = asyncio.create_task(rig.run())
        await until(lambda: len(rig.peer._writing) == 4)
        rig.push.cancel()
        assert not await sending
        draining = asyncio.create_task(rig.push.drain())
        await asyncio.sleep(0.02)
        assert not draining.done()
        rig.network.release()
        await asyncio.wait_for(draining, 10)

    rig = play(scenario)
    assert (len(rig.network.pushed), rig.push.reason) == (4, "")


def test_pieces_are_copied_so_that_memory_reused_after_a_cancel_never_travels():
    block = bytearray(BLOCKS[0])

    async def scenario(rig: Rig) -> None:
        rig.network.hold = True
        rig.push.add(1, [memoryview(block), *BLOCKS[1:]])
        sending = asyncio.create_task(rig.run())
        await until(lambda: rig.peer._writing != set())
        rig.push.cancel()
        await sending
        block[:] = b"\xaa" * 10
        rig.network.release()
        await asyncio.wait_for(rig.push.drain(), 10)

    assert 0xAA not in play(scenario).memory[1]


def test_window_bounds_what_is_under_way():
    most = 0

    async def scenario(rig: Rig) -> None:
        nonlocal most
        rig.network.hold = True
        rig.add_all()
        sending = asyncio.create_task(rig.run())
        for _ in itertools.repeat(None, 50):
            await asyncio.sleep(0)
            most = max(most, len(rig.peer._writing))
        rig.network.release()
        assert await sending

    play(scenario, piece_bytes=1)
    assert most == 4
