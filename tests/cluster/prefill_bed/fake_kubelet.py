"""Fake kubelets for many nodes in one process: real API objects, no containers.

They register nodes, renew Leases, run bound pods Pending -> Running -> Ready with statuses, addresses and readiness gates, end
deleted pods, let pods fail as the control file (JSON, see Control) says, and answer each pod's address for its engine.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import re
import ssl
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import yaml

from prefill_bed.fake_engine import serve_engine

Json = dict[str, Any]
MERGE, STRATEGIC = "application/merge-patch+json", "application/strategic-merge-patch+json"


class Rule(msgspec.Struct, forbid_unknown_fields=True):
    """What befalls pods. The first rule that matches a pod and is not used up for it applies, `after` seconds from its start."""

    pods: str = ""
    """Regular expression, matched anywhere in the name."""
    nodes: list[str] = []
    """Empty: any node."""
    after: float = 0.2
    exit: int | None = None
    """The engine container ends with this code and starts again."""
    message: str = ""
    """Termination message; $PLAN_HASH stands for the pod's plan hash."""
    reason: str = "Error"
    """The kubelet's word for the end: Error, OOMKilled."""
    back_off: float = 0.5
    """Seconds in CrashLoopBackOff before the container runs again."""
    fail: str = ""
    """Instead: the pod fails for ever with this reason, e.g. UnexpectedAdmissionError."""
    image: str = ""
    """Instead: the container waits for ever, e.g. ImagePullBackOff."""
    times: int = 1
    """How often per pod."""


class Control(msgspec.Struct, forbid_unknown_fields=True):
    ready_seconds: float = 0.5
    """From running to ready."""
    stop_seconds: float = 0.1
    """From deletion to gone."""
    dead: list[str] = []
    """Nodes that say nothing and do nothing."""
    never_ready: str = ""
    """Regular expression of pods that run but do not become ready; empty: none."""
    rules: list[Rule] = []


def stamp() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def micro_stamp() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class FakePod:
    """One bound pod, from first sight to its end. Its status is written whole each time, from these fields."""

    def __init__(self, pod: Json, address: str) -> None:
        self.pod, self.address = pod, address
        self.started, self.started_at = False, stamp()
        self.ready = False
        self.restarts = 0
        self.last_end: Json | None = None
        self.waiting = ""
        self.used: dict[int, int] = {}
        self.sent: tuple[object, ...] = ()
        self.written = 0  # resource version of the last status

    @property
    def name(self) -> str:
        return str(self.pod["metadata"]["name"])

    @property
    def node(self) -> str:
        return str(self.pod["spec"]["nodeName"])

    @property
    def path(self) -> str:
        return f"/api/v1/namespaces/{self.pod['metadata']['namespace']}/pods/{self.name}"

    def gates_open(self) -> bool:
        known = {c["type"]: c["status"] for c in self.pod["status"].get("conditions", [])}
        return all(known.get(gate["conditionType"]) == "True" for gate in self.pod["spec"].get("readinessGates", []))

    def status(self) -> Json:
        """The pod's status as a kubelet would write it."""
        running = {"running": {"startedAt": self.started_at}}
        containers = []
        for index, spec in enumerate(self.pod["spec"]["containers"]):
            first = index == 0
            state = {"waiting": {"reason": self.waiting}} if self.waiting and first else running
            is_up = not (self.waiting and first)
            status = {"name": spec["name"], "image": spec["image"], "imageID": "", "state": state, "started": is_up}
            status |= {"ready": self.ready and is_up, "restartCount": self.restarts if first else 0}
            if first and self.last_end:
                status["lastState"] = {"terminated": self.last_end}
            containers.append(status)
        up = {"imageID": "", "state": running, "started": True, "ready": True, "restartCount": 0}
        sidecars = [{"name": s["name"], "image": s["image"], **up} for s in self.pod["spec"].get("initContainers", [])]
        flags = {"Initialized": True, "ContainersReady": self.ready, "Ready": self.ready and self.gates_open()}
        conditions = [{"type": t, "status": str(on), "lastTransitionTime": stamp()} for t, on in flags.items()]
        ips = {"podIP": self.address, "podIPs": [{"ip": self.address}], "hostIP": "10.98.0.1"}
        lists = {"conditions": conditions, "containerStatuses": containers, "initContainerStatuses": sidecars}
        return {"phase": "Running", "startTime": self.started_at, **ips, **lists}

    def is_overwritten(self) -> bool:
        """Somebody has said of Ready what is not so: the node controller does, of a node whose heartbeat came late."""
        said = [c["status"] for c in self.pod["status"].get("conditions", []) if c["type"] == "Ready"]
        is_newer = int(self.pod["metadata"]["resourceVersion"]) > self.written > 0
        return is_newer and said != [str(self.ready and self.gates_open())]

    def digest(self) -> tuple[object, ...]:
        """Changes exactly when the status has to be written again."""
        return self.started, self.ready, self.ready and self.gates_open(), self.restarts, self.waiting


