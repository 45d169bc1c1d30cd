"""prefill_operator.apply: order, ownership, preconditions, fences and refusals, on an API server in memory."""

from collections.abc import Iterable
from typing import Any

import pytest

from prefill_operator.apply import Applied, Applier, Target
from prefill_operator.errors import (
    ClusterUnavailable,
    ForeignObject,
    LeaseLost,
    QuotaDenied,
    RequestRejected,
    WriteConflict,
)
from prefill_operator.model import (
    Action,
    ChildKind,
    CreatePod,
    DeleteObject,
    DeletePod,
    EmitEvent,
    EnsureObject,
    EventType,
    RefusalReason,
    SetPoolAnnotation,
    StartDrain,
)
from prefill_operator.names import DRAINING_SINCE_ANNOTATION, EventReason, Kind
from prefill_operator.pool_memory import PoolMemory
from prefill_operator.resources import CHILDREN, EVENTS, PODS, POOLS, Json
from prefill_operator.settings import OperatorSettings
from prefill_testing.fake_api import Fault
from prefill_testing.in_loop import in_loop
from prefill_testing.operator_rig import KEY, OperatorRig

SERVICE = CHILDREN[ChildKind.SERVICE]
ENSURE_SERVICE = EnsureObject(kind=ChildKind.SERVICE, name="flash")
EVENT = EmitEvent(type=EventType.WARNING, reason=EventReason.NODE_LOST, message="n1 is gone", node="n1")


class Desk:
    """An Applier with one pool to work on."""

    def __init__(self, rig: OperatorRig) -> None:
        self.rig = rig
        self.memory = PoolMemory(uid="")

    @classmethod
    async def open(cls, *, with_pods: bool = False, settings: OperatorSettings | None = None) -> "Desk":
        rig = await OperatorRig.start(settings=settings)
        rig.create_pool()
        if with_pods:
            await rig.run(3)
        rig.tell()
        rig.api.requests.clear()
        return cls(rig)

    @property
    def applier(self) -> Applier:
        return self.rig.leader.reconciler._applier

    def target(self) -> Target:
        record = self.rig.leader.cache.pool(KEY)
        assert record is not None
        assert record.pool is not None
        self.memory.uid = record.uid
        view = self.rig.leader.reconciler._observer.observe(KEY, record.pool, self.memory)
        return Target(key=KEY, pool=record.pool, plan=view.plan, memory=self.memory, children=view.children)

    async def do(self, *actions: Action) -> Applied:
        return await self.applier.apply(self.target(), actions)

    def create(self, incarnation: int = 1) -> CreatePod:
        revision = self.target().plan.revision
        return CreatePod(name=f"flash-{revision}-{incarnation}", revision=revision, incarnation=incarnation)

    def fail(self, resource: str, **fault: Any) -> None:
        self.rig.api.faults.append(Fault(resource=resource, **fault))

    def verbs(self) -> list[tuple[str, str]]:
        return self.rig.written()

    def first_pod(self) -> Json:
        metadata: Json = self.rig.nodes.pods()[0]["metadata"]
        return metadata


def _without_uid(pods: Iterable[Json]) -> set[str]:
    return {pod["metadata"]["name"] for pod in pods}


@in_loop
async def test_actions_are_done_in_their_order() -> None:
    desk = await Desk.open()
    applied = await desk.do(SetPoolAnnotation(key="prefill.dev/ledger", value="{}"), ENSURE_SERVICE, desk.create())

    assert (applied.num_writes, applied.error) == (3, None)
    assert desk.verbs() == [("patch", "prefillpools"), ("apply", "services"), ("create", "pods")]
    assert desk.rig.pool()["metadata"]["annotations"]["prefill.dev/ledger"] == "{}"


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ({"status": 500}, ClusterUnavailable),
        ({"status": 429}, ClusterUnavailable),
        ({"status": 0}, ClusterUnavailable),
        ({"status": 409, "reason": "Conflict"}, WriteConflict),
        ({"status": 403, "reason": "Forbidden"}, RequestRejected),
        ({"status": 422, "reason": "Invalid"}, RequestRejected),
    ],
    ids=["500", "429", "no answer", "409", "403", "422"],
)
@in_loop
async def test_what_comes_after_a_failure_is_not_done(fault: dict[str, Any], error: type[Exception]) -> None:
    desk = await Desk.open()
    desk.fail("prefillpools", verb="patch", **fault)

    applied = await desk.do(SetPoolAnnotation(key="prefill.dev/ledger", value="{}"), desk.create(), EVENT)

    assert isinstance(applied.error, error)
    assert applied.num_writes == 0
    assert desk.rig.nodes.pods() == []
    assert desk.rig.api.all(EVENTS) == []


