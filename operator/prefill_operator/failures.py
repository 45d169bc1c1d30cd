"""What is wrong with one pod and what is to be done about it: the table of k8s.md 4.6, row by row.

Pure; decide.py asks for each pod and hands the remedies to rollout.py. The trap: restartPolicy is Always, so a crashed engine
comes back by itself with its GPUs and its host pool; the pod is replaced only where that is the wrong remedy.
"""

from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from prefill_operator.escalation import OOM_EXITS, Escalation, EscalationStep
from prefill_operator.ledger import Ledger, count_ends, ends_of
from prefill_operator.model import (
    ObservedNode,
    ObservedPod,
    OperatorTimes,
    PodPhase,
    SidecarDown,
    Termination,
    seconds_since,
)
from prefill_operator.names import ENGINE_CONTAINER, KVD_CONTAINER
from prefill_plan.errors import ExitCode

IMAGE_REASONS = frozenset(
    {
        "ImagePullBackOff",
        "ErrImagePull",
        "InvalidImageName",
        "ErrImageNeverPull",
        "ImageInspectError",
        "RegistryUnavailable",
    }
)
CONTAINER_REASONS = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError"})
"""The kubelet cannot make the container: a missing Secret, a bad mount."""

CRASH_REASON = "CrashLoopBackOff"

_OOM_KILLED = 137
_MORE_MEMORY = MappingProxyType(
    {
        ENGINE_CONTAINER: "raise engine.memoryPerGPU or lower kvCache.hostPool",
        KVD_CONTAINER: "raise kvd.memory",
    }
)
# A Ready condition starts as False when the kubelet first sees the pod, seconds after scheduling; one that turned False later
# than this was True before.
_FIRST_STATUS_SECONDS = 30.0


class PodState(StrEnum):
    """Also the phase and reason that status.unhealthyPEs shows."""

    FOREIGN = "ForeignObject"
    FAILED = "Failed"
    TERMINATING = "Terminating"
    LOST = "NodeLost"
    DRAINING = "Draining"
    READY = "Ready"
    LOADING = "Loading"
    PENDING = "Pending"
    UNSCHEDULABLE = "Unschedulable"
    UNREADY = "NotReady"
    """Was Ready before and did not crash."""
    NODE_NOT_READY = "NodeNotReady"
    CRASHED = "Crashed"
    CRASH_LOOP = "CrashLoop"
    CONFIG_REJECTED = "ConfigRejected"
    OUT_OF_MEMORY = "CudaOom"
    GPU_FAULT = "GPUFault"
    IMAGE_PULL = "ImagePull"
    CONTAINER_ERROR = "ContainerError"
    NODE_CORDONED = "NodeCordoned"
    NODE_MAINTENANCE = "NodeMaintenance"


GONE_STATES = frozenset({PodState.FOREIGN, PodState.FAILED, PodState.TERMINATING, PodState.LOST})
"""Not live: neither serves nor will serve."""

STUCK_STATES = frozenset(
    {PodState.CRASHED, PodState.CRASH_LOOP, PodState.CONFIG_REJECTED, PodState.OUT_OF_MEMORY}
    | {PodState.GPU_FAULT, PodState.IMAGE_PULL, PodState.CONTAINER_ERROR}
)
"""Not loading now, though not Ready."""


class Remedy(StrEnum):
    NONE = "None"
    DELETE = "Delete"
    """A Failed or lost pod: only the object is left."""
    REPLACE_NOW = "ReplaceNow"
    """Serves nothing: delete at once, create elsewhere."""
    REPLACE_FIRST = "ReplaceFirst"
    """Still serves: create elsewhere, then drain."""
    DRAIN_NOW = "DrainNow"
    """Its node is about to go: create elsewhere and drain at the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    state: PodState
    remedy: Remedy = Remedy.NONE
    message: str = ""
    since: float = 0.0
    wakeup: float | None = None
    """When time alone will change this verdict."""
    avoids_node: bool = False
    """The replacement must not go to the same node, and the ledger remembers it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureContext:
    """What a verdict depends on beside the pod."""

    now: float
    times: OperatorTimes
    nodes: dict[str, ObservedNode] | None
    ledger: Ledger
    escalation: Escalation
    node_lost_seconds: float
    is_crash_stalled: bool
    """So many replacements crashed that another one would be the next."""
    vain_avoiders: frozenset[str]
    """Names of pods that would find room on a node which they avoid only by memory."""


