"""Another operator over the same pools: nothing is stored that could be lost, out of date or migrated wrongly (k8s.md 2.6)."""

import copy
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from prefill_operator.names import Kind
from prefill_operator.resources import PODS, POOLS, Json
from prefill_testing.fake_api import FakeApi
from prefill_testing.in_loop import in_loop
from prefill_testing.operator_rig import KEY, OperatorRig

POOL = POOLS[Kind.PREFILL_POOL]
IMAGE_2 = {"image": "engine:2"}
METRICS = [{"name": "RowsWaitingPerGPU", "target": 1000}]
HPA = {"actuator": "HPA", "maxReplicas": 6, "metrics": METRICS}
Rigs = Callable[..., Awaitable[OperatorRig]]


def _uids(rig: OperatorRig) -> list[str]:
    return [pod["metadata"]["uid"] for pod in rig.nodes.pods()]


def _as_an_older_operator_made_it(pod: Json) -> Json:
    """Other bytes for the same intent: no probes, another hook, an annotation that nobody knows any more."""
    old = copy.deepcopy(pod)
    engine = old["spec"]["containers"][0]
    for part in ("startupProbe", "livenessProbe", "env"):
        engine.pop(part)
    engine["lifecycle"]["preStop"]["exec"]["command"] = ["sleep", "5"]
    old["metadata"]["annotations"]["prefill.dev/of-version-0"] = "x"
    return old


@in_loop
async def test_pods_that_an_older_operator_rendered_are_left_alone(ready_rig: Rigs, restarted: Rigs) -> None:
    rig = await ready_rig()
    before = _uids(rig)
    for pod in rig.nodes.pods():
        rig.api.put(PODS, _as_an_older_operator_made_it(pod))
    rig = await restarted(rig)
    await rig.run(5, seconds=60.0)

    assert rig.api.writes() == []
    assert _uids(rig) == before


@in_loop
async def test_pods_lost_while_no_operator_ran_are_replaced(ready_rig: Rigs, restarted: Rigs) -> None:
    """Nothing tells of them afterwards; what is missing is seen."""
    rig = await ready_rig()
    lost = rig.names()[:2]
    for name in lost:
        rig.api.remove(PODS, name, "ns")
    rig = await restarted(rig)
    await rig.run(4)

    assert len(rig.names()) == 3
    assert not set(lost) & set(rig.names())
    assert rig.condition("Ready")["status"] == "True"


@in_loop
async def test_pool_replaced_without_its_annotations_goes_on(ready_rig: Rigs) -> None:
    """`helm upgrade --force` and the like: the object is written anew, in the middle of a rollout."""
    rig = await ready_rig()
    rig.change_spec(engine=IMAGE_2)
    while "annotations" not in rig.pool()["metadata"]:  # the ledger, which comes with the first pod that goes
        await rig.run(1)
    pool = rig.pool()
    assert len({pod["spec"]["containers"][0]["image"] for pod in rig.nodes.pods()}) == 2
    rig.api.put(POOL, {**pool, "metadata": {**pool["metadata"], "annotations": {}, "labels": {}}, "status": {}})
    fewest = 9
    for _ in range(20):
        await rig.run(1)
        fewest = min(fewest, rig.pool()["status"].get("readyPEs", 9))

    assert fewest >= 2
    assert len(rig.names()) == 3
    assert {pod["spec"]["containers"][0]["image"] for pod in rig.nodes.pods()} == {"engine:2"}
    assert rig.condition("Ready")["status"] == "True"


