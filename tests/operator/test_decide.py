"""decide() as a whole: fixed point, order of writes, objects beside pods, refusals, bad input."""

from dataclasses import replace

import msgspec
import pytest

from prefill_operator.api_parts import Actuator, MonitoringSpec
from prefill_operator.decide import decide
from prefill_operator.ledger import parse_ledger
from prefill_operator.model import (
    ChildKind,
    CreatePod,
    CreateRefusal,
    DeleteObject,
    DeletePod,
    EnsureObject,
    OperatorTimes,
    RefusalReason,
    SetPoolAnnotation,
)
from prefill_operator.names import LEDGER_ANNOTATION, EventReason, Reason
from prefill_operator.plan import PoolPlan
from prefill_operator.pool_api import (
    Architecture,
    AvailabilitySpec,
    ExpertParallelSpec,
    GpuSpec,
    MetricName,
    PoolAutoscaling,
    PoolMetric,
    QuotaSpec,
    RedundancyMode,
    RedundancySpec,
)
from prefill_testing.cluster_model import ClusterModel, NodeModel, settled_cluster
from prefill_testing.planner_pools import ENGINE_B, make_pool, make_spec

TIMES = OperatorTimes()
METRICS = (PoolMetric(name=MetricName.BACKLOG, target=300),)


def running(replicas: int = 2, **changes: object) -> ClusterModel:
    return settled_cluster(make_pool(make_spec(replicas=replicas, **changes)))


def test_decide_twice_changes_nothing() -> None:
    cluster = running(spares=1)
    assert cluster.run_pass().actions == ()
    status = cluster.pool.status
    cluster.advance(86_400)
    assert cluster.run_pass().actions == ()
    assert cluster.pool.status == status


def test_restarted_operator_writes_nothing() -> None:
    """Load times stand on the pods; they alone are no reason to write."""
    cluster = running(replicas=4, spares=1)
    assert LEDGER_ANNOTATION not in cluster.pool.annotations
    cluster.pool = replace(cluster.pool, status=type(cluster.pool.status)())
    assert cluster.run_pass().actions == ()
    assert cluster.pool.status.redundancy.restart_seconds == 100


def test_decide_writes_the_ledger_before_the_evidence_goes() -> None:
    """C29."""
    cluster = running()
    cluster.crash(cluster.name_of(1), 14)
    kinds = [type(action) for action in cluster.run_pass().actions]
    assert kinds.index(SetPoolAnnotation) < kinds.index(CreatePod) < kinds.index(DeletePod)
    ledger = parse_ledger(cluster.pool.annotations[LEDGER_ANNOTATION])
    assert [(end.exit_code, end.node) for end in ledger.ends] == [(14, "gpu-0")]
    assert len(ledger.loads) == 1


def test_decide_creates_the_config_map_before_the_pods() -> None:
    cluster = ClusterModel(pool=make_pool(make_spec(replicas=1)), nodes={"gpu-0": NodeModel()})
    actions = cluster.run_pass().actions
    revision = cluster.plan().revision
    assert actions[0] == EnsureObject(kind=ChildKind.CONFIG_MAP, name=f"flash-{revision}")
    assert isinstance(actions[-1], CreatePod)


def test_decide_deletes_are_bound_to_the_uid() -> None:
    cluster = running()
    view = cluster.observe()
    cluster.edit(replicas=1)
    cluster.run_pass()
    cluster.advance(5)
    cluster.run_pass()
    deleted = next(applied.action for applied in cluster.log if isinstance(applied.action, DeletePod))
    assert deleted.uid == next(pod.uid for pod in view.pods if pod.name == deleted.name)


def test_decide_on_a_stale_view_collides_instead_of_doubling() -> None:
    cluster = ClusterModel(pool=make_pool(make_spec(replicas=3)), nodes={"gpu-0": NodeModel()})
    view = cluster.observe()
    cluster.run_pass(view)
    cluster.run_pass(view)
    assert len(cluster.pods) == 3
    assert cluster.conflicts == 3


def test_two_operators_do_not_drain_two_pes_for_one() -> None:
    cluster = running(replicas=3)
    cluster.edit(replicas=2)
    view = cluster.observe()
    cluster.run_pass(view)
    cluster.run_pass(view)
    assert cluster.num_serving == 2


@pytest.mark.parametrize("how", ["deleted", "edited"])
def test_children_that_were_deleted_or_edited_are_restored(how: str) -> None:
    cluster = running()
    key = (ChildKind.DISRUPTION_BUDGET, "flash")
    if how == "deleted":
        del cluster.children[key]
    else:
        cluster.children[key] = replace(cluster.children[key], current=False)
    assert cluster.run_pass().actions == (EnsureObject(kind=key[0], name="flash"),)


def test_children_of_others_are_left_alone_and_reported() -> None:
    cluster = running()
    key = (ChildKind.SERVICE, "flash")
    cluster.children[key] = replace(cluster.children[key], foreign=True, current=False)
    assert cluster.run_pass().actions == ()
    stalled = cluster.condition("Stalled")
    assert (stalled.status, stalled.reason) == ("True", "ForeignObject")
    assert "Service flash" in stalled.message
    assert cluster.num_serving == 2


