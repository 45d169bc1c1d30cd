"""Which pod goes first: orders for scale-down and rollouts, and the node that is emptied for a larger EP (k8s.md 4.5).

Every order ends in incarnation and name, so that two operators with the same view choose the same pod.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from prefill_operator.api_parts import Placement
from prefill_operator.failures import STUCK_STATES, PodState
from prefill_operator.fleet import PodView, count_by_node
from prefill_operator.model import ObservedNode

_STATE_ORDER = {PodState.UNSCHEDULABLE: 0, PodState.PENDING: 1, PodState.LOADING: 3}
_STUCK_ORDER = 2
_OTHER_ORDER = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeChoice:
    """A node to be emptied for one larger pod, or the arithmetic why there is none."""

    victims: tuple[PodView, ...] = ()
    message: str = ""


def order_for_scale_down(views: Iterable[PodView], placement: Placement) -> Iterator[PodView]:
    """Not Ready first, then old revisions, then the PE whose removal helps placement, then least backlog.

    An engine whose backlog is unknown goes before those that tell theirs: it is new, or does not answer.
    Each is chosen as if those before it were gone, so that several at once help placement as much as one by one.
    """
    left = list(views)
    per_node = count_by_node(left)

    def rank(view: PodView) -> tuple[int, int, int, int, float, int, str]:
        on_node = per_node[view.pod.node]
        return (
            _readiness_rank(view),
            1 if view.is_updated else 0,
            # Both say "available last": a PE that is Ready since a second is less of a loss.
            1 if view.is_available else 0,
            on_node if placement is Placement.PACK else -on_node,
            view.pod.backlog_milliseconds or 0.0,
            -view.pod.incarnation,
            view.pod.name,
        )

    while left:
        first = min(left, key=rank)
        left.remove(first)
        per_node[first.pod.node] -= 1
        yield first


def order_for_rollout(views: Iterable[PodView], *, gpus: int, nodes: Sequence[ObservedNode] | None) -> list[PodView]:
    """Oldest first; when new pods need more GPUs than old ones, node by node, so that whole nodes become free."""
    views = sorted(views, key=lambda view: (view.is_available, view.pod.incarnation, view.pod.name))
    if not any(view.pod.gpus < gpus for view in views):
        return views
    per_node = count_by_node(views)
    free = {node.name: node.gpu_free for node in nodes or ()}

    def rank(view: PodView) -> tuple[bool, bool, int, str]:
        node = view.pod.node
        freed = free.get(node, 0) + sum(other.pod.gpus for other in views if other.pod.node == node)
        return (view.is_available, freed < gpus, per_node[node], node)

    return sorted(views, key=rank)


def order_kept_old(views: Iterable[PodView]) -> list[PodView]:
    """Those that a partition keeps come first: Ready ones, then the oldest."""
    return sorted(views, key=lambda view: (not view.pod.ready, view.pod.incarnation, view.pod.name))


def choose_node_to_empty(
    old: Sequence[PodView], *, gpus: int, nodes: Sequence[ObservedNode], spare_pods: int, product: str, noun: str
) -> NodeChoice:
    """The node on which draining the fewest old PEs makes room for one pod of so many GPUs.

    Args:
        old: PEs of this pool that the rollout may drain.
        spare_pods: available PEs that may go at once.
    """
    choices: list[tuple[int, int, str, tuple[PodView, ...]]] = []
    largest, arithmetic = -1, f"a {noun} needs {gpus} GPUs on one node; no node can give them"
    for node in nodes:
        if not _is_usable(node, product):
            continue
        on_node = sorted(
            (view for view in old if view.pod.node == node.name),
            key=lambda view: (view.is_available, -view.pod.gpus, view.pod.incarnation),
        )
        inside = sum(view.pod.gpus for view in on_node)
        if node.gpu_free + inside > largest:
            largest = node.gpu_free + inside
            arithmetic = (
                f"a {noun} needs {gpus} GPUs on one node; best is {node.name} with {node.gpu_free} free and "
                f"{inside} in {len(on_node)} old {noun}s"
            )
        victims = _fewest(on_node, gpus - node.gpu_free)
        if victims is not None:
            choices.append((sum(view.is_available for view in victims), len(victims), node.name, victims))
    if not choices:
        return NodeChoice(message=arithmetic)
    num_available, _, name, victims = min(choices, key=lambda choice: choice[:3])
    if num_available > spare_pods:
        spared = f"emptying {name} takes {num_available} serving {noun}s, only {max(0, spare_pods)} can be spared"
        return NodeChoice(message=f"a {noun} needs {gpus} GPUs on one node; {spared}")
    return NodeChoice(victims=victims)


def has_free_node(nodes: Sequence[ObservedNode], *, gpus: int, product: str) -> bool:
    return any(_is_usable(node, product) and node.gpu_free >= gpus for node in nodes)


def _is_usable(node: ObservedNode, product: str) -> bool:
    is_whole = node.ready and not node.cordoned and not node.maintenance_taint and not node.gpu_fault
    return is_whole and product in ("", node.gpu_product)


def _fewest(views: Sequence[PodView], gpus: int) -> tuple[PodView, ...] | None:
    """The first views that free this many GPUs; None if all together do not, or none are needed."""
    if gpus <= 0:
        return None
    chosen = []
    for view in views:
        chosen.append(view)
        gpus -= view.pod.gpus
        if gpus <= 0:
            return tuple(chosen)
    return None


def _readiness_rank(view: PodView) -> int:
    if view.pod.ready:
        return _OTHER_ORDER + 1
    if view.state in STUCK_STATES:
        return _STUCK_ORDER
    return _STATE_ORDER.get(view.state, _OTHER_ORDER)
