"""prefill_operator.reconcile: whole passes on an API server in memory, from the pool's creation to its end."""

from typing import Any

import pytest
from prometheus_client import generate_latest

from prefill_operator.errors import LeaseLost
from prefill_operator.model import ChildKind
from prefill_operator.names import ACCEPTING_GATE, Kind
from prefill_operator.reconcile import MAX_PASSES_IN_A_ROW
from prefill_operator.resources import CHILDREN, NODES, PODS, POOLS, Json
from prefill_operator.settings import OperatorSettings
from prefill_testing.fake_api import FakeApi, Fault
from prefill_testing.in_loop import in_loop
from prefill_testing.operator_rig import KEY, OperatorRig, RigClock

SERVICE = CHILDREN[ChildKind.SERVICE]
BUDGET = CHILDREN[ChildKind.DISRUPTION_BUDGET]
CONFIG_MAP = CHILDREN[ChildKind.CONFIG_MAP]
POOL = POOLS[Kind.PREFILL_POOL]
IMAGE_2 = {"image": "engine:2"}


async def _ready_rig(spec: dict[str, Any] | None = None, **options: Any) -> OperatorRig:
    rig = await OperatorRig.start(**options)
    rig.create_pool(spec)
    await rig.run(8)
    assert rig.condition("Ready")["status"] == "True", rig.pool()["status"]
    rig.api.requests.clear()
    return rig


async def _restart(rig: OperatorRig) -> OperatorRig:
    """Another process, the same cluster; the old one is gone."""
    await rig.lease.release()
    again = await OperatorRig.start(api=rig.api, clock=rig.clock, settings=rig.settings, nodes=0)
    again.nodes = rig.nodes
    rig.api.requests.clear()
    return again


@in_loop
async def test_pool_becomes_ready_with_what_it_owns() -> None:
    rig = await OperatorRig.start()
    pool = rig.create_pool()
    await rig.run(4)

    status = rig.pool()["status"]
    assert (status["readyPEs"], status["replicas"], status["redundancy"]["ready"]) == (3, 2, 1)
    assert {item["type"]: item["status"] for item in status["conditions"]}["Available"] == "True"
    owned = [*rig.nodes.pods(), *rig.api.all(SERVICE), *rig.api.all(BUDGET), *rig.api.all(CONFIG_MAP)]
    assert len(owned) == 6
    assert {item["metadata"]["ownerReferences"][0]["uid"] for item in owned} == {pool["metadata"]["uid"]}


@in_loop
async def test_pool_at_rest_is_never_written() -> None:
    rig = await _ready_rig()
    rig.leader.queue.add(KEY)
    await rig.run(5, seconds=600.0 / 60)

    assert rig.api.writes() == []


@in_loop
async def test_restart_writes_nothing() -> None:
    rig = await _restart(await _ready_rig())

    assert await rig.settle() == 1
    assert rig.api.writes() == []


@in_loop
async def test_first_pass_sees_all_pods_however_many_pages_they_take() -> None:
    rig = await _restart(await _ready_rig({"replicas": 5}))

    assert len(rig.leader.cache.pods(KEY)) == 6
    await rig.settle()
    assert rig.api.writes() == []


@in_loop
async def test_rollout_never_goes_below_the_replicas() -> None:
    rig = await _ready_rig()
    rig.change_spec(engine=IMAGE_2)
    fewest = 9
    for _ in range(40):
        await rig.settle()
        rig.nodes.step()
        ready = [pod for pod in rig.nodes.pods() if _is_ready(pod)]
        fewest = min(fewest, len(ready))
        await rig.advance(2.0)
        if rig.pool()["status"]["updatedPEs"] == 3 and rig.condition("Ready")["status"] == "True":
            break
    await rig.run(2)

    assert {pod["spec"]["containers"][0]["image"] for pod in rig.nodes.pods()} == {"engine:2"}
    assert fewest >= 2
    assert len(rig.api.all(CONFIG_MAP)) == 1, "the old revision's went with its last pod"


@in_loop
async def test_rollout_goes_on_after_a_restart_in_the_middle() -> None:
    rig = await _ready_rig()
    rig.change_spec(engine=IMAGE_2)
    await rig.run(1)
    assert len({pod["metadata"]["labels"]["prefill.dev/revision"] for pod in rig.nodes.pods()}) == 2

    rig = await _restart(rig)
    await rig.run(14)

    assert {pod["spec"]["containers"][0]["image"] for pod in rig.nodes.pods()} == {"engine:2"}
    assert rig.condition("Ready")["status"] == "True"


