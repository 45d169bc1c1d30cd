"""Raw pods as the planner sees them: PodRecord.

Called once per event, so that the cache holds small records and not whole pods. The trap: fields of a foreign or broken
object may be missing or null; nothing here raises on them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

import msgspec

from prefill_operator.model import ObservedPod, PodPhase, SidecarDown, Termination
from prefill_operator.names import (
    ACCEPTING_GATE,
    DRAINING_SINCE_ANNOTATION,
    ENCODER_CONTAINER,
    ENGINE_CONTAINER,
    EP_ANNOTATION,
    KIND_LABEL,
    KV_STORE_ANNOTATION,
    KV_STORE_DEGRADED,
    PLAN_HASH_ANNOTATION,
    POOL_LABEL,
    POOL_UID_ANNOTATION,
    Kind,
    parse_pod_name,
)
from prefill_operator.ports import GRPC_PORT_NAME
from prefill_operator.quantity import quantity_value
from prefill_operator.resources import Json, PoolKey

HOST_NAME_LABEL = "kubernetes.io/hostname"
_MAX_WORDS = 500
_GENERIC_WAITS = ("ContainerCreating", "PodInitializing")


@dataclass(frozen=True, slots=True, kw_only=True)
class PodRecord:
    """One pod in the cache. `observed` lacks what depends on its pool: gpus, foreign, and the state of a drain."""

    pool: PoolKey
    observed: ObservedPod
    controller_uid: str
    """UID of the controlling owner; "" = none."""
    pool_uid: str
    """From the pod's annotation."""
    address: str
    """host:port of the engine; "" until the pod has an IP."""
    extended: Mapping[str, int]
    """Requested devices by resource name, e.g. {"nvidia.com/gpu": 4}."""
    has_gate: bool
    """Has the readiness gate."""
    containers_ready: bool


class _Message(msgspec.Struct, rename="camel"):
    """The termination message of k8s.md 4.6."""

    code: str = ""
    phase: str = ""
    plan_hash: str = ""
    want_bytes: int | None = 0
    free_bytes: int | None = 0
    foreign_bytes: int | None = 0
    detail: str = ""


def read_pod(body: Json) -> PodRecord | None:
    """None if its labels name no pool."""
    labels = body["metadata"].get("labels") or {}
    kind, pool = labels.get(KIND_LABEL), labels.get(POOL_LABEL)
    if kind not in tuple(Kind) or not pool:
        return None
    return read_pod_of(PoolKey(kind=Kind(kind), namespace=body["metadata"].get("namespace", ""), name=pool), body)


def read_pod_of(key: PoolKey, body: Json) -> PodRecord:
    """The record of a pod that concerns this pool, whatever its labels say."""
    metadata, spec, status = body["metadata"], body.get("spec") or {}, body.get("status") or {}
    notes = metadata.get("annotations") or {}
    conditions = {item.get("type"): item for item in status.get("conditions") or ()}
    has_gate = any(gate.get("conditionType") == ACCEPTING_GATE for gate in spec.get("readinessGates") or ())
    observed = _read_observed(
        key, metadata, spec, status, conditions, gate=_read_gate(conditions) if has_gate else None
    )
    return PodRecord(
        pool=key,
        observed=observed,
        controller_uid=controller_uid(metadata),
        pool_uid=notes.get(POOL_UID_ANNOTATION, ""),
        address=_read_address(spec, status),
        extended=_read_extended(spec),
        has_gate=has_gate,
        containers_ready=_is_true(conditions.get("ContainersReady")),
    )


def controller_uid(metadata: Json) -> str:
    owners: Iterable[Json] = metadata.get("ownerReferences") or ()
    return next((str(owner.get("uid", "")) for owner in owners if owner.get("controller")), "")


def parse_time(text: object) -> float | None:
    """RFC 3339 as seconds since the epoch; None for anything else."""
    if not isinstance(text, str):
        return None
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


def device_count(amount: object) -> int:
    """Whole devices of a quantity; 0 for what is none."""
    try:
        return int(quantity_value(amount)) if isinstance(amount, int | str) else 0
    except ValueError:
        return 0


