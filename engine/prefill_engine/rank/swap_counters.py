"""Counts of what a rank gets from kvd, for the rank's report (names of kv.md 7.7). Several threads add; times in microseconds."""

import threading
from collections.abc import Iterable

from prefill_engine.rank.swap_plan import Ending


class SwapCounters:
    """Monotonic counts under a lock, by name."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}

    def add(self, name: str, amount: int = 1) -> None:
        with self._lock:
            self._counts[name] = self._counts.get(name, 0) + amount

    def add_groups(self, groups: Iterable[int], seconds: float) -> None:
        """Groups that were whole `seconds` after their load began."""
        for group in groups:
            self.add(f"kv_group_ready_us_{group}", round(seconds * 1e6))
            self.add(f"kv_group_ready_count_{group}")

    def add_stall(self, group: int, seconds: float) -> None:
        self.add(f"kv_swapin_stall_us_{group}", round(seconds * 1e6))

    def add_load(self, ending: Ending, *, num_bytes: int) -> None:
        self.add(f"kv_swapin_{ending.name.lower()}")
        self.add("kv_swapin_bytes", num_bytes)

    def snapshot(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)
