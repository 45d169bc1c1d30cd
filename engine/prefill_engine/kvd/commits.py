"""Reserve and Commit: how new blocks and snapshots of a rank become findable and stored (kv.md 7.3).

Called by the service on kvd's loop. The trap: a rank's word is not taken for what stands in a slot; every record is verified
before anybody can find it, and a slot leaves its reservation before the first await.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

from prefill_engine.kv.directory import Directory
from prefill_engine.kvd.kvd_metrics import KvdMetrics
from prefill_engine.kvd.leases import NO_ROW, Lease
from prefill_engine.kvd.pool_state import PoolState
from prefill_engine.kvd.sessions import Session
from prefill_engine.kvd.snapshot_pulls import SnapshotPulls
from prefill_engine.kvd.store_link import StoreLink
from prefill_engine.kvd.write_back import SlotWrite, WriteBack
from prefill_plan.block_keys import BlockKey

_MOST_NAMED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotKey:
    """A record that a rank says stands in a slot of its reservation. key: of a block (32 bytes) or a snapshot (33)."""

    slot: int
    key: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitResult:
    """stored_blocks: leading ones that are in the store now. failure: why not all; ""."""

    stored_blocks: int
    held_snapshots: int
    failure: str


class Commits:
    """new_id: as Opens. run: starts a task that the Keeper ends with itself."""

    def __init__(
        self,
        state: PoolState,
        *,
        write_back: WriteBack,
        pulls: SnapshotPulls,
        store: StoreLink,
        directory: Directory,
        metrics: KvdMetrics,
        threads: Executor,
        new_id: Callable[[], int],
        run: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._state = state
        self._write_back = write_back
        self._pulls = pulls
        self._store = store
        self._directory = directory
        self._metrics = metrics
        self._threads = threads
        self._new_id = new_id
        self._run = run

    def reserve(
        self, session: Session, *, num_blocks: int, num_snapshots: int, tenant: str, call_id: int
    ) -> Lease | None:
        """Slots for a rank to write into, maybe fewer than asked for; None = none. Raises CapacityError: see record_lease."""
        state = self._state
        if call_id in session.abandoned:
            return None
        slots = state.take_blocks(num_blocks, tenant=tenant)
        self._metrics.evicted_bytes.labels("block").inc(len(state.blocks.pop_evicted()) * state.geometry.record_bytes)
        snapshots = [slot for _ in range(num_snapshots) if (slot := self._pulls.take_slot(tenant=tenant)) is not None]
        if not slots and not snapshots:
            return None
        reservation = Lease(
            lease_id=self._new_id(),
            row=NO_ROW,
            owner_epoch=session.owner_epoch,
            echo_index=session.echo_index,
            tenant=tenant,
            slots=slots,
            snapshot_slots=snapshots,
            call_id=call_id,
        )
        state.leases.reserve(reservation)
        state.record_lease(reservation)
        return reservation

    async def commit(self, reservation: Lease, blocks: Sequence[SlotKey], snapshots: Sequence[SlotKey]) -> CommitResult:
        """Blocks in chain order. Must not be cancelled half-way: see Keeper.commit."""
        self._take_out(reservation, blocks, snapshots)
        loop = asyncio.get_running_loop()
        bad_blocks, bad_snapshots = await loop.run_in_executor(self._threads, self._verify, blocks, snapshots)
        for failure in (*bad_blocks.values(), *bad_snapshots.values()):
            self._metrics.verify_fail.labels(failure).inc()
        held = self._hold_snapshots(snapshots, bad_snapshots)
        good = self._hold_blocks(blocks, bad_blocks)
        num_good = next((index for index in range(len(blocks)) if index in bad_blocks), len(blocks))
        failure = f"block {num_good} failed verification: {bad_blocks[num_good]}" if num_good < len(blocks) else ""
        stored, store_failure = await self._store_blocks(good, tenant=reservation.tenant)
        if store_failure:
            return CommitResult(stored_blocks=min(stored, num_good), held_snapshots=held, failure=store_failure)
        return CommitResult(stored_blocks=num_good, held_snapshots=held, failure=failure)

    def _take_out(self, reservation: Lease, blocks: Sequence[SlotKey], snapshots: Sequence[SlotKey]) -> None:
        """From here on the slots are ours alone.

        Raises:
            ValueError: a slot that is not of this reservation, or named twice; nothing has changed.
        """
        own, own_snapshots = set(reservation.slots), set(reservation.snapshot_slots)
        used, used_snapshots = {one.slot for one in blocks}, {one.slot for one in snapshots}
        if not used <= own or not used_snapshots <= own_snapshots:
            foreign = sorted((used - own) | (used_snapshots - own_snapshots))
            raise ValueError(
                f"slots {foreign[:_MOST_NAMED]} ({len(foreign)} in all) are not of reservation {reservation.lease_id}; nothing "
                "was committed"
            )
        if len(used) != len(blocks) or len(used_snapshots) != len(snapshots):
            raise ValueError("a slot is named twice; nothing was committed")
        reservation.slots = [slot for slot in reservation.slots if slot not in used]
        reservation.snapshot_slots = [slot for slot in reservation.snapshot_slots if slot not in used_snapshots]
        if reservation.slots or reservation.snapshot_slots:
            self._state.record_less(reservation)
        else:
            self._state.end_lease(reservation)

    def _verify(self, blocks: Sequence[SlotKey], snapshots: Sequence[SlotKey]) -> tuple[dict[int, str], dict[int, str]]:
        """Indices of bad records and why; on a thread."""
        state = self._state
        bad_blocks, bad_snapshots = {}, {}
        for index, one in enumerate(blocks):
            failure = state.verify_block(one.slot, BlockKey(one.key))
            if failure is not None:
                bad_blocks[index] = str(failure)
        for index, one in enumerate(snapshots):
            failure = state.snapshot_codec.verify(state.memory.snapshot(one.slot), key=one.key)
            if failure is not None:
                bad_snapshots[index] = str(failure)
        return bad_blocks, bad_snapshots

    def _hold_snapshots(self, snapshots: Sequence[SlotKey], bad: dict[int, str]) -> int:
        """Good ones are findable at once, here and by peers."""
        pool, keys = self._state.snapshots, []
        for index, one in enumerate(snapshots):
            if index in bad:
                pool.fail(one.slot)
            else:
                self._state.finish_snapshot(one.slot, one.key)
                keys.append(one.key)
            pool.unpin(one.slot)
        if keys:
            self._run(self._directory.publish_snapshots(keys))
        return len(keys)

    def _hold_blocks(self, blocks: Sequence[SlotKey], bad: dict[int, str]) -> list[SlotWrite]:
        """Good ones before the first bad one become VALID; a good one after it is of no use to a chain, but right. The pin
        of the reservation goes on to the write."""
        good = []
        for index, one in enumerate(blocks):
            if index in bad:
                self._state.blocks.fail(one.slot)
                self._state.blocks.unpin(one.slot)
            else:
                self._state.finish_block(one.slot, BlockKey(one.key), stored=False)
                good.append(SlotWrite(slot=one.slot, key=BlockKey(one.key)))
        return good

    async def _store_blocks(self, writes: Sequence[SlotWrite], *, tenant: str) -> tuple[int, str]:
        """Leading blocks that are in the store, and why not all."""
        state = self._state
        if not self._store.is_configured or not writes:
            for one in writes:
                state.blocks.unpin(one.slot)
            return len(writes), ""
        known = await self._directory.lookup_blocks(self._store.store_id, state.layout_id, [one.key for one in writes])
        for one in writes[: len(known)]:
            state.stored[one.slot] = 1
            state.blocks.unpin(one.slot)
        rest = writes[len(known) :]
        stored, failure = len(known), ""
        for part in self._write_back.put(rest, tenant=tenant):
            why = await part.done
            failure = failure or why
            if not failure:
                stored += len(part.writes)
        return stored, failure
