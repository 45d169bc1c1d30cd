"""Which images a rank wants as its plan changes, and how far its rows reach without them; no model."""

from collections.abc import Iterator

import pytest
import torch

from prefill_engine.batch import SpanEmbeddings
from prefill_engine.image_messages import ImageRows, ImageRowsDone, ImagesWanted
from prefill_engine.messages import FromRank, ImageItem
from prefill_engine.rank.attempt import Attempt, read_submit
from prefill_engine.rank.image_rows import RankImages
from prefill_engine.vision.slab import Slab
from prefill_plan.errors import RequestError
from prefill_plan.positions import plan_positions
from prefill_testing.rank_harness import make_submit, tiny_tokens

WINDOW, KEEP, COLUMNS, ROWS = 16, 24, 8, 40
STARTS = (100, 590, 650)
"""Of images of 40 rows in a prompt of 1,000 tokens."""


class Scene:
    def __init__(self, *, has_encoder: bool = True, without_source: tuple[int, ...] = ()) -> None:
        self.sent: list[FromRank] = []
        self.images = RankImages(has_encoder=has_encoder, columns=COLUMNS, window_tokens=WINDOW, send=self.sent.append)
        items = tuple(
            ImageItem(start=start, length=ROWS, content_key=b"k" * 32, has_source=index not in without_source)
            for index, start in enumerate(STARTS)
        )
        self.attempt: Attempt = read_submit(make_submit(tiny_tokens(1000), images=items), ())

    def plan(self, hit: int, *, snapshot: bool = True) -> None:
        """The hit is known (again)."""
        positions = plan_positions(
            1000,
            offered_hit=hit,
            keep_tokens=KEEP,
            window_tokens=WINDOW,
            snapshot_held=lambda _hit: snapshot,
            spans=self.attempt.spans,
        )
        assert positions.hit_tokens == hit
        self.attempt.positions = positions
        self.attempt.next_row = positions.compute_start
        self.images.want(self.attempt)

    def have(self, *indices: int) -> None:
        for index in indices:
            rows = SpanEmbeddings(start=STARTS[index], data=torch.zeros(ROWS, COLUMNS, dtype=torch.bfloat16))
            self.attempt.embeddings[index] = rows

    def lists(self) -> list[tuple[tuple[int, ...], int]]:
        return [(message.indices, message.round) for message in self.sent if isinstance(message, ImagesWanted)]


@pytest.mark.parametrize(
    ("hit", "snapshot", "wanted"),
    [
        (0, True, (0, 1, 2)),
        (256, True, (1, 2)),
        # 640 lies behind the second image, whose last rows are in the window that is run again (C3).
        (640, True, (2,)),
        (640, False, (1, 2)),
        (768, False, ()),
    ],
)
def test_images_with_rows_to_compute_are_wanted(hit: int, snapshot: bool, wanted: tuple[int, ...]) -> None:
    scene = Scene()
    scene.plan(hit, snapshot=snapshot)
    assert scene.lists() == ([(wanted, 1)] if wanted else [])


@pytest.mark.parametrize(
    ("have", "next_row", "end"),
    [
        ((), 0, 100),
        ((0,), 0, 590),
        ((0,), 120, 590),
        ((1, 2), 0, 100),
        # A replay may begin inside an image.
        ((), 110, 110),
        ((0, 1, 2), 0, 1000),
        ((), 690, 1000),
        ((), 689, 689),
    ],
)
def test_rows_reach_to_the_first_image_that_is_missing(have: tuple[int, ...], next_row: int, end: int) -> None:
    scene = Scene()
    scene.have(*have)
    scene.attempt.next_row = next_row
    assert scene.attempt.runnable_end == end


def test_hit_that_shrinks_asks_for_more_and_one_that_is_spared_a_replay_for_less() -> None:
    scene = Scene()
    scene.plan(640, snapshot=False)
    scene.have(1)
    scene.plan(640, snapshot=True)
    assert scene.attempt.embeddings == {}
    scene.plan(0)
    assert scene.lists() == [((1, 2), 1), ((2,), 2), ((0, 1, 2), 3)]
    # The third was asked for once and stands; the second is another asking than the one before.
    assert scene.attempt.images_wanted == {0: 3, 1: 3, 2: 1}
    scene.plan(0)
    assert len(scene.lists()) == 3


@pytest.fixture
def slab() -> Iterator[Slab]:
    slab = Slab("test-image-rows", 1 << 16, key="test")
    yield slab
    slab.close()


def rows_message(scene: Scene, slab: Slab, *, index: int, round: int) -> ImageRows:
    region = slab.allocate(ROWS * COLUMNS * 2)
    assert region is not None
    slab.view(region)[:] = b"\x80\x3f" * (ROWS * COLUMNS)
    return ImageRows(
        attempt_id=scene.attempt.attempt_id,
        index=index,
        round=round,
        path=slab.path,
        offset=region.offset,
        rows=ROWS,
        columns=COLUMNS,
    )


def test_rows_of_an_asking_that_was_taken_back_are_never_looked_at(slab: Slab) -> None:
    scene = Scene()
    scene.plan(640, snapshot=False)
    late = rows_message(scene, slab, index=1, round=1)
    scene.plan(640, snapshot=True)
    scene.plan(0)
    scene.images.take(scene.attempt, late)
    assert scene.attempt.embeddings == {}
    scene.images.take(scene.attempt, rows_message(scene, slab, index=1, round=3))
    assert scene.attempt.embeddings[1].start == 590
    assert bool((scene.attempt.embeddings[1].data == 1.0).all())


def test_rows_for_an_attempt_that_has_ended_are_left_alone(slab: Slab) -> None:
    scene = Scene()
    scene.plan(0)
    scene.attempt.ended = True
    scene.images.take(scene.attempt, rows_message(scene, slab, index=0, round=1))
    assert scene.attempt.embeddings == {}


def test_computed_images_are_given_back_and_may_be_wanted_again() -> None:
    scene = Scene()
    scene.plan(0)
    scene.have(0, 1)
    scene.attempt.next_row = 139
    scene.images.drop_computed(scene.attempt)
    assert set(scene.attempt.embeddings) == {0, 1}
    scene.attempt.next_row = 140
    scene.images.drop_computed(scene.attempt)
    assert set(scene.attempt.embeddings) == {1}
    assert [message.index for message in scene.sent if isinstance(message, ImageRowsDone)] == [0]
    scene.plan(0)
    assert scene.lists()[-1] == ((0, 1, 2), 2)


@pytest.mark.parametrize(
    ("scene", "reason", "retry"),
    [
        (Scene(has_encoder=False), "IMAGE_REJECTED", "OTHER_PE"),
        (Scene(without_source=(2,)), "EMBEDDING_GONE", "REPLAN"),
    ],
    ids=["no-encoder", "no-source"],
)
def test_image_that_cannot_be_had_is_refused_and_nothing_asked_for(scene: Scene, reason: str, retry: str) -> None:
    with pytest.raises(RequestError) as error:
        scene.plan(256)
    assert (error.value.reason, error.value.details["retry"]) == (reason, retry)
    assert scene.sent == []


def test_image_without_a_source_is_no_matter_inside_the_hit() -> None:
    scene = Scene(without_source=(0, 1))
    scene.plan(640)
    assert scene.lists() == [((2,), 1)]