def _read_observed(
    key: PoolKey, metadata: Json, spec: Json, status: Json, conditions: Mapping[str, Json], *, gate: bool | None
) -> ObservedPod:
    notes = metadata.get("annotations") or {}
    identity = parse_pod_name(key.kind, key.name, metadata["name"])
    created = parse_time(metadata.get("creationTimestamp")) or 0.0
    scheduled, ready = conditions.get("PodScheduled", {}), conditions.get("Ready", {})
    scheduled_at = parse_time(scheduled.get("lastTransitionTime")) if _is_true(scheduled) else None
    unschedulable = scheduled.get("status") == "False" and scheduled.get("reason") == "Unschedulable"
    phase = status.get("phase") or "Pending"
    main = _named(status.get("containerStatuses"), (ENGINE_CONTAINER, ENCODER_CONTAINER))
    termination = _read_termination(main)
    waiting = _read_waiting(main, status.get("initContainerStatuses") or ())
    disruption = conditions.get("DisruptionTarget", {})
    return ObservedPod(
        name=metadata["name"],
        uid=metadata.get("uid", ""),
        revision=identity.revision if identity else "",
        incarnation=identity.incarnation if identity else 0,
        ep=_read_int(notes.get(EP_ANNOTATION), default=1),
        gpus=0,
        created_at=created,
        node=spec.get("nodeName") or "",
        phase=PodPhase(phase) if phase in tuple(PodPhase) else PodPhase.UNKNOWN,
        scheduled_at=scheduled_at,
        ready=_is_true(ready),
        ready_changed_at=parse_time(ready.get("lastTransitionTime")),
        terminating_since=_read_terminating(metadata),
        failed_reason=(status.get("reason") or "Failed") if phase == "Failed" else "",
        failed_at=_read_failed_at(status, conditions, created) if phase == "Failed" else None,
        unschedulable_since=parse_time(scheduled.get("lastTransitionTime")) if unschedulable else None,
        unschedulable_message=scheduled.get("message") or "" if unschedulable else "",
        waiting_reason=waiting.get("reason") or "",
        waiting_message=waiting.get("message") or "",
        waiting_since=(termination.at if termination else scheduled_at) if waiting else None,
        restart_count=main.get("restartCount") or 0,
        termination=termination,
        sidecar=_read_sidecar(status.get("initContainerStatuses") or ()),
        draining_since=parse_time(notes.get(DRAINING_SINCE_ANNOTATION)),
        gate=gate,
        unhealthy_devices=_read_devices(status),
        disruption_target=disruption.get("reason") or "" if _is_true(disruption) else "",
        plan_hash=notes.get(PLAN_HASH_ANNOTATION, ""),
        is_store_degraded=notes.get(KV_STORE_ANNOTATION) == KV_STORE_DEGRADED,
        avoid_nodes=_read_avoided(spec),
    )


def _is_true(condition: Json | None) -> bool:
    return bool(condition) and condition is not None and condition.get("status") == "True"


def _read_gate(conditions: Mapping[str, Json]) -> bool | None:
    condition = conditions.get(ACCEPTING_GATE)
    return None if condition is None else _is_true(condition)


def _read_int(text: object, *, default: int) -> int:
    return int(text) if isinstance(text, str) and text.isdecimal() else default


def _read_terminating(metadata: Json) -> float | None:
    """deletionTimestamp is when the grace ends, not when it began."""
    end = parse_time(metadata.get("deletionTimestamp"))
    return None if end is None else end - (metadata.get("deletionGracePeriodSeconds") or 0)


def _read_failed_at(status: Json, conditions: Mapping[str, Json], created: float) -> float:
    """A Failed pod has no time of its own: the latest thing that happened to it."""
    ends = [((item.get("state") or {}).get("terminated") or {}) for item in status.get("containerStatuses") or ()]
    texts = [end.get("finishedAt") for end in ends] + [item.get("lastTransitionTime") for item in conditions.values()]
    return max([time for text in texts if (time := parse_time(text)) is not None], default=created)


def _named(statuses: Iterable[Json] | None, names: tuple[str, ...]) -> Json:
    return next((item for item in statuses or () if item.get("name") in names), {})


