"""Every way a checkpoint can be damaged gives one error that names the file and the tensor."""

import json
import shutil
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from prefill_engine.model.weights import load_parameters
from prefill_plan.errors import CheckpointError
from prefill_plan.model_spec import load_model_spec

GOLDEN = Path(__file__).parents[1] / "golden"
INDEX = "model.safetensors.index.json"
FIRST = "model-00001-of-00002.safetensors"
SECOND = "model-00002-of-00002.safetensors"


def load(directory, *, spec=None):
    spec = spec or load_model_spec(directory)
    return load_parameters(directory, spec, device=torch.device("cpu"), expert_range=range(spec.num_experts))


@pytest.fixture
def checkpoint(tmp_path):
    target = tmp_path / "model"
    shutil.copytree(GOLDEN / "tiny_quant", target, ignore=shutil.ignore_patterns("cases"))
    return target


def edit_shard(directory, shard, edit):
    """Rewrites a shard and, for new or removed tensors, the index."""
    tensors = load_file(directory / shard)
    edit(tensors)
    save_file(tensors, directory / shard)
    path = directory / INDEX
    index = json.loads(path.read_text())
    others = {name: file for name, file in index["weight_map"].items() if file != shard}
    index["weight_map"] = others | dict.fromkeys(tensors, shard)
    path.write_text(json.dumps(index))


def drop(name):
    return lambda tensors: tensors.pop(name)


def put(name, value):
    return lambda tensors: tensors.update({name: value})


def test_fp32_norms_are_accepted(checkpoint):
    edit_shard(checkpoint, SECOND, put("norm.weight", torch.full((64,), 1.5)))

    assert torch.equal(load(checkpoint).norm, torch.full((64,), 1.5))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (drop("norm.weight"), r"1 problem \(1 missing\): norm\.weight is in no file, expected BF16 or F32 \[64\]"),
        (
            put("layers.9.attn_norm.weight", torch.ones(64, dtype=torch.bfloat16)),
            rf"1 extra\): {SECOND}: layers\.9\.attn_norm\.weight \(BF16 \[64\]\) is no tensor of the model",
        ),
        (
            put("norm.weight", torch.ones(65, dtype=torch.bfloat16)),
            rf"1 misshapen\): {SECOND}: norm\.weight is BF16 \[65\], expected BF16 or F32 \[64\]",
        ),
        (
            put("layers.4.attn.wkv.weight", torch.ones(64, 64, dtype=torch.bfloat16)),
            rf"1 wrong dtype\): {SECOND}: layers\.4\.attn\.wkv\.weight is BF16 \[64, 64\], expected F8_E4M3 \[64, 64\]",
        ),
        (
            put("model.norm.weight", torch.ones(64, dtype=torch.bfloat16)),
            rf"1 duplicate\): {SECOND}: (model\.)?norm\.weight is also in {SECOND}",
        ),
        (
            put("layers.4.attn.wkv.scale", torch.full((2, 2), 255, dtype=torch.uint8).view(torch.float8_e8m0fnu)),
            rf"1 bad scale\): {SECOND}: layers\.4\.attn\.wkv\.scale has a scale of NaN",
        ),
        (
            put("mtp.0.main_proj.scale", torch.full((2, 6), 247, dtype=torch.uint8).view(torch.float8_e8m0fnu)),
            rf"1 bad scale\): {SECOND}: mtp\.0\.main_proj\.scale has a scale of 2\*\*120, too large for bf16",
        ),
    ],
    ids=["missing", "extra", "shape", "dtype", "duplicate", "nan scale", "huge scale"],
)
def test_damaged_tensor_is_one_error_with_its_name(checkpoint, edit, message):
    edit_shard(checkpoint, SECOND, edit)

    with pytest.raises(CheckpointError, match=message):
        load(checkpoint)


def cut_short(directory):
    path = directory / SECOND
    path.write_bytes(path.read_bytes()[:-100])


def append_bytes(directory):
    with (directory / SECOND).open("ab") as file:
        file.write(b"\0")


def break_header(directory):
    path = directory / SECOND
    path.write_bytes(path.read_bytes().replace(b'"dtype"', b'"dtyp"', 1))


