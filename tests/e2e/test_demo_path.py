"""`prefill-engine demo` from end to end, on the smallest preset."""

import json
import os
from pathlib import Path

import pytest

from prefill_engine.__main__ import main
from prefill_engine.demo import DemoOptions, Narrator, Prepared, TurnReport, run_demo
from prefill_engine.local_engine import LocalEngine
from prefill_engine.model.checkpoint_texts import read_preset
from prefill_engine.model.checkpoint_writer import write_checkpoint
from prefill_plan.errors import PeerError

SMALL = ("--preset", "tiny", "--prompt-tokens", "900")


def is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


class SeenEnoughError(Exception):
    """Ends a run after its first turn."""


class Watcher(Narrator):
    """Remembers engine processes and the first turn, then ends the run; may spoil it before, at two places."""

    def __init__(self, *, swaps_weights: bool = False, kills_engine: bool = False) -> None:
        self.pids: list[int] = []
        self.problems: tuple[str, ...] = ()
        self._swaps_weights = swaps_weights
        self._kills_engine = kills_engine

    def prepared(self, prepared: Prepared) -> None:
        if self._swaps_weights:
            write_checkpoint(prepared.model, prepared.spec, read_preset("tiny"), seed=99, shard_bytes=1 << 30)

    def engine_ready(self, engine: LocalEngine, *, seconds: float, is_restart: bool) -> None:
        del seconds, is_restart
        self.pids.append(engine.pid)
        if self._kills_engine:
            os.kill(engine.pid, 9)

    def turn_done(self, turn: TurnReport) -> None:
        self.problems = turn.problems
        raise SeenEnoughError


def test_demo_tells_three_verified_turns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["demo", *SMALL, "--work-dir", str(tmp_path / "work")])
    text = capsys.readouterr().out
    assert code == 0
    assert text.isascii()
    assert "turn 1, cold: rank 0, prompt 630 tokens = 0 hit + 630 new" in text
    assert "turn 2, one turn longer: rank 0, prompt 784 tokens = 512 hit + 272 new" in text
    assert "turn 3, after the engine was killed: rank 0, prompt 902 tokens = 768 hit + 134 new" in text
    assert "16 replayed to rebuild window KV" in text
    assert text.count("bit for bit") == 3
    assert "96,896 = 757 blocks" in text
    assert "3,232 = 128 replayed + 3,104" in text
    assert "they say nothing about a GPU" in text
    trace = json.loads((tmp_path / "work" / "trace.json").read_bytes())
    processes = [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"]
    assert processes == ["turn 1, cold", "turn 2, one turn longer", "turn 3, after the engine was killed"]


def test_demo_with_other_weights_in_the_engine_is_found_out(tmp_path: Path) -> None:
    watcher = Watcher(swaps_weights=True)
    with pytest.raises(SeenEnoughError):
        run_demo(DemoOptions(work_dir=tmp_path, preset="tiny", num_tokens=400), watcher)
    assert any(problem.startswith("logits differ") for problem in watcher.problems)
    assert [pid for pid in watcher.pids if is_running(pid)] == []


def test_demo_whose_engine_dies_shows_its_log_and_leaves_no_process(tmp_path: Path) -> None:
    watcher = Watcher(kills_engine=True)
    with pytest.raises(PeerError, match="UNAVAILABLE") as caught:
        run_demo(DemoOptions(work_dir=tmp_path, preset="tiny", num_tokens=400), watcher)
    assert "  | {" in str(caught.value)
    assert [pid for pid in watcher.pids if is_running(pid)] == []


def test_used_work_dir_and_a_short_prompt_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "old").touch()
    assert main(["demo", "--work-dir", str(tmp_path)]) == 2
    assert "is not empty (it has old)" in capsys.readouterr().err
    assert main(["demo", "--prompt-tokens", "100"]) == 2
    assert "expected at least 400" in capsys.readouterr().err
