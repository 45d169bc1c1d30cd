"""The tower's loader: every tensor in its place, nothing else touched; cut-outs; the digest that names a tower."""

import argparse
import json
import shutil
from pathlib import Path

import pytest
import torch
from msgspec import structs
from safetensors.torch import load_file, save_file

from prefill_engine.cli.make_checkpoint import add_arguments, cmd_make_checkpoint
from prefill_engine.model.tensor_names import is_vision_tensor
from prefill_engine.rank.model_runner import read_digests
from prefill_engine.vision.weights import VisionParameters, load_vision_parameters, vision_digest, vision_numerics
from prefill_plan.config import Device, EngineConfig, ModelConfig, VisionConfig, VisionMode
from prefill_plan.errors import CheckpointError
from prefill_plan.kv_layout import block_layout
from prefill_plan.model_spec import load_model_spec

GOLDEN = Path(__file__).parents[2] / "golden"
INDEX = "model.safetensors.index.json"


def load(directory: Path) -> VisionParameters:
    return load_vision_parameters(directory, load_model_spec(directory), device=torch.device("cpu"))


def digest(directory: Path, *, numerics: str = "cpu-ref-bf16") -> bytes:
    return vision_digest(directory, load_model_spec(directory), numerics=numerics)


def stored(directory: Path) -> dict[str, torch.Tensor]:
    return {name: value for path in directory.glob("*.safetensors") for name, value in load_file(path).items()}


def make(*words: object) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return cmd_make_checkpoint(parser.parse_args([str(word) for word in words]))


@pytest.fixture
def tower_copy(tmp_path: Path) -> Path:
    """The golden vision set's checkpoint: the tower and embed.weight in one shard."""
    target = tmp_path / "tower"
    shutil.copytree(GOLDEN / "tiny_vision", target, ignore=shutil.ignore_patterns("cases", "images"))
    return target


@pytest.fixture
def full(tmp_path: Path) -> Path:
    """A quantised checkpoint of text model and tower, in many shards."""
    assert make("--out", tmp_path / "full", "--shard-bytes", 200_000) == 0
    return tmp_path / "full"


def vision_shards(directory: Path) -> set[str]:
    weight_map = json.loads((directory / INDEX).read_bytes())["weight_map"]
    return {file for name, file in weight_map.items() if is_vision_tensor(name)}


def rewrite(directory: Path, changes: dict[str, torch.Tensor | None]) -> None:
    """Replaces tensors of the only shard; None removes one. The index follows."""
    (shard,) = directory.glob("*.safetensors")
    tensors = {name: value for name, value in (load_file(shard) | changes).items() if value is not None}
    save_file(tensors, shard)
    weight_map = dict.fromkeys(tensors, shard.name)
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.mark.parametrize("name", ["tiny_vision", "tiny_dense"])
def test_every_tensor_is_in_its_place_bit_by_bit(name: str) -> None:
    parameters, tensors = load(GOLDEN / name), stored(GOLDEN / name)
    last = len(parameters.blocks) - 1
    block = parameters.blocks[last]
    places = {
        "vision.patch_embed.proj.weight": parameters.patch_weight,
        "vision.patch_embed.proj.bias": parameters.patch_bias,
        "vision.norm.weight": parameters.norm,
        "aligner.w1.weight": parameters.aligner_in_weight,
        "aligner.w1.bias": parameters.aligner_in_bias,
        "aligner.w2.weight": parameters.aligner_out_weight,
        "aligner.w2.bias": parameters.aligner_out_bias,
        "image_start": parameters.image_start,
        "image_newline": parameters.image_newline,
        "image_end": parameters.image_end,
        f"vision.blocks.{last}.norm1.weight": block.norm1,
        f"vision.blocks.{last}.norm2.weight": block.norm2,
        f"vision.blocks.{last}.attn.wqkv.weight": block.qkv_weight,
        f"vision.blocks.{last}.attn.wqkv.bias": block.qkv_bias,
        f"vision.blocks.{last}.attn.wo.weight": block.out_weight,
        f"vision.blocks.{last}.attn.wo.bias": block.out_bias,
        f"vision.blocks.{last}.mlp.w1.weight": block.gate_up_weight,
        f"vision.blocks.{last}.mlp.w2.weight": block.down_weight,
    }
    assert [place for place, tensor in places.items() if not torch.equal(tensor, tensors[place])] == []
    assert places.keys() == {n for n in tensors if is_vision_tensor(n) and not n.startswith("vision.blocks.")} | {
        n for n in tensors if n.startswith(f"vision.blocks.{last}.")
    }


