"""prefill_operator.resync: what a watch missed is found, counted and repaired; what is only late is not."""

from collections.abc import Awaitable, Callable

from prometheus_client import generate_latest

from prefill_operator.model import ChildKind
from prefill_operator.names import Kind
from prefill_operator.resources import CHILDREN, NODES, PODS, POOLS
from prefill_operator.resync import DEAD_ROUNDS
from prefill_testing.in_loop import in_loop
from prefill_testing.operator_rig import KEY, OperatorRig


async def _rig(during_grace: Callable[[OperatorRig], None] = lambda _: None) -> OperatorRig:
    rig = await OperatorRig.start()

    async def grace(_: float) -> None:
        during_grace(rig)

    sleep: Callable[[float], Awaitable[None]] = grace
    rig.leader.resync._sleep = sleep
    rig.create_pool()
    await rig.run(4)
    return rig


def _mismatches(rig: OperatorRig) -> dict[str, float]:
    lines = generate_latest(rig.metrics.registry).decode().splitlines()
    rows = [line for line in lines if line.startswith("prefill_operator_resync_mismatch_total{")]
    return {line.split('"')[1]: float(line.split()[-1]) for line in rows}


@in_loop
async def test_cache_that_is_right_finds_nothing() -> None:
    rig = await _rig()
    rig.api.requests.clear()

    assert await rig.leader.resync.compare() == 0
    assert rig.metrics.registry.get_sample_value("prefill_operator_resync_rounds_total") == 1
    assert {request.verb for request in rig.api.requests} == {"list"}
    assert rig.leader.queue.depth == 0


@in_loop
async def test_event_that_is_only_late_is_no_mismatch() -> None:
    rig = await _rig(OperatorRig.tell)
    rig.nodes.change_pod(rig.names()[0], {"phase": "Failed"})
    rig.api.remove(PODS, rig.names()[1], "ns")

    assert await rig.leader.resync.compare() == 0
    assert _mismatches(rig) == {}


@in_loop
async def test_missed_change_is_repaired_and_its_pool_woken() -> None:
    rig = await _rig()
    rig.nodes.change_pod(rig.names()[0], {"phase": "Failed"})

    assert await rig.leader.resync.compare() == 1
    assert _mismatches(rig) == {"pods": 1.0}
    assert rig.leader.cache.pods(KEY)[0].observed.phase == "Failed"
    assert await rig.leader.queue.take() == KEY


@in_loop
async def test_missed_deletion_is_repaired() -> None:
    rig = await _rig()
    lost = rig.names()[0]
    rig.api.remove(PODS, lost, "ns")

    assert await rig.leader.resync.compare() == 1
    assert lost not in {pod.observed.name for pod in rig.leader.cache.pods(KEY)}
    assert rig.leader.queue.depth == 1


@in_loop
async def test_missed_creation_is_repaired() -> None:
    rig = await _rig()
    rig.api.put(POOLS[Kind.PREFILL_POOL], {**rig.pool(), "metadata": {"name": "other", "namespace": "ns"}})
    rig.nodes.set_node("node-9")

    assert await rig.leader.resync.compare() == 2
    assert _mismatches(rig) == {"prefillpools": 1.0, "nodes": 1.0}
    assert len(rig.leader.cache.pool_keys()) == 2


@in_loop
async def test_pod_made_anew_under_its_name_is_found() -> None:
    rig = await _rig()
    pod = rig.nodes.pods()[0]
    rig.api.remove(PODS, pod["metadata"]["name"], "ns")
    new = {key: value for key, value in pod["metadata"].items() if key not in ("uid", "resourceVersion")}
    rig.api.put(PODS, {**pod, "metadata": new})

    assert await rig.leader.resync.compare() == 1
    assert rig.leader.cache.pods(KEY)[0].observed.uid != pod["metadata"]["uid"]


@in_loop
async def test_strangers_objects_are_not_missed() -> None:
    rig = await _rig()
    rig.api.put(CHILDREN[ChildKind.SERVICE], {"metadata": {"name": "web", "namespace": "ns"}, "spec": {}})
    rig.api.put(PODS, {"metadata": {"name": "web", "namespace": "ns"}, "spec": {}, "status": {}})

    assert await rig.leader.resync.compare() == 0


@in_loop
async def test_watch_that_misses_something_each_time_is_dead_until_a_good_round() -> None:
    rig = await _rig()
    resync = rig.leader.resync
    for round_ in range(DEAD_ROUNDS):
        assert list(resync.dead_watches) == []
        rig.nodes.set_node("node-0", unschedulable=bool(round_ % 2 == 0))
        await resync.compare()
    assert list(resync.dead_watches) == [NODES.plural]

    await resync.compare()

    assert list(resync.dead_watches) == []


@in_loop
async def test_relist_of_a_watch_hurries_the_next_round() -> None:
    rig = await _rig()
    sink = rig.leader.sink
    pod = rig.nodes.pods()[0]
    sink.take(PODS, None, pod)
    sink.take(PODS, None, pod)
    assert not rig.leader.resync._soon.is_set(), "the first LIST"

    await rig.advance(100.0)
    sink.take(PODS, None, pod)

    assert rig.leader.resync._soon.is_set()
    assert (
        'prefill_operator_watch_restarts_total{resource="pods"} 1.0' in generate_latest(rig.metrics.registry).decode()
    )
