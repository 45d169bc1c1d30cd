"""The rows of k8s.md 4.6 that are about nodes, admission and drains."""

from dataclasses import replace

import pytest

from prefill_operator.model import DeletePod, OperatorTimes, StartDrain
from prefill_operator.names import EventReason
from prefill_operator.pool_api import PrefillPoolSpec, QuotaSpec, RedundancySpec
from prefill_testing.cluster_model import ClusterModel, NodeModel, settled_cluster
from prefill_testing.planner_pools import make_pool, make_spec

TIMES = OperatorTimes()


def running(*, spec: PrefillPoolSpec | None = None, num_nodes: int = 4, watches_nodes: bool = True) -> ClusterModel:
    """A settled pool: 4 PEs of 2 GPUs packed on gpu-0."""
    return settled_cluster(make_pool(spec or make_spec()), num_nodes=num_nodes, watches_nodes=watches_nodes)


def test_fault_seen_by_a_health_agent_moves_every_pe_of_the_node() -> None:
    cluster = running()
    before = len(cluster.log)
    cluster.nodes["gpu-0"].fault = "Xid 79"
    cluster.settle()
    assert {pod.node for pod in cluster.serving} == {"gpu-1"}
    assert min(applied.serving for applied in cluster.log[before:]) == 4
    assert cluster.condition("Ready").status == "True"


def test_unschedulable_pod_is_left_pending_and_named() -> None:
    cluster = ClusterModel(pool=make_pool(make_spec(replicas=4, spares=1)), nodes={"gpu-0": NodeModel()})
    cluster.settle()
    cluster.advance(TIMES.unschedulable_seconds)
    cluster.run_pass()
    assert cluster.story() == [f"create {number}" for number in range(1, 6)]
    redundant, progressing = cluster.condition("Redundant"), cluster.condition("Progressing")
    assert (redundant.status, redundant.reason) == ("False", "SparesUnschedulable")
    assert (progressing.status, progressing.reason) == ("False", "NoRoom")
    assert "no node fits" in redundant.message
    assert cluster.condition("Available").status == "True"
    cluster.edit(replicas=3)
    cluster.settle()
    assert cluster.story()[5:] == ["delete 5 ScaleDown"]


def test_storm_of_refused_pods_backs_off_and_avoids_the_node() -> None:
    """k8s.md 7.3 item 8: at most 6 pods in 5 minutes."""
    # The fuller node is taken first, so each new pod meets the broken kubelet until it avoids it.
    nodes = {"gpu-0": NodeModel(refuses=True, gpus=4), "gpu-1": NodeModel(gpus=6)}
    cluster = ClusterModel(pool=make_pool(make_spec(replicas=1)), nodes=nodes)
    start = cluster.now
    while cluster.now < start + 300:
        cluster.run_pass()
        cluster.advance(1)
    created = [line for line in cluster.story() if line.startswith("create")]
    assert len(created) == 3
    assert [pod.node for pod in cluster.serving] == ["gpu-1"]


def test_storm_on_the_only_node_stays_bounded() -> None:
    cluster = ClusterModel(pool=make_pool(make_spec(replicas=2)), nodes={"gpu-0": NodeModel(refuses=True)})
    start = cluster.now
    while cluster.now < start + 300:
        cluster.run_pass()
        cluster.advance(1)
    created = [line for line in cluster.story() if line.startswith("create")]
    assert len(created) <= 12
    assert all(pod.phase != "Failed" for pod in cluster.pods.values()) or len(cluster.pods) <= 2
    cluster.nodes["gpu-0"].refuses = False
    cluster.settle()
    assert cluster.num_serving == 2


@pytest.mark.parametrize("reason", ["UnexpectedAdmissionError", "OutOfcpu", "Evicted", "NodeAffinity"])
def test_failed_pod_is_deleted_first_and_replaced_after_the_pause(reason: str) -> None:
    cluster = running()
    before, name = len(cluster.log), cluster.name_of(2)
    cluster.change(name, phase="Failed", failed_reason=reason, failed_at=cluster.now, ready=False)
    cluster.run_pass()
    assert cluster.story(since=before) == ["delete 2 Failed"]
    cluster.run_pass()
    assert cluster.last.next_wakeup == cluster.now + TIMES.backoff_seconds
    cluster.advance(TIMES.backoff_seconds)
    cluster.run_pass()
    assert cluster.story(since=before) == ["delete 2 Failed", "create 5"]


