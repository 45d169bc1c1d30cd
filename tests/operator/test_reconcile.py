"""prefill_operator.reconcile: whole passes on an API server in memory, from the pool's creation to its end."""

from collections.abc import Awaitable, Callable

from prefill_operator.model import ChildKind
from prefill_operator.names import ACCEPTING_GATE, Kind
from prefill_operator.resources import CHILDREN, NODES, PODS, POOLS, Json
from prefill_operator.settings import OperatorSettings
from prefill_testing.fake_api import FakeApi
from prefill_testing.in_loop import in_loop
from prefill_testing.operator_rig import KEY, OperatorRig, RigClock

SERVICE = CHILDREN[ChildKind.SERVICE]
BUDGET = CHILDREN[ChildKind.DISRUPTION_BUDGET]
CONFIG_MAP = CHILDREN[ChildKind.CONFIG_MAP]
IMAGE_2 = {"image": "engine:2"}
Rigs = Callable[..., Awaitable[OperatorRig]]


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
async def test_pool_at_rest_is_never_written(ready_rig: Rigs) -> None:
    rig = await ready_rig()
    rig.leader.queue.add(KEY)
    await rig.run(5, seconds=600.0 / 60)

    assert rig.api.writes() == []


@in_loop
async def test_restart_writes_nothing(restarted: Rigs, ready_rig: Rigs) -> None:
    rig = await restarted(await ready_rig())

    assert await rig.settle() == 1
    assert rig.api.writes() == []


@in_loop
async def test_first_pass_sees_all_pods_however_many_pages_they_take(restarted: Rigs, ready_rig: Rigs) -> None:
    rig = await restarted(await ready_rig({"replicas": 5}))

    assert len(rig.leader.cache.pods(KEY)) == 6
    await rig.settle()
    assert rig.api.writes() == []


@in_loop
async def test_rollout_never_goes_below_the_replicas(ready_rig: Rigs) -> None:
    rig = await ready_rig()
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
async def test_rollout_goes_on_after_a_restart_in_the_middle(restarted: Rigs, ready_rig: Rigs) -> None:
    rig = await ready_rig()
    rig.change_spec(engine=IMAGE_2)
    await rig.run(1)
    assert len({pod["metadata"]["labels"]["prefill.dev/revision"] for pod in rig.nodes.pods()}) == 2

    rig = await restarted(rig)
    await rig.run(14)

    assert {pod["spec"]["containers"][0]["image"] for pod in rig.nodes.pods()} == {"engine:2"}
    assert rig.condition("Ready")["status"] == "True"


@in_loop
async def test_drain_goes_on_after_a_restart_with_what_is_left_of_its_time(restarted: Rigs, ready_rig: Rigs) -> None:
    rig = await ready_rig()
    rig.engines.done.clear()
    rig.change_spec(replicas=1, lifecycle={"drainTimeoutSeconds": 100})
    await rig.settle()
    assert [timeout for _, timeout in rig.engines.calls] == [100.0]

    rig = await restarted(rig)
    rig.clock.now += 30.0
    await rig.lease.try_hold()
    await rig.settle()
    assert [round(timeout) for _, timeout in rig.engines.calls] == [70]

    await rig.run(6)
    assert len(rig.nodes.pods()) == 2


@in_loop
async def test_lost_node_is_left_and_its_pods_are_not_waited_for(ready_rig: Rigs) -> None:
    rig = await ready_rig({"lifecycle": {"nodeLostGraceSeconds": 5}})
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


@in_loop
async def test_gate_stays_shut_while_the_engine_is_not_ready() -> None:
    rig = await OperatorRig.start(settings=OperatorSettings(readiness_gate=True))
    rig.nodes.starts_ready = False
    rig.create_pool()
    await rig.run(6)
    gates = [item for pod in rig.nodes.pods() for item in pod["status"]["conditions"] if item["type"] == ACCEPTING_GATE]
    assert len(rig.names()) == 3
    assert not [gate for gate in gates if gate["status"] == "True"]

    rig.nodes.starts_ready = True
    await rig.run(4)

    assert {_gate(pod) for pod in rig.nodes.pods()} == {"True"}
    assert rig.condition("Ready")["status"] == "True"


@in_loop
async def test_pool_costs_few_writes_until_it_is_ready() -> None:
    """k8s.md 2.7: the peer writes 13 times for a group of four."""
    rig = await OperatorRig.start()
    rig.create_pool({"replicas": 3})
    await rig.run(8)
    writes = [(request.verb, request.resource, request.subresource) for request in rig.api.writes()]

    assert rig.condition("Ready")["status"] == "True"
    assert writes.count(("create", "pods", "")) == 4
    objects = [write for write in writes if write[1] in ("configmaps", "services", "poddisruptionbudgets")]
    assert len(objects) == 3
    assert len(writes) - len(objects) - 4 <= 4, "the rest is the status, at most every 2 s"


@in_loop
async def test_gate_opens_once_the_engine_is_ready_and_shuts_for_a_drain(ready_rig: Rigs) -> None:
    rig = await ready_rig(settings=OperatorSettings(readiness_gate=True))
    assert {_gate(pod) for pod in rig.nodes.pods()} == {"True"}

    rig.engines.done.clear()
    rig.change_spec(replicas=1)
    await rig.settle()

    assert sorted(_gate(pod) for pod in rig.nodes.pods()) == ["False", "True", "True"]


@in_loop
async def test_paused_pool_is_told_of_and_not_touched(ready_rig: Rigs) -> None:
    rig = await ready_rig()
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
async def test_restarted_operator_calls_no_drain_of_a_paused_pool(restarted: Rigs, ready_rig: Rigs) -> None:
    rig = await ready_rig()
    rig.engines.done.clear()
    rig.change_spec(replicas=1)
    await rig.settle()
    assert len(rig.engines.calls) == 1
    rig.change_spec(replicas=1, paused=True)
    await rig.run(2)
    assert "1 whose drain had begun takes no work" in rig.condition("Paused")["message"]

    rig = await restarted(rig)
    await rig.run(100)
    assert rig.engines.calls == []
    assert len(rig.names()) == 3

    rig.change_spec(replicas=1, paused=False)
    await rig.run(8)
    assert len(rig.engines.calls) == 1
    assert len(rig.names()) == 2


@in_loop
async def test_encoder_pool_takes_the_same_way(restarted: Rigs) -> None:
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
    rig = await restarted(rig)
    await rig.settle()
    assert rig.api.writes() == []


@in_loop
async def test_engines_out_of_reach_are_deleted_after_ten_seconds(ready_rig: Rigs) -> None:
    rig = await ready_rig()
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
