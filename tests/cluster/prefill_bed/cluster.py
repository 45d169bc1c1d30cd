"""One cluster: a control plane alone (fake kubelets) or with real nodes, started by the scripts in ../bed."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from prefill_bed.api import Api, Json, is_ready
from prefill_bed.waiting import until

SCRIPTS = Path(__file__).parents[1] / "bed"
ROOT = Path(__file__).parents[3]
HOST_IP = "10.250.0.1"
"""Address of this machine as pods see it."""
CONTROL_PLANE = ("kube-apiserver", "etcd", "kube-controller-manager", "kube-scheduler")
"""Names for process_id."""
CONTROLLERS = ("system:kube-controller-manager", "system:serviceaccount:kube-system:")
ROLES_LOADING = timedelta(seconds=2)
"""How near to a refusal of a controller of Kubernetes a refusal says nothing about our roles."""
DECISION = "authorization.k8s.io/decision"


class BedError(Exception):
    """The test bed itself failed: not a finding about the operator."""


def run_script(
    script: Path, *arguments: str, environment: Mapping[str, str] | None = None, seconds: float = 3600
) -> str:
    """Runs a script to its end; its words on stderr are part of the error when it fails."""
    done = subprocess.run(
        [str(script), *arguments],
        env={**os.environ, **(environment or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    if done.returncode:
        raise BedError(f"{script.name} {' '.join(arguments)} ended with {done.returncode}: {done.stderr[-3000:]}")
    return done.stdout


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """What kind of cluster a case needs. Cases with equal profiles share one."""

    nodes: int = 0
    """Real nodes; 0: control plane only, for fake kubelets."""
    grace_seconds: int = 20
    """Silence after which a node is NotReady (NODE_GRACE)."""
    images: tuple[str, ...] = ()
    """Image archives that every node imports."""
    audit: bool = False
    """One line per API request in log/audit.jsonl."""
    scheduler_qps: int = 50
    """Client limit of the scheduler; raised for runs at scale."""

    def environment(self) -> dict[str, str]:
        return {
            "NODE_GRACE": f"{self.grace_seconds}s",
            "CLUSTER_IMAGES": " ".join(self.images),
            "CLUSTER_AUDIT": "1" if self.audit else "",
            "SCHEDULER_QPS": str(self.scheduler_qps),
            "KCM_QPS": str(self.scheduler_qps),
            "KCM_BURST": str(2 * self.scheduler_qps),
        }


class Cluster:
    """A running cluster. `start` and `stop` are symmetrical; `stop` ends pods and removes state, but keeps the logs."""

    def __init__(self, profile: Profile, binaries: Path, directory: Path) -> None:
        self.profile, self.binaries, self.directory = profile, binaries, directory
        self._environment = {
            **profile.environment(),
            "CLUSTER_BIN": str(binaries),
            "CLUSTER_DIR": str(directory),
        }

    def start(self) -> None:
        self._script("up.sh", str(self.profile.nodes), seconds=600)
        until("the default service account", self._service_accounts_work, seconds=60)

    def stop(self) -> None:
        self._script("down.sh")

    def _script(self, name: str, *arguments: str, seconds: float = 300) -> None:
        run_script(SCRIPTS / name, *arguments, environment=self._environment, seconds=seconds)

    def _service_accounts_work(self) -> None:
        assert self.api.find("serviceaccounts", "default", "default"), "no default service account yet"

    @property
    def kubeconfig(self) -> Path:
        return self.directory / "admin.kubeconfig"

    @cached_property
    def api(self) -> Api:
        """Everything is allowed to this identity."""
        return Api.from_kubeconfig(self.kubeconfig)

    def kubectl(
        self, *arguments: str, objects: list[Json] | None = None, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """kubectl as a user runs it; `objects` go to its standard input as YAML."""
        done = subprocess.run(
            [str(self.binaries / "kubectl"), "--kubeconfig", str(self.kubeconfig), *arguments],
            input=None if objects is None else yaml.safe_dump_all(objects),
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert not check or done.returncode == 0, f"kubectl {' '.join(arguments)}: {done.stdout}{done.stderr}"
        return done

    def apply(self, *objects: Json, manager: str = "user") -> None:
        """Server-side apply, as `kubectl apply --server-side` does it."""
        self.kubectl(
            "apply", "--server-side", "--force-conflicts", "--field-manager", manager, "-f", "-", objects=list(objects)
        )

    def identity(self, namespace: str, service_account: str, *, seconds: int = 7200) -> Api:
        """A service account's own token, hence its RBAC."""
        request = {"spec": {"expirationSeconds": seconds}}
        answer = self.api.create("serviceaccounts/token", namespace, request, name=service_account)
        return self.api.as_user(answer["status"]["token"])

    def restart(self, component: str, *, down_seconds: float = 1) -> None:
        """Kills a part of the control plane (kube-apiserver, etcd, …) and starts it again after `down_seconds`."""
        self._script("restart.sh", component, str(down_seconds))

    def process_id(self, component: str) -> int:
        return int((self.directory / "pids" / component).read_text())

    def node(self, number: int, action: str = "") -> None:
        """`stop`: kubelet and containerd die, pods live on; `crash`: pods die too; no action: the node comes back, or is new."""
        self._script("node.sh", str(number), *([action] if action else []))

    def wait_node(self, number: int, *, seconds: float = 120) -> None:
        """Until node-`number` is Ready; a failure shows the end of its kubelet's log."""

        def check() -> None:
            log = (self.directory / "log" / f"kubelet-{number}.log").read_text(errors="replace")
            assert f"node-{number}" in self.ready_nodes(), f"NotReady; its kubelet says: {log[-1500:]}"

        until(f"node-{number} to be Ready", check, seconds=seconds)

    def device_faults(self, number: int, devices: list[int], *, kind: str = "gpu") -> None:
        """Devices of node-`number` that are unhealthy from now on; the kubelet hears of it within a second."""
        (self.directory / f"node-{number}" / f"faults-{kind}").write_text("".join(f"{device}\n" for device in devices))

    def run_on_node(self, number: int, *command: str) -> str:
        """As root on node-`number`: in the mount namespace of its kubelet."""
        done = subprocess.run(
            ["nsenter", "--mount", f"--target={self.process_id(f'kubelet-{number}')}", *command],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, f"{' '.join(command)} on node-{number}: {done.stdout}{done.stderr}"
        return done.stdout

    def engine_processes(self, pod: Json) -> list[int]:
        """Process ids of a pod's engine container, the first process of the container first."""
        return self._processes(pod, pod["status"]["containerStatuses"])

    def sidecar_processes(self, pod: Json, name: str) -> list[int]:
        """The same for a container that starts before the engine."""
        return self._processes(pod, [one for one in pod["status"]["initContainerStatuses"] if one["name"] == name])

    def _processes(self, pod: Json, statuses: list[Json]) -> list[int]:
        ids = {status["containerID"].rpartition("/")[2] for status in statuses if "containerID" in status}
        root = Path("/sys/fs/cgroup/pids") / pod["spec"]["nodeName"]
        files = [file for file in root.rglob("cgroup.procs") if file.parent.name in ids]
        return sorted(int(pid) for file in files for pid in file.read_text().split())

    def held_devices(self, pod: Json) -> list[int]:
        """Numbers of the pretended GPUs that a pod's first container holds (devices.go tells the container)."""
        environment = Path(f"/proc/{self.engine_processes(pod)[0]}/environ").read_bytes().split(b"\0")
        (held,) = [entry for entry in environment if entry.startswith(b"PRETEND_DEVICES=")]
        return [int(number) for number in held.partition(b"=")[2].split(b",")]

    @property
    def _audit_log(self) -> Path:
        return self.directory / "log" / "audit.jsonl"

    def audit_size(self) -> int:
        """Where the audit log ends now, for `since` below."""
        return self._audit_log.stat().st_size if self._audit_log.exists() else 0

    def audit(self, *, since: int = 0) -> Iterator[Json]:
        """Requests of any identity, oldest first (profile with audit)."""
        with self._audit_log.open() as file:
            file.seek(since)
            yield from (json.loads(line) for line in file if line.endswith("\n"))

    def refused(self, users: set[str], *, since: int) -> list[str]:
        """What these users had no right to, each once; a quota that refuses is another matter.

        A server that has just started refuses everybody, until it has read its roles: what is allowed at another time does not
        count, nor do moments in which its own controllers are refused.
        """
        decided = [(entry, entry.get("annotations", {}).get(DECISION)) for entry in self.audit(since=since)]
        allowed = {_request_of(entry) for entry, decision in decided if decision == "allow"}
        forbidden = [
            (datetime.fromisoformat(entry["stageTimestamp"]), entry)
            for entry, decision in decided
            if decision == "forbid"
        ]
        blind = [at for at, entry in forbidden if entry["user"]["username"].startswith(CONTROLLERS)]
        found = {
            _request_of(entry)
            for at, entry in forbidden
            if entry["user"]["username"] in users and not any(abs(at - other) <= ROLES_LOADING for other in blind)
        }
        return sorted(found - allowed)

    def writes(self, user: str, *, since: int) -> list[Json]:
        """Writes of one user, its Lease and events left out."""
        reads, aside = {"get", "list", "watch"}, {"leases", "events", "tokenreviews"}
        return [
            entry
            for entry in self.audit(since=since)
            if entry["user"]["username"] == user
            and entry["verb"] not in reads
            and entry.get("objectRef", {}).get("resource") not in aside
        ]

    def ready_nodes(self) -> set[str]:
        return {node["metadata"]["name"] for node in self.api.list("nodes") if is_ready(node)}

    def describe(self, namespace: str) -> str:
        """What one would look at after a failure: pools, pods, events, logs of containers that are not well."""
        parts = [f"# namespace {namespace}"]
        for resource in ("prefillpools", "vepools"):
            parts += [yaml.safe_dump(_short(pool)) for pool in self._list(resource, namespace)]
        pods = self._list("pods", namespace)
        parts += [_pod_line(pod) for pod in pods]
        events = sorted(
            self._list("events", namespace), key=lambda event: str(event.get("lastTimestamp") or event.get("eventTime"))
        )
        parts += [
            f"{e.get('type')} {e.get('reason')} {e['involvedObject'].get('name')}: {e.get('message')}"
            for e in events[-40:]
        ]
        if self.profile.nodes:
            parts += [self._pod_logs(pod) for pod in pods if not is_ready(pod)][:4]
        return "\n".join(parts)

    def _list(self, resource: str, namespace: str) -> list[Json]:
        try:
            return self.api.list(resource, namespace)
        except Exception:  # the description of a failure must not become another one
            return []

    def _pod_logs(self, pod: Json) -> str:
        name, namespace = pod["metadata"]["name"], pod["metadata"]["namespace"]
        texts = []
        for container in pod["spec"].get("initContainers", []) + pod["spec"]["containers"]:
            for previous in (True, False):
                try:
                    text = self.api.logs(namespace, name, container["name"], previous=previous, lines=40)
                except Exception:  # not started yet, or its node is gone
                    continue
                texts.append(f"## {name}/{container['name']}{' (before)' if previous else ''}\n{text}")
        return "\n".join(texts)


def _request_of(entry: Json) -> str:
    """Who asked for what, from an entry of the audit log."""
    return f"{entry['user']['username']} {entry['verb']} {entry['requestURI'].partition('?')[0]}"


def _short(pool: Json) -> Json:
    metadata = {key: pool["metadata"].get(key) for key in ("name", "generation", "annotations")}
    return {"metadata": metadata, "spec": pool["spec"], "status": pool.get("status", {})}


def _pod_line(pod: Json) -> str:
    status: dict[str, Any] = pod["status"]
    states = [{container["name"]: container.get("state")} for container in status.get("containerStatuses", [])]
    conditions = {
        c["type"]: c["status"] + (f" ({c.get('reason')}: {c.get('message')})" if c.get("message") else "")
        for c in status.get("conditions", [])
    }
    going = " deleting" if "deletionTimestamp" in pod["metadata"] else ""
    where = f"pod {pod['metadata']['name']} on {pod['spec'].get('nodeName')}{going}"
    return f"{where}: {status.get('phase')} {status.get('reason', '')} {states} {conditions}"


def end_stale(directory: Path, binaries: Path) -> None:
    """Ends what an interrupted run left behind in `directory`."""
    if directory.exists():
        run_script(SCRIPTS / "down.sh", environment={"CLUSTER_DIR": str(directory), "CLUSTER_BIN": str(binaries)})
        shutil.rmtree(directory, ignore_errors=True)
