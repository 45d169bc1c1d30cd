"""Rows of the pool's lease table: how far a swap-in is, told without any RPC (kv.md 7.2).

kvd writes them, ranks read them. The trap: words are single native loads and stores of 4 or 8 bytes; struct.pack_into would
write them byte by byte, and a reader would see halves.
"""

from enum import IntEnum

LEASE_BYTES = 64
MAX_GROUPS = 4


class LeaseState(IntEnum):
    FREE = 0
    LIVE = 1
    GRACE = 2
    """The owner's session broke; slots stay as they are until it comes back or the grace is over."""
    LOST = 3
    """kvd does not know the lease any more: its slots may hold anything."""


class SnapshotState(IntEnum):
    NONE = 0
    PULLING = 1
    READY = 2
    FAILED = 3


class LeaseRecord:
    """One row of the lease table. A reader compares lease_id before and after it reads.

    num_blocks: leased blocks, not counting the rank's resident ones. limit_blocks: blocks that can still become ready; falls
    when a read fails. ready(g): leading leased blocks whose group g is verified. progress_ns: CLOCK_MONOTONIC of the last
    change. error: number of reads that failed.
    """

    __slots__ = ("_longs", "_words")

    def __init__(self, row: memoryview) -> None:
        """row: LEASE_BYTES long, aligned to 8."""
        self._longs, self._words = row.cast("Q"), row.cast("I")

    @property
    def lease_id(self) -> int:
        return int(self._longs[0])

    @lease_id.setter
    def lease_id(self, value: int) -> None:
        self._longs[0] = value

    @property
    def owner_epoch(self) -> int:
        return int(self._longs[1])

    @owner_epoch.setter
    def owner_epoch(self, value: int) -> None:
        self._longs[1] = value

    @property
    def state(self) -> LeaseState:
        return LeaseState(self._words[4])

    @state.setter
    def state(self, value: LeaseState) -> None:
        self._words[4] = value

    @property
    def num_blocks(self) -> int:
        return int(self._words[5])

    @num_blocks.setter
    def num_blocks(self, value: int) -> None:
        self._words[5] = value

    @property
    def limit_blocks(self) -> int:
        return int(self._words[6])

    @limit_blocks.setter
    def limit_blocks(self, value: int) -> None:
        self._words[6] = value

    @property
    def snapshot_state(self) -> SnapshotState:
        return SnapshotState(self._words[7])

    @snapshot_state.setter
    def snapshot_state(self, value: SnapshotState) -> None:
        self._words[7] = value

    @property
    def ready(self) -> tuple[int, ...]:
        """Of all MAX_GROUPS groups; those the geometry lacks stay 0."""
        return tuple(self._words[8 : 8 + MAX_GROUPS])

    def set_ready(self, group: int, num_blocks: int) -> None:
        self._words[8 + group] = num_blocks

    @property
    def snapshot_slot(self) -> int:
        return int(self._words[12])

    @snapshot_slot.setter
    def snapshot_slot(self, value: int) -> None:
        self._words[12] = value

    @property
    def error(self) -> int:
        return int(self._words[13])

    @error.setter
    def error(self, value: int) -> None:
        self._words[13] = value

    @property
    def progress_ns(self) -> int:
        return int(self._longs[7])

    @progress_ns.setter
    def progress_ns(self, value: int) -> None:
        self._longs[7] = value

    def clear(self) -> None:
        """An empty row; lease_id first, so that a reader who still sees the id saw a whole row."""
        for index in range(LEASE_BYTES // 8):
            self._longs[index] = 0
