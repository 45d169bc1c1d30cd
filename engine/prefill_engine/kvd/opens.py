"""Open: what a rank's wanted hit finds, pinned and on its way (kv.md 7.3). Plan in open_plan.py, acts here.

Called by the service for each request, on kvd's loop. The trap: between looking at the pool and acting on it nothing may be
awaited; so the directory is asked first, and the pool again afterwards.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prefill_engine.kv.directory import Directory
from prefill_engine.kv.pool_memory import SnapshotState
from prefill_engine.kv.segments import BlockLocation, SegmentStore
from prefill_engine.kvd.block_reads import BlockReads, SlotRead
from prefill_engine.kvd.kvd_metrics import KvdMetrics
from prefill_engine.kvd.leases import NO_ROW, Lease
from prefill_engine.kvd.open_plan import RETRY_SECONDS, OpenPlan, Source, plan_open
from prefill_engine.kvd.pool_state import PoolState
from prefill_engine.kvd.sessions import Session
from prefill_engine.kvd.slot_pool import SlotState
from prefill_engine.kvd.snapshot_pulls import SnapshotPulls
from prefill_engine.kvd.store_link import StoreLink
from prefill_plan.block_keys import BlockKey, snapshot_key
from prefill_plan.layer_spec import BLOCK_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAsk:
    """keys: of all blocks of the wanted hit, resident ones included. limit_seconds: reads that take longer are given up.
    step_waits: the first groups are wanted before whole blocks, though all of them take longer then. call_id: as Lease's."""

    keys: Sequence[BlockKey]
    resident_blocks: int
    tenant: str
    want_snapshot: bool
    limit_seconds: float
    refuse_replayed: bool
    step_waits: bool = False
    call_id: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAnswer:
    """lease_id 0: nothing is held. slots: of blocks [resident, found). shrunk_blocks: see OpenPlan."""

    lease_id: int = 0
    row: int = 0
    found_blocks: int
    slots: Sequence[int] = ()
    snapshot: SnapshotState = SnapshotState.NONE
    snapshot_slot: int = 0
    shrunk_blocks: int = 0
    retry_seconds: float = 0.0


@dataclass(slots=True, kw_only=True)
class _Survey:
    """Where each block after the resident ones is. slots: -1 = in none. takeable: as plan_open's."""

    slots: list[int]
    sources: list[Source]
    takeable: list[bool]


