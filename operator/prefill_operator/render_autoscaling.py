"""HorizontalPodAutoscaler or KEDA ScaledObject of a pool (k8s.md 3.4, 6.4; C30, C48).

Both scale the pool through /scale and by sums only (AverageValue): the spares in status are hidden from /scale, and a Value or
Pods metric would spend them as capacity. The trap: queries end in `or vector(0)`, so that an idle pool reads 0 and not "no
data"; a metrics source that does not answer is an error, and then nothing is scaled down.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from prefill_operator.api import Pool
from prefill_operator.api_parts import AutoscalingSpec
from prefill_operator.engine_config import num_ranks
from prefill_operator.errors import PoolInvalid
from prefill_operator.manifest import Manifest, object_metadata
from prefill_operator.names import API_VERSION, object_base
from prefill_operator.plan import PoolPlan
from prefill_operator.pool_api import MetricName, PoolAutoscaling
from prefill_operator.render_policy import RenderPolicy
from prefill_operator.ve_api import VEAutoscaling

FORECAST_SERIES = "prefill_pool_forecast_rows_per_second"
"""Recording rule of the chart."""

POOL_METRIC_LABEL = "pool"
"""Label of a pod's series that holds its pool's name; PodMonitors set it."""

_POLLING_SECONDS = 15
# KEDA falls back after this many failed polls.
_FALLBACK_FAILURES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingSeries:
    """One metric. Names of external metrics are those of docs/ for prometheus-adapter."""

    external_name: str
    expression: str
    """PromQL with `{selector}` for the matchers of one pool."""
    per_gpu: bool


SERIES: Mapping[MetricName, ScalingSeries] = MappingProxyType(
    {
        MetricName.BACKLOG: ScalingSeries(
            external_name="prefill_pool_backlog_milliseconds",
            expression="1000 * sum(pe_predicted_wait_seconds{selector})",
            per_gpu=False,
        ),
        MetricName.ROWS: ScalingSeries(
            external_name="prefill_pool_rows_waiting", expression="sum(pe_rows_waiting{selector})", per_gpu=True
        ),
        MetricName.FORECAST: ScalingSeries(
            external_name=FORECAST_SERIES, expression=f"sum({FORECAST_SERIES}{{selector}})", per_gpu=True
        ),
    }
)
PATCHES = ScalingSeries(
    external_name="prefill_pool_patches_queued", expression="sum(ve_patches_queued{selector})", per_gpu=False
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingTarget:
    """A series and what one pod shall bear of it."""

    series: ScalingSeries
    per_pod: int

    def query(self, pool: Pool) -> str:
        """The pool's total; 0 when there are no such series."""
        selector = f'{{namespace="{pool.namespace}",{POOL_METRIC_LABEL}="{pool.name}"}}'
        return self.series.expression.replace("{selector}", selector) + " or vector(0)"


def scaling_targets(pool: Pool, plan: PoolPlan) -> tuple[ScalingTarget, ...]:
    """Targets per GPU are multiplied by the GPUs of a pod of the update revision (k8s.md 4.5)."""
    autoscaling = pool.spec.autoscaling
    if isinstance(autoscaling, PoolAutoscaling):
        return tuple(
            ScalingTarget(series=series, per_pod=metric.target * (num_ranks(plan) if series.per_gpu else 1))
            for metric in autoscaling.metrics
            for series in (SERIES[metric.name],)
        )
    if isinstance(autoscaling, VEAutoscaling):
        return (ScalingTarget(series=PATCHES, per_pod=autoscaling.target_pending_patches_per_ve),)
    return ()


def render_hpa(pool: Pool, plan: PoolPlan, *, freeze_scale_down: bool) -> Manifest:
    """autoscaling/v2 with external metrics; something must serve them, e.g. prometheus-adapter.

    Args:
        freeze_scale_down: pods of two EP sizes exist, so the number of pods says little about capacity (k8s.md 4.5).
    """
    autoscaling = _autoscaling(pool)
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": object_metadata(pool, object_base(pool.kind, pool.name)),
        "spec": {
            "scaleTargetRef": _scale_target(pool),
            "minReplicas": autoscaling.min_replicas,
            "maxReplicas": autoscaling.max_replicas,
            "metrics": [_external_metric(pool, target) for target in scaling_targets(pool, plan)],
            "behavior": _behavior(autoscaling, freeze_scale_down=freeze_scale_down),
        },
    }


