from collections import OrderedDict

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from prefill_engine.swa_pool import SwaPool, SwaSnapshot


def snapshot(num_bytes: int, *, exact: bool = True, position: int = 128) -> SwaSnapshot:
    return SwaSnapshot(position=position, first_valid=0, exact=exact, data=bytes(num_bytes))


def test_state_slots_are_handed_out_once_until_released() -> None:
    pool = SwaPool(2, 0)
    first, second = pool.allocate_state(), pool.allocate_state()

    assert {first, second} == {0, 1}
    assert pool.allocate_state() is None
    assert pool.num_free_states == 0
    pool.release_state(1)
    assert pool.allocate_state() == 1


def test_releasing_a_free_state_slot_is_refused() -> None:
    pool = SwaPool(2, 0)

    with pytest.raises(ValueError, match="cannot release state slot 1: it is not in use"):
        pool.release_state(1)


def test_put_evicts_the_least_recently_used_snapshots() -> None:
    pool = SwaPool(1, 100)
    for key in (b"a", b"b", b"c"):
        pool.put(key, snapshot(30))
    pool.get(b"a")

    pool.put(b"d", snapshot(50))

    assert [pool.has(key) for key in (b"a", b"b", b"c", b"d")] == [True, False, False, True]
    assert pool.snapshot_bytes == 80
    assert pool.counters()["evicted"] == 2


def test_has_leaves_order_and_counters_alone() -> None:
    pool = SwaPool(1, 60)
    pool.put(b"a", snapshot(30))
    pool.put(b"b", snapshot(30))
    before = pool.counters()
    pool.has(b"a")
    pool.has(b"x")

    assert pool.counters() == before
    pool.put(b"c", snapshot(30))
    assert not pool.has(b"a")


def test_replacing_a_key_counts_its_bytes_once_and_moves_it_to_the_front() -> None:
    pool = SwaPool(1, 100)
    pool.put(b"a", snapshot(40))
    pool.put(b"b", snapshot(40))
    pool.put(b"a", snapshot(50, position=256))

    assert pool.snapshot_bytes == 90
    pool.put(b"c", snapshot(40))
    assert not pool.has(b"b")
    kept = pool.get(b"a")
    assert kept is not None
    assert kept.position == 256


def test_a_replayed_snapshot_does_not_replace_an_exact_one() -> None:
    pool = SwaPool(1, 100)
    pool.put(b"a", snapshot(40))
    pool.put(b"b", snapshot(40, exact=False))

    pool.put(b"a", snapshot(40, exact=False))
    pool.put(b"b", snapshot(40, exact=True))

    kept = [pool.get(b"a"), pool.get(b"b")]
    assert [each.exact for each in kept if each is not None] == [True, True]


def test_a_limit_of_zero_keeps_none() -> None:
    pool = SwaPool(1, 0)
    pool.put(b"a", snapshot(1))

    assert pool.get(b"a") is None
    assert pool.counters()["too_large"] == 1
    assert pool.counters()["misses"] == 1


def test_drop_all_forgets_snapshots_but_not_states() -> None:
    pool = SwaPool(2, 100)
    pool.allocate_state()
    pool.put(b"a", snapshot(40))

    pool.drop_all()

    assert not pool.has(b"a")
    assert pool.snapshot_bytes == 0
    assert pool.num_free_states == 1


@pytest.mark.parametrize(("num_state_slots", "limit"), [(0, 1), (1, -1)])
def test_impossible_sizes_are_refused(num_state_slots: int, limit: int) -> None:
    with pytest.raises(ValueError, match=f"num_state_slots {num_state_slots}, snapshot_bytes_limit {limit}"):
        SwaPool(num_state_slots, limit)


class SwaPoolMachine(RuleBasedStateMachine):
    """Against an OrderedDict (least recently used first) and a set."""

    LIMIT = 100

    def __init__(self) -> None:
        super().__init__()
        self.pool = SwaPool(3, self.LIMIT)
        self.model: OrderedDict[bytes, SwaSnapshot] = OrderedDict()
        self.states: set[int] = set()
        self.gets = 0

    @rule(key=st.sampled_from([b"a", b"b", b"c", b"d"]), num_bytes=st.integers(1, 120), exact=st.booleans())
    def put(self, key: bytes, num_bytes: int, exact: bool) -> None:
        new = snapshot(num_bytes, exact=exact)
        self.pool.put(key, new)
        if num_bytes > self.LIMIT:
            return
        old = self.model.get(key)
        if old is None or exact or not old.exact:
            self.model[key] = new
        self.model.move_to_end(key)
        while sum(len(each.data) for each in self.model.values()) > self.LIMIT:
            self.model.popitem(last=False)

    @rule(key=st.sampled_from([b"a", b"b", b"c", b"d"]))
    def look_up(self, key: bytes) -> None:
        self.gets += 1
        assert self.pool.get(key) is self.model.get(key)
        if key in self.model:
            self.model.move_to_end(key)

    @rule()
    def allocate(self) -> None:
        slot = self.pool.allocate_state()
        assert (slot is None) == (len(self.states) == 3)
        if slot is not None:
            assert slot not in self.states
            self.states.add(slot)

    @precondition(lambda self: self.states)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.states)))
        self.pool.release_state(slot)
        self.states.remove(slot)

    @rule()
    def drop_all(self) -> None:
        self.pool.drop_all()
        self.model.clear()

    @invariant()
    def agrees_with_the_model(self) -> None:
        assert all(self.pool.has(key) for key in self.model)
        assert self.pool.snapshot_bytes == sum(len(each.data) for each in self.model.values()) <= self.LIMIT
        assert self.pool.num_free_states == 3 - len(self.states)
        counts = self.pool.counters()
        assert counts["hits"] + counts["misses"] == self.gets


SwaPoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestSwaPoolMachine = SwaPoolMachine.TestCase
