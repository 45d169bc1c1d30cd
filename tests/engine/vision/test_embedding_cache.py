"""Shared memory of a VE: free space, slabs and their orphans, the cache over them, tickets and content keys."""

import hashlib
import os
import random
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from prefill_engine.vision import slab as slab_module
from prefill_engine.vision.content_key import content_key
from prefill_engine.vision.embedding_cache import EmbeddingCache, Rows
from prefill_engine.vision.image_intake import DEFAULT_POLICY
from prefill_engine.vision.plan import ImagePlan, plan_image
from prefill_engine.vision.remembered import Remembered
from prefill_engine.vision.slab import AttachedSlab, FreeSpace, Slab, host_id, remove_orphans
from prefill_engine.vision.tickets import Tickets
from prefill_plan.errors import ConfigError
from prefill_plan.model_spec import released_model_spec

PAGE = 4096


@pytest.fixture
def slab() -> Iterator[Slab]:
    made = Slab("test", 8 * PAGE, key="rows.memory_bytes")
    yield made
    made.close()


@pytest.fixture(scope="module")
def plan() -> ImagePlan:
    spec = released_model_spec().vision
    assert spec is not None
    return plan_image(640, 480, spec)


def test_free_space_joins_what_comes_back() -> None:
    """Random takes and gives against a list of bytes: never two owners, and all of it is one piece again in the end."""
    random.seed(5)
    space, owners, taken = FreeSpace(64), [None] * 64, {}
    for number in range(3_000):
        if taken and random.random() < 0.5:
            key = random.choice(list(taken))
            offset, length = taken.pop(key)
            assert owners[offset : offset + length] == [key] * length
            owners[offset : offset + length] = [None] * length
            space.give(offset, length)
            continue
        length = random.randint(1, 20)
        offset = space.take(length)
        if offset is None:
            runs = "".join("1" if owner is None else "0" for owner in owners).split("0")
            assert max(map(len, runs)) < length
            continue
        assert owners[offset : offset + length] == [None] * length
        owners[offset : offset + length] = [number] * length
        taken[number] = (offset, length)
        assert space.free_bytes == owners.count(None)
    for offset, length in taken.values():
        space.give(offset, length)
    assert space.take(64) == 0


def test_slab_is_one_memory_for_all_who_map_it(slab: Slab) -> None:
    region = slab.allocate(5)
    assert region is not None
    attached = AttachedSlab(slab.path, writable=True)
    attached.memory[region.offset : region.offset + 5] = b"hello"
    assert slab.read(region, offset=1, num_bytes=100) == b"ello"
    assert bytes(slab.view(region)) == b"hello"
    assert host_id(slab.path) == slab.host_id
    assert os.stat(slab.path).st_mode & 0o077 == 0
    assert slab.used_bytes == PAGE


def test_slab_that_does_not_fit_says_so_and_leaves_nothing() -> None:
    before = set(slab_module.SHM_DIR.glob("prefill-ve.*"))
    with pytest.raises(ConfigError, match=r"rows.memory_bytes = 1000000000000000: /dev/shm has \d+ bytes free"):
        Slab("test", 10**15, key="rows.memory_bytes")
    assert set(slab_module.SHM_DIR.glob("prefill-ve.*")) == before


def test_only_slabs_without_a_living_owner_are_orphans(slab: Slab) -> None:
    orphan = Path(slab.path).with_name("prefill-ve.dead.rows.00000000")
    orphan.write_bytes(b"x")
    assert orphan.name in remove_orphans()
    assert not orphan.exists()
    assert Path(slab.path).exists()


def test_cache_keeps_what_was_used_last(slab: Slab, plan: ImagePlan) -> None:
    cache = EmbeddingCache(slab=slab, cache_bytes=2 * PAGE)
    for key in (b"a", b"b", b"c"):
        add(cache, key, plan)
        if key == b"b":
            found = cache.find(b"a")
            assert found is not None
            cache.unpin(found)
    assert (cache.find(b"b"), cache.cached_bytes, cache.counters.evicted) == (None, 2 * PAGE, 1)
    assert cache.find(b"a") is not None


def test_cached_rows_make_room_and_pinned_ones_do_not(slab: Slab, plan: ImagePlan) -> None:
    cache = EmbeddingCache(slab=slab, cache_bytes=8 * PAGE)
    held = [rows for key in (b"a", b"b") if (rows := cache.reserve(key, plan, 2 * PAGE))]
    for rows in held:
        cache.fill(rows, crc32c=1)
    add(cache, b"c", plan, num_bytes=4 * PAGE)
    big = cache.reserve(b"d", plan, 4 * PAGE)
    assert big is not None
    assert cache.find(b"c") is None
    assert cache.reserve(b"e", plan, PAGE) is None
    cache.unpin(big)  # never filled: freed, not cached
    assert (cache.find(b"d"), cache.reserve(b"e", plan, PAGE) is not None) == (None, True)


def test_without_cache_rows_live_as_long_as_their_pins(slab: Slab, plan: ImagePlan) -> None:
    cache = EmbeddingCache(slab=slab, cache_bytes=0)
    rows = cache.reserve(b"a", plan, PAGE)
    assert rows is not None
    cache.fill(rows, crc32c=1)
    assert cache.find(b"a") is rows
    cache.unpin(rows)
    assert slab.used_bytes == PAGE
    cache.unpin(rows)
    assert (slab.used_bytes, cache.find(b"a")) == (0, None)


