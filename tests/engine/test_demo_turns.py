"""What the demo expects of its turns, turn by turn, and that it says where they differ."""

import msgspec
import pytest

from prefill_engine.client_images import PromptImage
from prefill_engine.demo_prompt import Prompt
from prefill_engine.demo_report import EncoderFigures, KvdFigures, SwapFigures, TurnReport
from prefill_engine.demo_turns import TURNS, Expected, Known, answer_problems, path_problems
from prefill_engine.probe_report import ProbeReport
from prefill_engine.timeline import (
    Accepted,
    AttemptRecord,
    Completed,
    FirstToken,
    HandoffState,
    RecordedEvent,
    StoreState,
    Usage,
)

LENGTHS = (576, 769, 962, 1989, 1989, 2182)
"""Of the prompts of TURNS at the default size; the screenshot is [1139, 1717)."""
NOBODY = EncoderFigures(
    num_images=0,
    num_patches=0,
    decode_seconds=0.0,
    queue_seconds=0.0,
    encode_seconds=0.0,
    total_seconds=0.0,
    streamed_bytes=0,
)


def prompt_of(length: int) -> Prompt:
    image = PromptImage(start=1139, tokens=578, width=1288, height=728, content_key=b"k" * 32, pixels=b"png")
    return Prompt(tokens=(1,) * length, images=(image,) if length > image.start else ())


def expectations() -> list[Expected]:
    known = Known(keep_tokens=140, window_tokens=128)
    expected = []
    for turn, length in zip(TURNS, LENGTHS, strict=True):
        if turn.kills_kvd:
            known.living.discard(turn.kills_kvd)
        expected.append(known.expect(turn, prompt_of(length)))
        known.note(turn, prompt_of(length), expected[-1])
    return expected


def test_turns_expect_hits_windows_and_calls_of_the_encoder() -> None:
    found = [(e.positions.hit_tokens, e.positions.replay_tokens, e.window_from, e.num_images) for e in expectations()]
    assert found == [
        (0, 0, "none", 0),
        (512, 0, "held", 0),
        (768, 0, "held", 0),
        (896, 0, "pulled", 1),
        (1792, 0, "held", 0),
        (1920, 128, "replay", 0),
    ]


def test_an_image_that_reaches_into_the_replay_is_expected_to_be_encoded_again() -> None:
    known = Known(keep_tokens=140, window_tokens=128, num_tokens=1800)
    expected = known.expect(TURNS[-1], prompt_of(1940))
    assert (expected.positions.hit_tokens, expected.positions.compute_start, expected.num_images) == (1792, 1664, 1)


def repeated(changes: dict[str, int]) -> AttemptRecord:
    """Turn 5 as it should be, but for changes of its usage."""
    usage = Usage(
        prompt_tokens=1989,
        cached_tokens=1792,
        computed_tokens=197,
        replayed_tokens=0,
        image_tokens=578,
        kv_bytes_moved=1,
    )
    accepted = Accepted(
        dp_rank=0,
        effective_hit=1792,
        replay_rows=0,
        compute_rows=197,
        predicted_wait_seconds=0.0,
        predicted_finish_seconds=0.1,
        deduplicated=False,
    )
    completed = Completed(
        usage=msgspec.structs.replace(usage, **changes),
        stages=(),
        handoff=HandoffState(state="DELIVERED", bytes_done=1, bytes_total=1),
        store=StoreState(blocks_committed=1, blocks_total=1, blocks_failed=0, snapshots=(1920,)),
    )
    bodies = (accepted, completed)
    events = tuple(
        RecordedEvent(seq=index + 1, since_accept_seconds=0.1, received_seconds=0.1, body=body)
        for index, body in enumerate(bodies)
    )
    return AttemptRecord(label="turn 5", request_id="r", prompt_tokens=1989, sent_at_seconds=0.0, events=events)


@pytest.mark.parametrize(
    ("changes", "num_images", "problems"),
    [
        ({}, 0, []),
        ({}, 1, ["images that the vision encoder counted: 1, expected 0"]),
        ({"cached_tokens": 896}, 0, ["hit: 896, expected 1792"]),
        ({"replayed_tokens": 128}, 0, ["window KV from: replay, expected held", "replayed rows: 128, expected 0"]),
    ],
    ids=["right", "encoder-called", "shorter-hit", "replayed"],
)
def test_path_problems_name_what_differs(changes: dict[str, int], num_images: int, problems: list[str]) -> None:
    record = repeated(changes)
    encoder = msgspec.structs.replace(NOBODY, num_images=num_images)
    assert path_problems(record, expectations()[4], encoder) == problems


def report(*, token: int, logprob: float, sha256: str) -> TurnReport:
    answer = RecordedEvent(
        seq=1, since_accept_seconds=0.0, received_seconds=0.0, body=FirstToken(token=token, logprob=logprob)
    )
    return TurnReport(
        record=msgspec.structs.replace(repeated({}), events=(answer,)),
        node="B",
        window_from="held",
        kvd=KvdFigures(pool_bytes=0, store_bytes=0, peer_bytes=0, pull_seconds=0.0, pull_failures=()),
        swap=SwapFigures(ready_seconds=(), stall_seconds=0.0),
        encoder=NOBODY,
        image_tokens=578,
        is_repeated=True,
        handoff_mode="pull",
        handoff_transport="tcp",
        handoff_bytes=1,
        stored_bytes=0,
        handed_sha256=sha256,
        probe=ProbeReport(
            prompt_tokens=1989,
            first_token=token,
            next_token=1,
            num_bytes=1,
            max_abs_diff=0.0,
            differing_blocks=0,
            num_blocks=15,
            windows_equal=True,
            is_replayed=False,
            cold_max_abs_diff=0.0,
            cold_kl=0.0,
            cold_same_token=True,
            problems=(),
        ),
        probe_seconds=0.1,
        problems=(),
    )


@pytest.mark.parametrize(
    ("token", "logprob", "sha256", "named"),
    [
        (7, -1.5, "aa", []),
        (8, -1.5, "aa", ["first token and its log-probability"]),
        (7, -1.5000001, "aa", ["first token and its log-probability"]),
        (7, -1.5, "ab", ["SHA-256 of what decode was handed"]),
    ],
    ids=["equal", "token", "logprob", "bytes"],
)
def test_answer_problems_name_what_a_repeated_turn_gave_otherwise(
    token: int, logprob: float, sha256: str, named: list[str]
) -> None:
    problems = answer_problems(
        report(token=token, logprob=logprob, sha256=sha256), report(token=7, logprob=-1.5, sha256="aa")
    )
    assert [problem.partition(":")[0] for problem in problems] == named
