"""`prefill-engine check` on vision sets: the golden one passes, and every kind of mistake in one is found and named."""

import argparse
import json
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from prefill_engine.check.compare import Judge, Limits, SpreadLimits
from prefill_engine.check.golden import GoldenReport, check_golden
from prefill_engine.cli.check import add_arguments, cmd_check
from prefill_kernels.op_sets import load_ops
from prefill_kernels.vision_ops import load_vision_ops

GOLDEN = Path(__file__).parents[2] / "golden" / "tiny_vision"


def check(path: Path, *regimes: str) -> GoldenReport:
    return check_golden(path, ops=load_ops("ref"), vision_ops=load_vision_ops("ref"), regimes=regimes)


def failures(report: GoldenReport) -> set[tuple[str, str, str]]:
    return {(f.group, f.case, f.tensor) for f in report.findings if not f.passed}


@pytest.fixture(scope="module")
def report() -> GoldenReport:
    return check(GOLDEN)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """The golden set with its two smallest images only."""
    target = tmp_path / "set"
    shutil.copytree(GOLDEN, target)
    edit_manifest(target, images=["pad_rows", "tiny"])
    return target


def edit_manifest(directory: Path, *, images: list[str] | None = None, **changes: object) -> None:
    """changes: of image `tiny`."""
    file = directory / "manifest.json"
    manifest = json.loads(file.read_bytes())
    if images is not None:
        manifest["images"] = {name: manifest["images"][name] for name in images}
        manifest["real_constants"] = {"tiny": manifest["real_constants"]["tiny"]}
    manifest["images"]["tiny"] |= changes
    file.write_text(json.dumps(manifest))


def edit_case(directory: Path, name: str, **tensors: torch.Tensor) -> None:
    file = directory / "cases" / f"{name}.safetensors"
    save_file(load_file(file) | tensors, file)


@pytest.mark.parametrize("regime", ["fp32", "bf16"])
def test_golden_set_is_reproduced(report: GoldenReport, regime: str) -> None:
    findings = [finding for finding in report.findings if finding.regime == regime]
    assert findings
    assert [finding for finding in findings if not finding.passed] == []


def test_every_tensor_of_every_image_is_compared(report: GoldenReport) -> None:
    manifest = json.loads((GOLDEN / "manifest.json").read_bytes())
    compared = {(f.group, f.case, f.tensor) for f in report.findings if f.regime == "fp32"}
    for name, entry in manifest["images"].items():
        assert {("image", name, tensor) for tensor in entry["tensors"].keys() - {"rows"}} <= compared
        assert {("image", name, "plan"), ("packed batch", name, "span")} <= compared
    assert {("release constants", name, "patches_sha256") for name in manifest["real_constants"]} <= compared
    assert {
        ("prompt", "prompt", tensor) for tensor in ("input_ids", "token_types", "image_starts", "embeds")
    } <= compared
    assert report.unknown == ()
    assert report.passed


def test_fp32_is_as_near_as_other_implementations(report: GoldenReport) -> None:
    """README of the set: independent implementations are within 8.6e-6; a mistake that hides in 1e-4 would show here."""
    errors = [f.worst for f in report.findings if f.regime == "fp32" and f.bound > 0]
    assert max(errors) < 1.2e-5


def test_a_changed_weight_moves_what_follows_it_only(small: Path) -> None:
    (shard,) = small.glob("*.safetensors")
    name = "vision.blocks.1.mlp.w2.weight"
    save_file(load_file(shard) | {name: load_file(shard)[name] * 1.01}, shard)
    out = {tensor for group, _, tensor in failures(check(small, "fp32")) if group == "image"}
    assert out == {"block1", "block2", "vit_out", "downsampled", "aligner_out", "span"}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"left": 1}, ("image", "tiny", "plan")),
        ({"n_tokens": 18}, ("image", "tiny", "plan")),
        ({"patches_sha256": "00"}, ("image", "tiny", "patches_sha256")),
    ],
    ids=["offset", "tokens", "hash"],
)
def test_a_wrong_entry_of_the_manifest_is_found(
    small: Path, changes: dict[str, object], expected: tuple[str, str, str]
) -> None:
    edit_manifest(small, **changes)
    assert failures(check(small, "fp32")) == {expected}


