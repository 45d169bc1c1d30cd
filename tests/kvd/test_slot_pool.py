"""SlotPool against an oracle that keeps, for every slot, the list of who holds it and what writes into it."""

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from prefill_engine.kvd.slot_pool import SlotPool, SlotState

NUM_SLOTS = 7
KEYS = st.sampled_from([bytes([letter]) * 32 for letter in range(9)])
TENANTS = st.sampled_from(["a", "b", "c"])


@dataclass
class Truth:
    """What a slot really is. content: key of the complete bytes in it. tenant: who took it last."""

    holders: int = 0
    writers: int = 0
    content: bytes | None = None
    tenant: str = ""


@dataclass
class Oracle:
    slots: dict[int, Truth] = field(default_factory=lambda: {slot: Truth() for slot in range(NUM_SLOTS)})

    def is_unused(self, slot: int) -> bool:
        return not self.slots[slot].holders and not self.slots[slot].writers


class SlotPoolMachine(RuleBasedStateMachine):
    """Leases hold slots; fills write into them; reservations are committed or given back."""

    reserved = Bundle("reserved")
    """Slots that a rank writes into."""
    filling = Bundle("filling")
    """(slot, key) that a read writes into; the reader's own hold is in `holds`."""
    late = Bundle("late")
    """Slots with a late pull."""
    holds = Bundle("holds")

    def __init__(self) -> None:
        super().__init__()
        self.pool = SlotPool(NUM_SLOTS, share=0.5)
        self.oracle = Oracle()

    def take(self, num: int, tenant: str) -> list[int]:
        room = self.pool.num_takeable
        unused = sum(self.oracle.is_unused(slot) for slot in self.oracle.slots)
        assert room == unused, "a slot is lost, or offered while in use"
        taken = self.pool.take(num, tenant=tenant)
        assert len(taken) == len(set(taken)) == min(num, room)
        for slot in taken:
            truth = self.oracle.slots[slot]
            assert self.oracle.is_unused(slot), f"slot {slot} has two owners"
            truth.holders, truth.content, truth.tenant = 1, None, tenant
        return taken

    @rule(target=reserved, num=st.integers(1, 3), tenant=TENANTS)
    def reserve(self, num: int, tenant: str) -> object:
        return multiple(*self.take(num, tenant))

    @rule(target=filling, key=KEYS, tenant=TENANTS)
    def start_read(self, key: bytes, tenant: str) -> object:
        if self.pool.find(key) is not None:
            return multiple()
        taken = self.take(1, tenant)
        for slot in taken:
            self.pool.start_fill(slot, key)
            self.oracle.slots[slot].writers += 1
        return multiple(*((slot, key) for slot in taken))

    @rule(target=holds, key=KEYS)
    def join(self, key: bytes) -> object:
        slot = self.pool.find(key)
        if slot is None:
            return multiple()
        if self.pool.state(slot) is SlotState.VALID:
            assert self.oracle.slots[slot].content == key, "other bytes than those of the key are served"
        else:
            assert self.oracle.slots[slot].writers > 0
        self.pool.pin(slot)
        self.oracle.slots[slot].holders += 1
        return slot

    @rule(target=holds, fill=consumes(filling))
    def read_done(self, fill: tuple[int, bytes]) -> int:
        slot, key = fill
        self.oracle.slots[slot].writers -= 1
        self.oracle.slots[slot].content = key
        self.pool.finish(slot, key)
        return slot

    @rule(target=holds, fill=consumes(filling))
    def read_failed(self, fill: tuple[int, bytes]) -> int:
        self.oracle.slots[fill[0]].writers -= 1
        self.pool.fail(fill[0])
        return fill[0]

    @rule(target=late, fill=consumes(filling))
    def pull_late(self, fill: tuple[int, bytes]) -> int:
        slot = fill[0]
        self.pool.quarantine(slot)
        self.oracle.slots[slot].holders -= 1
        self.pool.unpin(slot)
        assert self.pool.state(slot) is SlotState.QUARANTINED
        return slot

    @rule(slot=consumes(late))
    def pull_settled(self, slot: int) -> None:
        self.oracle.slots[slot].writers -= 1
        self.pool.settle(slot)

    @rule(target=holds, slot=consumes(reserved), key=KEYS)
    def commit(self, slot: int, key: bytes) -> int:
        self.oracle.slots[slot].content = key
        other = self.pool.find(key)
        had_valid = other is not None and self.pool.state(other) is SlotState.VALID
        assert self.pool.finish(slot, key) is not had_valid
        return slot

    @rule(key=KEYS)
    def better_one_came(self, key: bytes) -> None:
        slot = self.pool.find(key)
        if slot is not None and self.pool.state(slot) is SlotState.VALID:
            self.pool.forget(slot)
            assert self.pool.find(key) is None

    @rule(slot=consumes(reserved))
    def give_back(self, slot: int) -> None:
        self.oracle.slots[slot].holders -= 1
        self.pool.unpin(slot)

    @rule(slot=consumes(holds))
    def close(self, slot: int) -> None:
        self.oracle.slots[slot].holders -= 1
        self.pool.unpin(slot)

    @invariant()
    def used_slots_are_not_free(self) -> None:
        for slot, truth in self.oracle.slots.items():
            if truth.holders or truth.writers:
                assert self.pool.state(slot) is not SlotState.FREE

    @invariant()
    def counts_are_those_of_the_slots(self) -> None:
        states = Counter(self.pool.state(slot) for slot in range(NUM_SLOTS))
        assert {state: states.get(state, 0) for state in SlotState} == self.pool.counts()

    @invariant()
    def names_are_those_of_tenants_with_slots(self) -> None:
        used = [truth for slot, truth in self.oracle.slots.items() if self.pool.state(slot) is not SlotState.FREE]
        assert self.pool.num_tenants == len({truth.tenant for truth in used})

    @invariant()
    def each_key_has_one_slot(self) -> None:
        keys = [self.pool.key(slot) for slot in range(NUM_SLOTS)]
        for slot, key in enumerate(keys):
            if key is not None:
                assert self.pool.find(key) == slot
                assert keys.count(key) == 1

    def teardown(self) -> None:
        """After every fill ended and every lease is closed, all slots can be had again."""
        for slot, truth in self.oracle.slots.items():
            while truth.writers:
                truth.writers -= 1
                if self.pool.state(slot) is SlotState.QUARANTINED:
                    self.pool.settle(slot)
                else:
                    self.pool.fail(slot)
            while truth.holders:
                truth.holders -= 1
                self.pool.unpin(slot)
        assert self.pool.is_idle
        assert sorted(self.pool.take(NUM_SLOTS)) == list(range(NUM_SLOTS))


