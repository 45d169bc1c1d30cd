"""The pool as it is laid out for one model: memory, slots, leases, what is known of each slot. Lives on kvd's event loop.

Made by the Keeper when a geometry is known; everything that acts on slots (reads, pulls, write-back) gets this one object. The
trap: `memory` is shared with ranks, all the rest is kvd's own.
"""

from collections.abc import Callable
from contextlib import suppress

from prefill_engine.kv.pool_memory import PoolGeometry, PoolMemory
from prefill_engine.kv.record import KEY_BYTES, LAYOUT_ID_BYTES, RecordCodec, VerifyFailure, decode_info
from prefill_engine.kv.snapshot_record import SnapshotCodec
from prefill_engine.kvd.lease_journal import JournalEntry, LeaseJournal
from prefill_engine.kvd.leases import Lease, Leases
from prefill_engine.kvd.slot_pool import SlotPool, SlotState
from prefill_plan.block_keys import BlockKey
from prefill_plan.errors import CapacityError

_KEY_OFFSET = 24  # of `key` in kv.record.HEADER_FIELDS


class PoolState:
    """tenant_share: as KvdConfig's. stored: per slot, 1 = its block is in the store. replayed: per slot, 1 = provenance 1."""

    def __init__(
        self,
        memory: PoolMemory,
        journal: LeaseJournal,
        *,
        tenant_share: float,
        on_group_ready: Callable[[int, float], None],
    ) -> None:
        geometry = memory.geometry
        assert geometry is not None
        self.memory = memory
        self.geometry: PoolGeometry = geometry
        self.layout_id = geometry.layout_digest[:LAYOUT_ID_BYTES]
        self.num_groups = len(geometry.group_bytes)
        self.codec = RecordCodec.of_geometry(geometry)
        self.snapshot_codec = SnapshotCodec(geometry.layout_digest, geometry.snapshot_payload_bytes)
        self.blocks = SlotPool(memory.num_blocks, share=tenant_share)
        self.snapshots = SlotPool(memory.num_snapshots, share=tenant_share)
        self.leases = Leases(memory, num_groups=self.num_groups, on_group_ready=on_group_ready)
        self.journal = journal
        self.stored = bytearray(memory.num_blocks)
        self.replayed = bytearray(memory.num_blocks)

    @property
    def is_idle(self) -> bool:
        """Nothing is leased, reserved, read, written or quarantined."""
        return not len(self.leases) and self.blocks.is_idle and self.snapshots.is_idle

    def take_blocks(self, num: int, *, tenant: str) -> list[int]:
        slots = self.blocks.take(num, tenant=tenant)
        for slot in slots:
            self.stored[slot] = self.replayed[slot] = 0
        return slots

    def finish_block(self, slot: int, key: BlockKey, *, stored: bool) -> bool:
        """The slot's record is verified; False = another slot was first."""
        self.stored[slot] = stored
        self.replayed[slot] = decode_info(self.memory.record(slot)).provenance
        return self.blocks.finish(slot, key)

    def finish_snapshot(self, slot: int, key: bytes) -> None:
        """The slot's snapshot is verified. The first one stays, unless it is of a replay and this one is exact; one that a
        restart left and nobody has verified yet stays if it says it is exact and this one is not."""
        pool, other = self.snapshots, self.snapshots.find(key)
        yields = False
        if other is not None and other != slot and pool.state(other) is SlotState.VALID:
            is_exact, is_other_exact = self.claims_exact(slot), self.claims_exact(other)
            yields = pool.is_suspect(other) and is_other_exact and not is_exact
            if not pool.is_suspect(other) and is_exact and not is_other_exact:
                pool.forget(other)
        pool.finish(slot, key, yields=yields)

    def provenance(self, slot: int) -> int:
        """Of a record whose header is verified."""
        return decode_info(self.memory.record(slot)).provenance

    def verify_block(self, slot: int, key: BlockKey) -> VerifyFailure | None:
        """Reads the whole record; any thread."""
        header, payload = self.codec.split(self.memory.record(slot))
        return self.codec.verify(header, payload, key=key)

    def claimed_key(self, slot: int) -> BlockKey | None:
        """The key of a record whose header is whole; any thread."""
        head = self.memory.record(slot)[: self.geometry.header_bytes]
        key = BlockKey(bytes(head[_KEY_OFFSET : _KEY_OFFSET + KEY_BYTES]))
        return None if isinstance(self.codec.read_header(head, key=key), VerifyFailure) else key

    def claims_exact(self, slot: int) -> bool:
        """Whether a snapshot whose header is whole says that it comes of no replay."""
        return self.snapshot_codec.decode_info(self.memory.snapshot(slot)).exact

    def record_lease(self, lease: Lease) -> None:
        """Writes down a new lease or reservation for the next life, or ends it.

        Raises:
            CapacityError: there is no room to write it down; it has been ended.
        """
        try:
            self.journal.put(_entry(lease))
        except OSError as error:
            self.end_lease(lease)
            raise CapacityError(
                f"lease journal beside {self.memory.path}: {error.strerror}; the lease was ended: make /dev/shm larger",
                reason="JOURNAL",
            ) from error

    def record_less(self, lease: Lease) -> None:
        """Writes down that a lease holds fewer slots. Not written: the next life holds more for a while."""
        with suppress(OSError):
            self.journal.put(_entry(lease))

    def end_lease(self, lease: Lease, *, lost: bool = False) -> None:
        """Closes a lease or reservation and gives its slots back."""
        slots, snapshots = self.leases.close(lease, lost=lost)
        self.journal.remove(lease.lease_id)
        self.blocks.unpin_all(slots)
        self.snapshots.unpin_all(snapshots)


def _entry(lease: Lease) -> JournalEntry:
    return JournalEntry(
        lease_id=lease.lease_id,
        owner_epoch=lease.owner_epoch,
        row=lease.row,
        echo_index=lease.echo_index,
        slots=tuple(lease.slots),
        snapshot_slots=tuple(lease.snapshot_slots),
    )