@in_loop
async def test_drain_goes_on_after_a_restart_with_what_is_left_of_its_time() -> None:
    rig = await _ready_rig()
    rig.engines.done.clear()
    rig.change_spec(replicas=1, lifecycle={"drainTimeoutSeconds": 100})
    await rig.settle()
    assert [timeout for _, timeout in rig.engines.calls] == [100.0]

    rig = await _restart(rig)
    rig.clock.now += 30.0
    await rig.lease.try_hold()
    await rig.settle()
    assert [round(timeout) for _, timeout in rig.engines.calls] == [70]

    await rig.run(6)
    assert len(rig.nodes.pods()) == 2


@in_loop
async def test_deleted_and_changed_children_come_back() -> None:
    rig = await _ready_rig()
    before = {resource: rig.api.all(resource) for resource in (SERVICE, BUDGET)}
    rig.api.remove(SERVICE, "flash", "ns")
    budget = rig.api.get(BUDGET, "flash", "ns")
    rig.api.put(BUDGET, {**budget, "spec": {**budget["spec"], "minAvailable": 0}})
    await rig.settle()

    for resource, bodies in before.items():
        assert [body["spec"] for body in rig.api.all(resource)] == [body["spec"] for body in bodies]


@in_loop
async def test_deleted_pod_is_replaced_under_a_new_name() -> None:
    rig = await _ready_rig()
    lost = rig.names()[0]
    rig.api.remove(PODS, lost, "ns")
    await rig.run(3)

    assert lost not in rig.names()
    assert len(rig.names()) == 3
    assert rig.condition("Ready")["status"] == "True"


@in_loop
async def test_lost_node_is_left_and_its_pods_are_not_waited_for() -> None:
    rig = await _ready_rig({"lifecycle": {"nodeLostGraceSeconds": 5}})
    node = rig.nodes.pods()[0]["spec"]["nodeName"]
    rig.nodes.dead.add(node)
    rig.nodes.set_node(node, ready=False)
    await rig.run(6)

    ready = [pod for pod in rig.nodes.pods() if _is_ready(pod) and pod["spec"]["nodeName"] != node]
    assert len(ready) == 3
    assert rig.condition("Available")["status"] == "True"


@in_loop
async def test_without_nodes_the_status_says_so() -> None:
    rig_api = FakeApi(clock=RigClock().time)
    rig_api.forbidden.add(NODES.plural)
    rig = await OperatorRig.start(api=rig_api)
    rig.create_pool()
    await rig.run(4)

    assert rig.pool()["status"]["notWatched"] == ["nodes"]
    assert rig.pool()["status"]["readyPEs"] == 3
    assert NODES not in rig.leader.resources


@in_loop
async def test_deleted_pool_leaves_nothing_behind() -> None:
    rig = await _ready_rig()
    assert 'pool="flash"' in _metrics(rig)
    rig.api.remove(POOL, "flash", "ns")
    await rig.settle()

    assert rig.nodes.pods() == []
    assert rig.api.writes() == []
    assert 'pool="flash"' not in _metrics(rig)
    assert rig.leader.reconciler._memories == {}


@in_loop
async def test_pool_made_anew_under_the_same_name_starts_anew() -> None:
    rig = await _ready_rig()
    rig.api.remove(POOL, "flash", "ns")
    new = rig.create_pool()
    await rig.run(4)

    assert {pod["metadata"]["ownerReferences"][0]["uid"] for pod in rig.nodes.pods()} == {new["metadata"]["uid"]}
    assert rig.condition("Ready")["status"] == "True"


@in_loop
async def test_spec_that_cannot_be_used_is_told_and_pods_stay() -> None:
    rig = await _ready_rig()
    names = rig.names()
    rig.change_spec(gpu={})
    await rig.run(3)

    plan = rig.condition("PlanFeasible")
    assert (plan["status"], plan["reason"]) == ("False", "SpecInvalid")
    assert "spec.gpu" in plan["message"]
    assert rig.names() == names
    rig.api.requests.clear()
    rig.leader.queue.add(KEY)
    await rig.settle()
    assert rig.api.writes() == [], "told once"

    rig.change_spec(gpu={"product": "NVIDIA-H200"})
    await rig.run(3)
    assert rig.condition("PlanFeasible")["status"] == "True"


@in_loop
async def test_status_is_written_at_most_every_two_seconds() -> None:
    rig = await OperatorRig.start()
    rig.create_pool()
    await rig.settle()
    rig.api.requests.clear()
    for replicas in (3, 4, 5):
        rig.change_spec(replicas=replicas)
        await rig.settle()
        await rig.advance(0.25)
    assert [request for request in rig.api.writes() if request.subresource == "status"] == []

    await rig.advance(2.0)
    await rig.settle()

    assert len([request for request in rig.api.writes() if request.subresource == "status"]) == 1
    assert rig.pool()["status"]["observedGeneration"] == 4


