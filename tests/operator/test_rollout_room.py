"""Rollouts where room is short, or that something else meets half way (k8s.md 2.1 rows 10 and 11, 2.4 row 44, 2.7)."""

import pytest

from prefill_operator.api_parts import RolloutSpec
from prefill_operator.model import OperatorTimes
from prefill_operator.pool_api import ExpertParallelSpec
from prefill_testing.cluster_model import ClusterModel, settled_cluster
from prefill_testing.planner_pools import ENGINE_B, make_pool, make_spec

TIMES = OperatorTimes()


def full_cluster() -> tuple[ClusterModel, int]:
    """4 PEs on the 8 GPUs that there are, and a changed image that has looked for room for as long as it takes to say so."""
    cluster = settled_cluster(make_pool(make_spec(replicas=4)), num_nodes=1)
    before = len(cluster.log)
    cluster.edit(engine=ENGINE_B)
    for _ in range(10):
        cluster.run_pass()
        cluster.advance(TIMES.unschedulable_seconds / 2)
    return cluster, before


def test_rollout_without_room_says_so_and_keeps_every_old_pod() -> None:
    cluster, before = full_cluster()

    assert cluster.story(since=before) == ["create 5"]
    assert cluster.num_serving == 4
    progressing = cluster.condition("Progressing")
    assert (progressing.status, progressing.reason) == ("False", "NoRoom")
    assert f"1 PEs find no room; {cluster.name_of(5)}: no node fits" in progressing.message
    assert cluster.condition("Available").status == "True"


def test_rollout_without_room_is_undone_by_the_way_back() -> None:
    cluster, before = full_cluster()
    cluster.edit(engine=make_spec().engine)
    cluster.settle()

    assert cluster.story(since=before) == ["create 5", "delete 5 OldRevision"]
    assert cluster.condition("Ready").status == "True"


def test_rollout_without_room_goes_on_once_the_user_lets_a_pod_be_missing() -> None:
    cluster, before = full_cluster()
    cluster.edit(rollout=RolloutSpec(max_unavailable=1, min_ready_seconds=0))
    cluster.settle()

    assert min(applied.serving for applied in cluster.log[before:]) == 3
    assert {pod.revision for pod in cluster.serving} == {cluster.plan().revision}
    assert cluster.condition("Ready").status == "True"


def test_scale_down_in_mid_rollout_waits_for_drains_and_not_for_the_new_revision() -> None:
    """Engines of the new revision load for ever; the pool shrinks all the same."""
    cluster = settled_cluster(make_pool(make_spec(replicas=4)))
    cluster.load_seconds = 1e9
    before = len(cluster.log)
    cluster.edit(engine=ENGINE_B)
    cluster.run_pass()
    cluster.edit(replicas=2)
    for _ in range(6):
        cluster.run_pass()
        cluster.advance(10)

    assert cluster.num_serving == 2
    assert sum(line.startswith("drain") for line in cluster.story(since=before)) == 2
    assert len(cluster.pods) <= 4


@pytest.mark.parametrize("gpus", [7, 4])
def test_node_that_lost_devices_is_not_emptied_for_a_larger_pe(gpus: int) -> None:
    """All GPUs are taken; a node without all of its devices can never hold 8, so its PEs are left alone."""
    cluster = settled_cluster(make_pool(make_spec(replicas=4, spares=2, ep=ExpertParallelSpec(size=4))), num_nodes=3)
    cluster.nodes["gpu-0"].gpus = gpus
    cluster.edit(expert_parallel=ExpertParallelSpec(size=8))
    for _ in range(20):
        cluster.run_pass()
        drained = {pod.node for pod in cluster.pods.values() if pod.draining_since is not None}
        if drained:
            break
        cluster.advance(15)

    assert len(drained) == 1
    assert drained <= {"gpu-1", "gpu-2"}
