"""Slots in the order of their last use, one list per tenant: 17 bytes a slot, every operation in constant time.

Used by SlotPool only.
"""

from array import array

_NONE = -1


class SlotOrder:
    """Doubly linked lists in arrays. A slot is in at most one list: of the tenant it was last touched for."""

    def __init__(self, num_slots: int) -> None:
        self._before = array("i", [_NONE]) * num_slots
        self._after = array("i", [_NONE]) * num_slots
        self._used_at = array("Q", [0]) * num_slots
        self._ends: dict[int, list[int]] = {}  # tenant -> [oldest, newest]
        self._is_listed = bytearray(num_slots)
        self._clock = 0

    def touch(self, tenant: int, slot: int) -> None:
        """`slot` is now the newest of its tenant's; a slot keeps its tenant as long as it is listed."""
        if self._is_listed[slot]:
            self.discard(tenant, slot)
        self._is_listed[slot] = 1
        self._clock += 1
        self._used_at[slot] = self._clock
        self._after[slot] = _NONE
        ends = self._ends.get(tenant)
        if ends is None:
            self._before[slot] = _NONE
            self._ends[tenant] = [slot, slot]
            return
        self._before[slot] = ends[1]
        self._after[ends[1]] = slot
        ends[1] = slot

    def discard(self, tenant: int, slot: int) -> None:
        """Takes it out of the list, if it is in one."""
        if not self._is_listed[slot]:
            return
        self._is_listed[slot] = 0
        ends = self._ends[tenant]
        before, after = self._before[slot], self._after[slot]
        if before == _NONE and after == _NONE:
            del self._ends[tenant]
            return
        if before == _NONE:
            ends[0] = after
        else:
            self._after[before] = after
        if after == _NONE:
            ends[1] = before
        else:
            self._before[after] = before

    def oldest(self) -> list[tuple[int, int, int]]:
        """(time of last use, tenant, slot) of the oldest slot of each tenant."""
        return [(self._used_at[ends[0]], tenant, ends[0]) for tenant, ends in self._ends.items()]
