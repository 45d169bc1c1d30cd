"""Who holds which block slot of the KV cache: reference counts, key -> slot, and what is given up first.

Owned by one rank's loop; no locks, no tensors. A slot is *unused* (content worthless), *pinned* (ref count > 0) or
*cached* (ref count 0, but its content is complete and has a key, so it can be pinned again until it is evicted). The
trap: a match pins nothing, so pin what you matched before you allocate.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from prefill_plan.block_keys import BlockKey


@dataclass(slots=True)
class _Block:
    """key: set once the content is complete and published. provenance: of a keyed block, as in its store record.
    is_stored: the store is known to have had it."""

    refs: int = 0
    key: BlockKey | None = None
    provenance: int = 0
    is_stored: bool = False


class BlockPool:
    """Slots 0 .. num_blocks - 1 of the KV cache.

    reserve_fraction of the slots, rounded down, is never handed out: room for what admission could not foresee (C47).
    """

    def __init__(self, num_blocks: int, *, reserve_fraction: float = 0.01) -> None:
        if num_blocks < 1 or not 0 <= reserve_fraction < 1:
            raise ValueError(f"num_blocks {num_blocks}, reserve_fraction {reserve_fraction}: expected >= 1, in [0, 1)")
        self.num_blocks = num_blocks
        self.reserve_blocks = int(num_blocks * reserve_fraction)
        self._blocks = [_Block() for _ in range(num_blocks)]
        self._unused = list(reversed(range(num_blocks)))
        # Cached slots, next to be evicted first.
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._slot_of: dict[BlockKey, int] = {}
        self._counts = {"allocated": 0, "evicted": 0, "matched": 0, "published": 0, "publish_lost": 0, "refused": 0}

    @property
    def num_free(self) -> int:
        """Blocks that allocate() would hand out now: unused + cached - reserve."""
        return max(0, len(self._unused) + len(self._cached) - self.reserve_blocks)

    @property
    def num_cached(self) -> int:
        """Unpinned blocks with a key."""
        return len(self._cached)

    def match(self, keys: Sequence[BlockKey]) -> tuple[int, ...]:
        """Slots of the leading keys that are resident, pinned or cached. Pins nothing and leaves the eviction order
        alone."""
        slots = []
        for key in keys:
            slot = self._slot_of.get(key)
            if slot is None:
                break
            slots.append(slot)
        self._counts["matched"] += len(slots)
        return tuple(slots)

    def pin(self, slots: Sequence[int]) -> None:
        """One more reference to each slot.

        Raises:
            ValueError: an unused slot (nothing is pinned then).
        """
        for slot in slots:
            block = self._blocks[slot]
            if block.refs == 0 and block.key is None:
                raise ValueError(f"cannot pin block slot {slot}: it is unused; nothing was pinned")
        for slot in slots:
            self._blocks[slot].refs += 1
            self._cached.pop(slot, None)

    def allocate(self, num_blocks: int) -> tuple[int, ...] | None:
        """Slots with one reference and unknown content, all or none (None: would go below the reserve).

        Unused slots first, then cached ones, least recently released first.
        """
        if num_blocks > self.num_free:
            self._counts["refused"] += 1
            return None
        slots = tuple(self._unused.pop() if self._unused else self._evict() for _ in range(num_blocks))
        for slot in slots:
            self._blocks[slot].refs = 1
            self._blocks[slot].is_stored = False
        self._counts["allocated"] += num_blocks
        return slots

    def publish(self, slot: int, key: BlockKey, *, provenance: int = 0) -> bool:
        """Declares the content of a pinned slot complete under `key`. The first writer of a key wins (kv.md 2.2).

        Returns:
            True: the slot has the key now (or had it). False: another slot has it; this one stays private to its
            holder.

        Raises:
            ValueError: the slot is not pinned, or has another key.
        """
        block = self._blocks[slot]
        if block.refs == 0:
            raise ValueError(f"cannot publish block slot {slot}: it is not pinned")
        if block.key is not None and block.key != key:
            raise ValueError(f"cannot publish block slot {slot}: it already has another key")
        if self._slot_of.setdefault(key, slot) != slot:
            self._counts["publish_lost"] += 1
            return False
        if block.key is None:
            block.key, block.provenance = key, provenance
            self._counts["published"] += 1
        return True

    def publish_loaded(self, slots: Sequence[int], keys: Sequence[BlockKey], provenances: Sequence[int]) -> None:
        """publish() for blocks that came from the store, all in one go: a hit has hundreds, and the step thread waits.

        Raises:
            ValueError: a slot is not pinned, or has another key.
        """
        for slot, key, provenance in zip(slots, keys, provenances, strict=True):
            block = self._blocks[slot]
            if block.refs == 0 or block.key is not None:
                self.publish(slot, key, provenance=provenance)
            elif self._slot_of.setdefault(key, slot) == slot:
                block.key, block.provenance, block.is_stored = key, provenance, True
                self._counts["published"] += 1
            else:
                block.is_stored = True
                self._counts["publish_lost"] += 1

    def release(self, slots: Sequence[int]) -> None:
        """One reference less to each slot, given in sequence order. At 0, keyed slots stay cached and others become
        unused.

        The end of the sequence is evicted before its start: without its start it could not be matched.

        Raises:
            ValueError: a slot without references (slots after it in the sequence are released by then).
        """
        for slot in reversed(slots):
            block = self._blocks[slot]
            if block.refs == 0:
                raise ValueError(f"cannot release block slot {slot}: it has no references")
            block.refs -= 1
            if block.refs == 0 and block.key is None:
                self._unused.append(slot)
            elif block.refs == 0:
                self._cached[slot] = None

    def provenance(self, slots: Sequence[int]) -> int:
        """1 if any of the slots descends from a replay (kv.md 2.2), else 0."""
        return max((self._blocks[slot].provenance for slot in slots), default=0)

    def mark_stored(self, slots: Sequence[int]) -> None:
        """Notes that the store has the content of these slots."""
        for slot in slots:
            self._blocks[slot].is_stored = True

    def unstored(self, slots: Sequence[int]) -> tuple[int, ...]:
        """Positions within `slots` whose content the store is not known to have (skipped, or a write failed)."""
        return tuple(index for index, slot in enumerate(slots) if not self._blocks[slot].is_stored)

    def counters(self) -> dict[str, int]:
        """Monotonic counts of blocks: allocated, evicted, matched, published, publish_lost; and of refused
        allocations."""
        return dict(self._counts)

    def check(self) -> None:
        """For tests and debugging.

        Raises:
            AssertionError: a slot is lost, is in two states, or the key table disagrees with the slots.
        """
        pinned = [slot for slot, block in enumerate(self._blocks) if block.refs > 0]
        states = [*pinned, *self._unused, *self._cached]
        assert sorted(states) == list(range(self.num_blocks)), f"slots lost or in two states: {sorted(states)}"
        keys = {block.key: slot for slot, block in enumerate(self._blocks) if block.key is not None}
        assert keys == self._slot_of, "key table and slots disagree"
        assert all(self._blocks[slot].key is None for slot in self._unused), "an unused slot has a key"
        assert all(self._blocks[slot].key is not None for slot in self._cached), "a cached slot has no key"

    def _evict(self) -> int:
        slot, _ = self._cached.popitem(last=False)
        block = self._blocks[slot]
        if block.key is not None:
            del self._slot_of[block.key]
        block.key, block.provenance = None, 0
        self._counts["evicted"] += 1
        return slot
