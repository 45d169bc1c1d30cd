"""Every name the operator gives or reads: kinds, labels, annotations, condition and event reasons, object names.

The trap: selector labels and object names are frozen. PodDisruptionBudgets, Services and running pods of older operator
versions carry them; a change orphans pods (k8s.md 2, row 16). tests/operator/data/names.yaml holds the frozen values.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

API_GROUP = "prefill.dev"
API_VERSION = "prefill.dev/v1alpha1"
FIELD_MANAGER = "prefill-operator"
LEASE_NAME = "prefill-operator"

MAX_POOL_NAME = 40
"""Longest name of a pool (k8s.md 3.1 rule 1); the CRDs refuse longer ones."""


class Kind(StrEnum):
    PREFILL_POOL = "PrefillPool"
    VE_POOL = "VEPool"

    @property
    def plural(self) -> str:
        """Resource name in URLs and RBAC rules, e.g. "prefillpools"."""
        return "prefillpools" if self is Kind.PREFILL_POOL else "vepools"


# Labels of every object we own. The value of MANAGED_BY_LABEL is the selector of the pod watch.
MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"
MANAGED_BY = "prefill-operator"
KIND_LABEL = "prefill.dev/kind"
POOL_LABEL = "prefill.dev/pool"
REVISION_LABEL = "prefill.dev/revision"

# Annotations of a pool.
EP_FLOOR_ANNOTATION = "prefill.dev/ep-floor"
"""`<ep>@<hash of planner inputs>`; void when the inputs change (k8s.md 4.4)."""
LEDGER_ANNOTATION = "prefill.dev/ledger"
"""What needs history, at most 4 KiB of JSON (C29)."""

# Annotations of a pod.
POOL_UID_ANNOTATION = "prefill.dev/pool-uid"
"""UID of the pool; a pod without controller is adopted only if this matches (k8s.md 4.1)."""
PLAN_HASH_ANNOTATION = "prefill.dev/plan-hash"
EP_ANNOTATION = "prefill.dev/ep"
DRAINING_SINCE_ANNOTATION = "prefill.dev/draining-since"
"""RFC 3339 time at which the operator asked the engine to drain (k8s.md 4.7)."""
KV_STORE_ANNOTATION = "prefill.dev/kv-store"
"""KV_STORE_DEGRADED while the engine serves without its KV store, absent otherwise (k8s.md 4.9)."""
KV_STORE_DEGRADED = "degraded"

ACCEPTING_GATE = "prefill.dev/accepting"
"""Readiness gate: the condition type the operator sets on pods (k8s.md 4.7)."""

ENGINE_CONTAINER = "engine"
ENCODER_CONTAINER = "encoder"
KVD_CONTAINER = "kvd"
WEIGHTS_MOUNT_CONTAINER = "weights-mount"
"""Native sidecar that mounts 3FS for the checkpoint (model.source.threeFS.mountMode Shared)."""


class ConditionType(StrEnum):
    """All eight are always present. True is good, except for Stalled and Paused (k8s.md 3.3)."""

    READY = "Ready"
    AVAILABLE = "Available"
    REDUNDANT = "Redundant"
    PROGRESSING = "Progressing"
    PLAN_FEASIBLE = "PlanFeasible"
    AUTOSCALING_ACTIVE = "AutoscalingActive"
    STALLED = "Stalled"
    PAUSED = "Paused"


class Reason(StrEnum):
    """Reasons of conditions; CONDITION_REASONS says which belongs to which type."""

    ALL_READY = "AllReady"
    SCALED_TO_ZERO = "ScaledToZero"
    ROLLOUT_IN_PROGRESS = "RolloutInProgress"
    NOT_ENOUGH_READY = "NotEnoughReady"
    PLAN_INFEASIBLE = "PlanInfeasible"
    SPEC_INVALID = "SpecInvalid"
    MINIMUM_AVAILABLE = "MinimumAvailable"
    BELOW_MINIMUM = "BelowMinimum"
    SPARES_READY = "SparesReady"
    SPARES_LOADING = "SparesLoading"
    SPARES_UNSCHEDULABLE = "SparesUnschedulable"
    DISABLED = "Disabled"
    CAPPED_BY_QUOTA = "CappedByQuota"
    CAPPED_BY_MAX_SPARES = "CappedByMaxSpares"
    COMPLETE = "Complete"
    REPLACING = "Replacing"
    SCALING = "Scaling"
    LOADING = "Loading"
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    NO_ROOM = "NoRoom"
    NO_ROOM_FOR_LARGER_EP = "NoRoomForLargerEP"
    QUOTA_EXCEEDED = "QuotaExceeded"
    INVALID_OVERLAY = "InvalidOverlay"
    FORBIDDEN = "Forbidden"
    OBJECT_REFUSED = "ObjectRefused"
    STALLED = "Stalled"
    MINIMUM_EP = "MinimumEP"
    DEGRADED = "Degraded"
    ESCALATED = "Escalated"
    FIXED = "Fixed"
    NO_EP_FITS = "NoEPFits"
    HOST_MEMORY_SHORT = "HostMemoryShort"
    UNKNOWN_GPU = "UnknownGPU"
    UNKNOWN_ARCHITECTURE = "UnknownArchitecture"
    EXTERNAL = "External"
    ACTIVE = "Active"
    METRICS_UNAVAILABLE = "MetricsUnavailable"
    KEDA_MISSING = "KedaMissing"
    CONFIG_REJECTED = "ConfigRejected"
    IMAGE_PULL_FAILED = "ImagePullFailed"
    CRASH_LOOP = "CrashLoop"
    ESCALATION_EXHAUSTED = "EscalationExhausted"
    GPU_FAULT = "GPUFault"
    FOREIGN_OBJECT = "ForeignObject"
    NOT_STALLED = "NotStalled"
    USER_REQUEST = "UserRequest"
    NOT_PAUSED = "NotPaused"


CONDITION_REASONS: Mapping[ConditionType, frozenset[Reason]] = MappingProxyType(
    {
        ConditionType.READY: frozenset(
            {
                Reason.ALL_READY,
                Reason.SCALED_TO_ZERO,
                Reason.ROLLOUT_IN_PROGRESS,
                Reason.NOT_ENOUGH_READY,
                Reason.PLAN_INFEASIBLE,
                Reason.SPEC_INVALID,
            }
        ),
        ConditionType.AVAILABLE: frozenset(
            {Reason.MINIMUM_AVAILABLE, Reason.BELOW_MINIMUM, Reason.SCALED_TO_ZERO, Reason.SPEC_INVALID}
        ),
        ConditionType.REDUNDANT: frozenset(
            {
                Reason.SPARES_READY,
                Reason.SPARES_LOADING,
                Reason.SPARES_UNSCHEDULABLE,
                Reason.DISABLED,
                Reason.CAPPED_BY_QUOTA,
                Reason.CAPPED_BY_MAX_SPARES,
                Reason.SPEC_INVALID,
            }
        ),
        ConditionType.PROGRESSING: frozenset(
            {
                Reason.COMPLETE,
                Reason.REPLACING,
                Reason.SCALING,
                Reason.LOADING,
                Reason.DEADLINE_EXCEEDED,
                Reason.NO_ROOM,
                Reason.NO_ROOM_FOR_LARGER_EP,
                Reason.QUOTA_EXCEEDED,
                Reason.INVALID_OVERLAY,
                Reason.FORBIDDEN,
                Reason.OBJECT_REFUSED,
                Reason.STALLED,
                Reason.PLAN_INFEASIBLE,
                Reason.SPEC_INVALID,
            }
        ),
        ConditionType.PLAN_FEASIBLE: frozenset(
            {
                Reason.MINIMUM_EP,
                Reason.DEGRADED,
                Reason.ESCALATED,
                Reason.FIXED,
                Reason.NO_EP_FITS,
                Reason.HOST_MEMORY_SHORT,
                Reason.UNKNOWN_GPU,
                Reason.UNKNOWN_ARCHITECTURE,
                Reason.SPEC_INVALID,
            }
        ),
        ConditionType.AUTOSCALING_ACTIVE: frozenset(
            {Reason.EXTERNAL, Reason.ACTIVE, Reason.METRICS_UNAVAILABLE, Reason.KEDA_MISSING, Reason.DISABLED}
            | {Reason.SPEC_INVALID}
        ),
        ConditionType.STALLED: frozenset(
            {
                Reason.CONFIG_REJECTED,
                Reason.IMAGE_PULL_FAILED,
                Reason.CRASH_LOOP,
                Reason.ESCALATION_EXHAUSTED,
                Reason.GPU_FAULT,
                Reason.FOREIGN_OBJECT,
                Reason.DEADLINE_EXCEEDED,
                Reason.NOT_STALLED,
            }
        ),
        ConditionType.PAUSED: frozenset({Reason.USER_REQUEST, Reason.NOT_PAUSED}),
    }
)


class EventReason(StrEnum):
    """Reasons of Kubernetes Events (k8s.md 4.14)."""

    PLAN_CHANGED = "PlanChanged"
    EP_ESCALATED = "EPEscalated"
    PE_REPLACED = "PEReplaced"
    NODE_LOST = "NodeLost"
    DRAIN_TIMEOUT = "DrainTimeout"
    QUOTA_EXCEEDED = "QuotaExceeded"
    LARGE_SCALE_DOWN = "LargeScaleDown"
    ROLLOUT_COMPLETE = "RolloutComplete"
    REFERENCE_MISSING = "ReferenceMissing"
    LOAD_IMBALANCE = "LoadImbalance"


@dataclass(frozen=True, slots=True, kw_only=True)
class PodIdentity:
    """What a pod's name says."""

    revision: str
    """First 8 hex digits of the revision hash."""
    incarnation: int


