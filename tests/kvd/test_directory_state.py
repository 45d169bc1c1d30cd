"""The directory's tables: who is current, what a look-up names and in which order, bounded memory, and invariants under chaos."""

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from prefill_engine.kv.directory import Holder, SnapshotLocation
from prefill_engine.kv.segments import BlockLocation, SegmentInfo
from prefill_engine.kvd.directory_failures import PullFailures
from prefill_engine.kvd.directory_local import pullable
from prefill_engine.kvd.directory_state import DirectoryLimits, DirectoryState, Standing
from prefill_plan.block_keys import BlockKey

_LIMITS = DirectoryLimits(expiry_seconds=10.0, max_holders=3, max_snapshots=4, max_blocks=6)
_LAYOUT = b"layout-1"


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(32, "big"))


def holder(name: str, *, epoch: int = 1, zone: str = "") -> Holder:
    return Holder(holder_id=name, epoch=epoch, endpoint=f"{name}:{epoch}", zone=zone)


def state_with(*holders: Holder, limits: DirectoryLimits = _LIMITS) -> DirectoryState:
    state = DirectoryState(limits)
    for one in holders:
        assert state.join(one, now=0.0) is Standing.CURRENT
    return state


def names(found: tuple[SnapshotLocation, ...]) -> list[str]:
    return [one.holder.endpoint for one in found]


def look_up(state: DirectoryState, number: int, *, zone: str = "", now: float = 1.0) -> list[str]:
    return names(state.lookup_snapshots([key(number)], prefer_zone=zone, now=now))


def segment(name: str, *numbers: int, layout: bytes = _LAYOUT) -> SegmentInfo:
    return SegmentInfo(name=name, layout_id=layout, keys=tuple(key(number) for number in numbers), num_bytes=0)


def test_a_newer_incarnation_forgets_what_the_older_announced() -> None:
    state = state_with(holder("a"))
    state.publish_snapshots("a", 1, [key(1)], now=0.0)
    assert state.join(holder("a", epoch=2), now=1.0) is Standing.CURRENT
    assert look_up(state, 1) == []
    state.publish_snapshots("a", 2, [key(1)], now=1.0)
    assert look_up(state, 1) == ["a:2"]


@pytest.mark.parametrize("message", ["join", "heartbeat", "publish", "withdraw"])
def test_an_older_incarnation_changes_nothing(message: str) -> None:
    state = state_with(holder("a", epoch=2))
    state.publish_snapshots("a", 2, [key(1)], now=0.0)
    standing = {
        "join": lambda: state.join(holder("a", epoch=1), now=1.0),
        "heartbeat": lambda: state.heartbeat("a", 1, 0, now=1.0),
        "publish": lambda: state.publish_snapshots("a", 1, [key(2)], now=1.0),
        "withdraw": lambda: state.withdraw_snapshots("a", 1, [key(1)], everything=True, now=1.0),
    }[message]()
    assert standing is Standing.FENCED
    assert (look_up(state, 1), look_up(state, 2)) == (["a:2"], [])
    assert state.counts().fenced == 1


@pytest.mark.parametrize(
    ("epoch", "now"), [(1, 11.0), (2, 1.0)], ids=["it had expired", "it is newer than what joined here"]
)
def test_an_unknown_incarnation_is_asked_to_announce_again(epoch: int, now: float) -> None:
    state = state_with(holder("a"))
    assert state.heartbeat("a", epoch, 0, now=now) is Standing.UNKNOWN
    assert state.publish_snapshots("a", epoch, [key(1)], now=now) is Standing.UNKNOWN
    assert look_up(state, 1, now=now) == []


@pytest.mark.parametrize(
    ("published", "told", "expected"),
    [(2, 2, Standing.CURRENT), (2, 3, Standing.UNKNOWN), (3, 2, Standing.CURRENT)],
    ids=["equal", "an announcement was lost", "a withdrawal is under way"],
)
def test_heartbeat_compares_counts(published: int, told: int, expected: Standing) -> None:
    state = state_with(holder("a"))
    state.publish_snapshots("a", 1, [key(number) for number in range(published)], now=0.0)
    assert state.heartbeat("a", 1, told, now=1.0) is expected


