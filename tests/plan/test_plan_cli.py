import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from prefill_engine.cli.plan import add_arguments, cmd_plan
from prefill_plan.memory import GPU_BYTES

GOLDEN = Path(__file__).parents[1] / "golden"


def run_plan(*words: str) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return cmd_plan(parser.parse_args(words))


def test_plan_prints_every_option_the_choice_and_its_parts(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_plan("--gpu", "H200-141", "--engram", "host") == 0

    lines = capsys.readouterr().out.splitlines()
    table = [line.split() for line in lines if line.strip().startswith(("2 ", "-> ", "8 "))]
    assert [row[:5] for row in table] == [
        ["2", "host", "182.26", "145.60", "-"],
        ["->", "4", "host", "104.05", "145.60"],
        ["8", "host", "64.94", "145.60", "91,571,968"],
    ]
    assert "Chosen: EP4, Engram on host (the smallest EP that fits)." in lines
    parts = {line[2:34].strip(): line[34:44].strip() for line in lines if line.startswith("  ")}
    assert parts["experts, 104 slots x 40 layers"] == "78.21"
    assert (parts["need"], parts["limit"], parts["to spare"]) == ("104.05", "145.60", "41.55")
    assert "KV pool:     up to 47,682,688 tokens per GPU if it gets all spare memory" in lines
    assert "host memory: 202.76 GB per node for Engram tables, KV tiers not counted" in lines


def test_plan_says_what_a_reduced_tier_reduces(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_plan("--gpu", "H20-96", "--engram", "host") == 0

    out = capsys.readouterr().out
    assert "reduced only: C8k" in out
    assert "  chunk 32,768 -> 8,192\n" in out
    assert "Full configuration: EP8, Engram on host." in out


def test_plan_that_fits_nowhere_shows_the_closest_and_exits_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_plan("--gpu-bytes", "40000000000") == 1

    out = capsys.readouterr().out
    assert "No EP fits, even with every setting reduced." in out
    assert "EP8, Engram on host, smallest tier: 12.55 GB more per GPU would be needed." in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpu", "H300"], "unknown GPU 'H300', expected one of H100-80, A100-80,"),
        (["--gpu", "H20-96", "--ep", "3"], "EP = 3, expected one of"),
        (["--gpu", "H20-96", "--context", "1048577"], "context = 1048577 tokens, expected 1..1048576"),
        (["--gpu-bytes", "0"], "GPU memory = 0 bytes"),
        (["--gpu", "H20-96", "--model", "/nowhere"], "/nowhere: cannot read the model config"),
    ],
)
def test_plan_refuses_bad_options_on_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_plan(*words) == 2

    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("prefill-engine plan: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_unknown_gpu_lists_all_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    run_plan("--gpu", "H300")

    err = capsys.readouterr().err
    assert all(gpu in err for gpu in GPU_BYTES)


@pytest.mark.parametrize("words", [[], ["--gpu", "H20-96", "--gpu-bytes", "5"], ["--gpu", "H20-96", "--engram", "ssd"]])
def test_plan_usage_errors_exit_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        run_plan(*words)

    assert error.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_plan_json_has_bytes_and_the_explanation(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_plan("--gpu", "H200-141", "--engram", "host", "--json") == 0

    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (result["gpu"], result["full_ep"], result["any_ep"]) == ("H200-141", 4, 4)
    assert [option["tier"] for option in result["options"]] == [None, "full", "full"]
    plan = result["chosen"]["plan"]
    assert (plan["need_bytes"], plan["budget_bytes"], plan["fits"]) == (104_045_939_456, 145_597_000_000, True)
    assert plan["weights"]["experts"] == 78_210_662_400
    assert len(result["explanation"]) == 2


def test_plan_json_of_no_fit_has_no_choice(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_plan("--gpu-bytes", "40000000000", "--json") == 1

    assert json.loads(capsys.readouterr().out)["chosen"] is None


def test_plan_context_reaches_the_sum(capsys: pytest.CaptureFixture[str]) -> None:
    run_plan("--gpu", "H20-96", "--ep", "8", "--engram", "host", "--context", "1048576", "--json")

    plan = json.loads(capsys.readouterr().out)["chosen"]["plan"]
    assert plan["settings"]["context_tokens"] == 1_048_576
    assert plan["workspace"]["kv_gather"] == 4 * 1_048_576 * 1_024


def test_plan_of_a_short_model_uses_its_longest_context(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_plan("--gpu", "H20-96", "--model", str(GOLDEN / "tiny_quant")) == 0

    assert "Full configuration: context 32,768" in capsys.readouterr().out
