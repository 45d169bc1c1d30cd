"""Slots for the per-sequence state (window rings, compressor state), and the SWA snapshots kept for later hits.

Owned by one rank's loop; no locks, no tensors. A snapshot is bytes in host memory, keyed by
prefill_plan.block_keys.snapshot_key. The trap: losing one is no error, it only means that the next hit at its position
replays (R4).
"""

from collections import OrderedDict
from dataclasses import dataclass

from prefill_engine.kv.store import Buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class SwaSnapshot:
    """Encoder window KV before token `position`, as KvCache.take_snapshot returns it.

    first_valid: rows of positions below it are absent. exact: False if they descend from a replay.
    """

    position: int
    first_valid: int
    exact: bool
    data: Buffer


class SwaPool:
    """State slots 0 .. num_state_slots - 1, and at most `snapshot_bytes_limit` bytes of snapshots (0 = none are
    kept)."""

    def __init__(self, num_state_slots: int, snapshot_bytes_limit: int) -> None:
        if num_state_slots < 1 or snapshot_bytes_limit < 0:
            raise ValueError(
                f"num_state_slots {num_state_slots}, snapshot_bytes_limit {snapshot_bytes_limit}: expected >= 1, >= 0"
            )
        self.num_state_slots = num_state_slots
        self.snapshot_bytes_limit = snapshot_bytes_limit
        self._free_states = list(reversed(range(num_state_slots)))
        self._used_states: set[int] = set()
        # Least recently used first.
        self._snapshots: OrderedDict[bytes, SwaSnapshot] = OrderedDict()
        self._snapshot_bytes = 0
        self._counts = {
            "hits": 0,
            "misses": 0,
            "stored": 0,
            "replaced": 0,
            "kept_exact": 0,
            "too_large": 0,
            "evicted": 0,
        }

    @property
    def num_free_states(self) -> int:
        return len(self._free_states)

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of snapshot data held now."""
        return self._snapshot_bytes

    def allocate_state(self) -> int | None:
        """A state slot whose tensors hold old values (KvCache.clear_state), or None: all are in use."""
        if not self._free_states:
            return None
        slot = self._free_states.pop()
        self._used_states.add(slot)
        return slot

    def release_state(self, slot: int) -> None:
        """Raises ValueError if the slot is not in use."""
        if slot not in self._used_states:
            raise ValueError(f"cannot release state slot {slot}: it is not in use")
        self._used_states.remove(slot)
        self._free_states.append(slot)

    def put(self, key: bytes, snapshot: SwaSnapshot) -> None:
        """Keeps a snapshot as the most recently used one and evicts the least recently used ones beyond the limit.

        It replaces one of the same key, unless that would put a replayed one in place of an exact one. One that is
        larger than the limit is not kept.
        """
        if len(snapshot.data) > self.snapshot_bytes_limit:
            self._counts["too_large"] += 1
            return
        old = self._snapshots.get(key)
        if old is not None and old.exact and not snapshot.exact:
            self._snapshots.move_to_end(key)
            self._counts["kept_exact"] += 1
            return
        if old is not None:
            self._drop(key)
            self._counts["replaced"] += 1
        self._snapshots[key] = snapshot
        self._snapshot_bytes += len(snapshot.data)
        self._counts["stored"] += 1
        while self._snapshot_bytes > self.snapshot_bytes_limit:
            self._drop(next(iter(self._snapshots)))
            self._counts["evicted"] += 1

    def get(self, key: bytes) -> SwaSnapshot | None:
        """The snapshot, now the most recently used one; None is a miss."""
        snapshot = self._snapshots.get(key)
        if snapshot is None:
            self._counts["misses"] += 1
            return None
        self._snapshots.move_to_end(key)
        self._counts["hits"] += 1
        return snapshot

    def has(self, key: bytes) -> bool:
        """Whether get() would find it; changes neither order nor counters."""
        return key in self._snapshots

    def drop_all(self) -> None:
        """Forgets every snapshot; state slots are not touched."""
        self._snapshots.clear()
        self._snapshot_bytes = 0

    def counters(self) -> dict[str, int]:
        """Monotonic counts: hits, misses, stored, replaced, kept_exact, too_large, evicted."""
        return dict(self._counts)

    def _drop(self, key: bytes) -> None:
        self._snapshot_bytes -= len(self._snapshots.pop(key).data)
