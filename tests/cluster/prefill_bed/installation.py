"""The operator installed by its chart: as pods (real nodes), or as processes of this machine that have the chart's settings and
exactly the chart's rights (fake nodes, where no container runs)."""

import re
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from prefill_bed.api import Json, conditions
from prefill_bed.bed import Child
from prefill_bed.cluster import ROOT, BedError, Cluster
from prefill_bed.waiting import until

CHART = ROOT / "charts" / "prefill"
WORKLOADS = {"Deployment", "PodDisruptionBudget", "Service", "Pod"}
LEASE = "prefill-operator"
EXIT_LEASE_LOST = 3
_ROUNDS = "prefill_operator_resync_rounds_total"
CRD_NAMES = ("prefillpools.prefill.dev", "vepools.prefill.dev")

QUICK: Json = {
    "scope": {"namespaced": True},
    "replicaCount": 2,
    "security": {"allowedHostPathPrefixes": ["/models"]},
    "settings": {
        "statusSeconds": 0.2,
        "times": {
            "backoffSeconds": 2,
            "refusalRetrySeconds": 3,
            "crashLoopSeconds": 20,
            "unschedulableSeconds": 3,
            "unreadySeconds": 5,
            "unreachableSeconds": 3,
        },
    },
}
"""Chart values of a case: one namespace, and waits short enough to watch (C40)."""


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> Json:
    """Nested values; those of `above` win."""
    out = dict(below)
    for key, value in above.items():
        old = out.get(key)
        out[key] = merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return out


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


