"""The text timeline of a recorded attempt, as whole tables."""

import msgspec
import pytest

from prefill_engine.timeline import (
    Accepted,
    AttemptRecord,
    ChunkDone,
    Completed,
    EventBody,
    FirstToken,
    HandoffState,
    Queued,
    RecordedEvent,
    Stage,
    StoreState,
    SwapIn,
    Usage,
    build_spans,
    clock_offset,
    group_spans,
    last_event,
    render_timeline,
    window_source,
)
from prefill_engine.timeline_bars import (
    PLAIN_STYLE,
    TERMINAL_STYLE,
    format_bytes,
    format_ms,
)

DELAY = 0.010
"""Seconds from sending to acceptance in the records below."""


def accepted(hit: int, replay: int, compute: int) -> Accepted:
    return Accepted(
        dp_rank=2,
        effective_hit=hit,
        replay_rows=replay,
        compute_rows=compute,
        predicted_wait_seconds=0.0,
        predicted_finish_seconds=0.1,
        deduplicated=False,
    )


def recorded(*timed: tuple[float, EventBody]) -> tuple[RecordedEvent, ...]:
    return tuple(
        RecordedEvent(seq=index + 1, since_accept_seconds=at, received_seconds=at + DELAY, body=body)
        for index, (at, body) in enumerate(timed)
    )


def worked_example() -> AttemptRecord:
    """serving.md 0.1, window snapshot lost: 100,000 tokens, hit 96,896, 128 replayed."""
    store = StoreState(blocks_committed=24, blocks_total=24, blocks_failed=0, snapshots=(99_840, 99_968))
    handoff = HandoffState(state="DELIVERED", bytes_done=92_214_368, bytes_total=92_214_368)
    usage = Usage(
        prompt_tokens=100_000,
        cached_tokens=96_896,
        computed_tokens=3_104,
        replayed_tokens=128,
        image_tokens=0,
        kv_bytes_moved=92_214_368,
    )
    stages = (
        Stage(phase="QUEUE", start_seconds=0.0, length_seconds=0.040, note=""),
        Stage(phase="SWAP_IN", start_seconds=0.0, length_seconds=0.005, note=""),
        Stage(phase="COMPUTE", start_seconds=0.040, length_seconds=0.060, note=""),
        Stage(phase="STORE", start_seconds=0.100, length_seconds=0.0, note="file store"),
        Stage(phase="HANDOFF", start_seconds=0.100, length_seconds=0.090, note=""),
    )
    events = recorded(
        (0.000, accepted(96_896, 128, 3_104)),
        (0.001, Queued(ahead_requests=1, ahead_rows=900, waiting_for="QUEUE")),
        (0.005, SwapIn(layers_ready=4, layers_total=4, num_bytes=86_237_440, hit_shrunk_to=0)),
        (0.100, ChunkDone(rows_done=3_232, rows_total=3_232, chunk_rows=3_232, step_seconds=0.060, step_id=7)),
        (0.100, FirstToken(token=5, logprob=-0.5)),
        (0.100, store),
        (0.190, handoff),
        (0.190, Completed(usage=usage, stages=stages, handoff=handoff, store=store)),
    )
    probe = Stage(phase="PROBE", start_seconds=0.160, length_seconds=0.040, note="equal")
    return AttemptRecord(
        label="turn 3",
        request_id="r-3",
        prompt_tokens=100_000,
        sent_at_seconds=50.0,
        events=events,
        own_stages=(probe,),
    )


def test_timeline_of_a_completed_attempt() -> None:
    assert render_timeline(worked_example(), width=40).splitlines() == [
        "turn 3: rank 2, prompt 100,000 tokens = 96,896 hit + 3,104 new",
        "             0 ms      50        100       150       200",
        "  queue        ########|                                   40 ms",
        "  swap-in      #|                                         5.0 ms  86.2 MB of hit blocks, 17.2 GB/s",
        "  compute              ############|                       60 ms  3,232 rows in 1 chunk",
        "  store                            |                      0.0 ms  24/24 blocks",
        "  hand-off                         ##################|     90 ms  92.2 MB, DELIVERED",
        "  the swap-in by layer groups, on a scale of its own that begins 10 ms after sending",
        "             0 ms    10      20      30      40      50",
        "  group 1-4  ####|                                        5.0 ms  10.0 to 15.0 ms",
        "  compute                                    #####|       6.0 ms  from 50.0 ms on; only this much of it is drawn",
        "  tokens     100,000 = 96,896 from the cache + 3,104 computed, 128 replayed to rebuild window KV",
        "  blocks     24 of 24 new blocks stored, window snapshots at 99,840 and 99,968",
        "  TTFT       110 ms from sending to the first token",
    ]


