"""prefill_operator.drain: what is known of drains under way."""

import asyncio
from collections.abc import Callable

from prefill_operator.drain import Drains, DrainState
from prefill_operator.names import Kind
from prefill_operator.resources import PoolKey
from prefill_testing.fake_cluster import FakeEngines
from prefill_testing.in_loop import in_loop
from prefill_testing.operator_rig import KEY


@in_loop
async def test_finished_drain_is_told_once() -> None:
    changed: list[PoolKey] = []
    drains = Drains(FakeEngines(), on_change=changed.append)
    drains.begin("u1", pool=KEY, address="10.0.0.1:50051", timeout_seconds=5.0)
    drains.begin("u1", pool=KEY, address="10.0.0.1:50051", timeout_seconds=5.0)
    await _until(lambda: changed)

    assert drains.state("u1") == DrainState(done=True)
    assert changed == [KEY]
    await drains.close()


@in_loop
async def test_each_kind_is_called_by_its_own_service() -> None:
    engines = FakeEngines()
    changed: list[PoolKey] = []
    drains = Drains(engines, on_change=changed.append)
    for kind in Kind:
        key = PoolKey(kind=kind, namespace="ns", name="flash")
        drains.begin(str(kind), pool=key, address="10.0.0.1:50051", timeout_seconds=5.0)
    await _until(lambda: len(changed) == 2)

    assert engines.kinds == list(Kind)
    await drains.close()


@in_loop
async def test_engine_out_of_reach_is_told_with_the_time_it_began() -> None:
    now = [100.0]
    engines = FakeEngines()
    changed: list[PoolKey] = []
    engines.is_unreachable = True
    drains = Drains(engines, on_change=changed.append, clock=lambda: now[0], retry_seconds=0.001)
    drains.begin("u1", pool=KEY, address="10.0.0.1:50051", timeout_seconds=5.0)
    await _until(lambda: len(engines.calls) > 3)

    assert drains.state("u1") == DrainState(unreachable_since=100.0)
    assert changed == [KEY]
    now[0] = 103.0
    engines.is_unreachable = False
    await _until(lambda: len(changed) > 1)
    assert drains.state("u1") == DrainState(done=True)
    assert engines.calls[0] == ("10.0.0.1:50051", 5.0)
    assert engines.calls[-1] == ("10.0.0.1:50051", 2.0)
    await drains.close()


@in_loop
async def test_pod_without_an_address_is_out_of_reach_from_the_start() -> None:
    drains = Drains(FakeEngines(), on_change=lambda _: None, clock=lambda: 7.0)
    drains.begin("u1", pool=KEY, address="", timeout_seconds=5.0)

    assert drains.state("u1") == DrainState(unreachable_since=7.0)
    await drains.close()


@in_loop
async def test_calls_end_with_their_pods() -> None:
    engines = FakeEngines()
    engines.done.clear()
    drains = Drains(engines, on_change=lambda _: None)
    for uid in ("u1", "u2"):
        drains.begin(uid, pool=KEY, address="10.0.0.1:50051", timeout_seconds=5.0)

    drains.keep_only(KEY, ["u2"])

    assert drains.state("u1") is None
    assert drains.state("u2") is not None
    await drains.close()
    assert drains.state("u2") is None


async def _until(check: Callable[[], object]) -> None:
    while not check():
        await asyncio.sleep(0.001)
