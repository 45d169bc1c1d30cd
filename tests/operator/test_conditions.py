"""Conditions and status: always whole, true to their value, with numbers (k8s.md 3.3, 3.4, 2.2)."""

from dataclasses import replace

import pytest

from prefill_operator.api_parts import Actuator
from prefill_operator.api_status import Condition, ConditionStatus
from prefill_operator.conditions import refuse_conditions
from prefill_operator.errors import PoolInvalid
from prefill_operator.model import ChildKind, LoadProgress, ObservedChild
from prefill_operator.names import CONDITION_REASONS, ConditionType, Reason
from prefill_operator.pool_api import MetricName, PoolAutoscaling, PoolMetric
from prefill_testing.cluster_model import ClusterModel, NodeModel, settled_cluster
from prefill_testing.planner_pools import ENGINE_B, make_pool, make_spec, make_ve_spec

METRICS = (PoolMetric(name=MetricName.BACKLOG, target=300),)
HPA = PoolAutoscaling(max_replicas=4, actuator=Actuator.HPA, metrics=METRICS)
KEDA = PoolAutoscaling(max_replicas=4, actuator=Actuator.KEDA, metrics=METRICS)


def running(replicas: int = 2, **changes: object) -> ClusterModel:
    return settled_cluster(make_pool(make_spec(replicas=replicas, **changes)))


def situations() -> dict[str, ClusterModel]:
    """One cluster for each way a pool can be."""
    empty = ClusterModel(pool=make_pool(make_spec()), nodes={"gpu-0": NodeModel()})
    rolling = running()
    rolling.edit(engine=ENGINE_B)
    rolling.run_pass()
    broken = running()
    broken.crash(broken.name_of(1), 10)
    full = ClusterModel(pool=make_pool(make_spec(replicas=9)), nodes={"gpu-0": NodeModel()})
    full.settle()
    full.advance(100)
    zero = running(0)
    paused = running()
    paused.edit(paused=True)
    encoder = settled_cluster(make_pool(make_ve_spec()))
    clusters = {"ready": running(), "empty": empty, "rolling": rolling, "broken": broken, "full": full, "zero": zero}
    return {**clusters, "paused": paused, "encoder": encoder}


@pytest.mark.parametrize("name", list(situations()))
def test_all_eight_conditions_are_always_there_with_their_own_reasons(name: str) -> None:
    cluster = situations()[name]
    cluster.run_pass()
    conditions = cluster.pool.status.conditions
    assert [condition.type for condition in conditions] == list(ConditionType)
    for condition in conditions:
        assert Reason(condition.reason) in CONDITION_REASONS[ConditionType(condition.type)]
        assert condition.observed_generation == cluster.pool.generation
        assert condition.message


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ready", {"Ready": "True", "Available": "True", "Progressing": "True", "Stalled": "False", "Paused": "False"}),
        ("empty", {"Ready": "False", "Available": "False", "Progressing": "True", "PlanFeasible": "True"}),
        ("rolling", {"Ready": "False", "Available": "True", "Progressing": "True"}),
        ("broken", {"Ready": "False", "Available": "False", "Stalled": "True"}),
        ("full", {"Ready": "False", "Available": "False", "Progressing": "False"}),
        ("zero", {"Ready": "True", "Available": "True", "Redundant": "True"}),
        ("paused", {"Ready": "True", "Paused": "True"}),
        ("encoder", {"Ready": "True", "PlanFeasible": "True", "Redundant": "True"}),
    ],
)
def test_conditions_tell_the_truth(name: str, expected: dict[str, str]) -> None:
    cluster = situations()[name]
    cluster.run_pass()
    assert {kind: cluster.condition(kind).status for kind in expected} == expected


def test_nothing_progresses_while_no_pod_of_the_revision_can_come_up() -> None:
    nodes = {"gpu-0": NodeModel()}
    cluster = ClusterModel(pool=make_pool(make_spec(replicas=4)), nodes=nodes, load_seconds=1, failing_exit=10)
    cluster.run_pass()
    cluster.advance(2)
    cluster.run_pass()
    found = cluster.condition("Progressing")
    assert (found.status, found.reason) == ("False", "Stalled")
    assert "no pod of this revision came up" in found.message
    assert cluster.condition("Stalled").status == "True"
    cluster.failing_exit = None
    cluster.edit(engine=ENGINE_B)
    cluster.settle()
    assert cluster.condition("Progressing").status == "True"


