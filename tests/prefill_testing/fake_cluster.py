"""The operator's Cluster on an API server in memory, with nodes that run pods, and engines that drain.

A test moves things on by itself: `FakeNodes.step` binds, starts and ends pods; nothing happens behind its back.
"""

import asyncio
import copy
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import urlencode

from prefill_operator.cluster import translate_error
from prefill_operator.engine_load import EngineReport
from prefill_operator.engine_wire import LoadState
from prefill_operator.errors import ClusterUnavailable, ObjectMissing
from prefill_operator.names import ACCEPTING_GATE, MANAGED_BY, MANAGED_BY_LABEL, Kind
from prefill_operator.resources import NODES, PODS, Json, Resource
from prefill_testing.fake_api import APPLY, MERGE, STRATEGIC, FakeApi


class FakeCluster:
    """The operator's Cluster on a FakeApi, without HTTP; errors are translated as those of the real client."""

    def __init__(self, api: FakeApi) -> None:
        self.api = api

    async def pages(
        self, resource: Resource, *, namespace: str = "", selector: str = "", metadata_only: bool = False
    ) -> AsyncIterator[list[Json]]:
        query = {"labelSelector": selector, "limit": "2", "continue": ""}
        while True:
            answer = await self._request("GET", resource.path(namespace=namespace), query=query)
            items: list[Json] = answer["items"]
            yield [{"metadata": item["metadata"]} for item in items] if metadata_only else items
            query["continue"] = answer["metadata"]["continue"]
            if not query["continue"]:
                return

    async def find(self, resource: Resource, *, namespace: str, name: str) -> Json | None:
        try:
            return await self._request("GET", resource.path(namespace=namespace, name=name))
        except ObjectMissing:
            return None

    async def create(self, resource: Resource, body: Json) -> Json:
        return await self._request("POST", resource.path(namespace=body["metadata"].get("namespace", "")), body)

    async def replace(self, resource: Resource, body: Json) -> Json:
        return await self._request("PUT", _own_path(resource, body), body)

    async def apply(self, resource: Resource, body: Json, *, subresource: str = "") -> Json:
        return await self._request("PATCH", _own_path(resource, body, subresource), body, content_type=APPLY)

    async def merge(self, resource: Resource, patch: Json, *, namespace: str, name: str, uid: str) -> Json:
        body = {**patch, "metadata": {**patch.get("metadata", {}), "uid": uid}}
        return await self._request("PATCH", resource.path(namespace=namespace, name=name), body, content_type=MERGE)

    async def set_condition(self, resource: Resource, condition: Json, *, namespace: str, name: str, uid: str) -> Json:
        path = resource.path(namespace=namespace, name=name, subresource="status")
        body = {"metadata": {"uid": uid}, "status": {"conditions": [condition]}}
        return await self._request("PATCH", path, body, content_type=STRATEGIC)

    async def delete(
        self, resource: Resource, *, namespace: str, name: str, uid: str, grace_seconds: int | None = None
    ) -> Json:
        options: Json = {"preconditions": {"uid": uid}}
        if grace_seconds is not None:
            options["gracePeriodSeconds"] = grace_seconds
        return await self._request("DELETE", resource.path(namespace=namespace, name=name), options)

    async def serves(self, resource: Resource) -> bool:
        return resource not in self.api.unserved

    async def _request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        query: Mapping[str, str] | None = None,
        content_type: str = "application/json",
    ) -> Json:
        await asyncio.sleep(0)
        what = f"{method} {path}?{urlencode(query or {})}"
        try:
            status, answer = self.api.handle(method, path, query or {}, copy.deepcopy(body), content_type)
        except ConnectionError as error:
            raise ClusterUnavailable(f"{what}: no answer", status=0) from error
        if status >= 400:
            verb = "create" if method == "POST" else method.lower()
            raise translate_error(what, verb, status, json.dumps(answer).encode())
        return answer


