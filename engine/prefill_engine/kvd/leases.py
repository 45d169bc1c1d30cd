"""Leases: who holds which slots, how far they are, and their rows in shared memory (kv.md 7.2, 7.5).

Owned by the Keeper, on its event loop. A lease holds its slots by one pin each; a reservation is a lease without a row. The
trap: `ready` counts leading blocks, while slots become ready in any order; and one slot may serve many leases.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from prefill_engine.kv.pool_memory import NUM_LEASES, LeaseRecord, LeaseState, PoolMemory, SnapshotState

NO_ROW = -1


@dataclass(slots=True, kw_only=True, eq=False)
class Lease:
    """slots: of the blocks after the rank's resident ones. groups: verified groups per block. tenant: who asked.

    refuse_replayed: blocks of provenance 1 count as bad. call_id: of the rank's call that it answers.
    """

    lease_id: int
    row: int
    owner_epoch: int
    echo_index: int
    tenant: str
    slots: list[int]
    snapshot_slots: list[int]
    call_id: int = 0
    refuse_replayed: bool = False
    groups: bytearray = field(default_factory=bytearray)
    ready: list[int] = field(default_factory=list)
    limit: int = 0
    num_bad: int = 0
    opened_ns: int = 0

    @property
    def is_reservation(self) -> bool:
        return self.row == NO_ROW


class Leases:
    """num_groups: KV sources of a block. on_group_ready: told group and seconds since Open when all blocks of a lease have it.
    clock_ns: CLOCK_MONOTONIC."""

    def __init__(
        self,
        pool: PoolMemory,
        *,
        num_groups: int,
        on_group_ready: Callable[[int, float], None] = lambda _group, _seconds: None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._pool = pool
        self._num_groups = num_groups
        self._on_group_ready = on_group_ready
        self._clock_ns = clock_ns
        self._by_id: dict[int, Lease] = {}
        self._rows_free = list(range(NUM_LEASES - 1, -1, -1))
        self._waiting: dict[int, list[tuple[Lease, int]]] = {}  # filling slot -> who waits for it, at which block
        self._snapshot_waiting: dict[int, list[Lease]] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Lease]:
        return iter(list(self._by_id.values()))

    @property
    def has_row(self) -> bool:
        return bool(self._rows_free)

    def find(self, lease_id: int) -> Lease | None:
        return self._by_id.get(lease_id)

    def of_owner(self, owner_epoch: int) -> list[Lease]:
        return [lease for lease in self._by_id.values() if lease.owner_epoch == owner_epoch]

    def open(self, lease: Lease, *, filled: Sequence[int]) -> None:
        """Puts a lease (row NO_ROW: gets one) into the table. filled: per slot, the groups that are verified already."""
        lease.row = self._rows_free.pop()
        lease.groups = bytearray(filled)
        lease.ready = [0] * self._num_groups
        lease.limit = len(lease.slots)
        lease.opened_ns = self._clock_ns()
        self._by_id[lease.lease_id] = lease
        if min(filled, default=self._num_groups) < self._num_groups:
            for index, (slot, groups) in enumerate(zip(lease.slots, filled, strict=True)):
                if groups < self._num_groups:
                    self._waiting.setdefault(slot, []).append((lease, index))
        record = self._pool.lease(lease.row)
        record.clear()
        record.owner_epoch = lease.owner_epoch
        record.num_blocks = record.limit_blocks = lease.limit
        self._advance(lease, record)
        record.state = LeaseState.LIVE
        record.lease_id = lease.lease_id

    def reserve(self, reservation: Lease) -> None:
        self._by_id[reservation.lease_id] = reservation

    def readopt(self, lease: Lease) -> None:
        """A lease of kvd's former life whose row is still in shared memory. What was not ready then never will be."""
        self._by_id[lease.lease_id] = lease
        if lease.is_reservation:
            return
        self._rows_free.remove(lease.row)
        record = self._pool.lease(lease.row)
        lease.ready = list(record.ready[: self._num_groups])
        whole = min(lease.ready, default=0)
        lease.groups = bytearray([self._num_groups] * whole + [0] * (len(lease.slots) - whole))
        lease.limit = whole
        record.limit_blocks = whole
        record.state = LeaseState.GRACE
        if record.snapshot_state is SnapshotState.PULLING:
            record.snapshot_state = SnapshotState.FAILED
        record.progress_ns = self._clock_ns()

    def set_state(self, lease: Lease, state: LeaseState) -> None:
        if not lease.is_reservation:
            self._pool.lease(lease.row).state = state

    def note_groups(self, slot: int, groups: int, *, provenance: int = 0) -> None:
        """The first `groups` groups of a filling slot are verified."""
        waiting = self._waiting.get(slot)
        if waiting is None:
            return
        if provenance:
            for lease, index in [entry for entry in waiting if entry[0].refuse_replayed]:
                waiting.remove((lease, index))
                self._limit(lease, index)
        for lease, index in waiting:
            if groups > lease.groups[index]:
                lease.groups[index] = groups
                self._advance(lease, self._pool.lease(lease.row))
        if groups >= self._num_groups or not waiting:
            del self._waiting[slot]

    def note_bad(self, slot: int) -> None:
        """A filling slot will not become ready."""
        for lease, index in self._waiting.pop(slot, ()):
            self._limit(lease, index)

    def is_awaited(self, slot: int) -> bool:
        """Whether a lease still wants what is being read into the slot."""
        return slot in self._waiting

    def set_snapshot(self, lease: Lease, slot: int, state: SnapshotState) -> None:
        lease.snapshot_slots = [slot]
        record = self._pool.lease(lease.row)
        record.snapshot_slot = slot
        record.snapshot_state = state
        record.progress_ns = self._clock_ns()
        if state is SnapshotState.PULLING:
            self._snapshot_waiting.setdefault(slot, []).append(lease)

    def note_snapshot(self, slot: int, state: SnapshotState) -> list[Lease]:
        """A pull into the slot ended; returns the leases that waited for it."""
        waiting = self._snapshot_waiting.pop(slot, [])
        for lease in waiting:
            record = self._pool.lease(lease.row)
            record.snapshot_state = state
            record.progress_ns = self._clock_ns()
        return waiting

    def truncate(self, lease: Lease, num_blocks: int) -> list[int]:
        """Cuts the end off; returns the slots that the lease no longer holds."""
        dropped = lease.slots[num_blocks:]
        for index, slot in enumerate(dropped, start=num_blocks):
            if slot in self._waiting:
                self._stop_waiting(lease, slot, index)
        del lease.slots[num_blocks:], lease.groups[num_blocks:]
        lease.limit = min(lease.limit, num_blocks)
        record = self._pool.lease(lease.row)
        record.limit_blocks = lease.limit
        record.num_blocks = len(lease.slots)
        return dropped

    def drop_snapshot(self, lease: Lease) -> list[int]:
        """Returns the snapshot slots that the lease no longer holds."""
        dropped, lease.snapshot_slots = lease.snapshot_slots, []
        for slot in dropped:
            waiting = self._snapshot_waiting.get(slot)
            if waiting and lease in waiting:
                waiting.remove(lease)
        if not lease.is_reservation:
            self._pool.lease(lease.row).snapshot_state = SnapshotState.NONE
        return dropped

    def close(self, lease: Lease, *, lost: bool = False) -> tuple[list[int], list[int]]:
        """Ends a lease or reservation; returns the block and snapshot slots it held. lost: its owner may still look at the
        row, which says so until another lease takes it."""
        del self._by_id[lease.lease_id]
        if lease.is_reservation:
            return lease.slots, lease.snapshot_slots
        snapshots = self.drop_snapshot(lease)
        slots = self.truncate(lease, 0)
        record = self._pool.lease(lease.row)
        record.state = LeaseState.LOST if lost else LeaseState.FREE
        if not lost:
            record.clear()
        self._rows_free.insert(0, lease.row)  # the row longest free is used next
        return slots, snapshots

    def clear_rows(self) -> None:
        """Rows of a former life that nobody re-adopted."""
        for row in self._rows_free:
            record = self._pool.lease(row)
            if record.lease_id:
                record.state = LeaseState.LOST

    def _limit(self, lease: Lease, index: int) -> None:
        lease.num_bad += 1
        lease.limit = min(lease.limit, index)
        record = self._pool.lease(lease.row)
        record.limit_blocks = lease.limit
        record.error = lease.num_bad
        record.progress_ns = self._clock_ns()

    def _advance(self, lease: Lease, record: LeaseRecord) -> None:
        groups, num_blocks = lease.groups, len(lease.slots)
        for group in range(self._num_groups):
            ready = start = lease.ready[group]
            if not start and min(groups, default=0) > group:
                ready = num_blocks
            while ready < num_blocks and groups[ready] > group:
                ready += 1
            if ready != start:
                lease.ready[group] = ready
                record.set_ready(group, ready)
                if ready == num_blocks:
                    self._on_group_ready(group, (self._clock_ns() - lease.opened_ns) * 1e-9)
        record.progress_ns = self._clock_ns()

    def _stop_waiting(self, lease: Lease, slot: int, index: int) -> None:
        waiting = self._waiting[slot]
        if (lease, index) in waiting:
            waiting.remove((lease, index))
            if not waiting:
                del self._waiting[slot]