def render_scaled_object(pool: Pool, plan: PoolPlan, policy: RenderPolicy, *, freeze_scale_down: bool) -> Manifest:
    """keda.sh/v1alpha1 with Prometheus triggers.

    Raises:
        PoolInvalid: the installation names no Prometheus.
    """
    if not policy.prometheus_address:
        rule = "KEDA needs a Prometheus; the chart value autoscaling.prometheus.serverAddress is empty"
        raise PoolInvalid("spec.autoscaling.actuator", value="KEDA", rule=rule)
    autoscaling = _autoscaling(pool)
    return {
        "apiVersion": "keda.sh/v1alpha1",
        "kind": "ScaledObject",
        "metadata": object_metadata(pool, object_base(pool.kind, pool.name)),
        "spec": {
            "scaleTargetRef": _scale_target(pool),
            "pollingInterval": _POLLING_SECONDS,
            "minReplicaCount": autoscaling.min_replicas,
            "maxReplicaCount": autoscaling.max_replicas,
            # Metrics lost: never down, and up at least to the minimum.
            "fallback": {
                "failureThreshold": _FALLBACK_FAILURES,
                "replicas": autoscaling.min_replicas,
                "behavior": "currentReplicasIfHigher",
            },
            "advanced": {
                "restoreToOriginalReplicaCount": False,
                "horizontalPodAutoscalerConfig": {
                    "behavior": _behavior(autoscaling, freeze_scale_down=freeze_scale_down)
                },
            },
            "triggers": [_trigger(pool, target, policy) for target in scaling_targets(pool, plan)],
        },
    }


def _autoscaling(pool: Pool) -> AutoscalingSpec:
    if pool.spec.autoscaling is None:
        raise ValueError(f"pool {pool.name} has no spec.autoscaling; nothing can be rendered for it")
    return pool.spec.autoscaling


def _scale_target(pool: Pool) -> Manifest:
    return {"apiVersion": API_VERSION, "kind": str(pool.kind), "name": pool.name}


def _external_metric(pool: Pool, target: ScalingTarget) -> Manifest:
    selector = {"matchLabels": {POOL_METRIC_LABEL: pool.name}}
    return {
        "type": "External",
        "external": {
            "metric": {"name": target.series.external_name, "selector": selector},
            "target": {"type": "AverageValue", "averageValue": str(target.per_pod)},
        },
    }


def _trigger(pool: Pool, target: ScalingTarget, policy: RenderPolicy) -> Manifest:
    return {
        "type": "prometheus",
        "name": target.series.external_name.replace("_", "-"),
        "metricType": "AverageValue",
        "metadata": {
            "serverAddress": policy.prometheus_address,
            "query": target.query(pool),
            "threshold": str(target.per_pod),
            # An empty answer is an error: the query itself says 0 when there is nothing to count.
            "ignoreNullValues": "false",
        },
    }


def _behavior(autoscaling: AutoscalingSpec, *, freeze_scale_down: bool) -> Manifest:
    return {
        "scaleUp": {
            "stabilizationWindowSeconds": autoscaling.scale_up_stabilization_seconds,
            "selectPolicy": "Max",
            "policies": [_per_minute(autoscaling.max_scale_up_per_minute)],
        },
        "scaleDown": {
            "stabilizationWindowSeconds": autoscaling.scale_down_stabilization_seconds,
            "selectPolicy": "Disabled" if freeze_scale_down else "Max",
            "policies": [_per_minute(autoscaling.max_scale_down_per_minute)],
        },
    }


def _per_minute(pods: int) -> Manifest:
    return {"type": "Pods", "value": pods, "periodSeconds": 60}
