"""Rollouts, scaling, pause and quota as whole sequences (k8s.md 4.5)."""

import pytest

from prefill_operator.api_parts import LifecycleSpec, Placement, RolloutSpec, RolloutStrategy, SchedulingSpec
from prefill_operator.model import CreatePod
from prefill_operator.names import EventReason
from prefill_operator.pool_api import PrefillPoolSpec, QuotaSpec, RedundancySpec
from prefill_testing.cluster_model import ClusterModel, NodeModel, settled_cluster
from prefill_testing.planner_pools import ENGINE_B, ENGINE_C, make_pool, make_spec, make_ve_spec

QUIET = {"min_ready_seconds": 0}


def running(spec: PrefillPoolSpec) -> ClusterModel:
    return settled_cluster(make_pool(spec))


def roll(spec: PrefillPoolSpec) -> tuple[list[str], ClusterModel]:
    """What a changed image does to a settled pool."""
    cluster = running(spec)
    before = len(cluster.log)
    cluster.edit(engine=ENGINE_B)
    cluster.settle()
    assert cluster.condition("Ready").status == "True"
    return cluster.story(since=before), cluster


def step(old: int, new: int) -> list[str]:
    """One turn of a rollout with surge: the drained pod makes room for the next."""
    return [f"drain {old} OldRevision", f"create {new}", f"delete {old} Drained"]


def test_rollout_with_surge_creates_before_it_drains() -> None:
    story, cluster = roll(make_spec(replicas=3))
    last = ["drain 3 OldRevision", "delete 3 Drained"]
    assert story == ["create 4", *step(1, 5), *step(2, 6), *last]
    assert [event.reason for event in cluster.events].count(EventReason.ROLLOUT_COMPLETE) == 1


def test_rollout_without_surge_drains_before_it_creates() -> None:
    story, _ = roll(make_spec(replicas=2, surge=0, unavailable=1))
    assert story == [
        *["drain 1 OldRevision", "create 3", "delete 1 Drained"],
        *["drain 2 OldRevision", "create 4", "delete 2 Drained"],
    ]


def test_rollout_inside_the_spares_never_goes_below_n() -> None:
    """k8s.md 2 row 14: with maxSurge 0 the spares are the surge."""
    spec = make_spec(replicas=3, spares=2, surge=0, unavailable=2)
    cluster = running(spec)
    before = len(cluster.log)
    cluster.edit(engine=ENGINE_B)
    cluster.settle()
    assert min(applied.serving for applied in cluster.log[before:]) == 3
    assert max(len(cluster.pods), 5) == 5


def test_rollout_does_not_eat_spares_silently() -> None:
    cluster = running(make_spec(replicas=3, spares=2))
    before = len(cluster.log)
    cluster.edit(engine=ENGINE_B)
    cluster.settle()
    assert min(applied.serving for applied in cluster.log[before:]) == 5


def test_creation_loads_no_more_than_the_cap_at_once() -> None:
    spec = make_spec(replicas=6, lifecycle=LifecycleSpec(max_concurrent_loads=2))
    cluster = running(spec)
    creates = [applied.at for applied in cluster.log if isinstance(applied.action, CreatePod)]
    assert [round(at - creates[0]) for at in creates] == [0, 0, 100, 100, 200, 200]


def test_rollout_waits_for_min_ready_seconds() -> None:
    cluster = running(make_spec(replicas=1, rollout=RolloutSpec(min_ready_seconds=30)))
    cluster.edit(engine=ENGINE_B)
    cluster.run_pass()
    cluster.advance(100)
    cluster.run_pass()
    assert cluster.num_serving == 2
    assert cluster.last.next_wakeup == cluster.now + 30
    cluster.advance(30)
    cluster.run_pass()
    assert cluster.story()[-1] == "drain 1 OldRevision"


