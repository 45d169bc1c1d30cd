"""Images on a rank: text before a missing one runs, others go on, hits ask for nothing, memory goes back; tiny model, CPU."""

from collections.abc import Iterator

import msgspec
import pytest
import torch

from prefill_engine.image_messages import ImageRows, ImageRowsDone, ImagesWanted
from prefill_engine.messages import (
    AttemptFailed,
    Cancel,
    ChunkFinished,
    Computed,
    FirstTokenReady,
    ImageItem,
    ReadRange,
    Release,
    Resolved,
    StoreProgress,
    Submit,
)
from prefill_engine.model.checkpoint_texts import check_texts, read_preset
from prefill_engine.model.checkpoint_writer import write_checkpoint
from prefill_engine.rpc import common_pb2
from prefill_engine.vision.slab import Region, Slab
from prefill_plan.config import EngineConfig, ModelConfig, VisionConfig, VisionMode
from prefill_testing.rank_harness import RankHarness, make_submit, tiny_engine_config, tiny_tokens

COLUMNS = 64
IMAGE_TOKEN = 500
ROWS = 40
BLOCK_KV = common_pb2.COMPONENT_KIND_BLOCK_KV


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    """A checkpoint with a vision tower, so that the rank can name the encoders that will do."""
    directory = tmp_path_factory.mktemp("checkpoint")
    texts = read_preset("tiny")
    write_checkpoint(directory, check_texts(texts, source="tiny"), texts, seed=3, shard_bytes=1 << 30)
    return msgspec.structs.replace(
        tiny_engine_config(),
        model=ModelConfig(path=str(directory)),
        vision=VisionConfig(mode=VisionMode.REMOTE, endpoints=("127.0.0.1:1",)),
    )


@pytest.fixture(scope="module")
def harness(config: EngineConfig) -> Iterator[RankHarness]:
    harness = RankHarness(config)
    yield harness
    harness.close()


class Images:
    """The front's part: rows in shared memory, told to the rank when the test says so."""

    def __init__(self, rank: RankHarness) -> None:
        self.rank = rank
        self.slab = Slab("test-rank-images", 1 << 20, key="test")
        self.regions: dict[tuple[bytes, int], Region] = {}

    def wanted(self, submit: Submit) -> tuple[int, ...]:
        return self.rank.event(submit, ImagesWanted).indices

    def num_asked(self, submit: Submit) -> int:
        return sum(isinstance(event, ImagesWanted) for event in self.rank.events_of(submit))

    def done(self, submit: Submit) -> list[int]:
        return [event.index for event in self.rank.events_of(submit) if isinstance(event, ImageRowsDone)]

    def deliver(self, submit: Submit, index: int, *, round: int = 1) -> None:
        rows = image_rows(index)
        region = self.slab.allocate(rows.numel() * 2)
        assert region is not None
        self.slab.view(region)[:] = rows.view(torch.uint8).numpy().tobytes()
        self.regions[submit.attempt_id, index] = region
        self.rank.send(
            ImageRows(
                attempt_id=submit.attempt_id,
                index=index,
                round=round,
                path=self.slab.path,
                offset=region.offset,
                rows=ROWS,
                columns=COLUMNS,
            )
        )

    def poison(self, submit: Submit, index: int) -> None:
        """Other bytes where rows were that the rank has let go of."""
        self.slab.view(self.regions[submit.attempt_id, index])[:] = b"\xff" * (ROWS * COLUMNS * 2)


@pytest.fixture
def images(harness: RankHarness) -> Iterator[Images]:
    harness.mailbox.events.clear()
    images = Images(harness)
    yield images
    harness.assert_nothing_held()
    images.slab.close()


def image_rows(index: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 + index)
    return torch.randn(ROWS, COLUMNS, generator=generator).to(torch.bfloat16)


def submit_with(
    *starts: int, length: int = 700, attempt: int = 1, seed: int = 1, has_source: bool = True, **options: object
) -> Submit:
    """A prompt with an image of 40 rows at each start."""
    tokens = tiny_tokens(length, seed=seed)
    for start in starts:
        tokens[start : start + ROWS] = IMAGE_TOKEN
    items = tuple(
        ImageItem(start=start, length=ROWS, content_key=bytes([seed, i]) * 16, has_source=has_source)
        for i, start in enumerate(starts)
    )
    return make_submit(tokens, attempt=attempt, images=items, **options)


def chunks_of(rank: RankHarness, submit: Submit) -> list[int]:
    return [event.rows_done for event in rank.events_of(submit) if isinstance(event, ChunkFinished)]


