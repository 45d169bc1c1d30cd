"""What a load reports, and how a terminal and a log show it."""

import io
import logging
from pathlib import Path

import torch

from prefill_engine.model.load_progress import console_progress
from prefill_engine.model.weights import load_parameters
from prefill_plan.model_spec import load_model_spec

GOLDEN = Path(__file__).parents[1] / "golden"
FIRST = "model-00001-of-00002.safetensors"
SECOND = "model-00002-of-00002.safetensors"


def load_with(progress):
    spec = load_model_spec(GOLDEN / "tiny_quant")
    experts = range(spec.num_experts)
    load_parameters(GOLDEN / "tiny_quant", spec, device=torch.device("cpu"), expert_range=experts, progress=progress)


def test_progress_grows_shard_by_shard_to_the_total():
    seen = []

    load_with(seen.append)

    done = [report.done_bytes for report in seen]
    assert done == sorted(done)
    assert seen[-1].done_bytes == seen[-1].total_bytes
    assert [(r.shard, r.num_shards, r.name) for r in seen if r.shard_done] == [(1, 2, FIRST), (2, 2, SECOND)]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_console_shows_a_bar_on_a_terminal():
    terminal = Terminal()

    load_with(console_progress(terminal))

    assert "loading shard 2/2: 100%" in terminal.getvalue()


def test_console_logs_one_line_per_shard_elsewhere(caplog):
    stream = io.StringIO()

    with caplog.at_level(logging.INFO, logger="prefill_engine.model.load_progress"):
        load_with(console_progress(stream))

    assert stream.getvalue() == ""
    lines = [record for record in caplog.records if record.message == "checkpoint shard loaded"]
    assert [(line.shard, line.num_shards, line.file) for line in lines] == [(1, 2, FIRST), (2, 2, SECOND)]
