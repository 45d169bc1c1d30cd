"""After a restart of kvd: what its former life left in the pool (kv.md 7.5).

Used by the Keeper once, at start. Leases keep their slots until their ranks declare them or the grace is over. Block slots are
looked at in chunks on a thread: a whole header makes a slot findable, but it is verified before it is served. Snapshots are
verified at once, since peers may ask for them. The trap: a slot of a reservation may be written right now; its old record
counts for nothing.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from concurrent.futures import Executor

from prefill_engine.kv.pool_memory import NUM_LEASES
from prefill_engine.kvd.lease_journal import JournalEntry
from prefill_engine.kvd.leases import NO_ROW, Lease
from prefill_engine.kvd.pool_state import PoolState
from prefill_engine.kvd.sessions import Sessions
from prefill_engine.kvd.slot_pool import SlotPool, SlotState
from prefill_engine.kvd.snapshot_pulls import SnapshotPulls

logger = logging.getLogger(__name__)

_CHUNK = 256


def restore_leases(state: PoolState, sessions: Sessions) -> int:
    """Leases and reservations of the journal, in grace; call on a fresh state. Returns how many."""
    state.blocks.quarantine_all()
    state.snapshots.quarantine_all()
    rows: set[int] = set()
    for entry in state.journal.entries:
        if not _is_possible(state, entry, rows):
            state.journal.remove(entry.lease_id)
            continue
        rows.add(entry.row)
        lease = Lease(
            lease_id=entry.lease_id,
            row=entry.row,
            owner_epoch=entry.owner_epoch,
            echo_index=entry.echo_index,
            tenant="",
            slots=list(entry.slots),
            snapshot_slots=list(entry.snapshot_slots),
        )
        for pool, slots in ((state.blocks, entry.slots), (state.snapshots, entry.snapshot_slots)):
            for slot in slots:
                pool.pin(slot)
                # Two entries may name a slot: the end of the older reservation could not be written down.
                if lease.is_reservation and pool.state(slot) is SlotState.QUARANTINED:
                    pool.recover(slot, None)
        state.leases.readopt(lease)
        sessions.restore(owner_epoch=entry.owner_epoch, echo_index=entry.echo_index)
    state.leases.clear_rows()
    return len(state.leases)


async def recover_slots(state: PoolState, pulls: SnapshotPulls, threads: Executor) -> None:
    """Makes findable what is whole, frees the rest."""
    reserved = {slot for lease in state.leases if lease.is_reservation for slot in lease.slots}
    reserved_snapshots = {slot for lease in state.leases if lease.is_reservation for slot in lease.snapshot_slots}
    memory, codec = state.memory, state.snapshot_codec
    snapshots = state.snapshots

    def second_snapshot(slot: int, key: bytes) -> None:
        """Another one of the key is here already, maybe committed since the restart: the better of the two stays."""
        if not state.claims_exact(slot):
            snapshots.recover(slot, None)
            return
        snapshots.pin(slot)
        snapshots.recover(slot, None)
        pulls.check(slot, key)
        snapshots.unpin(slot)

    num_blocks = await _recover(state.blocks, state.claimed_key, reserved, threads)
    num_snapshots = await _recover(
        snapshots,
        lambda slot: codec.find_key(memory.snapshot(slot)),
        reserved_snapshots,
        threads,
        second=second_snapshot,
    )
    logger.info("pool recovered", extra={"blocks": num_blocks, "snapshots": num_snapshots})
    for slot in snapshots.slots_in((SlotState.VALID,)):
        key = snapshots.key(slot)
        if key is not None and snapshots.is_suspect(slot):
            await pulls.check(slot, key).wait()


async def _recover(
    pool: SlotPool,
    read_key: Callable[[int], bytes | None],
    reserved: set[int],
    threads: Executor,
    *,
    second: Callable[[int, bytes], None] | None = None,
) -> int:
    """Number of slots that hold something. second: recovers a slot whose key another slot has already; None: the other stays."""
    loop = asyncio.get_running_loop()

    def read_keys(slots: Iterable[int]) -> list[bytes | None]:
        return [read_key(slot) for slot in slots]

    num_found = 0
    for start in range(0, pool.num_slots, _CHUNK):
        chunk = [slot for slot in range(start, min(start + _CHUNK, pool.num_slots)) if slot not in reserved]
        keys = await loop.run_in_executor(threads, read_keys, chunk)
        for slot, key in zip(chunk, keys, strict=True):
            if second is not None and key is not None and pool.find(key) is not None:
                second(slot, key)
            else:
                pool.recover(slot, key)
            num_found += key is not None
    return num_found


def _is_possible(state: PoolState, entry: JournalEntry, rows: set[int]) -> bool:
    """Whether the entry fits this pool; a journal of another one is worth nothing."""
    return (
        all(slot < state.blocks.num_slots for slot in entry.slots)
        and all(slot < state.snapshots.num_slots for slot in entry.snapshot_slots)
        and (entry.row == NO_ROW or (0 <= entry.row < NUM_LEASES and entry.row not in rows))
    )