def blocks_of(rank: RankHarness, submit: Submit) -> bytes:
    return rank.reads.read(
        ReadRange(read_id=1, attempt_id=submit.attempt_id, kind=BLOCK_KV, offset=0, length=1 << 30)
    ).data


def settle(rank: RankHarness, submit: Submit) -> None:
    rank.run_until(lambda: rank.event(submit, StoreProgress).done)
    rank.send(Release(attempt_id=submit.attempt_id))
    rank.run_until(lambda: rank.is_released(submit))


def test_text_before_the_first_missing_image_runs_and_late_rows_give_the_same_bytes(
    harness: RankHarness, images: Images
) -> None:
    late = submit_with(300, 600, attempt=11, seed=11)
    harness.submit(late)
    # 256 = the last block boundary at or below the image at 300.
    harness.run_until(lambda: chunks_of(harness, late) == [256])
    assert images.wanted(late) == (0, 1)
    # Accepted comes first in the stream, so the front must hear of it first.
    assert harness.names(late).index("Resolved") < harness.names(late).index("ImagesWanted")
    images.deliver(late, 1)
    for _ in range(5):
        harness.turn()
    assert chunks_of(harness, late) == [256]
    images.deliver(late, 0)
    harness.run_until(lambda: any(isinstance(e, Computed) for e in harness.events_of(late)))
    assert images.done(late) == [0, 1]
    assert harness.event(late, Computed).image_tokens == 2 * ROWS
    first = (blocks_of(harness, late), harness.event(late, FirstTokenReady))
    settle(harness, late)
    # Another tenant's salt: the same prompt, nothing of it in the pool, all rows there before the first step.
    early = msgspec.structs.replace(submit_with(300, 600, attempt=12, seed=11), cache_scope=b"other")
    harness.submit(early)
    harness.run_until(lambda: images.num_asked(early) == 1)
    images.deliver(early, 0)
    images.deliver(early, 1)
    harness.run_until(lambda: any(isinstance(e, Computed) for e in harness.events_of(early)))
    second = (blocks_of(harness, early), harness.event(early, FirstTokenReady))
    assert first[0] == second[0]
    assert (first[1].token, first[1].logprob) == (second[1].token, second[1].logprob)
    settle(harness, early)


def test_rows_reach_the_model(harness: RankHarness, images: Images) -> None:
    """Other rows, other bytes: nothing was computed from placeholders."""
    outcomes = []
    for attempt, swapped in ((21, False), (22, True)):
        submit = msgspec.structs.replace(submit_with(100, 200, attempt=attempt, seed=21), cache_scope=bytes([attempt]))
        harness.submit(submit)
        harness.run_until(lambda submit=submit: images.num_asked(submit) == 1)
        images.deliver(submit, 0)
        images.deliver(submit, 1)
        if swapped:
            images.slab.view(images.regions[submit.attempt_id, 1])[:] = images.slab.view(
                images.regions[submit.attempt_id, 0]
            )
        harness.run_until(lambda submit=submit: any(isinstance(e, Computed) for e in harness.events_of(submit)))
        outcomes.append(blocks_of(harness, submit))
        settle(harness, submit)
    one_block = len(outcomes[0]) // 6
    assert outcomes[0][:one_block] == outcomes[1][:one_block]
    assert outcomes[0][one_block : 2 * one_block] != outcomes[1][one_block : 2 * one_block]


def test_attempt_that_waits_for_an_image_holds_up_no_other(harness: RankHarness, images: Images) -> None:
    waiting = submit_with(0, length=300, attempt=31, seed=31)
    other = make_submit(tiny_tokens(300, seed=32), attempt=32)
    harness.submit(waiting)
    harness.run_until(lambda: images.num_asked(waiting) == 1)
    harness.finish(other, until=Computed)
    assert chunks_of(harness, waiting) == []
    settle(harness, other)
    harness.send(Cancel(attempt_id=waiting.attempt_id))
    harness.run_until(lambda: harness.is_released(waiting))


def test_image_inside_the_hit_is_not_asked_for_unless_the_window_is_replayed(
    harness: RankHarness, images: Images
) -> None:
    first = submit_with(560, length=700, attempt=41, seed=41)
    harness.submit(first)
    harness.run_until(lambda: images.num_asked(first) == 1)
    images.deliver(first, 0)
    harness.run_until(lambda: any(isinstance(e, Computed) for e in harness.events_of(first)))
    settle(harness, first)
    # The hit is 640 and its snapshot is held: the image lies before every row to compute. It came without a source.
    held = submit_with(560, length=700, attempt=42, seed=41, has_source=False)
    harness.finish(held, until=Computed)
    assert (harness.event(held, Resolved).effective_hit, images.num_asked(held)) == (640, 0)
    settle(harness, held)