def test_lost_node_is_replaced_after_its_grace_and_never_forced() -> None:
    cluster = running()
    before = len(cluster.log)
    cluster.kill_node("gpu-0")
    cluster.advance(cluster.detect_seconds)
    cluster.run_pass()
    assert cluster.story(since=before) == []
    assert cluster.last.next_wakeup == cluster.now + 60
    cluster.advance(60)
    cluster.run_pass()
    assert cluster.story(since=before) == [f"create {n}" for n in (5, 6, 7, 8)] + [
        f"delete {n} NodeLost" for n in (1, 2, 3, 4)
    ]
    deletes = [applied.action for applied in cluster.log if isinstance(applied.action, DeletePod)]
    assert {action.grace_seconds for action in deletes} == {None}
    lost = [event for event in cluster.events if event.reason is EventReason.NODE_LOST]
    assert [event.node for event in lost] == ["gpu-0"]
    cluster.settle()
    assert cluster.num_serving == 4
    cluster.revive_node("gpu-0")
    cluster.settle()
    assert len(cluster.pods) == 4


def test_pods_on_a_lost_node_do_not_count_against_quota() -> None:
    cluster = running(spec=make_spec(replicas=4, quota=QuotaSpec(max_pes=4, redundancy=RedundancySpec(spares=0))))
    cluster.kill_node("gpu-0")
    cluster.settle()
    cluster.advance(60)
    cluster.settle()
    assert cluster.num_serving == 4
    assert len(cluster.pods) == 8
    cluster.delete_pod(cluster.name_of(5))
    cluster.settle()
    assert cluster.num_serving == 4


def test_pods_that_still_terminate_count_against_quota() -> None:
    cluster = running(spec=make_spec(replicas=4, quota=QuotaSpec(max_pes=4, redundancy=RedundancySpec(spares=0))))
    cluster.delete_pod(cluster.name_of(1))
    cluster.run_pass()
    assert "create 5" not in cluster.story()
    cluster.settle()
    assert cluster.num_serving == 4


def test_short_absence_of_a_node_is_sat_out() -> None:
    cluster = running()
    before = len(cluster.log)
    cluster.kill_node("gpu-0")
    cluster.advance(30)
    cluster.run_pass()
    assert "gpu-0" in cluster.condition("Available").message
    cluster.revive_node("gpu-0")
    cluster.settle()
    assert cluster.story(since=before) == []


def test_removed_node_is_lost_but_not_one_that_we_do_not_know_yet() -> None:
    cluster = running()
    before = len(cluster.log)
    view = replace(cluster.observe(), nodes=())
    cluster.run_pass(replace(view, now=cluster.pods[cluster.name_of(1)].scheduled_at + 10))
    assert cluster.story(since=before) == []
    cluster.run_pass(view)
    assert [line for line in cluster.story(since=before) if "NodeLost" in line] == [
        f"delete {n} NodeLost" for n in (1, 2, 3, 4)
    ]


def test_node_loss_without_sight_of_nodes_shows_in_the_pod() -> None:
    """C35."""
    cluster = running(watches_nodes=False)
    before = len(cluster.log)
    cluster.change(cluster.name_of(1), disruption_target="DeletionByTaintManager")
    cluster.run_pass()
    assert cluster.story(since=before) == ["create 5", "delete 1 NodeLost"]
    assert cluster.pool.status.not_watched == ("nodes",)


@pytest.mark.parametrize(("surge", "unavailable"), [(1, 0), (0, 1)])
def test_cordoned_node_is_emptied_with_replacements_first(surge: int, unavailable: int) -> None:
    """Even with maxSurge 0, because a later `kubectl drain` must find nothing to wait for."""
    cluster = running(spec=make_spec(spares=1, surge=surge, unavailable=unavailable))
    before = len(cluster.log)
    cluster.nodes["gpu-0"].cordoned = True
    cluster.settle()
    assert "gpu-0" not in {pod.node for pod in cluster.pods.values()}
    assert min(applied.serving for applied in cluster.log[before:]) >= 5 - unavailable
    assert cluster.condition("Ready").status == "True"


