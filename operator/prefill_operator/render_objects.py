"""The objects beside pods that a pool owns, by kind and name (k8s.md 4.2, 4.8). Which of them exist is decided elsewhere."""

from prefill_operator.api import Pool
from prefill_operator.engine_config import (
    ENCODER_CONFIG_FILE,
    ENGINE_CONFIG_FILE,
    balancing_json,
    encoder_json,
    engine_json,
)
from prefill_operator.manifest import Manifest, object_metadata
from prefill_operator.model import ChildKind
from prefill_operator.names import REVISION_LABEL, config_map_name, object_base, selector_labels
from prefill_operator.plan import PoolPlan
from prefill_operator.pool_api import PrefillPoolSpec
from prefill_operator.ports import (
    GRPC_PORT,
    GRPC_PORT_NAME,
    HANDOFF_PORT,
    KVD_METRICS_PORT,
    KVD_METRICS_PORT_NAME,
    KVD_PEER_PORT,
    KVD_PROBE_PORT,
    MAX_RANKS,
    METRICS_PORT_NAME,
    PROBE_PORT_NAME,
)
from prefill_operator.render_autoscaling import POOL_METRIC_LABEL, render_hpa, render_scaled_object
from prefill_operator.render_policy import RenderPolicy
from prefill_operator.render_sidecar import kvd_config_files, weights_config_files
from prefill_operator.ve_api import VEPoolSpec
from prefill_plan.model_spec import ModelSpec

BALANCING_ANNOTATION = "prefill.dev/balancing"
"""On the Service of a VEPool: how the router shall spread images. Not in the ConfigMap, which is immutable (k8s.md 4.10)."""


def render_object(
    kind: ChildKind, pool: Pool, plan: PoolPlan, policy: RenderPolicy, *, model: ModelSpec, freeze_scale_down: bool
) -> Manifest:
    """The object of this kind as it shall be now; a ConfigMap is that of the plan's revision.

    Args:
        model: the released model, as for plan_pool.
        freeze_scale_down: as for render_hpa.

    Raises:
        PoolInvalid: the installation lacks what the object needs.
    """
    match kind:
        case ChildKind.CONFIG_MAP:
            return render_config_map(pool, plan, model=model)
        case ChildKind.SERVICE:
            return render_service(pool)
        case ChildKind.DISRUPTION_BUDGET:
            return render_disruption_budget(pool)
        case ChildKind.HPA:
            return render_hpa(pool, plan, freeze_scale_down=freeze_scale_down)
        case ChildKind.SCALED_OBJECT:
            return render_scaled_object(pool, plan, policy, freeze_scale_down=freeze_scale_down)
        case ChildKind.POD_MONITOR:
            return render_pod_monitor(pool)
        case ChildKind.NETWORK_POLICY:
            return render_network_policy(pool)


def render_config_map(pool: Pool, plan: PoolPlan, *, model: ModelSpec) -> Manifest:
    """What pods of the plan's revision are started with."""
    spec = pool.spec
    if isinstance(spec, VEPoolSpec):
        files = {ENCODER_CONFIG_FILE: encoder_json(spec)}
    else:
        files = {ENGINE_CONFIG_FILE: engine_json(spec, plan, model=model)}
        files |= kvd_config_files(spec) | weights_config_files(spec)
    name = config_map_name(pool.kind, pool.name, plan.revision)
    metadata = object_metadata(pool, name, labels={REVISION_LABEL: plan.revision})
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "immutable": True, "data": files}


def render_service(pool: Pool) -> Manifest:
    """Headless: routers read the EndpointSlices, which hold Ready pods only."""
    metadata = object_metadata(pool, object_base(pool.kind, pool.name))
    if isinstance(pool.spec, VEPoolSpec):
        metadata["annotations"] = {BALANCING_ANNOTATION: balancing_json(pool.spec)}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": False,
            "selector": selector_labels(pool.kind, pool.name),
            "ports": [{"name": GRPC_PORT_NAME, "port": GRPC_PORT, "targetPort": GRPC_PORT_NAME, "protocol": "TCP"}],
        },
    }


def render_disruption_budget(pool: Pool) -> Manifest:
    """Evictions may take spares, not capacity. An integer, since a share would be taken of /scale, which hides spares."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": object_metadata(pool, object_base(pool.kind, pool.name)),
        "spec": {
            "minAvailable": pool.spec.replicas,
            # Pods that are not Ready protect nobody and must not block a node's drain.
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": selector_labels(pool.kind, pool.name)},
        },
    }


def render_pod_monitor(pool: Pool) -> Manifest:
    """Gives every series the labels `pool` and `kind`, by which autoscaling and dashboards select."""
    monitoring = pool.spec.monitoring
    relabelings = [
        {"action": "replace", "sourceLabels": [f"__meta_kubernetes_pod_label_prefill_dev_{key}"], "targetLabel": label}
        for key, label in (("pool", POOL_METRIC_LABEL), ("kind", "kind"))
    ]
    names = [METRICS_PORT_NAME]
    if isinstance(pool.spec, PrefillPoolSpec) and pool.spec.kvd.enabled:
        names.append(KVD_METRICS_PORT_NAME)
    interval = f"{monitoring.interval_seconds}s"
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": object_metadata(pool, object_base(pool.kind, pool.name), labels=monitoring.labels),
        "spec": {
            "selector": {"matchLabels": selector_labels(pool.kind, pool.name)},
            "podMetricsEndpoints": [{"port": name, "interval": interval, "relabelings": relabelings} for name in names],
        },
    }


def render_network_policy(pool: Pool) -> Manifest:
    """Only our ports, and only from pods of this cluster; KV data only within the namespace. Outgoing traffic is free: storage
    and RDMA differ everywhere."""
    open_ports: list[Manifest] = [
        {"port": name, "protocol": "TCP"} for name in (GRPC_PORT_NAME, METRICS_PORT_NAME, PROBE_PORT_NAME)
    ]
    rules: list[Manifest] = [{"from": [{"namespaceSelector": {}}], "ports": open_ports}]
    if isinstance(pool.spec, PrefillPoolSpec):
        data_ports: list[Manifest] = [
            {"port": HANDOFF_PORT, "endPort": HANDOFF_PORT + MAX_RANKS - 1, "protocol": "TCP"}
        ]
        if pool.spec.kvd.enabled:
            # By number: not every network plug-in knows the names of a sidecar's ports.
            open_ports += [{"port": port, "protocol": "TCP"} for port in (KVD_METRICS_PORT, KVD_PROBE_PORT)]
            data_ports.append({"port": KVD_PEER_PORT, "protocol": "TCP"})
        rules.append({"from": [{"podSelector": {}}], "ports": data_ports})
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": object_metadata(pool, object_base(pool.kind, pool.name)),
        "spec": {
            "podSelector": {"matchLabels": selector_labels(pool.kind, pool.name)},
            "policyTypes": ["Ingress"],
            "ingress": rules,
        },
    }