class Helm:
    """Helm 4 against one cluster."""

    def __init__(self, cluster: Cluster, binary: Path) -> None:
        self._cluster, self._binary = cluster, binary

    def run(self, *arguments: str, values: Mapping[str, Any] | None = None) -> str:
        extra = ["--values", "-"] if values is not None else []
        done = subprocess.run(
            [str(self._binary), "--kubeconfig", str(self._cluster.kubeconfig), *arguments, *extra],
            input=yaml.safe_dump(dict(values)) if values is not None else None,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, f"helm {' '.join(arguments)}: {done.stdout}{done.stderr}"
        return done.stdout

    def render(self, release: str, namespace: str, values: Mapping[str, Any]) -> list[Json]:
        text = self.run("template", release, str(CHART), "--namespace", namespace, values=values)
        return [document for document in yaml.safe_load_all(text) if document]


class LocalOperators:
    """One namespaced or cluster-wide installation without pods; `start` adds an operator process to it."""

    def __init__(self, cluster: Cluster, helm: Helm, namespace: str, values: Mapping[str, Any]) -> None:
        self._cluster, self.namespace = cluster, namespace
        self._directory = cluster.directory / "operators" / namespace
        self._directory.mkdir(parents=True, exist_ok=True)
        objects = helm.render(namespace, namespace, values)
        hooks = [o for o in objects if "helm.sh/hook" in o["metadata"].get("annotations", {})]
        keep = [o for o in objects if o["kind"] not in WORKLOADS and o not in hooks]
        for item in keep:
            if item["kind"] in ("ServiceAccount", "Role", "RoleBinding", "ConfigMap"):
                item["metadata"].setdefault("namespace", namespace)
        cluster.apply(*keep)
        for crd in CRD_NAMES:
            until(f"{crd} to be served", lambda crd=crd: self._established(crd))
        deployment = next(o for o in objects if o["kind"] == "Deployment")
        container = deployment["spec"]["template"]["spec"]["containers"][0]
        settings = next(o for o in keep if o["kind"] == "ConfigMap" and "settings.yaml" in o["data"])
        file = self._directory / "settings.yaml"
        file.write_text(settings["data"]["settings.yaml"])
        mounted = f"{container['volumeMounts'][0]['mountPath']}/settings.yaml"
        self._arguments = [argument.replace(mounted, str(file)) for argument in container["args"]]
        self.account = next(o["metadata"]["name"] for o in keep if o["kind"] == "ServiceAccount")
        self.children: dict[str, Child] = {}
        self._ports: dict[str, int] = {}

    def metrics(self, name: str) -> str:
        """The operator's own metrics page."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._ports[name]}/metrics", timeout=10) as answer:
            text: str = answer.read().decode()
        return text

    def metric(self, name: str, metric: str) -> float:
        """One metric of an operator's page, summed over its labels; 0 where nothing was counted yet."""
        found = re.findall(rf"^{metric}(?:{{[^}}]*}})? ([0-9.e+-]+)$", self.metrics(name), re.MULTILINE)
        return sum(map(float, found))

    def wait_resynced(self, name: str, *, rounds: int = 2) -> None:
        """Until it has compared its cache with the API server so often from now on. The first of them may have begun before,
        so it takes two for one that saw what is now; a case that asks for this shortens settings.resyncSeconds."""
        wanted = self.metric(name, _ROUNDS) + rounds

        def check() -> None:
            done = self.metric(name, _ROUNDS)
            assert done >= wanted, f"{done:.0f} of {wanted:.0f} rounds"

        until(f"{name} to compare its cache", check, seconds=120)

    def check_cache(self, name: str = "op-a") -> None:
        """Its cache equals the API server now, and no watch has missed anything since it leads (k8s.md 7.3 item 11)."""
        self.wait_resynced(name)
        missed = self.metric(name, "prefill_operator_resync_mismatch_total")
        assert missed == 0, f"{missed:.0f} objects had been missed: {self.children[name].tail()}"

    def start(self, name: str = "op-a", *, lead: bool = True) -> Child:
        """An operator process under its own identity; with `lead`, waits until it holds the Lease."""
        if name in self.children:
            self.children[name].end()
        api = self._cluster.identity(self.namespace, self.account)
        kubeconfig = api.write_kubeconfig(self._directory / f"{name}.kubeconfig", namespace=self.namespace)
        port = self._ports[name] = free_port()
        child = Child(
            [sys.executable, "-m", "prefill_operator", *self._arguments, "--set", f"port={port}"],
            self._directory / f"{name}.log",
            {
                "KUBECONFIG": str(kubeconfig),
                "POD_NAME": name,
                "POD_NAMESPACE": self.namespace,
                "PYTHONPATH": f"{ROOT / 'operator'}:{ROOT / 'engine'}",
            },
        )
        self.children[name] = child
        if lead:
            until(f"{name} to lead", lambda: self.leads(name), seconds=60)
        return child

    @property
    def user(self) -> str:
        return f"system:serviceaccount:{self.namespace}:{self.account}"

    def _established(self, crd: str) -> None:
        found = conditions(self._cluster.api.get("customresourcedefinitions", None, crd))
        assert found.get("Established", {}).get("status") == "True", found

    def restart_ended(self, name: str) -> bool:
        """What the kubelet does for a pod: a leader that lost its Lease has ended with 3 and is started again; True if so."""
        child = self.children[name]
        if child.running:
            return False
        assert child.end() == EXIT_LEASE_LOST, child.tail()
        self.start(name)
        return True

    def holder(self) -> str:
        lease = self._cluster.api.find("leases", self.namespace, LEASE)
        return str(lease["spec"].get("holderIdentity") or "") if lease else ""

    def start_standby(self, name: str) -> Child:
        """A second process, up and waiting for the Lease."""
        child = self.start(name, lead=False)

        def serves() -> None:
            try:
                self.metrics(name)
            except OSError as error:
                raise AssertionError(str(error)) from error

        until(f"{name} to stand by", serves, seconds=60)
        return child

    def leads(self, name: str) -> None:
        child = self.children[name]
        if not child.running:
            raise BedError(f"{name} ended with {child.process.returncode}: {child.tail()}")
        assert self.holder() == name, f"the Lease is held by {self.holder() or 'nobody'}"

    def tails(self, lines: int = 60) -> str:
        return "\n".join(f"## {name}\n{child.tail(lines)}" for name, child in self.children.items())

    def end(self) -> None:
        for child in self.children.values():
            child.end()


class Release:
    """The chart installed as a user installs it: operator pods from the image just built."""

    NAMESPACE = "prefill-system"
    NAME = "prefill"

    def __init__(self, cluster: Cluster, helm: Helm, host_paths: list[str]) -> None:
        self.cluster, self.helm = cluster, helm
        self.values: Json = {
            "image": {"registry": "docker.io/local", "repository": "prefill-operator", "tag": "dev"},
            "security": {"allowedHostPathPrefixes": host_paths},
            "settings": QUICK["settings"],
        }

    def install(self, **values: Any) -> str:
        """helm upgrade --install; what Helm printed, NOTES included."""
        self.values = merged(self.values, values)
        return self.helm.run(
            "upgrade", "--install", self.NAME, str(CHART), "--namespace", self.NAMESPACE, "--create-namespace",
            "--wait", "--timeout", "180s", values=self.values,
        )  # fmt: skip

    def uninstall(self) -> None:
        self.helm.run("uninstall", self.NAME, "--namespace", self.NAMESPACE, "--wait", "--timeout", "120s")

    def test(self) -> str:
        """helm test; what its pod printed. It fails where the pod does."""
        return self.helm.run("test", self.NAME, "--namespace", self.NAMESPACE, "--logs", "--timeout", "180s")

    def pods(self) -> list[Json]:
        """Of the operator."""
        labels = f"app.kubernetes.io/instance={self.NAME},app.kubernetes.io/component!=test"
        return self.cluster.api.list("pods", self.NAMESPACE, labels=labels)

    def lease(self) -> Json:
        """The Lease's spec: who leads, and since when."""
        spec: Json = self.cluster.api.get("leases", self.NAMESPACE, LEASE)["spec"]
        return spec

    def lease_holder(self) -> str:
        return str(self.lease().get("holderIdentity") or "")

    def leader(self) -> Json:
        """The pod that holds the Lease."""
        return self.cluster.api.get("pods", self.NAMESPACE, self.lease_holder())

    def logs(self) -> str:
        texts = [
            self.cluster.api.logs(self.NAMESPACE, pod["metadata"]["name"], "operator", lines=60) for pod in self.pods()
        ]
        return "\n".join(texts)