def judge_pod(pod: ObservedPod, context: FailureContext) -> Verdict:
    """State and remedy of one pod. Checked from "no longer ours to act on" to "serving"."""
    if pod.foreign:
        return Verdict(state=PodState.FOREIGN, message="has another owner; left alone", since=pod.created_at)
    if pod.terminating_since is not None:
        return Verdict(state=PodState.TERMINATING, since=pod.terminating_since)
    if pod.phase in {PodPhase.FAILED, PodPhase.SUCCEEDED}:
        since = pod.failed_at if pod.failed_at is not None else pod.created_at
        reason = pod.failed_reason or str(pod.phase)
        return Verdict(state=PodState.FAILED, remedy=Remedy.DELETE, message=reason, since=since)
    lost, lost_wakeup = _judge_node_loss(pod, context)
    if lost is not None:
        return lost
    if pod.draining_since is not None:
        return Verdict(state=PodState.DRAINING, since=pod.draining_since)
    if not pod.node:
        return _judge_unscheduled(pod, context)
    return _judge_node_order(pod, context) or _judge_engine(pod, context, lost_wakeup)


def is_crash_stalled(ledger: Ledger, *, revision: str, last_ready_at: float, times: OperatorTimes) -> bool:
    """Whether replacing crash-looping pods of this revision has not helped: often enough, on two nodes, none Ready since.

    Where there is no second node, twice as many are enough.
    """
    rows = [
        row
        for row in ledger.replaced
        if row.cause == PodState.CRASH_LOOP and row.revision == revision and row.at > last_ready_at
    ]
    if len({row.node for row in rows}) >= 2:
        return len(rows) >= times.crash_replacements
    return len(rows) >= 2 * times.crash_replacements


def is_node_dead(pod: ObservedPod, context: FailureContext) -> bool:
    """Whether the pod's node is lost, whatever the state of the pod: its GPUs are nobody's."""
    return _judge_node_loss(pod, context)[0] is not None


def describe_end(end: Termination, *, container: str = ENGINE_CONTAINER) -> str:
    """E.g. "CudaOom in warmup: no 3.2 GB left"; host memory is named where the kernel killed the container."""
    if end.reason == "OOMKilled" or (end.exit_code == _OOM_KILLED and container == ENGINE_CONTAINER):
        advice = _MORE_MEMORY.get(container, "raise its memory")
        return f"OOMKilled: host memory; {advice}"
    name = end.code or end.reason or "ended"
    phase = f" in {end.phase}" if end.phase else ""
    detail = f": {end.detail}" if end.detail else ""
    if end.foreign_bytes:
        detail = f": another process holds {end.foreign_bytes / 1e9:.1f} GB of the GPU"
    return f"{name} (exit {end.exit_code}){phase}{detail}"


def _judge_node_loss(pod: ObservedPod, context: FailureContext) -> tuple[Verdict | None, float | None]:
    """LOST, or else when it would become so."""
    if pod.disruption_target:
        return Verdict(
            state=PodState.LOST, remedy=Remedy.DELETE, message=pod.disruption_target, since=pod.created_at
        ), None
    if context.nodes is None or not pod.node:
        return None, None
    node = context.nodes.get(pod.node)
    # A node we have never seen may be newer than our view of nodes, so its absence counts from the binding.
    down_since = pod.scheduled_at if node is None else node.ready_changed_at
    if node is not None and node.ready:
        return None, None
    if seconds_since(down_since, context.now) < context.node_lost_seconds:
        return None, (down_since or context.now) + context.node_lost_seconds
    what = f"node {pod.node} is gone" if node is None else f"node {pod.node} is not Ready"
    return Verdict(state=PodState.LOST, remedy=Remedy.DELETE, message=what, since=down_since or pod.created_at), None


