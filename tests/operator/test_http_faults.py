"""The whole operator with kopf's watches against an HTTP server that misbehaves (k8s.md 7.1 layer 3)."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import kopf
import pytest

from prefill_operator.handlers import build_registry, configure_kopf, run_kopf
from prefill_operator.leader import Leader, build_leader, find_resources
from prefill_operator.lease import LeaderLease
from prefill_operator.model import ChildKind
from prefill_operator.names import Kind
from prefill_operator.operator_metrics import OperatorMetrics
from prefill_operator.resources import CHILDREN, NODES, PODS, POOLS, Json
from prefill_operator.resync import GRACE_SECONDS
from prefill_operator.settings import OperatorSettings
from prefill_testing.fake_api import Fault
from prefill_testing.fake_cluster import FakeEngines, FakeNodes
from prefill_testing.in_loop import in_loop
from prefill_testing.operator_rig import KEY, POOL

SERVICE = CHILDREN[ChildKind.SERVICE]
POOL_RESOURCE = POOLS[Kind.PREFILL_POOL]
Benches = Callable[..., AbstractAsyncContextManager[Any]]


class Running:
    """A leader with real watches on the fake server; nodes take their turn whenever something is awaited."""

    def __init__(self, bench: Any, leader: Leader, metrics: OperatorMetrics) -> None:
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
async def _running(
    open_bench: Benches, path: Path, *, namespaces: tuple[str, ...] = (), forbid: str = ""
) -> AsyncIterator[Running]:
    settings = OperatorSettings(status_seconds=0.05, resync_seconds=0.3, namespaces=namespaces)
    async with open_bench(path) as bench:
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
async def test_pool_made_while_watching_becomes_ready(
    open_bench: Benches, namespaces: tuple[str, ...], tmp_path: Path
) -> None:
    async with _running(open_bench, tmp_path, namespaces=namespaces) as running:
        running.bench.api.put(POOL_RESOURCE, POOL)
        await running.until(lambda: running.ready_pods() == 3)

        pool = running.bench.api.get(POOL_RESOURCE, "flash", "ns")
        assert "finalizers" not in pool["metadata"]
        assert set(pool["metadata"].get("annotations", {})) <= {"prefill.dev/ledger"}, "kopf keeps nothing on it"
        assert all("finalizers" not in pod["metadata"] for pod in running.nodes.pods())


@in_loop
async def test_works_as_a_user_id_without_a_name(
    open_bench: Benches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_name() -> str:
        raise KeyError("getpwuid(): uid not found: 10001")

    monkeypatch.setattr("getpass.getuser", no_name)
    async with _running(open_bench, tmp_path) as running:
        running.bench.api.put(POOL_RESOURCE, POOL)
        await running.until(lambda: running.ready_pods() == 3)


@in_loop
async def test_works_without_the_right_to_read_nodes(open_bench: Benches, tmp_path: Path) -> None:
    async with _running(open_bench, tmp_path, forbid=NODES.plural) as running:
        running.bench.api.put(POOL_RESOURCE, POOL)
        await running.until(lambda: running.ready_pods() == 3)
        lists = [request for request in running.bench.api.requests if request.resource == NODES.plural]

    assert len(lists) == 1, "asked once, at the start"


@in_loop
async def test_dropped_watches_go_on(open_bench: Benches, tmp_path: Path) -> None:
    async with _running(open_bench, tmp_path) as running:
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
async def test_watch_that_is_too_old_lists_again(
    open_bench: Benches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prefill_operator.resync.GRACE_SECONDS", 0.05)
    async with _running(open_bench, tmp_path) as running:
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
async def test_silent_watches_are_noticed_and_made_up_for(
    open_bench: Benches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prefill_operator.resync.GRACE_SECONDS", 0.05)
    async with _running(open_bench, tmp_path) as running:
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
async def test_storm_of_refusals_ends_in_the_right_state(
    open_bench: Benches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prefill_operator.work_queue.FIRST_BACKOFF_SECONDS", 0.02)
    async with _running(open_bench, tmp_path) as running:
        for status in (429, 503, 0):
            running.bench.api.faults.append(Fault(verb="create", resource="pods", status=status, reason="Conflict"))
            running.bench.api.faults.append(
                Fault(verb="apply", resource="prefillpools", status=status, reason="Conflict")
            )
        running.bench.api.put(POOL_RESOURCE, POOL)
        await running.until(lambda: running.ready_pods() == 3)

        assert len(running.nodes.pods()) == 3


@in_loop
async def test_waits_for_the_definitions_to_be_installed(
    open_bench: Benches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prefill_operator.leader._RETRY_SECONDS", 0.02)
    async with open_bench(tmp_path) as bench:
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
    assert max(settings.networking.error_backoffs) < GRACE_SECONDS / 2, (
        "a watch is back before the resync calls it dead"
    )
    assert settings.process.ultimate_exiting_timeout == 20
    assert not settings.watching.initial_streaming
    assert settings.queueing.worker_limit is None
    selectors = {str(key): value for key, value in settings.watching.label_selectors.items()}
    assert list(selectors.values()) == ["app.kubernetes.io/managed-by=prefill-operator"], "pods only"


def test_kopf_has_nothing_to_do_but_to_watch() -> None:
    """No index, whose fill at the start hangs; nothing that needs finalizers or annotations of kopf's (k8s.md 2 row 65)."""
    registry = build_registry(object(), [*POOLS.values(), PODS, NODES], object())  # type: ignore[arg-type]

    assert len(registry._watching.get_all_handlers()) == len(POOLS) + 2
    for kind in (registry._indexing, registry._changing, registry._spawning, registry._webhooks):
        assert list(kind.get_all_handlers()) == []
