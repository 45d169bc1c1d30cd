"""A real Prometheus on this machine that scrapes the pods of one cluster as docs/autoscaling.md tells users to.

The trap: Debian builds it without the discovery of Kubernetes pods, so this module lists pods for it, with the labels that
discovery would give (`__meta_kubernetes_…`); the documented relabelling works on those.
"""

import json
import re
import signal
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from prefill_bed.api import ApiError, Json
from prefill_bed.bed import Child
from prefill_bed.cluster import HOST_IP, ROOT, SCRIPTS, BedError, Cluster, run_script
from prefill_bed.waiting import until

PORT = 16990
ADDRESS = f"http://{HOST_IP}:{PORT}"
"""Pods reach it there: the chart value autoscaling.prometheus.serverAddress."""
SCRAPE_SECONDS = 2
_DISCOVERY_SECONDS = 1.0


def documented_config() -> Json:
    """The prometheus.yml of docs/autoscaling.md."""
    text = (ROOT / "docs" / "autoscaling.md").read_text()
    (block,) = re.findall(r"```yaml\n(# prometheus\.yml\n.*?)```", text, flags=re.DOTALL)
    config: Json = yaml.safe_load(block)
    return config


def pod_targets(pod: Json) -> Iterator[Json]:
    """What Kubernetes discovery, role pod, makes of a pod: one target per port that its containers declare."""
    metadata = pod["metadata"]
    labels = {"__meta_kubernetes_namespace": metadata["namespace"], "__meta_kubernetes_pod_name": metadata["name"]}
    for name, value in metadata.get("labels", {}).items():
        labels["__meta_kubernetes_pod_label_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)] = value
    address = pod["status"].get("podIP")
    for container in pod["spec"]["containers"] if address else ():
        for port in container.get("ports", ()):
            named = {"__meta_kubernetes_pod_container_port_name": port.get("name", "")}
            yield {"targets": [f"{address}:{port['containerPort']}"], "labels": {**labels, **named}}


class Prometheus:
    """`start` and `stop` may follow each other; what was scraped is kept between them. `end` comes last."""

    def __init__(self, cluster: Cluster, directory: Path, rules: Json) -> None:
        """rules: groups of recording rules and alerts, as in a PrometheusRule's spec."""
        self._cluster, self._directory = cluster, directory
        self._binary = run_script(SCRIPTS / "prometheus.sh").strip()
        self._child: Child | None = None
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "rules.yaml").write_text(yaml.safe_dump(rules))
        (directory / "prometheus.yml").write_text(yaml.safe_dump(self._config()))
        self._ended = threading.Event()
        self._discovery = threading.Thread(target=self._discover, name="discovery")
        self._discovery.start()

    def _config(self) -> Json:
        """The documented one with quicker scrapes and our discovery."""
        config = documented_config()
        for job in config["scrape_configs"]:
            assert job.pop("kubernetes_sd_configs") == [{"role": "pod"}]
            job["file_sd_configs"] = [{"files": [str(self._directory / "pods.json")]}]
            job["scrape_interval"] = job["scrape_timeout"] = f"{SCRAPE_SECONDS}s"
        config["rule_files"] = [str(self._directory / "rules.yaml")]
        return config

    def _discover(self) -> None:
        path, partial = self._directory / "pods.json", self._directory / "pods.json.partial"
        while not self._ended.wait(_DISCOVERY_SECONDS):
            try:
                pods = self._cluster.api.list("pods")
            except (ApiError, OSError):
                continue
            text = json.dumps([target for pod in pods for target in pod_targets(pod)])
            if not path.exists() or path.read_text() != text:
                partial.write_text(text)
                partial.replace(path)

    def start(self) -> None:
        assert self._child is None, "it runs already"
        options = {
            "config.file": self._directory / "prometheus.yml",
            "storage.tsdb.path": self._directory / "data",
            "web.listen-address": f"{HOST_IP}:{PORT}",
            "log.level": "warn",
        }
        arguments = [f"--{name}={value}" for name, value in options.items()]
        self._child = Child([self._binary, *arguments], self._directory / "log")
        until("Prometheus to be ready", self._ready, seconds=60)

    def stop(self) -> None:
        if self._child is not None:
            self._child.end(signal.SIGTERM)
            self._child = None

    def end(self) -> None:
        self.stop()
        self._ended.set()
        self._discovery.join()

    def _ready(self) -> None:
        assert self._child is not None
        if not self._child.running:
            raise BedError(f"Prometheus ended: {self._child.tail()}")
        try:
            self._get("/-/ready")
        except OSError as error:
            raise AssertionError(str(error)) from error

    def _get(self, path: str) -> str:
        with urllib.request.urlopen(ADDRESS + path, timeout=10) as answer:
            text: str = answer.read().decode()
        return text

    def query(self, expression: str) -> list[Json]:
        """The instant vector: [{metric: labels, value: [time, text]}]."""
        answer: Any = json.loads(self._get("/api/v1/query?" + urllib.parse.urlencode({"query": expression})))
        found: list[Json] = answer["data"]["result"]
        return found

    def value(self, expression: str) -> float:
        """Of a query with exactly one answer."""
        found = self.query(expression)
        assert len(found) == 1, f"{expression}: {found}"
        return float(found[0]["value"][1])
