"""Two operators, and an API server that comes and goes (k8s.md 7.3 items 10, 11 and 13)."""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from prefill_bed.api import ApiError
from prefill_bed.cluster import Cluster
from prefill_bed.installation import LocalOperators
from prefill_bed.pools import PoolView, ReadyWatch, expect, gpu_pool
from prefill_bed.waiting import until

Install = Callable[..., LocalOperators]
Figure = Callable[[str], None]


@pytest.fixture
def pool(install: Install, control_plane: Cluster) -> PoolView:
    """3 PEs and 1 spare, all ready; op-a leads, and compares its cache with the API server every two seconds."""
    operators = install(settings={"resyncSeconds": 2})
    operators.start()
    view = PoolView(control_plane, operators.namespace, operators=operators)
    view.create(gpu_pool())
    view.wait_settled(4)
    return view


@pytest.mark.short
def test_takeover_after_kill(pool: PoolView, figure: Figure) -> None:
    """kill -9 of the leader: the standby holds the Lease within 20 s and does its work."""
    operators = pool.installation
    operators.start_standby("op-b")
    operators.children["op-a"].end(signal.SIGKILL)
    begin = time.monotonic()
    until("op-b to lead", lambda: operators.leads("op-b"), seconds=60)
    figure(f"Lease taken over after {time.monotonic() - begin:.1f} s")
    assert time.monotonic() - begin < 20
    pool.change(replicas=4)
    pool.wait_settled(5)
    operators.check_cache("op-b")


def test_lease_is_released_on_sigterm(pool: PoolView, figure: Figure) -> None:
    """SIGTERM: the leader gives the Lease up and ends with 0; the standby leads at once."""
    operators = pool.installation
    operators.start_standby("op-b")
    begin = time.monotonic()
    assert operators.children["op-a"].end(signal.SIGTERM) == 0
    until("op-b to lead", lambda: operators.leads("op-b"), seconds=60)
    figure(f"Lease handed over after {time.monotonic() - begin:.1f} s")
    assert time.monotonic() - begin < 8
    pool.change(replicas=4)
    pool.wait_settled(5)
    operators.check_cache("op-b")


def test_stopped_leader_does_no_harm(pool: PoolView) -> None:
    """SIGSTOP of the leader for 30 s in mid-rollout, then SIGCONT: one revision, exact count, never below 4 ready."""
    operators = pool.installation
    operators.start_standby("op-b")
    first = operators.children["op-a"]
    with ReadyWatch(pool) as watch:
        pool.change(model={"revision": "r2"})
        pool.wait("the rollout to have begun", lambda: expect(len(pool.names()) > 4, pool.names()))
        first.send(signal.SIGSTOP)
        stopped = time.monotonic()
        until("op-b to lead", lambda: operators.leads("op-b"), seconds=60)
        pool.wait_condition("Ready", "True", seconds=240)
        time.sleep(max(0.0, 30 - (time.monotonic() - stopped)))
        first.send(signal.SIGCONT)
        until("op-a to end", lambda: expect(not first.running, "still running"), seconds=30)
        pool.wait_settled(4)
        assert watch.lowest >= 4
    operators.check_cache("op-b")


@pytest.mark.parametrize("seconds", [1, 12], ids=["short", "beyond-the-lease"])
def test_api_server_restart(pool: PoolView, figure: Figure, seconds: int) -> None:
    """API server restarted, its watch cache forgotten: the operator goes on, or gives up its Lease, restarts, and goes on."""
    pool.change(replicas=4)
    pool.cluster.restart("kube-apiserver", down_seconds=seconds)
    until("the API server", lambda: _answers(pool), seconds=120)
    begin = time.monotonic()
    again = pool.installation.restart_ended("op-a")
    pool.change(replicas=2, model={"revision": "r2"})
    pool.wait_settled(3, seconds=300)
    figure(
        f"settled {time.monotonic() - begin:.1f} s after it was back"
        + (", operator process restarted" if again else "")
    )
    assert pool.installation.children["op-a"].running
    pool.installation.check_cache()


def test_etcd_restart(pool: PoolView) -> None:
    """etcd killed and back: no crash, the pool settles."""
    pool.cluster.restart("etcd", down_seconds=3)
    until("the API server", lambda: _answers(pool), seconds=120)
    pool.installation.restart_ended("op-a")
    pool.change(replicas=2)
    pool.wait_settled(3, seconds=300)
    assert pool.installation.children["op-a"].running
    pool.installation.check_cache()


