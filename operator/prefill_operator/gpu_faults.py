"""When GPU faults leave a pool without a node to go to, so that a human is needed: Stalled=True/GPUFault (k8s.md 4.6).

Pure; called once per pass by decide.py. One faulty node is replaced and avoided and is no reason to call anybody. The trap: an
engine that ends with exit 14 is the only witness of its fault, and its pod is gone by now; the ledger remembers it, until a pod
became Ready on that node or the time of avoidance is over.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from prefill_operator.failures import PodState
from prefill_operator.fleet import Fleet
from prefill_operator.ledger import Ledger, Replacement
from prefill_operator.messages import format_time
from prefill_operator.model import ObservedNode, OperatorTimes
from prefill_operator.rollout import Situation

_MAX_NAMED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuStall:
    message: str
    """"" = GPU faults need no human."""
    until: float | None = None
    """When the oldest memory that it rests on ends; None = time alone changes nothing."""


NO_GPU_STALL = GpuStall(message="")


def judge_gpu_faults(fleet: Fleet, ledger: Ledger, situation: Situation) -> GpuStall:
    """Whether every node that could hold a pod of this plan has faulty GPUs, or so many in a row that no end is in sight."""
    times = situation.times
    if not situation.targets.total or not situation.plan.feasible:
        return NO_GPU_STALL
    rows = _rows_in_force(ledger, fleet, now=situation.now, times=times)
    message = _judge_nodes(fleet, rows, situation) or _judge_series(fleet, rows, situation)
    if not message:
        return NO_GPU_STALL
    return GpuStall(message=message, until=min((row.at + times.node_avoid_seconds for row in rows), default=None))


def _rows_in_force(ledger: Ledger, fleet: Fleet, *, now: float, times: OperatorTimes) -> list[Replacement]:
    """Replacements because of a GPU fault on nodes where nothing has become Ready since."""
    since = now - times.node_avoid_seconds
    proved: dict[str, float] = {}
    for view in fleet.views:
        if view.is_serving and view.state is not PodState.GPU_FAULT:
            proved[view.pod.node] = max(proved.get(view.pod.node, 0.0), view.pod.ready_changed_at or 0.0)
    return [
        row
        for row in ledger.replaced
        if row.cause == PodState.GPU_FAULT and row.at > since and row.at > proved.get(row.node, 0.0)
    ]


def _judge_nodes(fleet: Fleet, rows: Sequence[Replacement], situation: Situation) -> str:
    """A pool whose pods request no GPUs says nothing about which nodes have room for it."""
    gpus, product = situation.plan.gpus, situation.intent.gpu_product
    if situation.nodes is None or not gpus:
        return ""
    fitting = [node for node in situation.nodes if node.gpu_capacity >= gpus and product in ("", node.gpu_product)]
    reports = {node.name: _report(node, gpus, fleet) for node in fitting}
    memories = {node.name: _memory(node, rows) for node in fitting if not reports[node.name]}
    faulty = {name: text for name, text in {**reports, **memories}.items() if text}
    num_closed = sum(node.name not in faulty and _is_closed(node) for node in fitting)
    if not faulty or len(faulty) + num_closed < len(fitting):
        return ""
    # What is only remembered counts while pods are missing: a node may be well again, and nobody needs it.
    if any(memories.values()) and fleet.num_serving >= situation.targets.total:
        return ""
    named = [f"{name}: {text}" for name, text in sorted(faulty.items())]
    more = f"; and {len(named) - _MAX_NAMED} more" if len(named) > _MAX_NAMED else ""
    others = f"; {num_closed} not Ready, cordoned or in maintenance" if num_closed else ""
    return (
        f"no healthy node is left for a {situation.intent.noun} of {gpus} GPUs: {len(faulty)} of {len(fitting)} nodes "
        f"have GPU faults ({'; '.join(named[:_MAX_NAMED])}{more}){others}"
    )


def _report(node: ObservedNode, gpus: int, fleet: Fleet) -> str:
    """What node, device plug-in or kubelet say now; "" = nothing."""
    if node.gpu_fault:
        return node.gpu_fault
    devices = sum(len(view.pod.unhealthy_devices) for view in fleet.views if view.pod.node == node.name)
    if devices:
        return f"{devices} devices of running pods are Unhealthy"
    if node.ready and node.gpu_allocatable < gpus:
        return f"{node.gpu_allocatable} of {node.gpu_capacity} GPUs left"
    return ""


def _memory(node: ObservedNode, rows: Sequence[Replacement]) -> str:
    times = [row.at for row in rows if row.node == node.name]
    if not times:
        return ""
    return f"{_count(len(times))}, the last at {format_time(max(times))}"


def _judge_series(fleet: Fleet, rows: Sequence[Replacement], situation: Situation) -> str:
    """Replacements that met one GPU fault after the other, none of which came up.

    Where nodes are seen there may be healthy ones: then only as many as can be avoided at once, and more would repeat.
    """
    plan, times = situation.plan, situation.times
    rows = [row for row in rows if row.revision == plan.revision and row.at > fleet.last_ready_at]
    num_nodes = len({row.node for row in rows})
    sees_nodes = situation.nodes is not None and plan.gpus > 0
    limit = times.max_avoided_nodes if sees_nodes else times.crash_replacements
    if len(rows) < (limit if num_nodes >= 2 else 2 * times.crash_replacements):
        return ""
    last = max(rows, key=lambda row: row.at)
    where = f"{num_nodes} node{'s' if num_nodes > 1 else ''}"
    return (
        f"the last {len(rows)} {situation.intent.noun}s on {where} had GPU faults and none became Ready since; "
        f"the last was on {last.node} at {format_time(last.at)}"
    )


def _count(number: int) -> str:
    return f"{number} engines ended with a GPU fault" if number > 1 else "an engine ended with a GPU fault"


def _is_closed(node: ObservedNode) -> bool:
    return not node.ready or node.cordoned or bool(node.maintenance_taint)
