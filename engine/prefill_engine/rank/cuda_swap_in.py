"""Swap-in and layer gates of a rank on CUDA (C18). Compiled and tested with a stub driver; NEVER RUN on a GPU so far.

CudaCopier is the copy thread's way into device memory: it queues on a stream of its own and waits there, so a watermark that
gates see is of bytes that have arrived. CudaGates owns the gate words: the step thread only queues waits for them, and a watcher
advances them or writes POISON. The trap: a stream never waits for memory that another process writes, and a word is used again
only after the step that waited for it has ended.
"""

import ctypes
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from prefill_engine.kv.pool_memory import RECORDS_OFFSET, PoolMemory
from prefill_engine.rank.cuda_driver import CudaDriver
from prefill_engine.rank.cuda_plan import POISON, CopyPath, choose_copy_path, gate_word
from prefill_engine.rank.cuda_pools import PinnedPools
from prefill_engine.rank.swap_counters import SwapCounters
from prefill_engine.rank.swap_in import LoadProgress
from prefill_plan.kv_layout import BlockLayout

NUM_WORDS = 1024
"""Late attempts in one step and the one before it; more are poisoned at once."""


class Gather(Protocol):
    """Launches prefill_kernels' gather_blocks on the copy stream, slots moved to the device first."""

    def __call__(
        self, source_address: int, sources: Sequence[int], targets: Sequence[int], *, offset: int, num_bytes: int
    ) -> None: ...


class CudaCopier:
    """GroupCopier for a cache in device memory. Used by the copy thread only. The first group goes alone: a step on a GPU may
    need it before the others have crossed the link (kv.md 6.2)."""

    lone_groups = 1

    def __init__(
        self,
        driver: CudaDriver,
        *,
        pools: PinnedPools,
        layout: BlockLayout,
        cache_address: int,
        stream: int,
        gather: Gather,
    ) -> None:
        self._driver = driver
        self._pools = pools
        self._layout = layout
        self._offsets = (*(source.group_offset for source in layout.sources), layout.payload_bytes)
        self._cache_address = cache_address
        self._stream = stream
        self._gather = gather

    def copy(self, pool: PoolMemory, *, groups: range, sources: Sequence[int], targets: Sequence[int]) -> int:
        """As GroupCopier."""
        offset = self._offsets[groups.start]
        num_bytes = self._offsets[groups.stop] - offset
        base = RECORDS_OFFSET + self._layout.header_bytes + offset
        device_base = self._pools.device_address(pool)
        if choose_copy_path(num_bytes) is CopyPath.GATHER:
            self._gather(device_base + base, sources, targets, offset=offset, num_bytes=num_bytes)
        else:
            for source, target in zip(sources, targets, strict=True):
                self._driver.copy_to_device(
                    self._stream,
                    self._cache_address + target * self._layout.stride_bytes + offset,
                    pool.address + base + source * self._layout.record_bytes,
                    num_bytes,
                )
        self._driver.synchronize(self._stream)
        return num_bytes * len(sources)


class CudaGates:
    """Owner of the gate words and of the watcher thread."""

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
        self.driver = driver
        self.counters = counters
        self.group_of = {layer: group for group, layer in enumerate(source_layers)}
        self.compute_stream = compute_stream
        self._changed = changed
        self._gate_seconds = gate_seconds
        base = driver.allocate_words(NUM_WORDS)
        self._words = (ctypes.c_uint32 * NUM_WORDS).from_address(base)
        self._device_base = driver.device_address(base)
        self._free = list(range(NUM_WORDS))
        self._watched: dict[int, LoadProgress] = {}
        self._stopping = False
        self._thread = threading.Thread(target=self._watch, name="gate-watch", daemon=True)
        self._thread.start()

    def open(self, loads: Mapping[bytes, LoadProgress]) -> "CudaStepGate":
        """Gates of a step with these late attempts."""
        words, refused = {}, []
        with self._changed:
            for attempt_id, load in loads.items():
                if not self._free:
                    refused.append(attempt_id)
                    continue
                index = self._free.pop()
                self._words[index] = 0
                self._watched[index] = load
                words[attempt_id] = index
            self._changed.notify_all()
        return CudaStepGate(self, words, refused)

    def close(self, words: Sequence[int]) -> list[int]:
        """The step has ended: what its words said, which are free again."""
        with self._changed:
            values = [int(self._words[index]) for index in words]
            for index in words:
                del self._watched[index]
                self._free.append(index)
        return values

    def device_word(self, index: int) -> int:
        return self._device_base + 4 * index

    def stop(self) -> None:
        """Poisons what still waits and ends the thread."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join()

    def _watch(self) -> None:
        num_groups = len(self.group_of)
        with self._changed:
            while not self._stopping:
                now = time.monotonic()
                for index, load in self._watched.items():
                    if self._words[index] < num_groups:
                        self._words[index] = gate_word(
                            groups=load.groups,
                            is_over=load.ending is not None,
                            num_groups=num_groups,
                            still_seconds=now - load.progress,
                            gate_seconds=self._gate_seconds,
                        )
                is_waiting = any(self._words[index] < num_groups for index in self._watched)
                self._changed.wait(self._gate_seconds / 4 if is_waiting else None)
            for index in self._watched:
                self._words[index] = POISON


class CudaStepGate:
    """StepGate whose waits are the stream's. Reading `poisoned` waits for the step, once."""

    def __init__(self, gates: CudaGates, words: Mapping[bytes, int], refused: Sequence[bytes]) -> None:
        self.stall_seconds = 0.0  # the host does not stand still
        self._gates = gates
        self._words = dict(words)
        self._poisoned = frozenset(refused)
        self._is_open = bool(words)

    @property
    def poisoned(self) -> frozenset[bytes]:
        """As StepGate."""
        if self._is_open:
            self._gates.driver.synchronize(self._gates.compute_stream())
            values = self._gates.close(list(self._words.values()))
            late = [each for each, value in zip(self._words, values, strict=True) if value == POISON]
            self._poisoned |= frozenset(late)
            self._gates.counters.add("kv_gate_poisoned", len(self._poisoned))
            self._is_open = False
        return self._poisoned

    def wait(self, layer: int) -> None:
        """As StepGate; queues and returns."""
        group, stream = self._gates.group_of[layer], self._gates.compute_stream()
        for index in self._words.values():
            self._gates.driver.wait_word(stream, self._gates.device_word(index), group + 1)
