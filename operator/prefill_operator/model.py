"""What the pure planner sees and what it answers: plain data, no Kubernetes JSON, no clients.

observe.py fills `Observed` from the cache, decide.py answers with a `Decision`, apply.py carries it out. Times are seconds
since the epoch as floats. The trap: times in `Observed` come from several clocks (API server, kubelets, our own), so a time
may lie in the future; `seconds_since` is the only way to compare them with `now`.
"""

from dataclasses import dataclass
from enum import StrEnum

from prefill_operator.api import Pool
from prefill_operator.api_status import PoolStatus, VEPoolStatus
from prefill_operator.names import EventReason


class PodPhase(StrEnum):
    PENDING = "Pending"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    UNKNOWN = "Unknown"


class ChildKind(StrEnum):
    """Kinds of objects beside pods that a pool owns (k8s.md 4.2)."""

    CONFIG_MAP = "ConfigMap"
    SERVICE = "Service"
    DISRUPTION_BUDGET = "PodDisruptionBudget"
    HPA = "HorizontalPodAutoscaler"
    SCALED_OBJECT = "ScaledObject"
    POD_MONITOR = "PodMonitor"
    NETWORK_POLICY = "NetworkPolicy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Termination:
    """The last end of a container, from state.terminated or lastState.terminated and its termination message."""

    at: float
    exit_code: int
    restart_count: int
    """Restarts before this end: restartCount if it stands in state, restartCount - 1 if in lastState."""
    reason: str = ""
    """The kubelet's word: Error, OOMKilled, Completed."""
    code: str = ""
    """From the message, e.g. CudaOom."""
    phase: str = ""
    plan_hash: str = ""
    foreign_bytes: int = 0
    """GPU memory held by somebody else."""
    want_bytes: int = 0
    free_bytes: int = 0
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SidecarDown:
    """A container before the engine that has ended and is not up again."""

    name: str
    end: Termination
    is_waiting: bool
    """In CrashLoopBackOff; else the next try runs or is about to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadProgress:
    loaded_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedPod:
    """One pod that carries the pool's labels. revision and incarnation are those of its name."""

    name: str
    uid: str
    revision: str
    incarnation: int
    ep: int
    gpus: int
    """GPUs it requests: 0 in the CPU profile without pretended GPUs."""
    created_at: float
    node: str = ""
    """Empty while unscheduled."""
    phase: PodPhase = PodPhase.PENDING
    scheduled_at: float | None = None
    ready: bool = False
    ready_changed_at: float | None = None
    """Last transition of the Ready condition, in either direction."""
    terminating_since: float | None = None
    failed_reason: str = ""
    """status.reason of a Failed pod, e.g. UnexpectedAdmissionError; "Failed" if there is none."""
    failed_at: float | None = None
    unschedulable_since: float | None = None
    unschedulable_message: str = ""
    waiting_reason: str = ""
    """Of the engine container or, if that has none, of the first init container that waits, e.g. ImagePullBackOff."""
    waiting_message: str = ""
    waiting_since: float | None = None
    """Best knowledge: the last termination, else when the pod was scheduled."""
    restart_count: int = 0
    termination: Termination | None = None
    sidecar: SidecarDown | None = None
    """None = all are up, or have never ended."""
    draining_since: float | None = None
    """From the pod's annotation."""
    drain_done: bool = False
    """The engine said that nothing is left, in this process's knowledge."""
    drain_unreachable_since: float | None = None
    gate: bool | None = None
    """The readiness gate's condition; None when the pod has no gate or the condition is unset."""
    unhealthy_devices: tuple[str, ...] = ()
    """From allocatedResourcesStatus (C34)."""
    disruption_target: str = ""
    """Reason of a DisruptionTarget condition that is True, e.g. DeletionByTaintManager."""
    load: LoadProgress | None = None
    """Of its weights, while it loads; None = it does not tell."""
    backlog_milliseconds: float | None = None
    """Until its engine is through with what it has, by the engine's own word; None = unknown, e.g. since a restart of ours."""
    plan_hash: str = ""
    is_store_degraded: bool = False
    """From the annotation: its engine serves without the KV store."""
    avoid_nodes: tuple[str, ...] = ()
    """Nodes its affinity excludes."""
    foreign: bool = False
    """Another controller owns it, or name or pool UID do not match: never touched (k8s.md 4.1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedNode:
    name: str
    ready: bool = True
    ready_changed_at: float = 0.0
    cordoned: bool = False
    taints: tuple[str, ...] = ()
    """Keys only."""
    maintenance_taint: str = ""
    """The key of a taint that announces the node's end (Helm value maintenanceTaints)."""
    gpu_fault: str = ""
    """What a health agent reports by condition, taint or annotation; "" = nothing."""
    gpu_product: str = ""
    gpu_capacity: int = 0
    gpu_allocatable: int = 0
    gpu_free: int = 0
    """Allocatable less what pods we can see request: an upper bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedChild:
    """One object beside pods: owned by the pool, or holding a name of ours."""

    kind: ChildKind
    name: str
    current: bool = True
    """Equals what we would render now, in the fields that we set."""
    foreign: bool = False
    active: bool | None = None
    """Whether an HPA or ScaledObject has metrics to act on; None = not reported yet."""
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImbalanceNote:
    """Patches have waited unevenly for long (imbalance.judge_imbalance). It informs only."""

    imbalance: str
    """As in PoolLoad."""
    span: str
    """For longer than this, in steps, e.g. "15 min"."""
    worst_uid: str
    """The pod at which most patches wait, and how many, in two digits."""
    most_patches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLoad:
    """Of a VEPool's encoders, rounded (engine_load.pool_load)."""

    pending_patches: int
    patches_per_second: int
    imbalance: str
    """Largest over mean pending patches."""
    uneven: ImbalanceNote | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceNote:
    """What is wrong with the pool that this one names. It informs only."""

    text: str
    is_missing: bool = False


