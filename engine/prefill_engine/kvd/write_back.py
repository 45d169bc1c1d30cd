"""Writes committed blocks to the store as segments, behind a queue bounded in bytes; reads go first (kv.md 7.4).

Called by the Keeper on its loop; one thread writes. The trap: a block is announced only after its segment has its name, and its
slot stays pinned until then.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass

from prefill_engine.kv.directory import Directory
from prefill_engine.kv.segments import MAX_RECORDS, RecordWrite, SegmentInfo
from prefill_engine.kvd.block_reads import BlockReads
from prefill_engine.kvd.kvd_metrics import KvdMetrics
from prefill_engine.kvd.pool_state import PoolState
from prefill_engine.kvd.store_link import StoreLink
from prefill_plan.block_keys import BlockKey
from prefill_plan.errors import PrefillError

logger = logging.getLogger(__name__)

# Longest wait of a segment for reads: about as long as the read of a 100k prompt's hit takes from a disk.
PATIENCE_SECONDS = 0.050


def write_patience(num_bytes: int, max_bytes: int, *, most_seconds: float) -> float:
    """How long the next segment may wait for reads. num_bytes: that wait or are written; the fuller the queue, the less, and
    nothing from an eighth of max_bytes on: under reads without end the queue stays about so full, the rest is for bursts."""
    return most_seconds * max(0.0, 1 - 8 * num_bytes / max_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotWrite:
    """A VALID slot, pinned once for the write."""

    slot: int
    key: BlockKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Blocks of one file, all of one tenant. done: "" once they are stored and announced, else why not."""

    writes: Sequence[SlotWrite]
    tenant: str
    done: "asyncio.Future[str]"


class WriteBack:
    """max_bytes: of records that wait or are being written; beyond it the newest are dropped and counted."""

    def __init__(
        self,
        state: PoolState,
        store: StoreLink,
        directory: Directory,
        *,
        reads: BlockReads,
        metrics: KvdMetrics,
        threads: Executor,
        max_bytes: int,
    ) -> None:
        self._state = state
        self._store = store
        self._directory = directory
        self._reads = reads
        self._metrics = metrics
        self._threads = threads
        self._max_bytes = max_bytes
        self._queue: deque[Segment] = deque()
        self._num_bytes = 0
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._task = asyncio.create_task(self._work())

    @property
    def is_idle(self) -> bool:
        return self._idle.is_set()

    def put(self, writes: Sequence[SlotWrite], *, tenant: str) -> list[Segment]:
        """Queues blocks in chain order, cut into segments."""
        segments = []
        for start in range(0, len(writes), MAX_RECORDS):
            part = writes[start : start + MAX_RECORDS]
            segment = Segment(writes=part, tenant=tenant, done=asyncio.get_running_loop().create_future())
            segments.append(segment)
            num_bytes = len(part) * self._state.geometry.record_bytes
            if self._num_bytes + num_bytes > self._max_bytes:
                self._drop(segment, f"the write queue is full ({self._num_bytes} of {self._max_bytes} bytes)")
                continue
            self._num_bytes += num_bytes
            self._metrics.writeback_queue_bytes.set(self._num_bytes)
            self._queue.append(segment)
            self._idle.clear()
            self._wake.set()
        return segments

    async def drain(self, seconds: float) -> bool:
        """Waits until the queue is empty; False = not within this time."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), seconds)
        return self._idle.is_set()

    async def stop(self) -> None:
        """Waiting blocks are dropped; a write that runs is waited for, since it reads the slots."""
        for segment in self._queue:
            self._drop(segment, "kvd ends")
        self._queue.clear()
        await self._idle.wait()
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task

    async def _work(self) -> None:
        while True:
            while self._queue:
                patience = write_patience(self._num_bytes, self._max_bytes, most_seconds=PATIENCE_SECONDS)
                await self._reads.wait_quiet(patience)
                if self._queue:  # stop() may have emptied it
                    await self._write(self._queue.popleft())
            self._num_bytes = 0
            self._metrics.writeback_queue_bytes.set(0)
            self._idle.set()
            self._wake.clear()
            await self._wake.wait()

    async def _write(self, segment: Segment) -> None:
        await self._store.first_try()
        store = self._store.writer()
        if store is None:
            self._drop(segment, "the store is away")
        else:
            memory = self._state.memory
            records = [RecordWrite(key=one.key, record=memory.record(one.slot)) for one in segment.writes]
            started = time.monotonic()
            loop = asyncio.get_running_loop()
            publish: Callable[[], SegmentInfo] = lambda: store.publish(records, tenant=segment.tenant)  # noqa: E731
            try:
                info = await loop.run_in_executor(self._threads, publish)
            except Exception as error:
                # Whatever it is, the next segment must find this task alive, and the slots must come back.
                if not isinstance(error, PrefillError | OSError | ValueError):
                    logger.exception("publishing failed in an unexpected way")
                self._store.note_write(False)
                self._drop(segment, str(error) or repr(error))
            else:
                self._store.note_write(True)
                self._metrics.publish_seconds.observe(time.monotonic() - started)
                await self._directory.publish_segments(store.store_id, [info])
                self._finish(segment)
        self._num_bytes -= len(segment.writes) * self._state.geometry.record_bytes
        self._metrics.writeback_queue_bytes.set(self._num_bytes)

    def _finish(self, segment: Segment) -> None:
        for one in segment.writes:
            self._state.stored[one.slot] = 1
        self._end(segment, "")

    def _drop(self, segment: Segment, why: str) -> None:
        self._metrics.writeback_dropped.inc(len(segment.writes))
        logger.warning("blocks not stored", extra={"blocks": len(segment.writes), "detail": why})
        self._end(segment, why)

    def _end(self, segment: Segment, failure: str) -> None:
        for one in segment.writes:
            self._state.blocks.unpin(one.slot)
        if not segment.done.done():
            segment.done.set_result(failure)
