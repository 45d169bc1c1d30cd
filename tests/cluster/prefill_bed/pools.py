"""Pools under test: their manifests, and what one reads off their pods and status."""

import http.client
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prefill_bed.api import ApiError, Json, conditions, is_ready
from prefill_bed.cluster import Cluster
from prefill_bed.engine_pod import IMAGE, SITE_PACKAGES
from prefill_bed.installation import LocalOperators, merged
from prefill_bed.waiting import until

API_VERSION = "prefill.dev/v1alpha1"


def gpu_pool(name: str = "flash", **spec: Any) -> Json:
    """A pool of the released model on H200 nodes (fake ones run no container), with times short enough for a test."""
    base = {
        "replicas": 3,
        "model": {"name": "deepseek-v4.1-flash", "revision": "r1", "source": {"hostPath": {"path": "/models/flash"}}},
        "gpu": {"product": "NVIDIA-H200"},
        "quota": {"redundancy": {"mode": "Fixed", "spares": 1}},
        "rollout": {"minReadySeconds": 1, "progressDeadlineSeconds": 600},
        "lifecycle": {"nodeLostGraceSeconds": 5, "drainTimeoutSeconds": 20, "maxConcurrentLoads": 8},
        "engine": {"image": "registry.example/engine:1", "cpuPerGPU": 1, "memoryPerGPU": "1Gi"},
    }
    return {"apiVersion": API_VERSION, "kind": "PrefillPool", "metadata": {"name": name}, "spec": merged(base, spec)}


class PoolView:
    """One pool as its user sees it."""

    def __init__(
        self,
        cluster: Cluster,
        namespace: str,
        name: str = "flash",
        *,
        resource: str = "prefillpools",
        operators: LocalOperators | None = None,
    ) -> None:
        self.cluster, self.namespace, self.name, self.resource = cluster, namespace, name, resource
        self._operators = operators

    @property
    def installation(self) -> LocalOperators:
        assert self._operators is not None, "this pool's operator is not a process of ours"
        return self._operators

    def create(self, pool: Json) -> Json:
        return self.cluster.api.create(self.resource, self.namespace, pool, fieldValidation="Strict")

    def change(self, **spec: Any) -> Json:
        """Merge patch of the spec; None removes a field. A conflict of writers is tried again by the API server itself."""
        return self.cluster.api.patch(self.resource, self.namespace, self.name, {"spec": spec})

    def get(self) -> Json:
        return self.cluster.api.get(self.resource, self.namespace, self.name)

    def status(self) -> Json:
        status: Json = self.get().get("status", {})
        return status

    def pods(self) -> list[Json]:
        """All pods that carry the pool's label, oldest first."""
        pods = self.cluster.api.list("pods", self.namespace, labels=f"prefill.dev/pool={self.name}")
        return sorted(pods, key=lambda pod: (pod["metadata"]["creationTimestamp"], pod["metadata"]["name"]))

    def live(self) -> list[Json]:
        return [pod for pod in self.pods() if "deletionTimestamp" not in pod["metadata"]]

    def ready(self) -> list[Json]:
        return [pod for pod in self.pods() if is_ready(pod)]

    def names(self) -> list[str]:
        return [pod["metadata"]["name"] for pod in self.live()]

    def condition(self, kind: str) -> Json:
        found: Json = conditions(self.get()).get(kind, {})
        return found

    def events(self) -> list[Json]:
        events = self.cluster.api.list("events", self.namespace)
        return [event for event in events if event["involvedObject"].get("name") == self.name]

    def wait_event(self, reason: str, *, seconds: float = 30) -> str:
        """Until an event of this reason is there about the pool; its message."""

        def check() -> str:
            messages = {event["reason"]: str(event["message"]) for event in self.events()}
            assert reason in messages, sorted(messages)
            return messages[reason]

        message: str = self.wait(f"an event {reason}", check, seconds=seconds)
        return message

    def row(self) -> dict[str, str]:
        """What `kubectl get -o wide` shows of the pool, by column; an empty cell is ""."""
        arguments = ("get", self.resource, self.name, "--namespace", self.namespace, "--output", "wide")
        header, line = self.cluster.kubectl(*arguments).stdout.splitlines()
        columns = list(re.finditer(r"\S+", header))
        ends = [column.start() for column in columns[1:]] + [len(line)]
        return {column[0]: line[column.start() : end].strip() for column, end in zip(columns, ends, strict=True)}

    def wait_row(self, *, seconds: float = 30, **columns: object) -> None:
        """Until `kubectl get` says this, with as many READY as there are ready pods: `wait_row(UP_TO_DATE=2, REASON="AllReady")`.

        What users look at first must not lag behind, hence the short deadline.
        """
        wanted = {name.replace("_", "-"): str(value) for name, value in columns.items()}

        def check() -> None:
            shown, ready = self.row(), len(self.ready())
            wrong = {name: (shown.get(name), value) for name, value in wanted.items() if shown.get(name) != value}
            assert not wrong, f"shown and wanted: {wrong}; {shown}"
            assert shown["READY"] == str(ready), f"{ready} pods are ready; {shown}"

        self.wait(f"kubectl get to show {wanted}", check, seconds=seconds)

    def wait(self, what: str, check: Callable[[], Any], *, seconds: float = 120) -> Any:
        return until(f"pool {self.name}: {what}", check, seconds=seconds)

    def wait_condition(self, kind: str, status: str, reason: str = "", *, seconds: float = 120) -> Json:
        """The condition, once it has this status (and reason) for the current generation."""

        def check() -> Json:
            pool = self.get()
            found: Json = conditions(pool).get(kind, {})
            seen = f"{kind}={found.get('status')}/{found.get('reason')}: {found.get('message')}"
            assert found.get("status") == status, seen
            assert not reason or found.get("reason") == reason, seen
            assert found.get("observedGeneration") == pool["metadata"]["generation"], f"{seen} (older generation)"
            return found

        found: Json = self.wait(f"{kind}={status} {reason}", check, seconds=seconds)
        return found

    def wait_settled(self, total: int, *, seconds: float = 120) -> None:
        """Ready and Redundant True, exactly `total` pods, all of them ready and none on its way out."""

        def check() -> None:
            pods = self.pods()
            ready = sum(is_ready(pod) for pod in pods)
            assert len(pods) == ready == total, f"{ready} of {len(pods)} pods ready, {total} expected"

        self.wait(f"{total} ready pods", check, seconds=seconds)
        self.wait_condition("Ready", "True", seconds=30)
        self.wait_condition("Redundant", "True", seconds=30)
        self.wait_condition("Progressing", "True", "Complete", seconds=30)


