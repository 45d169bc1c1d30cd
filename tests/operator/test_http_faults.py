"""The real client, and the whole operator with kopf's watches, against an HTTP server that misbehaves (k8s.md 7.1 layer 3)."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import kopf
import pytest
from aiohttp import web

from prefill_operator.cluster import PAGE_ITEMS, KubernetesCluster, translate_error
from prefill_operator.errors import (
    ClusterError,
    ClusterUnavailable,
    ObjectExists,
    ObjectMissing,
    QuotaDenied,
    RequestRejected,
    WriteConflict,
)
from prefill_operator.handlers import configure_kopf, run_kopf
from prefill_operator.leader import Leader, build_leader, find_resources
from prefill_operator.lease import LeaderLease
from prefill_operator.model import ChildKind
from prefill_operator.names import Kind
from prefill_operator.operator_metrics import OperatorMetrics
from prefill_operator.resources import CHILDREN, LEASES, NODES, PODS, POOLS, Json
from prefill_operator.settings import OperatorSettings
from prefill_plan.errors import ConfigError
from prefill_testing.fake_api import FakeApi, Fault
from prefill_testing.fake_api_http import FakeApiServer, serve_fake_api, write_kubeconfig
from prefill_testing.fake_cluster import FakeEngines, FakeNodes
from prefill_testing.in_loop import in_loop
from prefill_testing.operator_rig import KEY, POOL

SERVICE = CHILDREN[ChildKind.SERVICE]
POOL_RESOURCE = POOLS[Kind.PREFILL_POOL]


class Bench:
    """A fake API server over HTTP, and the real client."""

    def __init__(self, api: FakeApi, server: FakeApiServer, cluster: KubernetesCluster) -> None:
        self.api, self.server, self.cluster = api, server, cluster
        self.codes: list[tuple[str, str, int]] = []


@asynccontextmanager
async def _bench(path: Path, *, request_seconds: float = 5.0) -> AsyncIterator[Bench]:
    api = FakeApi(clock=time.time)
    async with serve_fake_api(api) as server:
        kubeconfig = write_kubeconfig(path / "kubeconfig", server.url)
        codes: list[tuple[str, str, int]] = []
        cluster = await KubernetesCluster.connect(
            str(kubeconfig),
            on_request=lambda verb, resource, code: codes.append((verb, resource, code)),
            request_seconds=request_seconds,
        )
        bench = Bench(api, server, cluster)
        bench.codes = codes
        try:
            yield bench
        finally:
            await cluster.close()


def _service(name: str = "a", **more: Any) -> Json:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "namespace": "ns", **more},
        "spec": {"x": 1},
    }


@in_loop
async def test_client_reads_and_writes(tmp_path: Path) -> None:
    async with _bench(tmp_path) as bench:
        made = await bench.cluster.create(SERVICE, _service())
        uid = made["metadata"]["uid"]
        assert await bench.cluster.find(SERVICE, namespace="ns", name="a") == made
        assert await bench.cluster.find(SERVICE, namespace="ns", name="b") is None
        applied = await bench.cluster.apply(SERVICE, {**_service(uid=uid), "spec": {"y": 2}})
        assert applied["spec"] == {"x": 1, "y": 2}
        merged = await bench.cluster.merge(SERVICE, {"spec": {"x": None}}, namespace="ns", name="a", uid=uid)
        assert merged["spec"] == {"y": 2}
        assert (await bench.cluster.replace(SERVICE, {**merged, "spec": {}}))["spec"] == {}
        await bench.cluster.delete(SERVICE, namespace="ns", name="a", uid=uid)
        assert bench.api.all(SERVICE) == []
        assert await bench.cluster.serves(PODS)

    assert bench.codes[:3] == [("create", "services", 201), ("get", "services", 200), ("get", "services", 404)]


@in_loop
async def test_status_and_conditions_leave_the_rest_alone(tmp_path: Path) -> None:
    async with _bench(tmp_path) as bench:
        pool = bench.api.put(POOL_RESOURCE, POOL)
        body = {
            "apiVersion": "prefill.dev/v1alpha1",
            "kind": "PrefillPool",
            "metadata": {"name": "flash", "namespace": "ns"},
        }
        written = await bench.cluster.apply(POOL_RESOURCE, {**body, "status": {"replicas": 2}}, subresource="status")
        assert (written["spec"], written["status"]) == (pool["spec"], {"replicas": 2})
        assert written["metadata"]["generation"] == 1
        status = {"conditions": [{"type": "Ready", "status": "True"}]}
        pod = bench.api.put(PODS, {"metadata": {"name": "p", "namespace": "ns"}, "spec": {}, "status": status})
        gate = {"type": "prefill.dev/accepting", "status": "True"}
        uid = pod["metadata"]["uid"]
        changed = await bench.cluster.set_condition(PODS, gate, namespace="ns", name="p", uid=uid)
        assert changed["status"]["conditions"] == [{"type": "Ready", "status": "True"}, gate]


@in_loop
async def test_long_lists_come_in_pages(tmp_path: Path) -> None:
    async with _bench(tmp_path) as bench:
        for index in range(PAGE_ITEMS + 3):
            bench.api.put(SERVICE, _service(f"s{index:04d}", labels={"a": str(index % 2)}))
        pages = [page async for page in bench.cluster.pages(SERVICE, namespace="ns")]
        odd = [item async for page in bench.cluster.pages(SERVICE, selector="a=1") for item in page]
        metadata = [item async for page in bench.cluster.pages(SERVICE, metadata_only=True) for item in page]

    assert [len(page) for page in pages] == [PAGE_ITEMS, 3]
    assert len(odd) == (PAGE_ITEMS + 3) // 2
    assert len(metadata) == PAGE_ITEMS + 3
    assert set(metadata[0]) == {"metadata"}


@pytest.mark.parametrize(
    ("fault", "error", "status"),
    [
        ({"status": 401}, ClusterUnavailable, 401),
        ({"status": 403, "message": "pods is forbidden"}, RequestRejected, 403),
        ({"status": 403, "message": "exceeded quota: gpus"}, QuotaDenied, 403),
        ({"status": 404}, ObjectMissing, 404),
        ({"status": 409, "reason": "AlreadyExists"}, ObjectExists, 409),
        ({"status": 409, "reason": "Conflict"}, WriteConflict, 409),
        ({"status": 410, "reason": "Expired"}, ClusterUnavailable, 410),
        ({"status": 422, "reason": "Invalid"}, RequestRejected, 422),
        ({"status": 429}, ClusterUnavailable, 429),
        ({"status": 500}, ClusterUnavailable, 500),
        ({"status": 503}, ClusterUnavailable, 503),
        ({"status": 0}, ClusterUnavailable, 0),
    ],
    ids=lambda value: str(value.get("message", value["status"])) if isinstance(value, dict) else "",
)
@in_loop
async def test_every_refusal_has_its_error(
    fault: dict[str, Any], error: type[ClusterError], status: int, tmp_path: Path
) -> None:
    async with _bench(tmp_path) as bench:
        bench.api.faults.append(Fault(**fault))
        with pytest.raises(error) as refusal:
            await bench.cluster.create(SERVICE, _service())

    assert refusal.value.status == status
    assert "create /api/v1/namespaces/ns/services" in refusal.value.message
    assert bench.codes == [("create", "services", status)]
    assert len(bench.api.requests) == 1, "the client itself never tries again"


@in_loop
async def test_server_may_say_how_long_to_wait(tmp_path: Path) -> None:
    async with _bench(tmp_path) as bench:
        bench.api.faults.append(Fault(status=429, retry_after=7.0))
        with pytest.raises(ClusterUnavailable) as refusal:
            await bench.cluster.create(SERVICE, _service())

    assert refusal.value.details["retry_after_seconds"] == 7.0


@in_loop
async def test_late_answer_is_none(tmp_path: Path) -> None:
    async with _bench(tmp_path, request_seconds=0.1) as bench:
        bench.api.faults.append(Fault(status=200, hang_seconds=5.0))
        with pytest.raises(ClusterUnavailable, match="no answer"):
            await bench.cluster.find(SERVICE, namespace="ns", name="a")


@in_loop
async def test_server_that_is_not_there_is_unavailable(tmp_path: Path) -> None:
    async with _bench(tmp_path) as bench:
        pass
    again = await KubernetesCluster.connect(str(tmp_path / "kubeconfig"), on_request=lambda *_: None)
    with pytest.raises(ClusterUnavailable, match="no answer"):
        await again.find(LEASES, namespace="ns", name="a")
    await again.close()
    assert bench.codes == []


@in_loop
async def test_answer_that_is_no_object_is_unavailable(tmp_path: Path) -> None:
    async def proxy_page(_: web.Request) -> web.Response:
        return web.Response(text="<html>a proxy</html>")

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", proxy_page)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    cluster = await KubernetesCluster.connect(
        str(write_kubeconfig(tmp_path / "kubeconfig", url)), on_request=lambda *_: None
    )
    with pytest.raises(ClusterUnavailable, match="no JSON"):
        await cluster.find(LEASES, namespace="ns", name="a")
    await cluster.close()
    await runner.cleanup()


@in_loop
async def test_kubeconfig_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no way to reach an API server"):
        await KubernetesCluster.connect(str(tmp_path / "none"), on_request=lambda *_: None)


def test_patch_of_another_objects_uid_is_a_conflict() -> None:
    text = b'{"reason": "Invalid", "message": "Pod is invalid: metadata.uid: Invalid value: field is immutable"}'

    assert isinstance(translate_error("x", "patch", 422, text), WriteConflict)


def test_error_page_of_a_proxy_is_quoted() -> None:
    error = translate_error("get /x", "get", 502, b"<html>bad gateway</html>")

    assert isinstance(error, ClusterUnavailable)
    assert "bad gateway" in error.message


class Running:
    """A leader with real watches on the fake server; nodes take their turn whenever something is awaited."""

    def __init__(self, bench: Bench, leader: Leader, metrics: OperatorMetrics) -> None:
        self.bench, self.leader, self.metrics = bench, leader, metrics
        self.nodes = FakeNodes(bench.api)
        for index in range(4):
            self.nodes.set_node(f"node-{index}")

    async def until(self, check: Callable[[], object]) -> None:
        """Waits for a state, moving the nodes on meanwhile."""
        while not check():
            self.nodes.step()
            await asyncio.sleep(0.02)

    def ready_pods(self) -> int:
        try:
            status: Json = self.bench.api.get(POOL_RESOURCE, "flash", "ns").get("status", {})
        except KeyError:
            return 0
        return int(status.get("readyPEs", 0))

    def metric(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0.0


@asynccontextmanager
async def _running(path: Path, *, namespaces: tuple[str, ...] = (), forbid: str = "") -> AsyncIterator[Running]:
    settings = OperatorSettings(status_seconds=0.05, resync_seconds=0.3, namespaces=namespaces)
    async with _bench(path) as bench:
        if forbid:
            bench.api.forbidden.add(forbid)
        metrics = OperatorMetrics()
        lease = LeaderLease(bench.cluster, namespace="home", identity="a", times=settings.lease)
        await lease.acquire()
        resources = await find_resources(bench.cluster, settings)
        leader = build_leader(
            bench.cluster, lease, FakeEngines(), resources=resources, settings=settings, metrics=metrics
        )
        await leader.fill()
        work = [
            asyncio.create_task(leader.reconciler.work()),
            asyncio.create_task(lease.keep()),
            asyncio.create_task(leader.resync.keep()),
            asyncio.create_task(
                run_kopf(
                    leader.sink,
                    leader.resources,
                    bench.cluster,
                    namespaces=namespaces,
                    identity="a",
                    on_start=lambda: None,
                )
            ),
        ]
        try:
            yield Running(bench, leader, metrics)
            assert not [task for task in work if task.done()], "nothing of it ended by itself"
        finally:
            for task in work:
                task.cancel()
            for task in work:
                with contextlib.suppress(asyncio.CancelledError):
                    await task
            await leader.drains.close()


@pytest.mark.parametrize("namespaces", [(), ("ns",)], ids=["cluster-wide", "namespaced"])
@in_loop
async def test_pool_made_while_watching_becomes_ready(namespaces: tuple[str, ...], tmp_path: Path) -> None:
    async with _running(tmp_path, namespaces=namespaces) as running:
        running.bench.api.put(POOL_RESOURCE, POOL)
        await running.until(lambda: running.ready_pods() == 3)

        pool = running.bench.api.get(POOL_RESOURCE, "flash", "ns")
        assert "finalizers" not in pool["metadata"]
        assert set(pool["metadata"].get("annotations", {})) <= {"prefill.dev/ledger"}, "kopf keeps nothing on it"
        assert all("finalizers" not in pod["metadata"] for pod in running.nodes.pods())


@in_loop
async def test_works_as_a_user_id_without_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_name() -> str:
        raise KeyError("getpwuid(): uid not found: 10001")

    monkeypatch.setattr("getpass.getuser", no_name)
    async with _running(tmp_path) as running:
        running.bench.api.put(POOL_RESOURCE, POOL)
        await running.until(lambda: running.ready_pods() == 3)


@in_loop
async def test_works_without_the_right_to_read_nodes(tmp_path: Path) -> None:
    async with _running(tmp_path, forbid=NODES.plural) as running:
        running.bench.api.put(POOL_RESOURCE, POOL)
        await running.until(lambda: running.ready_pods() == 3)
        lists = [request for request in running.bench.api.requests if request.resource == NODES.plural]

    assert len(lists) == 1, "asked once, at the start"


@in_loop
async def test_dropped_watches_go_on(tmp_path: Path) -> None:
    async with _running(tmp_path) as running:
        running.bench.api.put(POOL_RESOURCE, POOL)
        await running.until(lambda: running.ready_pods() == 3)
        running.bench.server.drop_watches()
        before = running.bench.server.num_watches
        lost = running.nodes.pods()[0]["metadata"]["name"]
        running.bench.api.remove(PODS, lost, "ns")
        names = {pod["metadata"]["name"] for pod in running.nodes.pods()}
        await running.until(lambda: len(running.nodes.pods()) == 3 and running.ready_pods() == 3)

        assert names < {pod["metadata"]["name"] for pod in running.nodes.pods()}
        assert running.bench.server.num_watches > before


@in_loop
async def test_watch_that_is_too_old_lists_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefill_operator.resync.GRACE_SECONDS", 0.05)
    async with _running(tmp_path) as running:
        running.bench.api.put(POOL_RESOURCE, POOL)
        await running.until(lambda: running.ready_pods() == 3)
        running.bench.api.oldest_version = int(running.bench.api.history[-1][0]) + 1
        running.bench.server.drop_watches()
        lost = running.nodes.pods()[0]["metadata"]["name"]
        running.bench.api.remove(PODS, lost, "ns")
        running.bench.api.oldest_version = int(running.bench.api.history[-1][0])
        await running.until(lambda: len(running.nodes.pods()) == 3 and running.ready_pods() == 3)

        assert lost not in {pod["metadata"]["name"] for pod in running.nodes.pods()}


@in_loop
async def test_silent_watches_are_noticed_and_made_up_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefill_operator.resync.GRACE_SECONDS", 0.05)
    async with _running(tmp_path) as running:
        running.bench.api.put(POOL_RESOURCE, POOL)
        await running.until(lambda: running.ready_pods() == 3)
        running.bench.server.is_mute = True
        pool = running.bench.api.get(POOL_RESOURCE, "flash", "ns")
        running.bench.api.put(POOL_RESOURCE, {**pool, "spec": {**pool["spec"], "replicas": 4}})
        await running.until(lambda: running.ready_pods() == 5)

        assert running.metric("prefill_operator_resync_mismatch_total", resource="prefillpools") >= 1
        for _ in range(20):
            running.nodes.set_node("node-0", unschedulable=False, tick=time.time())
            if running.leader.resync.dead_watches:
                break
            await asyncio.sleep(0.4)
        assert running.leader.resync.dead_watches == ("nodes",)


@in_loop
async def test_storm_of_refusals_ends_in_the_right_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefill_operator.work_queue.FIRST_BACKOFF_SECONDS", 0.02)
    async with _running(tmp_path) as running:
        for status in (429, 503, 0):
            running.bench.api.faults.append(Fault(verb="create", resource="pods", status=status, reason="Conflict"))
            running.bench.api.faults.append(
                Fault(verb="apply", resource="prefillpools", status=status, reason="Conflict")
            )
        running.bench.api.put(POOL_RESOURCE, POOL)
        await running.until(lambda: running.ready_pods() == 3)

        assert len(running.nodes.pods()) == 3


@in_loop
async def test_waits_for_the_definitions_to_be_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefill_operator.leader._RETRY_SECONDS", 0.02)
    async with _bench(tmp_path) as bench:
        bench.api.unserved = frozenset(POOLS.values())
        finding = asyncio.create_task(find_resources(bench.cluster, OperatorSettings()))
        while bench.codes.count(("discover", "prefillpools", 404)) < 3:
            await asyncio.sleep(0.01)
        assert not finding.done()
        bench.api.unserved = frozenset()

        assert POOL_RESOURCE in await finding
        assert KEY.kind is Kind.PREFILL_POOL


def test_kopf_is_told_to_keep_out_of_the_way() -> None:
    settings = kopf.OperatorSettings()
    configure_kopf(settings, [*POOLS.values(), PODS, NODES])

    assert settings.scanning.disabled
    assert not settings.posting.enabled
    assert settings.watching.server_timeout == 300
    assert settings.networking.request_timeout == 30
    assert settings.process.ultimate_exiting_timeout == 20
    assert not settings.watching.initial_streaming
    assert settings.queueing.worker_limit is None
    selectors = {str(key): value for key, value in settings.watching.label_selectors.items()}
    assert list(selectors.values()) == ["app.kubernetes.io/managed-by=prefill-operator"], "pods only"
