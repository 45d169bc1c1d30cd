"""State, health and load figures as pure functions; exit codes after a rank's death; the termination message."""

import json
from pathlib import Path

import pytest

from prefill_engine.front.exits import Ending, judge_rank_loss, termination_json, write_termination
from prefill_engine.front.health import EngineState, RankPulse, is_live, is_serving, is_wedged, judge_state
from prefill_engine.front.load import LoadBoard, predicted_compute_seconds, predicted_wait_seconds
from prefill_engine.messages import Beat, Progress, RankFailed
from prefill_plan.errors import ExitCode
from prefill_testing.fake_rank import load_message


@pytest.mark.parametrize(
    ("silence", "layer_ms", "wedged"),
    [(4.9, 0.0, False), (5.1, 0.0, True), (5.1, 600.0, False), (6.1, 600.0, True)],
    ids=["under-5s", "over-5s", "slow-layers", "over-ten-layers"],
)
def test_wedged_is_silence_over_five_seconds_or_ten_layers(silence: float, layer_ms: float, wedged: bool):
    assert is_wedged(RankPulse(last_sign=100.0, predicted_layer_ms=layer_ms), now=100.0 + silence) is wedged


@pytest.mark.parametrize(
    ("ready", "draining", "degraded", "silence", "state"),
    [
        (False, False, False, 0.0, EngineState.STARTING),
        (True, False, False, 0.0, EngineState.READY),
        (True, False, True, 0.0, EngineState.DEGRADED),
        (True, True, True, 0.0, EngineState.DRAINING),
        (False, True, False, 0.0, EngineState.DRAINING),
        (True, True, True, 9.0, EngineState.WEDGED),
    ],
)
def test_state_order(ready: bool, draining: bool, degraded: bool, silence: float, state: EngineState):
    pulses = [RankPulse(last_sign=0.0, predicted_layer_ms=0.0)]
    assert judge_state(ready=ready, draining=draining, degraded=degraded, pulses=pulses, now=silence) is state


def test_liveness_fails_only_when_wedged_and_readiness_needs_ready_or_degraded():
    assert [state for state in EngineState if not is_live(state)] == [EngineState.WEDGED]
    assert [state for state in EngineState if is_serving(state)] == [EngineState.READY, EngineState.DEGRADED]


def board() -> LoadBoard:
    return LoadBoard(num_ranks=1, chunk_rows=100, epoch=1, started=0.0)


def test_silent_rank_without_work_is_not_wedged_but_one_with_work_is():
    loads = board()
    view = loads.view(now=100.0, draining=False, working_since={}, tickets_open={})
    assert view.state is EngineState.STARTING
    view = loads.view(now=100.0, draining=False, working_since={0: 90.0}, tickets_open={})
    assert view.state is EngineState.WEDGED


def test_beat_ends_the_silence():
    loads = board()
    loads.note_beat(Beat(rank=0, step_id=1, layer=3, predicted_layer_ms=1.0, at_ns=98_000_000_000))
    view = loads.view(now=100.0, draining=False, working_since={0: 90.0}, tickets_open={})
    assert view.state is not EngineState.WEDGED
    assert view.last_step_age_seconds == pytest.approx(2.0)


def test_predicted_wait_is_rows_left_times_cost_and_zero_when_idle():
    # 0.5 ms a row and 10 ms a step of 100 rows.
    assert predicted_wait_seconds(load_message(0, waiting_rows=1000), chunk_rows=100) == pytest.approx(0.6)
    assert predicted_wait_seconds(load_message(0), chunk_rows=100) == 0.0


def test_backlog_is_that_of_the_rank_with_the_most_rows():
    loads = LoadBoard(num_ranks=2, chunk_rows=100, epoch=1, started=0.0)
    idle = loads.view(now=1.0, draining=False, working_since={}, tickets_open={})
    for rank, rows in ((0, 1000), (1, 500)):
        loads.note_load(load_message(rank, waiting_rows=rows))
    view = loads.view(now=1.0, draining=False, working_since={}, tickets_open={})
    assert (idle.backlog_seconds, view.backlog_seconds) == (0.0, pytest.approx(0.6))


