"""prefill_operator.apply: order, ownership, preconditions, fences and refusals, on an API server in memory."""

from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import pytest

from prefill_operator.errors import (
    ClusterUnavailable,
    LeaseLost,
    QuotaDenied,
    RequestRejected,
    WriteConflict,
)
from prefill_operator.model import (
    Action,
    ChildKind,
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
from prefill_operator.resources import CHILDREN, EVENTS, PODS, POOLS, Json
from prefill_operator.settings import OperatorSettings
from prefill_testing.in_loop import in_loop
from prefill_testing.operator_rig import KEY

SERVICE = CHILDREN[ChildKind.SERVICE]
ENSURE_SERVICE = EnsureObject(kind=ChildKind.SERVICE, name="flash")
EVENT = EmitEvent(type=EventType.WARNING, reason=EventReason.NODE_LOST, message="n1 is gone", node="n1")
Desks = Callable[..., Awaitable[Any]]


def _without_uid(pods: Iterable[Json]) -> set[str]:
    return {pod["metadata"]["name"] for pod in pods}


@in_loop
async def test_actions_are_done_in_their_order(open_desk: Desks) -> None:
    desk = await open_desk()
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
async def test_what_comes_after_a_failure_is_not_done(
    open_desk: Desks, fault: dict[str, Any], error: type[Exception]
) -> None:
    desk = await open_desk()
    desk.fail("prefillpools", verb="patch", **fault)

    applied = await desk.do(SetPoolAnnotation(key="prefill.dev/ledger", value="{}"), desk.create(), EVENT)

    assert isinstance(applied.error, error)
    assert applied.num_writes == 0
    assert desk.rig.nodes.pods() == []
    assert desk.rig.api.all(EVENTS) == []


@in_loop
async def test_written_objects_are_known_before_any_event_tells(open_desk: Desks) -> None:
    desk = await open_desk()
    await desk.do(desk.create(), ENSURE_SERVICE)

    assert [pod.observed.name for pod in desk.rig.leader.cache.pods(KEY)] == desk.rig.names()
    assert [child.name for child in desk.rig.leader.cache.children(KEY)] == ["flash"]


@in_loop
async def test_empty_annotation_is_removed(open_desk: Desks) -> None:
    desk = await open_desk()
    await desk.do(SetPoolAnnotation(key="prefill.dev/ledger", value="{}"))
    await desk.do(SetPoolAnnotation(key="prefill.dev/ledger", value=""))

    assert desk.rig.pool()["metadata"]["annotations"] == {}


@in_loop
async def test_create_of_a_pod_that_is_there_already_is_no_failure(open_desk: Desks) -> None:
    desk = await open_desk()
    await desk.do(desk.create())
    desk.rig.leader.cache.remove(PODS, ("ns", desk.create().name), uid="")

    applied = await desk.do(desk.create(), desk.create(2))

    assert applied.error is None
    assert len(desk.rig.nodes.pods()) == 2
    assert len(desk.rig.leader.cache.pods(KEY)) == 2, "the pod is known again"


@in_loop
async def test_quota_is_a_refusal_that_the_planner_hears_of(open_desk: Desks) -> None:
    desk = await open_desk()
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
async def test_refused_overlay_is_remembered_until_a_pod_is_made(open_desk: Desks) -> None:
    desk = await open_desk()
    desk.fail("pods", verb="create", status=422, reason="Invalid", message="spec.containers[0].image: Required value")
    await desk.do(desk.create())
    assert desk.memory.create_refusal is not None
    assert desk.memory.create_refusal.reason is RefusalReason.INVALID_OVERLAY

    await desk.do(desk.create())

    assert desk.memory.create_refusal is None


@in_loop
async def test_ending_namespace_is_no_fault_of_the_overlay(open_desk: Desks) -> None:
    desk = await open_desk()
    text = "unable to create new content in namespace ns because it is being terminated"
    desk.fail("pods", verb="create", status=403, reason="Forbidden", message=text)

    applied = await desk.do(desk.create())

    assert isinstance(applied.error, RequestRejected)
    assert desk.memory.create_refusal is None


@in_loop
async def test_delete_means_the_pod_that_was_decided_about(open_desk: Desks) -> None:
    desk = await open_desk(with_pods=True)
    pod = desk.first_pod()

    applied = await desk.do(DeletePod(name=pod["name"], uid="uid-of-one-before", grace_seconds=1, reason="x"))

    assert applied.error is None
    assert pod["name"] in _without_uid(desk.rig.nodes.pods())
    assert "deletionTimestamp" not in desk.first_pod()


@in_loop
async def test_deleted_pod_counts_as_terminating_at_once(open_desk: Desks) -> None:
    desk = await open_desk(with_pods=True)
    pod = desk.first_pod()

    await desk.do(DeletePod(name=pod["name"], uid=pod["uid"], grace_seconds=45, reason="Drained"))

    record = next(item for item in desk.rig.leader.cache.pods(KEY) if item.observed.uid == pod["uid"])
    assert record.observed.terminating_since == pytest.approx(desk.rig.clock.now, abs=1.0)
    assert desk.first_pod()["deletionGracePeriodSeconds"] == 45


@in_loop
async def test_delete_without_grace_leaves_it_to_the_pod(open_desk: Desks) -> None:
    desk = await open_desk(with_pods=True)
    pod = desk.first_pod()

    await desk.do(DeletePod(name=pod["name"], uid=pod["uid"], grace_seconds=None, reason="CrashLoop"))

    assert desk.first_pod()["deletionGracePeriodSeconds"] == 165


@in_loop
async def test_pod_that_is_gone_already_is_no_failure(open_desk: Desks) -> None:
    desk = await open_desk(with_pods=True)
    pod = desk.first_pod()
    desk.rig.api.remove(PODS, pod["name"], "ns")

    delete = DeletePod(name=pod["name"], uid=pod["uid"], grace_seconds=None, reason="x")
    drain = StartDrain(name=pod["name"], uid=pod["uid"], timeout_seconds=5.0, reason="x")
    applied = await desk.do(drain, delete)

    assert applied.error is None
    assert pod["uid"] not in {item.observed.uid for item in desk.rig.leader.cache.pods(KEY)}


@in_loop
async def test_drain_annotates_shuts_the_gate_and_calls_the_engine(open_desk: Desks) -> None:
    desk = await open_desk(with_pods=True, settings=OperatorSettings(readiness_gate=True))
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
async def test_nothing_is_written_once_the_lease_may_be_others(open_desk: Desks) -> None:
    desk = await open_desk(with_pods=True)
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
async def test_status_of_a_pool_that_is_gone_is_dropped(open_desk: Desks) -> None:
    desk = await open_desk()
    target = desk.target()
    desk.rig.api.remove(POOLS[Kind.PREFILL_POOL], "flash", "ns")

    await desk.applier.write_status(target, target.pool.status)

    assert desk.rig.api.all(POOLS[Kind.PREFILL_POOL]) == []
