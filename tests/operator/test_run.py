"""`prefill-operator run` as a process: it leads, works, answers probes, and ends as it should."""

import asyncio
import json
import re
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from prefill_operator.model import ChildKind
from prefill_operator.names import LEASE_NAME, Kind
from prefill_operator.resources import CHILDREN, LEASES, POOLS, Json
from prefill_testing.fake_api import FakeApi
from prefill_testing.fake_api_http import serve_fake_api, write_kubeconfig
from prefill_testing.fake_cluster import FakeNodes
from prefill_testing.in_loop import in_loop
from prefill_testing.operator_rig import POOL

RESOURCE = POOLS[Kind.PREFILL_POOL]
SCALED_OBJECT = CHILDREN[ChildKind.SCALED_OBJECT]


class Process:
    """One operator process and what it has logged."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[Json] = []
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            self.lines.append(json.loads(line))

    def said(self, message: str) -> Json | None:
        return next((line for line in self.lines if line["message"] == message), None)

    def heard(self, message: str) -> Json:
        line = self.said(message)
        assert line is not None, [line["message"] for line in self.lines]
        return line

    async def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        return await self.ended()

    async def ended(self) -> int:
        code = await self.process.wait()
        await self._reading
        return code


class Stage:
    def __init__(self, api: FakeApi, kubeconfig: Path) -> None:
        self.api, self.kubeconfig = api, kubeconfig
        self.nodes = FakeNodes(api)
        for index in range(4):
            self.nodes.set_node(f"node-{index}")
        self.processes: list[Process] = []

    async def start(self, name: str, *options: str) -> Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "prefill_operator", "run", "--set", "port=0", "--set", "host=127.0.0.1",
            "--set", f"identity={name}", "--set", "statusSeconds=0.1", "--set", f"kubeconfig={self.kubeconfig}",
            "--set", "lease={durationSeconds: 5, renewDeadlineSeconds: 3, retrySeconds: 0.2}", *options,
            stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        self.processes.append(Process(process))
        return self.processes[-1]

    async def until(self, check: Callable[[], object]) -> None:
        while not check():
            self.nodes.step()
            await asyncio.sleep(0.05)

    def holder(self) -> str:
        return str(self.api.get(LEASES, LEASE_NAME, "default")["spec"]["holderIdentity"])


@asynccontextmanager
async def _stage(path: Path) -> AsyncIterator[Stage]:
    api = FakeApi(clock=time.time)
    async with serve_fake_api(api) as server:
        stage = Stage(api, write_kubeconfig(path / "kubeconfig", server.url))
        try:
            yield stage
        finally:
            for process in stage.processes:
                if process.process.returncode is None:
                    await process.end(signal.SIGKILL)


@in_loop
async def test_leader_works_and_hands_over_at_sigterm(tmp_path: Path) -> None:
    async with _stage(tmp_path) as stage:
        first = await stage.start("first")
        await stage.until(lambda: first.said("leading"))
        second = await stage.start("second")
        stage.api.put(RESOURCE, POOL)
        await stage.until(lambda: stage.api.get(RESOURCE, "flash", "ns").get("status", {}).get("readyPEs") == 3)
        await stage.until(lambda: second.said("serving metrics and health"))
        for process, leading in ((first, 1.0), (second, 0.0)):
            health, ready, metrics = await _probe(process)
            assert (health, ready) == (200, 200)
            assert re.search(rf"^prefill_operator_leader {leading}$", metrics, re.MULTILINE)

        stage.api.requests.clear()
        assert await first.end(signal.SIGTERM) == 0
        await stage.until(lambda: second.said("cache filled"))

        assert stage.holder() == "second"
        assert stage.api.writes() == [], "a change of leaders writes nothing"
        assert first.lines[-1]["message"] == "ended"
        assert {line["level"] for line in first.lines} == {"INFO"}


@in_loop
async def test_leader_that_lost_its_lease_ends(tmp_path: Path) -> None:
    async with _stage(tmp_path) as stage:
        leader = await stage.start("leader")
        await stage.until(lambda: leader.said("cache filled"))
        lease = stage.api.get(LEASES, LEASE_NAME, "default")
        stage.api.put(LEASES, {**lease, "spec": {**lease["spec"], "holderIdentity": "somebody"}})

        assert await leader.ended() == 3
        assert leader.said("lease lost") is not None
        assert stage.holder() == "somebody"


@in_loop
async def test_kind_that_comes_later_is_watched_by_the_next_leader(tmp_path: Path) -> None:
    """KEDA installed after the operator: no restart by hand."""
    async with _stage(tmp_path) as stage:
        stage.api.unserved = frozenset({SCALED_OBJECT})
        options = ("--set", "rbac={keda: true}", "--set", "resyncSeconds=0.1")
        leader = await stage.start("first", *options)
        await stage.until(lambda: leader.said("cache filled"))
        assert SCALED_OBJECT.plural not in leader.heard("cache filled")["resources"]
        stage.api.unserved = frozenset()

        assert await leader.ended() == 0
        said = leader.heard("the cluster serves other kinds; leaving the lead to start anew")
        assert said["kinds"] == [SCALED_OBJECT.plural]
        again = await stage.start("again", *options)
        await stage.until(lambda: again.said("cache filled"))
        assert SCALED_OBJECT.plural in again.heard("cache filled")["resources"]
        assert await again.end(signal.SIGTERM) == 0


@in_loop
async def test_standby_ends_at_sigterm(tmp_path: Path) -> None:
    async with _stage(tmp_path) as stage:
        spec = {"holderIdentity": "somebody", "leaseDurationSeconds": 600, "renewTime": "x"}
        stage.api.put(LEASES, {"metadata": {"name": LEASE_NAME, "namespace": "default"}, "spec": spec})
        standby = await stage.start("standby")
        await stage.until(lambda: standby.said("serving metrics and health"))

        assert await standby.end(signal.SIGTERM) == 0
        assert stage.holder() == "somebody"


async def _probe(process: Process) -> tuple[int, int, str]:
    said = process.said("serving metrics and health")
    assert said is not None
    url = f"http://127.0.0.1:{said['port']}"
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{url}/healthz") as healthz, session.get(f"{url}/readyz") as readyz:
            codes = healthz.status, readyz.status
        async with session.get(f"{url}/metrics") as metrics:
            return *codes, await metrics.text()