def _judge_unscheduled(pod: ObservedPod, context: FailureContext) -> Verdict:
    if pod.unschedulable_since is None:
        return Verdict(state=PodState.PENDING, since=pod.created_at)
    due = pod.unschedulable_since + context.times.unschedulable_seconds
    if due <= context.now and pod.name in context.vain_avoiders:
        return Verdict(
            state=PodState.UNSCHEDULABLE,
            remedy=Remedy.REPLACE_NOW,
            message=f"made again without avoiding {', '.join(pod.avoid_nodes)}",
            since=pod.unschedulable_since,
        )
    return Verdict(
        state=PodState.UNSCHEDULABLE,
        message=pod.unschedulable_message,
        since=pod.unschedulable_since,
        wakeup=due if due > context.now else None,
    )


def _judge_node_order(pod: ObservedPod, context: FailureContext) -> Verdict | None:
    """What the node's owner or a health agent wants, and device faults (C34)."""
    node = context.nodes.get(pod.node) if context.nodes is not None else None
    if pod.unhealthy_devices:
        devices = ", ".join(pod.unhealthy_devices[:8])
        return _replace(pod, PodState.GPU_FAULT, f"device {devices} on {pod.node} is Unhealthy", avoids=True)
    if node is None:
        return None
    if node.gpu_fault:
        return _replace(pod, PodState.GPU_FAULT, f"{node.name}: {node.gpu_fault}", avoids=True)
    if node.maintenance_taint:
        verdict = _replace(pod, PodState.NODE_MAINTENANCE, f"{node.name} has taint {node.maintenance_taint}")
        if pod.ready:
            return Verdict(state=verdict.state, remedy=Remedy.DRAIN_NOW, message=verdict.message, since=verdict.since)
        return verdict
    if node.cordoned:
        return _replace(pod, PodState.NODE_CORDONED, f"{node.name} is cordoned")
    return None


def _replace(pod: ObservedPod, state: PodState, message: str, *, avoids: bool = False) -> Verdict:
    since = pod.ready_changed_at if pod.ready_changed_at is not None else pod.created_at
    remedy = Remedy.REPLACE_FIRST if pod.ready else Remedy.REPLACE_NOW
    return Verdict(state=state, remedy=remedy, message=message, since=since, avoids_node=avoids)


def _judge_engine(pod: ObservedPod, context: FailureContext, lost_wakeup: float | None) -> Verdict:
    end = pod.termination
    since = pod.ready_changed_at if pod.ready_changed_at is not None else pod.created_at
    fault_since = context.now - context.times.node_avoid_seconds
    if end is not None and end.exit_code == ExitCode.GPU_FAULT and end.at >= fault_since:
        return _replace(pod, PodState.GPU_FAULT, describe_end(end), avoids=True)
    if context.escalation.step is EscalationStep.WAIT and context.escalation.has_evidence_of(pod):
        return _replace(pod, PodState.OUT_OF_MEMORY, context.escalation.message, avoids=True)
    if pod.ready:
        return Verdict(state=PodState.READY, since=since, wakeup=lost_wakeup)
    if pod.waiting_reason in IMAGE_REASONS | CONTAINER_REASONS:
        return _judge_waiting(pod, context)
    # An end long before the pod turned not Ready is not why it did.
    if end is not None and end.at >= (pod.ready_changed_at or 0.0) - _FIRST_STATUS_SECONDS:
        return _judge_crash(pod, end, context)
    if pod.sidecar is not None:
        return _judge_sidecar(pod, pod.sidecar, context)
    if lost_wakeup is not None:
        return Verdict(state=PodState.NODE_NOT_READY, message=pod.node, since=since, wakeup=lost_wakeup)
    if pod.scheduled_at is not None and since - pod.scheduled_at > _FIRST_STATUS_SECONDS:
        due = since + context.times.unready_seconds
        return Verdict(state=PodState.UNREADY, since=since, wakeup=due if due > context.now else None)
    return Verdict(state=PodState.LOADING, since=pod.scheduled_at or pod.created_at)


