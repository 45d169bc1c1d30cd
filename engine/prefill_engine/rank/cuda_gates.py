"""Layer gates of a rank on CUDA (C18). Tested with a stub driver; NEVER RUN on a GPU so far.

CudaGates owns the gate words: the step thread only queues waits for them, and a watcher advances them or writes POISON. An event
before each wait tells the watcher when the stream has come there, so that only time at which it really stands is counted, and
patience begins then, as on the CPU (step_gate.py). The trap: a stream never waits for memory that another process writes, and a
word is used again only after the step that waited for it has ended.
"""

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from prefill_engine.rank.cuda_driver import CudaDriver
from prefill_engine.rank.cuda_plan import POISON, gate_word
from prefill_engine.rank.swap_counters import SwapCounters
from prefill_engine.rank.swap_in import LoadProgress

NUM_WORDS = 1024
"""Late attempts in one step and the one before it; more are poisoned at once."""
_LOOKS_PER_PATIENCE = 8


@dataclass(slots=True, kw_only=True)
class _Gate:
    """One queued wait. at: when the watcher saw that the stream had come there."""

    group: int
    event: int
    at: float | None = None
    is_passed: bool = False


@dataclass(slots=True, kw_only=True)
class _Step:
    """loads: by index of the word. stall_seconds: at gates that were passed."""

    loads: dict[int, LoadProgress]
    is_shared: bool
    gates: list[_Gate] = field(default_factory=list)
    stall_seconds: float = 0.0


class CudaGates:
    """Owner of the gate words, their events and the watcher thread."""

    def __init__(
        self,
        driver: CudaDriver,
        *,
        changed: threading.Condition,
        source_layers: Sequence[int],
        gate_seconds: float,
        compute_stream: Callable[[], int],
        counters: SwapCounters,
    ) -> None:
        """changed: notified when a load moves."""
        self._driver = driver
        self._counters = counters
        self._group_of = {layer: group for group, layer in enumerate(source_layers)}
        self._compute_stream = compute_stream
        self._changed = changed
        self._gate_seconds = gate_seconds
        base = driver.allocate_words(NUM_WORDS)
        self._words = (ctypes.c_uint32 * NUM_WORDS).from_address(base)
        self._device_base = driver.device_address(base)
        self._free = list(range(NUM_WORDS))
        self._free_events: deque[int] = deque()
        self._steps: list[_Step] = []
        self._stopping = False
        self._thread = threading.Thread(target=self._watch, name="gate-watch", daemon=True)
        self._thread.start()

    def open(self, loads: Mapping[bytes, LoadProgress], *, is_shared: bool) -> "CudaStepGate":
        """Gates of a step with these late attempts. is_shared: the step has other attempts, too."""
        words, refused = {}, []
        with self._changed:
            step = _Step(loads={}, is_shared=is_shared)
            for attempt_id, load in loads.items():
                if not self._free:
                    refused.append(attempt_id)
                    continue
                index = self._free.pop()
                self._words[index] = 0
                step.loads[index] = load
                words[attempt_id] = index
            self._steps.append(step)
            self._changed.notify_all()
        return CudaStepGate(self, step, words, refused)

    def queue_wait(self, step: _Step, layer: int) -> None:
        """The compute stream waits for the layer's group of every late attempt; the caller does not (step thread)."""
        group, stream = self._group_of[layer], self._compute_stream()
        event = self._free_events.popleft() if self._free_events else self._driver.create_event()
        self._driver.record_event(event, stream)
        for index in step.loads:
            self._driver.wait_word(stream, self._device_base + 4 * index, group + 1)
        with self._changed:
            step.gates.append(_Gate(group=group, event=event))
            self._changed.notify_all()

    def close(self, step: _Step) -> dict[int, int]:
        """Waits for the step: what its words say, which are free again (step thread)."""
        self._driver.synchronize(self._compute_stream())
        with self._changed:
            values = {index: int(self._words[index]) for index in step.loads}
            self._steps.remove(step)
            self._free += step.loads
            self._free_events += (gate.event for gate in step.gates)
        self._counters.add("kv_gate_poisoned", sum(value == POISON for value in values.values()))
        return values

    def stop(self) -> None:
        """Poisons what still waits and ends the thread."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join()

    # --- the watcher
    def _watch(self) -> None:
        with self._changed:
            try:
                while not self._stopping:
                    for step in self._steps:
                        self._advance(step)
                    is_late = any(self._is_late(step, len(self._group_of)) for step in self._steps)
                    self._changed.wait(self._gate_seconds / _LOOKS_PER_PATIENCE if is_late else None)
            finally:
                for step in self._steps:
                    for index in step.loads:
                        self._words[index] = POISON

    def _advance(self, step: _Step) -> None:
        """Words as they should be now; gates that this opens are passed, and their stalls counted."""
        now = time.monotonic()
        self._set_words(step, self._standing_at(step, now), now)
        while (gate := self._standing_at(step, now)) is not None and not self._is_late(step, gate.group + 1):
            gate.is_passed = True
            stall = 0.0 if gate.at is None else now - gate.at
            step.stall_seconds += stall
            self._counters.add_stall(gate.group, stall)

    def _standing_at(self, step: _Step, now: float) -> _Gate | None:
        """The gate that the stream has come to and was not seen to pass."""
        gate = next((gate for gate in step.gates if not gate.is_passed), None)
        if gate is None or (gate.at is None and not self._driver.is_reached(gate.event)):
            return None
        gate.at = now if gate.at is None else gate.at
        return gate

    def _set_words(self, step: _Step, gate: _Gate | None, now: float) -> None:
        for index, load in step.loads.items():
            if self._words[index] >= len(self._group_of):
                continue
            still = 0.0
            if gate is not None and gate.at is not None and load.groups <= gate.group:
                # A step of several stands still for gate_seconds in all; alone, an attempt waits while its load moves.
                standing = now - gate.at
                still = step.stall_seconds + standing if step.is_shared else min(standing, now - load.progress)
            self._words[index] = gate_word(
                groups=load.groups,
                is_over=load.ending is not None,
                num_groups=len(self._group_of),
                still_seconds=still,
                gate_seconds=self._gate_seconds,
            )

    def _is_late(self, step: _Step, groups: int) -> bool:
        return any(self._words[index] < groups for index in step.loads)


class CudaStepGate:
    """StepGate whose waits are the stream's. Reading `poisoned` waits for the step, once; `stall_seconds` is known then."""

    def __init__(self, gates: CudaGates, step: _Step, words: Mapping[bytes, int], refused: Sequence[bytes]) -> None:
        self._gates = gates
        self._step = step
        self._words = dict(words)
        self._poisoned = frozenset(refused)
        self._is_open = True

    @property
    def poisoned(self) -> frozenset[bytes]:
        """As StepGate."""
        if self._is_open:
            self._is_open = False
            values = self._gates.close(self._step)
            self._poisoned |= {each for each, index in self._words.items() if values[index] == POISON}
        return self._poisoned

    @property
    def stall_seconds(self) -> float:
        """As StepGate; what the watcher saw, within an eighth of gate_seconds."""
        return self._step.stall_seconds

    def wait(self, layer: int) -> None:
        """As StepGate; queues and returns."""
        if self._words:
            self._gates.queue_wait(self._step, layer)