def with_groups() -> AttemptRecord:
    """The worked example with its hit arriving group by group while the first layers are computed; told after the step."""
    record = worked_example()
    done = last_event(record, Completed)
    assert done is not None
    stages = [msgspec.structs.replace(stage) for stage in done.stages]
    stages[0] = Stage(phase="QUEUE", start_seconds=0.0, length_seconds=0.002, note="")
    stages[1] = Stage(phase="SWAP_IN", start_seconds=0.001, length_seconds=0.008, note="")
    stages[2] = Stage(phase="COMPUTE", start_seconds=0.003, length_seconds=0.097, note="")
    groups = [(0.0025, 1, 17_247_488), (0.004, 2, 34_494_976), (0.0055, 3, 51_742_464), (0.009, 4, 86_237_440)]
    events = recorded(
        (0.000, accepted(96_896, 128, 3_104)),
        *((at, SwapIn(layers_ready=n, layers_total=4, num_bytes=size, hit_shrunk_to=0)) for at, n, size in groups),
        (0.190, msgspec.structs.replace(done, stages=tuple(stages))),
    )
    return msgspec.structs.replace(record, events=events, own_stages=())


def test_layer_groups_are_drawn_under_the_computation_on_their_own_scale() -> None:
    lines = render_timeline(with_groups(), width=40).splitlines()
    start = next(index for index, line in enumerate(lines) if "layer groups" in line)
    assert lines[start : start + 7] == [
        "  the swap-in by layer groups, on a scale of its own that begins 11 ms after sending",
        "             0 ms    2       4       6       8       10",
        "  group 1/4  ######|                                      1.5 ms  11.0 to 12.5 ms",
        "  group 2/4        ######|                                1.5 ms  12.5 to 14.0 ms",
        "  group 3/4              ######|                          1.5 ms  14.0 to 15.5 ms",
        "  group 4/4                    ##############|            3.5 ms  15.5 to 19.0 ms",
        "  compute            #############################|       7.2 ms  from 13.0 ms on; only this much of it is drawn",
    ]
    assert [(span.name, span.note) for span in group_spans(with_groups())] == [
        ("group 1/4", "11.0 to 12.5 ms"),
        ("group 2/4", "12.5 to 14.0 ms"),
        ("group 3/4", "14.0 to 15.5 ms"),
        ("group 4/4", "15.5 to 19.0 ms"),
    ]


def test_groups_that_came_together_are_one_row() -> None:
    assert [span.name for span in group_spans(worked_example())] == ["group 1-4"]


@pytest.mark.parametrize(
    ("hit", "planned", "replayed", "source"),
    [
        (0, 0, 0, "none"),
        (256, 0, 0, "held"),
        (256, 128, 0, "pulled"),
        (256, 128, 128, "replay"),
        (256, 0, 128, "replay"),
    ],
    ids=["no-hit", "held", "pulled", "replay", "held-but-lost"],
)
def test_window_source_is_what_was_done_with_what_was_planned(
    hit: int, planned: int, replayed: int, source: str
) -> None:
    usage = Usage(
        prompt_tokens=512,
        cached_tokens=hit,
        computed_tokens=512 - hit,
        replayed_tokens=replayed,
        image_tokens=0,
        kv_bytes_moved=0,
    )
    done = Completed(usage=usage, stages=(), handoff=None, store=None)
    events = recorded((0.0, accepted(hit, planned, 512 - hit + planned)), (0.1, done))
    assert window_source(msgspec.structs.replace(worked_example(), events=events)) == source


