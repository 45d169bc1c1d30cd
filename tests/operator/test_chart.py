"""The chart as users meet it: lint, values, and what the operator's pods are like (k8s.md 7.1 layer 4)."""

import json
from typing import Any

import pytest
import yaml

from prefill_testing.chart import (
    CHART,
    EVERYTHING,
    HELMS,
    KUBE_VERSION,
    NAMESPACE,
    NAMESPACED,
    RELEASE,
    by_kind,
    helm_with_values,
    operator_container,
    operator_pod,
    render,
    run_helm,
)

SCENARIOS = {"defaults": {}, "everything": EVERYTHING, "namespaced": NAMESPACED}
MAJORS = {"helm3": "v3.", "helm4": "v4."}


@pytest.mark.parametrize("helm", HELMS)
def test_helm_is_of_the_major_it_is_called_after(helm: str) -> None:
    assert run_helm(helm, "version", "--short").stdout.startswith(MAJORS[helm])


@pytest.mark.parametrize("helm", HELMS)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_lint_finds_nothing(helm: str, scenario: str) -> None:
    done = helm_with_values(helm, "lint", SCENARIOS[scenario], "--strict", "--kube-version", KUBE_VERSION)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stdout + done.stderr


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_both_majors_render_the_same_objects(scenario: str) -> None:
    old, new = (render(SCENARIOS[scenario], helm=helm) for helm in HELMS)

    assert sorted(map(json.dumps, old)) == sorted(map(json.dumps, new))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown value": ({"replicas": 3}, "replicas"),
    "unknown nested value": ({"image": {"tagg": "1"}}, "tagg"),
    "misspelt permission": ({"rbac": {"node": True}}, "node"),
    "no replica": ({"replicaCount": 0}, "replicaCount"),
    "text for a number": ({"replicaCount": "2"}, "replicaCount"),
    "text for a switch": ({"crds": {"keep": "no"}}, "keep"),
    "unknown level": ({"logging": {"level": "loud"}}, "level"),
    "unknown pull policy": ({"image": {"pullPolicy": "Sometimes"}}, "pullPolicy"),
    "short digest": ({"image": {"digest": "sha256:12"}}, "digest"),
    "label that is no text": ({"commonLabels": {"a": 1}}, "commonLabels"),
    "namespace that can't exist": ({"scope": {"namespaced": True, "watchNamespaces": ["Team_A"]}}, "watchNamespaces"),
    "address without scheme": ({"autoscaling": {"prometheus": {"serverAddress": "prometheus:9090"}}}, "serverAddress"),
    "prefix with a way out": ({"security": {"allowedHostPathPrefixes": ["/mnt/../etc"]}}, "allowedHostPathPrefixes"),
    "relative prefix": ({"security": {"allowedHostPathPrefixes": ["mnt"]}}, "allowedHostPathPrefixes"),
    "directory without two ports": (
        {"directory": {"enabled": True, "port": 9000, "metricsPort": 9000}},
        "directory.metricsPort",
    ),
    "directory on a port of root's": ({"directory": {"port": 80}}, "port"),
    "interval without unit": ({"metrics": {"serviceMonitor": {"interval": "15"}}}, "interval"),
    "horizon beyond a day": ({"autoscaling": {"forecast": {"horizonSeconds": 90000}}}, "horizonSeconds"),
    "lease shorter than its renewal": ({"leaderElection": {"leaseDurationSeconds": 8}}, "leaseDurationSeconds"),
    "namespaces in cluster-wide mode": ({"scope": {"watchNamespaces": ["a"]}}, "watchNamespaces"),
    "monitor without a service": (
        {"metrics": {"enabled": False, "serviceMonitor": {"enabled": True}}},
        "serviceMonitor",
    ),
}


@pytest.mark.parametrize("helm", HELMS)
@pytest.mark.parametrize("case", REFUSED)
def test_values_are_refused_by_name(helm: str, case: str) -> None:
    values, name = REFUSED[case]
    done = helm_with_values(helm, "template", values)

    assert done.returncode != 0
    assert name in done.stderr


def test_a_cluster_that_is_too_old_is_refused() -> None:
    done = helm_with_values("helm4", "template", {}, "--kube-version", "1.28.0")

    assert done.returncode != 0
    assert "1.29.0" in done.stderr


