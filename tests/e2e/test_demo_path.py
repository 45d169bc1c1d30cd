"""`prefill-engine demo` from end to end, on the smallest preset: two nodes, an encoder, six turns; and that nothing is left."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import pytest

from prefill_engine.__main__ import main
from prefill_engine.demo import DemoOptions, Narrator, Prepared, run_demo
from prefill_engine.demo_nodes import Cluster
from prefill_engine.demo_prompt import SCREENSHOT_NAME
from prefill_engine.demo_report import TurnReport
from prefill_engine.model.checkpoint_texts import check_texts, read_preset
from prefill_engine.model.checkpoint_writer import write_checkpoint
from prefill_engine.vision.image_intake import DEFAULT_POLICY, examine
from prefill_plan.errors import PeerError

SMALL = ("--preset", "tiny", "--prompt-tokens", "1200")
OPTIONS = {"preset": "tiny", "num_tokens": 1200}
PATIENCE_SECONDS = 120.0
MEMORY = Path("/dev/shm")


def is_running(pid: int) -> bool:
    """Not ended; a zombie has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def descendants(pid: int) -> set[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children")
    found = {int(each) for each in children.read_text().split()} if children.exists() else set()
    return found.union(*(descendants(each) for each in found))


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"not within {PATIENCE_SECONDS:g} s: {what}"
        time.sleep(0.02)


def demo_memory(pid: int) -> list[Path]:
    """Directories in memory of this process's demos; others may run at the same time."""
    return list(MEMORY.glob(f"prefill-demo-{pid}-*"))


def encoder_memory(pids: set[int]) -> list[str]:
    """Shared memory that these processes, encoders or engines, called theirs."""
    return [path.name for path in MEMORY.glob("prefill-ve.*") if any(f".{pid}." in path.name for pid in pids)]


class SeenEnoughError(Exception):
    """Ends a run after its first turn."""


class Watcher(Narrator):
    """Remembers processes and the first turn, then ends the run; may spoil it before, at two places."""

    def __init__(self, *, swaps_weights: bool = False, kills_engine: bool = False) -> None:
        self.cluster: Cluster | None = None
        self.problems: tuple[str, ...] = ()
        self._swaps_weights = swaps_weights
        self._kills_engine = kills_engine

    def prepared(self, prepared: Prepared) -> None:
        if self._swaps_weights:
            write_checkpoint(prepared.model, prepared.spec, read_preset("tiny"), seed=99, shard_bytes=1 << 30)

    def started(self, cluster: Cluster, *, seconds: float) -> None:
        del seconds
        self.cluster = cluster
        assert len(cluster.pids()) == 6
        assert all(is_running(pid) for pid in cluster.pids())
        if self._kills_engine:
            os.kill(cluster.nodes["A"].engine.pid, signal.SIGKILL)

    def turn_done(self, turn: TurnReport) -> None:
        self.problems = turn.problems
        raise SeenEnoughError

    def assert_nothing_left(self) -> None:
        assert self.cluster is not None
        assert [pid for pid in self.cluster.pids() if is_running(pid)] == []
        assert encoder_memory(set(self.cluster.pids())) == []
        assert not Path(self.cluster.nodes["A"].kvd.config.pool_path).parent.exists()


def section(text: str, turn: int) -> str:
    """What was printed of one turn."""
    return text.partition(f"\nturn {turn}, ")[2].partition("\nturn ")[0]


def rows(text: str) -> dict[str, str]:
    """Rows of a turn's section by name; the first of each name."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        found.setdefault(line[2:12].strip(), line[12:])
    return found


def test_demo_tells_six_verified_turns_on_two_nodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    others = descendants(os.getpid())  # of tests before this one in the same worker
    code = main(["demo", *SMALL, "--work-dir", str(tmp_path / "work")])
    text = capsys.readouterr().out
    assert code == 0, text
    assert text.isascii()
    assert max(len(line) for line in text.splitlines() if str(tmp_path) not in line) <= 120
    assert "READS SLOWED to 250 kB/s by the demo" in text
    assert "turn 1, node A, cold: rank 0, prompt 432 tokens = 0 hit + 432 new" in text
    assert "turn 3, node A, its engine was killed (-9) and restarted: rank 0, prompt 722 tokens" in text
    assert "snapshot PULLED from the peer's kvd over TCP" in section(text, 4)
    assert "of whole blocks read by key from the block store" in section(text, 4)
    assert "snapshot LOST: the peer's kvd is gone" in section(text, 6)
    assert "16 replayed to rebuild window KV" in section(text, 6)
    assert text.count("bit for bit") + text.count("bit\n             for bit") == 6
    assert "3,232 = 128 replayed + 3,104" in text
    assert "they say nothing about a GPU" in text
    table = [line.split("  ") for line in text.partition("The turns\n")[2].splitlines()[1:7]]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in table]
    assert [(row[1], row[6], row[7], row[8], row[-1]) for row in cells] == [
        ("A", "0", "-", "pull/tcp", "right"),
        ("A", "0", "own kvd", "push/tcp", "right"),
        ("A", "0", "own kvd", "pull/tcp", "right"),
        ("B", "1", "PULLED from peer", "store-only/tcp", "right"),
        ("B", "0", "own kvd", "pull/tcp", "right"),
        ("A", "0", "lost, REPLAYED", "pull/tcp", "right"),
    ]
    trace = json.loads((tmp_path / "work" / "trace.json").read_bytes())
    processes = [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"]
    assert [name.partition(",")[0] for name in processes] == [f"turn {number}" for number in range(1, 7)]
    assert demo_memory(os.getpid()) == []
    left = {pid for pid in descendants(os.getpid()) - others if is_running(pid)}
    assert [Path(f"/proc/{pid}/cmdline").read_text() for pid in left] == []
    _check_screenshot_turns(text)


def _check_screenshot_turns(text: str) -> None:
    """The encoder is asked once, for the first of the two equal turns, while the hit comes in; the second asks nobody."""
    first, again = rows(section(text, 4)), rows(section(text, 5))
    assert {"images", "ve decode", "ve queue", "ve encode", "ve rows", "swap-in", "compute"} <= first.keys()
    spec = check_texts(read_preset("tiny"), source="tiny").vision
    assert spec is not None
    screenshot = (files("prefill_engine") / "data" / SCREENSHOT_NAME).read_bytes()
    plan = examine(screenshot, policy=DEFAULT_POLICY, final=None, spec=spec).plan
    assert f"{plan.tokens} rows of 1 image from the vision encoder" in first["images"]
    assert f"{plan.num_patches} patches" in first["ve encode"]
    assert "from its shared memory, checked" in first["ve rows"]
    assert f"called once, by its own counters: {plan.num_patches} patches" in first["encoder"]
    groups = [name for name in first if name.startswith("group ")]
    assert len(groups) > 1, first
    assert "ve encode" not in again
    assert again["encoder"].strip().startswith("NOT CALLED, by its own counters: 0 images and 0 patches")
    assert f"{plan.tokens} tokens, all in the cache" in again["images"]
    assert "equal to the turn before: the same first token" in again["answer"]


def test_demo_with_other_weights_in_the_engine_is_found_out(tmp_path: Path) -> None:
    watcher = Watcher(swaps_weights=True)
    with pytest.raises(SeenEnoughError):
        run_demo(DemoOptions(work_dir=tmp_path, **OPTIONS), watcher)
    assert any(problem.startswith("logits differ") for problem in watcher.problems)
    watcher.assert_nothing_left()


def test_demo_whose_engine_dies_shows_its_log_and_leaves_no_process(tmp_path: Path) -> None:
    watcher = Watcher(kills_engine=True)
    with pytest.raises(PeerError, match="UNAVAILABLE") as caught:
        run_demo(DemoOptions(work_dir=tmp_path, **OPTIONS), watcher)
    assert "engine of node A:\n  | {" in str(caught.value)
    watcher.assert_nothing_left()


@pytest.mark.parametrize("when", ["starting", "running"])
def test_interrupted_demo_leaves_no_process_and_no_file(tmp_path: Path, when: str) -> None:
    command = ["env", f"TMPDIR={tmp_path}", sys.executable, "-m", "prefill_engine", "demo", *SMALL]
    demo = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert demo.stdout is not None
    if when == "running":
        while not demo.stdout.readline().startswith("turn 1"):
            assert demo.poll() is None
    else:
        wait_until(lambda: len(descendants(demo.pid)) >= 3, "its first children")
    started = descendants(demo.pid)
    demo.send_signal(signal.SIGINT)
    demo.send_signal(signal.SIGTERM)
    demo.communicate(timeout=PATIENCE_SECONDS)
    assert demo.returncode in (128 + signal.SIGINT, 128 + signal.SIGTERM)
    wait_until(lambda: not any(is_running(pid) for pid in started), "the end of every process")
    assert len(started) >= 3
    assert encoder_memory(started) == []
    assert demo_memory(demo.pid) == []
    assert list(tmp_path.iterdir()) == []


def test_used_work_dir_and_a_short_prompt_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "old").touch()
    assert main(["demo", "--work-dir", str(tmp_path)]) == 2
    assert "is not empty (it has old)" in capsys.readouterr().err
    assert main(["demo", "--prompt-tokens", "100"]) == 2
    assert "expected at least 1200" in capsys.readouterr().err
