"""What the directory knows, as plain data: holders, their snapshots, and the segments of each store. Pure; time is an argument.

Used by DirectoryService and LocalDirectory on one loop. All of it is soft: holders are forgotten when they fall silent, the least
recently used entries when memory is full, and everything is announced again after `resync`. The trap: messages of an older
incarnation of a holder arrive late and must change nothing, since a newer one may serve other bytes at the same address.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from prefill_engine.kv.directory import Holder, SnapshotLocation
from prefill_engine.kv.segments import BlockLocation, SegmentInfo
from prefill_engine.kvd.directory_segments import SegmentTable
from prefill_plan.block_keys import BlockKey


class Standing(Enum):
    """How a message of a holder's incarnation is taken."""

    CURRENT = "current"
    UNKNOWN = "unknown"
    """Never joined, expired, or newer than what joined: it must join and announce everything."""
    FENCED = "fenced"
    """A newer incarnation has joined."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryLimits:
    """max_snapshots: (key, holder) pairs; a holder of the released model has about 750 per GiB. max_blocks: keys of segments."""

    expiry_seconds: float = 10.0
    max_holders: int = 4096
    max_snapshots: int = 1 << 20
    max_blocks: int = 1 << 21


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryCounts:
    holders: int
    snapshots: int
    segments: int
    blocks: int
    fenced: int
    expired: int
    dropped_snapshots: int
    dropped_segments: int


@dataclass(slots=True, eq=False)
class _HolderRow:
    """forgotten: at most this many that the holder counts were removed here: dropped for room, withdrawn by it or by a peer
    since its last heartbeat. answered: times it was named first, to spread load."""

    holder: Holder
    last_seen: float
    keys: set[bytes] = field(default_factory=set)
    forgotten: int = 0
    answered: int = 0


class DirectoryState:
    """Owner of every table. Each call is one message; none fails for what a holder says."""

    def __init__(self, limits: DirectoryLimits) -> None:
        self._limits = limits
        self._holders: dict[str, _HolderRow] = {}
        # Least recently announced or asked for first.
        self._snapshots: OrderedDict[bytes, dict[str, _HolderRow]] = OrderedDict()
        self._num_snapshots = 0
        self._segments = SegmentTable(max_blocks=limits.max_blocks)
        self._fenced = self._expired = self._dropped_snapshots = 0

    def join(self, holder: Holder, *, now: float) -> Standing:
        """A holder's incarnation begins, with nothing announced; an older one's announcements are forgotten."""
        row = self._holders.get(holder.holder_id)
        if row is not None and holder.epoch < row.holder.epoch:
            self._fenced += 1
            return Standing.FENCED
        if row is not None:
            self._forget(row)
        while len(self._holders) >= self._limits.max_holders:
            self._forget(min(self._holders.values(), key=lambda other: other.last_seen))
        self._holders[holder.holder_id] = _HolderRow(holder, now)
        return Standing.CURRENT

    def heartbeat(self, holder_id: str, epoch: int, num_snapshots: int, *, now: float) -> Standing:
        """UNKNOWN also when the holder has announced more than is known here, beyond what was dropped on purpose."""
        standing, row = self._find(holder_id, epoch, now=now)
        if row is None:
            return standing
        row.last_seen = now
        gap = num_snapshots - len(row.keys)
        if gap > row.forgotten:
            return Standing.UNKNOWN
        row.forgotten = max(0, gap)
        return Standing.CURRENT

    def publish_snapshots(self, holder_id: str, epoch: int, keys: Sequence[bytes], *, now: float) -> Standing:
        standing, row = self._find(holder_id, epoch, now=now)
        if row is None:
            return standing
        row.last_seen = now
        for key in keys:
            holders = self._snapshots.setdefault(key, {})
            self._snapshots.move_to_end(key)
            if holder_id not in holders:
                holders[holder_id] = row
                row.keys.add(key)
                self._num_snapshots += 1
        while self._num_snapshots > self._limits.max_snapshots:
            self._drop_oldest_snapshot()
        return Standing.CURRENT

    def withdraw_snapshots(
        self, holder_id: str, epoch: int, keys: Sequence[bytes], *, everything: bool, now: float
    ) -> Standing:
        """From the holder, or from a peer whose pulls there failed."""
        standing, row = self._find(holder_id, epoch, now=now)
        if row is None:
            return standing
        for key in list(row.keys) if everything else keys:
            if key in row.keys:
                self._remove(row, key)
                row.forgotten += 1
        return Standing.CURRENT

    def lookup_snapshots(self, keys: Sequence[bytes], *, prefer_zone: str, now: float) -> tuple[SnapshotLocation, ...]:
        """Live holders of each key: those of the zone first, then those that were named least."""
        found = []
        for key in keys:
            holders = self._snapshots.get(key)
            if holders is None:
                continue
            self._snapshots.move_to_end(key)
            rows = [row for row in holders.values() if not self._is_silent(row, now)]
            rows.sort(key=lambda row: (row.holder.zone != prefer_zone, row.answered, row.holder.holder_id))
            if rows:
                rows[0].answered += 1
            found += [SnapshotLocation(key=key, holder=row.holder) for row in rows]
        return tuple(found)

    def publish_segments(self, store_id: str, segments: Sequence[SegmentInfo]) -> None:
        self._segments.publish(store_id, segments)

    def withdraw_segments(self, store_id: str, names: Sequence[str]) -> None:
        self._segments.withdraw(store_id, names)

    def lookup_blocks(self, store_id: str, layout_id: bytes, keys: Sequence[BlockKey]) -> tuple[BlockLocation, ...]:
        return self._segments.lookup(store_id, layout_id, keys)

    def sweep(self, *, now: float) -> tuple[Holder, ...]:
        """Forgets holders that have been silent for expiry_seconds; who they were."""
        silent = [row for row in self._holders.values() if self._is_silent(row, now)]
        for row in silent:
            self._forget(row)
        self._expired += len(silent)
        return tuple(row.holder for row in silent)

    def counts(self) -> DirectoryCounts:
        return DirectoryCounts(
            holders=len(self._holders),
            snapshots=self._num_snapshots,
            segments=self._segments.num_segments,
            blocks=self._segments.num_blocks,
            fenced=self._fenced,
            expired=self._expired,
            dropped_snapshots=self._dropped_snapshots,
            dropped_segments=self._segments.num_dropped,
        )

    def _find(self, holder_id: str, epoch: int, *, now: float) -> tuple[Standing, _HolderRow | None]:
        row = self._holders.get(holder_id)
        if row is None or epoch > row.holder.epoch or self._is_silent(row, now):
            return Standing.UNKNOWN, None
        if epoch < row.holder.epoch:
            self._fenced += 1
            return Standing.FENCED, None
        return Standing.CURRENT, row

    def _is_silent(self, row: _HolderRow, now: float) -> bool:
        return now - row.last_seen > self._limits.expiry_seconds

    def _remove(self, row: _HolderRow, key: bytes) -> None:
        row.keys.discard(key)
        holders = self._snapshots[key]
        del holders[row.holder.holder_id]
        if not holders:
            del self._snapshots[key]
        self._num_snapshots -= 1

    def _forget(self, row: _HolderRow) -> None:
        for key in list(row.keys):
            self._remove(row, key)
        del self._holders[row.holder.holder_id]

    def _drop_oldest_snapshot(self) -> None:
        key, holders = next(iter(self._snapshots.items()))
        for row in list(holders.values()):
            self._remove(row, key)
            row.forgotten += 1
            self._dropped_snapshots += 1
