"""Circuit breaker of the store: a medium that fails is left alone for a while, and every request is a miss meanwhile. Pure."""

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
