"""LeaderWorkerSet's controller on the bed: a checkout of the user's, built here, run as a process beside the API server.

Only `make bench-cluster-peer` calls it. Installed as its kustomization does, with two differences: webhooks go to this machine's
address, and their certificate comes from openssl.
"""

import base64
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import yaml

from prefill_bed.api import Json, documents
from prefill_bed.bed import Child
from prefill_bed.cluster import BedError, Cluster
from prefill_bed.waiting import until

GROUP = "leaderworkerset.x-k8s.io"
WEBHOOK_PORT = 9443
CERTIFICATE = (
    *("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=peer"),
    *("-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "tls.key", "-out", "tls.crt"),
)
OWN_PODS = {"matchExpressions": [{"key": "leaderworkerset.sigs.k8s.io/name", "operator": "Exists"}]}


def _run(*command: str, where: Path) -> None:
    done = subprocess.run(command, cwd=where, capture_output=True, text=True, check=False, timeout=1800)
    if done.returncode:
        raise BedError(f"{' '.join(command)} in {where} ended with {done.returncode}: {done.stderr[-2000:]}")


class PeerController:
    """Built, installed and running after construction, its rate limits lifted; `end` stops the process."""

    def __init__(self, cluster: Cluster, source: Path) -> None:
        self._cluster = cluster
        directory = cluster.directory / "peer"
        directory.mkdir(parents=True, exist_ok=True)
        binary = directory.parent.parent / "lws-manager"
        _run("go", "build", "-o", str(binary), "./cmd", where=source)
        _run("openssl", *CERTIFICATE, where=directory)
        cluster.api.create("namespaces", None, {"metadata": {"name": "lws-system"}})
        bases = source / "config" / "crd" / "bases"
        cluster.apply(*(item for file in sorted(bases.glob("*.yaml")) for item in documents(file)))
        self.child = Child(
            [
                str(binary),
                "--config",
                str(self._settings(directory)),
                "--kube-api-qps",
                "500",
                "--kube-api-burst",
                "500",
            ],
            directory / "manager.log",
            {"KUBECONFIG": str(cluster.kubeconfig)},
        )
        cluster.apply(*self._webhooks(source, (directory / "tls.crt").read_bytes()))
        until("the peer to admit a set", self._admits, seconds=120)

    def _settings(self, directory: Path) -> Path:
        file = directory / "config.yaml"
        settings = {
            "apiVersion": "config.lws.x-k8s.io/v1alpha1",
            "kind": "Configuration",
            "leaderElection": {"leaderElect": True},
            "internalCertManagement": {"enable": False},
            "webhook": {"port": WEBHOOK_PORT, "certDir": str(directory)},
            "metrics": {"bindAddress": "0"},
            "health": {"healthProbeBindAddress": "0"},
        }
        file.write_text(yaml.safe_dump(settings))
        return file

    def _webhooks(self, source: Path, certificate: bytes) -> Iterator[Json]:
        for item in documents(source / "config" / "webhook" / "manifests.yaml"):
            for hook in item["webhooks"]:
                path = hook["clientConfig"].pop("service")["path"]
                bundle = base64.b64encode(certificate).decode()
                hook["clientConfig"] = {"url": f"https://127.0.0.1:{WEBHOOK_PORT}{path}", "caBundle": bundle}
                if path.endswith("-pod"):
                    hook["objectSelector"] = OWN_PODS
            yield item

    def _admits(self) -> None:
        if not self.child.running:
            raise BedError(f"the peer ended: {self.child.tail()}")
        tried = self._cluster.kubectl(
            "create", "--dry-run=server", "-f", "-", objects=[group_set("trial", 1)], check=False
        )
        assert tried.returncode == 0, tried.stderr

    def end(self) -> None:
        self.child.end()


def group_set(name: str, size: int) -> Json:
    """One group of `size` pods, each with as many GPUs as a PE of the pools beside it."""
    limits = {"nvidia.com/gpu": "2"}
    container = {"name": "engine", "image": "engine:dev", "resources": {"limits": limits, "requests": limits}}
    template = {"size": size, "workerTemplate": {"spec": {"containers": [container]}}}
    return {
        "apiVersion": f"{GROUP}/v1",
        "kind": "LeaderWorkerSet",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"replicas": 1, "leaderWorkerTemplate": template},
    }


def source_of_peer() -> Path:
    """The checkout named by $LWS."""
    source = Path(os.environ.get("LWS", ""))
    if not (source / "config" / "crd" / "bases").is_dir():
        raise BedError(
            f"LWS={source}: no checkout of LeaderWorkerSet there; expected a clone of kubernetes-sigs/lws (measured: 060ab4d)"
        )
    return source
