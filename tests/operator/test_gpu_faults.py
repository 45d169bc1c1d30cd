"""Stalled=True/GPUFault: only when GPU faults leave no healthy node, with counts; never latched (k8s.md 4.6, 3.3)."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from prefill_operator.api_status import Condition
from prefill_operator.model import Observed, OperatorTimes
from prefill_testing.cluster_model import ClusterModel, NodeModel, settled_cluster
from prefill_testing.planner_pools import make_pool, make_spec

TIMES = OperatorTimes()


def running(num_nodes: int = 2, *, replicas: int = 2, watches_nodes: bool = True) -> ClusterModel:
    """PEs of 2 GPUs, packed on gpu-0."""
    return settled_cluster(make_pool(make_spec(replicas=replicas)), num_nodes=num_nodes, watches_nodes=watches_nodes)


def judged(cluster: ClusterModel) -> Condition:
    cluster.run_pass()
    return cluster.condition("Stalled")


def _nothing(_: ClusterModel) -> None:
    pass


def _one_of_two(cluster: ClusterModel) -> None:
    cluster.nodes["gpu-0"].fault = "annotation prefill.dev/xid: 79"


def _both(cluster: ClusterModel) -> None:
    _one_of_two(cluster)
    cluster.nodes["gpu-1"].fault = "condition GPUUnhealthy: ECC"


def _one_and_the_other_cordoned(cluster: ClusterModel) -> None:
    _one_of_two(cluster)
    cluster.nodes["gpu-1"].cordoned = True


def _only_cordoned(cluster: ClusterModel) -> None:
    for node in cluster.nodes.values():
        node.cordoned = True


def _both_but_scaled_to_zero(cluster: ClusterModel) -> None:
    _both(cluster)
    cluster.edit(replicas=0)
    cluster.settle()


def _smaller_node_is_no_way_out(cluster: ClusterModel) -> None:
    _both(cluster)
    cluster.nodes["gpu-2"] = NodeModel(gpus=1)


def _healthy_node_is_full(cluster: ClusterModel) -> None:
    """Room is the scheduler's business, not a fault."""
    _one_of_two(cluster)
    stranger = cluster.pods[cluster.name_of(1)]
    cluster.pods["x"] = replace(stranger, name="x", uid="x", node="gpu-1", gpus=8, foreign=True, incarnation=99)


REPORTS: dict[str, tuple[Callable[[ClusterModel], None], str]] = {
    "none": (_nothing, ""),
    "one of two": (_one_of_two, ""),
    "both": (
        _both,
        "2 of 2 nodes have GPU faults (gpu-0: annotation prefill.dev/xid: 79; gpu-1: condition GPUUnhealthy",
    ),
    "one, the other cordoned": (
        _one_and_the_other_cordoned,
        "1 of 2 nodes have GPU faults (gpu-0: annotation prefill.dev/xid: 79); 1 not Ready, cordoned or in maintenance",
    ),
    "no fault, all cordoned": (_only_cordoned, ""),
    "both, but nothing wanted": (_both_but_scaled_to_zero, ""),
    "a node too small for a PE": (_smaller_node_is_no_way_out, "2 of 2 nodes have GPU faults"),
    "the healthy one is full": (_healthy_node_is_full, "ForeignObject"),
}


@pytest.mark.parametrize("name", REPORTS)
def test_reported_faults_stall_only_when_no_healthy_node_is_left(name: str) -> None:
    happen, text = REPORTS[name]
    cluster = running()
    happen(cluster)
    stalled = judged(cluster)
    if text == "ForeignObject" or not text:
        assert stalled.reason == (text or "NotStalled")
        return
    assert (stalled.status, stalled.reason) == ("True", "GPUFault")
    assert f"no healthy node is left for a PE of 2 GPUs: {text}" in stalled.message


