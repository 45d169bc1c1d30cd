"""BlockSource over a block store in this process, on two threads: reads (look-up, load) never queue behind writes.

The step thread hands over work and gets results through one completion queue; it never touches the store. Slots named in a
job stay referenced by the step thread until the job's result is back, so nothing is freed under running I/O (kv.md 8, bug 9).
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from prefill_engine.kv.store import BlockStore
from prefill_engine.rank.block_source import (
    Completion,
    Load,
    LoadDone,
    LookUp,
    LookupDone,
    OpenGate,
    StepGate,
    WriteDone,
    WriteItem,
    guarded,
)
from prefill_engine.rank.payloads import Part, Payloads
from prefill_engine.swa_pool import SwaSnapshot
from prefill_plan.block_keys import BlockKey
from prefill_plan.errors import StoreUnavailable

logger = logging.getLogger(__name__)


_Job = Callable[[], Completion]


class StoreWorker:
    """Owner of the store's threads. Results come out of `completions`, announced by `wake`."""

    def __init__(
        self,
        store: BlockStore,
        *,
        payloads: Payloads,
        wake: Callable[[], None],
    ) -> None:
        self.completions: queue.SimpleQueue[Completion] = queue.SimpleQueue()
        self._store = store
        self._payloads = payloads
        self._wake = wake
        self._lost = threading.Event()
        self._reads: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._writes: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=guarded(partial(self._run, jobs), self._post), name=name, daemon=True)
            for name, jobs in (("store-read", self._reads), ("store-write", self._writes))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def is_ok(self) -> bool:
        """As BlockSource."""
        return not self._lost.is_set()

    @property
    def is_lost(self) -> bool:
        """As BlockSource."""
        return self._lost.is_set()

    def look_up(self, request: LookUp) -> bool:
        """As BlockSource; snapshots are not its business (SwaPool has them)."""
        missing = request.keys[request.resident_blocks :]
        if not missing:
            return False
        self._reads.put(lambda: LookupDone(attempt_id=request.attempt_id, present=self._count_present(missing)))
        return True

    def load(self, request: Load) -> bool:
        """As BlockSource: whole blocks in chain order up to the first miss, all groups at once."""
        items = list(zip(request.keys[request.first_block :], request.slots, strict=True))
        if not items:
            return False
        self._reads.put(lambda: self._load(request.attempt_id, items))
        return True

    def gate(self, attempt_ids: Sequence[bytes], *, is_shared: bool) -> StepGate:  # noqa: ARG002
        """As BlockSource: a hit is whole before its attempt runs."""
        return OpenGate()

    def urge(self, attempt_id: bytes) -> None:
        """As BlockSource; blocks are loaded whole here."""

    def let_go(self, attempt_id: bytes) -> None:
        """As BlockSource: look-ups hold nothing here."""

    def write(self, attempt_id: bytes, items: Sequence[WriteItem], *, tenant: str) -> None:  # noqa: ARG002
        """As BlockSource."""
        parts = self._payloads.parts([item.slot for item in items])
        self._writes.put(lambda: self._write(attempt_id, items, parts))

    def keep_snapshots(
        self,
        attempt_id: bytes,  # noqa: ARG002
        snapshots: Sequence[tuple[bytes, SwaSnapshot]],  # noqa: ARG002
        *,
        tenant: str,  # noqa: ARG002
    ) -> bool:
        """As BlockSource: no room for any."""
        return False

    def counters(self) -> dict[str, int]:
        """As BlockSource."""
        return {f"store_{name}": count for name, count in self._store.counters().items()}

    def stop(self) -> None:
        """Finishes queued jobs, ends the threads and closes the store."""
        for jobs in (self._reads, self._writes):
            jobs.put(None)
        for thread in self._threads:
            thread.join()
        self._store.close()

    def _run(self, jobs: "queue.SimpleQueue[_Job | None]") -> None:
        while (job := jobs.get()) is not None:
            self._post(job())

    def _post(self, completion: Completion) -> None:
        self.completions.put(completion)
        self._wake()

    def _count_present(self, keys: Sequence[BlockKey]) -> int:
        try:
            return self._store.count_present(keys)
        except StoreUnavailable as error:
            logger.warning("store look-up failed; the prompt is computed in full", extra={"error": error.message})
            self._lost.set()
            return 0

    def _load(self, attempt_id: bytes, items: Sequence[tuple[BlockKey, int]]) -> LoadDone:
        start = time.monotonic()
        provenances: list[int] = []
        try:
            for key, slot in items:
                stored = self._payloads.fill(slot, partial(self._store.read, key))
                if stored is None:
                    break
                provenances.append(stored.provenance)
        except StoreUnavailable as error:
            logger.warning(
                "store read failed; the hit is shortened",
                extra={"error": error.message, "loaded_blocks": len(provenances)},
            )
            self._lost.set()
        return LoadDone(
            attempt_id=attempt_id,
            provenances=tuple(provenances),
            num_bytes=len(provenances) * self._payloads.num_bytes,
            seconds=time.monotonic() - start,
            at_ns=time.monotonic_ns(),
        )

    def _write(self, attempt_id: bytes, items: Sequence[WriteItem], parts: Sequence[Part]) -> WriteDone:
        """Stops at the first failure: a chain with a hole is of no use to a later look-up."""
        committed = 0
        try:
            for item, part in zip(items, parts, strict=True):
                self._store.write(item.key, part[:], block_index=item.block_index, provenance=item.provenance)
                committed += 1
        except StoreUnavailable as error:
            logger.warning("store write failed; blocks stay in the pool only", extra={"error": error.message})
            self._lost.set()
        slots = tuple(item.slot for item in items)
        return WriteDone(attempt_id=attempt_id, committed=committed, failed=len(items) - committed, slots=slots)
