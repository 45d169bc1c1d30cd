"""prefill_operator.reconcile and what belongs to whom: children edited, deleted or of strangers, orphans, the pool's end."""

from collections.abc import Awaitable, Callable

from prometheus_client import generate_latest

from prefill_operator.model import ChildKind
from prefill_operator.names import Kind
from prefill_operator.resources import CHILDREN, PODS, POOLS
from prefill_testing.in_loop import in_loop
from prefill_testing.operator_rig import OperatorRig

SERVICE = CHILDREN[ChildKind.SERVICE]
BUDGET = CHILDREN[ChildKind.DISRUPTION_BUDGET]
CONFIG_MAP = CHILDREN[ChildKind.CONFIG_MAP]
POOL = POOLS[Kind.PREFILL_POOL]
Rigs = Callable[..., Awaitable[OperatorRig]]


@in_loop
async def test_deleted_and_changed_children_come_back(ready_rig: Rigs) -> None:
    rig = await ready_rig()
    before = {resource: rig.api.all(resource) for resource in (SERVICE, BUDGET)}
    rig.api.remove(SERVICE, "flash", "ns")
    budget = rig.api.get(BUDGET, "flash", "ns")
    rig.api.put(BUDGET, {**budget, "spec": {**budget["spec"], "minAvailable": 0}})
    await rig.settle()

    for resource, bodies in before.items():
        assert [body["spec"] for body in rig.api.all(resource)] == [body["spec"] for body in bodies]


@in_loop
async def test_deleted_pod_is_replaced_under_a_new_name(ready_rig: Rigs) -> None:
    rig = await ready_rig()
    lost = rig.names()[0]
    rig.api.remove(PODS, lost, "ns")
    await rig.run(3)

    assert lost not in rig.names()
    assert len(rig.names()) == 3
    assert rig.condition("Ready")["status"] == "True"


@in_loop
async def test_deleted_pool_leaves_nothing_behind(ready_rig: Rigs) -> None:
    rig = await ready_rig()
    assert 'pool="flash"' in _metrics(rig)
    rig.api.remove(POOL, "flash", "ns")
    await rig.settle()

    assert rig.nodes.pods() == []
    assert rig.api.writes() == []
    assert 'pool="flash"' not in _metrics(rig)
    assert rig.leader.reconciler._memories == {}


@in_loop
async def test_pool_made_anew_under_the_same_name_starts_anew(ready_rig: Rigs) -> None:
    rig = await ready_rig()
    rig.api.remove(POOL, "flash", "ns")
    new = rig.create_pool()
    await rig.run(4)

    assert {pod["metadata"]["ownerReferences"][0]["uid"] for pod in rig.nodes.pods()} == {new["metadata"]["uid"]}
    assert rig.condition("Ready")["status"] == "True"


@in_loop
async def test_orphan_of_ours_is_adopted(ready_rig: Rigs) -> None:
    rig = await ready_rig()
    pod = rig.nodes.pods()[0]
    pod["metadata"]["ownerReferences"] = []
    rig.api.put(PODS, pod)
    await rig.settle()

    owner = rig.nodes.pods()[0]["metadata"]["ownerReferences"][0]
    assert (owner["uid"], owner["controller"]) == (rig.pool()["metadata"]["uid"], True)
    assert len(rig.names()) == 3


@in_loop
async def test_strangers_pod_under_our_labels_is_left_alone_and_reported(ready_rig: Rigs) -> None:
    rig = await ready_rig()
    pod = rig.nodes.pods()[0]
    pod["metadata"]["ownerReferences"] = [{"uid": "somebody", "controller": True}]
    rig.api.put(PODS, pod)
    await rig.run(4)

    assert pod["metadata"]["name"] in rig.names()
    assert len(rig.names()) == 4
    assert rig.condition("Stalled")["reason"] == "ForeignObject"


@in_loop
async def test_strangers_service_is_reported_and_taken_once_it_is_gone() -> None:
    rig = await OperatorRig.start()
    rig.api.put(SERVICE, {"metadata": {"name": "flash", "namespace": "ns"}, "spec": {}})
    rig.create_pool()
    await rig.run(4)
    assert rig.condition("Stalled")["reason"] == "ForeignObject"
    assert len(rig.names()) == 3, "pods do not wait for the Service"

    rig.api.remove(SERVICE, "flash", "ns")
    await rig.run(40)

    assert rig.condition("Stalled")["status"] == "False"
    assert rig.api.get(SERVICE, "flash", "ns")["metadata"]["ownerReferences"]


def _metrics(rig: OperatorRig) -> str:
    return generate_latest(rig.metrics.registry).decode()