def object_base(kind: Kind, pool: str) -> str:
    """Name of the pool's Service, PodDisruptionBudget, HPA, ScaledObject and PodMonitor, and prefix of the others.

    A PrefillPool and a VEPool of one name are common ("flash" and its encoder), so those of the second end in "-ve".
    """
    return pool if kind is Kind.PREFILL_POOL else f"{pool}-ve"


def pod_name(kind: Kind, pool: str, identity: PodIdentity) -> str:
    """`<base>-<rev8>-<incarnation>`: deterministic, so that a stale decision ends as 409 (k8s.md 4.1)."""
    return f"{object_base(kind, pool)}-{identity.revision}-{identity.incarnation}"


def parse_pod_name(kind: Kind, pool: str, name: str) -> PodIdentity | None:
    """The inverse of pod_name; None if the name is not one of this pool's."""
    match = re.fullmatch(re.escape(object_base(kind, pool)) + r"-([0-9a-f]{8})-(0|[1-9][0-9]{0,8})", name)
    return PodIdentity(revision=match[1], incarnation=int(match[2])) if match else None


def config_map_name(kind: Kind, pool: str, revision: str) -> str:
    return f"{object_base(kind, pool)}-{revision}"


def selector_labels(kind: Kind, pool: str) -> dict[str, str]:
    """The frozen labels that select the pods of one pool."""
    return {KIND_LABEL: str(kind), POOL_LABEL: pool}


def object_labels(kind: Kind, pool: str) -> dict[str, str]:
    """Labels of every object of one pool."""
    return {MANAGED_BY_LABEL: MANAGED_BY, **selector_labels(kind, pool)}


def pod_labels(kind: Kind, pool: str, revision: str) -> dict[str, str]:
    return {**object_labels(kind, pool), REVISION_LABEL: revision}


def selector_text(kind: Kind, pool: str) -> str:
    """The selector as status.selector and `kubectl -l` write it."""
    return ",".join(f"{key}={value}" for key, value in selector_labels(kind, pool).items())
