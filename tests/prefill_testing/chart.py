"""The chart rendered by a real Helm, for tests. Both majors must give the same objects.

The binaries come from charts/tools/helm.lock (`make setup` unpacks them); there is no way around them and no skip.
"""

import functools
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "prefill"
RELEASE, NAMESPACE = "prefill", "prefill-system"
HELMS = ("helm3", "helm4")
KUBE_VERSION = "1.37.0"

Json = dict[str, Any]

# Everything the chart can make, so that no template stays unrendered.
EVERYTHING: Json = {
    "commonLabels": {"team": "inference"},
    "commonAnnotations": {"example.com/owner": "inference"},
    "imagePullSecrets": [{"name": "registry"}],
    "image": {"registry": "registry.example", "repository": "prefill/operator", "digest": "sha256:" + "0" * 64},
    "rbac": {"keda": True, "prometheusOperator": True, "networkPolicies": True},
    "serviceAccount": {"annotations": {"example.com/role": "operator"}},
    "podLabels": {"tier": "control"},
    "podAnnotations": {"example.com/note": "x"},
    "nodeSelector": {"kubernetes.io/os": "linux"},
    "tolerations": [{"key": "control", "operator": "Exists", "effect": "NoSchedule"}],
    "topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "topology.kubernetes.io/zone", "whenUnsatisfiable": "ScheduleAnyway"}
    ],
    "metrics": {
        "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}, "alertLabels": {"team": "inference"}},
        "grafanaDashboard": {"enabled": True, "annotations": {"grafana_folder": "Prefill"}},
    },
    "networkPolicy": {"enabled": True},
    "directory": {
        "enabled": True,
        "tlsSecretName": "kv-tls",
        "podLabels": {"tier": "kv"},
        "extraArgs": ["--max-blocks=1"],
    },
    "autoscaling": {"prometheus": {"serverAddress": "http://prometheus.monitoring:9090"}},
    "security": {"allowedHostPathPrefixes": ["/mnt/models"]},
    "maintenanceTaints": ["cloud.google.com/impending-node-termination"],
    "extraArgs": ["--set=workers=8"],
    "extraEnv": [{"name": "TZ", "value": "UTC"}],
    "extraVolumes": [{"name": "extra", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "extra", "mountPath": "/extra"}],
    "extraObjects": [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "{{ .Release.Name }}-extra"}}],
}
NAMESPACED: Json = {"scope": {"namespaced": True, "watchNamespaces": ["team-a", "team-b"]}}


def run_helm(helm: str, *args: str) -> subprocess.CompletedProcess[str]:
    """One Helm command; no plugins, repositories or clusters of the user come into play."""
    binary = ROOT / ".venv-tools" / "bin" / helm
    if not binary.exists():
        raise FileNotFoundError(f"{binary} is missing: `make setup` unpacks it (charts/tools/helm.lock)")
    with tempfile.TemporaryDirectory() as home:
        environment = {"HOME": home, "PATH": "/usr/bin:/bin"}
        return subprocess.run([binary, *args], capture_output=True, text=True, env=environment, timeout=60, check=False)


def helm_with_values(helm: str, verb: str, values: Mapping[str, Any], *flags: str) -> subprocess.CompletedProcess[str]:
    """`helm template` or `helm lint` of the chart with these values."""
    name = (RELEASE,) if verb == "template" else ()
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        json.dump(values, file)
        file.flush()
        return run_helm(helm, verb, *name, str(CHART), "--namespace", NAMESPACE, "--values", file.name, *flags)


def render(values: Mapping[str, Any], *, helm: str = "helm4", kube_version: str = KUBE_VERSION) -> list[Json]:
    """The objects of the chart, in order. Renderings are kept, since a test run asks for the same ones often."""
    return json.loads(_render(json.dumps(values, sort_keys=True), helm, kube_version))


@functools.cache
def _render(values: str, helm: str, kube_version: str) -> str:
    done = helm_with_values(helm, "template", json.loads(values), "--kube-version", kube_version)
    assert done.returncode == 0, done.stderr
    return json.dumps([item for item in yaml.load_all(done.stdout, Loader=yaml.CSafeLoader) if item])


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> Json:
    """Nested values as Helm merges them; those of `above` win."""
    out = dict(below)
    for key, value in above.items():
        old = out.get(key)
        out[key] = merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return out


def by_kind(objects: list[Json], kind: str) -> dict[str, Json]:
    """Objects of one kind by name; namespaced names of several namespaces as namespace/name."""
    found = [item for item in objects if item["kind"] == kind]
    names = [item["metadata"]["name"] for item in found]
    if len(set(names)) < len(names):
        names = [f"{item['metadata'].get('namespace')}/{item['metadata']['name']}" for item in found]
    return dict(zip(names, found, strict=True))


def operator_pod(objects: list[Json]) -> Json:
    return by_kind(objects, "Deployment")["prefill"]["spec"]["template"]


def operator_container(objects: list[Json]) -> Json:
    (container,) = operator_pod(objects)["spec"]["containers"]
    return container


def rule_groups(objects: list[Json]) -> list[Json]:
    (rule,) = by_kind(objects, "PrometheusRule").values()
    return rule["spec"]["groups"]


def dashboard_targets(dashboard: Json) -> Iterator[tuple[str, str]]:
    """(panel title, query) of a Grafana dashboard."""
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"]


def load_tool(name: str) -> ModuleType:
    """A script of charts/tools as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "charts" / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
