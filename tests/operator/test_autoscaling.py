"""HPA and ScaledObject: sums only, the right queries and multipliers, and no scale-down on lost metrics."""

import re
from typing import Any

import pytest

from prefill_operator.errors import PoolInvalid
from prefill_operator.pool_api import MetricName
from prefill_operator.render_autoscaling import render_hpa, render_scaled_object, scaling_targets
from prefill_testing.pools import CPU_BODY, OPEN_POLICY, PREFILL_BODY, STRICT_POLICY, VE_BODY, plan_of, pool_of

ALL_METRICS = [
    {"name": "BacklogMillisecondsPerPE", "target": 300},
    {"name": "RowsWaitingPerGPU", "target": 1000},
    {"name": "ForecastRowsPerSecondPerGPU", "target": 12_000},
]
AUTOSCALING: dict[str, Any] = {"actuator": "KEDA", "minReplicas": 2, "maxReplicas": 9, "metrics": ALL_METRICS}


def _scaled_object(changes: dict[str, Any] | None = None, *, freeze: bool = False) -> dict[str, Any]:
    pool = pool_of(PREFILL_BODY, {"autoscaling": {**AUTOSCALING, **(changes or {})}})
    return render_scaled_object(pool, plan_of(pool), OPEN_POLICY, freeze_scale_down=freeze)


def _hpa(body: Any, autoscaling: dict[str, Any], *, freeze: bool = False) -> dict[str, Any]:
    pool = pool_of(body, {"autoscaling": autoscaling})
    return render_hpa(pool, plan_of(pool), freeze_scale_down=freeze)


def test_queries_select_the_pool_and_are_never_empty() -> None:
    triggers = _scaled_object()["spec"]["triggers"]

    assert [trigger["metadata"]["query"] for trigger in triggers] == [
        '1000 * sum(pe_predicted_wait_seconds{namespace="ns",pool="flash"}) or vector(0)',
        'sum(pe_rows_waiting{namespace="ns",pool="flash"}) or vector(0)',
        'sum(prefill_pool_forecast_rows_per_second{namespace="ns",pool="flash"}) or vector(0)',
    ]
    assert {trigger["metricType"] for trigger in triggers} == {"AverageValue"}
    assert {trigger["metadata"]["serverAddress"] for trigger in triggers} == {"http://prometheus:9090"}


@pytest.mark.parametrize(
    ("body", "spec", "factor"),
    [
        (PREFILL_BODY, {}, 4),
        (PREFILL_BODY, {"expertParallel": {"size": 8}}, 8),
        (CPU_BODY, {"expertParallel": {"size": 4}}, 1),
    ],
    ids=["planned", "ep8", "cpu"],
)
def test_targets_per_gpu_are_those_of_a_pod(body: Any, spec: dict[str, Any], factor: int) -> None:
    pool = pool_of(body, {**spec, "autoscaling": AUTOSCALING})

    assert [target.per_pod for target in scaling_targets(pool, plan_of(pool))] == [300, 1000 * factor, 12_000 * factor]


def test_lost_metrics_never_scale_down() -> None:
    assert _scaled_object()["spec"]["fallback"] == {
        "failureThreshold": 3,
        "replicas": 2,
        "behavior": "currentReplicasIfHigher",
    }


def test_the_pool_itself_is_scaled() -> None:
    spec = _scaled_object()["spec"]

    assert spec["scaleTargetRef"] == {"apiVersion": "prefill.dev/v1alpha1", "kind": "PrefillPool", "name": "flash"}
    assert (spec["minReplicaCount"], spec["maxReplicaCount"]) == (2, 9)
    assert spec["advanced"]["restoreToOriginalReplicaCount"] is False