def test_second_edit_in_mid_rollout_needs_no_reset() -> None:
    """k8s.md 2 row 5: a pod of the revision between, still loading, is dropped at once."""
    cluster = running(make_spec(replicas=2))
    before = len(cluster.log)
    cluster.edit(engine=ENGINE_B)
    cluster.run_pass()
    cluster.advance(10)
    cluster.edit(engine=ENGINE_C)
    cluster.settle()
    assert cluster.story(since=before)[:3] == ["create 3", "create 4", "delete 3 OldRevision"]
    assert {pod.revision for pod in cluster.serving} == {cluster.plan().revision}
    assert min(applied.serving for applied in cluster.log[before:]) == 2


def test_revert_in_mid_rollout_keeps_the_budget() -> None:
    """k8s.md 2 row 4."""
    cluster = running(make_spec(replicas=4))
    before = len(cluster.log)
    engine = cluster.pool.spec.engine
    cluster.edit(engine=ENGINE_B)
    for _ in range(12):
        cluster.run_pass()
        cluster.advance(30)
    cluster.edit(engine=engine)
    cluster.settle()
    assert min(applied.serving for applied in cluster.log[before:]) >= 4
    assert {pod.revision for pod in cluster.serving} == {cluster.plan().revision}


def test_revision_that_never_starts_costs_one_surge_pod_and_recovers_by_revert() -> None:
    cluster = running(make_spec(replicas=4))
    engine, before = cluster.pool.spec.engine, len(cluster.log)
    cluster.edit(engine=ENGINE_B)
    cluster.failing_exit, cluster.failing_revisions = 10, frozenset({cluster.plan().revision})
    for _ in range(30):
        cluster.run_pass()
        cluster.advance(60)
    assert (cluster.num_serving, len(cluster.pods)) == (4, 5)
    assert cluster.condition("Ready").reason == "RolloutInProgress"
    cluster.edit(engine=engine)
    cluster.settle()
    assert sorted(pod.incarnation for pod in cluster.serving) == [1, 2, 3, 4]
    assert min(applied.serving for applied in cluster.log[before:]) == 4


def test_rollout_starts_although_all_old_pods_are_broken() -> None:
    """k8s.md 2 row 8."""
    nodes = {"gpu-0": NodeModel()}
    cluster = ClusterModel(pool=make_pool(make_spec(replicas=4)), nodes=nodes, failing_exit=10)
    cluster.run_pass()
    cluster.advance(100)
    cluster.failing_revisions = frozenset({cluster.plan().revision})
    cluster.edit(engine=ENGINE_B)
    cluster.run_pass()
    assert cluster.story()[4:] == [f"create {n}" for n in (5, 6, 7, 8)] + [
        f"delete {n} OldRevision" for n in (1, 2, 3, 4)
    ]
    cluster.settle()
    assert cluster.num_serving == 4


def test_partition_keeps_old_pods_until_it_is_lowered() -> None:
    spec = make_spec(replicas=4, rollout=RolloutSpec(partition=3, **QUIET))
    story, cluster = roll(spec)
    assert story == ["create 5", "drain 4 OldRevision", "delete 4 Drained"]
    assert cluster.condition("Progressing").reason == "Complete"
    cluster.edit(rollout=RolloutSpec(partition=0, **QUIET))
    cluster.settle()
    assert {pod.revision for pod in cluster.serving} == {cluster.plan().revision}


def test_on_delete_replaces_only_what_the_user_deletes() -> None:
    cluster = running(make_spec(replicas=3, rollout=RolloutSpec(strategy=RolloutStrategy.ON_DELETE, **QUIET)))
    before = len(cluster.log)
    cluster.edit(engine=ENGINE_B)
    cluster.settle()
    assert cluster.story(since=before) == []
    assert cluster.condition("Ready").reason == "RolloutInProgress"
    cluster.delete_pod(cluster.name_of(2))
    cluster.settle()
    assert cluster.story(since=before) == ["create 4"]
    assert cluster.pods[cluster.name_of(4)].revision == cluster.plan().revision
    assert cluster.num_serving == 3


def test_on_delete_still_scales_down_old_pods() -> None:
    cluster = running(make_spec(replicas=3, rollout=RolloutSpec(strategy=RolloutStrategy.ON_DELETE, **QUIET)))
    cluster.edit(engine=ENGINE_B)
    cluster.settle()
    cluster.edit(replicas=1)
    cluster.settle()
    assert [pod.incarnation for pod in cluster.serving] == [1]


