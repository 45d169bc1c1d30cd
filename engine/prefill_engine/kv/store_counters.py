"""Counts of one store, shared by its threads."""

import threading

from prefill_engine.kv.record import VerifyFailure

_NAMES = (
    "hits",
    "misses",
    *(f"verify_fail_{failure}" for failure in VerifyFailure),
    "read_errors",
    "writes",
    "writes_present",
    "write_errors",
    "bytes_read",
    "bytes_written",
    "evicted",
    "stale_temps",
)


class StoreCounters:
    """Monotonic counts under a lock; names as in BlockStore.counters."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(_NAMES, 0)

    def add(self, name: str, amount: int = 1) -> None:
        with self._lock:
            self._counts[name] += amount

    def add_hit(self, num_bytes: int) -> None:
        with self._lock:
            self._counts["hits"] += 1
            self._counts["bytes_read"] += num_bytes

    def add_miss(self, reason: str | None) -> None:
        """reason: the count of what went wrong; None = simply absent."""
        with self._lock:
            self._counts["misses"] += 1
            if reason is not None:
                self._counts[reason] += 1

    def add_write(self, num_bytes: int) -> None:
        with self._lock:
            self._counts["writes"] += 1
            self._counts["bytes_written"] += num_bytes

    def snapshot(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)