@in_loop
async def test_written_objects_are_known_before_any_event_tells() -> None:
    desk = await Desk.open()
    await desk.do(desk.create(), ENSURE_SERVICE)

    assert [pod.observed.name for pod in desk.rig.leader.cache.pods(KEY)] == desk.rig.names()
    assert [child.name for child in desk.rig.leader.cache.children(KEY)] == ["flash"]


@in_loop
async def test_empty_annotation_is_removed() -> None:
    desk = await Desk.open()
    await desk.do(SetPoolAnnotation(key="prefill.dev/ledger", value="{}"))
    await desk.do(SetPoolAnnotation(key="prefill.dev/ledger", value=""))

    assert desk.rig.pool()["metadata"]["annotations"] == {}


@in_loop
async def test_create_of_a_pod_that_is_there_already_is_no_failure() -> None:
    desk = await Desk.open()
    await desk.do(desk.create())
    desk.rig.leader.cache.remove(PODS, ("ns", desk.create().name), uid="")

    applied = await desk.do(desk.create(), desk.create(2))

    assert applied.error is None
    assert len(desk.rig.nodes.pods()) == 2
    assert len(desk.rig.leader.cache.pods(KEY)) == 2, "the pod is known again"


@in_loop
async def test_strangers_pod_with_our_name_is_remembered_and_left_alone() -> None:
    desk = await Desk.open()
    stranger = {"metadata": {"name": desk.create().name, "namespace": "ns"}, "spec": {}, "status": {"phase": "Running"}}
    desk.rig.api.put(PODS, stranger)

    applied = await desk.do(desk.create())

    assert applied.error is None
    assert desk.memory.pods[desk.create().name].pod.observed.phase == "Running"
    assert desk.rig.leader.cache.pods(KEY) == []
    assert desk.rig.api.get(PODS, desk.create().name, "ns")["spec"] == {}


@in_loop
async def test_quota_is_a_refusal_that_the_planner_hears_of() -> None:
    desk = await Desk.open()
    text = 'pods "x" is forbidden: exceeded quota: gpus, requested: 4, used: 8, limited: 8'
    desk.fail("pods", verb="create", status=403, reason="Forbidden", message=text)

    applied = await desk.do(desk.create(), desk.create(2))

    assert isinstance(applied.error, QuotaDenied)
    refusal = desk.memory.create_refusal
    assert refusal is not None
    assert (refusal.reason, refusal.at) == (RefusalReason.QUOTA_EXCEEDED, desk.rig.clock.now)
    assert "exceeded quota" in refusal.message
    assert desk.rig.nodes.pods() == []


@in_loop
async def test_refused_overlay_is_remembered_until_a_pod_is_made() -> None:
    desk = await Desk.open()
    desk.fail("pods", verb="create", status=422, reason="Invalid", message="spec.containers[0].image: Required value")
    await desk.do(desk.create())
    assert desk.memory.create_refusal is not None
    assert desk.memory.create_refusal.reason is RefusalReason.INVALID_OVERLAY

    await desk.do(desk.create())

    assert desk.memory.create_refusal is None


@in_loop
async def test_ending_namespace_is_no_fault_of_the_overlay() -> None:
    desk = await Desk.open()
    text = "unable to create new content in namespace ns because it is being terminated"
    desk.fail("pods", verb="create", status=403, reason="Forbidden", message=text)

    applied = await desk.do(desk.create())

    assert isinstance(applied.error, RequestRejected)
    assert desk.memory.create_refusal is None


