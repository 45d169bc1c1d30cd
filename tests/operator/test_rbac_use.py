"""What the operator really asks of the API server, against its own list of rights: nothing beyond, nothing left over."""

import pytest

from prefill_operator.errors import ClusterUnavailable
from prefill_operator.leader import find_resources, wait_for_other_kinds
from prefill_operator.model import ChildKind
from prefill_operator.rbac import Rule, home_rules, rbac_rules
from prefill_operator.resources import CHILDREN, LEASES, PODS, Resource
from prefill_operator.settings import OperatorSettings, RbacParts
from prefill_testing.fake_api import FakeApi, Fault, Request
from prefill_testing.fake_cluster import FakeCluster
from prefill_testing.in_loop import in_loop
from prefill_testing.operator_rig import OperatorRig

# What the fake's verbs need of RBAC. Applying what does not exist yet creates it.
VERBS = {"update": {"update"}, "strategic": {"patch"}, "apply": {"patch", "create"}}
PARTS = RbacParts(keda=True, prometheus_operator=True, network_policies=True)
# For informers of other tools, and for kopf, which is not part of this run.
UNSEEN_VERBS = {"watch"}


def _granted(rules: list[Rule]) -> set[tuple[str, str]]:
    return {(resource, verb) for rule in rules for resource in rule["resources"] for verb in rule["verbs"]}


def _needed(request: Request) -> set[tuple[str, str]]:
    resource = f"{request.resource}/{request.subresource}" if request.subresource else request.resource
    verbs = {"patch"} if request.subresource and request.verb == "apply" else VERBS.get(request.verb, {request.verb})
    return {(resource, verb) for verb in verbs}


async def _busy_life(rig: OperatorRig) -> list[Request]:
    """A pool that sees everything: rollout, autoscaling, gates, orphans, conflicts, lost objects, its end."""
    seen: list[Request] = []
    rig.create_pool({"monitoring": {"podMonitor": True}})
    await rig.run(6)
    pod = rig.nodes.pods()[0]
    rig.api.put(PODS, {**pod, "metadata": {**pod["metadata"], "ownerReferences": []}})
    await rig.run(2)
    autoscaling = {"maxReplicas": 4, "metrics": [{"name": "RowsWaitingPerGPU", "target": 1000}]}
    for actuator in ("HPA", "KEDA", "External"):
        rig.change_spec(engine={"image": f"engine:{actuator}"}, autoscaling={**autoscaling, "actuator": actuator})
        await rig.run(12)
    rig.api.faults.append(Fault(verb="create", resource="pods", after=True))
    rig.change_spec(replicas=3, autoscaling=None)
    await rig.run(8)
    service = rig.api.get(CHILDREN[ChildKind.SERVICE], "flash", "ns")
    rig.api.put(CHILDREN[ChildKind.SERVICE], {**service, "metadata": {**service["metadata"], "labels": {}}})
    await rig.run(2)
    await rig.leader.resync.compare()
    seen += rig.api.requests
    return seen


@in_loop
async def test_operator_uses_no_right_that_is_not_listed() -> None:
    settings = OperatorSettings(rbac=PARTS, readiness_gate=True, prometheus_address="http://prometheus:9090")
    rig = await OperatorRig.start(settings=settings)
    needed = set().union(*[_needed(request) for request in await _busy_life(rig)])

    granted = _granted(rbac_rules(PARTS, is_cluster_wide=True) + home_rules())
    assert needed - granted == set()


@in_loop
async def test_hardly_a_listed_right_goes_unused() -> None:
    settings = OperatorSettings(rbac=PARTS, readiness_gate=True, prometheus_address="http://prometheus:9090")
    rig = await OperatorRig.start(settings=settings)
    needed = set().union(*[_needed(request) for request in await _busy_life(rig)])

    granted = _granted(rbac_rules(PARTS, is_cluster_wide=True) + home_rules())
    finalizers = {("prefillpools/finalizers", "update"), ("vepools/finalizers", "update")}
    unused = {
        (resource, verb)
        for resource, verb in granted - needed - finalizers
        if verb not in UNSEEN_VERBS and not resource.startswith("vepools")
    }
    # Looked up when a watch missed something or a name is taken; taken back when somebody stripped its labels.
    rare = {("prefillpools", "get"), ("nodes", "get"), ("pods", "get"), ("configmaps", "get"), ("configmaps", "patch")}
    # These go with their pool.
    collected = {(kind, "delete") for kind in ("services", "poddisruptionbudgets", "podmonitors", "networkpolicies")}
    assert unused <= rare | collected


