"""Circuit breaker of the store: a medium that fails is left alone for a while, and every request is a miss meanwhile. And when
it has failed for long, what it was opened with is given up. Pure."""

from collections.abc import Callable

_FIRST_SECONDS = 0.5
_LAST_SECONDS = 30.0


class Breaker:
    """Opens after `limit` failures in a row; then lets one try through after a pause that doubles. clock: monotonic seconds."""

    def __init__(self, *, limit: int, clock: Callable[[], float]) -> None:
        self._limit = limit
        self._clock = clock
        self._failures = 0
        self._pause = _FIRST_SECONDS
        self._retry_at = 0.0

    @property
    def is_open(self) -> bool:
        return self._failures >= self._limit

    def allows(self) -> bool:
        """Whether to try now; while open, this hands out the one try of this pause."""
        if not self.is_open:
            return True
        if self._clock() < self._retry_at:
            return False
        self._retry_at = self._clock() + self._pause
        return True

    def succeed(self) -> None:
        self._failures, self._pause = 0, _FIRST_SECONDS

    def fail(self) -> None:
        self._failures += 1
        if self._failures < self._limit:
            return
        if self._failures > self._limit:
            self._pause = min(2 * self._pause, _LAST_SECONDS)
        self._retry_at = self._clock() + self._pause


class Renewal:
    """When to give up the rings of a medium that goes on failing: each time costs memory that may never come back, so the pauses
    double until something has worked. clock: monotonic seconds."""

    def __init__(
        self, *, first_seconds: float = 15.0, last_seconds: float = 1800.0, clock: Callable[[], float]
    ) -> None:
        self._first, self._last, self._clock = first_seconds, last_seconds, clock
        self._pause = first_seconds
        self._failing_since: float | None = None

    def is_due(self, *, is_failing: bool) -> bool:
        """Asked now and then; says yes once for each pause in which it failed all the time."""
        if not is_failing:
            self._failing_since = None
            return False
        now = self._clock()
        if self._failing_since is None:
            self._failing_since = now
        if now - self._failing_since < self._pause:
            return False
        self._failing_since, self._pause = now, min(2 * self._pause, self._last)
        return True

    def succeed(self) -> None:
        """A read or a write was answered."""
        self._pause = self._first