class Opens:
    """new_id: a lease id never given before. read_budget_blocks: records in flight per session."""

    def __init__(
        self,
        state: PoolState,
        *,
        reads: BlockReads,
        pulls: SnapshotPulls,
        store: StoreLink,
        directory: Directory,
        metrics: KvdMetrics,
        new_id: Callable[[], int],
        read_budget_blocks: int,
    ) -> None:
        self._state = state
        self._reads = reads
        self._pulls = pulls
        self._store = store
        self._directory = directory
        self._metrics = metrics
        self._new_id = new_id
        self._read_budget_blocks = read_budget_blocks

    async def open(self, session: Session, ask: OpenAsk) -> OpenAnswer:
        started = time.monotonic()
        keys = ask.keys[ask.resident_blocks :]
        # Asked once: while the store fails, this may be the one try of its pause.
        store = self._store.reader()
        survey, locations = self._survey(keys, {}, ask), {}
        if store is not None and Source.ABSENT in survey.sources:
            missing = [key for key, slot in zip(keys, survey.slots, strict=True) if slot < 0]
            found = await self._directory.lookup_blocks(store.store_id, self._state.layout_id, missing)
            locations = dict(zip(missing, found, strict=False))
            survey = self._survey(keys, locations, ask)
        if ask.call_id in session.abandoned:
            return OpenAnswer(found_blocks=ask.resident_blocks)
        if not self._state.leases.has_row:
            return OpenAnswer(
                found_blocks=ask.resident_blocks,
                shrunk_blocks=sum(source is not Source.ABSENT for source in survey.sources),
                retry_seconds=RETRY_SECONDS,
            )
        budget = self._read_budget_blocks - self._reads.num_in_flight(session.owner_epoch)
        plan = plan_open(
            survey.sources,
            survey.takeable,
            num_takeable=self._state.blocks.num_takeable,
            read_budget_blocks=budget,
        )
        lease = self._hold(session, ask, keys, survey, plan, store, locations)
        num_found = ask.resident_blocks + plan.num_blocks
        try:
            snapshot = (
                await self._open_snapshot(lease, snapshot_key(ask.keys[num_found - 1]), ask) if num_found else None
            )
        except BaseException:
            if self._is_held(lease):
                self._state.end_lease(lease)
                self._reads.cancel_unwanted()
            raise
        if not self._is_held(lease):  # abandoned meanwhile, or its rank is dead
            return OpenAnswer(found_blocks=ask.resident_blocks)
        self._count(ask, plan, num_found, snapshot, time.monotonic() - started)
        is_held = bool(lease.slots) or snapshot is not None
        if is_held:
            self._state.record_lease(lease)
        else:
            self._state.end_lease(lease)
        return OpenAnswer(
            lease_id=lease.lease_id if is_held else 0,
            row=lease.row,
            found_blocks=num_found,
            slots=lease.slots[:],
            snapshot=snapshot or SnapshotState.NONE,
            snapshot_slot=lease.snapshot_slots[0] if snapshot is not None else 0,
            shrunk_blocks=plan.shrunk_blocks,
            retry_seconds=plan.retry_seconds,
        )

    def _is_held(self, lease: Lease) -> bool:
        return self._state.leases.find(lease.lease_id) is lease

    def _survey(self, keys: Sequence[BlockKey], locations: dict[BlockKey, BlockLocation], ask: OpenAsk) -> _Survey:
        slots, sources, takeable = self._state.blocks.survey(keys)
        for index, key in enumerate(keys) if locations else ():
            if sources[index] is Source.ABSENT and key in locations:
                sources[index] = Source.READ
        if ask.refuse_replayed:
            replayed = self._state.replayed
            for index, slot in enumerate(slots):
                if slot >= 0 and replayed[slot] and sources[index] is not Source.JOIN:
                    sources[index] = Source.ABSENT
        return _Survey(slots=slots, sources=sources, takeable=takeable)

    def _hold(
        self,
        session: Session,
        ask: OpenAsk,
        keys: Sequence[BlockKey],
        survey: _Survey,
        plan: OpenPlan,
        store: SegmentStore | None,
        locations: dict[BlockKey, BlockLocation],
    ) -> Lease:
        """Pins, takes slots, starts reads; everything is in the table when it returns."""
        state, num = self._state, plan.num_blocks
        state.blocks.pin_all([slot for slot in survey.slots[:num] if slot >= 0])
        fresh = state.take_blocks(plan.num_reads, tenant=ask.tenant)
        self._metrics.evicted_bytes.labels("block").inc(len(state.blocks.pop_evicted()) * state.geometry.record_bytes)
        assert len(fresh) == plan.num_reads, "the plan promised these slots"
        fresh.reverse()
        slots, filled = survey.slots[:num], bytearray([state.num_groups]) * num
        reads, checks = [], []
        for index, source in enumerate(survey.sources[:num]):
            if source is Source.POOL:
                continue
            filled[index] = 0
            if source is Source.READ:
                slots[index] = fresh.pop()
                reads.append(SlotRead(slot=slots[index], key=keys[index], location=locations[keys[index]]))
            elif source is Source.CHECK:
                checks.append(SlotRead(slot=slots[index], key=keys[index]))
        for one in (*reads, *checks):
            state.blocks.start_fill(one.slot, one.key)
        lease = Lease(
            lease_id=self._new_id(),
            row=NO_ROW,
            owner_epoch=session.owner_epoch,
            echo_index=session.echo_index,
            tenant=ask.tenant,
            slots=slots,
            snapshot_slots=[],
            refuse_replayed=ask.refuse_replayed,
            call_id=ask.call_id,
        )
        state.leases.open(lease, filled=filled)
        if checks:
            self._reads.start(session.owner_epoch, checks, read=None, limit_seconds=ask.limit_seconds)
        if reads:
            assert store is not None
            self._reads.start(
                session.owner_epoch,
                reads,
                read=store.read,
                limit_seconds=ask.limit_seconds,
                group_major=ask.step_waits,
            )
        self._metrics.swapin_bytes.labels("shm").inc((num - len(reads) - len(checks)) * state.geometry.record_bytes)
        return lease

    async def _open_snapshot(self, lease: Lease, key: bytes, ask: OpenAsk) -> SnapshotState | None:
        """Pins or pulls the snapshot; None = there is none, or no slot for it."""
        if not ask.want_snapshot:
            return None
        if self._state.snapshots.find(key) is None:
            locations = await self._directory.lookup_snapshot(key)
            if not self._is_held(lease):
                return None
            if self._state.snapshots.find(key) is None:
                slot = self._pulls.take_slot(tenant=ask.tenant) if locations else None
                if slot is None:
                    return None
                self._pulls.start(slot, key, locations)
                self._state.leases.set_snapshot(lease, slot, SnapshotState.PULLING)
                return SnapshotState.PULLING
        slot = self._state.snapshots.find(key)
        assert slot is not None
        if self._state.snapshots.is_suspect(slot):
            self._pulls.check(slot, key)
        self._state.snapshots.pin(slot)
        is_valid = self._state.snapshots.state(slot) is SlotState.VALID
        now = SnapshotState.READY if is_valid else SnapshotState.PULLING
        self._state.leases.set_snapshot(lease, slot, now)
        return now

    def _count(self, ask: OpenAsk, plan: OpenPlan, found: int, snapshot: SnapshotState | None, seconds: float) -> None:
        metrics = self._metrics
        # A pull that runs may fail yet: its look-up is no exact hit.
        mode = "replay" if snapshot is None else "pulling" if snapshot is SnapshotState.PULLING else "exact"
        metrics.open.labels(mode if found else "miss").inc()
        metrics.open_seconds.observe(seconds)
        metrics.open_shrunk_blocks.inc(plan.shrunk_blocks)
        metrics.hit_tokens.inc(plan.num_blocks * BLOCK_TOKENS)
        metrics.requested_tokens.inc((len(ask.keys) - ask.resident_blocks) * BLOCK_TOKENS)
