"""k8s.md 4.4: what is evidence, when it is enough, where it ends."""

from dataclasses import replace

import msgspec
import pytest

from prefill_operator.api_status import PlanSource
from prefill_operator.escalation import Escalation, EscalationStep, judge_escalation
from prefill_operator.ledger import FOREIGN_MEMORY, EngineEnd, Ledger, LoadTime, parse_ledger
from prefill_operator.model import EmitEvent, ObservedNode, ObservedPod
from prefill_operator.names import EP_FLOOR_ANNOTATION, EventReason
from prefill_operator.plan import PoolPlan, plan_pool
from prefill_operator.pool_api import ExpertParallelSpec, OomEscalation, PrefillPoolSpec
from prefill_plan.model_spec import released_model_spec
from prefill_testing.cluster_model import ClusterModel, NodeModel
from prefill_testing.planner_pools import ENGINE_B, make_pool, make_spec

NOW = 1_000_000.0
MODEL = released_model_spec()
SPEC = make_spec()


def plan_of(spec: PrefillPoolSpec) -> PoolPlan:
    return plan_pool(make_pool(spec), floor=None, nodes=None, model=MODEL)


def end(
    node: str, pod: str, *, code: int = 12, ago: float = 60, plan_hash: str | None = None, reason: str = "Error"
) -> EngineEnd:
    return EngineEnd(
        at=int(NOW - ago),
        node=node,
        pod=pod,
        restart_count=0,
        exit_code=code,
        plan_hash=plan_of(SPEC).hash if plan_hash is None else plan_hash,
        reason=reason,
    )


def judge(
    *ends: EngineEnd,
    spec: PrefillPoolSpec = SPEC,
    was_ready: bool = True,
    nodes: tuple[str, ...] | None = ("a", "b"),
    pods: tuple[ObservedPod, ...] = (),
) -> Escalation:
    plan = plan_of(spec)
    loads = tuple(LoadTime(ready_at=1, pod="x", seconds=60, plan_hash=plan.hash) for _ in range(int(was_ready)))
    seen = (
        tuple(ObservedNode(name=name, gpu_capacity=8, gpu_allocatable=8) for name in nodes)
        if nodes is not None
        else None
    )
    ledger = Ledger(ends=tuple(sorted(ends, key=lambda item: item.at)), loads=loads)
    return judge_escalation(spec, plan, ledger, pods=pods, nodes=seen, now=NOW)


def test_escalation_needs_two_nodes_once_a_pe_has_served() -> None:
    assert judge(end("a", "p1"), end("a", "p2")).step is EscalationStep.WAIT
    found = judge(end("a", "p1", ago=1920), end("b", "p2"))
    assert found.step is EscalationStep.RAISE
    assert found.floor is not None
    assert (found.floor.ep, found.floor.inputs) == (4, plan_of(SPEC).inputs_hash)
    assert found.message == "EP 2 to 4: 2 CUDA out-of-memory ends in 31 min on a, b"


def test_escalation_takes_two_incarnations_where_there_is_one_node() -> None:
    assert judge(end("a", "p1"), end("a", "p1", ago=30), nodes=("a",)).step is EscalationStep.WAIT
    assert judge(end("a", "p1"), end("a", "p2"), nodes=("a",)).step is EscalationStep.RAISE


def test_escalation_without_sight_of_nodes_asks_where_the_pods_are() -> None:
    on_a = ObservedPod(name="1", uid="1", revision="r", incarnation=1, ep=2, gpus=2, created_at=NOW, node="a")
    on_b = replace(on_a, name="2", uid="2", node="b")
    ends = (end("a", "p1"), end("a", "p2"))
    assert judge(*ends, nodes=None, pods=(on_a,)).step is EscalationStep.RAISE
    assert judge(*ends, nodes=None, pods=(on_a, on_b)).step is EscalationStep.WAIT


def test_escalation_at_load_takes_two_incarnations_anywhere_while_nothing_serves() -> None:
    assert judge(end("a", "p1"), end("a", "p2"), was_ready=False).step is EscalationStep.RAISE
    assert judge(end("a", "p1"), end("a", "p1", ago=30), was_ready=False).step is EscalationStep.WAIT
    assert judge(end("a", "p1", code=13), end("a", "p2", code=13), was_ready=False).step is EscalationStep.WAIT


@pytest.mark.parametrize(
    "other",
    [
        end("b", "p2", code=137, reason="OOMKilled"),
        end("b", "p2", code=14),
        end("b", "p2", code=1),
        end("b", "p2", plan_hash="another"),
        end("b", "p2", plan_hash=""),
        end("b", "p2", reason=FOREIGN_MEMORY),
        end("b", "p2", ago=3700),
    ],
    ids=["OOMKilled", "GPU fault", "crash", "other plan", "no message", "foreign memory", "too old"],
)
def test_escalation_ignores_what_is_no_evidence(other: EngineEnd) -> None:
    found = judge(end("a", "p1"), other)
    assert (found.step, len(found.evidence)) == (EscalationStep.WAIT, 1)


def test_escalation_without_evidence_is_none() -> None:
    assert judge().step is EscalationStep.NONE