class FakeKubelets:
    """All nodes of one process."""

    def __init__(
        self, session: aiohttp.ClientSession, beats: aiohttp.ClientSession, server: str, args: argparse.Namespace
    ) -> None:
        """beats: connections for heartbeats alone. Behind the pods of a busy cluster they would come too late, and the nodes be
        called lost."""
        self._session, self._beats, self._server, self._args = session, beats, server, args
        self._nodes = [f"gpu-{index}" for index in range(args.nodes)]
        self._control = Control()
        self._pods: dict[str, FakePod] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._addresses = (f"10.99.{n // 250}.{n % 250 + 1}" for n in itertools.cycle(range(250 * 250)))

    async def run(self) -> None:
        for node in self._nodes:
            await self._register(node)
        print("nodes registered", flush=True)
        await asyncio.gather(self._watch_control(), self._watch_pods(), *(self._beat(node) for node in self._nodes))

    async def _call(
        self,
        method: str,
        path: str,
        body: Json | None = None,
        content_type: str = "application/json",
        *,
        is_beat: bool = False,
    ) -> int:
        """As _ask, of which only the status matters."""
        return (await self._ask(method, path, body, content_type, is_beat=is_beat))[0]

    async def _ask(
        self, method: str, path: str, body: Json | None, content_type: str, *, is_beat: bool = False
    ) -> tuple[int, Json]:
        """One request; connection trouble is a status of 0, since a kubelet outlives its API server."""
        data = None if body is None else json.dumps(body)
        headers = {"Content-Type": content_type}
        try:
            session = self._beats if is_beat else self._session
            async with session.request(method, self._server + path, data=data, headers=headers) as answer:
                if answer.status >= 400 and answer.status != 404:
                    print(method, path, answer.status, (await answer.text())[:300], flush=True)
                return answer.status, await answer.json() if answer.status < 400 else {}
        except (aiohttp.ClientError, TimeoutError) as error:
            print(method, path, type(error).__name__, flush=True)
            return 0, {}

    async def _register(self, node: str) -> None:
        gpus = self._args.gpus
        capacity = {"nvidia.com/gpu": str(gpus), "cpu": str(240 * gpus), "memory": f"{2560 * gpus}Gi", "pods": "1000"}
        capacity |= {"ephemeral-storage": f"{max(1, gpus // 8)}Ti", "rdma/hca": "512"}
        labels = {
            "kubernetes.io/hostname": node,
            "nvidia.com/gpu.product": self._args.product,
            "prefill-bed/fake": "true",
        }
        status = {"capacity": capacity, "allocatable": capacity}
        await self._call("POST", "/api/v1/nodes", {"metadata": {"name": node, "labels": labels}, "status": status})

    async def _beat(self, node: str) -> None:
        """The node's Lease, and after a silence its Ready condition: the controllers have called it unknown meanwhile. A renewal
        that came late is a silence, too, so the condition is looked at as well."""
        leases, silent = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases", True
        while True:
            if node in self._control.dead:
                silent = True
            else:
                if silent:
                    lease = {"metadata": {"name": node}, "spec": {"holderIdentity": node, "leaseDurationSeconds": 40}}
                    await self._call("POST", leases, lease, is_beat=True)
                renewal = {"spec": {"holderIdentity": node, "renewTime": micro_stamp()}}
                renewed = await self._call("PATCH", f"{leases}/{node}", renewal, MERGE, is_beat=True) == 200
                silent = not renewed or ((silent or not await self._is_ready(node)) and not await self._say_ready(node))
            await asyncio.sleep(0.5 if silent else self._args.heartbeat)

    async def _is_ready(self, node: str) -> bool:
        """Also True when nobody knows."""
        try:
            async with self._beats.get(f"{self._server}/api/v1/nodes/{node}") as answer:
                found = (await answer.json()).get("status", {}).get("conditions", [])
        except (aiohttp.ClientError, TimeoutError):
            return True
        return all(condition["status"] == "True" for condition in found if condition["type"] == "Ready")

    async def _say_ready(self, node: str) -> bool:
        condition = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "fake"}
        condition |= {"lastHeartbeatTime": stamp(), "lastTransitionTime": stamp()}
        path = f"/api/v1/nodes/{node}/status"
        body = {"status": {"conditions": [condition]}}
        return await self._call("PATCH", path, body, STRATEGIC, is_beat=True) == 200

    async def _watch_control(self) -> None:
        seen = ""
        while True:
            with contextlib.suppress(FileNotFoundError):
                text = self._args.control.read_text()
                if text != seen:
                    seen, before = text, set(self._control.dead)
                    self._control = msgspec.json.decode(text, type=Control)
                    for pod in list(self._pods.values()):
                        if pod.node in before - set(self._control.dead) or pod.started:
                            self._see(pod.pod)
                    self._args.control.with_suffix(".seen").write_text(text)
            await asyncio.sleep(0.1)

    async def _watch_pods(self) -> None:
        while True:
            try:
                await self._list_and_watch()
            except (aiohttp.ClientError, TimeoutError, KeyError) as error:
                print("pod watch ended:", type(error).__name__, error, flush=True)
                await asyncio.sleep(0.3)

    async def _list_and_watch(self) -> None:
        query = {"fieldSelector": "spec.nodeName!="}
        async with self._session.get(self._server + "/api/v1/pods", params=query) as answer:
            answer.raise_for_status()
            listed = await answer.json()
        present = {pod["metadata"]["uid"] for pod in listed["items"]}
        for uid in self._pods.keys() - present:
            del self._pods[uid]
        for pod in listed["items"]:
            self._see(pod)
        query |= {"watch": "1", "resourceVersion": listed["metadata"]["resourceVersion"], "timeoutSeconds": "600"}
        timeout = aiohttp.ClientTimeout(total=None, sock_read=None)
        async with self._session.get(self._server + "/api/v1/pods", params=query, timeout=timeout) as answer:
            rest = b""
            async for part in answer.content.iter_any():
                *lines, rest = (rest + part).split(b"\n")
                for line in lines:
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        return
                    if event["type"] == "DELETED":
                        self._pods.pop(event["object"]["metadata"]["uid"], None)
                    else:
                        self._see(event["object"])

    def _see(self, pod: Json) -> None:
        """Takes in a pod's newest form and does what a kubelet would do about it."""
        uid, node = pod["metadata"]["uid"], pod["spec"].get("nodeName")
        if node not in self._nodes:
            return
        known = self._pods.get(uid)
        if known is None:
            known = self._pods[uid] = FakePod(pod, next(self._addresses))
        known.pod = pod
        if node in self._control.dead or pod["status"].get("phase") in ("Failed", "Succeeded"):
            if pod["metadata"].get("deletionTimestamp") and node not in self._control.dead:
                self._spawn(self._end(known))
        elif pod["metadata"].get("deletionTimestamp"):
            self._spawn(self._end(known))
        elif not known.started:
            known.started = True
            self._spawn(self._start(known))
        elif known.digest() != known.sent or known.is_overwritten():
            self._spawn(self._report(known))

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _gone(self, pod: FakePod) -> bool:
        return self._pods.get(pod.pod["metadata"]["uid"]) is not pod or pod.node in self._control.dead

    async def _report(self, pod: FakePod) -> None:
        """Until it is written: a kubelet does not give up on a status."""
        code = 0
        while code not in (200, 404) and not self._gone(pod):
            await asyncio.sleep(0.2 if code else 0)
            pod.sent = pod.digest()
            body = {"metadata": {"uid": pod.pod["metadata"]["uid"]}, "status": pod.status()}
            code, answer = await self._ask("PATCH", pod.path + "/status", body, STRATEGIC)
            if code == 200:
                pod.written = int(answer["metadata"]["resourceVersion"])

    async def _start(self, pod: FakePod) -> None:
        """Running, then what the rules say, then ready."""
        while (rule := self._next_rule(pod)) is not None:
            await self._report(pod)
            await asyncio.sleep(rule.after)
            if self._gone(pod):
                return
            if rule.fail:
                body = {"status": {"phase": "Failed", "reason": rule.fail, "message": "by rule of the test bed"}}
                await self._call("PATCH", pod.path + "/status", body, MERGE)
                return
            if rule.image:
                pod.waiting = rule.image
                await self._report(pod)
                return
            await self._crash(pod, rule)
        await self._report(pod)
        await asyncio.sleep(self._control.ready_seconds)
        if not (self._control.never_ready and re.search(self._control.never_ready, pod.name)):
            pod.ready = True
            await self._report(pod)

    async def _crash(self, pod: FakePod, rule: Rule) -> None:
        message = rule.message.replace(
            "$PLAN_HASH", pod.pod["metadata"].get("annotations", {}).get("prefill.dev/plan-hash", "")
        )
        end = {
            "exitCode": rule.exit,
            "reason": rule.reason,
            "message": message,
            "startedAt": pod.started_at,
            "finishedAt": stamp(),
        }
        pod.last_end = end
        pod.restarts += 1
        pod.waiting = "CrashLoopBackOff"
        await self._report(pod)
        await asyncio.sleep(rule.back_off)
        pod.waiting, pod.started_at = "", stamp()

    def _next_rule(self, pod: FakePod) -> Rule | None:
        for index, rule in enumerate(self._control.rules):
            fits = re.search(rule.pods, pod.name) and (not rule.nodes or pod.node in rule.nodes)
            if fits and pod.used.get(index, 0) < rule.times:
                pod.used[index] = pod.used.get(index, 0) + 1
                return rule
        return None

    async def _end(self, pod: FakePod) -> None:
        grace = float(pod.pod["metadata"].get("deletionGracePeriodSeconds") or 0)
        await asyncio.sleep(min(grace, self._control.stop_seconds))
        if not self._gone(pod):
            uid = pod.pod["metadata"]["uid"]
            await self._call("DELETE", pod.path, {"gracePeriodSeconds": 0, "preconditions": {"uid": uid}})