def test_holds_end_by_ack_time_cancel_and_drain(slab: Slab, plan: ImagePlan) -> None:
    now = [100.0]
    cache = EmbeddingCache(slab=slab, cache_bytes=0)
    ids = iter(bytes([number]) * 16 for number in range(100))
    tickets = Tickets(cache, hold_seconds=60, max_hold_seconds=100, clock=lambda: now[0], new_id=lambda: next(ids))

    def opened(item: bytes, *, hold: float = 0.0) -> bytes:
        rows = cache.reserve(item, plan, PAGE)
        assert rows is not None
        return tickets.open(rows, item_id=item, parent_attempt_id=b"p", hold_seconds=hold).ticket_id

    first, second, third = opened(b"1"), opened(b"2", hold=10), opened(b"3", hold=99)
    assert tickets.release(first)
    assert not tickets.release(first)
    now[0] += 9
    assert tickets.renew(second, 30)
    now[0] += 29
    assert tickets.find(second) is not None
    now[0] += 2
    assert (tickets.find(second), tickets.num_expired, slab.used_bytes) == (None, 1, PAGE)
    assert tickets.renew(third, 1000)
    held = tickets.find(third)
    assert held is not None
    assert tickets.seconds_left(held) == 60.0  # 100 s in all, whatever is asked for
    tickets.end_by(now[0] + 5)
    assert tickets.seconds_left(held) == 5.0
    fourth = opened(b"4")
    now[0] += 5
    assert tickets.find(fourth) is None
    assert (tickets.num_open, slab.used_bytes) == (0, 0)


def test_cancel_frees_by_item_or_by_attempt(slab: Slab, plan: ImagePlan) -> None:
    cache = EmbeddingCache(slab=slab, cache_bytes=0)
    ids = iter(bytes([number]) * 16 for number in range(100))
    tickets = Tickets(cache, hold_seconds=60, max_hold_seconds=100, clock=lambda: 0.0, new_id=lambda: next(ids))
    for item, parent in ((b"1", b"p"), (b"2", b"p"), (b"3", b"")):
        rows = cache.reserve(item, plan, PAGE)
        assert rows is not None
        tickets.open(rows, item_id=item, parent_attempt_id=parent, hold_seconds=0)
    assert tickets.release_of(item_id=b"1", parent_attempt_id=b"") == 1
    assert tickets.release_of(item_id=b"", parent_attempt_id=b"p") == 1
    assert (tickets.num_open, slab.used_bytes) == (1, PAGE)


def test_content_key_depends_on_everything_that_rows_depend_on() -> None:
    base = {
        "image_sha256": hashlib.sha256(b"image").digest(),
        "final_width": 644,
        "final_height": 490,
        "vision_digest": b"d" * 32,
        "policy": DEFAULT_POLICY,
        "cache_scope": b"s" * 32,
    }
    changes = [
        {"image_sha256": hashlib.sha256(b"other").digest()},
        {"final_width": 490, "final_height": 644},
        {"vision_digest": b"e" * 32},
        {"cache_scope": b""},
        {"policy": msgspec.structs.replace(DEFAULT_POLICY, apply_exif_orientation=True)},
        {"policy": msgspec.structs.replace(DEFAULT_POLICY, background_rgb=0)},
        {"policy": msgspec.structs.replace(DEFAULT_POLICY, first_frame_of_animation=False)},
        {"policy": msgspec.structs.replace(DEFAULT_POLICY, max_pixels=1)},
        {"policy": msgspec.structs.replace(DEFAULT_POLICY, max_side=1)},
        {"policy": msgspec.structs.replace(DEFAULT_POLICY, max_bytes=1)},
    ]
    keys = {key_of({**base, **change}) for change in [{}, *changes]}
    assert len(keys) == len(changes) + 1
    assert {len(key) for key in keys} == {32}
    # Written down, so that a change of the formula is seen: it would make every stored prefix with images a miss.
    assert key_of(base).hex() == "8d10f5e8be939cb3689c95a4a2b65d96bee34df01df1b8847a7f349105568387"


def test_memory_forgets_by_time_and_by_size() -> None:
    memory: Remembered[int] = Remembered(seconds=60.0, max_entries=2)
    memory.put(b"a", 1, now=0.0)
    assert (memory.get(b"a", now=59.9), memory.get(b"a", now=60.0), len(memory)) == (1, None, 0)
    for number, key in enumerate((b"a", b"b", b"c")):
        memory.put(key, number, now=0.0)
    assert (memory.get(b"a", now=1.0), memory.get(b"c", now=1.0)) == (None, 2)


def add(cache: EmbeddingCache, key: bytes, plan: ImagePlan, *, num_bytes: int = PAGE) -> Rows:
    rows = cache.reserve(key, plan, num_bytes)
    assert rows is not None
    cache.fill(rows, crc32c=1)
    cache.unpin(rows)
    return rows


def key_of(fields: dict[str, object]) -> bytes:
    return content_key(
        fields["image_sha256"], **{name: value for name, value in fields.items() if name != "image_sha256"}
    )  # type: ignore[arg-type]
