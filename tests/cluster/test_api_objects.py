"""What a pool owns: budgets, services, deletion, foreign and edited children (k8s.md 7.3 items 5 and 9)."""

import signal
from collections.abc import Callable

import pytest
from prefill_bed.api import ApiError, Json
from prefill_bed.bed import Bed
from prefill_bed.cluster import Cluster
from prefill_bed.installation import LocalOperators
from prefill_bed.pools import PoolView, expect, gpu_pool
from prefill_bed.waiting import until

Install = Callable[..., LocalOperators]


@pytest.fixture
def pool(install: Install, control_plane: Cluster) -> PoolView:
    """3 PEs and 1 spare, all ready."""
    operators = install()
    operators.start()
    view = PoolView(control_plane, operators.namespace, operators=operators)
    view.create(gpu_pool())
    view.wait_settled(4)
    return view


def evict(view: PoolView, pod: Json) -> int:
    """HTTP status of an eviction."""
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod["metadata"]["name"]}}
    try:
        view.cluster.api.create("pods/eviction", view.namespace, body, name=pod["metadata"]["name"])
    except ApiError as error:
        return error.status
    return 201


@pytest.mark.short
def test_budget_guards_the_wanted_count(pool: PoolView, bed: Bed) -> None:
    """Evictions are allowed down to N ready pods, then refused; the budget follows spec.replicas."""
    budget = pool.cluster.api.get("poddisruptionbudgets", pool.namespace, "flash")
    assert budget["spec"]["minAvailable"] == 3
    bed.fakes.control(never_ready=".")  # replacements stay away, so that evictions add up
    pool.wait("the budget to see 4", lambda: expect(_allowed(pool) == 1, _allowed(pool)))
    first, second, *_ = pool.live()
    assert evict(pool, first) == 201
    pool.wait("the budget to see 3", lambda: expect(_allowed(pool) == 0, _allowed(pool)))
    assert evict(pool, second) == 429
    bed.fakes.reset()
    pool.change(replicas=2)

    def follows() -> None:
        assert pool.cluster.api.get("poddisruptionbudgets", pool.namespace, "flash")["spec"]["minAvailable"] == 2

    pool.wait("the budget to follow", follows)


def _allowed(pool: PoolView) -> int:
    budget = pool.cluster.api.get("poddisruptionbudgets", pool.namespace, "flash")
    return int(budget.get("status", {}).get("disruptionsAllowed", -1))


def test_pods_not_ready_may_be_evicted(pool: PoolView, bed: Bed) -> None:
    """A pod that is not ready can be evicted even when no disruption is allowed: a broken pool does not block kubectl drain."""
    bed.fakes.control(never_ready=".")
    pool.change(replicas=4)

    def fifth() -> Json:
        young = [pod for pod in pool.live() if pod["status"].get("phase") == "Running" and pod not in pool.ready()]
        assert young, "no pod that runs and is not ready"
        return young[-1]

    pod = pool.wait("a pod that is not ready", fifth)
    assert evict(pool, pod) == 201


@pytest.mark.short
def test_deleted_pod_is_replaced(pool: PoolView) -> None:
    """A pod deleted by hand has a new incarnation within seconds."""
    victim = pool.live()[0]["metadata"]["name"]
    pool.cluster.kubectl("delete", "pod", victim, "-n", pool.namespace)
    pool.wait_settled(4)
    assert victim not in pool.names()


def test_edited_and_deleted_children_come_back(pool: PoolView) -> None:
    """Budget edited, Service deleted: both are as rendered again."""
    api, namespace = pool.cluster.api, pool.namespace
    api.patch("poddisruptionbudgets", namespace, "flash", {"spec": {"minAvailable": 0}})
    api.delete("services", namespace, "flash")

    def repaired() -> None:
        assert api.get("poddisruptionbudgets", namespace, "flash")["spec"]["minAvailable"] == 3
        assert api.find("services", namespace, "flash"), "no Service"

    pool.wait("the children", repaired)


def test_foreign_objects_are_left_alone(install: Install, control_plane: Cluster) -> None:
    """A Service of our name that belongs to somebody else is not touched; the pool says ForeignObject."""
    operators = install()
    view = PoolView(control_plane, operators.namespace, operators=operators)
    foreign = {"metadata": {"name": "flash"}, "spec": {"ports": [{"port": 80}], "selector": {"app": "other"}}}
    control_plane.api.create("services", view.namespace, foreign)
    operators.start()
    view.create(gpu_pool())
    found = view.wait_condition("Stalled", "True", "ForeignObject")
    assert "flash" in found["message"]
    assert control_plane.api.get("services", view.namespace, "flash")["spec"]["selector"] == {"app": "other"}


@pytest.mark.parametrize("operator_runs", [True, False], ids=["operator-up", "operator-down"])
def test_deleting_a_pool_takes_all_with_it(pool: PoolView, operator_runs: bool) -> None:
    """No finalizer: the garbage collector removes every child, with or without the operator."""
    assert not pool.get()["metadata"].get("finalizers")
    if not operator_runs:
        pool.installation.children["op-a"].end(signal.SIGKILL)
    pool.cluster.kubectl("delete", "pfp", "flash", "-n", pool.namespace)

    def gone() -> None:
        left = [
            f"{resource}/{item['metadata']['name']}"
            for resource in ("pods", "services", "configmaps", "poddisruptionbudgets")
            for item in pool.cluster.api.list(resource, pool.namespace, labels="prefill.dev/pool=flash")
        ]
        assert not left, left

    pool.wait("no children", gone)


def test_namespace_delete_with_operator_down(pool: PoolView) -> None:
    """A namespace with pools is deleted while the operator is down."""
    pool.installation.children["op-a"].end(signal.SIGKILL)
    api, namespace = pool.cluster.api, pool.namespace
    api.delete("namespaces", None, namespace)
    until("the namespace to be gone", lambda: expect(api.find("namespaces", None, namespace) is None, "Terminating"))


def test_paused_pool_is_left_as_it_is(pool: PoolView) -> None:
    """Paused: no pod is created or drained, the status goes on; unpaused, the wait is over."""
    pool.change(paused=True)
    pool.wait_condition("Paused", "True", "UserRequest")
    pool.change(replicas=1)
    victim = pool.live()[0]["metadata"]["name"]
    pool.cluster.api.delete("pods", pool.namespace, victim, gracePeriodSeconds=0)
    pool.wait("the status to count 3", lambda: expect(pool.status()["readyPEs"] == 3, pool.status()["readyPEs"]))
    assert len(pool.live()) == 3
    pool.change(paused=False)
    pool.wait_settled(2)