TestSlotPoolMachine = SlotPoolMachine.TestCase
TestSlotPoolMachine.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def fill(pool: SlotPool, keys: list[bytes], tenant: str = "") -> list[int]:
    """VALID, unheld slots for the keys, oldest first."""
    slots = []
    for key in keys:
        [slot] = pool.take(1, tenant=tenant)
        pool.finish(slot, key)
        pool.unpin(slot)
        slots.append(slot)
    return slots


def keys_named(text: str) -> list[bytes]:
    return [letter.encode() * 32 for letter in text]


def test_least_recently_used_goes_first() -> None:
    pool = SlotPool(3)
    a, b, _ = fill(pool, keys_named("abc"))
    pool.pin(a)
    pool.unpin(a)
    assert pool.take(1) == [b]
    assert pool.pop_evicted() == keys_named("b")
    assert pool.pop_evicted() == []


def test_pinned_slots_stay() -> None:
    pool = SlotPool(2)
    a, b = fill(pool, keys_named("ab"))
    pool.pin(a)
    assert pool.take(5) == [b]
    assert pool.take(1) == []
    assert pool.find(keys_named("a")[0]) == a


@pytest.mark.parametrize(
    ("others", "victim"), [("", "a"), ("xyz", "x")], ids=["within-shares-the-oldest", "above-its-share-first"]
)
def test_tenant_above_its_share_loses_first(others: str, victim: str) -> None:
    """share 0.5 of 5 slots = 2: tenant "big" with 3 slots loses its own oldest, although "small" has older ones."""
    pool = SlotPool(2 + len(others), share=0.5)
    fill(pool, keys_named("ab"), tenant="small")
    fill(pool, keys_named(others), tenant="big")
    pool.take(1, tenant="big" if others else "small")
    assert pool.pop_evicted() == keys_named(victim)