class FakeNodes:
    """Nodes with GPUs, and the kubelets and the scheduler of them. clock: that of the FakeApi."""

    def __init__(self, api: FakeApi, *, gpus: int = 8) -> None:
        self._api = api
        self._gpus = gpus
        self.dead: set[str] = set()
        """Nodes that say nothing more; their pods stay as they are."""
        self.starts_ready = True
        """False: pods run, but do not become Ready."""

    def set_node(self, name: str, *, product: str = "NVIDIA-H200", ready: bool = True, **spec: Any) -> None:
        """Adds the node, or says something new of it."""
        amounts = {"nvidia.com/gpu": str(self._gpus)}
        condition = {"type": "Ready", "status": "True" if ready else "Unknown", "lastTransitionTime": self._api.stamp()}
        labels = {"kubernetes.io/hostname": name, "nvidia.com/gpu.product": product}
        status = {"capacity": amounts, "allocatable": amounts, "conditions": [condition]}
        self._api.put(NODES, {"metadata": {"name": name, "labels": labels}, "spec": spec, "status": status})

    def step(self) -> None:
        """Ends deleted pods, binds pending ones where GPUs are free, and makes bound ones run."""
        for pod in self.pods():
            node = pod["spec"].get("nodeName")
            if node in self.dead:
                continue
            if "deletionTimestamp" in pod["metadata"]:
                self._api.remove(PODS, pod["metadata"]["name"], pod["metadata"]["namespace"])
            elif node is None:
                self._bind(pod)
            elif pod["status"]["phase"] == "Pending":
                self._run(pod)
            elif self.starts_ready and self._may_be_ready(pod):
                self._set_ready(pod)

    def pods(self) -> list[Json]:
        """Pods that the operator made."""
        return [
            pod for pod in self._api.all(PODS) if pod["metadata"].get("labels", {}).get(MANAGED_BY_LABEL) == MANAGED_BY
        ]

    def change_pod(self, name: str, status: Mapping[str, Any]) -> None:
        """Sets fields of a pod's status."""
        pod = next(pod for pod in self.pods() if pod["metadata"]["name"] == name)
        self._api.put(PODS, {**pod, "status": {**pod["status"], **status}})

    def lose_readiness(self, name: str) -> None:
        """The pod's containers are not ready any more; no pod becomes Ready from now on."""
        self.starts_ready = False
        pod = next(pod for pod in self.pods() if pod["metadata"]["name"] == name)
        kept = [item for item in pod["status"]["conditions"] if item["type"] not in ("ContainersReady", "Ready")]
        self.change_pod(name, {"conditions": kept})

    def _bind(self, pod: Json) -> None:
        wanted = _gpus_of(pod)
        for node in self._api.all(NODES):
            name = node["metadata"]["name"]
            taken = sum(_gpus_of(other) for other in self.pods() if other["spec"].get("nodeName") == name)
            if name not in self.dead and taken + wanted <= self._gpus and not node["spec"].get("unschedulable"):
                pod["spec"]["nodeName"] = name
                condition = {"type": "PodScheduled", "status": "True", "lastTransitionTime": self._api.stamp()}
                self._api.put(PODS, {**pod, "status": {"phase": "Pending", "conditions": [condition]}})
                return
        text = f"0/{len(self._api.all(NODES))} nodes are available: insufficient nvidia.com/gpu"
        condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": text}
        condition["lastTransitionTime"] = self._api.stamp()
        if not pod["status"].get("conditions"):
            self._api.put(PODS, {**pod, "status": {"phase": "Pending", "conditions": [condition]}})

    def _run(self, pod: Json) -> None:
        now = self._api.stamp()
        ready = {"type": "Ready", "status": "False", "lastTransitionTime": now}
        main = pod["spec"]["containers"][0]["name"]
        container = {"name": main, "restartCount": 0, "state": {"running": {"startedAt": now}}}
        conditions = [*pod["status"]["conditions"], ready]
        status = {"phase": "Running", "podIP": "10.0.0.1", "conditions": conditions, "containerStatuses": [container]}
        self._api.put(PODS, {**pod, "status": status})

    def _may_be_ready(self, pod: Json) -> bool:
        return _condition(pod, "Ready") != "True" and pod["status"]["phase"] == "Running"

    def _set_ready(self, pod: Json) -> None:
        """Containers first; Ready once the gate is open, if there is one."""
        now = self._api.stamp()
        gated = bool(pod["spec"].get("readinessGates")) and _condition(pod, ACCEPTING_GATE) != "True"
        new = {"ContainersReady": "True", "Ready": "False" if gated else "True"}
        kept = [item for item in pod["status"]["conditions"] if item["type"] not in new]
        set_now = [{"type": kind, "status": word, "lastTransitionTime": now} for kind, word in new.items()]
        if any(_condition(pod, kind) != word for kind, word in new.items()):
            self._api.put(PODS, {**pod, "status": {**pod["status"], "conditions": [*kept, *set_now]}})


class FakeEngines:
    """The operator's EngineClient. Engines drain at once, unless a test says otherwise."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, float]] = []
        """Address and time-out of each Drain."""
        self.kinds: list[Kind] = []
        """Of the pool of each Drain."""
        self.done = asyncio.Event()
        """Drains report done once this is set."""
        self.done.set()
        self.is_unreachable = False
        self.states: dict[str, LoadState] = {}
        """By address; READY where none is given."""
        self.reports: dict[str, EngineReport] = {}
        """By address, but for the state; idle where none is given."""
        self.silent: set[str] = set()
        """Addresses that do not answer."""
        self.asked: list[tuple[str, Kind]] = []
        """Address and kind of pool of each report."""

    async def drain(self, address: str, *, kind: Kind, timeout_seconds: float) -> AsyncIterator[bool]:
        self.kinds.append(kind)
        self.calls.append((address, timeout_seconds))
        if self.is_unreachable:
            raise ConnectionError("UNAVAILABLE: connection refused")
        if not self.done.is_set():
            yield False
        await self.done.wait()
        yield True

    async def report(self, address: str, *, kind: Kind) -> EngineReport:
        if self.is_unreachable or address in self.silent:
            raise ConnectionError("UNAVAILABLE: connection refused")
        self.asked.append((address, kind))
        told = self.reports.get(address, EngineReport(backlog_milliseconds=0.0))
        return replace(told, state=self.states.get(address, LoadState.READY))


def _gpus_of(pod: Json) -> int:
    limits = [container.get("resources", {}).get("limits", {}) for container in pod["spec"]["containers"]]
    return sum(int(limit.get("nvidia.com/gpu", 0)) for limit in limits)


def _condition(pod: Json, kind: str) -> str:
    return next((item["status"] for item in pod["status"].get("conditions", []) if item["type"] == kind), "")


def _own_path(resource: Resource, body: Json, subresource: str = "") -> str:
    metadata = body["metadata"]
    return resource.path(namespace=metadata.get("namespace", ""), name=metadata["name"], subresource=subresource)