def test_what_was_dropped_here_on_purpose_asks_for_no_resync() -> None:
    state = state_with(holder("a"), holder("b"))
    state.publish_snapshots("a", 1, [key(number) for number in range(6)], now=0.0)
    assert state.counts().snapshots == 4
    state.withdraw_snapshots("a", 1, [key(5)], everything=False, now=0.0)  # a peer's failed pulls
    assert [state.heartbeat("a", 1, 6, now=now) for now in (1.0, 2.0)] == [Standing.CURRENT] * 2
    assert state.heartbeat("a", 1, 7, now=3.0) is Standing.UNKNOWN


def test_a_silent_holder_is_not_named_and_then_forgotten() -> None:
    state = state_with(holder("a"), holder("b"))
    state.publish_snapshots("a", 1, [key(1)], now=0.0)
    state.publish_snapshots("b", 1, [key(1)], now=5.0)
    assert look_up(state, 1, now=10.5) == ["b:1"]
    assert [one.holder_id for one in state.sweep(now=10.5)] == ["a"]
    counts = state.counts()
    assert (counts.holders, counts.snapshots, counts.expired) == (1, 1, 1)


def test_lookup_prefers_the_zone_and_spreads_over_equals() -> None:
    state = state_with(holder("a", zone="x"), holder("b", zone="y"), holder("c", zone="y"))
    for name in "abc":
        state.publish_snapshots(name, 1, [key(1)], now=0.0)
    found = [look_up(state, 1, zone="y") for _ in range(4)]
    assert [one[2] for one in found] == ["a:1"] * 4
    assert Counter(one[0] for one in found) == {"b:1": 2, "c:1": 2}


def test_the_least_recently_asked_snapshot_goes_first() -> None:
    state = state_with(holder("a"))
    state.publish_snapshots("a", 1, [key(number) for number in range(4)], now=0.0)
    assert look_up(state, 0) == ["a:1"]
    state.publish_snapshots("a", 1, [key(9)], now=0.0)
    assert [number for number in (0, 1, 2, 3, 9) if look_up(state, number)] == [0, 2, 3, 9]


def test_too_many_holders_forget_the_longest_silent() -> None:
    state = state_with(holder("a"), holder("b"), holder("c"))
    state.heartbeat("a", 1, 0, now=1.0)
    state.join(holder("d"), now=2.0)
    assert state.heartbeat("b", 1, 0, now=2.0) is Standing.UNKNOWN
    assert state.heartbeat("a", 1, 0, now=2.0) is Standing.CURRENT


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ([1, 2, 3], [("s1", 0), ("s1", 1), ("s2", 0)]),
        ([2, 9, 3], [("s1", 1)]),
        ([9, 1], []),
        ([], []),
    ],
    ids=["over two segments", "stops at the first unknown", "first unknown", "nothing asked"],
)
def test_lookup_blocks_names_leading_keys(asked: list[int], expected: list[tuple[str, int]]) -> None:
    state = DirectoryState(_LIMITS)
    state.publish_segments("store", [segment("s1", 1, 2), segment("s2", 3)])
    found = state.lookup_blocks("store", _LAYOUT, [key(number) for number in asked])
    assert found == tuple(BlockLocation(segment=name, record=record) for name, record in expected)


def test_stores_and_layouts_do_not_see_each_other() -> None:
    state = DirectoryState(_LIMITS)
    state.publish_segments("store", [segment("s", 1)])
    state.publish_segments("other", [segment("s", 2)])
    state.publish_segments("store", [segment("t", 3, layout=b"layout-2")])
    assert state.lookup_blocks("other", _LAYOUT, [key(1)]) == ()
    assert state.lookup_blocks("store", b"layout-2", [key(1)]) == ()
    assert state.lookup_blocks("store", _LAYOUT, [key(3)]) == ()
    state.withdraw_segments("store", ["s"])
    assert state.lookup_blocks("other", _LAYOUT, [key(2)]) == (BlockLocation(segment="s", record=0),)


