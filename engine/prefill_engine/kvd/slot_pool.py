"""Who may use a slot: states, pins, keys, eviction (kv.md 7.2, 7.6). Pure bookkeeping: no memory, no clock, no I/O.

Two of these in kvd, for blocks and for snapshots, both owned by the Keeper on its event loop. The trap (kv.md 8, bug 9): a
slot is free only when nobody holds it and nothing can still write into it, whatever state it is in.
"""

from array import array
from collections.abc import Sequence
from enum import IntEnum

from prefill_engine.kvd.open_plan import Source
from prefill_engine.kvd.slot_order import SlotOrder

_MOST_TENANTS = 1 << 16
_OTHERS = _MOST_TENANTS - 1
"""Tenant index of all beyond so many."""


class SlotState(IntEnum):
    FREE = 0
    FILLING = 1
    """Taken: being read or pulled into (findable if it has a key), or reserved for a rank."""
    VALID = 2
    """Complete and verified, or found after a restart (is_suspect)."""
    QUARANTINED = 3
    """Of no use; something may still write into it, or somebody still holds it."""


# Members of an enum cost more than a number, and these are compared for each of 781 blocks.
_FREE, _FILLING, _VALID, _QUARANTINED = (int(state) for state in SlotState)


class SlotPool:
    """Slots 0..num_slots-1. share: of the slots that one tenant keeps when others want room."""

    def __init__(self, num_slots: int, *, share: float = 1.0) -> None:
        self.num_slots = num_slots
        self._most_per_tenant = max(1, int(num_slots * share))
        self._states = bytearray(num_slots)
        self._pins = array("I", [0]) * num_slots
        self._writers = bytearray(num_slots)  # things in flight that may write into the slot
        self._suspect = bytearray(num_slots)
        self._keys: list[bytes | None] = [None] * num_slots
        self._index: dict[bytes, int] = {}
        self._free = array("i", range(num_slots - 1, -1, -1))
        self._counts = [num_slots, 0, 0, 0]
        self._num_evictable = 0  # VALID under a key, not pinned, nothing in flight
        self._order = SlotOrder(num_slots)  # those, and some that were since pinned: `_evict` skips them
        self._tenants: dict[str, int] = {}  # of those that hold slots, but for _OTHERS
        self._tenant_names: dict[int, str] = {}
        self._unused_tenants: list[int] = []
        self._tenant_of = array("H", [0]) * num_slots
        self._held: dict[int, int] = {}  # slots per tenant
        self._evicted: list[bytes] = []

    @property
    def num_takeable(self) -> int:
        """Slots that `take` could hand out now."""
        return len(self._free) + self._num_evictable

    @property
    def num_tenants(self) -> int:
        """Names that are remembered: of tenants that hold a slot, pinned or not."""
        return len(self._tenants)

    @property
    def is_idle(self) -> bool:
        """Nobody holds a slot and nothing is in flight."""
        return self.num_takeable == self.num_slots

    def counts(self) -> dict[SlotState, int]:
        return {state: self._counts[state] for state in SlotState}

    def state(self, slot: int) -> SlotState:
        return SlotState(self._states[slot])

    def key(self, slot: int) -> bytes | None:
        return self._keys[slot]

    def find(self, key: bytes) -> int | None:
        """The slot that holds or will hold `key`."""
        return self._index.get(key)

    def survey(self, keys: Sequence[bytes]) -> tuple[list[int], list[Source], list[bool]]:
        """For each key its slot (-1 = none), what is in it, and whether `take` may evict it.

        One call for a whole hit, as are pin_all and unpin_all: a step for each of 781 blocks counts.
        """
        states, pins, suspect = self._states, self._pins, self._suspect
        absent, join, pool = Source.ABSENT, Source.JOIN, Source.POOL
        find = self._index.get
        slots = [find(key, -1) for key in keys]
        sources, takeable = [pool] * len(slots), [False] * len(slots)
        for index, slot in enumerate(slots):
            if slot < 0:
                sources[index] = absent
            elif states[slot] == _FILLING:
                sources[index] = join
            else:
                takeable[index] = not pins[slot]
                if suspect[slot]:
                    sources[index] = Source.CHECK
        return slots, sources, takeable

    def is_suspect(self, slot: int) -> bool:
        """Found after a restart: must be verified (start_fill, then finish) before anybody reads it."""
        return bool(self._suspect[slot])

    def is_takeable(self, slot: int) -> bool:
        """Whether `take` may evict it."""
        return self._states[slot] == _VALID and not self._pins[slot] and not self._writers[slot]

    def take(self, num: int, *, tenant: str = "") -> list[int]:
        """At most `num` slots, FILLING and pinned once; evicts the least recently used ones, first of tenants above their
        share. Keys that went are told by `pop_evicted`."""
        taken: list[int] = []
        while len(taken) < num:
            if not self._free and not self._evict():
                break
            slot = self._free.pop()
            self._set_state(slot, SlotState.FILLING)
            self._pins[slot] = 1
            tenant_index = self._tenant_index(tenant)  # after `_evict`, which may forget this very tenant
            self._tenant_of[slot] = tenant_index
            self._held[tenant_index] = self._held.get(tenant_index, 0) + 1
            taken.append(slot)
        return taken

    def pop_evicted(self) -> list[bytes]:
        """Keys evicted since the last call."""
        evicted, self._evicted = self._evicted, []
        return evicted

    def pin(self, slot: int) -> None:
        """One more holder: of a VALID slot, or of a FILLING one that waits for it."""
        assert self._states[slot] != SlotState.FREE, slot
        if self.is_takeable(slot):
            self._num_evictable -= 1
        self._pins[slot] += 1

    def pin_all(self, slots: Sequence[int]) -> None:
        """`pin` of each."""
        states, pins, writers = self._states, self._pins, self._writers
        num_evictable = self._num_evictable
        for slot in slots:
            if not pins[slot] and states[slot] == _VALID and not writers[slot]:
                num_evictable -= 1
            pins[slot] += 1
        self._num_evictable = num_evictable

    def unpin_all(self, slots: Sequence[int]) -> None:
        """`unpin` of each."""
        pins = self._pins
        for slot in slots:
            assert pins[slot] > 0, slot
            pins[slot] -= 1
            if not pins[slot]:
                self._settle(slot)

    def unpin(self, slot: int) -> None:
        """One holder less; with the last one, a slot that is not VALID under a key becomes free."""
        assert self._pins[slot] > 0, slot
        self._pins[slot] -= 1
        self._settle(slot)

    def start_fill(self, slot: int, key: bytes) -> None:
        """Something starts to write `key` into a FILLING slot, or to verify a suspect one; others can join by `find`."""
        if self._states[slot] == SlotState.VALID:
            assert self._suspect[slot], slot
            if self.is_takeable(slot):
                self._num_evictable -= 1
            self._suspect[slot] = 0
            self._set_state(slot, SlotState.FILLING)
        assert self._states[slot] == SlotState.FILLING, slot
        self._writers[slot] += 1
        if self._index.setdefault(key, slot) == slot:
            self._keys[slot] = key

    def finish(self, slot: int, key: bytes, *, yields: bool = False) -> bool:
        """`key` stands complete and verified in the FILLING slot. The first valid one wins: False = another slot is VALID
        under it, and this one goes with its last holder. yields: it also gives way to one that is suspect."""
        assert self._states[slot] == SlotState.FILLING, slot
        self._writers[slot] = max(0, self._writers[slot] - 1)
        other = self._index.get(key)
        if other is not None and other != slot and self._suspect[other] and not yields:
            self.quarantine(other)
            self._settle(other)
            other = None
        is_first = other is None or other == slot or self._states[other] != SlotState.VALID
        if is_first:
            if other is not None and other != slot:
                self._keys[other] = None
            self._index[key] = slot
            self._keys[slot] = key
        self._set_state(slot, SlotState.VALID)
        self._settle(slot)
        return is_first

    def forget(self, slot: int) -> None:
        """A better record of its key is there: nobody finds this VALID slot any more, and it goes with its last holder."""
        if self.is_takeable(slot):
            self._num_evictable -= 1
        self._forget_key(slot)
        self._settle(slot)

    def fail(self, slot: int) -> None:
        """What was written into the FILLING slot is of no use, and nothing writes any more."""
        self._writers[slot] = max(0, self._writers[slot] - 1)
        self.quarantine(slot)
        self._settle(slot)

    def quarantine(self, slot: int) -> None:
        """The slot is of no use, and may still be written into until `settle`."""
        self._forget_key(slot)
        if self.is_takeable(slot):
            self._num_evictable -= 1
        self._suspect[slot] = 0
        self._set_state(slot, SlotState.QUARANTINED)

    def settle(self, slot: int) -> None:
        """Nothing of a quarantined fill writes into the slot any more."""
        assert self._writers[slot] > 0, slot
        self._writers[slot] -= 1
        self._settle(slot)

    def quarantine_all(self) -> None:
        """After a restart: nothing is known of any slot until `recover`. Only on a fresh pool."""
        assert len(self._free) == self.num_slots
        self._free = array("i")
        for slot in range(self.num_slots):
            self._states[slot] = SlotState.QUARANTINED
            self._writers[slot] = 1
        self._held[self._tenant_index("")] = self.num_slots
        self._counts = [0, 0, 0, self.num_slots]

    def recover(self, slot: int, key: bytes | None) -> None:
        """What a restarted kvd found in the slot: a record that claims `key`, or nothing it may use; None too for a slot of a
        reservation, which is FILLING again."""
        assert self._writers[slot] > 0, slot
        self._writers[slot] -= 1
        if key is not None and key not in self._index:
            self._index[key] = slot
            self._keys[slot] = key
            self._suspect[slot] = 1
            self._set_state(slot, SlotState.VALID)
        elif self._pins[slot]:
            self._set_state(slot, SlotState.FILLING)
        self._settle(slot)

    def slots_in(self, states: Sequence[SlotState]) -> list[int]:
        return [slot for slot, state in enumerate(self._states) if state in states]

    def _settle(self, slot: int) -> None:
        """Moves a slot that nobody holds and nothing writes to where it belongs."""
        if self._pins[slot] or self._writers[slot]:
            return
        if self._states[slot] == _VALID and self._keys[slot] is not None:
            self._num_evictable += 1
            self._order.touch(self._tenant_of[slot], slot)
        else:
            self._release(slot)

    def _evict(self) -> bool:
        while self._num_evictable:
            heads = self._order.oldest()
            above = [head for head in heads if self._held[head[1]] > self._most_per_tenant]
            _, tenant, slot = min(above or heads)
            self._order.discard(tenant, slot)
            if self.is_takeable(slot):
                key = self._keys[slot]
                assert key is not None
                self._evicted.append(key)
                self._num_evictable -= 1
                self._release(slot)
                return True
        return False

    def _release(self, slot: int) -> None:
        self._forget_key(slot)
        self._suspect[slot] = 0
        self._set_state(slot, SlotState.FREE)
        tenant = self._tenant_of[slot]
        self._order.discard(tenant, slot)
        self._held[tenant] -= 1
        if not self._held[tenant]:
            self._forget_tenant(tenant)
        self._free.append(slot)

    def _tenant_index(self, name: str) -> int:
        """Of a tenant that is about to hold a slot."""
        index = self._tenants.get(name)
        if index is not None:
            return index
        index = self._unused_tenants.pop() if self._unused_tenants else len(self._tenants)
        if index < _OTHERS:
            self._tenants[name] = index
            self._tenant_names[index] = name
        return index

    def _forget_tenant(self, index: int) -> None:
        """It holds no slot any more."""
        del self._held[index]
        name = self._tenant_names.pop(index, None)
        if name is not None:
            del self._tenants[name]
            self._unused_tenants.append(index)

    def _forget_key(self, slot: int) -> None:
        key = self._keys[slot]
        if key is not None:
            del self._index[key]
            self._keys[slot] = None

    def _set_state(self, slot: int, state: SlotState) -> None:
        self._counts[self._states[slot]] -= 1
        self._counts[state] += 1
        self._states[slot] = state
