import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from prefill_engine.block_pool import BlockPool
from prefill_plan.block_keys import BlockKey
from prefill_testing.blocks import make_key


def chain(prompt: str, num_blocks: int) -> list[BlockKey]:
    """Keys of the blocks of a prompt of one letter per block; equal prefixes have equal keys."""
    return [make_key(prompt[: index + 1]) for index in range(num_blocks)]


def allocate(pool: BlockPool, num_blocks: int) -> tuple[int, ...]:
    slots = pool.allocate(num_blocks)
    assert slots is not None
    return slots


def store(pool: BlockPool, keys: list[BlockKey], *, provenance: int = 0) -> tuple[int, ...]:
    """Slots that hold the keys and are pinned once."""
    slots = allocate(pool, len(keys))
    for slot, key in zip(slots, keys, strict=True):
        assert pool.publish(slot, key, provenance=provenance)
    return slots


def test_match_stops_at_first_missing_block() -> None:
    pool = BlockPool(10)
    keys = chain("abcde", 5)
    slots = store(pool, [*keys[:2], *keys[3:]])

    assert pool.match(keys) == slots[:2]


def test_match_finds_pinned_and_cached_blocks() -> None:
    pool = BlockPool(10)
    keys = chain("abcd", 4)
    slots = store(pool, keys)
    pool.release(slots[2:])

    assert pool.match(keys) == slots
    assert pool.num_cached == 2


def test_allocate_prefers_unused_slots_to_cached_ones() -> None:
    pool = BlockPool(4)
    keys = chain("ab", 2)
    pool.release(store(pool, keys))

    allocate(pool, 2)

    assert len(pool.match(keys)) == 2


def test_allocate_evicts_the_least_recently_released_and_the_end_of_a_chain_first() -> None:
    pool = BlockPool(6)
    first, second = chain("aaa", 3), chain("bbb", 3)
    pool.release(store(pool, first))
    pool.release(store(pool, second))

    allocate(pool, 2)

    assert len(pool.match(first)) == 1
    assert len(pool.match(second)) == 3


def test_pinning_a_cached_block_moves_it_behind_others_when_released() -> None:
    pool = BlockPool(2)
    keys = [make_key("a"), make_key("b")]
    pool.release(store(pool, keys[:1]))
    pool.release(store(pool, keys[1:]))
    hit = pool.match(keys[:1])
    pool.pin(hit)
    pool.release(hit)

    allocate(pool, 1)

    assert pool.match(keys[:1]) == hit
    assert pool.match(keys[1:]) == ()


def test_match_alone_does_not_keep_a_block_from_eviction() -> None:
    pool = BlockPool(2)
    keys = [make_key("a"), make_key("b")]
    pool.release(store(pool, keys[:1]))
    pool.release(store(pool, keys[1:]))
    pool.match(keys[:1])

    allocate(pool, 1)

    assert pool.match(keys[:1]) == ()


def test_allocate_gives_all_or_none_and_never_a_pinned_block() -> None:
    pool = BlockPool(4)
    pinned = store(pool, chain("ab", 2))

    assert pool.allocate(3) is None
    assert set(allocate(pool, 2)).isdisjoint(pinned)
    assert pool.allocate(1) is None


def test_allocate_keeps_the_reserve() -> None:
    pool = BlockPool(200)

    assert pool.reserve_blocks == 2
    assert pool.num_free == 198
    assert pool.allocate(199) is None
    assert len(allocate(pool, 198)) == 198
    assert pool.num_free == 0


def test_first_writer_of_a_key_wins_and_the_other_slot_is_unused_after_release() -> None:
    pool = BlockPool(4)
    key = make_key("a")
    winner, loser = allocate(pool, 2)

    assert pool.publish(winner, key)
    assert not pool.publish(loser, key)

    pool.release([loser])
    assert pool.match([key]) == (winner,)
    assert pool.num_cached == 0
    assert pool.num_free == 3


def test_publishing_the_same_key_twice_in_one_slot_is_allowed() -> None:
    pool = BlockPool(4)
    (slot,) = store(pool, [make_key("a")])

    assert pool.publish(slot, make_key("a"))
    assert pool.counters()["published"] == 1


def test_a_key_can_be_published_again_after_eviction() -> None:
    pool = BlockPool(1)
    pool.release(store(pool, [make_key("a")], provenance=1))
    pool.release(store(pool, [make_key("b")]))

    slots = store(pool, [make_key("a")])

    assert pool.match([make_key("a")]) == slots
    assert pool.provenance(slots) == 0
    pool.check()


def test_a_newly_allocated_slot_has_lost_the_provenance_of_its_evicted_content() -> None:
    pool = BlockPool(1)
    pool.release(store(pool, [make_key("a")], provenance=1))

    assert pool.provenance(allocate(pool, 1)) == 0


def test_provenance_is_that_of_the_worst_block() -> None:
    pool = BlockPool(4)
    exact = store(pool, [make_key("a")])
    replayed = store(pool, [make_key("b")], provenance=1)

    assert pool.provenance(()) == 0
    assert pool.provenance(exact) == 0
    assert pool.provenance(exact + replayed) == 1


