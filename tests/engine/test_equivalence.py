import argparse
import json
from dataclasses import replace

import msgspec
import pytest

from prefill_engine import batch, equivalence
from prefill_engine.cli.equivalence import add_arguments, cmd_equivalence
from prefill_engine.equivalence import MetadataCase, compare_metadata, compare_trajectory, metadata_cases
from prefill_engine.step_plan import ChunkPlan
from prefill_kernels.op_sets import load_ops
from prefill_plan.config import Truncation
from prefill_plan.model_spec import released_model_spec
from prefill_testing.tiny_model import GOLDEN, KEEP_TOKENS, random_tokens, tiny_model

SPEC = released_model_spec()
SHORT = [case for case in metadata_cases(SPEC) if case.prompt_tokens < 2_000]
WORKED_EXAMPLE = MetadataCase(prompt_tokens=100_000, keep_tokens=140, hit_tokens=96_896, bounds=(96_768, 100_000))


def run_cli(*words: str) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return cmd_equivalence(parser.parse_args(list(words)))


def test_released_sizes_are_equivalent_by_metadata() -> None:
    report = compare_metadata(SPEC, SHORT)
    assert report.mismatches == ()
    assert report.num_cases == len(SHORT) > 200
    assert report.num_dropped_rows > report.num_cases


def test_cases_cover_replays_exact_hits_and_cuts_at_the_floor() -> None:
    cases = metadata_cases(SPEC)
    assert any(0 < case.hit_tokens == case.bounds[0] for case in cases)
    assert any(case.bounds[0] == case.hit_tokens - 128 for case in cases)
    assert any(case.prompt_tokens - case.keep_tokens in case.bounds[1:-1] for case in cases)
    assert any(start % 2 for case in cases for start in case.bounds[:-1])
    assert WORKED_EXAMPLE in cases


def test_worked_example_keeps_140_rows_with_their_window_clipped_at_the_floor() -> None:
    report = compare_metadata(SPEC, [WORKED_EXAMPLE])
    assert report.mismatches == ()
    assert (report.num_kept_rows, report.num_dropped_rows) == (140, 3_232 - 140)
    assert report.num_window_keys == 128 * 129 // 2 + 12 * 128  # rows 1..128 of the kept ones see 1..128 keys, then 128


def _first_row_too_late(chunk: ChunkPlan, truncation: Truncation) -> int:
    return min(batch_first_row(chunk, truncation) + 1, chunk.end - 1)


batch_first_row = batch.first_decoder_row


def test_a_wrong_row_selection_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "first_decoder_row", _first_row_too_late)
    report = compare_metadata(SPEC, [WORKED_EXAMPLE])
    assert any("position" in line for line in report.mismatches)


def test_a_floor_that_both_modes_get_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's floor follows the chunk's end, not the prompt's (model.md 5.2); equal in both modes, and wrong."""
    plan = equivalence.build_batch

    def build(step, rows, **terms):  # type: ignore[no-untyped-def]
        chunks = tuple(replace(chunk, decoder_floor=max(0, chunk.end - 128)) for chunk in step.chunks)
        return plan(replace(step, chunks=chunks), rows, **terms)

    monkeypatch.setattr(equivalence, "build_batch", build)
    report = compare_metadata(SPEC, [WORKED_EXAMPLE])
    assert any("window keys (rule)" in line for line in report.mismatches)


def test_trajectory_is_equal_element_by_element() -> None:
    model = tiny_model()
    steps = compare_trajectory(
        model,
        random_tokens(4, 166),
        prompt_tokens=160,
        keep_tokens=KEEP_TOKENS,
        chunk_tokens=47,
        ops=load_ops("ref"),
    )
    assert [step.position for step in steps] == list(range(159, 166))
    assert all(step.max_diff == 0.0 and step.top_equal for step in steps)


def test_cli_level_2_prints_the_seed_and_a_row_per_step(capsys: pytest.CaptureFixture[str]) -> None:
    model = str(GOLDEN / "tiny_quant")
    words = ["--level", "2", "--model", model, "--prompt-tokens", "60", "--steps", "2", "--seed", "9"]
    assert run_cli(*words) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "seed 9, prompt 60, keep 28, chunks of 128"
    assert [line.split()[0] for line in out[2:5]] == ["59", "60", "61"]
    assert run_cli(*words, "--json") == 0
    assert json.loads(capsys.readouterr().out)["equivalent"] is True


def test_cli_level_1_reads_sizes_of_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("--level", "1", "--model", str(GOLDEN / "tiny_quant"), "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["equivalent"] is True
    assert result["num_cases"] > 100


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--level", "2"], "--level 2 needs --model DIR"),
        (["--level", "2", "--model", "/nowhere"], "/nowhere: cannot read"),
        (["--level", "2", "--model", str(GOLDEN / "tiny_quant"), "--keep-tokens", "20"], "expected >= 22"),
        (["--level", "2", "--model", str(GOLDEN / "tiny_quant"), "--chunk-tokens", "0"], "--chunk-tokens 0"),
        (["--level", "2", "--model", str(GOLDEN / "tiny_quant"), "--steps", "-1"], "--steps -1"),
    ],
    ids=["no model", "no directory", "keep below window + rollback", "empty chunks", "negative steps"],
)
def test_cli_refuses(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(*words) == 2
    assert message in capsys.readouterr().err


def test_cli_exits_1_when_the_modes_differ(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(batch, "first_decoder_row", _first_row_too_late)
    small = msgspec.structs.replace(SPEC, window_tokens=16)
    monkeypatch.setattr("prefill_engine.cli.equivalence.released_model_spec", lambda: small)
    monkeypatch.setattr("prefill_engine.cli.equivalence.metadata_cases", lambda spec: metadata_cases(spec)[:40])
    assert run_cli() == 1
    assert "NOT EQUIVALENT" in capsys.readouterr().out
