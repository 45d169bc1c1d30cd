"""Which nodes a new pod must not go to, and when that is forgotten (k8s.md 4.6).

At most 8 nodes, for an hour, as a required nodeAffinity of the new pod; nodes are never tainted, that is their owner's
business. The trap: an avoided node may be the only one with room, so a pod that finds none is made again without the list.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from prefill_operator.failures import PodState, Remedy
from prefill_operator.fleet import Fleet
from prefill_operator.ledger import REFUSED_EXIT, Ledger
from prefill_operator.model import ObservedNode, ObservedPod, OperatorTimes


def barred_nodes(pods: Iterable[ObservedPod], nodes: Sequence[ObservedNode] | None) -> frozenset[str]:
    """Nodes where nothing may go now, whatever is remembered of them."""
    barred = {pod.node for pod in pods if pod.node and pod.unhealthy_devices and not pod.foreign}
    barred |= {
        node.name for node in nodes or () if node.cordoned or node.maintenance_taint or node.gpu_fault or not node.ready
    }
    return frozenset(barred)


def is_avoidance_vain(
    pod: ObservedPod, nodes: Sequence[ObservedNode] | None, *, barred: frozenset[str], product: str
) -> bool:
    """Whether a pod without room would find some on a node that it avoids only by memory. Without nodes: perhaps."""
    remembered = set(pod.avoid_nodes) - barred
    if not remembered or nodes is None:
        return bool(remembered)
    return any(
        node.name in remembered and node.gpu_free >= pod.gpus and product in ("", node.gpu_product) for node in nodes
    )


def avoided_nodes(
    fleet: Fleet,
    ledger: Ledger,
    nodes: Sequence[ObservedNode] | None,
    *,
    barred: frozenset[str],
    gpus: int,
    product: str,
    now: float,
    times: OperatorTimes,
) -> tuple[str, ...]:
    """Nodes of pods that are being replaced now, then those that the ledger remembers, the newest first.

    If that leaves no node at all, only those where really nothing may go.
    """
    current = [
        view.pod.node
        for view in fleet.views
        if view.pod.node
        and view.verdict.remedy in {Remedy.REPLACE_NOW, Remedy.REPLACE_FIRST, Remedy.DRAIN_NOW}
        and view.state is not PodState.UNSCHEDULABLE
    ]
    remembered = _remembered_nodes(ledger, now=now, times=times)
    avoided = tuple(dict.fromkeys([*current, *remembered]))[: times.max_avoided_nodes]
    usable = {
        node.name
        for node in nodes or ()
        if node.ready and not node.cordoned and node.gpu_allocatable >= gpus and product in ("", node.gpu_product)
    }
    if nodes is not None and not usable - set(avoided):
        return tuple(node for node in avoided if node in barred)
    return avoided


def _remembered_nodes(ledger: Ledger, *, now: float, times: OperatorTimes) -> list[str]:
    since = max(now - times.node_avoid_seconds, ledger.forgotten_at)
    marks = [(row.at, row.node) for row in ledger.replaced if row.at > since]
    refused = [end for end in ledger.ends if end.exit_code == REFUSED_EXIT and end.at > since and end.node]
    counts = Counter(end.node for end in refused)
    marks += [(end.at, end.node) for end in refused if counts[end.node] >= times.admission_refusals]
    return [node for _, node in sorted(marks, reverse=True)]