@in_loop
async def test_strangers_service_is_never_touched() -> None:
    desk = await Desk.open()
    before = desk.rig.api.put(SERVICE, {"metadata": {"name": "flash", "namespace": "ns"}, "spec": {"ports": []}})

    applied = await desk.do(ENSURE_SERVICE, desk.create())

    assert isinstance(applied.error, ForeignObject)
    assert "Service ns/flash exists" in applied.error.message
    assert desk.rig.api.get(SERVICE, "flash", "ns") == before
    assert (ChildKind.SERVICE, "flash") in desk.memory.children
    assert desk.rig.nodes.pods() == []


@in_loop
async def test_our_own_service_without_labels_is_taken_back() -> None:
    desk = await Desk.open(with_pods=True)
    service = desk.rig.api.get(SERVICE, "flash", "ns")
    service["metadata"]["labels"] = {}
    desk.rig.api.put(SERVICE, service)
    desk.rig.tell()

    applied = await desk.do(ENSURE_SERVICE)

    assert applied.error is None
    assert desk.rig.api.get(SERVICE, "flash", "ns")["metadata"]["labels"]["prefill.dev/pool"] == "flash"


@in_loop
async def test_config_map_of_a_stranger_is_left_alone() -> None:
    desk = await Desk.open()
    name = f"flash-{desk.target().plan.revision}"
    config_map = CHILDREN[ChildKind.CONFIG_MAP]
    before = desk.rig.api.put(config_map, {"metadata": {"name": name, "namespace": "ns"}, "data": {"a": "b"}})

    applied = await desk.do(EnsureObject(kind=ChildKind.CONFIG_MAP, name=name))

    assert isinstance(applied.error, ForeignObject)
    assert desk.rig.api.get(config_map, name, "ns") == before


@in_loop
async def test_delete_means_the_pod_that_was_decided_about() -> None:
    desk = await Desk.open(with_pods=True)
    pod = desk.first_pod()

    applied = await desk.do(DeletePod(name=pod["name"], uid="uid-of-one-before", grace_seconds=1, reason="x"))

    assert applied.error is None
    assert pod["name"] in _without_uid(desk.rig.nodes.pods())
    assert "deletionTimestamp" not in desk.first_pod()


@in_loop
async def test_deleted_pod_counts_as_terminating_at_once() -> None:
    desk = await Desk.open(with_pods=True)
    pod = desk.first_pod()

    await desk.do(DeletePod(name=pod["name"], uid=pod["uid"], grace_seconds=45, reason="Drained"))

    record = next(item for item in desk.rig.leader.cache.pods(KEY) if item.observed.uid == pod["uid"])
    assert record.observed.terminating_since == pytest.approx(desk.rig.clock.now, abs=1.0)
    assert desk.first_pod()["deletionGracePeriodSeconds"] == 45


@in_loop
async def test_delete_without_grace_leaves_it_to_the_pod() -> None:
    desk = await Desk.open(with_pods=True)
    pod = desk.first_pod()

    await desk.do(DeletePod(name=pod["name"], uid=pod["uid"], grace_seconds=None, reason="CrashLoop"))

    assert desk.first_pod()["deletionGracePeriodSeconds"] == 165


@in_loop
async def test_pod_that_is_gone_already_is_no_failure() -> None:
    desk = await Desk.open(with_pods=True)
    pod = desk.first_pod()
    desk.rig.api.remove(PODS, pod["name"], "ns")

    delete = DeletePod(name=pod["name"], uid=pod["uid"], grace_seconds=None, reason="x")
    drain = StartDrain(name=pod["name"], uid=pod["uid"], timeout_seconds=5.0, reason="x")
    applied = await desk.do(drain, delete)

    assert applied.error is None
    assert pod["uid"] not in {item.observed.uid for item in desk.rig.leader.cache.pods(KEY)}


@in_loop
async def test_drain_annotates_shuts_the_gate_and_calls_the_engine() -> None:
    desk = await Desk.open(with_pods=True, settings=OperatorSettings(readiness_gate=True))
    pod = desk.first_pod()

    await desk.do(StartDrain(name=pod["name"], uid=pod["uid"], timeout_seconds=7.0, reason="ScaleDown"))
    await desk.rig.settle()

    assert desk.first_pod()["annotations"][DRAINING_SINCE_ANNOTATION].endswith("Z")
    assert desk.rig.engines.calls == [("10.0.0.1:50051", 7.0)]
    body = desk.rig.api.get(PODS, pod["name"], "ns")
    gate = next(item for item in body["status"]["conditions"] if item["type"] == "prefill.dev/accepting")
    assert (gate["status"], gate["reason"]) == ("False", "Draining")
    assert {item["type"] for item in body["status"]["conditions"]} > {"Ready", "PodScheduled"}, "the kubelet's stay"


