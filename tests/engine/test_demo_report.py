"""What the demo reads off the processes' own counters, and the stages it makes of that."""

import msgspec
import pytest

from prefill_engine.demo_report import (
    SwapFigures,
    encoder_stages,
    group_stages,
    read_encoder_figures,
    read_swap_figures,
)
from prefill_engine.timeline import (
    AttemptRecord,
    ChunkDone,
    Completed,
    ImageReady,
    RecordedEvent,
    Stage,
    Usage,
    render_timeline,
)

DELAY = 0.010
BEFORE = {
    've_images_total{outcome="encoded",reason=""}': 3.0,
    "ve_patches_total": 9000.0,
    've_stage_seconds_sum{stage="vit"}': 1.0,
    "ve_image_seconds_sum": 2.0,
}
AFTER = {
    've_images_total{outcome="encoded",reason=""}': 4.0,
    "ve_patches_total": 13_784.0,
    've_stage_seconds_sum{stage="queue"}': 0.004,
    've_stage_seconds_sum{stage="decode"}': 0.030,
    've_stage_seconds_sum{stage="h2d"}': 0.001,
    've_stage_seconds_sum{stage="vit"}': 1.150,
    've_stage_seconds_sum{stage="align"}': 0.040,
    've_stage_seconds_sum{stage="deliver"}': 0.009,
    "ve_image_seconds_sum": 2.250,
}


def record_with_image() -> AttemptRecord:
    """A hit in three groups and an image that came 300 ms after acceptance, 280 ms after it was asked for."""
    usage = Usage(
        prompt_tokens=1989,
        cached_tokens=896,
        computed_tokens=1093,
        replayed_tokens=0,
        image_tokens=578,
        kv_bytes_moved=0,
    )
    stages = (
        Stage(phase="IMAGES", start_seconds=0.020, length_seconds=0.280, note=""),
        Stage(phase="SWAP_IN", start_seconds=0.010, length_seconds=0.390, note=""),
        Stage(phase="COMPUTE", start_seconds=0.120, length_seconds=0.780, note=""),
    )
    timed = (
        (0.300, ImageReady(index=0, ready=True, rows=578, took_seconds=0.280)),
        (0.400, ChunkDone(rows_done=128, rows_total=1093, chunk_rows=128, step_seconds=0.280, step_id=1)),
        (0.900, ChunkDone(rows_done=1093, rows_total=1093, chunk_rows=965, step_seconds=0.500, step_id=2)),
        (0.900, Completed(usage=usage, stages=stages, handoff=None, store=None)),
    )
    events = tuple(
        RecordedEvent(seq=index + 1, since_accept_seconds=at, received_seconds=at + DELAY, body=body)
        for index, (at, body) in enumerate(timed)
    )
    return AttemptRecord(label="turn", request_id="r", prompt_tokens=1989, sent_at_seconds=0.0, events=events)


def test_encoder_figures_are_what_grew() -> None:
    figures = read_encoder_figures(BEFORE, AFTER)
    assert (figures.num_images, figures.num_patches, figures.streamed_bytes) == (1, 4784, 0)
    assert figures.queue_seconds == pytest.approx(0.004)
    assert figures.decode_seconds == pytest.approx(0.030)
    assert figures.encode_seconds == pytest.approx(0.200)
    assert figures.total_seconds == pytest.approx(0.250)
    assert read_encoder_figures(AFTER, AFTER).num_images == 0


@pytest.mark.parametrize("outcome", ['outcome="encoded",reason=""', 'outcome="failed",reason="IMAGE_REJECTED"'])
def test_every_ended_call_counts_whatever_its_end(outcome: str) -> None:
    assert read_encoder_figures({}, {f"ve_images_total{{{outcome}}}": 2.0}).num_images == 2


def test_encoder_stages_fill_the_time_between_asking_and_having() -> None:
    stages = encoder_stages(record_with_image(), read_encoder_figures(BEFORE, AFTER))
    spans = [(stage.phase, stage.start_seconds, stage.start_seconds + stage.length_seconds) for stage in stages]
    assert spans == [
        ("VE_DECODE", pytest.approx(0.030), pytest.approx(0.060)),
        ("VE_QUEUE", pytest.approx(0.060), pytest.approx(0.064)),
        ("VE_ENCODE", pytest.approx(0.080), pytest.approx(0.280)),
        ("VE_ROWS", pytest.approx(0.280), pytest.approx(0.310)),
    ]
    assert stages[-1].note == "to the engine, from its shared memory, checked"


def test_a_prompt_whose_image_was_not_asked_for_has_no_encoder_stages() -> None:
    assert encoder_stages(record_with_image(), read_encoder_figures(AFTER, AFTER)) == ()


def test_swap_figures_are_of_this_turn_and_may_be_behind() -> None:
    def metrics(*sums: float, count: float, stall: float) -> dict[str, float]:
        found = {f'pe_kv_group_ready_seconds_sum{{group="{group}"}}': value for group, value in enumerate(sums)}
        found |= {f'pe_kv_group_ready_seconds_count{{group="{group}"}}': count for group in range(len(sums))}
        return found | {'kv_swapin_stall_seconds_total{group="1"}': stall}

    before = metrics(1.0, 2.0, 3.0, count=4.0, stall=0.5)
    figures = read_swap_figures(before, metrics(1.1, 2.2, 3.4, count=5.0, stall=0.75))
    assert figures.ready_seconds == (pytest.approx(0.1), pytest.approx(0.2), pytest.approx(0.4))
    assert figures.stall_seconds == pytest.approx(0.25)
    assert read_swap_figures(before, before).ready_seconds == ()


def test_picture_has_groups_and_encoder_under_queue_and_compute() -> None:
    record = record_with_image()
    swap = SwapFigures(ready_seconds=(0.1, 0.2, 0.39), stall_seconds=0.0)
    encoder = encoder_stages(record, read_encoder_figures(BEFORE, AFTER))
    stages = (*group_stages(record, swap), *encoder)
    lines = render_timeline(msgspec.structs.replace(record, own_stages=stages)).splitlines()
    assert lines[1:14] == [
        "             0 ms    200     400     600     800     1,000",
        "  images      ###########|                                280 ms  578 rows of 1 image from the vision encoder",
        "  ve decode   #|                                           30 ms  CPU time of a confined worker",
        "  ve queue     #|                                         4.0 ms  waiting there",
        "  ve encode     ########|                                 200 ms  4,784 patches",
        "  ve rows               #|                                 30 ms  to the engine, from its shared memory, checked",
        "  swap-in     ###############|                            390 ms",
        "  group 1/3   ####|                                       100 ms  20.0 to 120.0 ms",
        "  group 2/3       ####|                                   100 ms  120.0 to 220.0 ms",
        "  group 3/3           #######|                            190 ms  220.0 to 410.0 ms",
        "  compute         ###############################|        780 ms  1,093 rows in 2 chunks",
        "  chunk 1/2       ###########|                            280 ms  128 rows, images still coming",
        "  chunk 2/2                  ####################|        500 ms  965 rows",
    ]
