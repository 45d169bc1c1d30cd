"""Parts of the API that PrefillPool and VEPool share, and the base of all API structs.

The YAML under crds/ is the source of truth: it describes every field for users and holds bounds and CEL rules. The structs
repeat names, types, defaults and enums, so that the CLI plans without a cluster; a drift test compares both. They ignore
unknown fields, since an older operator may read a pool written under a newer CRD.
"""

from enum import StrEnum
from typing import Any, dataclass_transform

import msgspec

from prefill_operator.quantity import ResourceQuantity

_ACRONYMS = {
    "pe": "PE",
    "pes": "PEs",
    "ve": "VE",
    "ves": "VEs",
    "gpu": "GPU",
    "gpus": "GPUs",
    "mtbf": "MTBF",
    "rdma": "RDMA",
    "id": "ID",
}
_ACRONYMS |= {"sha256": "SHA256", "fs": "FS"}


def api_name(field: str) -> str:
    """Name of a field in the API: `kv_tokens_per_gpu` -> `kvTokensPerGPU`."""
    first, *rest = field.split("_")
    return first + "".join(_ACRONYMS.get(word, word.capitalize()) for word in rest)


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(msgspec.field,))
class ApiStruct(msgspec.Struct, frozen=True, kw_only=True, rename=api_name):
    """Base of everything that is read from or written to a custom resource."""


class ImagePullPolicy(StrEnum):
    ALWAYS = "Always"
    IF_NOT_PRESENT = "IfNotPresent"
    NEVER = "Never"


class RolloutStrategy(StrEnum):
    ROLLING_UPDATE = "RollingUpdate"
    ON_DELETE = "OnDelete"


class Placement(StrEnum):
    PACK = "Pack"
    SPREAD = "Spread"
    SPREAD_REQUIRED = "SpreadRequired"


class Actuator(StrEnum):
    EXTERNAL = "External"
    HPA = "HPA"
    KEDA = "KEDA"


class PvcSource(ApiStruct):
    claim_name: str
    path: str = "/"


class HostPathSource(ApiStruct):
    path: str


class RolloutSpec(ApiStruct):
    strategy: RolloutStrategy = RolloutStrategy.ROLLING_UPDATE
    max_surge: int = 1
    max_unavailable: int = 0
    """Measured against replicas + spares, so that spares are not eaten silently."""
    partition: int = 0
    min_ready_seconds: int = 30
    progress_deadline_seconds: int = 3600


class LifecycleSpec(ApiStruct):
    load_timeout_seconds: int = 1800
    drain_timeout_seconds: int = 120
    node_lost_grace_seconds: int = 60
    max_concurrent_drains: int = 2
    """0 = no limit."""
    max_concurrent_loads: int = 4
    """0 = no limit."""


class SchedulingSpec(ApiStruct):
    placement: Placement = Placement.PACK
    priority_class_name: str | None = None
    scheduler_name: str | None = None
    runtime_class_name: str | None = None
    node_selector: dict[str, str] = {}
    tolerations: tuple[dict[str, Any], ...] = ()
    """Kubernetes Tolerations, as they are."""
    topology_spread_constraints: tuple[dict[str, Any], ...] = ()
    """Kubernetes TopologySpreadConstraints, as they are."""


class AutoscalingSpec(ApiStruct):
    max_replicas: int
    actuator: Actuator = Actuator.EXTERNAL
    min_replicas: int = 1
    scale_up_stabilization_seconds: int = 30
    scale_down_stabilization_seconds: int = 900
    max_scale_up_per_minute: int = 4
    max_scale_down_per_minute: int = 1


class Resources(ApiStruct):
    requests: dict[str, ResourceQuantity] = {}
    limits: dict[str, ResourceQuantity] = {}


class OverlayMetadata(ApiStruct):
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class PodOverlay(ApiStruct):
    metadata: OverlayMetadata = OverlayMetadata()
    spec: dict[str, Any] = {}
    """Parts of a Kubernetes PodSpec; the allow-list is in overlay.py."""


class MonitoringSpec(ApiStruct):
    pod_monitor: bool = False
    interval_seconds: int = 15
    labels: dict[str, str] = {}
