"""The threads that work for one read job beside its caller, called one by one as the job turns out to need them.

Made by FileSegmentStore.read. The trap: a helper may call for another one while the job ends; after `end` no more come.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future


class Helpers:
    """At most `most` of the threads, which other jobs use too. Thread-safe."""

    def __init__(self, threads: Executor, *, most: int) -> None:
        self._threads = threads
        self._num_left = most
        self._lock = threading.Lock()
        self._futures: list[Future[None]] = []

    def call(self, work: Callable[[], None]) -> None:
        """One more, if there may be one."""
        if self._num_left <= 0:
            return
        with self._lock:
            if self._num_left > 0:
                self._num_left -= 1
                self._futures.append(self._threads.submit(work))

    def end(self) -> list[BaseException]:
        """Cancels those that have not started, waits for the others, and returns what they raised."""
        with self._lock:
            self._num_left = 0
        return [
            failure for future in self._futures if not future.cancel() and (failure := future.exception()) is not None
        ]
