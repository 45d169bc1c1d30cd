"""The queue between events and workers: which pools are to be reconciled, and when.

Each key is in the queue at most once and is given to one worker at a time; a key that is added while a worker holds it comes
again afterwards. Wake-ups are for deadlines that no event announces; each pass sets the next one anew. Failed keys wait
1, 2, 4 .. 60 s, but an event lets them in at once. The trap: all methods belong to the event loop's thread.
"""

import asyncio
import heapq
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

FIRST_BACKOFF_SECONDS = 1.0
MAX_BACKOFF_SECONDS = 60.0


class WorkQueue(Generic[K]):
    """clock: seconds that never go back."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ready: OrderedDict[K, float] = OrderedDict()
        """Keys to give out, in order of arrival, with the time they became ready."""
        self._held: set[K] = set()
        self._again: dict[K, float] = {}
        """Held keys that were added meanwhile, with the time."""
        self._failures: dict[K, int] = {}
        self._wakeups: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        """Wake-ups by time; an entry counts only if _wakeups still says so."""
        self._count = 0
        self._changed = asyncio.Event()

    def add(self, key: K) -> None:
        """The key is to be reconciled now."""
        if key in self._held:
            self._again.setdefault(key, self._clock())
        elif key not in self._ready:
            self._ready[key] = self._clock()
            self._changed.set()

    def wake_after(self, key: K, seconds: float | None) -> None:
        """The key is to be reconciled after this long, whatever was set before; None = not by time."""
        if seconds is None:
            self._wakeups.pop(key, None)
            return
        when = self._clock() + seconds
        self._wakeups[key] = when
        self._count += 1
        heapq.heappush(self._heap, (when, self._count, key))
        if self._heap[0][2] == key:
            self._changed.set()

    async def take(self) -> K:
        """The next key, once there is one. Every taken key must be given back by `finish` or `retry`."""
        while True:
            self.release_due()
            if self._ready:
                key, _ = self._ready.popitem(last=False)
                self._held.add(key)
                return key
            self._changed.clear()
            delay = max(0.0, self._heap[0][0] - self._clock()) if self._heap else None
            try:
                await asyncio.wait_for(self._changed.wait(), delay)
            except TimeoutError:
                continue

    def release_due(self) -> None:
        """Adds the keys whose time has come; `take` does it by itself."""
        now = self._clock()
        while self._heap and self._heap[0][0] <= now:
            when, _, key = heapq.heappop(self._heap)
            if self._wakeups.get(key) == when:
                del self._wakeups[key]
                self.add(key)
        self._drop_stale()

    def finish(self, key: K) -> None:
        """The pass succeeded."""
        self._failures.pop(key, None)
        self._give_back(key)

    def retry(self, key: K, *, after: float = 0.0) -> float:
        """The pass failed: the key comes back after its back-off, or after `after` seconds if that is longer.

        Returns:
            The pause in seconds.
        """
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        pause = max(after, min(MAX_BACKOFF_SECONDS, FIRST_BACKOFF_SECONDS * 2.0 ** min(failures, 16)))
        self.wake_after(key, pause)
        self._give_back(key)
        return pause

    def forget(self, key: K) -> None:
        """The pool is gone: no wake-up and no back-off is left of it."""
        self._failures.pop(key, None)
        self._wakeups.pop(key, None)

    @property
    def depth(self) -> int:
        """Keys that wait for a worker."""
        return len(self._ready) + len(self._again)

    @property
    def oldest_seconds(self) -> float:
        """How long the first key has waited for a worker."""
        waiting = [*list(self._ready.values())[:1], *self._again.values()]
        return max(0.0, self._clock() - min(waiting)) if waiting else 0.0

    @property
    def is_idle(self) -> bool:
        """Nothing waits and nothing is being done (wake-ups may be set)."""
        return not (self._ready or self._held or self._again)

    def _give_back(self, key: K) -> None:
        self._held.discard(key)
        since = self._again.pop(key, None)
        if since is not None and key not in self._ready:
            self._ready[key] = since
            self._changed.set()

    def _drop_stale(self) -> None:
        """Replaced wake-ups leave the heap when they reach its top, or all at once when they are most of it."""
        if len(self._heap) > 2 * len(self._wakeups) + 64:
            self._heap = [entry for entry in self._heap if self._wakeups.get(entry[2]) == entry[0]]
            heapq.heapify(self._heap)
        while self._heap and self._wakeups.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