async def run(args: argparse.Namespace) -> None:
    config = yaml.safe_load(args.kubeconfig.read_text())
    cluster, token = config["clusters"][0]["cluster"], config["users"][0]["user"]["token"]
    tls = ssl.create_default_context(cafile=cluster["certificate-authority"])
    headers = {"Authorization": f"Bearer {token}"}

    def connect(limit: int) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(ssl=tls, limit=limit)
        return aiohttp.ClientSession(connector=connector, headers=headers, timeout=aiohttp.ClientTimeout(total=20))

    # A real kubelet writes one status at a time: about as many at once as there are nodes.
    async with connect(args.nodes + 2) as session, connect(args.nodes) as beats:
        kubelets = FakeKubelets(session, beats, cluster["server"], args)
        await asyncio.gather(kubelets.run(), serve_engine(args.engine_port))


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="fake_kubelet", description=__doc__)
    parser.add_argument("--kubeconfig", type=Path, required=True)
    parser.add_argument("--control", type=Path, required=True)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--gpus", type=int, default=8, help="per node")
    parser.add_argument("--product", default="NVIDIA-H200")
    parser.add_argument("--heartbeat", type=float, default=2.0)
    parser.add_argument("--engine-port", type=int, default=50051)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(run(parser.parse_args(argv)))


if __name__ == "__main__":
    main(sys.argv[1:])
