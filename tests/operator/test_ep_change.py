"""EP changes: pods of two sizes in one pool, and the node that is emptied for a larger one (k8s.md 4.5)."""

from msgspec.structs import replace

from prefill_operator.pool_api import ExpertParallelSpec, QuotaSpec, RedundancySpec
from prefill_testing.cluster_model import ClusterModel, NodeModel, settled_cluster
from prefill_testing.planner_pools import make_pool, make_spec

EP4 = ExpertParallelSpec(size=4)
EP8 = ExpertParallelSpec(size=8)


def full_cluster(*, replicas: int, spares: int, num_nodes: int, quota: QuotaSpec | None = None) -> ClusterModel:
    """PEs of EP 4 on all GPUs."""
    spec = make_spec(replicas=replicas, spares=spares, ep=EP4, quota=quota)
    cluster = settled_cluster(make_pool(spec), num_nodes=num_nodes)
    cluster.edit(expert_parallel=EP8)
    return cluster


def run(cluster: ClusterModel, passes: int) -> list[str]:
    """Passes until nothing moves; every Available status on the way."""
    seen = []
    for _ in range(passes):
        cluster.run_pass()
        seen.append(cluster.condition("Available").status)
        cluster.advance(15)
    return seen


def test_ep_change_empties_exactly_one_node_at_a_time_and_stays_available() -> None:
    """k8s.md 7.3 item 6: no node is free, GPUs are only free in total."""
    cluster = full_cluster(replicas=4, spares=2, num_nodes=3)
    before = len(cluster.log)
    first_drains = {}
    for _ in range(400):
        cluster.run_pass()
        for pod in cluster.pods.values():
            if pod.draining_since is not None and not first_drains:
                first_drains = {p.node for p in cluster.pods.values() if p.draining_since is not None}
        assert cluster.condition("Available").status == "True"
        cluster.advance(15)
        if cluster.num_serving >= 4 and all(pod.ep == 8 for pod in cluster.pods.values()):
            break
    assert len(first_drains) == 1
    drains = [line for line in cluster.story(since=before) if line.startswith("drain")]
    assert drains[:2] == ["drain 1 LargerEP", "drain 2 LargerEP"]


def test_ep_change_on_fragmented_nodes_completes_one_node_after_the_other() -> None:
    """Half of every node is free: 24 GPUs in total, 8 nowhere."""
    cluster = settled_cluster(make_pool(make_spec(replicas=4, spares=2, ep=EP4)), num_nodes=0)
    for index in range(6):
        cluster.nodes[f"gpu-{index}"] = NodeModel(gpus=4)
    cluster.advance(0)
    cluster.settle()
    for node in cluster.nodes.values():
        node.gpus = 8
    before = len(cluster.log)
    cluster.edit(expert_parallel=EP8)
    for _ in range(300):
        decision = cluster.run_pass()
        assert cluster.condition("Available").status == "True"
        if not decision.actions and all(pod.ep == 8 for pod in cluster.pods.values()) and cluster.num_serving == 6:
            break
        cluster.advance(10)
    assert sorted(pod.node for pod in cluster.serving) == sorted(cluster.nodes)
    assert min(applied.serving for applied in cluster.log[before:]) >= 4
    assert cluster.condition("Ready").status == "True"


def test_ep_change_that_would_cost_availability_waits_and_gives_the_arithmetic() -> None:
    cluster = full_cluster(replicas=4, spares=0, num_nodes=2)
    before = len(cluster.log)
    assert set(run(cluster, 20)) == {"True"}
    progressing = cluster.condition("Progressing")
    assert (progressing.status, progressing.reason) == ("False", "NoRoomForLargerEP")
    assert (
        "a PE needs 8 GPUs on one node; emptying gpu-0 takes 2 serving PEs, only 0 can be spared" in progressing.message
    )
    assert not any(line.startswith("drain") for line in cluster.story(since=before))
    cluster.edit(rollout=replace(cluster.pool.spec.rollout, max_unavailable=2))
    run(cluster, 1)
    assert sum("LargerEP" in line for line in cluster.story(since=before)) == 2


def test_ep_change_without_sight_of_nodes_says_why_it_waits() -> None:
    cluster = full_cluster(replicas=4, spares=2, num_nodes=3)
    cluster.watches_nodes = False
    run(cluster, 20)
    assert cluster.condition("Progressing").reason == "NoRoomForLargerEP"
    assert "nodes are not watched" in cluster.condition("Progressing").message
    assert cluster.num_serving == 6


def test_ep_change_with_a_free_node_uses_it() -> None:
    cluster = full_cluster(replicas=4, spares=0, num_nodes=6)
    before = len(cluster.log)
    cluster.settle()
    assert not any("LargerEP" in line for line in cluster.story(since=before))
    assert [pod.ep for pod in cluster.serving] == [8] * 4


def test_ep_change_drains_whole_nodes_even_when_any_pod_would_do() -> None:
    """With room for one surge pod the drains still follow nodes, so that each frees 8 GPUs together."""
    cluster = full_cluster(replicas=4, spares=0, num_nodes=5)
    before = len(cluster.log)
    cluster.settle()
    drained = [int(line.split()[1]) for line in cluster.story(since=before) if line.startswith("drain")]
    assert [{1: 0, 2: 0, 3: 1, 4: 1}[number] for number in drained] in ([0, 0, 1, 1], [1, 1, 0, 0])


def test_ep_change_at_the_gpu_quota_uses_spares_but_no_replicas() -> None:
    """A larger PE does not fit below maxGPUs until a smaller one is gone."""
    quota = QuotaSpec(max_gpus=16, redundancy=RedundancySpec(spares=1))
    cluster = full_cluster(replicas=2, spares=1, num_nodes=4, quota=quota)
    low = []
    for _ in range(60):
        cluster.run_pass()
        low.append(cluster.num_serving)
        assert sum(pod.gpus for pod in cluster.holders) <= 16
        cluster.advance(10)
    assert min(low) == 2
    assert sorted(pod.ep for pod in cluster.serving) == [4, 8]
    assert cluster.condition("Progressing").reason == "QuotaExceeded"
    cluster.edit(rollout=replace(cluster.pool.spec.rollout, max_unavailable=1))
    cluster.settle()
    assert [pod.ep for pod in cluster.serving] == [8, 8]


def test_ep_change_near_the_gpu_quota_completes_with_a_spare() -> None:
    """The last old PE and its successor do not fit together; a spare may be missing for a while, a replica may not."""
    quota = QuotaSpec(max_gpus=24, redundancy=RedundancySpec(spares=1))
    cluster = full_cluster(replicas=2, spares=1, num_nodes=6, quota=quota)
    before = len(cluster.log)
    cluster.settle()
    assert [pod.ep for pod in cluster.serving] == [8, 8, 8]
    assert min(applied.serving for applied in cluster.log[before:]) == 2


def test_ep_change_ignores_nodes_that_nothing_may_go_to() -> None:
    cluster = full_cluster(replicas=4, spares=2, num_nodes=3)
    cluster.nodes["gpu-9"] = NodeModel(cordoned=True)
    run(cluster, 6)
    assert any("LargerEP" in line for line in cluster.story())


def test_smaller_ep_after_the_inputs_changed_fits_beside_the_larger() -> None:
    cluster = settled_cluster(make_pool(make_spec(replicas=2, ep=EP8)), num_nodes=3)
    cluster.edit(expert_parallel=EP4)
    cluster.settle()
    assert [pod.ep for pod in cluster.serving] == [4, 4]
