"""The arithmetic of creating, draining and deleting pods: k8s.md 4.5 with the remedies of 4.6.

Stateless: every pass computes budgets from the pods that exist now, so a second edit in mid-rollout needs no reset. The trap:
`maxUnavailable` is measured against W = N + S, not N, so that a rollout does not silently eat the spares; and what a node or
a device demands (cordon, fault) may surge even where maxSurge is 0, because otherwise it could never be done.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

from prefill_operator.api_parts import RolloutStrategy
from prefill_operator.failures import STUCK_STATES, PodState, Remedy
from prefill_operator.fleet import Fleet, PodView
from prefill_operator.intent import Intent
from prefill_operator.model import ObservedNode, OperatorTimes, seconds_since
from prefill_operator.names import Reason
from prefill_operator.plan import PoolPlan
from prefill_operator.targets import Targets
from prefill_operator.victims import (
    NodeChoice,
    choose_node_to_empty,
    has_free_node,
    order_for_rollout,
    order_for_scale_down,
    order_kept_old,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    view: PodView
    reason: str
    grace_seconds: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What a rollout step is computed from, beside the fleet."""

    intent: Intent
    targets: Targets
    plan: PoolPlan
    nodes: tuple[ObservedNode, ...] | None
    now: float
    times: OperatorTimes
    is_create_blocked: bool
    is_revision_refused: bool
    """No pod of the update revision can be made at all: its overlay is refused. Then old pods stay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutStep:
    creates: int = 0
    deletes: tuple[Removal, ...] = ()
    drains: tuple[Removal, ...] = ()
    missing: int = 0
    """Pods of the update revision that are still to be created, whatever forbids it now."""
    num_outdated: int = 0
    """Old pods that still have to go, those that OnDelete leaves to the user included."""
    num_forced: int = 0
    """Pods that node or device forces out."""
    surplus: int = 0
    blocked: Reason | None = None
    """NoRoom, NoRoomForLargerEP or QuotaExceeded: why the step is smaller than it should be."""
    blocked_message: str = ""
    timed_out: tuple[PodView, ...] = ()
    """Drains that were cut at their deadline."""
    is_large_scale_down: bool = False


@dataclass(slots=True, kw_only=True)
class _Groups:
    """The active pods by what shall become of them. Filled once, in _group."""

    deletes: list[Removal] = field(default_factory=list)
    timed_out: list[PodView] = field(default_factory=list)
    draining: list[PodView] = field(default_factory=list)
    """Draining and not finished."""
    wanted: list[PodView] = field(default_factory=list)
    """Of the update revision, nothing against them."""
    forced: list[PodView] = field(default_factory=list)
    """Still serving, to be replaced because of node or device."""
    old: list[PodView] = field(default_factory=list)
    """Of an old revision and to go."""
    kept: list[PodView] = field(default_factory=list)
    """Of an old revision and kept by partition or OnDelete."""

    @property
    def staying(self) -> list[PodView]:
        return [*self.wanted, *self.forced, *self.old, *self.kept]


def plan_rollout(fleet: Fleet, situation: Situation) -> RolloutStep:
    """One step towards the targets. Never paused and never without knowing all pods: the caller sees to it."""
    groups = _group(fleet, situation)
    surplus, dropped = _drop_surplus(groups, situation)
    quota = _quota_room(fleet, situation)
    missing = max(0, situation.targets.total - len(groups.kept) - len(groups.wanted))
    surge = _surge_room(groups, situation)
    load_room = _load_room(groups, situation)
    creates = max(0, min(missing, surge, load_room, quota.pods))
    choice = _empty_node(fleet, groups, situation)
    is_short = missing > 0 and quota.pods <= 0 < surge
    drains = _drain(groups, dropped, choice, situation, is_gpu_quota_short=is_short and quota.is_gpus)
    blocked, message = _blocked(groups, situation, choice, quota=quota if is_short else None)
    num_active = len(groups.staying)
    return RolloutStep(
        creates=0 if situation.is_create_blocked else creates,
        deletes=tuple(groups.deletes),
        drains=tuple(drains),
        missing=missing,
        num_outdated=_num_outdated(fleet, groups, situation),
        num_forced=len(groups.forced),
        surplus=surplus,
        blocked=blocked,
        blocked_message=message,
        timed_out=tuple(groups.timed_out),
        is_large_scale_down=bool(drains) and surplus * 2 > num_active and surplus > 1 and not groups.draining,
    )


def _group(fleet: Fleet, situation: Situation) -> _Groups:
    groups = _Groups()
    outdated = []
    for view in fleet.views:
        remedy = view.verdict.remedy
        if remedy in {Remedy.DELETE, Remedy.REPLACE_NOW}:
            groups.deletes.append(Removal(view=view, reason=str(view.state)))
        elif view.state is PodState.DRAINING:
            _group_draining(view, groups, situation)
        elif not view.is_active:
            continue
        elif remedy in {Remedy.REPLACE_FIRST, Remedy.DRAIN_NOW}:
            groups.forced.append(view)
        elif view.is_updated:
            groups.wanted.append(view)
        else:
            outdated.append(view)
    kept = _num_kept(len(outdated), situation)
    outdated = order_kept_old(outdated)
    groups.kept = outdated[:kept]
    for view in outdated[kept:]:
        if _is_broken(view):
            groups.deletes.append(Removal(view=view, reason="OldRevision"))
        else:
            groups.old.append(view)
    return groups


def _group_draining(view: PodView, groups: _Groups, situation: Situation) -> None:
    """Ends a drain that is done, cannot be done, or is over its deadline."""
    pod, now, times = view.pod, situation.now, situation.times
    limit = float(situation.intent.lifecycle.drain_timeout_seconds)
    nodes = {node.name: node for node in situation.nodes or ()}
    if pod.node in nodes and nodes[pod.node].maintenance_taint:
        limit = min(limit, times.maintenance_notice_seconds)
    since = pod.draining_since if pod.draining_since is not None else now
    # A start further ahead than the whole drain was written under a wrong clock.
    is_late = seconds_since(since, now) >= limit or since > now + limit
    unreachable = pod.drain_unreachable_since
    is_dead = unreachable is not None and now - unreachable >= times.unreachable_seconds
    if pod.drain_done or is_dead or is_late:
        reason = "Drained" if pod.drain_done else "DrainUnreachable" if is_dead else "DrainTimeout"
        groups.deletes.append(Removal(view=view, reason=reason, grace_seconds=times.drained_grace_seconds))
        if reason == "DrainTimeout":
            groups.timed_out.append(view)
    else:
        groups.draining.append(view)


def _num_kept(num_old: int, situation: Situation) -> int:
    """Old pods that stay: all under OnDelete and while there are no new ones to be had, `partition` of them otherwise."""
    rollout = situation.intent.rollout
    stay = situation.is_revision_refused or rollout.strategy is RolloutStrategy.ON_DELETE
    return num_old if stay else min(num_old, rollout.partition)


def _num_outdated(fleet: Fleet, groups: _Groups, situation: Situation) -> int:
    live = fleet.select(lambda view: view.is_live and not view.is_updated)
    return len(live) - min(len(groups.kept), situation.intent.rollout.partition)


def _is_broken(view: PodView) -> bool:
    """Serves nothing and is not about to come back by itself; then an old pod costs no budget (k8s.md 2, row 8)."""
    if view.pod.ready or view.state is PodState.NODE_NOT_READY:
        return False
    return view.state is not PodState.UNREADY or view.verdict.wakeup is None


def _drop_surplus(groups: _Groups, situation: Situation) -> tuple[int, list[PodView]]:
    """How many pods are too many, and which Ready ones go; those that are not Ready are deleted at once.

    Ready pods go only when no old pod is left: old ones go first, and while the EP changes nothing is scaled down.
    """
    targets = situation.targets
    surplus = max(0, len(groups.wanted) + len(groups.kept) - targets.total)
    order = order_for_scale_down([*groups.wanted, *groups.kept], situation.intent.scheduling.placement)
    dropped = []
    for view in islice(order, surplus):
        group = groups.wanted if view.is_updated else groups.kept
        if not view.pod.ready:
            group.remove(view)
            groups.deletes.append(Removal(view=view, reason="ScaleDown"))
        elif not groups.old:
            dropped.append(view)
    return surplus, dropped


def _surge_room(groups: _Groups, situation: Situation) -> int:
    """Pods that may be created beside those that exist. What leaves for other reasons than a rollout is no surge."""
    rollout = situation.intent.rollout
    surge = 0 if rollout.strategy is RolloutStrategy.ON_DELETE else rollout.max_surge
    leaving = len(groups.forced) + sum(view.is_updated for view in groups.draining)
    live = len(groups.staying) + len(groups.draining)
    return situation.targets.total + surge + leaving - live


def _load_room(groups: _Groups, situation: Situation) -> int:
    cap = situation.intent.lifecycle.max_concurrent_loads
    if cap == 0:
        return 1 << 30
    return cap - count_loading(groups.staying)


def count_loading(views: Sequence[PodView]) -> int:
    """Pods between their creation and Ready. Stuck ones count until the revision has proved to work somewhere."""
    is_proved = any(view.pod.ready and view.is_updated for view in views)
    loading = {PodState.LOADING, PodState.PENDING, PodState.UNSCHEDULABLE}
    if not is_proved:
        loading |= STUCK_STATES
    return sum(view.state in loading and not view.pod.ready for view in views)


@dataclass(frozen=True, slots=True, kw_only=True)
class _QuotaRoom:
    """Pods that quota still allows now, and the sentence for the condition."""

    pods: int
    is_gpus: bool
    """maxGPUs is what limits."""
    text: str


def _quota_room(fleet: Fleet, situation: Situation) -> _QuotaRoom:
    intent, plan = situation.intent, situation.plan
    holders = fleet.select(lambda view: view.holds_resources)
    room = _QuotaRoom(pods=1 << 30, is_gpus=False, text="")
    if intent.max_pods is not None:
        text = f"{len(holders)} {intent.noun}s exist, quota.max{intent.noun}s = {intent.max_pods}"
        room = _QuotaRoom(pods=intent.max_pods - len(holders), is_gpus=False, text=text)
    if intent.max_gpus is not None and plan.gpus:
        used = sum(view.pod.gpus for view in holders)
        pods = (intent.max_gpus - used) // plan.gpus
        if pods < room.pods:
            text = f"{used} GPUs in use and {plan.gpus} more needed, quota.maxGPUs = {intent.max_gpus}"
            room = _QuotaRoom(pods=pods, is_gpus=True, text=text)
    return room


def _num_available(views: Sequence[PodView]) -> int:
    return sum(view.is_available for view in views)


def _is_freeing(fleet: Fleet, groups: _Groups) -> bool:
    """Resources of ours are about to become free."""
    terminating = fleet.select(lambda view: view.state is PodState.TERMINATING and view.holds_resources)
    return bool(groups.draining or terminating or any(removal.view.pod.node for removal in groups.deletes))


def _empty_node(fleet: Fleet, groups: _Groups, situation: Situation) -> NodeChoice | None:
    """For larger pods that found no room: the node to empty. None while there is nothing to choose or something to await."""
    plan, intent = situation.plan, situation.intent
    stuck = [view for view in groups.wanted if _found_no_room(view) and view.pod.gpus == plan.gpus]
    smaller = [view for view in groups.old if view.pod.gpus < plan.gpus]
    if not stuck or not smaller or _is_freeing(fleet, groups):
        return None
    if situation.nodes is None:
        return NodeChoice(
            message=f"{len(stuck)} larger {intent.noun}s pending; nodes are not watched, none can be chosen"
        )
    if has_free_node(situation.nodes, gpus=plan.gpus, product=intent.gpu_product):
        return None
    return choose_node_to_empty(
        smaller,
        gpus=plan.gpus,
        nodes=situation.nodes,
        spare_pods=_num_available(groups.staying) - _available_floor(situation),
        product=intent.gpu_product,
        noun=intent.noun,
    )


def _available_floor(situation: Situation) -> int:
    """Available pods that an EP change must leave: N, using spares, or what maxUnavailable allows (k8s.md 4.5)."""
    targets = situation.targets
    return min(targets.replicas, targets.total - situation.intent.rollout.max_unavailable)


def _found_no_room(view: PodView) -> bool:
    return view.state is PodState.UNSCHEDULABLE and view.verdict.wakeup is None


def _drain(
    groups: _Groups,
    dropped: list[PodView],
    choice: NodeChoice | None,
    situation: Situation,
    *,
    is_gpu_quota_short: bool,
) -> list[Removal]:
    """Ready pods to drain now, within the budget of available pods and the cap of concurrent drains."""
    rollout = situation.intent.rollout
    available = _num_available(groups.staying)
    floor = situation.targets.total - rollout.max_unavailable
    drains = [
        Removal(view=view, reason=str(view.state)) for view in groups.forced if view.verdict.remedy is Remedy.DRAIN_NOW
    ]
    available -= _num_available([removal.view for removal in drains])
    if choice and choice.victims:
        return [*drains, *(Removal(view=view, reason="LargerEP") for view in choice.victims if view.pod.ready)]
    if is_gpu_quota_short and not groups.draining and any(v.pod.gpus < situation.plan.gpus for v in groups.old):
        floor = _available_floor(situation)
    old = order_for_rollout(groups.old, gpus=situation.plan.gpus, nodes=situation.nodes)
    leaving = [Removal(view=v, reason=str(v.state)) for v in groups.forced if v.verdict.remedy is Remedy.REPLACE_FIRST]
    leaving += [Removal(view=view, reason="OldRevision") for view in old if view.pod.ready]
    cap = situation.intent.lifecycle.max_concurrent_drains or 1 << 30
    queues = [(leaving, max(cap, rollout.max_surge + rollout.max_unavailable))]
    queues.append(([Removal(view=view, reason="ScaleDown") for view in dropped], cap))
    for queue, limit in queues:
        for removal in queue:
            cost = int(removal.view.is_available)
            if len(groups.draining) + len(drains) >= limit or available - cost < floor:
                break
            drains.append(removal)
            available -= cost
    return drains


def _blocked(
    groups: _Groups, situation: Situation, choice: NodeChoice | None, *, quota: _QuotaRoom | None
) -> tuple[Reason | None, str]:
    """The reason that a user must know of, the hardest first."""
    if situation.targets.quota_message:
        return Reason.QUOTA_EXCEEDED, situation.targets.quota_message
    if quota is not None and not groups.draining and not groups.deletes:
        return Reason.QUOTA_EXCEEDED, quota.text
    if choice and choice.message:
        return Reason.NO_ROOM_FOR_LARGER_EP, choice.message
    stuck = [view for view in groups.wanted if _found_no_room(view)]
    if stuck:
        noun = situation.intent.noun
        return Reason.NO_ROOM, f"{len(stuck)} {noun}s find no room; {stuck[0].pod.name}: {stuck[0].verdict.message}"
    return None, ""
