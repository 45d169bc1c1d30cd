"""What the chart tells the operator: the settings file, as the operator itself reads it."""

from pathlib import Path
from typing import Any

import pytest

from prefill_operator.settings import OperatorSettings, load_settings
from prefill_plan.errors import ConfigError
from prefill_testing.chart import EVERYTHING, NAMESPACE, NAMESPACED, by_kind, operator_container, render


def settings_of(values: dict[str, Any], directory: Path) -> OperatorSettings:
    """Read as in the pod: file and environment."""
    objects = render(values)
    text = by_kind(objects, "ConfigMap")["prefill-settings"]["data"]["settings.yaml"]
    path = directory / "settings.yaml"
    path.write_text(text)
    return load_settings(path, environ={"POD_NAME": "prefill-1", "POD_NAMESPACE": NAMESPACE})


def test_defaults_of_chart_and_operator_differ_only_where_two_replicas_matter(tmp_path: Path) -> None:
    settings = settings_of({}, tmp_path)
    own = load_settings(None, environ={"POD_NAME": "prefill-1", "POD_NAMESPACE": NAMESPACE})
    differing = {name for name in OperatorSettings.__slots__ if getattr(settings, name) != getattr(own, name)}

    assert differing == {"readiness_gate"}
    assert settings.readiness_gate


def test_values_reach_the_settings(tmp_path: Path) -> None:
    settings = settings_of(
        {
            **EVERYTHING,
            "logging": {"level": "debug"},
            "leaderElection": {"leaseDurationSeconds": 6, "renewDeadlineSeconds": 4, "retryPeriodSeconds": 1},
            "gpuFaults": {"taints": ["sick"], "conditions": ["Broken"], "annotations": ["example.com/xid"]},
            "readinessGate": {"enabled": False},
            "security": {"allowedHostPathPrefixes": ["/mnt/models"], "allowPrivilegedFeatures": True},
        },
        tmp_path,
    )

    assert settings.log_level == "DEBUG"
    assert (settings.lease.duration_seconds, settings.lease.renew_deadline_seconds, settings.lease.retry_seconds) == (
        6,
        4,
        1,
    )
    assert settings.signals.maintenance_taints == ("cloud.google.com/impending-node-termination",)
    assert settings.signals.fault_taints == ("sick",)
    assert settings.signals.fault_conditions == ("Broken",)
    assert settings.signals.fault_annotations == ("example.com/xid",)
    assert settings.security.allowed_host_path_prefixes == ("/mnt/models",)
    assert settings.security.allow_privileged_features
    assert not settings.readiness_gate
    assert settings.prometheus_address == "http://prometheus.monitoring:9090"
    assert settings.rbac.keda
    assert settings.rbac.prometheus_operator
    assert settings.rbac.network_policies
    assert settings.namespaces == ()


def test_namespaced_releases_watch_their_namespaces(tmp_path: Path) -> None:
    assert settings_of(NAMESPACED, tmp_path).namespaces == ("team-a", "team-b")
    assert settings_of({"scope": {"namespaced": True}}, tmp_path).namespaces == (NAMESPACE,)


def test_settings_without_a_value_of_their_own_pass_through(tmp_path: Path) -> None:
    values = {"settings": {"workers": 8, "times": {"crashRestarts": 5}, "lease": {"retrySeconds": 1}}}
    settings = settings_of(values, tmp_path)

    assert settings.workers == 8
    assert settings.times.crash_restarts == 5
    assert settings.lease.retry_seconds == 1
    assert settings.lease.duration_seconds == 15


def test_misspelt_settings_end_the_operator(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="wrokers"):
        settings_of({"settings": {"wrokers": 8}}, tmp_path)


def test_the_file_is_the_one_that_is_mounted() -> None:
    container = operator_container(render({}))
    (mount,) = container["volumeMounts"]

    assert container["args"] == ["run", f"--settings={mount['mountPath']}/settings.yaml"]


def test_probes_and_metrics_use_the_port_of_the_settings(tmp_path: Path) -> None:
    values = {"metrics": {"port": 9000}}
    (port,) = operator_container(render(values))["ports"]

    assert port["containerPort"] == settings_of(values, tmp_path).port == 9000
