"""Fills slots from the store, and verifies in place what a restart left: one job per Open and kind, on I/O threads.

Called by the Keeper on its loop; the threads report through the Mailbox. The trap: a store may hang. Leases then learn at the
limit that these blocks will not come, but the slots stay quarantined until the thread is back, for it may still write.
"""

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, field

import crc32c

from prefill_engine.kv.record import RecordCodec, VerifyFailure
from prefill_engine.kv.segments import BlockLocation, ReadJob, RecordRead
from prefill_engine.kvd.kvd_metrics import KvdMetrics
from prefill_engine.kvd.mailbox import Mailbox
from prefill_engine.kvd.pool_state import PoolState
from prefill_plan.block_keys import BlockKey

logger = logging.getLogger(__name__)

NOWHERE = BlockLocation(segment="", record=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotRead:
    """A FILLING slot with a key. location: NOWHERE = the record stands in the slot and is to be verified."""

    slot: int
    key: BlockKey
    location: BlockLocation = NOWHERE


@dataclass(slots=True, kw_only=True, eq=False)
class _Job:
    """left: reads that are neither complete nor bad. bad: quarantined until the thread is back."""

    owner: int
    reads: Sequence[SlotRead]
    is_store: bool
    left: set[int]
    cancelled: threading.Event
    urgent: threading.Event
    bad: list[int] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    timer: asyncio.TimerHandle | None = None
    started: float = 0.0


class BlockReads:
    """done_reading: told for every store job whether the medium answered."""

    def __init__(
        self,
        state: PoolState,
        mailbox: Mailbox,
        *,
        metrics: KvdMetrics,
        store_threads: Executor,
        check_threads: Executor,
        done_reading: Callable[[bool], None],
    ) -> None:
        self._state = state
        self._mailbox = mailbox
        self._metrics = metrics
        self._store_threads = store_threads
        self._check_threads = check_threads
        self._done_reading = done_reading
        self._jobs: set[_Job] = set()
        self._awaited: set[_Job] = set()  # of the store, and neither cancelled nor late
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._in_flight: Counter[int] = Counter()

    @property
    def is_idle(self) -> bool:
        return not self._jobs

    async def wait_quiet(self, seconds: float) -> None:
        """Until nobody waits for a read of the store, or for so long."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._quiet.wait(), seconds)

    def num_in_flight(self, owner: int) -> int:
        """Records that this session has in flight from the store."""
        return self._in_flight[owner]

    def start(
        self,
        owner: int,
        reads: Sequence[SlotRead],
        *,
        read: Callable[[ReadJob], None] | None,
        limit_seconds: float,
        group_major: bool = False,
    ) -> None:
        """The slots must be pinned and FILLING. read: SegmentStore.read; None = verify in place."""
        job = _Job(
            owner=owner,
            reads=reads,
            is_store=read is not None,
            left=set(range(len(reads))),
            cancelled=threading.Event(),
            urgent=threading.Event(),
            started=time.monotonic(),
        )
        self._jobs.add(job)
        if read is not None:
            self._in_flight[owner] += len(reads)
            self._awaited.add(job)
            self._quiet.clear()
        job.timer = asyncio.get_running_loop().call_later(limit_seconds, self._expire, job)
        records = [
            RecordRead(key=one.key, location=one.location, target=self._state.memory.record(one.slot)) for one in reads
        ]
        post = self._mailbox.post
        order = ReadJob(
            reads=records,
            group_major=group_major,
            on_group=lambda index, groups: post(lambda: self._note_groups(job, index, groups)),
            on_bad=lambda index, reason: post(lambda: self._note_bad(job, index, reason)),
            is_cancelled=job.cancelled.is_set,
            is_urgent=job.urgent.is_set,
        )
        work = read if read is not None else self._check
        threads = self._store_threads if read is not None else self._check_threads
        threads.submit(self._run, work, order, job)

    def urge(self, slots: Sequence[int]) -> None:
        """A step waits for what is read into these slots."""
        wanted = set(slots)
        for job in self._awaited:
            if any(job.reads[index].slot in wanted for index in job.left):
                job.urgent.set()

    def cancel_unwanted(self) -> None:
        """Stops reads that no lease waits for any more; who wants such a block from now on reads it again. Checks in place go on:
        what they find whole stays."""
        is_awaited = self._state.leases.is_awaited
        for job in self._jobs:
            is_running = job.is_store and not job.cancelled.is_set()
            if is_running and not any(is_awaited(job.reads[index].slot) for index in job.left):
                self._cancel(job)
                for index in list(job.left):
                    self._give_up(job, index)

    def cancel_all(self) -> None:
        for job in self._jobs:
            job.cancelled.set()

    def _run(self, work: Callable[[ReadJob], None], order: ReadJob, job: _Job) -> None:
        """On an I/O thread."""
        try:
            if not job.cancelled.is_set():
                work(order)
        except Exception:
            logger.exception("read job failed; its blocks are misses", extra={"records": len(order.reads)})
            job.reasons["io"] += len(order.reads)
        self._mailbox.post(lambda: self._end(job))

    def _check(self, order: ReadJob) -> None:
        check_records(self._state.codec, order)

    def _note_groups(self, job: _Job, index: int, groups: int) -> None:
        if index not in job.left:
            return
        state, one = self._state, job.reads[index]
        if groups >= state.num_groups:
            job.left.discard(index)
            state.finish_block(one.slot, one.key, stored=job.is_store)
            self._metrics.swapin_bytes.labels("fs" if job.is_store else "shm").inc(state.geometry.record_bytes)
        state.leases.note_groups(one.slot, groups, provenance=state.provenance(one.slot))

    def _note_bad(self, job: _Job, index: int, reason: str) -> None:
        job.reasons[reason] += 1
        if reason != "io":
            self._metrics.verify_fail.labels(reason).inc()
        self._give_up(job, index)

    def _give_up(self, job: _Job, index: int) -> None:
        if index in job.left:
            job.left.discard(index)
            slot = job.reads[index].slot
            self._state.blocks.quarantine(slot)
            job.bad.append(slot)
            self._state.leases.note_bad(slot)

    def _cancel(self, job: _Job) -> None:
        job.cancelled.set()
        self._awaited.discard(job)
        if not self._awaited:
            self._quiet.set()

    def _expire(self, job: _Job) -> None:
        """The caller of Open waits no longer."""
        self._cancel(job)
        job.reasons["late"] += len(job.left)
        for index in list(job.left):
            self._give_up(job, index)
        if job.is_store:
            self._done_reading(False)

    def _end(self, job: _Job) -> None:
        """Nothing of the job is in flight any more."""
        assert job.timer is not None
        job.timer.cancel()
        for index in list(job.left):
            self._give_up(job, index)
        for slot in job.bad:
            self._state.blocks.settle(slot)
        self._jobs.discard(job)
        self._awaited.discard(job)
        if not self._awaited:
            self._quiet.set()
        if not job.is_store:
            return
        self._in_flight[job.owner] -= len(job.reads)
        if not self._in_flight[job.owner]:
            del self._in_flight[job.owner]
        num_answered = len(job.reads) - len(job.bad) + sum(job.reasons[reason] for reason in (*VerifyFailure, "hole"))
        if num_answered or not job.cancelled.is_set():
            self._done_reading(num_answered > 0)
        if job.bad:
            logger.warning(
                "blocks were not read; the hit ends before them",
                extra={"records": len(job.reads), "bad": len(job.bad), "reasons": dict(job.reasons)},
            )


def check_records(codec: RecordCodec, job: ReadJob) -> None:
    """SegmentStore.read for records that stand in their targets already: only verifies."""
    for index, read in enumerate(job.reads):
        if job.is_cancelled():
            return
        expected = codec.read_header(read.target[: codec.shape.header_bytes], key=read.key)
        if isinstance(expected, VerifyFailure):
            job.on_bad(index, str(expected))
            continue
        for group, crc in enumerate(expected):
            start, end = codec.group_range(group)
            if crc32c.crc32c(read.target[start:end]) != crc:
                job.on_bad(index, str(VerifyFailure.CRC))
                break
            job.on_group(index, group + 1)
