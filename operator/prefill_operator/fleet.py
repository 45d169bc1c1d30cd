"""The pods of a pool as the planner sees them: each with its verdict, its revision and whether it counts.

Words used throughout: *live* = not Terminating, Failed, lost or foreign; *active* = live and not draining; *available* = Ready
for minReadySeconds and not draining (k8s.md 4.5).
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from prefill_operator.failures import GONE_STATES, FailureContext, PodState, Verdict, is_node_dead, judge_pod
from prefill_operator.model import ObservedPod, seconds_since
from prefill_operator.plan import PoolPlan

# A deleted pod that its kubelet has not let go after grace and this long holds no resources that count.
_STUCK_TERMINATING_SECONDS = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PodView:
    pod: ObservedPod
    verdict: Verdict
    is_updated: bool
    is_available: bool
    holds_resources: bool
    """Counts against quota: exists, not Failed, on a node that is alive or still to be found."""

    @property
    def state(self) -> PodState:
        return self.verdict.state

    @property
    def is_live(self) -> bool:
        return self.state not in GONE_STATES

    @property
    def is_active(self) -> bool:
        return self.is_live and self.state is not PodState.DRAINING

    @property
    def is_serving(self) -> bool:
        """Ready, in any state of its node or devices, and not draining."""
        return self.is_active and self.pod.ready


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """All pods of a pool, by incarnation."""

    views: tuple[PodView, ...]
    wakeup: float | None
    """When a verdict or an availability will change by time alone."""

    def select(self, condition: Callable[[PodView], bool]) -> list[PodView]:
        return [view for view in self.views if condition(view)]

    def in_state(self, *states: PodState) -> list[PodView]:
        return [view for view in self.views if view.state in states]

    @property
    def live(self) -> list[PodView]:
        return self.select(lambda view: view.is_live)

    @property
    def active(self) -> list[PodView]:
        return self.select(lambda view: view.is_active)

    @property
    def num_serving(self) -> int:
        return len(self.select(lambda view: view.is_serving))

    @property
    def last_ready_at(self) -> float:
        """When a pod of the update revision that is Ready now became so last; 0 if there is none."""
        times = [view.pod.ready_changed_at or 0.0 for view in self.views if view.is_serving and view.is_updated]
        return max(times, default=0.0)

    @property
    def newest_at(self) -> float:
        """When the youngest pod was created; 0 if there is none."""
        return max((view.pod.created_at for view in self.views), default=0.0)

    @property
    def last_incarnation(self) -> int:
        """Over everything that has a name of this pool, foreign pods included."""
        return max((view.pod.incarnation for view in self.views), default=0)


def build_fleet(
    pods: Iterable[ObservedPod], plan: PoolPlan, context: FailureContext, *, min_ready_seconds: float
) -> Fleet:
    """Judges every pod. Without a feasible plan no pod is outdated: what runs is kept (k8s.md 4.3)."""
    views = []
    wakeups = []
    for pod in sorted(pods, key=lambda pod: (pod.incarnation, pod.name)):
        verdict = judge_pod(pod, context)
        if verdict.wakeup is not None:
            wakeups.append(verdict.wakeup)
        is_serving = pod.ready and verdict.state not in GONE_STATES and verdict.state is not PodState.DRAINING
        is_available = is_serving and seconds_since(pod.ready_changed_at, context.now) >= min_ready_seconds
        if is_serving and not is_available:
            wakeups.append((pod.ready_changed_at or context.now) + min_ready_seconds)
        views.append(
            PodView(
                pod=pod,
                verdict=verdict,
                is_updated=not plan.feasible or pod.revision == plan.revision,
                is_available=is_available,
                holds_resources=_holds_resources(pod, verdict, context),
            )
        )
    return Fleet(views=tuple(views), wakeup=min(wakeups, default=None))


def count_by_node(views: Iterable[PodView]) -> Counter[str]:
    return Counter(view.pod.node for view in views if view.pod.node)


def _holds_resources(pod: ObservedPod, verdict: Verdict, context: FailureContext) -> bool:
    if verdict.state in {PodState.FOREIGN, PodState.FAILED, PodState.LOST}:
        return False
    if verdict.state is not PodState.TERMINATING:
        return True
    is_stuck = seconds_since(pod.terminating_since, context.now) > _STUCK_TERMINATING_SECONDS
    return not is_stuck and not is_node_dead(pod, context)
