"""The courier's faults: whatever it can no longer promise ends the rank, and no attempt waits for it."""

import threading
from collections.abc import Iterator

import pytest

from prefill_engine.handoff_pieces import PushRegion
from prefill_engine.kv.transport.contract import PullOutcome, PullState
from prefill_engine.messages import PushReport
from prefill_engine.rank.courier import Courier
from prefill_testing.fake_transport import FakeNetwork, FakeTransport

DATA = bytes(range(30))


class BrokenTransport(FakeTransport):
    """Writes come late, and nobody can end them."""

    async def push(self, endpoint: str, key: bytes, source: memoryview, *, deadline_seconds: float) -> PullOutcome:
        return PullOutcome(state=PullState.LATE, reason="late", seconds=0.0, settled=lambda: False)

    async def close_peer(self, endpoint: str) -> None:
        raise RuntimeError("the agent is gone")


@pytest.fixture
def woken() -> threading.Event:
    return threading.Event()


@pytest.fixture
def courier(woken: threading.Event) -> Iterator[Courier]:
    def report(message: PushReport) -> None:
        assert message.state == "failed"

    courier = Courier(lambda: BrokenTransport(FakeNetwork()), piece_seconds=1.0, report=report, wake=woken.set)
    courier.start(lambda _key: None)
    yield courier
    courier.stop()


def region(key: bytes = b"k" * 32) -> PushRegion:
    return PushRegion(
        kind=1, transport="tcp", endpoint="decode", key=key, piece_bytes=10, offset=0, num_bytes=len(DATA)
    )


def test_push_whose_end_can_not_be_known_ends_the_rank(courier: Courier, woken: threading.Event) -> None:
    """Its slots may still be read, so they are not given back; and its attempt would wait for ever."""
    courier.begin(b"a", [region()])
    courier.add(b"a", 1, [DATA])
    courier.finish(b"a")
    assert woken.wait(20)
    with pytest.raises(RuntimeError, match="the agent is gone"):
        list(courier.collect())


def test_call_that_fails_on_the_courier_s_thread_ends_the_rank(courier: Courier, woken: threading.Event) -> None:
    courier.begin(b"a", [region()])
    courier.add(b"a", 1, [None])  # type: ignore[list-item]
    assert woken.wait(20)
    with pytest.raises(TypeError):
        list(courier.collect())
