"""Benches that several files of operator tests work on: fixtures that give the function which builds one."""

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from prefill_operator.apply import Applied, Applier, Target
from prefill_operator.cluster import KubernetesCluster
from prefill_operator.model import Action, CreatePod
from prefill_operator.pool_memory import PoolMemory
from prefill_operator.resources import Json
from prefill_operator.settings import OperatorSettings
from prefill_testing.fake_api import FakeApi, Fault
from prefill_testing.fake_api_http import FakeApiServer, serve_fake_api, write_kubeconfig
from prefill_testing.operator_rig import KEY, OperatorRig


async def _ready_rig(spec: dict[str, Any] | None = None, **options: Any) -> OperatorRig:
    rig = await OperatorRig.start(**options)
    rig.create_pool(spec)
    await rig.run(8)
    assert rig.condition("Ready")["status"] == "True", rig.pool()["status"]
    rig.api.requests.clear()
    return rig


async def _restart(rig: OperatorRig) -> OperatorRig:
    await rig.lease.release()
    again = await OperatorRig.start(api=rig.api, clock=rig.clock, settings=rig.settings, nodes=0)
    again.nodes = rig.nodes
    rig.api.requests.clear()
    return again


@pytest.fixture
def ready_rig() -> Callable[..., Awaitable[OperatorRig]]:
    """Builds a rig whose pool is Ready; keywords are those of OperatorRig.start."""
    return _ready_rig


@pytest.fixture
def restarted() -> Callable[..., Awaitable[OperatorRig]]:
    """Another process on the same cluster; the old one is gone."""
    return _restart


class Desk:
    """An Applier with one pool to work on."""

    def __init__(self, rig: OperatorRig) -> None:
        self.rig = rig
        self.memory = PoolMemory(uid="")

    @classmethod
    async def open(cls, *, with_pods: bool = False, settings: OperatorSettings | None = None) -> "Desk":
        rig = await OperatorRig.start(settings=settings)
        rig.create_pool()
        if with_pods:
            await rig.run(3)
        rig.tell()
        rig.api.requests.clear()
        return cls(rig)

    @property
    def applier(self) -> Applier:
        return self.rig.leader.reconciler._applier

    def target(self) -> Target:
        record = self.rig.leader.cache.pool(KEY)
        assert record is not None
        assert record.pool is not None
        self.memory.uid = record.uid
        view = self.rig.leader.reconciler._observer.observe(KEY, record.pool, self.memory)
        return Target(key=KEY, pool=record.pool, plan=view.plan, memory=self.memory, children=view.children)

    async def do(self, *actions: Action) -> Applied:
        return await self.applier.apply(self.target(), actions)

    def create(self, incarnation: int = 1) -> CreatePod:
        revision = self.target().plan.revision
        return CreatePod(name=f"flash-{revision}-{incarnation}", revision=revision, incarnation=incarnation)

    def fail(self, resource: str, **fault: Any) -> None:
        self.rig.api.faults.append(Fault(resource=resource, **fault))

    def verbs(self) -> list[tuple[str, str]]:
        return self.rig.written()

    def first_pod(self) -> Json:
        metadata: Json = self.rig.nodes.pods()[0]["metadata"]
        return metadata


@pytest.fixture
def open_desk() -> Callable[..., Awaitable[Desk]]:
    return Desk.open


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


@pytest.fixture
def open_bench() -> Callable[..., AbstractAsyncContextManager[Bench]]:
    return _bench
