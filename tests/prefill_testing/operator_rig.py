"""A leader of the operator on an API server in memory, moved by hand: no watch, no timer, no sleep.

`settle` tells the operator what its watches would, and runs passes until nothing is left to do; `advance` lets time pass.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

from prefill_operator.leader import Leader, build_leader, find_resources
from prefill_operator.lease import LeaderLease
from prefill_operator.names import Kind
from prefill_operator.operator_metrics import OperatorMetrics
from prefill_operator.resources import POOLS, Json, PoolKey
from prefill_operator.settings import OperatorSettings
from prefill_testing.fake_api import FakeApi
from prefill_testing.fake_cluster import FakeCluster, FakeEngines, FakeNodes

START = 1_700_000_000.0
KEY = PoolKey(kind=Kind.PREFILL_POOL, namespace="ns", name="flash")

POOL: Json = {
    "metadata": {"name": "flash", "namespace": "ns"},
    "spec": {
        "replicas": 2,
        "model": {"name": "flash", "revision": "r1", "source": {"pvc": {"claimName": "ckpt"}}},
        "gpu": {"product": "NVIDIA-H200"},
        "quota": {"redundancy": {"mode": "Fixed", "spares": 1}},
        "rollout": {"minReadySeconds": 0},
        "engine": {"image": "engine:1"},
    },
}
MAX_PASSES = 200


class OperatorRig:
    """Build it with `start` inside a running loop."""

    def __init__(self, api: FakeApi, settings: OperatorSettings, clock: "RigClock") -> None:
        self.api = api
        self.clock = clock
        self.settings = settings
        self.cluster = FakeCluster(api)
        self.engines = FakeEngines()
        self.metrics = OperatorMetrics()
        self.lease = LeaderLease(
            self.cluster,
            namespace=settings.namespace,
            identity=settings.identity,
            times=settings.lease,
            clock=clock.monotonic,
        )
        self.nodes = FakeNodes(api)
        self.leader: Leader
        self._told = 0

    @classmethod
    async def start(
        cls,
        *,
        api: FakeApi | None = None,
        clock: "RigClock | None" = None,
        settings: OperatorSettings | None = None,
        nodes: int = 4,
    ) -> "OperatorRig":
        """A leader with a filled cache. Another rig on the same api, with nodes=0, is a restarted operator."""
        clock = clock or RigClock()
        api = api or FakeApi(clock=clock.time)
        rig = cls(api, settings or OperatorSettings(), clock)
        for index in range(nodes):
            rig.nodes.set_node(f"node-{index}")
        await rig.lease.acquire()
        resources = await find_resources(rig.cluster, rig.settings)
        rig.leader = build_leader(
            rig.cluster,
            rig.lease,
            rig.engines,
            resources=resources,
            settings=rig.settings,
            metrics=rig.metrics,
            clock=clock.time,
            monotonic=clock.monotonic,
        )
        await rig.leader.fill()
        rig._told = len(api.history)
        return rig

    def create_pool(self, spec: Mapping[str, Any] | None = None) -> Json:
        """The pool of this module, with these fields of its spec replaced."""
        return self.api.put(POOLS[Kind.PREFILL_POOL], {**POOL, "spec": {**POOL["spec"], **(spec or {})}})

    def pool(self) -> Json:
        return self.api.get(POOLS[Kind.PREFILL_POOL], "flash", "ns")

    def condition(self, kind: str) -> Json:
        return next(item for item in self.pool()["status"]["conditions"] if item["type"] == kind)

    def change_spec(self, **spec: Any) -> None:
        pool = self.pool()
        self.api.put(POOLS[Kind.PREFILL_POOL], {**pool, "spec": {**pool["spec"], **spec}})

    def tell(self) -> None:
        """Everything that watches would have told by now."""
        for _, resource, kind, body in self.api.history[self._told :]:
            if resource in self.leader.resources:
                self.leader.sink.take(resource, kind, body)
        self._told = len(self.api.history)

    async def settle(self) -> int:
        """Runs passes until none is due. Returns their number."""
        queue, count = self.leader.queue, 0
        while True:
            await _let_tasks_run()
            self.tell()
            queue.release_due()
            if not queue.depth:
                return count
            count += 1
            assert count <= MAX_PASSES, f"does not settle: {self.api.requests[-20:]}"
            await self.leader.reconciler.step(await queue.take())

    async def run(self, rounds: int = 12, seconds: float = 2.0) -> None:
        """Lets operator and kubelets take turns, with time passing."""
        for _ in range(rounds):
            await self.settle()
            self.nodes.step()
            await self.settle()
            await self.advance(seconds)

    async def ask_engines(self, *, times: int = 1) -> None:
        """Rounds in which every engine that is watched is asked; what comes of them is settled."""
        for _ in range(times):
            for uid in self.leader.engines.uids:
                await self.leader.engines.look(uid)
            self.leader.engines.sum_up()
        await self.run(2)

    async def advance(self, seconds: float) -> None:
        """Time passes; the Lease is renewed meanwhile."""
        self.clock.now += seconds
        await self.lease.try_hold()

    def names(self) -> list[str]:
        return [pod["metadata"]["name"] for pod in self.nodes.pods()]

    def written(self) -> list[tuple[str, str]]:
        """(verb, resource) of all writes so far; then forgets them."""
        found = [(request.verb, request.resource) for request in self.api.writes()]
        self.api.requests.clear()
        return found


class RigClock:
    """One clock for everything."""

    def __init__(self) -> None:
        self.now = START

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now - START


async def _let_tasks_run() -> None:
    """Drains are tasks of their own; a few turns of the loop bring them to their next wait."""
    for _ in range(20):
        await asyncio.sleep(0)
