"""All store I/O of a rank, on two threads of its own: reads (look-up, load) never queue behind writes.

The step thread hands over work and gets results through one completion queue; it never touches the store. Slots named in a
job stay referenced by the step thread until the job's result is back, so nothing is freed under running I/O (kv.md 8, bug 9).
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prefill_engine.kv.store import BlockStore
from prefill_plan.block_keys import BlockKey
from prefill_plan.errors import StoreUnavailable

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteItem:
    """One complete block to publish; provenance 1 = descends from a replay (kv.md 2.2)."""

    key: BlockKey
    slot: int
    block_index: int
    provenance: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupDone:
    """present: leading keys the store seems to have."""

    attempt_id: bytes
    present: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadDone:
    """provenances: one per leading block that is in its slot, verified; 1 = descends from a replay."""

    attempt_id: bytes
    provenances: tuple[int, ...]
    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteDone:
    """Result of one write job; slots: every slot the job named, written or not."""

    attempt_id: bytes
    committed: int
    failed: int
    slots: tuple[int, ...]


Completion = LookupDone | LoadDone | WriteDone
_Job = Callable[[], Completion]


class StoreWorker:
    """Owner of the store's threads. Results come out of `completions`, announced by `wake`."""

    def __init__(
        self,
        store: BlockStore,
        *,
        block_view: Callable[[int], memoryview],
        wake: Callable[[], None],
        store_lost: Callable[[], None],
    ) -> None:
        """block_view: writable payload of a pool slot. store_lost: called (from the writer) when the medium fails."""
        self.completions: queue.SimpleQueue[Completion] = queue.SimpleQueue()
        self._store = store
        self._block_view = block_view
        self._wake = wake
        self._store_lost = store_lost
        self._reads: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._writes: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, args=(jobs,), name=name, daemon=True)
            for name, jobs in (("store-read", self._reads), ("store-write", self._writes))
        ]
        for thread in self._threads:
            thread.start()

    def look_up(self, attempt_id: bytes, keys: Sequence[BlockKey]) -> None:
        """Asks how many leading keys are present; answered by LookupDone."""
        self._reads.put(lambda: LookupDone(attempt_id=attempt_id, present=self._count_present(keys)))

    def load(self, attempt_id: bytes, items: Sequence[tuple[BlockKey, int]]) -> None:
        """Reads blocks into slots in chain order up to the first miss; answered by LoadDone."""
        self._reads.put(lambda: self._load(attempt_id, items))

    def write(self, attempt_id: bytes, items: Sequence[WriteItem]) -> None:
        """Publishes blocks in chain order; answered by WriteDone."""
        self._writes.put(lambda: self._write(attempt_id, items))

    def stop(self) -> None:
        """Finishes queued jobs, ends the threads and closes the store."""
        for jobs in (self._reads, self._writes):
            jobs.put(None)
        for thread in self._threads:
            thread.join()
        self._store.close()

    def _run(self, jobs: "queue.SimpleQueue[_Job | None]") -> None:
        while (job := jobs.get()) is not None:
            self.completions.put(job())
            self._wake()

    def _count_present(self, keys: Sequence[BlockKey]) -> int:
        try:
            return self._store.count_present(keys)
        except StoreUnavailable as error:
            logger.warning("store look-up failed; the prompt is computed in full", extra={"error": error.message})
            self._store_lost()
            return 0

    def _load(self, attempt_id: bytes, items: Sequence[tuple[BlockKey, int]]) -> LoadDone:
        start = time.monotonic()
        provenances: list[int] = []
        num_bytes = 0
        try:
            for key, slot in items:
                out = self._block_view(slot)
                stored = self._store.read(key, out)
                if stored is None:
                    break
                provenances.append(stored.provenance)
                num_bytes += len(out)
        except StoreUnavailable as error:
            logger.warning(
                "store read failed; the hit is shortened",
                extra={"error": error.message, "loaded_blocks": len(provenances)},
            )
            self._store_lost()
        seconds = time.monotonic() - start
        return LoadDone(attempt_id=attempt_id, provenances=tuple(provenances), num_bytes=num_bytes, seconds=seconds)

    def _write(self, attempt_id: bytes, items: Sequence[WriteItem]) -> WriteDone:
        """Stops at the first failure: a chain with a hole is of no use to a later look-up."""
        committed = 0
        try:
            for item in items:
                payload = self._block_view(item.slot)
                self._store.write(item.key, payload, block_index=item.block_index, provenance=item.provenance)
                committed += 1
        except StoreUnavailable as error:
            logger.warning("store write failed; blocks stay in the pool only", extra={"error": error.message})
            self._store_lost()
        slots = tuple(item.slot for item in items)
        return WriteDone(attempt_id=attempt_id, committed=committed, failed=len(items) - committed, slots=slots)
