"""prefill_operator.cache: which objects are taken in, and which pools they concern."""

import copy
from typing import Any

import pytest

from prefill_operator.cache import Cache
from prefill_operator.model import ChildKind
from prefill_operator.names import Kind, object_labels, pod_labels
from prefill_operator.resources import CHILDREN, NODES, PODS, POOLS, Json, PoolKey
from prefill_operator.settings import NodeSignals
from prefill_testing.operator_rig import KEY, POOL

POOL_RESOURCE = POOLS[Kind.PREFILL_POOL]
SERVICE = CHILDREN[ChildKind.SERVICE]
HPA = CHILDREN[ChildKind.HPA]
SCALED_OBJECT = CHILDREN[ChildKind.SCALED_OBJECT]


def _cache() -> Cache:
    return Cache(NodeSignals(), has_nodes=True)


def _object(kind: str, name: str, version: int, **more: Any) -> Json:
    metadata = {"name": name, "namespace": "ns", "uid": f"uid-{name}", "resourceVersion": str(version)}
    return {"apiVersion": "v1", "kind": kind, "metadata": metadata, **more}


def _pod(version: int, *, node: str = "", name: str = "flash-0a1b2c3d-1", gpus: int = 4, **status: Any) -> Json:
    resources = {"limits": {"nvidia.com/gpu": str(gpus)}, "requests": {"nvidia.com/gpu": str(gpus)}}
    spec = {"nodeName": node or None, "containers": [{"name": "engine", "resources": resources}]}
    pod = _object("Pod", name, version, spec=spec, status=status)
    pod["metadata"]["labels"] = pod_labels(Kind.PREFILL_POOL, "flash", "0a1b2c3d")
    return pod


def _node(version: int, **more: Any) -> Json:
    status = {"allocatable": {"nvidia.com/gpu": "8"}, "capacity": {"nvidia.com/gpu": "8"}}
    node = {"metadata": {"name": "n1", "uid": "uid-n1", "resourceVersion": str(version)}, "status": status, **more}
    return {"apiVersion": "v1", "kind": "Node", **node}


def _child(version: int, **more: Any) -> Json:
    service = _object("Service", "flash", version, **more)
    service["metadata"]["labels"] = object_labels(Kind.PREFILL_POOL, "flash")
    return service


def _pool(version: int = 1, **spec: Any) -> Json:
    pool = copy.deepcopy(POOL)
    pool |= {"apiVersion": "prefill.dev/v1alpha1", "kind": "PrefillPool", "spec": {**pool["spec"], **spec}}
    pool["metadata"] |= {"uid": "uid-pool", "resourceVersion": str(version)}
    return pool


def test_pod_concerns_the_pool_of_its_labels() -> None:
    cache = _cache()

    assert cache.put(PODS, _pod(5)) == {KEY}
    assert [pod.observed.name for pod in cache.pods(KEY)] == ["flash-0a1b2c3d-1"]


def test_older_event_changes_nothing() -> None:
    cache = _cache()
    cache.put(PODS, _pod(9, node="n1"))

    assert cache.put(PODS, _pod(8)) == set()
    assert cache.pods(KEY)[0].observed.node == "n1"


def test_versions_are_compared_as_numbers() -> None:
    cache = _cache()
    cache.put(PODS, _pod(9))

    assert cache.put(PODS, _pod(10, node="n1")) == {KEY}


def test_heartbeat_wakes_nobody() -> None:
    cache = _cache()
    cache.put(PODS, _pod(5, phase="Running"))
    again = _pod(6, phase="Running", conditions=[{"type": "ContainersReady", "lastProbeTime": "now"}])

    assert cache.put(PODS, again) == set()
    assert cache.versions(PODS)["ns", "flash-0a1b2c3d-1"].resource_version == "6"


def test_removal_of_another_object_of_that_name_is_ignored() -> None:
    cache = _cache()
    cache.put(PODS, _pod(5))

    assert cache.remove(PODS, ("ns", "flash-0a1b2c3d-1"), uid="uid-before") == set()
    assert cache.remove(PODS, ("ns", "flash-0a1b2c3d-1"), uid="uid-flash-0a1b2c3d-1") == {KEY}
    assert cache.pods(KEY) == []
    assert cache.remove(PODS, ("ns", "flash-0a1b2c3d-1"), uid="") == set()


def test_pod_that_loses_its_labels_leaves_the_pool() -> None:
    cache = _cache()
    cache.put(PODS, _pod(5))
    stripped = _pod(6)
    stripped["metadata"]["labels"] = {}

    assert cache.put(PODS, stripped) == {KEY}
    assert cache.pods(KEY) == []


def test_pod_moved_to_another_pool_concerns_both() -> None:
    cache = _cache()
    cache.put(PODS, _pod(5))
    moved = _pod(6)
    moved["metadata"]["labels"] = pod_labels(Kind.PREFILL_POOL, "other", "0a1b2c3d")

    assert cache.put(PODS, moved) == {KEY, PoolKey(kind=Kind.PREFILL_POOL, namespace="ns", name="other")}
    assert cache.pods(KEY) == []