def test_a_key_in_two_segments_survives_the_withdrawal_of_either() -> None:
    for gone, left in (("s1", "s2"), ("s2", "s1")):
        state = DirectoryState(_LIMITS)
        state.publish_segments("store", [segment("s1", 1, 2), segment("s2", 2, 1)])
        state.withdraw_segments("store", [gone, gone, "never"])
        assert [one.segment for one in state.lookup_blocks("store", _LAYOUT, [key(1), key(2)])] == [left, left]


def test_a_run_stays_in_the_segment_it_began_in() -> None:
    state = DirectoryState(_LIMITS)
    state.publish_segments("store", [segment("s1", 1, 2), segment("s2", 2)])
    found = state.lookup_blocks("store", _LAYOUT, [key(1), key(2)])
    assert [(one.segment, one.record) for one in found] == [("s1", 0), ("s1", 1)]


def test_least_recently_read_segments_go_first() -> None:
    state = DirectoryState(_LIMITS)
    state.publish_segments("store", [segment("s1", 1, 2), segment("s2", 3, 4), segment("s3", 5, 6)])
    state.lookup_blocks("store", _LAYOUT, [key(1)])
    state.publish_segments("store", [segment("s4", 7)])
    found = [number for number in range(1, 8) if state.lookup_blocks("store", _LAYOUT, [key(number)])]
    assert found == [1, 2, 5, 6, 7]
    assert state.counts().dropped_segments == 1


def test_a_republished_segment_with_other_keys_replaces_the_old() -> None:
    state = DirectoryState(_LIMITS)
    state.publish_segments("store", [segment("s", 1, 2)])
    state.publish_segments("store", [segment("s", 1, 2)])
    assert state.counts().blocks == 2
    state.publish_segments("store", [segment("s", 2, 3)])
    assert state.lookup_blocks("store", _LAYOUT, [key(1)]) == ()
    assert state.lookup_blocks("store", _LAYOUT, [key(3)]) == (BlockLocation(segment="s", record=1),)


def test_segments_without_keys_come_and_go() -> None:
    state = DirectoryState(_LIMITS)
    state.publish_segments("store", [segment("s"), segment("t")])
    state.withdraw_segments("store", ["s"])
    state.withdraw_segments("store", ["t"])
    assert state.counts().blocks == 0


def test_failures_withdraw_a_location_and_shun_a_holder() -> None:
    failures = PullFailures()
    places = [SnapshotLocation(key=key(number), holder=holder("a")) for number in range(5)]
    assert [failures.report(places[0], now=float(now)) for now in range(4)] == [False, False, True, False]
    assert [failures.allows(place, now=4.0) for place in places[:2]] == [False, True]
    assert not failures.report(places[1], now=4.0)
    assert not failures.report(places[2], now=4.0)
    assert not failures.allows(places[4], now=5.0)
    assert failures.allows(SnapshotLocation(key=key(0), holder=holder("a", epoch=2)), now=5.0)
    assert failures.allows(places[0], now=40.0)