def test_image_in_the_replayed_window_is_asked_for(harness: RankHarness, images: Images) -> None:
    # The window of 16 replays [624, 640), and the image reaches to 630.
    first = submit_with(590, length=700, attempt=51, seed=51)
    harness.submit(first)
    harness.run_until(lambda: images.num_asked(first) == 1)
    images.deliver(first, 0)
    harness.run_until(lambda: any(isinstance(e, Computed) for e in harness.events_of(first)))
    settle(harness, first)
    harness.kv.states.drop_all()
    replayed = submit_with(590, length=700, attempt=52, seed=51)
    harness.submit(replayed)
    harness.run_until(lambda: images.num_asked(replayed) == 1)
    resolved = harness.event(replayed, Resolved)
    assert (resolved.effective_hit, resolved.replay_rows) == (640, 16)
    for _ in range(5):
        harness.turn()
    assert chunks_of(harness, replayed) == []
    images.deliver(replayed, 0)
    harness.run_until(lambda: any(isinstance(e, Computed) for e in harness.events_of(replayed)))
    settle(harness, replayed)


def test_needed_image_without_a_source_is_refused_with_a_new_plan(harness: RankHarness, images: Images) -> None:
    submit = submit_with(100, length=300, attempt=61, seed=61, has_source=False)
    harness.finish(submit, until=AttemptFailed)
    failed = harness.event(submit, AttemptFailed)
    assert (failed.reason, failed.retry, failed.phase) == ("EMBEDDING_GONE", "REPLAN", "IMAGES")
    assert "image 0 at tokens [100, 140)" in failed.public_message
    assert images.num_asked(submit) == 0
    harness.run_until(lambda: harness.is_released(submit))


def test_cancel_while_an_image_is_missing_gives_everything_back(harness: RankHarness, images: Images) -> None:
    submit = submit_with(100, 300, attempt=71, seed=71)
    harness.submit(submit)
    harness.run_until(lambda: images.num_asked(submit) == 1)
    images.deliver(submit, 0)
    harness.run_until(lambda: chunks_of(harness, submit) == [256])
    harness.send(Cancel(attempt_id=submit.attempt_id))
    harness.run_until(lambda: harness.is_released(submit))
    # Rows that were on their way then belong to nobody.
    images.deliver(submit, 1)
    harness.turn()


def test_rows_of_another_round_are_left_alone(harness: RankHarness, images: Images) -> None:
    submit = submit_with(100, length=300, attempt=81, seed=81)
    harness.submit(submit)
    harness.run_until(lambda: images.num_asked(submit) == 1)
    images.deliver(submit, 0, round=7)
    for _ in range(5):
        harness.turn()
    assert harness.attempt(submit).embeddings == {}
    images.deliver(submit, 0)
    harness.run_until(lambda: any(isinstance(e, Computed) for e in harness.events_of(submit)))
    settle(harness, submit)


def test_memory_that_was_given_back_is_not_read_again(harness: RankHarness, images: Images) -> None:
    submit = submit_with(60, 400, length=700, attempt=91, seed=91)
    harness.submit(submit)
    harness.run_until(lambda: images.num_asked(submit) == 1)
    images.deliver(submit, 0)
    harness.run_until(lambda: images.done(submit) == [0])
    images.poison(submit, 0)
    images.deliver(submit, 1)
    harness.run_until(lambda: any(isinstance(e, Computed) for e in harness.events_of(submit)))
    poisoned = blocks_of(harness, submit)
    settle(harness, submit)
    clean = msgspec.structs.replace(submit_with(60, 400, length=700, attempt=92, seed=91), cache_scope=b"clean")
    harness.submit(clean)
    harness.run_until(lambda: images.num_asked(clean) == 1)
    images.deliver(clean, 0)
    images.deliver(clean, 1)
    harness.run_until(lambda: any(isinstance(e, Computed) for e in harness.events_of(clean)))
    assert blocks_of(harness, clean) == poisoned
    settle(harness, clean)


def test_no_encoder_no_images(config: EngineConfig) -> None:
    rank = RankHarness(msgspec.structs.replace(config, vision=VisionConfig()))
    submit = submit_with(100, length=300, attempt=1)
    rank.finish(submit, until=AttemptFailed)
    failed = rank.event(submit, AttemptFailed)
    assert (failed.reason, failed.retry) == ("IMAGE_REJECTED", "OTHER_PE")
    assert "no vision encoder" in failed.public_message
    rank.close()
