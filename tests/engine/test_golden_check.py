import argparse
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from prefill_engine.check.compare import Finding, GrossLimits, Judge, Limits
from prefill_engine.check.golden import GoldenReport, attempt_rows, check_golden
from prefill_engine.check.golden_set import NotGolden
from prefill_engine.check.report import render_json, render_table, worst_findings
from prefill_engine.cli.check import add_arguments, cmd_check
from prefill_engine.model.checkpoint_texts import check_texts, read_preset
from prefill_engine.model.checkpoint_writer import write_checkpoint
from prefill_engine.model.engram_tables import build_engram_tables
from prefill_engine.model.flash import DeepseekV41Flash
from prefill_engine.model.weights import load_parameters
from prefill_engine.prompt_run import AttemptTerms, Recorder
from prefill_kernels.numerics import Numerics
from prefill_kernels.op_sets import load_ops
from prefill_kernels.vision_ops import load_vision_ops
from prefill_plan.config import RecordFormat
from prefill_testing.tiny_model import CPU, GOLDEN, prompt_run, random_tokens

OPS = load_ops("ref")
VISION_OPS = load_vision_ops("ref")


@pytest.fixture(scope="module")
def report() -> GoldenReport:
    """Everything the golden data has, once."""
    return check_golden(GOLDEN, ops=OPS, vision_ops=VISION_OPS)


@pytest.mark.parametrize("regime", ["units", "fp32", "fp32q", "bf16", "bf16q", "w_fp32", "quant32", "quant"])
def test_golden_data_is_reproduced(report: GoldenReport, regime: str) -> None:
    findings = [finding for finding in report.findings if finding.regime == regime]
    assert findings
    assert [finding for finding in findings if not finding.passed] == []


def test_every_expected_tensor_has_a_counterpart(report: GoldenReport) -> None:
    assert report.unknown == ()
    assert report.passed


def test_every_case_of_the_manifests_is_run(report: GoldenReport) -> None:
    ran = {(finding.group, finding.case) for finding in report.findings}
    for name in ("tiny_dense", "tiny_quant"):
        manifest = json.loads((GOLDEN / name / "manifest.json").read_bytes())
        assert {("one shot", case) for case in manifest["cases"]} <= ran
        assert {("chunked", case) for case in manifest.get("chunked", {})} <= ran
        assert {("decoder replay", case) for case in manifest.get("decoder_replay", {})} <= ran
        assert {("encoder replay", case) for case in manifest.get("encoder_replay", {})} <= ran
    assert {("chunk state", "text_200@63"), ("chunk state", "text_333@33"), ("weights", "dequant_samples")} <= ran


def test_fp32_is_within_a_hundredth_of_the_readme_tolerance(report: GoldenReport) -> None:
    """Decisions C9: a right forward pass reaches about 7e-6 on logits; a mistake that hides in 2e-3 would show here."""
    errors = [f.worst for f in report.findings if f.regime == "fp32" and f.tensor.endswith(("logits", "logits_sub"))]
    assert max(errors) < 2e-5


def test_table_has_one_line_per_regime_group_and_tensor(report: GoldenReport) -> None:
    lines = render_table(report).splitlines()
    assert len(lines) == 1 + len(worst_findings(report.findings)) + 1
    assert lines[-1].endswith("comparisons: all within tolerance")
    assert json.loads(render_json(report))["passed"] is True


@pytest.fixture
def quant_copy(tmp_path: Path) -> Path:
    shutil.copytree(GOLDEN / "tiny_quant", tmp_path / "set")
    return tmp_path / "set"


def run_cli(*words: str) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return cmd_check(parser.parse_args(list(words)))


def rewrite(file: Path, **tensors: torch.Tensor) -> None:
    """Replaces tensors of a safetensors file; in names, `__` stands for `/` and `_D_` for `.`."""
    renamed = {name.replace("__", "/").replace("_D_", "."): value for name, value in tensors.items()}
    save_file(load_file(file) | renamed, file)