def progress(rank: int, *, done: int, total: int, stage: str = "load", unit: str = "bytes") -> Progress:
    return Progress(rank=rank, stage=stage, done=done, total=total, unit=unit, item="", at_ns=0)


def test_weights_of_all_ranks_are_told_once_each_has_said_its_part():
    loads = LoadBoard(num_ranks=2, chunk_rows=100, epoch=1, started=0.0)
    told = []
    for message in (
        progress(0, done=10, total=100),
        progress(1, done=5, total=60),
        progress(1, done=60, total=60),
        progress(1, done=0, total=1, stage="warmup", unit="passes"),
    ):
        loads.note_progress(message)
        view = loads.view(now=1.0, draining=False, working_since={}, tickets_open={})
        told.append((view.weight_bytes_loaded, view.weight_bytes_total))
    assert told == [(0, 0), (15, 160), (70, 160), (70, 160)]


def test_predicted_compute_counts_the_context():
    model = load_message(0).step_model
    seconds = predicted_compute_seconds(model, rows=1000, context=10_000, chunk_rows=100)
    assert seconds == pytest.approx(0.6 + 0.01)


def test_store_trouble_degrades():
    loads = LoadBoard(num_ranks=0, chunk_rows=100, epoch=1, started=0.0)
    loads.note_load(load_message(0, store_ok=False))
    assert loads.view(now=1.0, draining=False, working_since={}, tickets_open={}).state is EngineState.DEGRADED


def test_admitted_since_gives_each_watcher_what_is_new_to_it():
    loads = board()
    for name in (b"a", b"b", b"c"):
        loads.note_admitted(name)
    assert loads.admitted_since(1) == [b"b", b"c"]
    assert loads.admitted_since(3) == []


def report(rank: int, code: int) -> RankFailed:
    return RankFailed(rank=rank, exit_code=code, code="X", phase="warmup", detail=f"detail of {rank}")


@pytest.mark.parametrize(
    ("exits", "reports", "expected"),
    [
        ([(0, -9)], [], (ExitCode.RANK_LOST, 0)),
        ([(0, 12)], [], (ExitCode.OUT_OF_MEMORY_LOAD, 0)),
        ([(1, 16), (0, 12)], [report(0, 12)], (ExitCode.OUT_OF_MEMORY_LOAD, 0)),
        ([(0, 12)], [report(0, 12), report(1, 14)], (ExitCode.GPU_FAULT, 1)),
        ([(0, 17), (1, 15)], [], (ExitCode.NETWORK, 1)),
        ([(0, 11)], [report(0, 11)], (ExitCode.CHECKPOINT, 0)),
        ([(2, 1)], [report(2, 1)], (ExitCode.RANK_LOST, 2)),
    ],
    ids=["killed", "code-only", "oom-behind-16", "gpu-before-oom", "network-before-store", "checkpoint", "unknown"],
)
def test_first_specific_code_names_the_ending(
    exits: list[tuple[int, int]], reports: list[RankFailed], expected: tuple[ExitCode, int]
):
    ending = judge_rank_loss(exit_codes=exits, reports=reports, phase="serve")
    assert (ending.exit_code, ending.rank) == expected


def test_termination_message_is_json_of_at_most_4096_bytes():
    ending = Ending(exit_code=ExitCode.OUT_OF_MEMORY_LOAD, phase="warmup", rank=3, detail='"\u0001' * 5000)
    data = termination_json(ending, plan_hash="abc")
    message = json.loads(data)
    assert len(data) <= 4096
    assert (message["v"], message["code"], message["exit"], message["phase"]) == (1, "CudaOom", 12, "warmup")
    assert (message["rank"], message["planHash"]) == (3, "abc")


def test_termination_message_is_written_only_where_the_file_exists(tmp_path: Path):
    path = tmp_path / "termination-log"
    write_termination(path, b"x")
    assert not path.exists()
    path.touch()
    write_termination(path, b"x")
    assert path.read_bytes() == b"x"
