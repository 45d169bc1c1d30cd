"""Where a pod may run: node selector, affinity, tolerations, topology spread (k8s.md 4.3, 4.5, 4.6).

The trap: a pod that a Service selects is spread over nodes by the scheduler's own default constraints, which works against
Pack; any constraint of the pod's own switches those defaults off.
"""

from prefill_operator.api import Pool
from prefill_operator.api_parts import Placement, SchedulingSpec
from prefill_operator.manifest import Manifest
from prefill_operator.model import CreatePod
from prefill_operator.names import MANAGED_BY, MANAGED_BY_LABEL, selector_labels

GPU_PRODUCT_LABEL = "nvidia.com/gpu.product"
_HOSTNAME_LABEL = "kubernetes.io/hostname"
# The strongest preference Kubernetes knows.
_WEIGHT = 100
# Instead of the 300 s that Kubernetes adds by default (k8s.md 4.6).
_LOST_NODE_SECONDS = 30
_LOST_NODE_TAINTS = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
# No pool has more pods (CRD bounds of replicas, spares and surge), so the constraint never holds a pod back.
_NEVER_SKEWED = 4096


def render_placement(pool: Pool, create: CreatePod) -> Manifest:
    """The fields of a PodSpec that say where; absent where the spec says nothing."""
    scheduling = pool.spec.scheduling
    fields: Manifest = {
        "nodeSelector": _node_selector(pool.spec.gpu.product, scheduling),
        "affinity": _affinity(pool, create),
        "tolerations": _tolerations(scheduling),
        "topologySpreadConstraints": _spread_constraints(pool),
        "priorityClassName": scheduling.priority_class_name,
        "schedulerName": scheduling.scheduler_name,
        "runtimeClassName": scheduling.runtime_class_name,
    }
    return {key: value for key, value in fields.items() if value}


def _node_selector(product: str | None, scheduling: SchedulingSpec) -> dict[str, str]:
    named = {GPU_PRODUCT_LABEL: product} if product else {}
    return {**named, **scheduling.node_selector}


def _affinity(pool: Pool, create: CreatePod) -> Manifest:
    affinity: Manifest = {}
    if node_affinity := _node_affinity(create):
        affinity["nodeAffinity"] = node_affinity
    ours = {"topologyKey": _HOSTNAME_LABEL, "labelSelector": {"matchLabels": selector_labels(pool.kind, pool.name)}}
    match pool.spec.scheduling.placement:
        case Placement.PACK:
            # Beside pods of any pool: a whole node stays free only if all fill the same ones first.
            beside = {"topologyKey": _HOSTNAME_LABEL, "labelSelector": {"matchLabels": {MANAGED_BY_LABEL: MANAGED_BY}}}
            affinity["podAffinity"] = _preferred(beside)
        case Placement.SPREAD:
            affinity["podAntiAffinity"] = _preferred(ours)
        case Placement.SPREAD_REQUIRED:
            affinity["podAntiAffinity"] = {"requiredDuringSchedulingIgnoredDuringExecution": [ours]}
    return affinity


def _preferred(term: Manifest) -> Manifest:
    return {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": _WEIGHT, "podAffinityTerm": term}]}


def _node_affinity(create: CreatePod) -> Manifest:
    if not create.avoid_nodes:
        return {}
    nodes = {"key": _HOSTNAME_LABEL, "operator": "NotIn", "values": sorted(create.avoid_nodes)}
    return {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchExpressions": [nodes]}]}}


def _tolerations(scheduling: SchedulingSpec) -> list[Manifest]:
    """The user's, and ours for lost nodes unless the user has one for the same taint."""
    given = [dict(toleration) for toleration in scheduling.tolerations]
    return given + lost_node_tolerations(given)


def lost_node_tolerations(given: list[Manifest]) -> list[Manifest]:
    """Those that are missing from `given`."""
    named = {toleration.get("key") for toleration in given if toleration.get("effect") in (None, "", "NoExecute")}
    return [
        {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": _LOST_NODE_SECONDS}
        for key in _LOST_NODE_TAINTS
        if key not in named
    ]


def _spread_constraints(pool: Pool) -> list[Manifest]:
    scheduling = pool.spec.scheduling
    if scheduling.topology_spread_constraints or scheduling.placement is not Placement.PACK:
        return [dict(constraint) for constraint in scheduling.topology_spread_constraints]
    selector = {"matchLabels": selector_labels(pool.kind, pool.name)}
    constraint = {"maxSkew": _NEVER_SKEWED, "topologyKey": _HOSTNAME_LABEL, "whenUnsatisfiable": "DoNotSchedule"}
    return [{**constraint, "labelSelector": selector}]