def test_timeline_of_a_failed_attempt_comes_from_its_events() -> None:
    record = AttemptRecord(
        label="request",
        request_id="r-4",
        prompt_tokens=300,
        sent_at_seconds=0.0,
        events=recorded(
            (0.000, accepted(0, 0, 300)),
            (0.300, ChunkDone(rows_done=200, rows_total=300, chunk_rows=200, step_seconds=0.200, step_id=7)),
        ),
        error="127.0.0.1:1: RANK_LOST in phase COMPUTE: rank 2 is gone; retry: OTHER_PE",
    )
    assert render_timeline(record, width=40).splitlines() == [
        "request: rank 2, prompt 300 tokens = 0 hit + 300 new",
        "             0 ms      100       200       300       400",
        "  queue       ##########|                                 100 ms",
        "  compute               ####################|             200 ms  200 rows in 1 chunk",
        "  failed     127.0.0.1:1: RANK_LOST in phase COMPUTE: rank 2 is gone; retry: OTHER_PE",
    ]


def test_timeline_of_a_refused_request() -> None:
    record = AttemptRecord(
        label="request", request_id="r", prompt_tokens=9, sent_at_seconds=0.0, events=(), error="QUEUE_FULL"
    )
    assert render_timeline(record).splitlines() == [
        "request: prompt 9 tokens, not accepted",
        "  failed     QUEUE_FULL",
    ]


def test_plain_timeline_is_ascii_and_terminal_style_adds_only_decoration() -> None:
    plain = render_timeline(worked_example(), style=PLAIN_STYLE)
    styled = render_timeline(worked_example(), style=TERMINAL_STYLE)
    assert plain.isascii()
    for code in (TERMINAL_STYLE.strong, TERMINAL_STYLE.quiet, TERMINAL_STYLE.reset):
        styled = styled.replace(code, "")
    styled = styled.replace(TERMINAL_STYLE.bar, "#").replace(TERMINAL_STYLE.bar_end, "|")
    assert [line.rstrip() for line in styled.splitlines()] == plain.splitlines()


def test_failed_blocks_and_shrunk_hits_are_shown() -> None:
    store = StoreState(blocks_committed=1, blocks_total=3, blocks_failed=2, snapshots=())
    swap = SwapIn(layers_ready=4, layers_total=4, num_bytes=999, hit_shrunk_to=128)
    usage = Usage(
        prompt_tokens=512,
        cached_tokens=128,
        computed_tokens=384,
        replayed_tokens=0,
        image_tokens=0,
        kv_bytes_moved=0,
    )
    stages = (Stage(phase="SWAP_IN", start_seconds=0.0, length_seconds=0.0, note=""),)
    done = Completed(usage=usage, stages=stages, handoff=None, store=store)
    record = AttemptRecord(
        label="request",
        request_id="r",
        prompt_tokens=512,
        sent_at_seconds=0.0,
        events=recorded((0.0, accepted(256, 0, 256)), (0.01, swap), (0.02, done)),
    )
    text = render_timeline(record)
    assert "999 B of hit blocks, hit shrunk to 128" in text
    assert "1 of 3 new blocks stored, 2 FAILED, no window snapshot" in text


def test_clock_offset_is_the_smallest_delay() -> None:
    slow = RecordedEvent(seq=2, since_accept_seconds=1.0, received_seconds=1.5, body=FirstToken(token=1, logprob=0.0))
    record = worked_example()
    record = msgspec.structs.replace(record, events=(*record.events, slow))
    assert clock_offset(record) == pytest.approx(DELAY)


def test_spans_are_in_phase_order_and_on_the_clients_clock() -> None:
    spans = build_spans(worked_example())
    assert [span.name for span in spans] == ["queue", "swap-in", "compute", "store", "hand-off", "probe"]
    assert spans[0].start == pytest.approx(DELAY)
    assert spans[-1].start == pytest.approx(0.160)


def test_records_survive_json() -> None:
    record = worked_example()
    assert msgspec.json.decode(msgspec.json.encode(record), type=AttemptRecord) == record


def test_width_below_ten_is_refused() -> None:
    with pytest.raises(ValueError, match="width 9"):
        render_timeline(worked_example(), width=9)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1_415_040, "1.42 MB"),
        (86_237_440, "86.2 MB"),
        (155_000_000, "155 MB"),
        (2e9, "2.00 GB"),
    ],
)
def test_format_bytes(num_bytes: float, text: str) -> None:
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0, "0.0 ms"), (0.00123, "1.2 ms"), (0.0123, "12 ms"), (12.3, "12,300 ms")]
)
def test_format_ms(seconds: float, text: str) -> None:
    assert format_ms(seconds) == text