def test_shards_of_the_text_model_are_not_even_opened(full: Path) -> None:
    before = load(full)
    own = vision_shards(full)
    others = [path for path in full.glob("*.safetensors") if path.name not in own]
    assert len(others) > 3
    others[0].write_bytes(b"half a download")
    for path in others[1:]:
        path.unlink()
    after = load(full)
    assert torch.equal(before.aligner_in_weight, after.aligner_in_weight)


def test_a_damaged_shard_of_the_tower_is_named(full: Path) -> None:
    name = sorted(vision_shards(full))[0]
    (full / name).write_bytes((full / name).read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=rf"{name}: \d+ bytes, its header describes \d+; cut short"):
        load(full)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vision.blocks.1.attn.wo.bias": None}, r"1 missing.*vision.blocks.1.attn.wo.bias is in no file"),
        ({"image_end": torch.zeros(95, dtype=torch.bfloat16)}, r"1 misshapen.*image_end is BF16 \[95\], expected BF16"),
        ({"image_end": torch.zeros(96, dtype=torch.float16)}, r"1 wrong dtype.*image_end is F16"),
        ({"vision.cls_token": torch.zeros(3)}, r"1 extra.*vision.cls_token"),
    ],
    ids=["missing", "shape", "dtype", "extra"],
)
def test_a_tower_that_the_config_does_not_describe_is_refused(tower_copy: Path, changes: dict, message: str) -> None:
    rewrite(tower_copy, changes)
    with pytest.raises(CheckpointError, match=message):
        load(tower_copy)


def test_norms_in_float32_are_accepted(tower_copy: Path) -> None:
    rewrite(tower_copy, {"vision.norm.weight": torch.linspace(0, 1, 128)})
    assert torch.equal(load(tower_copy).norm, torch.linspace(0, 1, 128))


def test_a_model_without_a_tower_is_refused() -> None:
    with pytest.raises(CheckpointError, match="no vision_config with layers"):
        load(GOLDEN / "tiny_quant")


# --- cut-outs ---
def test_a_cut_out_has_the_tower_of_its_source_and_nothing_else(full: Path, tmp_path: Path) -> None:
    assert make("--out", tmp_path / "cut", "--vision-only", "--from", full) == 0
    assert make("--out", tmp_path / "again", "--vision-only", "--from", tmp_path / "cut") == 0
    tower = {name: value for name, value in stored(full).items() if is_vision_tensor(name)}
    for directory in (tmp_path / "cut", tmp_path / "again"):
        copied = stored(directory)
        assert copied.keys() == tower.keys()
        assert all(torch.equal(copied[name], tower[name]) for name in tower)
        assert {path.name for path in directory.iterdir()} == {
            "config.json",
            INDEX,
            "model-00001-of-00001.safetensors",
        }
        assert load(directory).blocks
    assert (tmp_path / "cut" / "config.json").read_bytes() == (full / "config.json").read_bytes()


def test_a_random_cut_out_is_the_tower_of_the_full_random_checkpoint(full: Path, tmp_path: Path) -> None:
    assert make("--out", tmp_path / "random", "--vision-only") == 0
    assert digest(tmp_path / "random") == digest(full)


