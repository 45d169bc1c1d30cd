"""prefill_operator.apply and objects of others: what carries our names is never touched unless it is ours."""

from collections.abc import Awaitable, Callable
from typing import Any

from prefill_operator.errors import (
    ForeignObject,
)
from prefill_operator.model import (
    ChildKind,
    DeleteObject,
    EnsureObject,
)
from prefill_operator.resources import CHILDREN, PODS
from prefill_testing.in_loop import in_loop
from prefill_testing.operator_rig import KEY

SERVICE = CHILDREN[ChildKind.SERVICE]
ENSURE_SERVICE = EnsureObject(kind=ChildKind.SERVICE, name="flash")
Desks = Callable[..., Awaitable[Any]]


@in_loop
async def test_strangers_pod_with_our_name_is_remembered_and_left_alone(open_desk: Desks) -> None:
    desk = await open_desk()
    stranger = {"metadata": {"name": desk.create().name, "namespace": "ns"}, "spec": {}, "status": {"phase": "Running"}}
    desk.rig.api.put(PODS, stranger)

    applied = await desk.do(desk.create())

    assert applied.error is None
    assert desk.memory.pods[desk.create().name].pod.observed.phase == "Running"
    assert desk.rig.leader.cache.pods(KEY) == []
    assert desk.rig.api.get(PODS, desk.create().name, "ns")["spec"] == {}


@in_loop
async def test_strangers_service_is_never_touched(open_desk: Desks) -> None:
    desk = await open_desk()
    before = desk.rig.api.put(SERVICE, {"metadata": {"name": "flash", "namespace": "ns"}, "spec": {"ports": []}})

    applied = await desk.do(ENSURE_SERVICE, desk.create())

    assert isinstance(applied.error, ForeignObject)
    assert "Service ns/flash exists" in applied.error.message
    assert desk.rig.api.get(SERVICE, "flash", "ns") == before
    assert (ChildKind.SERVICE, "flash") in desk.memory.children
    assert desk.rig.nodes.pods() == []


@in_loop
async def test_our_own_service_without_labels_is_taken_back(open_desk: Desks) -> None:
    desk = await open_desk(with_pods=True)
    service = desk.rig.api.get(SERVICE, "flash", "ns")
    service["metadata"]["labels"] = {}
    desk.rig.api.put(SERVICE, service)
    desk.rig.tell()

    applied = await desk.do(ENSURE_SERVICE)

    assert applied.error is None
    assert desk.rig.api.get(SERVICE, "flash", "ns")["metadata"]["labels"]["prefill.dev/pool"] == "flash"


@in_loop
async def test_config_map_of_a_stranger_is_left_alone(open_desk: Desks) -> None:
    desk = await open_desk()
    name = f"flash-{desk.target().plan.revision}"
    config_map = CHILDREN[ChildKind.CONFIG_MAP]
    before = desk.rig.api.put(config_map, {"metadata": {"name": name, "namespace": "ns"}, "data": {"a": "b"}})

    applied = await desk.do(EnsureObject(kind=ChildKind.CONFIG_MAP, name=name))

    assert isinstance(applied.error, ForeignObject)
    assert desk.rig.api.get(config_map, name, "ns") == before


@in_loop
async def test_objects_are_deleted_only_if_ours(open_desk: Desks) -> None:
    desk = await open_desk(with_pods=True)
    service = desk.rig.api.get(SERVICE, "flash", "ns")
    service["metadata"]["ownerReferences"][0]["uid"] = "somebody"
    desk.rig.api.put(SERVICE, service)
    desk.rig.tell()
    budget = CHILDREN[ChildKind.DISRUPTION_BUDGET]

    applied = await desk.do(
        DeleteObject(kind=ChildKind.SERVICE, name="flash"), DeleteObject(kind=ChildKind.DISRUPTION_BUDGET, name="flash")
    )

    assert applied.error is None
    assert len(desk.rig.api.all(SERVICE)) == 1
    assert desk.rig.api.all(budget) == []