class RefusalReason(StrEnum):
    QUOTA_EXCEEDED = "QuotaExceeded"
    FORBIDDEN = "Forbidden"
    """By RBAC, Pod Security, another admission rule or webhook."""
    INVALID_OVERLAY = "InvalidOverlay"
    """The pod is no valid object."""
    OBJECT_REFUSED = "ObjectRefused"
    """Another object of the pool is not, or its kind is not served."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateRefusal:
    """The API server's last refusal to create a pod of this pool. In memory only: a restarted operator asks again."""

    at: float
    reason: RefusalReason
    message: str
    revision: str
    """Of the pod that was refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteRefusal:
    """The API server's last refusal of a write that makes no pod. In memory only."""

    at: float
    reason: RefusalReason
    kind: str
    """Of the object, e.g. "ConfigMap"."""
    name: str
    message: str
    is_withheld: bool
    """An object of ours was refused (EnsureObject): until it is time to ask again, the rest of the pool goes on without it."""
    generation: int
    """Of the pool then: a changed spec is tried at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """Everything `decide` may look at."""

    pool: Pool
    now: float
    pods: tuple[ObservedPod, ...] = ()
    nodes: tuple[ObservedNode, ...] | None = None
    """None: this installation may not read nodes (C35)."""
    children: tuple[ObservedChild, ...] = ()
    optional_kinds: frozenset[ChildKind] = frozenset()
    """Of SCALED_OBJECT, POD_MONITOR, NETWORK_POLICY: those that the cluster serves and the installation uses."""
    forbidden_kinds: frozenset[ChildKind] = frozenset()
    """Those that the installation may not use, whatever the cluster serves."""
    create_refusal: CreateRefusal | None = None
    write_refusals: tuple[WriteRefusal, ...] = ()
    config_refusal: str = ""
    """Why rendering refused a part of the overlay; then no pod is created."""
    reference: ReferenceNote | None = None
    load: PoolLoad | None = None
    """None: not a VEPool, or not known yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CreatePod:
    """POST; 409 is success of somebody else (C28)."""

    name: str
    revision: str
    incarnation: int
    avoid_nodes: tuple[str, ...] = ()
    """Required nodeAffinity NotIn hostname; at most 8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartDrain:
    """Annotate with draining-since = now, set the gate False, call the engine's Drain with this many seconds."""

    name: str
    uid: str
    timeout_seconds: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeletePod:
    """DELETE with UID precondition."""

    name: str
    uid: str
    grace_seconds: int | None
    """None: the pod's own terminationGracePeriodSeconds, so that preStop can drain."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SetPoolAnnotation:
    """Merge patch of the pool's metadata."""

    key: str
    value: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EnsureObject:
    """Apply the rendered object of this kind and name."""

    kind: ChildKind
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteObject:
    kind: ChildKind
    name: str