@pytest.mark.parametrize(
    "fault", [{"status": 0}, {"status": 500}, {"status": 429, "retry_after": 7.0}, {"status": 504}]
)
@in_loop
async def test_flapping_api_server_ends_in_the_same_state_without_runaways(fault: dict[str, Any]) -> None:
    rig = await OperatorRig.start()
    rig.api.faults += [Fault(resource=resource, times=2, **fault) for resource in ("pods", "services", "prefillpools")]
    rig.create_pool()
    await rig.run(30)

    assert len(rig.names()) == 3
    assert rig.condition("Ready")["status"] == "True"


@in_loop
async def test_create_whose_answer_was_lost_makes_no_second_pod() -> None:
    rig = await OperatorRig.start()
    rig.api.faults.append(Fault(verb="create", resource="pods", after=True, times=2))
    rig.create_pool()
    await rig.run(8)

    assert len(rig.names()) == 3
    assert rig.condition("Ready")["status"] == "True"


@in_loop
async def test_failures_back_off() -> None:
    rig = await OperatorRig.start()
    rig.api.faults.append(Fault(verb="create", resource="configmaps", status=500, times=1000))
    rig.create_pool()
    for _ in range(100):
        await rig.settle()
        await rig.advance(1.0)
    attempts = [
        request for request in rig.api.requests if request.resource == "configmaps" and request.verb == "create"
    ]

    assert 5 <= len(attempts) <= 8, "1, 2, 4 .. 60 s apart"
    assert rig.nodes.pods() == []


@in_loop
async def test_quota_is_told_and_asked_again_slowly() -> None:
    rig = await OperatorRig.start()
    text = 'pods "x" is forbidden: exceeded quota: gpus, requested: 4, used: 8, limited: 8'
    rig.api.faults.append(Fault(verb="create", resource="pods", status=403, reason="Forbidden", message=text, times=3))
    rig.create_pool()
    await rig.run(10)
    assert rig.condition("Progressing")["reason"] == "QuotaExceeded"
    assert "used: 8, limited: 8" in rig.condition("Progressing")["message"]
    attempts = [request for request in rig.api.requests if request.verb == "create" and request.resource == "pods"]
    assert len(attempts) == 1

    await rig.run(120)

    assert rig.condition("Ready")["status"] == "True"


@in_loop
async def test_failures_beside_a_refusal_still_back_off() -> None:
    rig = await OperatorRig.start()
    text = 'pods "x" is forbidden: exceeded quota: gpus'
    rig.api.faults.append(Fault(verb="create", resource="pods", status=403, reason="Forbidden", message=text, times=99))
    rig.create_pool()
    await rig.settle()
    rig.api.faults.append(Fault(verb="apply", resource="services", status=500, times=1000))
    rig.api.remove(SERVICE, "flash", "ns")
    for _ in range(50):
        await rig.settle()
        await rig.advance(1.0)
    attempts = [request for request in rig.api.requests if request.resource == "services" and request.verb == "apply"]

    assert len(attempts) <= 8


@in_loop
async def test_two_leaders_on_stale_views_never_make_two_of_one() -> None:
    """Fencing excludes this; it must be harmless all the same."""
    rig = await _ready_rig()
    other = await OperatorRig.start(api=rig.api, clock=rig.clock, nodes=0)
    other.nodes = rig.nodes
    rig.change_spec(engine=IMAGE_2, replicas=3)
    for turn in range(60):
        one = (rig, other)[turn % 2]
        if turn % 3:
            one.tell()
        one.leader.queue.add(KEY)
        one.leader.queue.release_due()
        await one.leader.reconciler.step(await one.leader.queue.take())
        assert len({pod["metadata"]["name"] for pod in rig.nodes.pods()}) <= 6
        rig.nodes.step()
        await rig.advance(2.0)
        await other.lease.try_hold()
    await rig.run(6)

    assert len(rig.nodes.pods()) == 4
    assert {pod["spec"]["containers"][0]["image"] for pod in rig.nodes.pods()} == {"engine:2"}


@in_loop
async def test_lost_lease_ends_the_worker_without_a_write() -> None:
    rig = await _ready_rig()
    rig.change_spec(replicas=4)
    rig.tell()
    rig.clock.now += 11.0

    with pytest.raises(LeaseLost):
        await rig.leader.reconciler.work()

    assert rig.api.writes() == []


