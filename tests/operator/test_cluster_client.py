"""prefill_operator.cluster: the real client against an HTTP server that refuses, is late, or is none (k8s.md 7.1 layer 3)."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

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
from prefill_operator.model import ChildKind
from prefill_operator.names import Kind
from prefill_operator.resources import CHILDREN, LEASES, PODS, POOLS, Json
from prefill_plan.errors import ConfigError
from prefill_testing.fake_api import Fault
from prefill_testing.fake_api_http import write_kubeconfig
from prefill_testing.in_loop import in_loop
from prefill_testing.operator_rig import POOL

SERVICE = CHILDREN[ChildKind.SERVICE]
POOL_RESOURCE = POOLS[Kind.PREFILL_POOL]
Benches = Callable[..., AbstractAsyncContextManager[Any]]


def _service(name: str = "a", **more: Any) -> Json:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "namespace": "ns", **more},
        "spec": {"x": 1},
    }


@in_loop
async def test_client_reads_and_writes(open_bench: Benches, tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
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
async def test_status_and_conditions_leave_the_rest_alone(open_bench: Benches, tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
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
async def test_long_lists_come_in_pages(open_bench: Benches, tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        for index in range(PAGE_ITEMS + 3):
            bench.api.put(SERVICE, _service(f"s{index:04d}", labels={"a": str(index % 2)}))
        pages = [page async for page in bench.cluster.pages(SERVICE, namespace="ns")]
        odd = [item async for page in bench.cluster.pages(SERVICE, selector="a=1") for item in page]
        metadata = [item async for page in bench.cluster.pages(SERVICE, metadata_only=True) for item in page]

    assert [len(page) for page in pages] == [PAGE_ITEMS, 3]
    assert len(odd) == (PAGE_ITEMS + 3) // 2
    assert len(metadata) == PAGE_ITEMS + 3
    assert set(metadata[0]) == {"metadata"}
    assert set(metadata[0]["metadata"]) == {"name", "namespace", "uid", "resourceVersion"}


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
    open_bench: Benches, fault: dict[str, Any], error: type[ClusterError], status: int, tmp_path: Path
) -> None:
    async with open_bench(tmp_path) as bench:
        bench.api.faults.append(Fault(**fault))
        with pytest.raises(error) as refusal:
            await bench.cluster.create(SERVICE, _service())

    assert refusal.value.status == status
    assert "create /api/v1/namespaces/ns/services" in refusal.value.message
    assert bench.codes == [("create", "services", status)]
    assert len(bench.api.requests) == 1, "the client itself never tries again"


@in_loop
async def test_server_may_say_how_long_to_wait(open_bench: Benches, tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
        bench.api.faults.append(Fault(status=429, retry_after=7.0))
        with pytest.raises(ClusterUnavailable) as refusal:
            await bench.cluster.create(SERVICE, _service())

    assert refusal.value.details["retry_after_seconds"] == 7.0


@in_loop
async def test_late_answer_is_none(open_bench: Benches, tmp_path: Path) -> None:
    async with open_bench(tmp_path, request_seconds=0.1) as bench:
        bench.api.faults.append(Fault(status=200, hang_seconds=5.0))
        with pytest.raises(ClusterUnavailable, match="no answer"):
            await bench.cluster.find(SERVICE, namespace="ns", name="a")


@in_loop
async def test_server_that_is_not_there_is_unavailable(open_bench: Benches, tmp_path: Path) -> None:
    async with open_bench(tmp_path) as bench:
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
    with pytest.raises(ClusterUnavailable, match="cannot be read"):
        await cluster.find(LEASES, namespace="ns", name="a")
    await cluster.close()
    await runner.cleanup()


@in_loop
async def test_kubeconfig_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no way to reach an API server: kubeconfig .* does not exist"):
        await KubernetesCluster.connect(str(tmp_path / "none"), on_request=lambda *_: None)


def test_patch_of_another_objects_uid_is_a_conflict() -> None:
    text = b'{"reason": "Invalid", "message": "Pod is invalid: metadata.uid: Invalid value: field is immutable"}'

    assert isinstance(translate_error("x", "patch", 422, text), WriteConflict)


def test_error_page_of_a_proxy_is_quoted() -> None:
    error = translate_error("get /x", "get", 502, b"<html>bad gateway</html>")

    assert isinstance(error, ClusterUnavailable)
    assert "bad gateway" in error.message
