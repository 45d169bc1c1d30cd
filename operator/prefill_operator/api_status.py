"""Status of both kinds as the operator writes it. Everything here can be rebuilt from pods, nodes and the spec.

Counts are always written, 0 included, so that `kubectl get` shows no blank cell; fields that are None are left out.
"""

from enum import StrEnum
from typing import Any

import msgspec

from prefill_operator.api_parts import ApiStruct
from prefill_plan.config import Device


class ConditionStatus(StrEnum):
    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class PlanSource(StrEnum):
    PLANNER = "Planner"
    FIXED = "Fixed"
    ESCALATED = "Escalated"


class PlannedEngram(StrEnum):
    GPU = "GPU"
    HOST = "Host"


class Condition(ApiStruct):
    type: str
    """A names.ConditionType; str, since a status may hold what a newer operator wrote."""
    status: ConditionStatus
    reason: str
    message: str
    last_transition_time: str
    """RFC 3339; moves only when `status` flips."""
    observed_generation: int = 0


class RedundancyStatus(ApiStruct):
    desired: int = 0
    ready: int = 0
    expected_availability: str | None = None
    """Share of time with at least `replicas` ready, e.g. "0.999067"; None without spec.quota.redundancy.availability."""
    restart_seconds: int | None = None
    """p90 of the measured loads; None before the first."""


class PlanStatus(ApiStruct):
    """The memory plan in use; sizes are quantities, e.g. "93.4G"."""

    ep: int
    source: PlanSource
    hash: str
    engram: PlannedEngram | None = None
    degraded: str = ""
    """The planner tier in use; "" = full configuration."""
    memory_per_gpu: str | None = None
    weights_per_gpu: str | None = None
    kv_per_gpu: str | None = None
    kv_tokens_per_gpu: int | None = None
    headroom_per_gpu: str | None = None
    host_memory_per_pe: str | None = None
    escalated_at: str | None = None


class UnhealthyPod(ApiStruct):
    """One pod that is not Ready and should be; the worst come first."""

    name: str
    node: str = ""
    phase: str = ""
    reason: str = ""
    message: str = ""
    since: str | None = None


class UnhealthyPE(UnhealthyPod):
    ep: int = 0


class LoadStatus(ApiStruct):
    """Load of the ready VEs in two digits, by their own word (engine_load.py)."""

    pending_patches: int = 0
    patches_per_second: int = 0
    imbalance: str = ""
    """Largest over mean pending patches, e.g. "1.25"."""
    observed_at: str | None = None
    """When these figures were first measured; equal ones keep the time."""


class PoolStatus(ApiStruct):
    """Status of a PrefillPool."""

    observed_generation: int = 0
    device: Device = Device.GPU
    replicas: int = 0
    """For /scale: min(existing PEs, spec.replicas); never counts spares (k8s.md 3.4)."""
    selector: str = ""
    total_pes: int = 0
    ready_pes: int = 0
    updated_pes: int = 0
    loading_pes: int = 0
    draining_pes: int = 0
    gpus: int = 0
    current_revision: str = ""
    update_revision: str = ""
    redundancy: RedundancyStatus = RedundancyStatus()
    plan: PlanStatus | None = None
    conditions: tuple[Condition, ...] = ()
    unhealthy_pes: tuple[UnhealthyPE, ...] = ()
    not_watched: tuple[str, ...] = ()
    """Resources the operator may not watch, e.g. "nodes": what depends on them is off (C35)."""


class VEPoolStatus(ApiStruct):
    """Status of a VEPool."""

    observed_generation: int = 0
    replicas: int = 0
    selector: str = ""
    total_ves: int = 0
    ready_ves: int = 0
    updated_ves: int = 0
    loading_ves: int = 0
    draining_ves: int = 0
    gpus: int = 0
    current_revision: str = ""
    update_revision: str = ""
    redundancy: RedundancyStatus = RedundancyStatus()
    load: LoadStatus | None = None
    conditions: tuple[Condition, ...] = ()
    unhealthy_ves: tuple[UnhealthyPod, ...] = ()
    not_watched: tuple[str, ...] = ()


def status_body(status: PoolStatus | VEPoolStatus) -> dict[str, Any]:
    """The status as JSON-ready data for server-side apply; fields that are None are left out."""
    body = _without_none(msgspec.to_builtins(status))
    assert isinstance(body, dict)
    return body


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_without_none(item) for item in value]
    return value