class DirectoryMachine(RuleBasedStateMachine):
    """Any order of messages of several incarnations, against a plain model of who announced what."""

    def __init__(self) -> None:
        super().__init__()
        self.limits = DirectoryLimits(expiry_seconds=5.0, max_holders=3, max_snapshots=8, max_blocks=12)
        self.state = DirectoryState(self.limits)
        self.now = 0.0
        self.said: set[tuple[str, int, int]] = set()

    @rule(name=st.sampled_from("abcd"), epoch=st.integers(1, 3))
    def join(self, name: str, epoch: int) -> None:
        if self.state.join(holder(name, epoch=epoch), now=self.now) is Standing.CURRENT:
            self.said = {one for one in self.said if one[0] != name}

    @rule(name=st.sampled_from("abcd"), epoch=st.integers(1, 3), numbers=st.lists(st.integers(0, 9), max_size=6))
    def publish(self, name: str, epoch: int, numbers: list[int]) -> None:
        keys = [key(number) for number in numbers]
        if self.state.publish_snapshots(name, epoch, keys, now=self.now) is Standing.CURRENT:
            self.said |= {(name, epoch, number) for number in numbers}

    @rule(name=st.sampled_from("abcd"), epoch=st.integers(1, 3), number=st.integers(0, 9), everything=st.booleans())
    def withdraw(self, name: str, epoch: int, number: int, everything: bool) -> None:
        standing = self.state.withdraw_snapshots(name, epoch, [key(number)], everything=everything, now=self.now)
        if standing is Standing.CURRENT:
            self.said = {one for one in self.said if one[:2] != (name, epoch) or not (everything or one[2] == number)}

    @rule(name=st.sampled_from("abcd"), epoch=st.integers(1, 3), told=st.integers(0, 12))
    def beat(self, name: str, epoch: int, told: int) -> None:
        self.state.heartbeat(name, epoch, told, now=self.now)

    @rule(seconds=st.floats(0.0, 4.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.state.sweep(now=self.now)

    @rule(store=st.sampled_from("xy"), name=st.sampled_from("st"), numbers=st.lists(st.integers(0, 9), max_size=5))
    def publish_segment(self, store: str, name: str, numbers: list[int]) -> None:
        self.state.publish_segments(store, [segment(name, *dict.fromkeys(numbers))])

    @rule(store=st.sampled_from("xy"), name=st.sampled_from("st"))
    def withdraw_segment(self, store: str, name: str) -> None:
        self.state.withdraw_segments(store, [name])
        for number in range(10):
            found = self.state.lookup_blocks(store, _LAYOUT, [key(number)])
            assert all(one.segment != name for one in found)

    @invariant()
    def only_what_was_said_is_named_and_memory_is_bounded(self) -> None:
        counts = self.state.counts()
        named = 0
        for number in range(10):
            for one in self.state.lookup_snapshots([key(number)], prefer_zone="", now=self.now):
                assert (one.holder.holder_id, one.holder.epoch, number) in self.said
                named += 1
        assert named <= counts.snapshots <= self.limits.max_snapshots
        assert counts.blocks <= self.limits.max_blocks
        assert counts.holders <= self.limits.max_holders


DirectoryMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestDirectoryMachine = DirectoryMachine.TestCase


def test_counts_return_to_zero_after_everything_is_withdrawn() -> None:
    rng = random.Random(5)
    state = state_with(holder("a"), holder("b"), limits=DirectoryLimits())
    for number in range(300):
        state.publish_snapshots(rng.choice("ab"), 1, [key(number)], now=0.0)
        state.publish_segments("store", [segment(f"s{number}", number, number + 1, number + 2)])
    state.withdraw_segments("store", [f"s{number}" for number in range(300)])
    for name in "ab":
        state.withdraw_snapshots(name, 1, (), everything=True, now=0.0)
    counts = state.counts()
    assert (counts.snapshots, counts.segments, counts.blocks) == (0, 0, 0)


@pytest.mark.parametrize(
    ("ours", "theirs", "is_tried"),
    [
        ("tcp", ("tcp",), True),
        ("tcp", ("tcp+tls",), False),
        ("tcp+tls", ("tcp+tls",), True),
        ("tcp", ("nixl-ucx-tcp",), False),
        ("nixl-ucx-rdma", ("tcp",), False),
        ("nixl-ucx-rdma", ("nixl-ucx-tcp",), True),
        ("tcp", ("nixl-ucx-rdma", "tcp"), True),
        ("tcp", (), False),
    ],
)
def test_only_holders_that_speak_our_transport_are_tried(ours: str, theirs: tuple[str, ...], is_tried: bool) -> None:
    us, peer = (replace(holder(name), transports=kinds) for name, kinds in (("us", (ours,)), ("peer", theirs)))
    found = (SnapshotLocation(key=key(1), holder=peer),)
    assert pullable(found, us=us, failures=PullFailures(), now=0.0) == (found if is_tried else ())