def test_pause_stops_everything_but_the_status() -> None:
    cluster = running(make_spec(replicas=3))
    before = len(cluster.log)
    cluster.edit(paused=True, engine=ENGINE_B, replicas=1)
    cluster.delete_pod(cluster.name_of(1))
    cluster.children.clear()
    cluster.settle()
    assert cluster.log[before:] == []
    assert cluster.condition("Paused").status == "True"
    assert cluster.pool.status.ready_pes == 2
    assert cluster.pool.status.observed_generation == cluster.pool.generation
    cluster.edit(paused=False)
    cluster.settle()
    assert cluster.num_serving == 1


def test_pause_leaves_begun_drains_where_they_are_and_says_so() -> None:
    cluster = running(make_spec(replicas=3))
    cluster.drain_seconds = 1e9
    cluster.edit(replicas=1)
    cluster.run_pass()
    draining = sorted(pod.name for pod in cluster.pods.values() if pod.draining_since is not None)
    assert len(draining) == 2
    cluster.edit(paused=True)
    cluster.run_pass()
    for name in draining:
        cluster.change(name, drain_done=True)
    before = len(cluster.log)
    for _ in range(20):
        decision = cluster.run_pass()
        assert decision.next_wakeup is None or decision.next_wakeup > cluster.now
        cluster.advance(60)

    assert cluster.log[before:] == []
    paused = cluster.condition("Paused").message
    assert "; 2 whose drain had begun take no work and stay until spec.paused is false (" in paused
    assert all(name in paused for name in draining)
    cluster.edit(paused=False)
    cluster.run_pass()
    assert all(cluster.pods[name].terminating_since is not None for name in draining)
    assert cluster.condition("Paused").message == "spec.paused is not set"


def test_pause_does_not_stop_what_time_alone_tells() -> None:
    cluster = running(make_spec(replicas=2))
    name = cluster.name_of(1)
    cluster.change(
        name,
        ready=False,
        ready_changed_at=cluster.now,
        waiting_reason="ImagePullBackOff",
        waiting_message="no such tag",
        waiting_since=cluster.now,
    )
    cluster.load_seconds = 1e9
    cluster.edit(paused=True)
    decision = cluster.run_pass()
    assert cluster.condition("Stalled").status == "False"
    assert decision.next_wakeup == cluster.now + 600.0

    cluster.advance(600)
    decision = cluster.run_pass()
    assert cluster.condition("Stalled").reason == "ImagePullFailed"
    assert decision.next_wakeup is None
    assert not decision.actions


def test_scale_up_in_mid_rollout_creates_new_pods_only() -> None:
    cluster = running(make_spec(replicas=2))
    cluster.edit(engine=ENGINE_B)
    cluster.run_pass()
    cluster.edit(replicas=4)
    cluster.settle()
    assert cluster.num_serving == 4
    assert {pod.revision for pod in cluster.serving} == {cluster.plan().revision}


def test_scale_down_takes_unschedulable_then_loading_then_whole_nodes() -> None:
    cluster = running(make_spec(replicas=6))
    by_node = {pod.node: sum(other.node == pod.node for other in cluster.serving) for pod in cluster.serving}
    assert by_node == {"gpu-0": 4, "gpu-1": 2}
    for name in ("gpu-2", "gpu-3"):
        del cluster.nodes[name]
    cluster.edit(replicas=9)
    cluster.run_pass()
    cluster.advance(1)
    assert [pod.incarnation for pod in cluster.pods.values() if not pod.node] == [9]
    before = len(cluster.log)
    cluster.edit(replicas=4)
    cluster.settle()
    story = cluster.story(since=before)
    assert [line for line in story if "ScaleDown" in line] == [
        *["drain 6 ScaleDown", "drain 5 ScaleDown"],
        *["delete 9 ScaleDown", "delete 8 ScaleDown", "delete 7 ScaleDown"],
    ]
    assert {pod.node for pod in cluster.serving} == {"gpu-0"}