def test_children_follow_the_actuator() -> None:
    cluster = running()
    cluster.edit(autoscaling=PoolAutoscaling(max_replicas=4, actuator=Actuator.HPA, metrics=METRICS))
    assert cluster.run_pass().actions == (EnsureObject(kind=ChildKind.HPA, name="flash"),)
    cluster.edit(autoscaling=PoolAutoscaling(max_replicas=4, actuator=Actuator.KEDA, metrics=METRICS))
    kinds = frozenset({ChildKind.SCALED_OBJECT})
    assert cluster.run_pass(replace(cluster.observe(), optional_kinds=kinds)).actions == (
        EnsureObject(kind=ChildKind.SCALED_OBJECT, name="flash"),
        DeleteObject(kind=ChildKind.HPA, name="flash"),
    )
    cluster.edit(autoscaling=None)
    assert cluster.run_pass().actions == (DeleteObject(kind=ChildKind.SCALED_OBJECT, name="flash"),)


def test_children_that_the_cluster_does_not_serve_are_not_asked_for() -> None:
    cluster = running()
    cluster.edit(
        autoscaling=PoolAutoscaling(max_replicas=4, actuator=Actuator.KEDA, metrics=METRICS),
        monitoring=MonitoringSpec(pod_monitor=True),
    )
    assert cluster.run_pass().actions == ()
    assert cluster.condition("AutoscalingActive").reason == Reason.KEDA_MISSING
    served = frozenset({ChildKind.POD_MONITOR, ChildKind.NETWORK_POLICY})
    kinds = [action.kind for action in cluster.run_pass(replace(cluster.observe(), optional_kinds=served)).actions]
    assert kinds == [ChildKind.POD_MONITOR, ChildKind.NETWORK_POLICY]


def test_config_map_of_an_old_revision_stays_while_a_pod_uses_it() -> None:
    cluster = running(replicas=1)
    old = f"flash-{cluster.plan().revision}"
    cluster.edit(engine=ENGINE_B)
    cluster.run_pass()
    assert (ChildKind.CONFIG_MAP, old) in cluster.children
    cluster.settle()
    assert (ChildKind.CONFIG_MAP, old) not in cluster.children
    assert (ChildKind.CONFIG_MAP, f"flash-{cluster.plan().revision}") in cluster.children


def refuse(cluster: ClusterModel, reason: RefusalReason, *, ago: float = 1.0) -> CreateRefusal:
    return CreateRefusal(
        at=cluster.now - ago,
        reason=reason,
        message="pods is forbidden: exceeded quota",
        revision=cluster.plan().revision,
    )


@pytest.mark.parametrize(
    ("reason", "word"),
    [(RefusalReason.QUOTA_EXCEEDED, "QuotaExceeded"), (RefusalReason.INVALID_OVERLAY, "InvalidOverlay")],
)
def test_refused_create_is_asked_again_after_a_minute(reason: RefusalReason, word: str) -> None:
    cluster = ClusterModel(pool=make_pool(make_spec(replicas=1)), nodes={"gpu-0": NodeModel()})
    view = replace(cluster.observe(), create_refusal=refuse(cluster, reason))
    decision = cluster.run_pass(view)
    assert not any(isinstance(action, CreatePod) for action in decision.actions)
    assert decision.next_wakeup == cluster.now - 1 + TIMES.refusal_retry_seconds
    progressing = cluster.condition("Progressing")
    assert (progressing.status, progressing.reason) == ("False", word)
    assert "exceeded quota" in progressing.message
    late = replace(cluster.observe(), create_refusal=refuse(cluster, reason, ago=60))
    assert any(isinstance(action, CreatePod) for action in cluster.run_pass(late).actions)


def test_refused_overlay_is_forgotten_with_its_revision() -> None:
    cluster = ClusterModel(pool=make_pool(make_spec(replicas=1)), nodes={"gpu-0": NodeModel()})
    refusal = refuse(cluster, RefusalReason.INVALID_OVERLAY)
    cluster.edit(engine=ENGINE_B)
    assert any(
        isinstance(action, CreatePod)
        for action in cluster.run_pass(replace(cluster.observe(), create_refusal=refusal)).actions
    )


def test_overlay_that_we_refuse_stalls_and_keeps_what_runs() -> None:
    cluster = running()
    cluster.edit(engine=ENGINE_B)
    cluster.run_pass(replace(cluster.observe(), config_refusal="podTemplate.spec.hostPID is not allowed"))
    assert len(cluster.pods) == 2
    assert cluster.condition("Stalled").reason == "ConfigRejected"
    assert "hostPID" in cluster.condition("Stalled").message


