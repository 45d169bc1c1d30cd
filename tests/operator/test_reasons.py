"""Which word a user reads for which trouble: each its own, on the pool and in events (k8s.md 2.2 row 23, 2.7)."""

import re
from collections.abc import Callable

import pytest

from prefill_operator.failures import PodState
from prefill_operator.messages import format_time
from prefill_operator.model import OperatorTimes
from prefill_operator.names import EventReason
from prefill_testing.cluster_model import ClusterModel, NodeModel, settled_cluster
from prefill_testing.planner_pools import make_pool, make_spec

TIMES = OperatorTimes()


def _one() -> ClusterModel:
    """One PE that is Ready; it will not be again by itself."""
    cluster = settled_cluster(make_pool(make_spec(replicas=1)), num_nodes=2)
    cluster.load_seconds = 1e9
    return cluster


def _waiting(reason: str, text: str) -> ClusterModel:
    cluster = _one()
    changes = {"ready": False, "ready_changed_at": cluster.now, "waiting_since": cluster.now}
    cluster.change(cluster.name_of(1), waiting_reason=reason, waiting_message=text, **changes)
    return cluster


def _crashed(exit_code: int, **changes: object) -> ClusterModel:
    cluster = _one()
    cluster.crash(cluster.name_of(1), exit_code)
    cluster.change(cluster.name_of(1), **changes)
    return cluster


def _without_room() -> ClusterModel:
    cluster = ClusterModel(pool=make_pool(make_spec(replicas=1)), nodes={"gpu-0": NodeModel(gpus=1)})
    cluster.run_pass()
    cluster.advance(TIMES.unschedulable_seconds)
    return cluster


TROUBLES: dict[PodState, tuple[Callable[[], ClusterModel], str]] = {
    PodState.UNSCHEDULABLE: (_without_room, "no node fits"),
    PodState.IMAGE_PULL: (lambda: _waiting("ImagePullBackOff", "no such tag"), "no such tag"),
    PodState.CONTAINER_ERROR: (lambda: _waiting("CreateContainerConfigError", "no secret x"), "no secret x"),
    PodState.CRASHED: (lambda: _crashed(1, waiting_reason="CrashLoopBackOff"), "exit 1"),
    PodState.CONFIG_REJECTED: (lambda: _crashed(10), "exit 10"),
    PodState.GPU_FAULT: (lambda: _crashed(14), "exit 14"),
    PodState.OUT_OF_MEMORY: (lambda: _crashed(12), "out-of-memory"),
}


@pytest.mark.parametrize("state", TROUBLES, ids=str)
def test_each_trouble_has_its_own_word_and_its_cause(state: PodState) -> None:
    make, cause = TROUBLES[state]
    cluster = make()
    cluster.run_pass()

    assert [pe.reason for pe in cluster.pool.status.unhealthy_pes] == [str(state)]
    assert cause in cluster.condition("Available").message
    assert cluster.condition("Available").status == "False"


def test_first_load_is_no_trouble_and_told_as_progress() -> None:
    cluster = ClusterModel(pool=make_pool(make_spec(replicas=1)), nodes={"gpu-0": NodeModel()})
    cluster.run_pass()
    cluster.advance(1)
    cluster.run_pass()

    assert cluster.pool.status.unhealthy_pes == ()
    progressing = cluster.condition("Progressing")
    assert (progressing.status, progressing.reason, progressing.message) == ("True", "Loading", "0/1 ready, 1 loading")


@pytest.mark.parametrize(
    ("refuses", "exit_code", "cause"),
    [(True, None, "UnexpectedAdmissionError"), (False, 14, "GPUFault")],
    ids=["refused pods", "engines that report a GPU fault"],
)
def test_pause_after_failures_is_told_with_its_cause_and_its_end(
    refuses: bool, exit_code: int | None, cause: str
) -> None:
    """All pods are gone meanwhile, so the pool itself must say what happened to them."""
    nodes = {"gpu-0": NodeModel(refuses=refuses)}
    cluster = ClusterModel(pool=make_pool(make_spec(replicas=2)), nodes=nodes, load_seconds=1, failing_exit=exit_code)
    for _ in range(120):
        cluster.run_pass()
        cluster.advance(1)
    while cluster.pods:
        cluster.run_pass()
        cluster.advance(1)
    decision = cluster.run_pass()

    progressing = cluster.condition("Progressing")
    assert decision.next_wakeup is not None
    assert (progressing.status, progressing.reason) == ("True", "Scaling")
    until = format_time(decision.next_wakeup)
    assert re.search(
        rf"no pod is made before {until} after \d failures in a row, the last {cause} on gpu-0", progressing.message
    )
    status = cluster.pool.status
    cluster.advance(1)
    cluster.run_pass()
    assert cluster.pool.status == status, "and it does not change with the clock"


def test_event_of_a_replacement_names_pe_node_and_cause() -> None:
    cluster = _crashed(14)
    name = cluster.name_of(1)
    cluster.run_pass()

    (event,) = (event for event in cluster.events if event.reason is EventReason.PE_REPLACED)
    assert event.message.startswith(f"{name} on gpu-0: GPUFault: ")
    assert "exit 14" in event.message


def test_event_of_a_lost_node_names_it_and_its_pes() -> None:
    cluster = settled_cluster(make_pool(make_spec(replicas=2)))
    names = sorted(cluster.pods)
    cluster.kill_node("gpu-0")
    cluster.advance(120)
    cluster.run_pass()

    (event,) = (event for event in cluster.events if event.reason is EventReason.NODE_LOST)
    assert event.message == f"node gpu-0 took {', '.join(names)} with it"


def test_event_of_an_evicted_pe_says_so_and_not_that_its_node_is_lost() -> None:
    cluster = settled_cluster(make_pool(make_spec(replicas=2)))
    name = cluster.name_of(1)
    cluster.change(name, disruption_target="EvictionByEvictionAPI")
    cluster.run_pass()

    assert EventReason.NODE_LOST not in {event.reason for event in cluster.events}
    (event,) = (event for event in cluster.events if event.reason is EventReason.PE_REPLACED)
    assert event.message == f"{name} on gpu-0: evicted (EvictionByEvictionAPI)"
