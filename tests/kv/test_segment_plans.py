"""The pure decisions of the segment store: strips to read, names, what to collect, what to keep."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefill_engine.kv.segment_collect import Generation, StoredSegment, choose_hot, plan_withdrawal
from prefill_engine.kv.segment_paths import SegmentPaths, generation_name, is_generation, owner_of, owner_tag
from prefill_engine.kv.segment_read import Strip, plan_strips
from prefill_engine.kv.segments import BlockLocation, RecordRead
from prefill_testing.blocks import make_key

TARGET = memoryview(bytearray(1))


def reads_of(*places: tuple[str, int]) -> list[RecordRead]:
    return [
        RecordRead(key=make_key("a"), location=BlockLocation(segment=segment, record=record), target=TARGET)
        for segment, record in places
    ]


def strip(segment: str, first_record: int, *reads: int) -> Strip:
    return Strip(segment=segment, first_record=first_record, reads=reads)


@pytest.mark.parametrize(
    ("places", "strips"),
    [
        ((), ()),
        ((("x", 3),), (strip("x", 3, 0),)),
        ((("x", 3), ("x", 4)), (strip("x", 3, 0, 1),)),
        ((("x", 0), ("x", 1), ("x", 2), ("x", 3)), (strip("x", 0, 0, 1), strip("x", 2, 2, 3))),
        ((("x", 1), ("x", 0)), (strip("x", 1, 0), strip("x", 0, 1))),
        ((("x", 1), ("x", 1)), (strip("x", 1, 0), strip("x", 1, 1))),
        ((("x", 0), ("x", 2)), (strip("x", 0, 0), strip("x", 2, 1))),
        ((("x", 0), ("y", 1), ("x", 1)), (strip("x", 0, 0), strip("y", 1, 1), strip("x", 1, 2))),
    ],
    ids=["none", "one", "two", "longer_than_a_strip", "backwards", "twice", "gap", "other_segment"],
)
def test_strips_are_runs_of_records_cut_evenly(places: tuple[tuple[str, int], ...], strips: tuple[Strip, ...]) -> None:
    assert plan_strips(reads_of(*places), max_records=3) == strips


@given(
    places=st.lists(st.tuples(st.sampled_from("xy"), st.integers(0, 5))),
    max_records=st.integers(1, 5),
)
def test_strips_cover_every_read_once_in_chain_order(places: list[tuple[str, int]], max_records: int) -> None:
    strips = plan_strips(reads_of(*places), max_records=max_records)

    assert [index for part in strips for index in part.reads] == list(range(len(places)))
    for part in strips:
        assert len(part.reads) <= max_records
        assert [places[index] for index in part.reads] == [
            (part.segment, part.first_record + number) for number in range(len(part.reads))
        ]
    for part, other in pairwise(strips):
        is_cut = (other.segment, other.first_record) == (part.segment, part.first_record + len(part.reads))
        assert not is_cut or abs(len(part.reads) - len(other.reads)) <= 1


def test_generation_names_sort_by_age() -> None:
    names = [
        generation_name(now, generation_seconds=3600, part=part)
        for now, part in [(0, 0), (7199, 0), (7200, 0), (7200, 1), (7200, 10), (10799, 11), (99_999_999_999, 0)]
    ]

    assert names == sorted(names)
    assert len(set(names)) == len(names)
    assert names[:3] == ["000000000000-0000", "000000003600-0000", "000000007200-0000"]
    assert all(map(is_generation, names))


def test_a_name_resolves_to_the_path_that_its_store_gave_it() -> None:
    paths = SegmentPaths(root="/mnt/store", layout_id=bytes(range(8)))
    name = paths.name("000000003600-0000", "ab" + "0" * 30)

    assert name == f"kv/0001020304050607/000000003600-0000/ab/ab{'0' * 30}.seg"
    assert paths.resolve(name) == paths.path(name) == f"/mnt/store/{name}"
    owned_name = paths.name("000000003600-0000-0123abcd", "ab" + "0" * 30)
    assert paths.resolve(owned_name) == f"/mnt/store/{owned_name}"


@given(text=st.text(alphabet="kv/.0ab-sg"))
def test_no_other_text_resolves(text: str) -> None:
    assert SegmentPaths(root="/mnt", layout_id=bytes(8)).resolve(text) is None


def generation(name: str, num_bytes: int, *, newest: float = 0, is_withdrawn: bool = False) -> Generation:
    return Generation(name=name, num_bytes=num_bytes, newest=newest, is_withdrawn=is_withdrawn)


OLD = [generation("3", 10), generation("1", 10), generation("2", 10)]


@pytest.mark.parametrize(
    ("generations", "used", "names"),
    [
        ([], 95, ()),
        (OLD, 90, ()),
        (OLD, 91, ("1", "2")),
        (OLD, 90 + 1000, ("1", "2", "3")),
        ([generation("1", 10, newest=501), *OLD[:1]], 95, ("3",)),
        ([generation("1", 10, is_withdrawn=True), *OLD[:1]], 95, ()),
        ([generation("0", 10, is_withdrawn=True), *OLD], 105, ("1", "2")),
        ([generation("0", 100), *OLD], 95, ("0",)),
    ],
    ids=[
        "nothing_to_give",
        "at_the_watermark",
        "oldest_first_down_to_the_low_mark",
        "far_above",
        "young_ones_stay",
        "withdrawn_bytes_count_as_free",
        "beside_withdrawn_ones",
        "whole_generations",
    ],
)
def test_withdrawal(generations: list[Generation], used: int, names: tuple[str, ...]) -> None:
    plan = plan_withdrawal(
        generations, used_bytes=used, start_bytes=90, goal_bytes=80, protect_after=500, share_bytes=1000
    )

    assert plan == names


BIG, SMALL = "00000b16", "00005311"


def owned(start: int, owner: str, num_bytes: int = 10, *, newest: float = 0, is_withdrawn: bool = False) -> Generation:
    name = generation_name(start, generation_seconds=1, part=0, owner=owner)
    return generation(name, num_bytes, newest=newest, is_withdrawn=is_withdrawn)


@pytest.mark.parametrize(
    ("generations", "used", "starts"),
    [
        ([owned(1, SMALL), owned(2, BIG, 30), owned(3, BIG, 30), owned(4, BIG, 30)], 90, []),
        ([owned(1, SMALL), owned(2, BIG, 15), owned(3, BIG, 15), owned(4, BIG, 15)], 91, [2]),
        ([owned(1, SMALL), owned(2, BIG), owned(3, BIG), owned(4, BIG)], 109, [2, 1, 3]),
        ([owned(1, ""), owned(2, SMALL), owned(3, "", 30)], 91, [1, 2]),
        ([owned(1, SMALL), owned(2, BIG, 30, newest=501), owned(3, BIG, 10)], 91, [3, 1]),
        ([owned(1, SMALL), owned(2, BIG, 30, newest=501)], 91, [1]),
        ([owned(1, SMALL), owned(2, BIG, 30, is_withdrawn=True), owned(3, BIG)], 121, [1, 3]),
        ([owned(1, SMALL, 25), owned(2, BIG, 5), owned(3, BIG, 26)], 91, [1]),
        ([owned(2, BIG, 21), owned(1, SMALL, 21), owned(3, "", 40)], 130, [1, 2, 3]),
    ],
    ids=[
        "nobody_below_the_watermark",
        "above_its_share_before_older_ones",
        "down_to_its_share_then_the_oldest",
        "nobodys_are_above_no_share",
        "young_ones_stay_and_count",
        "young_ones_stay_whoever_pays",
        "withdrawn_ones_do_not_count",
        "two_above_the_oldest_first",
        "above_shares_by_age_then_the_rest",
    ],
)
def test_withdrawal_with_shares(generations: list[Generation], used: int, starts: list[int]) -> None:
    """Each tenant's share is 20 bytes; a generation is named by its start."""
    plan = plan_withdrawal(
        generations, used_bytes=used, start_bytes=90, goal_bytes=80, protect_after=500, share_bytes=20
    )

    assert [int(name.split("-")[0]) for name in plan] == starts