def test_cli_names_the_tensor_that_is_out(quant_copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = quant_copy / "cases" / "q_009.safetensors"
    rewrite(file, w_fp32__L1_D_stream=load_file(file)["w_fp32/L1.stream"] + 0.01)
    assert run_cli("--golden", str(quant_copy), "--regime", "w_fp32") == 1
    out = capsys.readouterr().out.splitlines()
    assert out[-1].endswith("1 OUT OF TOLERANCE")
    assert out[-2].split() == ["OUT", "w_fp32", "one", "shot", "stream", "0.01", "<=", "0.002", "q_009"]


def test_cli_reports_a_tensor_it_does_not_know(quant_copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rewrite(quant_copy / "cases" / "q_009.safetensors", w_fp32__L1_D_surprise=torch.zeros(9))
    assert run_cli("--golden", str(quant_copy), "--regime", "w_fp32", "--json") == 1
    result = json.loads(capsys.readouterr().out)
    assert result["unknown"] == ["set/q_009/L1.surprise"]
    assert all(finding["passed"] for finding in result["findings"])


def test_a_changed_weight_is_found(quant_copy: Path) -> None:
    shard = next(file for file in quant_copy.glob("model-*") if "layers.2.attn.attn_sink" in load_file(file))
    save_file(load_file(shard) | {"layers.2.attn.attn_sink": torch.zeros(4)}, shard)
    result = check_golden(quant_copy, ops=OPS, vision_ops=VISION_OPS, regimes=["w_fp32"])
    out = {finding.tensor for finding in result.findings if not finding.passed}
    assert {"logits", "stream", "final_hidden"} <= out
    assert not {"hash_ids", "engram_out"} & out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--golden", "{empty}"], "no manifest.json"),
        (["--golden", "{bad}"], "not a golden manifest"),
        (["--golden", "{bare}"], "no config.json"),
        (["--golden", str(GOLDEN / "tiny_dense"), "--regime", "quant"], "expected one of bf16, bf16q, fp32, fp32q"),
    ],
    ids=["nothing there", "broken manifest", "no checkpoint", "regime without values"],
)
def test_cli_refuses(words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    places = {name: tmp_path / name for name in ("empty", "bad", "bare")}
    for place in places.values():
        place.mkdir()
    (places["bare"] / "manifest.json").write_text("{}")
    shutil.copytree(GOLDEN / "tiny_quant", places["bad"], dirs_exist_ok=True)
    (places["bad"] / "manifest.json").write_text('{"cases": 3}')
    assert run_cli(*(word.format(**places) for word in words)) == 2
    assert message in capsys.readouterr().err


def test_other_sizes_are_checked_too(tmp_path: Path) -> None:
    """A golden set of another model, written by our own run: nothing may be tied to the sizes of the tiny sets."""
    texts = read_preset("demo")
    spec = check_texts(texts, source="demo")
    write_checkpoint(tmp_path, spec, texts, seed=3, shard_bytes=1 << 30)
    numerics = Numerics(activation=torch.float32, quantise_activations=False, quantise_cache=False)
    model = DeepseekV41Flash(
        spec,
        load_parameters(tmp_path, spec, device=CPU, expert_range=range(spec.num_experts)),
        ops=OPS,
        numerics=numerics,
        engram_tables=build_engram_tables(spec, tmp_path / "tokenizer.json"),
        record_format=RecordFormat.FP4,
    )
    tokens = torch.from_numpy(random_tokens(5, 45))
    run, recorder = prompt_run(model, attempt_rows({"input_ids": tokens})), Recorder(spec)
    run.prefill([0, 45], AttemptTerms(), recorder=recorder)
    logits = recorder.at("logits", -1, range(45))
    last = spec.num_layers - 1
    (tmp_path / "cases").mkdir()
    save_file(
        {
            "input_ids": tokens,
            "rows": torch.tensor([3, 44], dtype=torch.int32),
            f"w_fp32/L{last}.stream": recorder.at("stream", last, [3, 44]),
            f"w_fp32/L{last}.swa_last": run.window_keys(last, range(45 - spec.window_tokens, 45)),
            f"w_fp32/L{spec.kv_sources[0]}.ckv_post": recorder.steps("ckv_post", spec.kv_sources[0])[-1][-5:].clone(),
            "w_fp32/logits_sub": logits[:, :: spec.vocab_size // 16].contiguous(),
            "w_fp32/argmax": logits.argmax(-1),
        },
        tmp_path / "cases" / "q_045.safetensors",
    )
    (tmp_path / "manifest.json").write_text('{"cases": {"q_045": {"length": 45, "file": "cases/q_045.safetensors"}}}')
    result = check_golden(tmp_path, ops=OPS, vision_ops=VISION_OPS)
    assert result.passed
    assert {f.tensor for f in result.findings} == {"stream", "swa_last", "ckv_post", "logits_sub", "argmax"}


# --- the judge ---
def judge(limits: Limits) -> Judge:
    return Judge(limits, regime="r", group="g", case="c")


EXACT = Limits(value=0.1, logits=0.2)
SHARES = Limits(value=0.1, logits=0.2, values=0.5, rows=0.5, argmax=0.5)


def last(judged: Judge) -> Finding:
    return judged.findings[-1]


def test_judge_reports_the_worst_error_under_an_exact_rule() -> None:
    judged = judge(EXACT)
    judged.values("t", torch.tensor([1.0, 2.25]), torch.tensor([1.0, 2.0]))
    assert (last(judged).worst, last(judged).bound, last(judged).passed) == (0.25, 0.1, False)
    judged.logits("t", torch.tensor([[1.0, 2.125]]), torch.tensor([[1.0, 2.0]]))
    assert last(judged).passed


def test_judge_reports_shares_under_a_share_rule() -> None:
    judged = judge(SHARES)
    judged.values("t", torch.tensor([1.0, 9.0]), torch.tensor([1.0, 2.0]))
    assert (last(judged).worst, last(judged).is_share, last(judged).passed) == (0.5, True, True)
    judged.logits("t", torch.tensor([[1.0], [9.0], [9.0]]), torch.tensor([[1.0], [2.0], [2.0]]))
    assert not last(judged).passed


@pytest.mark.parametrize("limits", [EXACT, SHARES], ids=["exact", "shares"])
def test_judge_never_passes_nan(limits: Limits) -> None:
    judged = judge(limits)
    nan = torch.full((4, 2), torch.nan)
    judged.values("t", nan, torch.zeros(4, 2))
    judged.logits("t", nan, torch.zeros(4, 2))
    gross = GrossLimits(median=1e9, quantile=1e9, argmax=0.0, least_rows=1, short_median=1e9)
    judged.statistics(nan, torch.zeros(4, 2), torch.zeros(4), torch.zeros(4), gross)
    assert [finding.passed for finding in judged.findings if finding.tensor != "argmax"] == [False] * 4


def test_judge_compares_selections_as_sets() -> None:
    judged = judge(EXACT)
    judged.sets("t", torch.tensor([[3, 1, -1, -1]]), torch.tensor([[1, 3]]))
    assert last(judged).passed
    judged.sets("t", torch.tensor([[3, 2, -1, -1]]), torch.tensor([[1, 3]]))
    assert not last(judged).passed
    judged.sets("t", torch.tensor([[3, 2, -1, -1]]), torch.tensor([[1, 3]]), margin=torch.tensor([1e-5]))
    assert last(judged).passed


def test_judge_refuses_another_shape() -> None:
    with pytest.raises(ValueError, match=r"shape \[2\], expected \[3\]"):
        judge(EXACT).values("t", torch.zeros(2), torch.zeros(3))


def test_not_golden_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(NotGolden, match="expected golden data"):
        check_golden(tmp_path, ops=OPS, vision_ops=VISION_OPS)