@pytest.mark.parametrize("by_us", [True, False], ids=["operator", "API server"])
def test_refused_overlay_does_not_cost_pods_that_still_load(by_us: bool) -> None:
    cluster = ClusterModel(pool=make_pool(make_spec(replicas=2)), nodes={"gpu-0": NodeModel()})
    cluster.run_pass()
    cluster.advance(1)
    cluster.edit(engine=ENGINE_B)
    view = cluster.observe()
    refusal = refuse(cluster, RefusalReason.INVALID_OVERLAY)
    cluster.run_pass(replace(view, config_refusal="no") if by_us else replace(view, create_refusal=refusal))
    assert sorted(pod.incarnation for pod in cluster.pods.values()) == [1, 2]
    cluster.settle()
    assert {pod.revision for pod in cluster.serving} == {cluster.plan().revision}


def test_refused_quota_lets_broken_old_pods_go_to_make_room() -> None:
    cluster = ClusterModel(pool=make_pool(make_spec(replicas=2)), nodes={"gpu-0": NodeModel()}, failing_exit=10)
    cluster.run_pass()
    cluster.advance(150)
    cluster.edit(engine=ENGINE_B)
    cluster.run_pass(replace(cluster.observe(), create_refusal=refuse(cluster, RefusalReason.QUOTA_EXCEEDED)))
    assert cluster.story()[2:] == ["delete 1 OldRevision", "delete 2 OldRevision"]


def infeasible(cluster: ClusterModel) -> None:
    model = msgspec.structs.replace(cluster.pool.spec.model, architecture=Architecture.FLASH)
    cluster.edit(model=model, gpu=GpuSpec(product="NVIDIA-H100-NVL"))


def test_infeasible_plan_creates_nothing_and_keeps_running_pods() -> None:
    cluster = running(replicas=2)
    infeasible(cluster)
    assert cluster.run_pass().actions == ()
    assert cluster.num_serving == 2
    for kind, reason in (
        ("Ready", "PlanInfeasible"),
        ("Progressing", "PlanInfeasible"),
        ("PlanFeasible", "UnknownGPU"),
    ):
        assert (cluster.condition(kind).status, cluster.condition(kind).reason) == ("False", reason)
    assert cluster.condition("Available").status == "True"
    cluster.edit(replicas=4)
    cluster.settle()
    assert len(cluster.pods) == 2
    cluster.edit(replicas=1)
    cluster.settle()
    assert len(cluster.pods) == 1


@pytest.mark.parametrize("ledger", ["{", "null", '{"ends":[["x"]]}', "x" * 10_000])
def test_foreign_ledger_is_no_crash(ledger: str) -> None:
    cluster = running()
    cluster.pool = replace(cluster.pool, annotations={LEDGER_ANNOTATION: ledger})
    assert cluster.run_pass().actions == ()
    cluster.crash(cluster.name_of(1), 1)
    cluster.run_pass()
    assert len(parse_ledger(cluster.pool.annotations[LEDGER_ANNOTATION]).ends) == 1


def test_clock_behind_the_api_server_creates_no_storm() -> None:
    cluster = running(replicas=3)
    before = len(cluster.pods)
    view = replace(cluster.observe(), now=cluster.now - 7200)
    assert cluster.run_pass(view).actions == ()
    assert len(cluster.pods) == before
    assert cluster.condition("Available").status == "True"


def test_large_ledger_at_rest_is_written_once() -> None:
    nodes = {f"a-very-long-name-of-a-node-in-some-cloud.{'region.' * 25}{index}": NodeModel() for index in range(8)}
    cluster = ClusterModel(pool=make_pool(make_spec(replicas=24)), nodes=nodes)
    cluster.settle()
    cluster.load_seconds = 1e9
    for pod in list(cluster.serving):
        cluster.crash(pod.name, 1)
    cluster.run_pass()
    assert len(cluster.pool.annotations[LEDGER_ANNOTATION]) <= 4096
    cluster.advance(1)
    assert not any(isinstance(action, SetPoolAnnotation) for action in cluster.run_pass().actions)


def test_spares_follow_the_measured_restart_and_the_placement() -> None:
    """k8s.md 6.3: EP 4, two PEs per node."""
    given = AvailabilitySpec(
        pe_mtbf_seconds=604_800, restart_seconds=900, node_mtbf_seconds=5_184_000, node_recovery_seconds=1200
    )
    redundancy = RedundancySpec(mode=RedundancyMode.AVAILABILITY, availability=given)
    spec = make_spec(replicas=16, quota=QuotaSpec(redundancy=redundancy), ep=ExpertParallelSpec(size=4))
    cluster = settled_cluster(make_pool(spec), num_nodes=9)
    status = cluster.pool.status
    assert (status.redundancy.desired, status.redundancy.ready, status.total_pes, status.gpus) == (2, 2, 18, 72)
    assert float(status.redundancy.expected_availability) > 0.999
    assert status.redundancy.restart_seconds == 100


def test_plan_change_is_an_event() -> None:
    cluster = running()
    cluster.edit(expert_parallel=ExpertParallelSpec(size=4))
    cluster.run_pass()
    changed = [event for event in cluster.events if event.reason is EventReason.PLAN_CHANGED]
    assert [event.message.split(";")[0] for event in changed] == ["EP 2 to 4"]


def test_decide_wakes_for_nothing_at_rest() -> None:
    cluster = running()
    plan: PoolPlan = cluster.plan()
    assert decide(cluster.observe(), plan, TIMES).next_wakeup is None