@in_loop
async def test_optional_kinds_are_not_touched_without_their_right() -> None:
    rig = await OperatorRig.start(settings=OperatorSettings(rbac=RbacParts(nodes=False, autoscaling=False)))
    seen = {request.resource for request in await _busy_life(rig)}

    assert seen.isdisjoint({"nodes", "horizontalpodautoscalers", "scaledobjects", "podmonitors", "networkpolicies"})
    assert "pods" in seen


@in_loop
async def test_optional_kinds_are_not_touched_where_the_cluster_lacks_them() -> None:
    lacking = frozenset({CHILDREN[ChildKind.SCALED_OBJECT], CHILDREN[ChildKind.POD_MONITOR]})
    api = FakeApi(clock=lambda: 1.7e9, unserved=lacking)
    rig = await OperatorRig.start(api=api, settings=OperatorSettings(rbac=PARTS, prometheus_address="http://p:9090"))
    seen = {request.resource for request in await _busy_life(rig)}

    assert seen.isdisjoint({"scaledobjects", "podmonitors"})
    assert LEASES.plural in seen


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        (RbacParts(), ("chart value rbac.keda to true", "chart value rbac.prometheusOperator to true")),
        (PARTS, ("install its CustomResourceDefinition", "install its CustomResourceDefinition")),
    ],
    ids=["not allowed", "not served"],
)
@in_loop
async def test_optional_kind_that_a_pool_asks_for_in_vain_is_told(parts: RbacParts, says: tuple[str, str]) -> None:
    lacking = frozenset({CHILDREN[ChildKind.SCALED_OBJECT], CHILDREN[ChildKind.POD_MONITOR]})
    settings = OperatorSettings(rbac=parts, prometheus_address="http://p:9090")
    rig = await OperatorRig.start(api=FakeApi(clock=lambda: 1.7e9, unserved=lacking), settings=settings)
    metrics = [{"name": "RowsWaitingPerGPU", "target": 1000}]
    autoscaling = {"actuator": "KEDA", "maxReplicas": 4, "metrics": metrics}
    rig.create_pool({"autoscaling": autoscaling, "monitoring": {"podMonitor": True}})
    await rig.run(6)

    scaling, ready = rig.condition("AutoscalingActive"), rig.condition("Ready")
    assert (scaling["status"], scaling["reason"]) == ("False", "KedaMissing")
    assert says[0] in scaling["message"]
    assert ready["status"] == "True"
    assert "monitoring.podMonitor: no PodMonitor is made: " in ready["message"]
    assert says[1] in ready["message"]


def kinds_of(*kinds: ChildKind) -> frozenset[Resource]:
    return frozenset(CHILDREN[kind] for kind in kinds)


@in_loop
async def test_kinds_are_looked_at_again_until_two_looks_agree() -> None:
    """One look in the middle of an installation, or one that fails, changes nothing."""
    keda, monitor = ChildKind.SCALED_OBJECT, ChildKind.POD_MONITOR
    api = FakeApi(clock=lambda: 1.7e9, unserved=kinds_of(keda, monitor))
    settings = OperatorSettings(rbac=PARTS)
    resources = await find_resources(FakeCluster(api), settings)
    looks: list[frozenset[Resource] | None] = [
        kinds_of(keda, monitor),
        kinds_of(monitor),
        kinds_of(keda, monitor),
        None,
        kinds_of(monitor),
        kinds_of(monitor),
    ]
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        api.unserved = looks[len(pauses) - 1] or frozenset()

    class Flaky(FakeCluster):
        async def serves(self, resource: Resource) -> bool:
            if looks[len(pauses) - 1] is None:
                raise ClusterUnavailable("no answer", status=500)
            return await super().serves(resource)

    assert await wait_for_other_kinds(Flaky(api), settings, resources, sleep=sleep) == ("scaledobjects",)
    assert pauses == [settings.resync_seconds] * len(looks)


@in_loop
async def test_forbidden_autoscaler_is_told_and_stops_nothing() -> None:
    rig = await OperatorRig.start(settings=OperatorSettings(rbac=RbacParts(autoscaling=False)))
    metrics = [{"name": "RowsWaitingPerGPU", "target": 1000}]
    rig.create_pool({"autoscaling": {"actuator": "HPA", "maxReplicas": 4, "metrics": metrics}})
    await rig.run(6)

    assert rig.pool()["status"]["readyPEs"] == 3
    assert rig.condition("AutoscalingActive")["status"] == "False"
    assert "rbac.autoscaling" in rig.condition("AutoscalingActive")["message"]