def test_cordoned_node_without_room_elsewhere_keeps_serving_and_says_so() -> None:
    cluster = running(num_nodes=1)
    cluster.nodes["gpu-0"].cordoned = True
    cluster.settle()
    cluster.advance(TIMES.unschedulable_seconds)
    cluster.run_pass()
    assert cluster.num_serving == 4
    assert cluster.condition("Progressing").reason == "NoRoom"
    cluster.nodes["gpu-0"].cordoned = False
    cluster.settle()
    assert sorted(pod.incarnation for pod in cluster.serving) == [1, 2, 3, 4]


def test_maintenance_taint_drains_at_once() -> None:
    cluster = running()
    before = len(cluster.log)
    cluster.nodes["gpu-0"].maintenance = "cloud/preempted"
    cluster.run_pass()
    story = cluster.story(since=before)
    assert story == [f"create {n}" for n in (5, 6, 7, 8)] + [f"drain {n} NodeMaintenance" for n in (1, 2, 3, 4)]
    cluster.settle()
    assert {pod.node for pod in cluster.serving} == {"gpu-1"}


def test_maintenance_bounds_the_drain_by_the_providers_notice() -> None:
    cluster = running()
    cluster.drain_seconds = 1e6
    cluster.nodes["gpu-0"].maintenance = "cloud/preempted"
    short = OperatorTimes(maintenance_notice_seconds=30)
    cluster.run_pass(times=short)
    cluster.advance(30)
    cluster.run_pass(times=short)
    assert "delete 1 DrainTimeout" in cluster.story()


def test_memory_of_a_node_is_forgotten_if_nothing_else_fits() -> None:
    cluster = running(num_nodes=2, spec=make_spec(replicas=8))
    name = next(pod.name for pod in cluster.serving if pod.node == "gpu-0")
    cluster.crash(name, 14)
    cluster.settle()
    assert cluster.num_serving == 8
    assert sum(pod.node == "gpu-0" for pod in cluster.serving) == 4


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"drain_done": True}, "Drained"),
        ({"drain_unreachable_since": -10.0}, "DrainUnreachable"),
        ({}, "DrainTimeout"),
    ],
    ids=["done", "engine gone", "deadline"],
)
def test_drain_ends_when_done_unreachable_or_late(change: dict[str, object], reason: str) -> None:
    cluster = running()
    cluster.drain_seconds = 1e6
    cluster.edit(replicas=3)
    cluster.run_pass()
    drained = next(applied.action for applied in cluster.log if isinstance(applied.action, StartDrain))
    assert drained.timeout_seconds == 120
    if change:
        seen = {k: cluster.now + v if isinstance(v, float) else v for k, v in change.items()}
        cluster.change(drained.name, **seen)
    else:
        cluster.advance(119)
        cluster.run_pass()
        assert cluster.pods[drained.name].terminating_since is None
        cluster.advance(1)
    cluster.run_pass()
    deleted = next(applied.action for applied in cluster.log if isinstance(applied.action, DeletePod))
    assert (deleted.name, deleted.uid, deleted.reason, deleted.grace_seconds) == (drained.name, drained.uid, reason, 45)
    assert (EventReason.DRAIN_TIMEOUT in {event.reason for event in cluster.events}) == (reason == "DrainTimeout")


def test_drain_started_under_a_wrong_clock_does_not_last_for_ever() -> None:
    cluster = running()
    name = cluster.name_of(1)
    cluster.change(name, draining_since=cluster.now + 86_400)
    cluster.run_pass()
    assert cluster.pods[name].terminating_since is not None


def test_numbers_are_never_used_twice() -> None:
    """So that a second operator that still sees the old pods finds the names of its replacements taken."""
    cluster = running(spec=make_spec(replicas=2))
    for pod in list(cluster.serving):
        cluster.crash(pod.name, 14)
    old_view = cluster.observe()
    cluster.run_pass()
    cluster.advance(100)
    assert sorted(pod.incarnation for pod in cluster.pods.values()) == [3, 4]
    cluster.run_pass(old_view)
    assert sorted(pod.incarnation for pod in cluster.pods.values()) == [3, 4]
    cluster.edit(replicas=0)
    cluster.settle()
    cluster.edit(replicas=1)
    cluster.settle()
    assert [pod.incarnation for pod in cluster.serving] == [5]
