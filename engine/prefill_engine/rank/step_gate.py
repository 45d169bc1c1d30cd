"""The layer gates of one step on the CPU: the step stands still until the hits of its attempts have come so far (C18).

Made for each step by KvdSource, called by the model through Step.wait_source. The trap: one late hit must not hold up others, so
a step of several attempts stands still for gate_seconds in all, whatever moves; alone, an attempt waits while its load moves.
"""

import time
from collections.abc import Mapping, Sequence
from threading import Condition

from prefill_engine.rank.swap_counters import SwapCounters
from prefill_engine.rank.swap_in import LoadProgress


class CpuStepGate:
    """StepGate over the loads of a step's attempts; used by the step thread only."""

    def __init__(
        self,
        loads: Mapping[bytes, LoadProgress],
        *,
        changed: Condition,
        source_layers: Sequence[int],
        gate_seconds: float,
        is_shared: bool,
        counters: SwapCounters,
    ) -> None:
        """loads: by attempt, not known to be whole. changed: notified when any of them moves. is_shared: the step has other
        attempts, too."""
        self.stall_seconds = 0.0
        self._loads = dict(loads)
        self._changed = changed
        self._group_of = {layer: group for group, layer in enumerate(source_layers)}
        self._gate_seconds = gate_seconds
        self._is_shared = is_shared
        self._counters = counters
        self._poisoned: set[bytes] = set()

    @property
    def poisoned(self) -> frozenset[bytes]:
        """As StepGate."""
        return frozenset(self._poisoned)

    def wait(self, layer: int) -> None:
        """As StepGate."""
        if not self._loads:
            return
        group = self._group_of[layer]
        entered = time.monotonic()
        with self._changed:
            while late := self._late(group):
                now = time.monotonic()
                limit = self._limit(late, entered)
                if now >= limit:
                    self._poison(late)
                    break
                self._changed.wait(limit - now)
        stall = time.monotonic() - entered
        self.stall_seconds += stall
        self._counters.add_stall(group, stall)

    def _late(self, group: int) -> list[bytes]:
        """Attempts whose group is not there; those whose load has ended without it are poisoned at once."""
        late = [each for each, load in self._loads.items() if load.groups <= group]
        self._poison([each for each in late if self._loads[each].ending is not None])
        return [each for each in late if each in self._loads]

    def _limit(self, late: Sequence[bytes], entered: float) -> float:
        if self._is_shared:
            return entered + self._gate_seconds - self.stall_seconds
        return max(entered, *(self._loads[each].progress for each in late)) + self._gate_seconds

    def _poison(self, attempt_ids: Sequence[bytes]) -> None:
        for each in attempt_ids:
            del self._loads[each]
            self._poisoned.add(each)
            self._counters.add("kv_gate_poisoned")
