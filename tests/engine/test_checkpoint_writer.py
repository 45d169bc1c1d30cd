"""make-checkpoint: what it writes loads, suits the official library, repeats by seed; what it cannot write is refused."""

import argparse
import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from prefill_engine.cli.make_checkpoint import add_arguments, cmd_make_checkpoint
from prefill_engine.model.checkpoint_texts import PRESETS, check_texts, read_preset, without_quantisation
from prefill_engine.model.checkpoint_writer import checkpoint_bytes, write_checkpoint
from prefill_engine.model.engram_tables import build_engram_tables
from prefill_engine.model.tensor_names import build_expected_tensors
from prefill_engine.model.weights import load_parameters
from prefill_kernels.number_formats import dequantise_weight
from prefill_plan.layer_spec import AttnMode, CandidateRole
from prefill_plan.model_spec import load_model_spec

GOLDEN = Path(__file__).parents[1] / "golden"
CPU = torch.device("cpu")


def run(*arguments):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return cmd_make_checkpoint(parser.parse_args([str(argument) for argument in arguments]))


def load(directory):
    spec = load_model_spec(directory)
    return load_parameters(directory, spec, device=CPU, expert_range=range(spec.num_experts))


def digest_files(directory):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()}


@pytest.mark.parametrize("preset", PRESETS)
def test_preset_has_every_kind_of_layer(preset):
    layers = check_texts(read_preset(preset), source=preset).layer_specs()

    assert {layer.mode for layer in layers} == set(AttnMode)
    assert {layer.candidate_role for layer in layers} == set(CandidateRole)
    assert {layer.compress_ratio for layer in layers if layer.has_engram} == {0, 2}


def test_demo_preset_makes_the_default_keep_tokens_meaningful():
    spec = check_texts(read_preset("demo"), source="demo")

    assert (spec.window_tokens, spec.max_position_tokens) == (128, 131_072)
    assert spec.candidate_topk_blocks * spec.candidate_block < 3000  # the candidate filter drops something


@pytest.mark.parametrize("options", [[], ["--dense"], ["--shard-bytes", "300000"], ["--preset", "demo"]], ids=str)
def test_written_checkpoint_loads_complete(tmp_path, options):
    assert run("--out", tmp_path / "ck", *options) == 0

    spec = load_model_spec(tmp_path / "ck")
    assert spec.quantized == ("--dense" not in options)
    assert load(tmp_path / "ck").embed.shape == (512, spec.hidden_size)
    assert build_engram_tables(spec, tmp_path / "ck" / "tokenizer.json") is not None