def test_nothing_progresses_while_we_refuse_the_overlay_and_pods_are_missing() -> None:
    cluster = running(2)
    refused = "podTemplate.spec.hostPID is not allowed"
    cluster.run_pass(replace(cluster.observe(), config_refusal=refused))
    assert cluster.condition("Progressing").reason == "Complete", "all that is wanted is there"
    cluster.edit(replicas=3)
    cluster.run_pass(replace(cluster.observe(), config_refusal=refused))
    found = cluster.condition("Progressing")
    assert (found.status, found.reason) == ("False", "InvalidOverlay")
    assert found.message.startswith(f"no PE is made: {refused}; 2/3 ready")


def test_transition_time_moves_only_when_the_status_flips() -> None:
    cluster = running()
    since = cluster.condition("Available").last_transition_time
    cluster.advance(500)
    cluster.crash(cluster.name_of(1), 1)
    cluster.run_pass()
    down = cluster.condition("Available")
    assert down.last_transition_time > since
    cluster.advance(50)
    cluster.crash(cluster.name_of(2), 15)
    cluster.run_pass()
    assert cluster.condition("Available").message != down.message
    assert cluster.condition("Available").last_transition_time == down.last_transition_time


def test_ready_is_false_while_old_pods_serve() -> None:
    """k8s.md 2 row 1."""
    cluster = running()
    cluster.edit(engine=ENGINE_B)
    cluster.run_pass()
    ready = cluster.condition("Ready")
    assert (ready.status, ready.reason) == ("False", "RolloutInProgress")
    assert "2 old PEs left" in ready.message
    cluster.run_pass()
    assert cluster.pool.status.updated_pes == 1
    assert cluster.pool.status.current_revision != cluster.pool.status.update_revision


def test_message_counts_and_names_the_worst_pe() -> None:
    cluster = running(replicas=4)
    cluster.crash(cluster.name_of(3), 1)
    cluster.crash(cluster.name_of(4), 12)
    cluster.change(cluster.name_of(4), waiting_reason="CrashLoopBackOff", plan_hash="of another plan")
    cluster.change(cluster.name_of(3), load=LoadProgress(loaded_bytes=301 * 10**9, total_bytes=510 * 10**9))
    cluster.run_pass()
    counts, _, worst_text = cluster.condition("Available").message.partition("; ")
    assert counts == "2/4 ready, 1 loading (280/510 GB)"
    assert worst_text.startswith(f"{cluster.name_of(4)} on gpu-0: ")
    worst = cluster.pool.status.unhealthy_pes[0]
    assert (worst.name, worst.node, worst.ep) == (cluster.name_of(4), "gpu-0", 2)


@pytest.mark.parametrize(
    ("loaded", "shown"), [(0, "0/500"), (24, "0/500"), (25, "25/500"), (49, "25/500"), (500, "500/500")]
)
def test_load_progress_moves_in_steps_of_five_percent(loaded: int, shown: str) -> None:
    cluster = ClusterModel(pool=make_pool(make_spec(replicas=1)), nodes={"gpu-0": NodeModel()})
    cluster.run_pass()
    cluster.advance(1)
    cluster.change(cluster.name_of(1), load=LoadProgress(loaded_bytes=loaded * 10**9, total_bytes=500 * 10**9))
    cluster.run_pass()
    assert f"1 loading ({shown} GB)" in cluster.condition("Ready").message


def test_status_does_not_change_with_the_clock_alone() -> None:
    cluster = running(replicas=3)
    cluster.load_seconds = 1e9
    cluster.crash(cluster.name_of(1), 1)
    cluster.run_pass()
    first = cluster.pool.status
    for _ in range(5):
        cluster.advance(37)
        cluster.run_pass()
    assert cluster.pool.status == first


def test_scale_numbers_hide_spares() -> None:
    """k8s.md 3.4 trap 1."""
    cluster = running(replicas=4, spares=2)
    status = cluster.pool.status
    assert (status.replicas, status.total_pes, status.ready_pes) == (4, 6, 6)
    assert (status.redundancy.desired, status.redundancy.ready) == (2, 2)
    assert status.selector == "prefill.dev/kind=PrefillPool,prefill.dev/pool=flash"