class ReadyWatch:
    """Follows the ready pods of a pool by a watch, so that no dip is missed between two looks.

    `lowest` is the least count since `__enter__`. While the API server is away nothing changes in its view.
    """

    def __init__(self, view: PoolView) -> None:
        self._view = view
        self._ready: dict[str, bool] = {}
        self._stop = False
        self._listed = threading.Event()
        self.lowest = 0

    def __enter__(self) -> "ReadyWatch":
        threading.Thread(target=self._follow, daemon=True).start()
        assert self._listed.wait(30), "the pod watch did not start"
        self.lowest = sum(self._ready.values())
        return self

    def __exit__(self, *_: object) -> None:
        self._stop = True

    def _follow(self) -> None:
        labels = f"prefill.dev/pool={self._view.name}"
        while not self._stop:
            try:
                known = self._view.cluster.api.list("pods", self._view.namespace, labels=labels)
                self._ready = {pod["metadata"]["uid"]: is_ready(pod) for pod in known}
                self._note()
                self._listed.set()
                for kind, pod in self._view.cluster.api.watch("pods", self._view.namespace, labels):
                    if self._stop:
                        return
                    if kind == "ERROR":
                        break
                    self._ready[pod["metadata"]["uid"]] = kind != "DELETED" and is_ready(pod)
                    self._note()
            except (ApiError, OSError, ValueError, http.client.HTTPException):
                time.sleep(0.2)

    def _note(self) -> None:
        self.lowest = min(self.lowest, sum(self._ready.values()))