def test_tenants_without_slots_are_forgotten_and_their_places_given_to_others() -> None:
    """share 0.5 of 4 slots = 2. A hundred names pass; then the shares of those that are there still hold."""
    pool = SlotPool(4, share=0.5)
    for number in range(100):
        fill(pool, [bytes([number]) * 32], tenant=f"once-{number}")
        assert pool.num_tenants <= 4
    fill(pool, keys_named("w"), tenant="small")
    fill(pool, keys_named("xyz"), tenant="big")
    assert pool.num_tenants == 2
    pool.pop_evicted()
    pool.take(1, tenant="new")
    assert pool.pop_evicted() == keys_named("x")


def test_more_tenants_than_there_are_places_for_share_the_last_one() -> None:
    pool = SlotPool(65_540, share=0.5)
    slots = [pool.take(1, tenant=f"{number}")[0] for number in range(65_540)]
    assert pool.num_tenants == 65_535
    pool.unpin_all(slots)
    assert (pool.num_tenants, pool.is_idle) == (0, True)
    assert len(pool.take(65_540, tenant="a")) == 65_540
    assert pool.num_tenants == 1


def test_restarted_pool_offers_nothing_before_it_looked() -> None:
    pool = SlotPool(3)
    pool.quarantine_all()
    assert pool.take(1) == []
    assert pool.counts()[SlotState.QUARANTINED] == 3

    [a] = keys_named("a")
    pool.recover(0, a)
    pool.recover(1, None)
    pool.recover(2, a)

    assert pool.find(a) == 0
    assert pool.is_suspect(0)
    assert pool.is_idle
    assert sorted(pool.take(3)) == [0, 1, 2]
    assert pool.pop_evicted() == [a]


def test_suspect_slot_is_filled_before_it_is_served() -> None:
    pool = SlotPool(2)
    pool.quarantine_all()
    good, bad = keys_named("gb")
    pool.recover(0, good)
    pool.recover(1, bad)
    for slot, key in enumerate((good, bad)):
        pool.pin(slot)
        pool.start_fill(slot, key)
    assert pool.state(0) is SlotState.FILLING
    pool.finish(0, good)
    pool.fail(1)
    assert (pool.find(good), pool.is_suspect(0), pool.find(bad)) == (0, False, None)
    pool.unpin(0)
    pool.unpin(1)
    assert pool.is_idle


def test_committed_block_replaces_a_suspect_one() -> None:
    pool = SlotPool(2)
    pool.quarantine_all()
    [a] = keys_named("a")
    pool.recover(0, a)
    pool.recover(1, None)
    [slot] = pool.take(1)
    assert pool.finish(slot, a)
    pool.unpin(slot)
    assert (pool.find(a), pool.is_suspect(slot), pool.is_idle) == (1, False, True)


def test_lease_of_a_former_life_keeps_its_slot_through_recovery() -> None:
    pool = SlotPool(1)
    pool.quarantine_all()
    pool.pin(0)
    pool.recover(0, None)
    assert pool.take(1) == []
    pool.unpin(0)
    assert pool.take(1) == [0]