@in_loop
async def test_gate_opens_once_the_engine_is_ready_and_shuts_for_a_drain() -> None:
    rig = await _ready_rig(settings=OperatorSettings(readiness_gate=True))
    assert {_gate(pod) for pod in rig.nodes.pods()} == {"True"}

    rig.engines.done.clear()
    rig.change_spec(replicas=1)
    await rig.settle()

    assert sorted(_gate(pod) for pod in rig.nodes.pods()) == ["False", "True", "True"]


@in_loop
async def test_orphan_of_ours_is_adopted() -> None:
    rig = await _ready_rig()
    pod = rig.nodes.pods()[0]
    pod["metadata"]["ownerReferences"] = []
    rig.api.put(PODS, pod)
    await rig.settle()

    owner = rig.nodes.pods()[0]["metadata"]["ownerReferences"][0]
    assert (owner["uid"], owner["controller"]) == (rig.pool()["metadata"]["uid"], True)
    assert len(rig.names()) == 3


@in_loop
async def test_strangers_pod_under_our_labels_is_left_alone_and_reported() -> None:
    rig = await _ready_rig()
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


@in_loop
async def test_paused_pool_is_told_of_and_not_touched() -> None:
    rig = await _ready_rig()
    rig.change_spec(paused=True)
    await rig.run(2)
    rig.api.requests.clear()
    rig.api.remove(PODS, rig.names()[0], "ns")
    rig.api.remove(SERVICE, "flash", "ns")
    await rig.run(3)

    assert len(rig.names()) == 2
    assert rig.api.all(SERVICE) == []
    assert {request.subresource for request in rig.api.writes()} == {"status"}
    assert rig.condition("Paused")["status"] == "True"


@in_loop
async def test_one_broken_pool_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = await OperatorRig.start()
    rig.create_pool()
    rig.api.put(POOL, {**rig.pool(), "metadata": {"name": "other", "namespace": "ns"}})
    observe = rig.leader.reconciler._observer.observe

    def fail_for_one(key: Any, *rest: Any) -> Any:
        if key == KEY:
            raise ZeroDivisionError
        return observe(key, *rest)

    monkeypatch.setattr(rig.leader.reconciler._observer, "observe", fail_for_one)
    await rig.run(4)

    assert {pod["metadata"]["labels"]["prefill.dev/pool"] for pod in rig.nodes.pods()} == {"other"}
    assert 'prefill_operator_reconcile_errors_total{kind="PrefillPool",reason="BUG"}' in _metrics(rig)


@in_loop
async def test_fight_over_a_child_is_slowed_down() -> None:
    rig = await _ready_rig()
    for _ in range(MAX_PASSES_IN_A_ROW + 5):
        budget = rig.api.get(BUDGET, "flash", "ns")
        rig.api.put(BUDGET, {**budget, "spec": {**budget["spec"], "minAvailable": 0}})
        rig.tell()
        if rig.leader.queue.depth:
            await rig.leader.reconciler.step(await rig.leader.queue.take())

    assert 'reason="PREFILL"' in _metrics(rig)


@in_loop
async def test_encoder_pool_takes_the_same_way() -> None:
    rig = await OperatorRig.start()
    spec = {
        "replicas": 1,
        "model": {"name": "ve", "revision": "r1", "source": {"pvc": {"claimName": "ckpt"}}},
        "encoder": {"image": "encoder:1"},
        "rollout": {"minReadySeconds": 0},
    }
    rig.api.put(POOLS[Kind.VE_POOL], {"metadata": {"name": "flash", "namespace": "ns"}, "spec": spec})
    await rig.run(4)

    status = rig.api.get(POOLS[Kind.VE_POOL], "flash", "ns")["status"]
    assert (status["readyVEs"], status["totalVEs"]) == (2, 2)
    assert all(pod["metadata"]["name"].startswith("flash-ve-") for pod in rig.nodes.pods())
    rig = await _restart(rig)
    await rig.settle()
    assert rig.api.writes() == []


@in_loop
async def test_engines_out_of_reach_are_deleted_after_ten_seconds() -> None:
    rig = await _ready_rig()
    rig.engines.is_unreachable = True
    rig.change_spec(replicas=1)
    await rig.settle()
    assert len(rig.names()) == 3
    await rig.run(7)

    assert len(rig.names()) == 2


def _is_ready(pod: Json) -> bool:
    conditions = {item["type"]: item["status"] for item in pod["status"].get("conditions", [])}
    return conditions.get("Ready") == "True" and "deletionTimestamp" not in pod["metadata"]


def _gate(pod: Json) -> str:
    return str(next(item["status"] for item in pod["status"]["conditions"] if item["type"] == ACCEPTING_GATE))


def _metrics(rig: OperatorRig) -> str:
    return generate_latest(rig.metrics.registry).decode()
