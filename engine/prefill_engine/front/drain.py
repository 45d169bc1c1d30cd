"""State of a drain (C43): one deadline, fixed by the first Drain or SIGTERM, only ever shortened. Plain state, no I/O."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainStatus:
    """Attempts and tickets that are left. sent_back: attempts that were answered DRAINING before they started."""

    running: int
    waiting: int
    tickets_open: int
    done: bool
    sent_back: int


@dataclass(slots=True)
class Drain:
    """deadline: monotonic seconds, None = not draining. finish_queued: False sends attempts back that have not started."""

    deadline: float | None = None
    finish_queued: bool = True
    sent_back: int = 0

    @property
    def is_draining(self) -> bool:
        return self.deadline is not None

    def begin(self, *, now: float, seconds: float, finish_queued: bool) -> float:
        """Starts or shortens the drain; the deadline that holds. A later call may give the queue back, never keep it again."""
        end = now + max(0.0, seconds)
        self.finish_queued = finish_queued and (self.finish_queued or self.deadline is None)
        self.deadline = end if self.deadline is None else min(self.deadline, end)
        return self.deadline

    def is_over(self, now: float) -> bool:
        return self.deadline is not None and now >= self.deadline