def test_operator_pods_are_confined() -> None:
    pod, container = operator_pod(render({}))["spec"], operator_container(render({}))

    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert "memory" in container["resources"]["limits"]
    assert all("emptyDir" not in volume and "hostPath" not in volume for volume in pod["volumes"])


def test_operator_replicas_survive_node_drains() -> None:
    objects = render({})
    (deployment,) = by_kind(objects, "Deployment").values()
    (budget,) = by_kind(objects, "PodDisruptionBudget").values()
    (term,) = operator_pod(objects)["spec"]["affinity"]["podAntiAffinity"][
        "preferredDuringSchedulingIgnoredDuringExecution"
    ]

    assert deployment["spec"]["replicas"] == 2
    assert budget["spec"]["maxUnavailable"] == 1
    assert budget["spec"]["selector"] == deployment["spec"]["selector"]
    assert term["podAffinityTerm"]["labelSelector"] == deployment["spec"]["selector"]
    assert deployment["spec"]["selector"]["matchLabels"].items() <= operator_pod(objects)["metadata"]["labels"].items()


def test_selector_is_frozen() -> None:
    """The selector of a Deployment is immutable: an upgrade that changes it fails (k8s.md 2, row 16)."""
    for name, component in (("prefill", "operator"), ("prefill-directory", "directory")):
        assert by_kind(render(EVERYTHING), "Deployment")[name]["spec"]["selector"]["matchLabels"] == {
            "app.kubernetes.io/name": "prefill",
            "app.kubernetes.io/instance": RELEASE,
            "app.kubernetes.io/component": component,
        }


def test_image_is_named_by_digest_tag_or_version() -> None:
    assert operator_container(render({}))["image"] == "prefill-operator:0.1.0"
    assert operator_container(render({"image": {"tag": "1.2"}}))["image"] == "prefill-operator:1.2"
    assert operator_container(render(EVERYTHING))["image"] == "registry.example/prefill/operator@sha256:" + "0" * 64


def test_changed_settings_restart_the_operator() -> None:
    first, second = (operator_pod(render(values)) for values in ({}, {"maintenanceTaints": ["going-away"]}))

    assert (
        first["metadata"]["annotations"]["checksum/settings"] != second["metadata"]["annotations"]["checksum/settings"]
    )


def test_every_port_that_is_named_exists() -> None:
    objects = render({**EVERYTHING, "directory": {"enabled": False}})
    container = operator_container(objects)
    named = {container[probe]["httpGet"]["port"] for probe in ("livenessProbe", "readinessProbe")}
    named |= {
        port["targetPort"] for service in by_kind(objects, "Service").values() for port in service["spec"]["ports"]
    }

    assert named == {port["name"] for port in container["ports"]}


def test_namespaced_objects_name_their_namespace() -> None:
    cluster_scoped = {"ClusterRole", "ClusterRoleBinding", "CustomResourceDefinition"}
    own = [item for item in render({**EVERYTHING, "extraObjects": []}) if item["kind"] not in cluster_scoped]

    assert own
    assert {item["metadata"].get("namespace") for item in own} == {NAMESPACE}


def test_common_metadata_reaches_every_object() -> None:
    own = render({**EVERYTHING, "extraObjects": []})
    ours = [item["metadata"] for item in own if item["kind"] != "CustomResourceDefinition"]

    assert all(metadata["labels"]["team"] == "inference" for metadata in ours)
    assert all(metadata["annotations"]["example.com/owner"] == "inference" for metadata in ours)


def test_extra_objects_are_templates() -> None:
    assert f"{RELEASE}-extra" in by_kind(render(EVERYTHING), "ConfigMap")


def test_notes_name_the_next_commands() -> None:
    """Helm 4 only: Helm 3 asks a cluster even in a dry run."""
    done = helm_with_values("helm4", "install", {}, "--dry-run=client", "--generate-name")

    assert "helm test" in done.stdout
    assert "kubectl get prefill" in done.stdout


def test_chart_version_follows_the_project() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = (CHART.parents[1] / "pyproject.toml").read_text()

    assert f'version = "{chart["appVersion"]}"' in project