def test_wrong_calls_are_refused_with_the_slot() -> None:
    pool = BlockPool(4)
    (slot,) = store(pool, [make_key("a")])
    with pytest.raises(ValueError, match=f"cannot publish block slot {slot}: it already has another key"):
        pool.publish(slot, make_key("b"))
    pool.release([slot])

    with pytest.raises(ValueError, match=f"cannot release block slot {slot}: it has no references"):
        pool.release([slot])
    with pytest.raises(ValueError, match=f"cannot publish block slot {slot}: it is not pinned"):
        pool.publish(slot, make_key("a"))
    with pytest.raises(ValueError, match="cannot pin block slot 3: it is unused; nothing was pinned"):
        pool.pin([slot, 3])
    assert pool.num_cached == 1
    pool.check()


@pytest.mark.parametrize(("num_blocks", "reserve_fraction"), [(0, 0.01), (4, 1.0), (4, -0.1)])
def test_impossible_sizes_are_refused(num_blocks: int, reserve_fraction: float) -> None:
    with pytest.raises(ValueError, match=f"num_blocks {num_blocks}"):
        BlockPool(num_blocks, reserve_fraction=reserve_fraction)


class BlockPoolMachine(RuleBasedStateMachine):
    """Sequences that match, pin, allocate, publish in order and release, against plain dicts and lists.

    content[slot] is what the holder wrote there: a match must only ever return slots that contain what was asked for.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12, reserve_fraction=0.1)
        self.refs = dict.fromkeys(range(12), 0)
        self.content: dict[int, BlockKey | None] = dict.fromkeys(range(12))
        self.cached: list[int] = []
        self.sequences: list[tuple[list[BlockKey], list[int], int]] = []
        self.allocated = self.published = self.evicted = 0

    def resident(self, key: BlockKey) -> int | None:
        return next((slot for slot, content in self.content.items() if content == key), None)

    def num_free(self) -> int:
        return sum(refs == 0 for refs in self.refs.values()) - 1

    def take(self, slots: tuple[int, ...]) -> None:
        num_unused = sum(self.refs[slot] == 0 and self.content[slot] is None for slot in self.refs)
        evicted = self.cached[: max(0, len(slots) - num_unused)]
        self.cached = self.cached[len(evicted) :]
        self.evicted += len(evicted)
        for slot in evicted:
            self.content[slot] = None
        for slot in slots:
            assert self.refs[slot] == 0, "a pinned slot was handed out"
            assert self.content[slot] is None, "a cached slot was handed out before its turn"
            self.refs[slot] = 1
        self.allocated += len(slots)

    @rule(prompt=st.text("ab", min_size=1, max_size=7))
    def start(self, prompt: str) -> None:
        keys = chain(prompt, len(prompt))
        hit = self.pool.match(keys)
        for slot, key in zip(hit, keys, strict=False):
            assert self.content[slot] == key, "a match returned a slot with other content"
        if len(hit) < len(keys):
            assert self.resident(keys[len(hit)]) is None, "a match stopped before a resident block"
        self.pool.pin(hit)
        for slot in hit:
            self.refs[slot] += 1
            if slot in self.cached:
                self.cached.remove(slot)
        num_new = len(keys) - len(hit)
        is_possible = num_new <= max(0, self.num_free())
        new = self.pool.allocate(num_new)
        assert (new is not None) == is_possible
        if new is None:
            self.let_go(list(hit))
            return
        assert len(set(new)) == num_new, "a slot was handed out twice"
        self.take(new)
        self.sequences.append((keys, [*hit, *new], len(hit)))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def publish_next(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, len(self.sequences) - 1))
        keys, slots, num_done = self.sequences[number]
        if num_done == len(keys):
            return
        slot, key = slots[num_done], keys[num_done]
        is_first = self.resident(key) is None
        assert self.pool.publish(slot, key) == is_first
        if is_first:
            self.content[slot] = key
            self.published += 1
        self.sequences[number] = (keys, slots, num_done + 1)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        _, slots, _ = self.sequences.pop(data.draw(st.integers(0, len(self.sequences) - 1)))
        self.let_go(slots)

    def let_go(self, slots: list[int]) -> None:
        self.pool.release(slots)
        for slot in reversed(slots):
            self.refs[slot] -= 1
            if self.refs[slot] == 0 and self.content[slot] is not None:
                self.cached.append(slot)

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.pool.check()
        assert self.pool.num_cached == len(self.cached)
        assert self.pool.num_free == max(0, self.num_free())
        counts = self.pool.counters()
        assert (counts["allocated"], counts["published"], counts["evicted"]) == (
            self.allocated,
            self.published,
            self.evicted,
        )
        assert counts["published"] - counts["evicted"] == sum(key is not None for key in self.content.values())


TestBlockPoolMachine = BlockPoolMachine.TestCase
TestBlockPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