def test_hpa_asks_for_average_values_of_external_metrics() -> None:
    spec = _hpa(PREFILL_BODY, {**AUTOSCALING, "actuator": "HPA"})["spec"]

    assert [metric["type"] for metric in spec["metrics"]] == ["External"] * 3
    assert [metric["external"]["target"] for metric in spec["metrics"]] == [
        {"type": "AverageValue", "averageValue": value} for value in ("300", "4000", "48000")
    ]
    assert spec["metrics"][0]["external"]["metric"] == {
        "name": "prefill_pool_backlog_milliseconds",
        "selector": {"matchLabels": {"pool": "flash"}},
    }
    assert (spec["minReplicas"], spec["maxReplicas"]) == (2, 9)


def test_encoders_scale_by_patches() -> None:
    pool = pool_of(VE_BODY, {"autoscaling": {"actuator": "KEDA", "maxReplicas": 4, "targetPendingPatchesPerVE": 500}})
    (trigger,) = render_scaled_object(pool, plan_of(pool), OPEN_POLICY, freeze_scale_down=False)["spec"]["triggers"]

    assert trigger["metadata"]["query"] == 'sum(ve_patches_queued{namespace="ns",pool="flash"}) or vector(0)'
    assert trigger["metadata"]["threshold"] == "500"


def test_behaviour_follows_the_spec() -> None:
    changes = {
        "scaleUpStabilizationSeconds": 0,
        "scaleDownStabilizationSeconds": 1800,
        "maxScaleUpPerMinute": 8,
        "maxScaleDownPerMinute": 2,
    }
    keda = _scaled_object(changes)["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]

    assert keda == _hpa(PREFILL_BODY, {**AUTOSCALING, **changes})["spec"]["behavior"]
    assert keda["scaleUp"]["stabilizationWindowSeconds"] == 0
    assert keda["scaleUp"]["policies"] == [{"type": "Pods", "value": 8, "periodSeconds": 60}]
    assert keda["scaleDown"]["stabilizationWindowSeconds"] == 1800
    assert keda["scaleDown"]["policies"] == [{"type": "Pods", "value": 2, "periodSeconds": 60}]


@pytest.mark.parametrize(("freeze", "policy"), [(True, "Disabled"), (False, "Max")])
def test_scale_down_is_frozen_while_the_ep_changes(freeze: bool, policy: str) -> None:
    keda = _scaled_object(freeze=freeze)["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    hpa = _hpa(PREFILL_BODY, AUTOSCALING, freeze=freeze)["spec"]["behavior"]

    assert keda["scaleDown"]["selectPolicy"] == hpa["scaleDown"]["selectPolicy"] == policy
    assert keda["scaleUp"]["selectPolicy"] == "Max"


def test_keda_without_a_prometheus_is_refused() -> None:
    pool = pool_of(PREFILL_BODY, {"autoscaling": AUTOSCALING})
    with pytest.raises(PoolInvalid, match=r"autoscaling\.prometheus\.serverAddress is empty"):
        render_scaled_object(pool, plan_of(pool), STRICT_POLICY, freeze_scale_down=False)


def test_no_object_of_an_autoscaled_pool_says_replicas() -> None:
    """The autoscaler writes spec.replicas through /scale; a manifest that names it would undo that (C30)."""
    assert "replicas" not in _scaled_object()["spec"]
    assert "replicas" not in _hpa(PREFILL_BODY, AUTOSCALING)["spec"]


def test_pool_without_autoscaling_has_nothing_to_render() -> None:
    pool = pool_of(PREFILL_BODY)
    with pytest.raises(ValueError, match=r"no spec\.autoscaling"):
        render_hpa(pool, plan_of(pool), freeze_scale_down=False)


def test_metrics_have_one_unit_which_is_in_their_names() -> None:
    """k8s.md 2 row 30: a sum over the pool, divided by what one pod or one GPU shall bear."""
    for metric in MetricName:
        assert re.fullmatch(r"(BacklogMilliseconds|RowsWaiting|ForecastRowsPerSecond)Per(PE|GPU)", metric)
    names = {metric["external"]["metric"]["name"] for metric in _hpa(PREFILL_BODY, AUTOSCALING)["spec"]["metrics"]}
    assert names == {
        "prefill_pool_backlog_milliseconds",
        "prefill_pool_rows_waiting",
        "prefill_pool_forecast_rows_per_second",
    }
