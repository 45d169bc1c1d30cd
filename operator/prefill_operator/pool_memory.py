"""What this process remembers of a pool beside the cache. Losing it costs a request or two, never correctness."""

from dataclasses import dataclass, field

from prefill_operator.cache import ChildRecord
from prefill_operator.model import ChildKind, CreateRefusal, WriteRefusal
from prefill_operator.pod_reading import PodRecord

OBSTACLE_SECONDS = 60.0
"""An object that stands in the way is looked at again after this long: no watch tells when an unlabelled one goes."""

REFUSAL_SECONDS = 600.0
"""A refused write that has not been tried again for this long is forgotten: nobody wants it any more."""


Subject = tuple[str, str, str]
"""Of a write: verb, kind, name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodObstacle:
    pod: PodRecord
    seen_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildObstacle:
    child: ChildRecord
    seen_at: float


@dataclass(slots=True, kw_only=True)
class PoolMemory:
    """Of one pool, written by reconcile.py and apply.py. Times are seconds since the epoch."""

    uid: str
    """Of the pool: a pool of the same name made anew starts with nothing."""
    create_refusal: CreateRefusal | None = None
    refusals: dict[Subject, WriteRefusal] = field(default_factory=dict)
    """Of writes that make no pod, until such a write passes."""
    pods: dict[str, PodObstacle] = field(default_factory=dict)
    """Pods without our labels that hold a name of ours."""
    children: dict[tuple[ChildKind, str], ChildObstacle] = field(default_factory=dict)
    """Other such objects."""
    status_written_at: float = 0.0
    passes_in_a_row: int = 0
    """That each followed at once because of what the one before had done."""

    def drop_old(self, now: float) -> None:
        """Forgets obstacles that are due to be looked at again, and what was refused long ago."""
        self.pods = {name: item for name, item in self.pods.items() if now - item.seen_at < OBSTACLE_SECONDS}
        self.children = {name: item for name, item in self.children.items() if now - item.seen_at < OBSTACLE_SECONDS}
        self.refusals = {name: item for name, item in self.refusals.items() if now - item.at < REFUSAL_SECONDS}

    def next_look(self) -> float | None:
        """When drop_old will forget the next one; None = nothing stands in the way."""
        seen = [item.seen_at for item in self.pods.values()] + [item.seen_at for item in self.children.values()]
        return min(seen) + OBSTACLE_SECONDS if seen else None