def replace_by_text(directory):
    (directory / SECOND).write_text("<html>404</html>")


def empty_file(directory):
    (directory / SECOND).write_bytes(b"")


def remove_shard(directory):
    (directory / SECOND).unlink()


def overlap_tensors(directory):
    path = directory / SECOND
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    entry = next(value for value in header.values() if "dtype" in value and value["data_offsets"][0] > 0)
    size = entry["data_offsets"][1] - entry["data_offsets"][0]
    entry["data_offsets"] = [0, size]
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut_short, r"650108 bytes, its header describes 650208; cut short"),
        (append_bytes, r"650209 bytes, its header describes 650208; too long"),
        (break_header, r"is not a safetensors header"),
        (replace_by_text, r"not a safetensors file, or cut short"),
        (empty_file, r"0 bytes, first 8 bytes absent"),
        (remove_shard, r"cannot be read.*No such file"),
        (overlap_tensors, r"gap or overlap"),
    ],
)
def test_damaged_file_is_one_error_with_its_name(checkpoint, damage, message):
    damage(checkpoint)

    with pytest.raises(CheckpointError, match=rf"1 problem \(1 unreadable file\): {SECOND}: .*{message}"):
        load(checkpoint)


def edit_index(edit):
    def apply(directory):
        path = directory / INDEX
        index = json.loads(path.read_text())
        edit(index["weight_map"])
        path.write_text(json.dumps(index))

    return apply


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (edit_index(lambda names: names.pop("norm.weight")), rf"{SECOND}: norm\.weight is not in {INDEX}"),
        (edit_index(put("norm.weight", FIRST)), rf"norm\.weight should be in {FIRST}, is in {SECOND}"),
        (edit_index(put("norm.weight", "../x.safetensors")), r"expected .safetensors files of its own directory"),
        (lambda directory: (directory / INDEX).write_text("{"), rf"{INDEX}: not a readable index"),
        (lambda directory: (directory / INDEX).write_text('{"weight_map": {}}'), r"names no files"),
        (lambda directory: shutil.rmtree(directory), r"no such directory"),
        (lambda directory: [path.unlink() for path in directory.iterdir()], r"neither .* nor any .safetensors"),
    ],
    ids=["name left out", "wrong shard", "path", "not json", "empty", "no directory", "no files"],
)
def test_bad_index_is_one_error(checkpoint, damage, message):
    spec = load_model_spec(checkpoint)
    damage(checkpoint)

    with pytest.raises(CheckpointError, match=message):
        load(checkpoint, spec=spec)


def test_config_with_more_layers_lists_the_first_ten_and_the_count():
    spec = load_model_spec(GOLDEN / "tiny_quant")
    index = json.loads((GOLDEN / "tiny_quant" / INDEX).read_text())
    deeper = msgspec.structs.replace(spec, num_layers=7, compress_ratios=(*spec.compress_ratios, 1))
    num_missing = sum(name.startswith("layers.4.") for name in index["weight_map"])

    with pytest.raises(CheckpointError) as caught:
        load(GOLDEN / "tiny_quant", spec=deeper)

    assert f"{num_missing} problems ({num_missing} missing)" in caught.value.message
    assert caught.value.message.count("layers.6.") == 10
    assert f"and {num_missing - 10} more; nothing was loaded" in caught.value.message
    assert len(caught.value.details["problems"]) == num_missing


def test_dense_experts_of_mixed_dtypes_are_refused(tmp_path):
    target = tmp_path / "model"
    shutil.copytree(GOLDEN / "tiny_dense", target, ignore=shutil.ignore_patterns("cases", "vision"))
    edit_shard(target, FIRST, put("layers.0.ffn.experts.3.w1.weight", torch.ones(32, 96)))

    with pytest.raises(CheckpointError, match=rf"{FIRST}: layers\.0\.ffn\.experts\.3\.w1\.weight is F32, but"):
        load(target)


def test_quantised_files_with_a_dense_config_are_refused():
    spec = msgspec.structs.replace(load_model_spec(GOLDEN / "tiny_quant"), quantized=False)

    with pytest.raises(CheckpointError, match=r"wrong dtype.*extra.*expected BF16 or F32"):
        load(GOLDEN / "tiny_quant", spec=spec)
