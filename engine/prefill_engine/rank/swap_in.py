"""The copy thread of a rank: follows the watermarks of leases and copies hit blocks, group by group, into the KV cache.

KvdSource hands it jobs; step gates (step_gate.py) wait for what it has copied. Owner of the loads in progress. The traps: a
watermark may be of a lease that is not ours any more, so lease id, owner, state and kvd's epoch are compared again after every
copy, and a copy that fails that test never happened; LoadDone is queued before a gate hears of the last group, so that whoever
passed the gate finds it.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from prefill_engine.kv.pool_memory import SNAPSHOT_HEADER_BYTES, LeaseState, SnapshotState
from prefill_engine.kv.snapshot_record import SnapshotCodec
from prefill_engine.rank.block_copy import GroupCopier, matching_headers
from prefill_engine.rank.block_source import Completion, GroupLoaded, LoadDone, SnapshotDone, guarded
from prefill_engine.rank.kvd_client import Link
from prefill_engine.rank.swap_counters import SwapCounters
from prefill_engine.rank.swap_limit import Arrival, SwapLimits, add_arrival, awaited_bytes, limit_seconds
from prefill_engine.rank.swap_plan import Copy, Ending, find_ending, next_copy, whole_groups
from prefill_engine.swa_pool import SwaSnapshot
from prefill_plan.block_keys import BlockKey

# A watermark is looked at this often while nothing else is to do: a fraction of the time that one group takes.
_POLL_SECONDS = 0.0003


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapJob:
    """first: lease's blocks before it are not wanted. keys, sources, targets: of the wanted blocks, in chain order. num_blocks:
    of the load, more than the lease has when kvd found less; such a load is never whole.

    lease_row, lease_id: in the pool of `link`. snapshot_key: of the snapshot that the lease may bring, b"" = none.
    """

    attempt_id: bytes
    link: Link
    owner_epoch: int
    lease_row: int
    lease_id: int
    first: int
    keys: tuple[BlockKey, ...]
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    num_blocks: int
    snapshot_key: bytes


@dataclass(slots=True, kw_only=True)
class LoadProgress:
    """What gates see of a load; made by the step thread, then written under SwapIn's condition only.

    groups: leading ones that every block has. progress: when anything moved last, CLOCK_MONOTONIC. ending: None while it goes on.
    """

    groups: int = 0
    progress: float = 0.0
    ending: Ending | None = None


@dataclass(slots=True, kw_only=True)
class _LoadState:
    """Of the copy thread, but for is_wanted, which others clear. num_awaited: bytes that were not ready at the first look; None
    before it. late_at: known then, too."""

    job: SwapJob
    shared: LoadProgress
    started: float
    copied: list[int]
    num_awaited: int | None = None
    late_at: float = 0.0
    num_bytes: int = 0
    provenances: list[int] = field(default_factory=list)
    wants_snapshot: bool = False
    is_wanted: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class _Watermarks:
    """A lease row as it stood at one moment, in blocks from the first wanted one."""

    ready: tuple[int, ...]
    limit: int
    progress: float
    snapshot: SnapshotState
    snapshot_slot: int


class SwapIn:
    """Owner of the thread."""

    def __init__(
        self,
        *,
        copier: GroupCopier,
        codec: SnapshotCodec,
        group_bytes: Sequence[int],
        limits: SwapLimits,
        gate_seconds: float,
        post: Callable[[Completion], None],
        on_end: Callable[[bytes], None],
        is_up: Callable[[Link], bool],
        counters: SwapCounters,
    ) -> None:
        """group_bytes: of a block, in layer order. post: hands a result to the step thread. on_end: called with the attempt when
        a load names no slot any more. is_up: whether kvd still answers in that session."""
        self.changed = threading.Condition()
        self.counters = counters
        self._copier = copier
        self._codec = codec
        self._group_bytes = tuple(group_bytes)
        self._num_groups = len(self._group_bytes)
        self._limits = limits
        self._arrivals: tuple[Arrival, ...] = ()
        self._gate_seconds = gate_seconds
        self._post = post
        self._on_end = on_end
        self._is_up = is_up
        self._loads: dict[bytes, _LoadState] = {}
        self._stopping = False
        self._thread = threading.Thread(target=guarded(self._run, self._post), name="kv-copy", daemon=True)
        self._thread.start()

    def start(self, job: SwapJob, shared: LoadProgress) -> None:
        """Begins to load; ends in LoadDone and on_end."""
        now = time.monotonic()
        state = _LoadState(
            job=job,
            shared=shared,
            started=now,
            copied=[0] * self._num_groups,
            wants_snapshot=bool(job.snapshot_key),
        )
        with self.changed:
            shared.progress = now
            self._loads[job.attempt_id] = state
            self.changed.notify_all()

    def give_up(self, attempt_id: bytes) -> None:
        """Ends a load soon; unknown ones are fine."""
        with self.changed:
            state = self._loads.get(attempt_id)
            if state is not None:
                state.is_wanted = False

    def refuse(self, attempt_id: bytes, shared: LoadProgress) -> None:
        """Ends a load that has no lease to begin with."""
        self._post(SnapshotDone(attempt_id=attempt_id, snapshot=None))
        now_ns = time.monotonic_ns()
        self._post(LoadDone(attempt_id=attempt_id, provenances=(), num_bytes=0, seconds=0.0, at_ns=now_ns))
        with self.changed:
            shared.ending = Ending.LOST
            self.changed.notify_all()

    def stop(self) -> None:
        with self.changed:
            self._stopping = True
            self.changed.notify_all()
        self._thread.join()

    # --- the copy thread
    def _run(self) -> None:
        while True:
            with self.changed:
                while not self._loads and not self._stopping:
                    self.changed.wait()
                if self._stopping:
                    return
                states = list(self._loads.values())
            moved = [self._advance(state) for state in states]  # every load gets its turn
            if not any(moved):
                time.sleep(_POLL_SECONDS)

    def _advance(self, state: _LoadState) -> bool:
        """One step of one load; True = something was copied or the load is over."""
        now = time.monotonic()
        marks = self._read(state.job)
        if marks is None or not state.is_wanted:
            return self._finish(state, Ending.LOST if marks is None else Ending.GIVEN_UP)
        if state.wants_snapshot:
            self._take_snapshot(state, marks)
        if state.shared.ending is not None:  # only its snapshot was waited for, until the attempt lets go
            return not state.wants_snapshot and self._finish(state, state.shared.ending)
        if marks.progress > state.shared.progress:
            with self.changed:
                state.shared.progress = min(now, marks.progress)
                self.changed.notify_all()
        limit = min(marks.limit, len(state.job.sources))
        if state.num_awaited is None:
            state.num_awaited = awaited_bytes(self._group_bytes, marks.ready, len(state.job.sources))
            state.late_at = state.started + limit_seconds(self._limits, self._arrivals, num_bytes=state.num_awaited)
        copy = next_copy(
            tuple(state.copied),
            marks.ready,
            limit,
            at_most=self._copier.most_blocks,
            lone_groups=self._copier.lone_groups,
        )
        if copy is not None:
            return self._copy(state, copy)
        ending = find_ending(
            tuple(state.copied),
            state.job.num_blocks,
            limit,
            now=now,
            late_at=state.late_at,
            is_kvd_gone=not self._is_up(state.job.link) and now - state.shared.progress > self._gate_seconds,
        )
        return ending is not None and self._finish(state, ending)

    def _copy(self, state: _LoadState, copy: Copy) -> bool:
        job = state.job
        sources, targets = job.sources[copy.first : copy.end], job.targets[copy.first : copy.end]
        groups = range(copy.first_group, copy.end_group)
        provenances: list[int] = []
        if 0 in groups:
            found = matching_headers(job.link.pool, sources, job.keys[copy.first : copy.end])
            if len(found) < len(sources):
                return self._finish(state, Ending.LOST)
            provenances = found.tolist()
        num_bytes = self._copier.copy(job.link.pool, groups=groups, sources=sources, targets=targets)
        if self._read(job) is None:
            return self._finish(state, Ending.LOST)
        state.provenances += provenances
        state.num_bytes += num_bytes
        for group in groups:
            state.copied[group] = copy.end
        return self._tell_progress(state)

    def _tell_progress(self, state: _LoadState) -> bool:
        job = state.job
        groups = whole_groups(tuple(state.copied), job.num_blocks)
        if groups == self._num_groups:
            return self._finish(state, Ending.WHOLE)
        now = time.monotonic()
        if groups > state.shared.groups:
            seconds = now - state.started
            self.counters.add_groups(range(state.shared.groups, groups), seconds)
            self._post(
                GroupLoaded(
                    attempt_id=job.attempt_id,
                    groups=groups,
                    num_bytes=state.num_bytes,
                    seconds=seconds,
                    at_ns=round(now * 1e9),
                )
            )
        with self.changed:
            state.shared.groups, state.shared.progress = groups, now
            self.changed.notify_all()
        return True

    def _read(self, job: SwapJob) -> _Watermarks | None:
        """None: the row is not ours any more, or was not during the read."""
        row = job.link.pool.lease(job.lease_row)
        if not (row.lease_id == job.lease_id and row.owner_epoch == job.owner_epoch and row.state is LeaseState.LIVE):
            return None
        marks = _Watermarks(
            ready=tuple(max(0, ready - job.first) for ready in row.ready[: self._num_groups]),
            limit=max(0, row.limit_blocks - job.first),
            progress=row.progress_ns / 1e9,
            snapshot=row.snapshot_state,
            snapshot_slot=row.snapshot_slot,
        )
        is_ours = row.lease_id == job.lease_id and row.state is LeaseState.LIVE and job.link.is_current
        return marks if is_ours else None

    def _take_snapshot(self, state: _LoadState, marks: _Watermarks) -> None:
        """Verifies and copies a snapshot that has come; a lost one is told as lost."""
        if marks.snapshot is SnapshotState.PULLING:
            return
        state.wants_snapshot = False
        snapshot = None
        if marks.snapshot is SnapshotState.READY and marks.snapshot_slot < state.job.link.pool.num_snapshots:
            # Copied first: what is verified must be what is used.
            record = bytes(state.job.link.pool.snapshot(marks.snapshot_slot))
            if self._codec.verify(record, key=state.job.snapshot_key) is None and self._read(state.job) is not None:
                info = self._codec.decode_info(record)
                end = SNAPSHOT_HEADER_BYTES + self._codec.payload_bytes
                snapshot = SwaSnapshot(
                    position=info.position,
                    first_valid=info.first_valid,
                    exact=info.exact,
                    data=record[SNAPSHOT_HEADER_BYTES:end],
                )
        self.counters.add("kv_snapshot_taken" if snapshot is not None else "kv_snapshot_lost")
        self._post(SnapshotDone(attempt_id=state.job.attempt_id, snapshot=snapshot))

    def _finish(self, state: _LoadState, ending: Ending) -> bool:
        """Says what is whole, once; then forgets the load, unless its snapshot may still come."""
        shared = state.shared
        is_first = shared.ending is None
        # A hit that shrank ends elsewhere than its snapshot.
        is_over = ending is not Ending.WHOLE or not state.wants_snapshot
        with self.changed:
            if is_over:
                del self._loads[state.job.attempt_id]
        if is_first:
            self._report(state, ending)
        elif state.wants_snapshot:
            self._post(
                SnapshotDone(attempt_id=state.job.attempt_id, snapshot=None)
            )  # the lease went while it was on its way
        if is_over:
            self._on_end(state.job.attempt_id)
        if is_first:
            with self.changed:
                shared.ending = ending
                shared.groups = self._num_groups if ending is Ending.WHOLE else shared.groups
                self.changed.notify_all()
        return True

    def _report(self, state: _LoadState, ending: Ending) -> None:
        job, now = state.job, time.monotonic()
        seconds = now - state.started
        self.counters.add_load(ending, num_bytes=state.num_bytes)
        if ending in (Ending.WHOLE, Ending.LATE) and state.num_awaited:
            missing = awaited_bytes(self._group_bytes, state.copied, len(job.sources))
            num_come = max(0, state.num_awaited - missing)  # failed reads lower what can still come
            arrival = Arrival(num_awaited=state.num_awaited, num_come=num_come, seconds=seconds)
            self._arrivals = add_arrival(self._arrivals, arrival)
        if ending is Ending.WHOLE:
            self.counters.add_groups(range(state.shared.groups, self._num_groups), seconds)
        elif state.wants_snapshot:
            self._post(SnapshotDone(attempt_id=job.attempt_id, snapshot=None))
        whole = tuple(state.provenances[: min(state.copied)])
        self._post(
            LoadDone(
                attempt_id=job.attempt_id,
                provenances=whole,
                num_bytes=state.num_bytes,
                seconds=seconds,
                at_ns=round(now * 1e9),
            )
        )
