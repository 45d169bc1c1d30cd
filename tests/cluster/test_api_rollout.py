"""Rollouts, scaling and EP changes under a real scheduler (k8s.md 7.3 items 3 and 6)."""

import signal
from collections.abc import Callable

import pytest
from prefill_bed.cluster import Cluster
from prefill_bed.installation import LocalOperators
from prefill_bed.pools import PoolView, ReadyWatch, expect, gpu_pool

Install = Callable[..., LocalOperators]
Figure = Callable[[str], None]

CONDITIONS = (
    "Ready",
    "Available",
    "Redundant",
    "Progressing",
    "PlanFeasible",
    "AutoscalingActive",
    "Stalled",
    "Paused",
)


def revisions(view: PoolView) -> set[str]:
    return {pod["metadata"]["labels"]["prefill.dev/revision"] for pod in view.live()}


@pytest.fixture
def pool(install: Install, control_plane: Cluster) -> PoolView:
    """3 PEs and 1 spare, all ready; the operator compares its cache with the API server every two seconds."""
    operators = install(settings={"resyncSeconds": 2})
    operators.start()
    view = PoolView(control_plane, operators.namespace, operators=operators)
    view.create(gpu_pool())
    view.wait_settled(4)
    return view


@pytest.mark.short
def test_becomes_ready(pool: PoolView) -> None:
    """A pool of 3 + 1 becomes Ready; all eight conditions are there and speak of the current generation."""
    status = pool.status()
    assert (status["replicas"], status["readyPEs"], status["redundancy"]["ready"]) == (3, 4, 1)
    generation = pool.get()["metadata"]["generation"]
    kinds = {c["type"]: c["observedGeneration"] for c in status["conditions"]}
    assert kinds == dict.fromkeys(CONDITIONS, generation)
    for pod in pool.live():
        assert pod["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "4"


@pytest.mark.short
def test_second_pass_writes_nothing(pool: PoolView, control_plane: Cluster, figure: Figure) -> None:
    """A restarted operator finds nothing to do: it reconciles and resyncs without a write, and answers the first change."""
    operators = pool.installation
    user = operators.user
    operators.children["op-a"].end(signal.SIGTERM)
    since = control_plane.audit_size()
    child = operators.start("op-b")
    operators.wait_resynced("op-b")
    assert operators.metric("op-b", "prefill_operator_reconcile_seconds_count") >= 1
    assert control_plane.writes(user, since=since) == []
    pool.change(paused=True)  # the answer to it proves that the new process reconciles
    pool.wait_condition("Paused", "True")
    writes = control_plane.writes(user, since=since)
    touched = {entry["objectRef"]["resource"] + "/" + entry["objectRef"].get("subresource", "") for entry in writes}
    assert touched <= {"prefillpools/status"}, touched
    figure(f"{len(writes)} writes, all of them the status of the pause")
    assert child.running


def test_rollout_survives_a_killed_operator(pool: PoolView, figure: Figure) -> None:
    """New revision at surge 1, the operator killed in the middle: never below 4 ready, all pods new in the end."""
    before = revisions(pool)
    with ReadyWatch(pool) as watch:
        pool.change(model={"revision": "r2"})
        pool.wait("the rollout to have begun", lambda: expect(len(revisions(pool)) == 2, "one revision"))
        pool.installation.children["op-a"].end(signal.SIGKILL)
        pool.installation.start("op-a")
        pool.wait("all pods to be new", lambda: expect(not revisions(pool) & before, "old pods left"), seconds=180)
        pool.wait_settled(4)
        figure(f"lowest ready count {watch.lowest}")
        assert watch.lowest >= 4


def test_second_edit_in_mid_rollout(pool: PoolView) -> None:
    """A second change during a rollout wins: only its revision is left, never below 4 ready."""
    with ReadyWatch(pool) as watch:
        pool.change(model={"revision": "r2"})
        pool.wait("the rollout to have begun", lambda: expect(len(revisions(pool)) == 2, "one revision"))
        pool.change(model={"revision": "r3"})
        pool.wait_condition("Ready", "True", seconds=240)
        pool.wait_settled(4)
        assert watch.lowest >= 4
    assert revisions(pool) == {pool.status()["updateRevision"][:8]}


def test_revert_in_mid_rollout(pool: PoolView) -> None:
    """Going back to the old revision keeps its pods: those not yet replaced keep their UIDs."""
    uids = {pod["metadata"]["uid"] for pod in pool.live()}
    with ReadyWatch(pool) as watch:
        pool.change(model={"revision": "r2"})
        pool.wait("the rollout to have begun", lambda: expect(len(revisions(pool)) == 2, "one revision"))
        pool.change(model={"revision": "r1"})
        pool.wait_settled(4, seconds=240)
        assert watch.lowest >= 4
    assert len(uids & {pod["metadata"]["uid"] for pod in pool.live()}) >= 3


def test_rapid_scaling_never_rolls(pool: PoolView) -> None:
    """Six scale patches in a row change the count, never the revision."""
    before = revisions(pool)
    for replicas in (4, 2, 5, 3, 6, 4):
        pool.cluster.kubectl("scale", "-n", pool.namespace, "pfp/flash", f"--replicas={replicas}")
    pool.wait_settled(5, seconds=180)
    assert revisions(pool) == before
    assert pool.status()["updateRevision"] == pool.status()["currentRevision"]


def test_scale_to_zero_and_back(pool: PoolView) -> None:
    """Zero replicas drain every pod and say ScaledToZero; three come back."""
    pool.change(replicas=0)
    pool.wait("no pods", lambda: expect(not pool.pods(), pool.names()), seconds=120)
    pool.wait_condition("Available", "True", "ScaledToZero")
    assert pool.status()["readyPEs"] == 0
    pool.change(replicas=3)
    pool.wait_settled(4)


def test_impossible_plan_is_a_condition(pool: PoolView) -> None:
    """A plan that does not fit keeps the running pods and says by how much it fails; the way back needs no help."""
    before = pool.names()
    pool.change(expertParallel={"size": 2})
    found = pool.wait_condition("PlanFeasible", "False", "NoEPFits")
    assert "GB per GPU" in found["message"]
    pool.change(expertParallel={"size": "auto"})
    pool.wait_settled(4)
    assert pool.names() == before


def test_pack_leaves_a_node_empty(pool: PoolView) -> None:
    """Four pods of 4 GPUs are packed on two of four nodes."""
    assert len({pod["spec"]["nodeName"] for pod in pool.live()}) == 2


@pytest.mark.sees_nodes
def test_larger_ep_on_a_full_cluster(pool: PoolView, figure: Figure) -> None:
    """EP 4 to 8 on a full cluster: whole nodes are emptied one by one, Available stays True."""
    pool.change(replicas=7)
    pool.wait_settled(8)
    before = pool.condition("Available")
    pool.change(replicas=3, expertParallel={"size": 8}, rollout={"maxSurge": 1, "maxUnavailable": 0})
    pool.wait("four pods of 8 GPUs", lambda: expect(_gpus(pool) == ["8"] * 4, _gpus(pool)), seconds=300)
    pool.wait_settled(4)
    after = pool.condition("Available")
    assert (after["status"], after["lastTransitionTime"]) == ("True", before["lastTransitionTime"])
    figure(f"Available without a break since {after['lastTransitionTime']}")


def _gpus(view: PoolView) -> list[str]:
    return sorted(pod["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] for pod in view.live())
