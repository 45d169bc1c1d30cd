"""The failure table of k8s.md 4.6, row by row: what the pool does, and what it says meanwhile."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from prefill_operator.api_parts import LifecycleSpec
from prefill_operator.model import OperatorTimes, SidecarDown, Termination
from prefill_operator.names import EventReason
from prefill_operator.pool_api import KvdSpec, NetworkSpec, PrefillPoolSpec
from prefill_testing.cluster_model import ClusterModel, NodeModel, settled_cluster
from prefill_testing.planner_pools import ENGINE_A, ENGINE_B, make_pool, make_spec

TIMES = OperatorTimes()


def running(*, spec: PrefillPoolSpec | None = None, num_nodes: int = 4, watches_nodes: bool = True) -> ClusterModel:
    """A settled pool: 4 PEs of 2 GPUs packed on gpu-0."""
    return settled_cluster(make_pool(spec or make_spec()), num_nodes=num_nodes, watches_nodes=watches_nodes)


@pytest.mark.parametrize("code", [1, 15, 16, 17, 137])
def test_single_crash_restarts_in_place(code: int) -> None:
    cluster = running()
    before = len(cluster.log)
    cluster.crash(cluster.name_of(1), code)
    cluster.run_pass()
    assert cluster.condition("Available").status == "False"
    assert (
        f"exit {code}" in cluster.condition("Available").message
        or "OOMKilled" in cluster.condition("Available").message
    )
    cluster.settle()
    assert cluster.story(since=before) == []
    assert cluster.condition("Ready").status == "True"


def test_third_crash_within_half_an_hour_replaces_on_another_node() -> None:
    cluster = running()
    before, name = len(cluster.log), cluster.name_of(2)
    for _ in range(3):
        cluster.crash(name, 1)
        cluster.run_pass()
        cluster.advance(200)
        cluster.run_pass()
    assert cluster.story(since=before) == ["create 5", "delete 2 CrashLoop"]
    assert cluster.pods[cluster.name_of(5)].node != "gpu-0"
    assert EventReason.PE_REPLACED in {event.reason for event in cluster.events}


def test_crashes_spread_over_hours_are_no_loop() -> None:
    cluster = running()
    before, name = len(cluster.log), cluster.name_of(2)
    for _ in range(5):
        cluster.crash(name, 1)
        cluster.settle()
        cluster.advance(1000)
    assert cluster.story(since=before) == []


def test_long_crash_backoff_replaces_even_after_one_restart() -> None:
    cluster = running()
    before, name = len(cluster.log), cluster.name_of(2)
    cluster.load_seconds = 10_000
    cluster.crash(name, 1)
    cluster.change(name, waiting_reason="CrashLoopBackOff")
    cluster.run_pass()
    assert cluster.last.next_wakeup == cluster.now + TIMES.crash_loop_seconds
    cluster.advance(TIMES.crash_loop_seconds)
    cluster.run_pass()
    assert cluster.story(since=before) == ["create 5", "delete 2 CrashLoop"]


def test_crash_loop_of_every_replacement_stalls_the_pool() -> None:
    """No endless churn: three replacements on two nodes, then a human is asked."""
    cluster = running(num_nodes=6)
    cluster.failing_exit = 1
    cluster.load_seconds = 20
    before = len(cluster.log)
    cluster.crash(cluster.name_of(1), 1)
    for _ in range(400):
        cluster.run_pass()
        cluster.advance(10)
    created = [line for line in cluster.story(since=before) if line.startswith("create")]
    assert len(created) == TIMES.crash_replacements
    stalled = cluster.condition("Stalled")
    assert (stalled.status, stalled.reason) == ("True", "CrashLoop")
    cluster.failing_exit = None
    cluster.settle()
    assert cluster.condition("Stalled").status == "False"


@pytest.mark.parametrize("code", [10, 11])
def test_rejected_config_is_not_retried(code: int) -> None:
    nodes = {f"gpu-{index}": NodeModel() for index in range(4)}
    spec = make_spec(lifecycle=LifecycleSpec(max_concurrent_loads=2))
    cluster = ClusterModel(pool=make_pool(spec), nodes=nodes, failing_exit=code)
    for _ in range(100):
        cluster.run_pass()
        cluster.advance(60)
    assert len(cluster.pods) == 2
    assert cluster.story() == ["create 1", "create 2"]
    stalled = cluster.condition("Stalled")
    assert (stalled.status, stalled.reason) == ("True", "ConfigRejected")
    assert f"exit {code}" in stalled.message


def test_rejected_config_makes_no_more_pods_when_scaled_up() -> None:
    cluster = ClusterModel(pool=make_pool(make_spec(replicas=2)), nodes={"gpu-0": NodeModel()}, failing_exit=10)
    cluster.run_pass()
    cluster.advance(200)
    cluster.edit(replicas=4)
    cluster.run_pass()
    assert cluster.story() == ["create 1", "create 2"]


def test_rejected_config_is_cured_by_an_edit() -> None:
    cluster = running()
    cluster.failing_exit = 10
    cluster.edit(engine=ENGINE_B)
    cluster.failing_revisions = frozenset({cluster.plan().revision})
    for _ in range(20):
        cluster.run_pass()
        cluster.advance(60)
    assert cluster.num_serving == 4
    cluster.failing_exit = None
    cluster.edit(engine=make_spec().engine)
    cluster.settle()
    assert cluster.num_serving == 4
    assert cluster.condition("Stalled").status == "False"


def test_gpu_fault_of_a_dead_engine_deletes_at_once_and_avoids_the_node_for_an_hour() -> None:
    cluster = running()
    before, name = len(cluster.log), cluster.name_of(3)
    cluster.crash(name, 14)
    cluster.run_pass()
    assert cluster.story(since=before) == ["create 5", "delete 3 GPUFault"]
    replacement = cluster.pods[cluster.name_of(5)]
    assert replacement.avoid_nodes == ("gpu-0",)
    fault = next(event for event in cluster.events if event.reason is EventReason.PE_REPLACED)
    assert fault.node == "gpu-0"
    cluster.settle()
    cluster.advance(TIMES.node_avoid_seconds + 1)
    cluster.delete_pod(cluster.name_of(5))
    cluster.run_pass()
    assert cluster.pods[cluster.name_of(6)].avoid_nodes == ()


def test_unhealthy_device_is_replaced_before_it_is_drained() -> None:
    """C34: the pod stays Running and Ready."""
    cluster = running()
    before, name = len(cluster.log), cluster.name_of(3)
    cluster.change(name, unhealthy_devices=("nvidia.com/gpu/GPU-7",))
    cluster.settle()
    assert cluster.story(since=before) == ["create 5", "drain 3 GPUFault", "delete 3 Drained"]
    assert min(applied.serving for applied in cluster.log[before:]) == 4
    assert cluster.pods[cluster.name_of(5)].node != "gpu-0"


def test_engines_that_always_report_a_gpu_fault_do_not_make_pods_without_end() -> None:
    cluster = running(num_nodes=8)
    cluster.failing_exit, cluster.load_seconds = 14, 1
    before, start = len(cluster.log), cluster.now
    cluster.crash(cluster.name_of(1), 14)
    while cluster.now < start + 600:
        cluster.run_pass()
        cluster.advance(1)
    created = [line for line in cluster.story(since=before) if line.startswith("create")]
    assert 2 <= len(created) <= 9


def test_image_that_cannot_be_pulled_is_waited_for_and_then_reported() -> None:
    cluster = running()
    cluster.load_seconds = 1e9
    before = len(cluster.log)
    cluster.edit(engine=ENGINE_B)
    cluster.run_pass()
    cluster.advance(0)
    name = cluster.name_of(5)
    cluster.change(name, waiting_reason="ImagePullBackOff", waiting_message="no such tag", waiting_since=cluster.now)
    cluster.run_pass()
    assert cluster.condition("Stalled").status == "False"
    assert cluster.last.next_wakeup == cluster.now + TIMES.image_pull_seconds
    cluster.advance(TIMES.image_pull_seconds)
    cluster.run_pass()
    stalled = cluster.condition("Stalled")
    assert (stalled.status, stalled.reason) == ("True", "ImagePullFailed")
    assert "no such tag" in stalled.message
    assert cluster.story(since=before) == ["create 5"]
    assert cluster.num_serving == 4


def test_container_that_cannot_be_made_is_a_config_problem() -> None:
    cluster = running(spec=make_spec(replicas=1))
    name = cluster.name_of(1)
    since = cluster.now
    cluster.change(
        name, ready=False, waiting_reason="CreateContainerConfigError", waiting_message='secret "x" not found'
    )
    cluster.change(name, ready_changed_at=since, waiting_since=since)
    cluster.load_seconds = 1e9
    cluster.advance(TIMES.image_pull_seconds)
    cluster.run_pass()
    stalled = cluster.condition("Stalled")
    assert (stalled.status, stalled.reason) == ("True", "ConfigRejected")
    assert 'secret "x" not found' in stalled.message


def down(cluster: ClusterModel, *, is_waiting: bool = True, **end: Any) -> SidecarDown:
    ended = Termination(**{"at": cluster.now, "restart_count": 1, "reason": "Error", **end})
    return SidecarDown(name="kvd", end=ended, is_waiting=is_waiting)


def test_refusal_of_a_sidecar_is_told_in_its_own_words_and_nothing_is_replaced() -> None:
    cluster = running(spec=make_spec(replicas=1))
    cluster.load_seconds = 1e9
    before, name = len(cluster.log), cluster.name_of(1)
    end = {"exit_code": 10, "code": "ConfigError", "phase": "start", "detail": "make /dev/shm larger"}
    cluster.change(name, ready=False, ready_changed_at=cluster.now, waiting_reason="CrashLoopBackOff")
    cluster.change(name, sidecar=down(cluster, **end))
    for _ in range(2):
        cluster.run_pass()
        stalled = cluster.condition("Stalled")
        assert (stalled.status, stalled.reason) == ("True", "ConfigRejected")
        for kind in ("Stalled", "Ready", "Available"):
            assert "kvd: ConfigError (exit 10) in start: make /dev/shm larger" in cluster.condition(kind).message
        cluster.advance(TIMES.crash_loop_seconds)
    assert cluster.story(since=before) == []


@pytest.mark.parametrize(
    "fix",
    [
        {"kvd": KvdSpec(enabled=True, image="kvd:1", pool_size=8 << 30)},
        {"engine": msgspec.structs.replace(ENGINE_A, extra_shm=64 << 30)},
        {"network": NetworkSpec(rdma_resource_name="rdma/hca")},
    ],
    ids=["kvd", "extraShm", "rdma"],
)
def test_refusal_of_a_sidecar_ends_with_a_fix_of_the_spec(fix: dict[str, Any]) -> None:
    """The pods that say it are replaced at once and cost no budget: what they run can never start."""
    cluster = running(spec=make_spec(replicas=2, surge=0, unavailable=1))
    cluster.load_seconds = 1e9
    before = len(cluster.log)
    for number in (1, 2):
        cluster.change(cluster.name_of(number), ready=False, ready_changed_at=cluster.now)
        cluster.change(cluster.name_of(number), sidecar=down(cluster, exit_code=10, detail="make /dev/shm larger"))
    cluster.run_pass()
    assert cluster.story(since=before) == []
    assert cluster.condition("Stalled").reason == "ConfigRejected"
    cluster.edit(**fix)
    cluster.run_pass()
    story = cluster.story(since=before)
    assert sorted(story) == ["create 3", "create 4", "delete 1 OldRevision", "delete 2 OldRevision"]
    cluster.load_seconds = 1
    cluster.settle()
    assert [cluster.condition(kind).status for kind in ("Ready", "Stalled")] == ["True", "False"]


def test_sidecar_killed_under_a_serving_engine_is_left_to_come_back() -> None:
    cluster = running(spec=make_spec(replicas=1))
    before, name = len(cluster.log), cluster.name_of(1)
    cluster.change(name, ready=False, ready_changed_at=cluster.now)
    cluster.change(name, sidecar=down(cluster, is_waiting=False, exit_code=137))
    cluster.run_pass()
    assert "kvd: Error (exit 137)" in cluster.condition("Available").message
    assert cluster.condition("Stalled").status == "False"
    cluster.change(name, ready=True, ready_changed_at=cluster.now, sidecar=None)
    cluster.run_pass()
    assert cluster.condition("Ready").status == "True"
    assert cluster.story(since=before) == []


def test_sidecar_out_of_host_memory_names_its_own_value() -> None:
    cluster = running(spec=make_spec(replicas=1))
    name = cluster.name_of(1)
    cluster.change(name, ready=False, sidecar=down(cluster, exit_code=137, reason="OOMKilled"))
    cluster.run_pass()
    assert "kvd: OOMKilled: host memory; raise kvd.memory" in cluster.condition("Available").message


def test_crashing_sidecar_that_keeps_the_engine_from_starting_is_a_crash_loop() -> None:
    cluster = running(spec=make_spec(replicas=1))
    cluster.load_seconds = 1e9
    before, name = len(cluster.log), cluster.name_of(1)
    cluster.change(name, ready=False, ready_changed_at=cluster.now, waiting_reason="CrashLoopBackOff")
    cluster.change(name, sidecar=down(cluster, exit_code=1))
    cluster.run_pass()
    assert "kvd: Error (exit 1)" in cluster.condition("Available").message
    cluster.advance(TIMES.crash_loop_seconds)
    cluster.run_pass()
    assert cluster.story(since=before) == ["create 2", "delete 1 CrashLoop"]


def test_unready_pe_that_did_not_crash_is_left_to_come_back() -> None:
    cluster = running()
    before, name = len(cluster.log), cluster.name_of(1)
    cluster.change(name, ready=False, ready_changed_at=cluster.now)
    cluster.edit(engine=ENGINE_B)
    cluster.run_pass()
    assert not any("delete 1" in line for line in cluster.story(since=before))


def test_foreign_pod_is_never_touched_and_reported() -> None:
    cluster = running(spec=make_spec(replicas=2))
    stranger = replace(
        cluster.pods[cluster.name_of(1)], name="flash-00000000-9", uid="other", incarnation=9, foreign=True
    )
    cluster.pods[stranger.name] = stranger
    cluster.edit(replicas=0)
    cluster.settle()
    assert list(cluster.pods) == [stranger.name]
    assert cluster.condition("Stalled").reason == "ForeignObject"
    cluster.edit(replicas=1)
    cluster.run_pass()
    assert "create 10" in cluster.story()