@pytest.mark.parametrize(
    ("placement", "kept"), [(Placement.PACK, [3, 4, 5, 6]), (Placement.SPREAD, [1, 2, 3, 4])], ids=["Pack", "Spread"]
)
def test_scale_down_frees_a_whole_node_or_evens_out(placement: Placement, kept: list[int]) -> None:
    """Two PEs on gpu-1, four on gpu-0."""
    cluster = running(make_spec(replicas=6))
    for number, node in ((1, "gpu-1"), (2, "gpu-1"), (5, "gpu-0"), (6, "gpu-0")):
        cluster.change(cluster.name_of(number), node=node)
    cluster.edit(replicas=4, scheduling=SchedulingSpec(placement=placement))
    cluster.settle()
    assert sorted(pod.incarnation for pod in cluster.serving) == kept


@pytest.mark.parametrize(
    ("placement", "nodes", "kept"),
    [
        (Placement.PACK, ("gpu-0", "gpu-1", "gpu-1", "gpu-0"), [2, 3]),
        (Placement.SPREAD, ("gpu-0", "gpu-0", "gpu-1", "gpu-1"), [1, 3]),
    ],
    ids=["Pack", "Spread"],
)
def test_scale_down_by_two_at_once_counts_the_first_as_gone(
    placement: Placement, nodes: tuple[str, ...], kept: list[int]
) -> None:
    """Two nodes of two PEs each."""
    cluster = running(make_spec(replicas=4))
    for number, node in zip((1, 2, 3, 4), nodes, strict=True):
        cluster.change(cluster.name_of(number), node=node)
    cluster.edit(replicas=2, scheduling=SchedulingSpec(placement=placement))
    cluster.settle()
    assert sorted(pod.incarnation for pod in cluster.serving) == kept


@pytest.mark.parametrize(
    ("backlogs", "kept"),
    [
        ((300.0, 100.0, 200.0, 400.0), [1, 4]),
        ((300.0, None, 200.0, 100.0), [1, 3]),
        ((None, None, None, None), [1, 2]),
        ((0.0, 0.0, 0.0, 0.0), [1, 2]),
    ],
    ids=["known", "one is silent", "unknown", "idle"],
)
def test_scale_down_takes_the_least_backlog_where_placement_does_not_care(
    backlogs: tuple[float | None, ...], kept: list[int]
) -> None:
    cluster = running(make_spec(replicas=4))
    for number, backlog in enumerate(backlogs, start=1):
        cluster.change(cluster.name_of(number), node="gpu-0", backlog_milliseconds=backlog)
    cluster.edit(replicas=2)
    cluster.settle()
    assert sorted(pod.incarnation for pod in cluster.serving) == kept


def test_scale_down_of_nearly_everything_is_a_slope_and_an_event() -> None:
    """k8s.md 2 row 33."""
    cluster = running(make_spec(replicas=8, lifecycle=LifecycleSpec(max_concurrent_loads=0, max_concurrent_drains=2)))
    before = len(cluster.log)
    cluster.edit(replicas=1)
    draining = []
    for _ in range(60):
        cluster.run_pass()
        draining.append(
            sum(pod.draining_since is not None for pod in cluster.pods.values() if not pod.terminating_since)
        )
        cluster.advance(5)
    assert max(draining) == 2
    assert cluster.num_serving == 1
    assert [event.reason for event in cluster.events].count(EventReason.LARGE_SCALE_DOWN) >= 1
    assert len([line for line in cluster.story(since=before) if "drain" in line]) == 7


def test_scale_to_zero_and_back() -> None:
    cluster = running(make_spec(replicas=2, spares=1))
    cluster.edit(replicas=0)
    cluster.settle()
    assert cluster.pods == {}
    for kind in ("Ready", "Available"):
        assert (cluster.condition(kind).status, cluster.condition(kind).reason) == ("True", "ScaledToZero")
    cluster.edit(replicas=2)
    cluster.settle()
    assert cluster.num_serving == 3


