"""Every SegmentStore on segments that are damaged, cut, mixed up or gone: a miss with its reason, and neighbours are read."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from prefill_engine.kv.record import RecordCodec
from prefill_engine.kv.segment_file import HEADER_BYTES
from prefill_engine.kv.segments import BlockLocation
from prefill_testing.blocks import make_key, make_payload
from prefill_testing.segment_media import Medium, corrupt, flip, publish
from prefill_testing.segments import LAYOUT, SHAPE, locations, make_record, read


def record_start(record: int) -> int:
    return HEADER_BYTES + record * SHAPE.record_bytes


def zero(start: int, length: int) -> Callable[[bytearray], bytearray]:
    def change(content: bytearray) -> bytearray:
        content[start : start + length] = bytes(length)
        return content

    return change


def place(start: int, record: bytes) -> Callable[[bytearray], bytearray]:
    def change(content: bytearray) -> bytearray:
        content[start : start + len(record)] = record
        return content

    return change


def other_layout_record() -> bytes:
    other = replace(SHAPE, layout_digest=bytes(32))
    payload = make_payload(LAYOUT, "b")
    return RecordCodec(other).encode_header(key=make_key("b"), payload=payload, block_index=0, provenance=0) + payload


LAST_GROUP = record_start(1) + SHAPE.record_bytes - SHAPE.group_bytes[-1]


@pytest.mark.parametrize("group_major", [False, True], ids=["record_major", "group_major"])
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (flip(record_start(1)), "layout"),
        (flip(record_start(1) + 30), "crc"),
        (flip(record_start(1) + SHAPE.header_bytes - 1), "crc"),
        (flip(record_start(1) + SHAPE.header_bytes), "crc"),
        (flip(LAST_GROUP), "crc"),
        (flip(record_start(2) - 1), "crc"),
        (place(record_start(1), make_record("other").record.tobytes()), "key"),
        (place(record_start(1), other_layout_record()), "layout"),
        (zero(record_start(1), SHAPE.record_bytes), "hole"),
        (zero(LAST_GROUP, SHAPE.group_bytes[-1]), "hole"),
    ],
    ids=[
        "magic",
        "header",
        "header_end",
        "first_group",
        "last_group",
        "last_byte",
        "other_key",
        "other_layout",
        "zeros",
        "zero_group",
    ],
)
def test_a_damaged_record_is_bad_and_its_neighbours_are_not(
    medium: Medium, change: Callable[[bytearray], bytearray], reason: str, group_major: bool
) -> None:
    segment = publish(medium, *"abc")
    corrupt(medium, segment, change)

    reading = read(medium.store, locations(segment), group_major=group_major)

    assert reading.bad == {1: reason}
    assert reading.complete == [0, 2]
    assert medium.store.counters()[f"bad_{reason}"] == 1


@pytest.mark.parametrize("group_major", [False, True], ids=["record_major", "group_major"])
@pytest.mark.parametrize("missing", [1, 5000, SHAPE.record_bytes])
def test_a_cut_segment_is_short_from_there_on(medium: Medium, missing: int, group_major: bool) -> None:
    segment = publish(medium, *"abc")
    corrupt(medium, segment, lambda content: content[:-missing])

    reading = read(medium.store, locations(segment), group_major=group_major)

    assert reading.bad == {2: "short"}


def test_an_empty_file_is_short(medium: Medium) -> None:
    segment = publish(medium, *"ab")
    corrupt(medium, segment, lambda content: content[:0])

    assert read(medium.store, locations(segment)).bad == {0: "short", 1: "short"}


def test_a_record_index_past_the_end_is_short(medium: Medium) -> None:
    segment = publish(medium, "a")

    reading = read(medium.store, [(make_key("a"), BlockLocation(segment=segment.name, record=9))])

    assert reading.bad == {0: "short"}


def test_a_directory_that_mixed_up_keys_gives_misses(medium: Medium) -> None:
    segment = publish(medium, *"ab")
    swapped = [
        (key, place) for (key, _), (_, place) in zip(locations(segment), reversed(locations(segment)), strict=True)
    ]

    assert read(medium.store, swapped).bad == {0: "key", 1: "key"}


@pytest.mark.parametrize("group_major", [False, True], ids=["record_major", "group_major"])
def test_a_segment_deleted_after_the_look_up_is_a_miss(medium: Medium, group_major: bool) -> None:
    """kv.md 8, bug 8 (sgl-project/sglang#31108): what was there when asked may be gone when read."""
    segments = [publish(medium, *"ab"), publish(medium, *"cd"), publish(medium, *"ef")]
    medium.file(segments[1]).unlink()

    reading = read(medium.store, locations(*segments), group_major=group_major)

    assert reading.bad == {2: "io", 3: "io"}
    assert reading.complete == [0, 1, 4, 5]
    assert medium.store.counters()["segments_gone"] == 1


@pytest.mark.parametrize(
    "name",
    [
        "",
        "x",
        "../../../../etc/passwd",
        "kv/0000000000000000/000001764457-0000/aa/" + "a" * 32 + ".seg",
        f"kv/{SHAPE.layout_digest[:8].hex()}/../aa/" + "a" * 32 + ".seg",
        f"kv/{SHAPE.layout_digest[:8].hex()}/001764457200-0000/ab/" + "a" * 32 + ".seg",
        f"kv/{SHAPE.layout_digest[:8].hex()}/001764457200-0000/aa/" + "a" * 32 + ".seg/",
    ],
    ids=["empty", "word", "outside", "other_layout", "dots", "other_shard", "slash"],
)
def test_a_name_that_is_no_segment_of_ours_is_never_opened(medium: Medium, name: str) -> None:
    reading = read(medium.store, [(make_key("a"), BlockLocation(segment=name, record=0))])

    assert reading.bad == {0: "layout"}
    assert medium.store.counters()["opens"] == 0