def test_owner_stands_in_a_generations_name_as_a_hash_of_this_store() -> None:
    tag = owner_tag("acme-corp", store_id="a" * 32)
    name = generation_name(7200, generation_seconds=3600, part=3, owner=tag)

    assert is_generation(name)
    assert (owner_of(name), owner_of("000000007200-0003")) == (tag, "")
    assert "acme" not in name
    assert len({tag, owner_tag("acme-corp", store_id="b" * 32), owner_tag("acme", store_id="a" * 32)}) == 3
    assert not any(map(is_generation, (f"{name}-{tag}", name[:-1], "000000007200-0003-", "000000007200-0003-acmecorp")))


def segment(name: str, num_bytes: int = 10) -> StoredSegment:
    return StoredSegment(name=name, num_bytes=num_bytes, newest=0)


@pytest.mark.parametrize(
    ("segments", "last_read", "names"),
    [
        ([], {}, []),
        ([segment("a"), segment("b")], {}, []),
        ([segment("a"), segment("b")], {"b": 200}, ["b"]),
        ([segment("a"), segment("b")], {"b": 100}, []),
        ([segment(name) for name in "abcd"], {"a": 201, "b": 203, "c": 202}, ["b", "c"]),
        ([segment("a", 30), segment("b", 10)], {"a": 202, "b": 201}, ["b"]),
    ],
    ids=["none", "cold", "hot", "not_lately", "at_most_half_last_read_first", "what_fits"],
)
def test_hot_segments(segments: list[StoredSegment], last_read: dict[str, float], names: list[str]) -> None:
    kept = choose_hot(segments, last_read=last_read, read_after=100)

    assert [segment.name for segment in kept] == names