def _read_termination(container: Json) -> Termination | None:
    """The last end. While the next try runs, restartCount has already counted it; `restart_count` names the end itself."""
    state, count = container.get("state") or {}, container.get("restartCount") or 0
    ended = state.get("terminated") or (container.get("lastState") or {}).get("terminated")
    if not ended:
        return None
    text = ended.get("message") or ""
    message = _parse_message(text)
    return Termination(
        at=parse_time(ended.get("finishedAt")) or 0.0,
        exit_code=ended.get("exitCode") or 0,
        restart_count=max(0, count - 1) if state.get("running") is not None else count,
        reason=ended.get("reason") or "",
        code=message.code,
        phase=message.phase,
        plan_hash=message.plan_hash,
        foreign_bytes=message.foreign_bytes or 0,
        want_bytes=message.want_bytes or 0,
        free_bytes=message.free_bytes or 0,
        detail=message.detail,
    )


def _parse_message(text: str) -> _Message:
    """An engine killed half way leaves no JSON, or none at all; then its last words, those of its log, are the detail."""
    try:
        return msgspec.json.decode(text, type=_Message)
    except msgspec.DecodeError:
        words = " ".join(text.split())
        return _Message(detail=words if len(words) <= _MAX_WORDS else f"... {words[-_MAX_WORDS:]}")


def _read_waiting(main: Json, inits: Iterable[Json]) -> Json:
    """What the pod waits for. "PodInitializing" of the engine only hides what an init container waits for."""
    states = [(item.get("state") or {}).get("waiting") or {} for item in (main, *inits)]
    waits = [state for state in states if state.get("reason")]
    return next((state for state in waits if state["reason"] not in _GENERIC_WAITS), waits[0] if waits else {})


def _read_sidecar(inits: Iterable[Json]) -> SidecarDown | None:
    """The first one that is down. `started` is False again from its end until its startup probe has succeeded."""
    for item in inits:
        state = item.get("state") or {}
        end = _read_termination(item)
        if end is not None and not (state.get("running") is not None and item.get("started")):
            waiting = state.get("waiting") or {}
            name = str(item.get("name") or "sidecar")
            return SidecarDown(name=name, end=end, is_waiting=waiting.get("reason") == "CrashLoopBackOff")
    return None


def _read_devices(status: Json) -> tuple[str, ...]:
    """Devices that the kubelet reports as withdrawn by their plugin (C34)."""
    return tuple(
        f"{group.get('name')}/{device.get('resourceID')}"
        for container in status.get("containerStatuses") or ()
        for group in container.get("allocatedResourcesStatus") or ()
        for device in group.get("resources") or ()
        if device.get("health") == "Unhealthy"
    )


def _read_avoided(spec: Json) -> tuple[str, ...]:
    affinity = ((spec.get("affinity") or {}).get("nodeAffinity") or {}).get(
        "requiredDuringSchedulingIgnoredDuringExecution"
    ) or {}
    return tuple(
        dict.fromkeys(
            name
            for term in affinity.get("nodeSelectorTerms") or ()
            for rule in term.get("matchExpressions") or ()
            if rule.get("key") == HOST_NAME_LABEL and rule.get("operator") == "NotIn"
            for name in rule.get("values") or ()
        )
    )


def _read_address(spec: Json, status: Json) -> str:
    ip = status.get("podIP") or ""
    for container in (spec.get("containers") or ()) if ip else ():
        for port in container.get("ports") or ():
            if port.get("name") == GRPC_PORT_NAME:
                return f"[{ip}]:{port['containerPort']}" if ":" in ip else f"{ip}:{port['containerPort']}"
    return ""


def _read_extended(spec: Json) -> dict[str, int]:
    """Device requests (names with a domain); native sidecars count, as the scheduler counts them."""
    total: dict[str, int] = {}
    for container in (*(spec.get("containers") or ()), *(spec.get("initContainers") or ())):
        resources = container.get("resources") or {}
        for name, amount in {**(resources.get("limits") or {}), **(resources.get("requests") or {})}.items():
            if "/" in name:
                total[name] = total.get(name, 0) + device_count(amount)
    return total
