"""The write thread of a rank with kvd: new blocks and snapshots go into reserved slots of the pool, then kvd is told (kv.md 7.3).

Called by KvdSource. The traps: slots of a reservation are ours only while the same kvd incarnation serves the pool, so its epoch
is looked at before the payloads are copied and before each header, without which there is no record; a commit may take as long
as the medium does, so the thread does not wait for it.
"""

import logging
import queue
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from prefill_engine.kv.pool_memory import SNAPSHOT_HEADER_BYTES, PoolMemory
from prefill_engine.kv.record import RecordCodec
from prefill_engine.kv.segments import MAX_RECORDS
from prefill_engine.kv.snapshot_record import SnapshotCodec
from prefill_engine.rank.block_save import BlockSaver
from prefill_engine.rank.block_source import Completion, SnapshotsKept, WriteDone, WriteItem, guarded
from prefill_engine.rank.kvd_client import KvdClient, Link
from prefill_engine.rpc import kv_pb2
from prefill_engine.swa_pool import SwaSnapshot

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class _WriteJob:
    """Blocks of one call, committed in portions of a segment. open_commits: portions kvd has not answered."""

    attempt_id: bytes
    slots: tuple[int, ...]
    committed: list[int] = field(default_factory=list)
    open_commits: int = 0
    is_written: bool = False


