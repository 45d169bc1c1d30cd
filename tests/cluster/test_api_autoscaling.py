"""The real HPA controller on a pool with spares (k8s.md 7.3 item 2), fed by a stub of the external metrics API."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest
from prefill_bed.api import conditions
from prefill_bed.bed import Child
from prefill_bed.cluster import SCRIPTS, Cluster
from prefill_bed.installation import LocalOperators
from prefill_bed.pools import PoolView, expect, gpu_pool
from prefill_bed.waiting import until

Install = Callable[..., LocalOperators]
PORT = 16999
METRIC = "prefill_pool_backlog_milliseconds"
TARGET = 100


class Demand:
    """What the metrics source says of the pool's backlog, as multiples of one PE's target."""

    def __init__(self, cluster: Cluster) -> None:
        self._path = cluster.directory / "external-metrics.json"

    def set(self, engines: float) -> None:
        self._path.write_text(json.dumps({METRIC: str(round(engines * TARGET))}))

    def away(self) -> None:
        self._path.unlink(missing_ok=True)


@pytest.fixture
def demand(control_plane: Cluster) -> Iterator[Demand]:
    """A served external metrics API."""
    folder = control_plane.directory
    key, certificate = folder / "metrics.key", folder / "metrics.crt"
    # fmt: off
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
         "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True,
    )
    stub = Child(
        [sys.executable, "-m", "prefill_bed.metrics_stub", "--values", str(folder / "external-metrics.json"),
         "--certificate", str(certificate), "--key", str(key), "--port", str(PORT)],
        folder / "log" / "metrics-stub.log", {"PYTHONPATH": str(SCRIPTS.parent)},
    )
    # fmt: on
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "external-metrics", "namespace": "kube-system"},
    }
    service["spec"] = {"type": "ExternalName", "externalName": "localhost", "ports": [{"port": PORT}]}
    name = "v1beta1.external.metrics.k8s.io"
    registration = {"apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService", "metadata": {"name": name}}
    registration["spec"] = {
        "group": "external.metrics.k8s.io",
        "version": "v1beta1",
        "groupPriorityMinimum": 100,
        "versionPriority": 100,
        "insecureSkipTLSVerify": True,
        "service": {"name": "external-metrics", "namespace": "kube-system", "port": PORT},
    }

    def available() -> None:
        found = conditions(control_plane.api.get("apiservices", None, name)).get("Available", {})
        assert found.get("status") == "True", found.get("message")

    source = Demand(control_plane)
    source.set(0)
    try:
        control_plane.apply(service, registration)
        until("the external metrics API", available, seconds=60)
        yield source
    finally:
        stub.end()
        control_plane.api.delete("apiservices", None, name)
        control_plane.api.delete("services", "kube-system", "external-metrics")


@pytest.fixture
def pool(install: Install, control_plane: Cluster, demand: Demand) -> PoolView:
    """Autoscaled between 1 and 6 PEs with 2 spares; scale-down waits for nothing."""
    operators = install()
    operators.start()
    view = PoolView(control_plane, operators.namespace, operators=operators)
    demand.set(3)
    scaling = {
        "actuator": "HPA",
        "minReplicas": 1,
        "maxReplicas": 6,
        "metrics": [{"name": "BacklogMillisecondsPerPE", "target": TARGET}],
        "scaleUpStabilizationSeconds": 0,
        "scaleDownStabilizationSeconds": 0,
        "maxScaleUpPerMinute": 10,
        "maxScaleDownPerMinute": 10,
    }
    view.create(gpu_pool(autoscaling=scaling, quota={"redundancy": {"spares": 2}}))
    view.wait_settled(5)
    return view


def hpa_status(view: PoolView) -> dict[str, object]:
    found: dict[str, object] = view.cluster.api.get("horizontalpodautoscalers", view.namespace, view.name).get(
        "status", {}
    )
    return found


def wait_for_replicas(view: PoolView, count: int) -> None:
    view.wait(
        f"spec.replicas {count}",
        lambda: expect(view.get()["spec"]["replicas"] == count, [view.get()["spec"]["replicas"], hpa_status(view)]),
        seconds=180,
    )


def test_follows_demand(pool: PoolView, demand: Demand) -> None:
    """Demand of 5 PEs, then of 2: replicas follow up and down, spares stay out of it, the condition says Active."""
    pool.wait_condition("AutoscalingActive", "True", "Active")
    demand.set(5)
    wait_for_replicas(pool, 5)
    pool.wait_settled(7)
    demand.set(2)
    wait_for_replicas(pool, 2)
    pool.wait_settled(4)


def test_spares_do_not_swing_the_autoscaler(pool: PoolView, demand: Demand) -> None:
    """Constant demand inside the tolerance over ten syncs: replicas stay (with spares in status.replicas they swing)."""
    demand.set(3.1)
    wait_for_replicas(pool, 3)
    begin = time.monotonic()
    while time.monotonic() - begin < 25:  # ten syncs of 2 s, and some more
        assert pool.get()["spec"]["replicas"] == 3
        assert pool.status()["replicas"] <= 3
        time.sleep(0.5)


def test_silent_metrics_source_scales_nothing(pool: PoolView, demand: Demand) -> None:
    """A metrics source that fails: replicas stay, the condition says MetricsUnavailable; it recovers by itself."""
    pool.wait_condition("AutoscalingActive", "True", "Active")
    demand.away()
    pool.wait_condition("AutoscalingActive", "False", "MetricsUnavailable", seconds=120)
    assert pool.get()["spec"]["replicas"] == 3
    assert len(pool.ready()) == 5
    demand.set(4)
    wait_for_replicas(pool, 4)
    pool.wait_condition("AutoscalingActive", "True", "Active")


def test_demand_above_the_ceiling(pool: PoolView, demand: Demand) -> None:
    """Demand beyond maxReplicas stops there."""
    demand.set(40)
    wait_for_replicas(pool, 6)
    pool.wait_settled(8)