class EventType(StrEnum):
    NORMAL = "Normal"
    WARNING = "Warning"


@dataclass(frozen=True, slots=True, kw_only=True)
class EmitEvent:
    """Always accompanies a write or a flip of a condition, so that a pass without changes emits none."""

    type: EventType
    reason: EventReason
    message: str
    node: str = ""
    """Also recorded on this node, if the installation may."""


Action = SetPoolAnnotation | EnsureObject | CreatePod | StartDrain | DeletePod | DeleteObject | EmitEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What to do now, and what to say about it."""

    actions: tuple[Action, ...]
    """In the order in which they must be done; if one fails, those after it are not done (the ledger is written before the
    pod that is the evidence is deleted, a config map before its pods are created). 409 on CreatePod, and 404 or a failed
    precondition on DeletePod and StartDrain, are no failures."""
    status: PoolStatus | VEPoolStatus
    next_wakeup: float | None
    """When time alone will change the decision; None = never."""
    reasons: tuple[str, ...] = ()
    """For the log: why each action was taken or withheld."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorTimes:
    """Times and counts that no user of a pool sets (C40); tests shorten them. Defaults are those of k8s.md 4.5 to 4.7."""

    restart_window_seconds: float = 1800.0
    """Restarts are counted over this span."""
    crash_restarts: int = 3
    """This many restarts within the window are a crash loop."""
    crash_loop_seconds: float = 300.0
    """CrashLoopBackOff for this long is one, too."""
    crash_replacements: int = 3
    """After this many replacements on two nodes the pool is stalled."""
    image_pull_seconds: float = 600.0
    node_avoid_seconds: float = 3600.0
    max_avoided_nodes: int = 8
    admission_refusals: int = 2
    """A node is avoided after this many pods Failed on it."""
    backoff_seconds: float = 10.0
    """First pause after a Failed pod; doubles each time."""
    max_backoff_seconds: float = 600.0
    refusal_retry_seconds: float = 60.0
    unschedulable_seconds: float = 60.0
    """A pod Unschedulable for this long has found no room."""
    drained_grace_seconds: int = 45
    """Engine exit 20 s, KV daemon 15 s, unmount 10 s (k8s.md 4.7)."""
    unready_seconds: float = 60.0
    """A PE that was Ready and is not for less than this may come back by itself."""
    unreachable_seconds: float = 10.0
    """An engine that does not answer Drain for this long counts as drained."""
    maintenance_notice_seconds: float = 120.0
    """Longest drain on a node with a maintenance taint: what the provider grants."""
    default_restart_seconds: float = 600.0
    """Restart time of a PE until one was measured."""
    foreign_bytes: int = 1_000_000_000
    """GPU memory held by others above which an out-of-memory end is no evidence."""


def seconds_since(then: float | None, now: float) -> float:
    """Age of a time that may come from another clock: never negative; a time in the future has age 0; None is 0."""
    return max(0.0, now - then) if then is not None else 0.0