def test_wrong_expected_values_are_found(small: Path) -> None:
    tiny, prompt = (load_file(small / "cases" / f"{name}.safetensors") for name in ("tiny", "prompt"))
    patches, types = tiny["patches"].clone(), tiny["token_types"].clone()
    patches[3, 1, 2, 2] += 0.0078125
    types[4] = 2
    edit_case(small, "tiny", patches=patches, token_types=types, aligner_out=tiny["aligner_out"] + 2e-4)
    edit_case(small, "prompt", embeds=prompt["embeds"] + 2e-4, input_ids=prompt["input_ids"].roll(1))
    assert failures(check(small, "fp32")) == {
        ("image", "tiny", "patches"),
        ("image", "tiny", "token_types"),
        ("image", "tiny", "aligner_out"),
        ("prompt", "prompt", "embeds"),
        ("prompt", "prompt", "input_ids"),
    }


@pytest.mark.parametrize(
    ("share", "shift", "expected"),
    [(1.0, 0.12, {"aligner_out 99 %", "aligner_out mean"}), (0.005, 0.4, {"aligner_out max"})],
    ids=["all a little", "few far"],
)
def test_bf16_is_judged_by_the_spread_of_its_errors(
    small: Path, share: float, shift: float, expected: set[str]
) -> None:
    want = load_file(small / "cases" / "tiny.safetensors")["aligner_out"]
    moved = want.clone()
    moved.view(-1)[: int(share * want.numel())] += shift
    edit_case(small, "tiny", aligner_out=moved)
    assert {name for _, case, name in failures(check(small, "bf16")) if case == "tiny"} == expected


def test_an_unknown_tensor_is_reported(small: Path) -> None:
    edit_case(small, "tiny", pooled=torch.zeros(3))
    report = check(small)
    assert report.unknown == ("set/tiny/pooled",)
    assert not report.passed


def test_a_set_without_prompt_and_release_hashes_is_checked_too(small: Path) -> None:
    manifest = json.loads((small / "manifest.json").read_bytes())
    (small / "manifest.json").write_text(json.dumps({"images": manifest["images"]}))
    report = check(small)
    assert report.passed
    assert {f.group for f in report.findings} == {"image", "packed batch"}


def damage_image(directory: Path) -> None:
    Image.new("RGB", (5, 3)).save(directory / "images" / "tiny.png")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_image, "tiny.png: its bytes are not those that the manifest names"),
        (lambda d: (d / "images" / "tiny.png").unlink(), "tiny.png: cannot be read"),
        (lambda d: (d / "images" / "tiny.png").write_bytes(b"GIF87a"), "tiny.png: cannot be read"),
        (lambda d: (d / "cases" / "tiny.safetensors").write_bytes(b"x"), "not a readable safetensors file"),
        (lambda d: (d / "cases" / "tiny.safetensors").unlink(), "not a readable safetensors file"),
        (lambda d: edit_manifest(d, canvas_w="wide"), "not a golden manifest"),
        (lambda d: shutil.rmtree(d / "cases"), "no cases"),
    ],
    ids=["other image", "no image", "no picture", "bad case", "no case", "bad manifest", "no cases"],
)
def test_a_damaged_set_is_refused(small: Path, damage, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    damage(small)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert cmd_check(parser.parse_args(["--golden", str(small)])) == 2
    assert message in capsys.readouterr().err


def test_spread_never_passes_nan() -> None:
    judge = Judge(Limits(value=0, logits=0), regime="r", group="g", case="c")
    limits = SpreadLimits(largest=1e9, quantile99=1e9, mean=1e9)
    judge.spread("t", torch.tensor([0.0, torch.nan]), torch.zeros(2), limits)
    assert [finding.passed for finding in judge.findings] == [False, True, False]