def _judge_waiting(pod: ObservedPod, context: FailureContext) -> Verdict:
    """The container does not come to life; another pod would not either (k8s.md 4.6)."""
    is_image = pod.waiting_reason in IMAGE_REASONS
    since = pod.waiting_since if pod.waiting_since is not None else pod.created_at
    due = since + context.times.image_pull_seconds
    return Verdict(
        state=PodState.IMAGE_PULL if is_image else PodState.CONTAINER_ERROR,
        message=f"{pod.waiting_reason}: {pod.waiting_message}" if pod.waiting_message else pod.waiting_reason,
        since=since,
        wakeup=due if due > context.now else None,
    )


def _judge_crash(pod: ObservedPod, end: Termination, context: FailureContext) -> Verdict:
    message = describe_end(end)
    if end.exit_code in {ExitCode.CONFIG, ExitCode.CHECKPOINT}:
        return Verdict(state=PodState.CONFIG_REJECTED, message=message, since=end.at)
    if end.exit_code in OOM_EXITS and context.escalation.step is EscalationStep.EXHAUSTED:
        return Verdict(state=PodState.OUT_OF_MEMORY, message=message, since=end.at)
    window = context.now - context.times.restart_window_seconds
    count = count_ends(context.ledger, pod, since=window)
    seen = ends_of(context.ledger, pod, since=window)
    first_at = float(seen[0].at) if seen else end.at
    loop_at = first_at + context.times.crash_loop_seconds
    is_waiting = pod.waiting_reason == CRASH_REASON
    if count >= context.times.crash_restarts or (is_waiting and context.now >= loop_at):
        text = f"{message}; {count} ends in {(end.at - first_at) / 60:.0f} min"
        if context.is_crash_stalled:
            return Verdict(state=PodState.CRASH_LOOP, message=message, since=first_at)
        return Verdict(
            state=PodState.CRASH_LOOP, remedy=Remedy.REPLACE_NOW, message=text, since=first_at, avoids_node=True
        )
    state = PodState.CRASHED if is_waiting else PodState.LOADING
    return Verdict(state=state, message=message, since=end.at, wakeup=loop_at if is_waiting else None)


def _judge_sidecar(pod: ObservedPod, sidecar: SidecarDown, context: FailureContext) -> Verdict:
    """A container before the engine is down; then the pod is not Ready, whether its engine runs or waits for it."""
    message = f"{sidecar.name}: {describe_end(sidecar.end, container=sidecar.name)}"
    if sidecar.end.exit_code == ExitCode.CONFIG:
        return Verdict(state=PodState.CONFIG_REJECTED, message=message, since=sidecar.end.at)
    if not sidecar.is_waiting:
        return Verdict(state=PodState.LOADING, message=message, since=sidecar.end.at)
    since = pod.ready_changed_at if pod.ready_changed_at is not None else pod.created_at
    due = since + context.times.crash_loop_seconds
    if context.now < due:
        return Verdict(state=PodState.CRASHED, message=message, since=since, wakeup=due)
    remedy = Remedy.NONE if context.is_crash_stalled else Remedy.REPLACE_NOW
    is_replaced = remedy is Remedy.REPLACE_NOW
    return Verdict(state=PodState.CRASH_LOOP, remedy=remedy, message=message, since=since, avoids_node=is_replaced)