def test_shards_are_readable_by_the_official_library(tmp_path):
    run("--out", tmp_path / "ck", "--shard-bytes", 300_000)
    index = json.loads((tmp_path / "ck" / "model.safetensors.index.json").read_text())

    found = {}
    for path in sorted((tmp_path / "ck").glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= {name: (path.name, file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118  not a dict

    expected = build_expected_tensors(load_model_spec(tmp_path / "ck"))
    assert {name: shard for name, (shard, _) in found.items()} == index["weight_map"]
    assert {name: tuple(value.shape) for name, (_, value) in found.items()} == {n: t.shape for n, t in expected.items()}
    assert sum(value.nbytes for _, value in found.values()) == index["metadata"]["total_size"]


def test_no_shard_passes_the_limit_unless_one_tensor_does(tmp_path):
    run("--out", tmp_path / "ck", "--shard-bytes", 100_000)

    spec = load_model_spec(tmp_path / "ck")
    shards = list((tmp_path / "ck").glob("*.safetensors"))
    assert checkpoint_bytes(spec) / 100_000 <= len(shards) < 2 * checkpoint_bytes(spec) / 50_000
    assert max(path.stat().st_size for path in shards) < 100_000 + 20_000  # plus its header


def test_same_seed_writes_the_same_bytes(tmp_path):
    run("--out", tmp_path / "a", "--seed", 7)
    run("--out", tmp_path / "b", "--seed", 7)

    assert digest_files(tmp_path / "a") == digest_files(tmp_path / "b")


def test_values_depend_on_the_seed_and_not_on_the_shards(tmp_path):
    run("--out", tmp_path / "one", "--seed", 7)
    run("--out", tmp_path / "many", "--seed", 7, "--shard-bytes", 200_000)
    run("--out", tmp_path / "other", "--seed", 8)

    one, many, other = (load(tmp_path / name) for name in ("one", "many", "other"))
    assert torch.equal(one.layers[5].moe.routed.w1.data, many.layers[5].moe.routed.w1.data)
    assert not torch.equal(one.layers[5].moe.routed.w1.data, other.layers[5].moe.routed.w1.data)


@pytest.mark.parametrize(
    ("pick", "tolerance"),
    [
        (lambda m: m.layers[3].attention.wq_b, 2**-4),
        (lambda m: m.layers[4].engram.wkv, 2**-4),
        (lambda m: m.layers[3].moe.shared.w2, 2**-4),
        (lambda m: m.layers[3].moe.routed.w2, 0.2),
    ],
    ids=["fp8", "engram", "shared", "fp4"],
)
def test_quantised_weights_are_the_dense_ones_rounded(tmp_path, pick, tolerance):
    run("--out", tmp_path / "quant")
    run("--out", tmp_path / "dense", "--dense")

    exact = dequantise_weight(pick(load(tmp_path / "dense")), torch.float32)
    rounded = dequantise_weight(pick(load(tmp_path / "quant")), torch.float32)

    assert 0 < (rounded - exact).norm() / exact.norm() < tolerance


def test_custom_config_brings_its_tokenizer(tmp_path):
    source = GOLDEN / "tiny_dense"

    assert run("--out", tmp_path / "ck", "--config", source / "config.json") == 0

    parameters = load(tmp_path / "ck")  # a config with a vision tower: bias_vl, vision.*, aligner.* are written too
    assert parameters.layers[0].moe.image_bias is not None
    assert (tmp_path / "ck" / "config.json").read_bytes() == (source / "config.json").read_bytes()
    assert (tmp_path / "ck" / "tokenizer_config.json").read_bytes() == (source / "tokenizer_config.json").read_bytes()


def test_directory_that_is_not_empty_is_refused(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("mine")

    assert run("--out", tmp_path) == 2

    assert "not empty (1 entries, the first is notes.txt); nothing was written" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_force_replaces_the_checkpoint_and_keeps_other_files(tmp_path):
    run("--out", tmp_path / "ck", "--shard-bytes", 300_000)
    (tmp_path / "ck" / "notes.txt").write_text("mine")

    assert run("--out", tmp_path / "ck", "--force") == 0

    assert [path.name for path in (tmp_path / "ck").glob("*.safetensors")] == ["model-00001-of-00001.safetensors"]
    assert (tmp_path / "ck" / "notes.txt").read_text() == "mine"
    load(tmp_path / "ck")


def edited_config(tmp_path, **values):
    config = json.loads(read_preset("tiny").config)
    config["text_config"] |= values
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"index_topk": 64}, "index_topk"),
        ({"engram_num_embeddings": [630, 833]}, "833"),
        ({"engram_compressed_vocab_size": 410}, "411 compressed tokens, but engram_compressed_vocab_size is 410"),
        ({"moe_intermediate_size": 1 << 40}, "GB free, the checkpoint needs"),
    ],
    ids=["rule", "table rows", "tokenizer", "disk"],
)
def test_impossible_config_writes_nothing(tmp_path, capsys, values, message):
    config = edited_config(tmp_path, **values)

    assert run("--out", tmp_path / "ck", "--config", config) == 2

    assert message in capsys.readouterr().err
    assert not list((tmp_path / "ck").glob("*"))


def test_unreadable_config_is_refused(tmp_path, capsys):
    assert run("--out", tmp_path / "ck", "--config", tmp_path / "absent.json") == 2
    assert "absent.json: cannot be read" in capsys.readouterr().err


def test_out_that_is_a_file_is_refused(tmp_path, capsys):
    (tmp_path / "file").write_text("")

    assert run("--out", tmp_path / "file") == 2
    assert "is a file, expected a directory" in capsys.readouterr().err


def test_unfinished_checkpoint_has_no_config(tmp_path):
    texts = read_preset("tiny")

    def fail(written):
        raise OSError(28, "No space left on device", written.name)

    with pytest.raises(OSError, match="No space left"):
        write_checkpoint(tmp_path, check_texts(texts, source="tiny"), texts, seed=0, shard_bytes=1 << 30, report=fail)

    assert not (tmp_path / "config.json").exists()


def test_dense_texts_drop_only_the_quantisation():
    quantised = json.loads(read_preset("demo").config)

    dense = json.loads(without_quantisation(read_preset("demo")).config)

    assert {key for key in quantised if key not in dense} == {"quantization_config"}


MEASURE = """
import sys
from pathlib import Path
import torch
from prefill_engine.model.weights import load_parameters
from prefill_plan.model_spec import load_model_spec

def memory_bytes(field):
    line = next(line for line in open("/proc/self/status") if line.startswith(field))
    return int(line.split()[1]) * 1024

spec = load_model_spec(Path(sys.argv[1]))
before = memory_bytes("VmRSS")
parameters = load_parameters(Path(sys.argv[1]), spec, device=torch.device("cpu"), expert_range=range(spec.num_experts))
print(memory_bytes("VmHWM") - before)
"""


def test_load_never_holds_two_copies(tmp_path):
    run("--out", tmp_path / "ck", "--dense", "--config", edited_config(tmp_path, vocab_size=200_000))
    num_bytes = checkpoint_bytes(load_model_spec(tmp_path / "ck"))

    command = [sys.executable, "-c", MEASURE, str(tmp_path / "ck")]
    peak_growth = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    assert num_bytes > 50e6
    assert 0.7 * num_bytes < peak_growth < 1.2 * num_bytes  # the draft's heads (a fifth here) are not read