def test_scale_numbers_count_what_exists_when_less() -> None:
    cluster = ClusterModel(pool=make_pool(make_spec(replicas=4)), nodes={"gpu-0": NodeModel()})
    cluster.run_pass()
    assert cluster.pool.status.replicas == 0
    cluster.run_pass()
    assert cluster.pool.status.replicas == 4


@pytest.mark.parametrize(
    ("active", "status", "reason"),
    [(True, "True", "Active"), (False, "False", "MetricsUnavailable"), (None, "Unknown", "MetricsUnavailable")],
)
def test_autoscaling_says_what_the_hpa_says(active: bool | None, status: str, reason: str) -> None:
    cluster = running()
    cluster.edit(autoscaling=HPA)
    child = ObservedChild(kind=ChildKind.HPA, name="flash", active=active, message="no metrics returned")
    cluster.children[child.kind, child.name] = child
    cluster.run_pass()
    found = cluster.condition("AutoscalingActive")
    assert (found.status, found.reason) == (status, reason)
    assert active is None or found.message == "no metrics returned"


def test_autoscaling_without_and_with_an_external_writer() -> None:
    cluster = running()
    assert (cluster.condition("AutoscalingActive").status, cluster.condition("AutoscalingActive").reason) == (
        "False",
        "Disabled",
    )
    cluster.edit(autoscaling=PoolAutoscaling(max_replicas=4))
    cluster.run_pass()
    assert cluster.condition("AutoscalingActive").reason == "External"
    cluster.edit(autoscaling=HPA, replicas=0)
    cluster.settle()
    assert cluster.condition("AutoscalingActive").reason == "Disabled"


def test_keda_is_not_switched_off_by_zero() -> None:
    """It raises 0 to minReplicas within seconds (tests/cluster/test_nodes_keda.py)."""
    cluster = running()
    cluster.edit(autoscaling=KEDA, replicas=0)
    child = ObservedChild(kind=ChildKind.SCALED_OBJECT, name="flash", active=True)
    cluster.children[child.kind, child.name] = child
    cluster.run_pass(replace(cluster.observe(), optional_kinds=frozenset({ChildKind.SCALED_OBJECT})))
    assert cluster.condition("AutoscalingActive").reason == "Active"


def test_redundant_while_spares_load_and_when_there_are_none() -> None:
    cluster = running(replicas=2, spares=1)
    assert cluster.condition("Redundant").reason == "SparesReady"
    cluster.crash(cluster.name_of(1), 1)
    cluster.run_pass()
    found = cluster.condition("Redundant")
    assert (found.status, found.reason, found.message) == ("False", "SparesLoading", "0/1 spares ready")
    assert cluster.condition("Available").status == "True"
    assert running(spares=0).condition("Redundant").reason == "Disabled"


def test_plan_is_kept_in_the_status_while_it_is_infeasible() -> None:
    cluster = running()
    plan = cluster.pool.status.plan
    assert plan is not None
    assert (plan.ep, plan.hash) == (2, cluster.plan().hash)


def test_refused_spec_sets_all_eight_and_keeps_what_is_known() -> None:
    cluster = running()
    message = "spec.gpu.memory is 5: must be above 8Gi"
    fault = PoolInvalid("spec.gpu.memory", value=5, rule="must be above 8Gi")
    conditions = refuse_conditions(cluster.pool.status.conditions, generation=7, fault=fault, now=cluster.now + 9)
    by_type = {condition.type: condition for condition in conditions}
    assert list(by_type) == list(ConditionType)
    for kind in ("Ready", "PlanFeasible", "Progressing"):
        assert (by_type[kind].status, by_type[kind].reason) == ("False", "SpecInvalid")
        assert (by_type[kind].message, by_type[kind].observed_generation) == (message, 7)
    assert by_type["Stalled"].status == "True"
    assert by_type["Available"] == cluster.condition("Available")


def test_refused_spec_of_a_new_pool_knows_nothing() -> None:
    fault = PoolInvalid("spec.gpu", value=None, rule="bad")
    conditions: tuple[Condition, ...] = refuse_conditions((), generation=1, fault=fault, now=1_000_000.0)
    by_type = {condition.type: condition for condition in conditions}
    assert list(by_type) == list(ConditionType)
    assert by_type["Available"].status is ConditionStatus.UNKNOWN
    assert by_type["Paused"].status is ConditionStatus.FALSE
    assert all(Reason(c.reason) in CONDITION_REASONS[ConditionType(c.type)] for c in conditions)