def test_stall_ends_with_the_fault() -> None:
    cluster = running()
    _both(cluster)
    assert judged(cluster).status == "True"
    cluster.nodes["gpu-1"].fault = ""
    assert judged(cluster).status == "False"
    cluster.settle()
    assert cluster.condition("Ready").status == "True"


@pytest.mark.parametrize("left", [0, 1, 2], ids=["none left", "too few left", "enough left"])
def test_devices_that_left_a_node_are_counted(left: int) -> None:
    """The device plug-in withdrew them: capacity 8, allocatable less."""
    cluster = running(1)
    seen = cluster.observe()
    assert seen.nodes is not None
    nodes = tuple(replace(node, gpu_allocatable=left, gpu_free=0) for node in seen.nodes)
    cluster.run_pass(replace(seen, nodes=nodes))
    stalled = cluster.condition("Stalled")
    assert (stalled.status == "True") == (left < 2)
    assert (f"gpu-0: {left} of 8 GPUs left" in stalled.message) == (left < 2)


def test_unhealthy_devices_of_running_pods_are_counted() -> None:
    cluster = running(1)
    cluster.change(cluster.name_of(1), unhealthy_devices=("nvidia.com/gpu/GPU-1", "nvidia.com/gpu/GPU-2"))
    assert "gpu-0: 2 devices of running pods are Unhealthy" in judged(cluster).message


def _failing(cluster: ClusterModel, *, seconds: int) -> list[Condition]:
    """Every engine ends with exit 14 from now on; Stalled over time."""
    cluster.failing_exit, cluster.load_seconds = 14, 1
    for name in list(cluster.pods):
        cluster.crash(name, 14)
    found = []
    for _ in range(seconds // 5):
        found.append(judged(cluster))
        cluster.advance(5)
    return found


@pytest.mark.parametrize(
    ("num_nodes", "watches_nodes", "text"),
    [
        (2, True, "2 of 2 nodes have GPU faults (gpu-0: 2 engines ended with a GPU fault, the last at "),
        (2, False, "PEs on 2 nodes had GPU faults and none became Ready since; the last was on gpu-"),
        (12, True, "the last 10 PEs on 5 nodes had GPU faults and none became Ready since"),
    ],
    ids=["nodes seen", "nodes not seen", "more nodes than can be avoided"],
)
def test_engines_that_all_report_a_fault_stall_the_pool(num_nodes: int, watches_nodes: bool, text: str) -> None:
    """Their pods are gone by then, so the ledger is the witness."""
    cluster = running(num_nodes, watches_nodes=watches_nodes)
    found = _failing(cluster, seconds=3000)
    assert found[0].status == "False", "one fault is replaced, and nobody is called"
    stalled = next(condition for condition in found if condition.status == "True")
    assert stalled.reason == "GPUFault"
    assert any(text in condition.message for condition in found), found[-1].message
    cluster.failing_exit = None
    cluster.settle()
    assert [cluster.condition(kind).status for kind in ("Stalled", "Ready")] == ["False", "True"]


def test_one_bad_node_calls_nobody() -> None:
    cluster = running(3)
    cluster.crash(cluster.name_of(1), 14)
    cluster.crash(cluster.name_of(2), 14)
    assert judged(cluster).status == "False"
    cluster.settle()
    assert judged(cluster).status == "False"


def test_memory_of_a_fault_ends_by_itself() -> None:
    """Nothing may move any more; then the operator must wake up to say so."""
    cluster = running(1, replicas=1)
    cluster.crash(cluster.name_of(1), 14)
    cluster.load_seconds = 1e9
    stalled = judged(cluster)
    assert (stalled.status, stalled.reason) == ("True", "GPUFault")
    view: Observed = replace(cluster.observe(), now=cluster.now + TIMES.node_avoid_seconds + 1)
    decision = cluster.run_pass()
    assert decision.next_wakeup is not None
    assert decision.next_wakeup <= cluster.now + TIMES.node_avoid_seconds
    cluster.run_pass(view)
    assert cluster.condition("Stalled").reason != "GPUFault"
