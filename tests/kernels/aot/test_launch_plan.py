"""Launches of one step of the released model, counted without a GPU: that the step runs there proves it has no host sync."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench" / "bench_launches.py"


@pytest.mark.slow
def test_launches_of_a_step_do_not_grow() -> None:
    done = subprocess.run(
        [sys.executable, str(BENCH), "--json", "--runs", "1"], capture_output=True, text=True, timeout=280, check=True
    )
    whole, replayed, short = json.loads(done.stdout)
    assert (whole["rows"], whole["replay"]) == (32768, False)
    assert (replayed["rows"], replayed["replay"]) == (32768, True)
    assert short["rows"] == 4096
    # README's figures; a launch more per layer has to be argued there.
    assert short["launches"] <= 992
    assert whole["launches"] <= 1130
    assert replayed["launches"] <= whole["launches"] + 8
    assert min(short["per_layer"][:20]) <= 22
    assert max(short["per_layer"][:20]) <= 41
    # One kernel from sub-layer to sub-layer: two a layer, and the encoder's last turn for all rows.
    assert short["kernels"]["_mhc_turn_kernel"] == 81