def test_a_random_tower_needs_only_a_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As with the release's config.json alone: the presets' tokenizer does not fit its Engram tables."""
    shutil.copy(GOLDEN / "tiny_vision" / "config.json", tmp_path)
    assert make("--config", tmp_path / "config.json", "--out", tmp_path / "full") == 2
    assert "tokenizer" in capsys.readouterr().err
    assert make("--config", tmp_path / "config.json", "--vision-only", "--out", tmp_path / "tower") == 0
    assert load(tmp_path / "tower").blocks


def test_a_cut_out_keeps_float32_norms_and_official_names(tower_copy: Path, tmp_path: Path) -> None:
    (shard,) = tower_copy.glob("*.safetensors")
    tensors = load_file(shard) | {"vision.norm.weight": torch.linspace(0, 1, 128)}
    save_file({f"model.{name}": value for name, value in tensors.items()}, shard)
    (tower_copy / INDEX).unlink()
    assert make("--out", tmp_path / "cut", "--vision-only", "--from", tower_copy) == 0
    assert torch.equal(stored(tmp_path / "cut")["vision.norm.weight"], torch.linspace(0, 1, 128))


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--from", "{full}"], 2, "give it with --vision-only"),
        (["--from", "{full}", "--vision-only", "--dense"], 2, "without --dense"),
        (["--from", "{out}", "--vision-only", "--force"], 2, "is the checkpoint to read from"),
        (["--from", str(GOLDEN / "tiny_quant"), "--vision-only"], 2, "no vision_config"),
        (["--from", "{out}/absent", "--vision-only"], 2, "cannot read the model config"),
        (["--config", str(GOLDEN / "tiny_quant" / "config.json"), "--vision-only"], 2, "no vision_config"),
    ],
    ids=["not asked for", "dense", "onto itself", "no tower", "no source", "random without tower"],
)
def test_impossible_cut_outs_write_nothing(
    words: list[str], code: int, message: str, full: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    shutil.copytree(GOLDEN / "tiny_vision", out, ignore=shutil.ignore_patterns("cases", "images"))
    before = sorted(path.name for path in out.iterdir())
    named = [word.format(full=full, out=out) for word in words]
    assert make("--out", out, *named) == code
    assert message in capsys.readouterr().err
    assert sorted(path.name for path in out.iterdir()) == before


# --- digest ---
def test_a_cut_out_and_its_source_have_one_digest(full: Path, tmp_path: Path) -> None:
    make("--out", tmp_path / "cut", "--vision-only", "--from", full, "--shard-bytes", 100_000)
    assert len(list((tmp_path / "cut").glob("*.safetensors"))) > 1
    assert digest(tmp_path / "cut") == digest(full)
    assert len(digest(full)) == 32


def test_the_digest_changes_with_one_bit_of_a_weight(tower_copy: Path) -> None:
    before = digest(tower_copy)
    weight = load(tower_copy).aligner_out_weight.clone()
    weight.view(torch.int16)[-1, -1] ^= 1
    rewrite(tower_copy, {"aligner.w2.weight": weight})
    assert digest(tower_copy) != before


def test_the_digest_names_the_arithmetic_of_the_rows(tower_copy: Path) -> None:
    """Kernel sets differ in bits, and so would the KV of prompts that share the images' keys."""
    assert vision_numerics(Device.CPU, "ref", "bf16") == "cpu-ref-bf16"
    others = ("gpu-triton-sm_90-bf16", "gpu-triton-sm_100-bf16", "cpu-ref-fp32")
    assert len({digest(tower_copy, numerics=each) for each in ("cpu-ref-bf16", *others)}) == 4


def test_an_engine_expects_rows_of_its_own_arithmetic_unless_it_is_told(full: Path) -> None:
    spec = load_model_spec(full)

    def expected(vision: VisionConfig) -> bytes:
        config = EngineConfig(model=ModelConfig(path=str(full)), device=Device.CPU, ops="ref", vision=vision)
        return read_digests(config, spec, block_layout(spec, config.kv.record_format)).vision

    remote = VisionConfig(mode=VisionMode.REMOTE, endpoints=("ve:1",))
    assert expected(remote) == digest(full)
    told = structs.replace(remote, numerics_class="gpu-triton-sm_90-bf16")
    assert expected(told) == digest(full, numerics="gpu-triton-sm_90-bf16")
    assert expected(VisionConfig()) == b""


def test_the_digest_ignores_the_text_model_and_covers_the_resize_plan(tower_copy: Path) -> None:
    before = digest(tower_copy)
    rewrite(tower_copy, {"embed.weight": torch.zeros(512, 96, dtype=torch.bfloat16)})
    assert digest(tower_copy) == before
    config = json.loads((tower_copy / "config.json").read_bytes())
    config["vision_config"]["min_pixels"] += 1
    (tower_copy / "config.json").write_text(json.dumps(config))
    assert digest(tower_copy) != before