class KvdWriter:
    """Owner of the thread."""

    def __init__(
        self,
        client: KvdClient,
        *,
        codec: RecordCodec,
        snapshots: SnapshotCodec,
        saver: BlockSaver,
        post: Callable[[Completion], None],
    ) -> None:
        """post: hands a result to the step thread."""
        self._client = client
        self._codec = codec
        self._snapshots = snapshots
        self._saver = saver
        self._post = post
        self._open_commits = 0
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=guarded(self._run, self._post), name="kv-write", daemon=True)
        self._thread.start()

    def write(self, attempt_id: bytes, items: Sequence[WriteItem], *, tenant: str) -> None:
        """Publishes complete blocks in chain order; ends in WriteDone. Called by the step thread."""
        mark = self._saver.mark()
        self._jobs.put(lambda: self._write(attempt_id, items, tenant, mark))

    def keep_snapshots(self, attempt_id: bytes, snapshots: Sequence[tuple[bytes, SwaSnapshot]], *, tenant: str) -> None:
        """Publishes snapshots, given with their keys; ends in SnapshotsKept."""
        self._jobs.put(lambda: self._keep(attempt_id, snapshots, tenant))

    def stop(self) -> None:
        """Finishes queued jobs and their commits, each within its deadline."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        is_stopping = False
        while not (is_stopping and self._open_commits == 0):
            job = self._jobs.get()
            if job is None:
                is_stopping = True
            else:
                job()

    # --- blocks
    def _write(self, attempt_id: bytes, items: Sequence[WriteItem], tenant: str, mark: int) -> None:
        self._saver.wait_for(mark)
        job = _WriteJob(attempt_id=attempt_id, slots=tuple(item.slot for item in items))
        link = self._client.link
        for first in range(0, len(items), MAX_RECORDS):
            portion = items[first : first + MAX_RECORDS]
            if link is None or not self._write_portion(job, link, portion, tenant):
                break  # a chain with a hole is of no use to a later look-up
        job.is_written = True
        self._finish(job)

    def _write_portion(self, job: _WriteJob, link: Link, items: Sequence[WriteItem], tenant: str) -> bool:
        """Reserve, copy, commit; True = every block of the portion is on its way."""
        granted = self._reserve(link, job.attempt_id, tenant, num_blocks=len(items))
        if granted is None:
            return False
        blocks = self._fill(link, items, granted.slots)
        self._client.filled(link, granted.reservation_id)
        if not blocks:
            self._client.close([granted.reservation_id])
            return False
        index = len(job.committed)
        job.committed.append(0)

        def take(answer: kv_pb2.CommitResponse | None) -> None:
            job.committed[index] = min(answer.stored_blocks, len(blocks)) if answer is not None else 0
            if answer is None or answer.failure:
                failure = answer.failure if answer is not None else "no answer"
                logger.warning("kvd did not store all blocks", extra={"failure": failure, "blocks": len(blocks)})
            job.open_commits -= 1
            self._finish(job)

        job.open_commits += 1
        request = kv_pb2.CommitRequest(reservation_id=granted.reservation_id, blocks=blocks)
        self._commit(link, request, take)
        return len(blocks) == len(items)

    def _fill(self, link: Link, items: Sequence[WriteItem], slots: Sequence[int]) -> list[kv_pb2.CommitBlock]:
        """Leading items as records in the slots that were granted, headers last."""
        pool = link.pool
        pairs = list(takewhile(lambda pair: pair[1] < pool.num_blocks, zip(items, slots, strict=False)))
        if not pairs or not link.is_current:
            return []
        self._saver.save(pool, sources=[item.slot for item, _ in pairs], targets=[slot for _, slot in pairs])
        blocks = []
        for item, slot in pairs:
            if not link.is_current:
                break
            header = self._codec.encode_header(
                key=item.key,
                payload=self._saver.saved_payload(pool, source=item.slot, target=slot),
                block_index=item.block_index,
                provenance=item.provenance,
            )
            pool.record(slot)[: len(header)] = header
            blocks.append(kv_pb2.CommitBlock(key=item.key, slot=slot))
        return blocks

    def _finish(self, job: _WriteJob) -> None:
        """Reports the job once everything of it is answered. Blocks after the first failed portion do not count."""
        if not job.is_written or job.open_commits:
            return
        committed = 0
        for stored in job.committed:
            committed += stored
            if stored < MAX_RECORDS:  # a portion that failed, or the last one
                break
        done = WriteDone(
            attempt_id=job.attempt_id, committed=committed, failed=len(job.slots) - committed, slots=job.slots
        )
        self._post(done)

    # --- snapshots
    def _keep(self, attempt_id: bytes, snapshots: Sequence[tuple[bytes, SwaSnapshot]], tenant: str) -> None:
        link = self._client.link
        granted = None
        if link is not None:
            granted = self._reserve(link, attempt_id, tenant, num_snapshots=len(snapshots))
        if link is None or granted is None:
            self._post(SnapshotsKept(attempt_id=attempt_id, positions=()))
            return
        commits, positions = [], []
        for (key, snapshot), slot in zip(snapshots, granted.snapshot_slots, strict=False):
            if slot >= link.pool.num_snapshots or not link.is_current:
                break
            self._fill_snapshot(link.pool, slot, key, snapshot)
            commits.append(kv_pb2.CommitSnapshot(key=key, slot=slot))
            positions.append(snapshot.position)
        self._client.filled(link, granted.reservation_id)

        def take(answer: kv_pb2.CommitResponse | None) -> None:
            held = answer.held_snapshots if answer is not None else 0
            self._post(SnapshotsKept(attempt_id=attempt_id, positions=tuple(positions[:held])))

        request = kv_pb2.CommitRequest(reservation_id=granted.reservation_id, snapshots=commits)
        self._commit(link, request, take)

    def _fill_snapshot(self, pool: PoolMemory, slot: int, key: bytes, snapshot: SwaSnapshot) -> None:
        header = self._snapshots.encode_header(
            key=key,
            position=snapshot.position,
            first_valid=snapshot.first_valid,
            exact=snapshot.exact,
            generation=secrets.randbits(64),
            payload=snapshot.data,
        )
        record = pool.snapshot(slot)
        record[:SNAPSHOT_HEADER_BYTES] = header
        record[SNAPSHOT_HEADER_BYTES : SNAPSHOT_HEADER_BYTES + len(snapshot.data)] = snapshot.data

    # --- calls
    def _reserve(
        self, link: Link, attempt_id: bytes, tenant: str, *, num_blocks: int = 0, num_snapshots: int = 0
    ) -> kv_pb2.ReserveSlotsResponse | None:
        request = kv_pb2.ReserveSlotsRequest(
            owner_epoch=self._client.owner_epoch,
            attempt_id=attempt_id,
            num_blocks=num_blocks,
            num_snapshots=num_snapshots,
            tenant=tenant,
        )
        granted = self._client.reserve(link, request)
        return granted if granted is not None and granted.reservation_id else None

    def _commit(
        self,
        link: Link,
        request: kv_pb2.CommitRequest,
        take: Callable[["kv_pb2.CommitResponse | None"], None],
    ) -> None:
        """take(answer) is called on the write thread."""

        def end(answer: kv_pb2.CommitResponse | None) -> None:
            self._open_commits -= 1
            take(answer)

        self._open_commits += 1
        self._client.commit(link, request, lambda answer: self._jobs.put(lambda: end(answer)))
