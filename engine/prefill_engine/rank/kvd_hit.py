"""What an answer of kvd to a look-up holds for an attempt. Called by KvdSource on its link thread.

The trap: numbers in an answer become addresses, so impossible ones make it an answer that holds nothing.
"""

from dataclasses import dataclass

from prefill_engine.kv.pool_memory import NUM_LEASES
from prefill_engine.rank.block_source import LookUp, SnapshotOutlook
from prefill_engine.rank.kvd_client import Link
from prefill_engine.rpc import kv_pb2

_OUTLOOKS = {
    kv_pb2.OpenResponse.HELD: SnapshotOutlook.HELD,
    kv_pb2.OpenResponse.PULLING: SnapshotOutlook.PULLING,
}


@dataclass(slots=True, kw_only=True)
class Hit:
    """What kvd holds for an attempt. slots: of blocks [resident, found)."""

    link: Link
    lease_id: int
    row: int
    resident: int
    slots: tuple[int, ...]
    outlook: SnapshotOutlook
    is_loading: bool = False

    @property
    def found(self) -> int:
        return self.resident + len(self.slots)


def read_answer(answer: kv_pb2.OpenResponse, request: LookUp, link: Link) -> Hit | None:
    """The lease an answer speaks of; None: it holds nothing, or numbers are impossible."""
    slots = tuple(answer.slots)
    outlook = _OUTLOOKS.get(answer.snapshot, SnapshotOutlook.NONE)
    is_possible = (
        answer.lease_id != 0
        and answer.lease_row < NUM_LEASES
        and len(slots) == answer.found_blocks - request.resident_blocks
        and answer.found_blocks <= len(request.keys)
        and all(slot < link.pool.num_blocks for slot in slots)
    )
    if not is_possible:
        return None
    return Hit(
        link=link,
        lease_id=answer.lease_id,
        row=answer.lease_row,
        resident=request.resident_blocks,
        slots=slots,
        outlook=outlook,
    )


def mode_of(found: int, outlook: SnapshotOutlook) -> str:
    """exact, pulling, replay or miss: label of pe_kv_open_total."""
    if found == 0:
        return "miss"
    return {SnapshotOutlook.HELD: "exact", SnapshotOutlook.PULLING: "pulling"}.get(outlook, "replay")