def test_free_gpus_follow_the_pods() -> None:
    cache = _cache()
    cache.put(NODES, _node(1))

    def free() -> int:
        nodes = cache.nodes("nvidia.com/gpu")
        assert nodes is not None
        return nodes[0].gpu_free

    assert free() == 8
    cache.put(PODS, _pod(2))
    assert free() == 8
    cache.put(PODS, _pod(3, node="n1"))
    assert free() == 4
    cache.put(PODS, _pod(4, node="n1", name="flash-0a1b2c3d-2", gpus=8))
    assert free() == 0
    cache.remove(PODS, ("ns", "flash-0a1b2c3d-2"), uid="")
    assert free() == 4
    cache.remove(PODS, ("ns", "flash-0a1b2c3d-1"), uid="")
    assert free() == 8


def test_node_concerns_pools_with_pods_there_and_those_that_wait() -> None:
    cache = _cache()
    waiting = PoolKey(kind=Kind.PREFILL_POOL, namespace="ns", name="waiting")
    cache.put(NODES, _node(1))
    cache.put(PODS, _pod(2, node="n1"))
    cache.put(PODS, _pod(3, node="n2", name="flash-0a1b2c3d-2"))
    pending = _pod(4, name="waiting-0a1b2c3d-1")
    pending["metadata"]["labels"] = pod_labels(Kind.PREFILL_POOL, "waiting", "0a1b2c3d")
    cache.put(PODS, pending)

    assert cache.put(NODES, _node(5, spec={"unschedulable": True})) == {KEY, waiting}
    assert cache.put(NODES, _node(6, spec={"unschedulable": True})) == set()


def test_nodes_that_may_not_be_read_are_unknown_and_not_absent() -> None:
    assert Cache(NodeSignals(), has_nodes=False).nodes("nvidia.com/gpu") is None
    assert _cache().nodes("nvidia.com/gpu") == ()


def test_status_of_a_child_wakes_nobody() -> None:
    cache = _cache()
    cache.put(SERVICE, _child(1, spec={"a": 1}, status={"loadBalancer": {}}))

    assert cache.put(SERVICE, _child(2, spec={"a": 1}, status={"loadBalancer": {"x": 1}})) == set()
    assert cache.put(SERVICE, _child(3, spec={"a": 2})) == {KEY}


@pytest.mark.parametrize(("word", "active"), [("True", True), ("False", False), ("Unknown", None)])
def test_autoscaler_says_whether_it_is_active(word: str, active: bool | None) -> None:
    cache = _cache()
    condition = {"type": "ScalingActive", "status": word, "reason": "FailedGetExternalMetric", "message": "no data"}
    cache.put(HPA, _child(1, status={"conditions": [condition]}))

    (child,) = cache.children(KEY)
    assert child.active is active
    assert child.message == ("FailedGetExternalMetric: no data" if active is False else "")


@pytest.mark.parametrize(
    ("words", "active", "message"),
    [
        ({"Ready": "Unknown", "Fallback": "False"}, None, ""),
        ({"Ready": "True", "Fallback": "False"}, True, ""),
        ({"Ready": "True", "Fallback": "Unknown", "HPAActive": "Unknown"}, True, ""),
        ({"Ready": "True", "Active": "False", "Fallback": "False", "HPAActive": "True"}, True, ""),
        ({"Ready": "False", "Fallback": "False"}, False, "ReadyReason: no data"),
        ({"Ready": "True", "Fallback": "True", "HPAActive": "True"}, False, "FallbackReason: no data"),
        ({"Ready": "True", "Fallback": "False", "HPAActive": "False"}, False, "HPAActiveReason: no data"),
    ],
    ids=["new", "older keda", "unknown", "idle", "not ready", "fallback", "hpa without metrics"],
)
def test_scaled_object_without_metrics_is_not_active(words: dict[str, str], active: bool | None, message: str) -> None:
    """With a fallback KEDA says Ready=True while its Prometheus is away."""
    cache = _cache()
    conditions = [
        {"type": kind, "status": word, "reason": f"{kind}Reason", "message": "no data"} for kind, word in words.items()
    ]
    cache.put(SCALED_OBJECT, _child(1, status={"conditions": conditions}))

    (child,) = cache.children(KEY)
    assert (child.active, child.message) == (active, message)


def test_object_without_our_label_is_nobodys() -> None:
    cache = _cache()

    assert cache.put(SERVICE, _object("Service", "flash", 1)) == set()
    assert cache.children(KEY) == []


def test_pool_that_cannot_be_read_keeps_its_fault() -> None:
    cache = _cache()

    assert cache.put(POOL_RESOURCE, _pool(gpu={})) == {KEY}
    record = cache.pool(KEY)
    assert record is not None
    assert record.pool is None
    assert record.fault is not None
    assert "spec.gpu" in record.fault.message
    cache.put(POOL_RESOURCE, _pool(2))
    mended = cache.pool(KEY)
    assert mended is not None
    assert mended.pool is not None


def test_keys_are_those_of_both_kinds() -> None:
    cache = _cache()
    cache.put(POOL_RESOURCE, _pool())
    encoder = {**_pool(), "kind": "VEPool", "spec": {}}
    cache.put(POOLS[Kind.VE_POOL], encoder)

    assert {str(key) for key in cache.pool_keys()} == {"PrefillPool/ns/flash", "VEPool/ns/flash"}
    cache.remove(POOL_RESOURCE, ("ns", "flash"), uid="uid-pool")
    assert [key.kind for key in cache.pool_keys()] == [Kind.VE_POOL]