def _answers(pool: PoolView) -> None:
    try:
        pool.get()
    except (ApiError, OSError) as error:
        raise AssertionError(str(error)) from error


@contextlib.contextmanager
def throttled(cluster: Cluster, operators: LocalOperators) -> Iterator[None]:
    """The operator shares a priority level of no seats with a crowd: whenever one of the crowd is served, it gets 429.

    A level of no seats alone refuses nothing: the API server always admits one request at a time.
    """
    flow, api = "/apis/flowcontrol.apiserver.k8s.io/v1", cluster.api
    limits = {"nominalConcurrencyShares": 0, "borrowingLimitPercent": 0, "limitResponse": {"type": "Reject"}}
    level = {"metadata": {"name": "crowded"}, "spec": {"type": "Limited", "limited": limits}}
    accounts = [{"name": name, "namespace": operators.namespace} for name in (operators.account, "default")]
    subjects = [{"kind": "ServiceAccount", "serviceAccount": account} for account in accounts]
    rules = [{"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"], "clusterScope": True, "namespaces": ["*"]}]
    spec = {"priorityLevelConfiguration": {"name": "crowded"}, "matchingPrecedence": 2}
    spec["rules"] = [{"subjects": subjects, "resourceRules": rules}]
    grant = {"metadata": {"name": f"{operators.namespace}-crowd"}}
    grant["roleRef"] = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"}
    grant["subjects"] = [{"kind": "ServiceAccount", **accounts[1]}]
    api.create("clusterrolebindings", None, grant)
    one = cluster.identity(operators.namespace, "default")
    stop = threading.Event()

    def crowd() -> None:
        while not stop.is_set():
            with contextlib.suppress(ApiError, OSError):
                one.list("customresourcedefinitions")

    api.request("POST", f"{flow}/prioritylevelconfigurations", level)
    api.request("POST", f"{flow}/flowschemas", {"metadata": {"name": "crowded"}, "spec": spec})
    threads = [threading.Thread(target=crowd) for _ in range(8)]
    try:
        for thread in threads:
            thread.start()
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        api.request("DELETE", f"{flow}/flowschemas/crowded")
        api.request("DELETE", f"{flow}/prioritylevelconfigurations/crowded")
        api.delete("clusterrolebindings", None, grant["metadata"]["name"])


def test_throttled_api_server(pool: PoolView, control_plane: Cluster, figure: Figure) -> None:
    """A storm of 429 while the pool is scaled up and rolled: no storm of tries, no crash, the pool settles."""
    operators = pool.installation
    since = control_plane.audit_size()
    with throttled(control_plane, operators):
        pool.change(replicas=4, model={"revision": "r2"})
        until("refusals", lambda: expect(_throttled(control_plane, operators, since) >= 3, "too few"), seconds=90)
    operators.restart_ended("op-a")
    pool.wait_settled(5)
    refused = _throttled(control_plane, operators, since)
    figure(f"{refused} requests refused")
    assert refused < 500
    operators.check_cache()


def _throttled(cluster: Cluster, operators: LocalOperators, since: int) -> int:
    mine = (entry for entry in cluster.audit(since=since) if entry["user"]["username"] == operators.user)
    return sum(entry.get("responseStatus", {}).get("code") == 429 for entry in mine)


def test_resync_finds_nothing(pool: PoolView, figure: Figure) -> None:
    """After a rollout and a scale the cache equals the API server: no mismatch in the metrics."""
    pool.change(replicas=4, model={"revision": "r2"})
    pool.wait_settled(5, seconds=240)
    pool.installation.check_cache()
    figure(f"{pool.installation.metric('op-a', 'prefill_operator_resync_rounds_total'):.0f} rounds, 0 objects missed")


@pytest.mark.short
@pytest.mark.parametrize("reads_nodes", [False], ids=["no-nodes"], indirect=True)
def test_works_without_reading_nodes(install: Install, control_plane: Cluster) -> None:
    """rbac.nodes=false: the pool becomes Ready under roles alone, and the status says what is not watched."""
    operators = install()
    operators.start()
    view = PoolView(control_plane, operators.namespace, operators=operators)
    view.create(gpu_pool())
    view.wait_settled(4)
    assert view.status()["notWatched"] == ["nodes"]
    roles = control_plane.api.list("clusterrolebindings")
    assert not [
        role for role in roles for who in role.get("subjects", []) if who.get("namespace") == operators.namespace
    ]