@in_loop
async def test_objects_are_deleted_only_if_ours() -> None:
    desk = await Desk.open(with_pods=True)
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


@in_loop
async def test_nothing_is_written_once_the_lease_may_be_others() -> None:
    desk = await Desk.open(with_pods=True)
    pod = desk.first_pod()
    target = desk.target()
    actions: list[Action] = [
        SetPoolAnnotation(key="a", value="b"),
        ENSURE_SERVICE,
        desk.create(9),
        StartDrain(name=pod["name"], uid=pod["uid"], timeout_seconds=5.0, reason="x"),
        DeletePod(name=pod["name"], uid=pod["uid"], grace_seconds=None, reason="x"),
        DeleteObject(kind=ChildKind.SERVICE, name="flash"),
        EVENT,
    ]
    desk.rig.clock.now += desk.rig.settings.lease.renew_deadline_seconds
    for action in actions:
        with pytest.raises(LeaseLost):
            await desk.applier.apply(target, [action])
    with pytest.raises(LeaseLost):
        await desk.applier.write_status(target, target.pool.status)
    with pytest.raises(LeaseLost):
        await desk.applier.adopt(target, desk.rig.leader.cache.pods(KEY)[0])

    assert desk.rig.api.writes() == []


@in_loop
async def test_events_of_one_reason_come_once_a_minute() -> None:
    desk = await Desk.open()
    other = EmitEvent(type=EventType.WARNING, reason=EventReason.NODE_LOST, message="n2 is gone")
    for _ in range(3):
        await desk.do(EVENT, other)
    messages = [
        event["message"] for event in desk.rig.api.all(EVENTS) if event["involvedObject"]["kind"] == "PrefillPool"
    ]
    assert messages == ["n1 is gone"]

    for _ in range(8):
        await desk.rig.advance(8.0)
    await desk.do(EVENT)

    events = [event for event in desk.rig.api.all(EVENTS) if event["involvedObject"]["kind"] == "PrefillPool"]
    assert {event["message"] for event in events} == {"n1 is gone", "n1 is gone (and 3 more like it)"}


@in_loop
async def test_event_is_told_on_pool_and_node() -> None:
    desk = await Desk.open()
    await desk.do(EVENT)

    pool, node = sorted(desk.rig.api.all(EVENTS), key=lambda event: str(event["involvedObject"]["kind"]), reverse=True)
    assert (pool["involvedObject"]["uid"], pool["metadata"]["namespace"]) == (desk.target().pool.uid, "ns")
    assert (node["involvedObject"]["name"], node["metadata"]["namespace"]) == ("n1", "default")
    assert node["message"] == "PrefillPool/ns/flash: n1 is gone"
    assert (pool["type"], pool["reason"], pool["count"]) == ("Warning", "NodeLost", 1)


@in_loop
async def test_namespaced_operator_writes_no_events_on_nodes() -> None:
    desk = await Desk.open(settings=OperatorSettings(namespaces=("ns",)))
    await desk.do(EVENT)

    assert [event["involvedObject"]["kind"] for event in desk.rig.api.all(EVENTS)] == ["PrefillPool"]


@in_loop
async def test_event_that_cannot_be_written_stops_nothing() -> None:
    desk = await Desk.open()
    desk.fail("events", status=403, reason="Forbidden", times=9)

    applied = await desk.do(EVENT, desk.create())

    assert (applied.num_writes, applied.error) == (1, None)


@in_loop
async def test_status_of_a_pool_that_is_gone_is_dropped() -> None:
    desk = await Desk.open()
    target = desk.target()
    desk.rig.api.remove(POOLS[Kind.PREFILL_POOL], "flash", "ns")

    await desk.applier.write_status(target, target.pool.status)

    assert desk.rig.api.all(POOLS[Kind.PREFILL_POOL]) == []
