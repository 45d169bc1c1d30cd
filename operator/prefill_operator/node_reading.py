"""Raw nodes as the planner sees them, and how many GPUs of them are taken."""

from collections.abc import Mapping
from dataclasses import dataclass

from prefill_operator.model import ObservedNode
from prefill_operator.pod_reading import device_count, parse_time
from prefill_operator.resources import Json
from prefill_operator.settings import NodeSignals

GPU_PRODUCT_LABEL = "nvidia.com/gpu.product"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """One node in the cache. `observed` lacks the GPU counts: which resource counts depends on the pool."""

    observed: ObservedNode
    capacity: Mapping[str, int]
    """Devices by resource name."""
    allocatable: Mapping[str, int]

    def view(self, gpu_resource: str, *, taken: int) -> ObservedNode:
        """For pools that use `gpu_resource`, of which the pods we can see request `taken`."""
        node, allocatable = self.observed, self.allocatable.get(gpu_resource, 0)
        return ObservedNode(
            name=node.name,
            ready=node.ready,
            ready_changed_at=node.ready_changed_at,
            cordoned=node.cordoned,
            taints=node.taints,
            maintenance_taint=node.maintenance_taint,
            gpu_fault=node.gpu_fault,
            gpu_product=node.gpu_product,
            gpu_capacity=self.capacity.get(gpu_resource, 0),
            gpu_allocatable=allocatable,
            gpu_free=max(0, allocatable - taken),
        )


def read_node(body: Json, signals: NodeSignals) -> NodeRecord:
    metadata, spec, status = body["metadata"], body.get("spec") or {}, body.get("status") or {}
    conditions = {item.get("type"): item for item in status.get("conditions") or ()}
    ready = conditions.get("Ready", {})
    taints = tuple(taint.get("key", "") for taint in spec.get("taints") or ())
    observed = ObservedNode(
        name=metadata["name"],
        ready=ready.get("status") == "True",
        ready_changed_at=parse_time(ready.get("lastTransitionTime"))
        or parse_time(metadata.get("creationTimestamp"))
        or 0.0,
        cordoned=bool(spec.get("unschedulable")),
        taints=taints,
        maintenance_taint=next((key for key in taints if key in signals.maintenance_taints), ""),
        gpu_fault=_read_fault(metadata, taints, conditions, signals),
        gpu_product=(metadata.get("labels") or {}).get(GPU_PRODUCT_LABEL, ""),
    )
    return NodeRecord(
        observed=observed, capacity=_devices(status.get("capacity")), allocatable=_devices(status.get("allocatable"))
    )


def _read_fault(metadata: Json, taints: tuple[str, ...], conditions: Mapping[str, Json], signals: NodeSignals) -> str:
    for name in signals.fault_conditions:
        condition = conditions.get(name, {})
        if condition.get("status") == "True":
            return f"condition {name}: {condition.get('message') or condition.get('reason') or 'True'}"
    notes = metadata.get("annotations") or {}
    for name in signals.fault_annotations:
        if notes.get(name):
            return f"annotation {name}: {notes[name]}"
    found = next((key for key in taints if key in signals.fault_taints), "")
    return f"taint {found}" if found else ""


def _devices(amounts: Mapping[str, str | int] | None) -> dict[str, int]:
    return {name: device_count(amount) for name, amount in (amounts or {}).items() if "/" in name}