def wait_all(cluster: Cluster, resource: str, namespace: str, condition: str, count: int, *, seconds: float) -> None:
    """Until so many objects have the condition. Follows a watch, since listing hundreds of them again and again would be a good
    part of the load that is measured; it is renewed every 30 s, each time with a look at the whole."""
    found, end = set[str](), time.monotonic() + seconds
    while len(found) < count and time.monotonic() < end:
        for kind, item in cluster.api.watch(resource, namespace, seconds=30):
            if kind == "ERROR":
                break
            is_there = kind != "DELETED" and conditions(item).get(condition, {}).get("status") == "True"
            (found.add if is_there else found.discard)(item["metadata"]["name"])
            if len(found) >= count:
                return
    bad = [pod["metadata"]["name"] for pod in cluster.api.list("pods", namespace) if not is_ready(pod)]
    shown = ", ".join(bad[:10])
    raise AssertionError(
        f"{len(found)} of {count} {resource} {condition} after {seconds:.0f} s; {len(bad)} pods not ready: {shown}"
    )


def expect(condition: object, seen: object) -> None:
    """An assertion as an expression, for the checks of waits."""
    assert condition, seen


def cpu_pool(name: str, checkpoint: Path, **spec: Any) -> Json:
    """The CPU profile with the tiny checkpoint: real engine pods (C27), third-party packages from this machine."""
    base = {
        "replicas": 2,
        "model": {
            "name": "tiny",
            "architecture": "test-tiny",
            "revision": "r1",
            "source": {"hostPath": {"path": str(checkpoint)}},
        },
        "context": {"maxTokens": 4096, "chunkTokensPerGPU": 512, "keepTokens": 24},
        "kvCache": {"tokensPerGPU": 16384, "sequencesPerGPU": 1},
        "quota": {"redundancy": {"mode": "Fixed", "spares": 1}},
        "rollout": {"minReadySeconds": 1, "progressDeadlineSeconds": 900},
        "lifecycle": {
            "nodeLostGraceSeconds": 5,
            "drainTimeoutSeconds": 15,
            "loadTimeoutSeconds": 300,
            "maxConcurrentLoads": 2,
        },
        "scheduling": {"placement": "Spread"},
        "engine": {
            "image": IMAGE,
            "imagePullPolicy": "IfNotPresent",
            "device": "cpu",
            "resources": {"requests": {"cpu": "50m", "memory": "512Mi"}, "limits": {"memory": "3Gi"}},
        },
        "podTemplate": {
            "spec": {
                "volumes": [{"name": "site", "hostPath": {"path": str(SITE_PACKAGES), "type": "Directory"}}],
                "containers": [
                    {
                        "name": "engine",
                        "volumeMounts": [{"name": "site", "mountPath": "/opt/site", "readOnly": True}],
                    }
                ],
            }
        },
    }
    return {"apiVersion": API_VERSION, "kind": "PrefillPool", "metadata": {"name": name}, "spec": merged(base, spec)}


def cpu_encoder_pool(name: str, checkpoint: Path, **spec: Any) -> Json:
    """Two encoders on CPUs, third-party packages from this machine. An image may take two minutes: cores are shared."""
    base = {
        "replicas": 2,
        "model": {"name": "tiny", "revision": "r1", "source": {"hostPath": {"path": str(checkpoint)}}},
        "quota": {"spares": 0},
        "rollout": {"minReadySeconds": 1, "progressDeadlineSeconds": 900},
        "lifecycle": {"drainTimeoutSeconds": 60, "loadTimeoutSeconds": 300, "nodeLostGraceSeconds": 5},
        "scheduling": {"placement": "Spread"},
        "encoder": {
            "image": IMAGE,
            "imagePullPolicy": "IfNotPresent",
            "device": "cpu",
            "cpu": "50m",
            "memory": "3Gi",
            "args": ["--set", "image_seconds=120"],
        },
        "podTemplate": {
            "spec": {
                "volumes": [{"name": "site", "hostPath": {"path": str(SITE_PACKAGES), "type": "Directory"}}],
                "containers": [
                    {
                        "name": "encoder",
                        "volumeMounts": [{"name": "site", "mountPath": "/opt/site", "readOnly": True}],
                    }
                ],
            }
        },
    }
    return {"apiVersion": API_VERSION, "kind": "VEPool", "metadata": {"name": name}, "spec": merged(base, spec)}