def test_rapid_scale_patches_are_no_rollout() -> None:
    """k8s.md 2 row 6."""
    cluster = running(make_spec(replicas=3))
    survivors = {pod.uid for pod in cluster.serving}
    for replicas in (5, 2, 7, 3, 6, 3):
        cluster.edit(replicas=replicas)
        cluster.run_pass()
        cluster.advance(5)
    cluster.settle()
    assert cluster.num_serving == 3
    assert len(survivors & {pod.uid for pod in cluster.serving}) >= 2


def test_rollout_that_quota_blocks_says_so_and_goes_on_when_allowed() -> None:
    """k8s.md 2 row 10: never silently below W."""
    spec = make_spec(replicas=2, quota=QuotaSpec(max_pes=3, redundancy=RedundancySpec(spares=1)))
    cluster = running(spec)
    before = len(cluster.log)
    cluster.edit(engine=ENGINE_B)
    cluster.settle()
    progressing = cluster.condition("Progressing")
    assert (progressing.status, progressing.reason) == ("False", "QuotaExceeded")
    assert "3 PEs exist, quota.maxPEs = 3" in progressing.message
    assert cluster.story(since=before) == []
    assert [event.reason for event in cluster.events].count(EventReason.QUOTA_EXCEEDED) == 1
    cluster.edit(rollout=RolloutSpec(max_surge=0, max_unavailable=1, **QUIET))
    cluster.settle()
    assert cluster.condition("Ready").status == "True"


def test_quota_caps_spares_first_and_then_replicas() -> None:
    spared = running(make_spec(replicas=3, quota=QuotaSpec(max_pes=4, redundancy=RedundancySpec(spares=3))))
    assert len(spared.pods) == 4
    assert (spared.condition("Redundant").status, spared.condition("Redundant").reason) == ("False", "CappedByQuota")
    short = running(make_spec(replicas=3, quota=QuotaSpec(max_gpus=5)))
    assert len(short.pods) == 2
    assert short.condition("Available").reason == "BelowMinimum"
    assert short.condition("Progressing").reason == "QuotaExceeded"
    assert "3 PEs wanted, quota.maxGPUs = 5, 2 PEs of 2 GPUs" in short.condition("Progressing").message


def test_progress_deadline_is_reported_and_stops_nothing() -> None:
    cluster = running(make_spec(replicas=1, rollout=RolloutSpec(progress_deadline_seconds=600, **QUIET)))
    cluster.load_seconds = 1e9
    cluster.edit(engine=ENGINE_B)
    cluster.run_pass()
    cluster.advance(1)
    cluster.run_pass()
    assert cluster.last.next_wakeup == pytest.approx(cluster.now + 600, abs=2)
    cluster.advance(600)
    cluster.run_pass()
    for kind, status in (("Progressing", "False"), ("Stalled", "True")):
        assert (cluster.condition(kind).status, cluster.condition(kind).reason) == (status, "DeadlineExceeded")
    cluster.load_seconds = 1.0
    cluster.settle()
    assert cluster.condition("Ready").status == "True"


def test_crash_after_long_quiet_is_no_missed_deadline() -> None:
    cluster = running(make_spec(replicas=2))
    cluster.advance(1_000_000)
    cluster.crash(cluster.name_of(1), 1)
    cluster.run_pass()
    assert cluster.condition("Progressing").reason == "Loading"


def test_encoder_pool_rolls_by_the_same_planner() -> None:
    cluster = ClusterModel(pool=make_pool(make_ve_spec(replicas=1)), nodes={"gpu-0": NodeModel()}, load_seconds=20)
    cluster.settle()
    assert cluster.num_serving == 2
    before = len(cluster.log)
    cluster.edit(encoder=make_ve_spec(image="registry.example/encoder:b").encoder)
    cluster.settle()
    assert cluster.story(since=before) == ["create 3", *step(1, 4), "drain 2 OldRevision", "delete 2 Drained"]
    status = cluster.pool.status
    assert (status.replicas, status.total_ves, status.ready_ves, status.redundancy.desired) == (1, 2, 2, 1)