@pytest.mark.parametrize("ledger", ["", '{"version":0,"pods":{"a":1}}', "not JSON"], ids=["none", "other", "text"])
@in_loop
async def test_pool_at_zero_scales_up_under_another_operator(ledger: str, ready_rig: Rigs, restarted: Rigs) -> None:
    rig = await ready_rig({"replicas": 0})
    assert rig.names() == []
    pool = rig.pool()
    annotations = {"prefill.dev/ledger": ledger} if ledger else {}
    rig.api.put(POOL, {**pool, "metadata": {**pool["metadata"], "annotations": annotations}})
    rig = await restarted(rig)
    await rig.settle()
    assert rig.api.writes() == []

    rig.change_spec(replicas=2)
    await rig.run(4)

    assert len(rig.names()) == 3
    assert rig.condition("Ready")["status"] == "True"


@in_loop
async def test_status_that_somebody_wrote_is_made_right_from_the_pods(ready_rig: Rigs) -> None:
    rig = await ready_rig()
    right = rig.pool()["status"]
    forged = {**right, "replicas": 7, "readyPEs": 0, "updatedPEs": 0, "totalPEs": 9, "currentRevision": "00000000"}
    forged["conditions"] = [{**item, "status": "Unknown", "reason": "Forged"} for item in right["conditions"]]
    await rig.advance(10.0)
    rig.api.put(POOL, {**rig.pool(), "status": forged})
    await rig.run(3)

    status = rig.pool()["status"]
    assert {key: value for key, value in status.items() if key != "conditions"} == {
        key: value for key, value in right.items() if key != "conditions"
    }
    for now, before in zip(status["conditions"], right["conditions"], strict=True):
        assert (now["type"], now["status"], now["reason"]) == (before["type"], before["status"], before["reason"])


@in_loop
async def test_autoscaling_goes_on_while_the_pool_is_not_ready(ready_rig: Rigs) -> None:
    rig = await ready_rig({"autoscaling": HPA})
    resource = next(item for item in rig.leader.resources if item.kind == "HorizontalPodAutoscaler")
    scaling = {"conditions": [{"type": "ScalingActive", "status": "True", "reason": "ValidMetricFound"}]}
    rig.api.put(resource, {**rig.api.get(resource, "flash", "ns"), "status": scaling})
    before = rig.api.get(resource, "flash", "ns")["spec"]
    rig.nodes.starts_ready = False
    for name in rig.names():
        rig.api.remove(PODS, name, "ns")
    await rig.run(4)

    assert rig.condition("Ready")["status"] == "False"
    assert rig.condition("AutoscalingActive")["status"] == "True"
    assert rig.api.get(resource, "flash", "ns")["spec"] == before


class _Spy:
    """Bodies of all writes to pools."""

    def __init__(self, api: FakeApi) -> None:
        self.bodies: list[Json] = []
        self._handle = api.handle
        api.handle = self.handle  # type: ignore[method-assign]

    def handle(self, method: str, path: str, query: Any, body: Any, content_type: str) -> Any:
        if method != "GET" and "/prefillpools/" in path:
            self.bodies.append(copy.deepcopy(body))
        return self._handle(method, path, query, body, content_type)


@in_loop
async def test_operator_never_writes_the_spec_of_a_pool(restarted: Rigs) -> None:
    """Whoever scales, scales: here an HPA through /scale, over a rollout, a failure and two operators."""
    rig = await OperatorRig.start()
    spy = _Spy(rig.api)
    rig.create_pool({"autoscaling": HPA})
    await rig.run(6)
    rig.change_spec(replicas=4)
    await rig.run(6)
    rig.change_spec(engine=IMAGE_2)
    await rig.run(4)
    rig.nodes.change_pod(rig.names()[0], {"phase": "Failed", "reason": "Evicted"})
    rig = await restarted(rig)
    rig.leader.queue.add(KEY)
    await rig.run(30)

    assert (rig.pool()["spec"]["replicas"], len(rig.names())) == (4, 5)
    assert len(spy.bodies) > 5
    assert {part for body in spy.bodies for part in body} <= {"apiVersion", "kind", "metadata", "status"}
    assert not any(set(body["metadata"]) - {"name", "namespace", "uid", "annotations"} for body in spy.bodies)