@pytest.mark.parametrize(("failures", "step"), [(1, EscalationStep.RAISE), (3, EscalationStep.WAIT)])
def test_escalation_counts_what_the_user_asks_for(failures: int, step: EscalationStep) -> None:
    spec = make_spec(ep=ExpertParallelSpec(oom_escalation=OomEscalation(failures=failures)))
    ends = (end("a", "p1"),) if failures == 1 else (end("a", "p1"), end("b", "p2"))
    assert judge(*ends, spec=spec).step is step


def test_escalation_can_be_switched_off() -> None:
    spec = make_spec(ep=ExpertParallelSpec(oom_escalation=OomEscalation(enabled=False)))
    assert judge(end("a", "p1"), end("b", "p2"), spec=spec).step is EscalationStep.NONE


@pytest.mark.parametrize(
    ("limits", "word"),
    [(ExpertParallelSpec(size=2), "size fixes EP 2"), (ExpertParallelSpec(max=2), "EP 2 is the largest allowed")],
)
def test_escalation_is_exhausted_at_the_top(limits: ExpertParallelSpec, word: str) -> None:
    spec = make_spec(ep=limits)
    plan_hash = plan_of(spec).hash
    found = judge(end("a", "p1", plan_hash=plan_hash), end("b", "p2", plan_hash=plan_hash), spec=spec)
    assert (found.step, found.floor) == (EscalationStep.EXHAUSTED, None)
    assert word in found.message


# In a cluster.


def make_cluster(
    *, num_nodes: int = 3, below: int = 0, limits: ExpertParallelSpec | None = None, replicas: int = 1
) -> ClusterModel:
    spec = make_spec(replicas=replicas, ep=limits or ExpertParallelSpec())
    nodes = {f"gpu-{index}": NodeModel() for index in range(num_nodes)}
    return ClusterModel(pool=make_pool(spec), nodes=nodes, oom_below_ep=below)


@pytest.mark.parametrize(("below", "expected"), [(4, 4), (8, 8)])
def test_pool_climbs_until_it_fits(below: int, expected: int) -> None:
    """C29: after one piece of evidence the PE is replaced away from that node, so that a second node can speak."""
    cluster = make_cluster(below=below)
    cluster.settle()
    assert [pod.ep for pod in cluster.serving] == [expected]
    assert cluster.pool.annotations[EP_FLOOR_ANNOTATION].startswith(f"{expected}@")
    assert cluster.plan().source is PlanSource.ESCALATED
    escalated = [event for event in cluster.events if event.reason is EventReason.EP_ESCALATED]
    assert len(escalated) == {4: 1, 8: 2}[expected]
    assert cluster.pool.status.plan.escalated_at is not None
    places = {end.node for end in judged_ends(cluster)}
    assert len(places) >= 2


def judged_ends(cluster: ClusterModel) -> list[EngineEnd]:
    return list(parse_ledger(cluster.pool.annotations["prefill.dev/ledger"]).ends)


def test_pool_on_one_node_climbs_too() -> None:
    cluster = make_cluster(num_nodes=1, below=4)
    cluster.settle()
    assert [pod.ep for pod in cluster.serving] == [4]


def test_pool_at_the_top_stalls_and_stops_replacing() -> None:
    cluster = make_cluster(below=16, replicas=2)
    for _ in range(200):
        cluster.run_pass()
        cluster.advance(50)
    stalled = next(c for c in cluster.pool.status.conditions if c.type == "Stalled")
    assert (stalled.status, stalled.reason) == ("True", "EscalationExhausted")
    assert len(cluster.pods) == 2
    assert sum(line.startswith("create") for line in cluster.story()) <= 12


def test_floor_is_void_when_the_model_changes_and_held_when_the_image_does() -> None:
    cluster = make_cluster(below=4)
    cluster.settle()
    cluster.edit(engine=ENGINE_B)
    cluster.settle()
    assert [pod.ep for pod in cluster.serving] == [4]
    cluster.oom_below_ep = 0
    spec = cluster.pool.spec
    cluster.edit(model=msgspec.structs.replace(spec.model, revision="2"))
    cluster.settle()
    assert [pod.ep for pod in cluster.serving] == [2]


def test_in_service_evidence_from_two_nodes_raises_the_ep() -> None:
    """The second PE speaks from another node; meanwhile the first serves again elsewhere."""
    cluster = make_cluster(replicas=8)
    cluster.settle()
    nodes = sorted({pod.node for pod in cluster.serving})
    first = next(pod for pod in cluster.serving if pod.node == nodes[0])
    cluster.crash(first.name, 13)
    cluster.settle()
    assert cluster.plan().ep == 2
    assert first.name not in cluster.pods
    second = next(pod for pod in cluster.serving if pod.node != first.node)
    cluster.crash(second.name, 13)
    cluster.run_pass()
    assert cluster.plan().ep == 4
    assert [type(action) for action in cluster.last.actions][-1] is EmitEvent


def test_host_oom_never_raises_the_ep() -> None:
    cluster = make_cluster(replicas=4)
    cluster.settle()
    for pod in cluster.serving:
        cluster.crash(pod.name, 137, reason="OOMKilled")
    cluster.run_pass()
    assert EP_FLOOR_ANNOTATION not in cluster.pool.annotations
    message = cluster.pool.status.unhealthy_pes[0].message
    assert "host memory" in message
    assert "engine.memoryPerGPU" in message
