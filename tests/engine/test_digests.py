"""Digests change with everything that changes what KV means, and with nothing else."""

import json
import shutil
from pathlib import Path

import pytest

from prefill_engine.model.digests import tokenizer_digest, weights_digest
from prefill_plan.errors import CheckpointError

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture
def checkpoint(tmp_path):
    target = tmp_path / "model"
    shutil.copytree(GOLDEN / "tiny_quant", target, ignore=shutil.ignore_patterns("cases"))
    return target


def test_digests_are_32_bytes_and_independent_of_the_place(checkpoint):
    assert len(weights_digest(checkpoint)) == len(tokenizer_digest(checkpoint)) == 32
    assert weights_digest(checkpoint) == weights_digest(GOLDEN / "tiny_quant")
    assert tokenizer_digest(checkpoint) == tokenizer_digest(GOLDEN / "tiny_dense")  # the same file


def test_digest_of_a_known_file_is_stable():
    """A changed value here means that stores filled by an older version are not found any more."""
    assert (
        weights_digest(GOLDEN / "tiny_quant").hex()
        == "3b5f1b46fc50ce50917e9c84700a92d9a48d754c562d28bb27a86ceaa229698b"
    )


def edit_config(directory):
    path = directory / "config.json"
    path.write_text(path.read_text().replace('"routed_scaling_factor": 1.5', '"routed_scaling_factor": 2.5'))


def edit_index(directory):
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["metadata"]["total_size"] += 1
    path.write_text(json.dumps(index))


def edit_header(directory):
    path = directory / "model-00002-of-00002.safetensors"
    content = bytearray(path.read_bytes())
    content[8 : 8 + 200] = content[8 : 8 + 200].replace(b'"pt"', b'"PT"')
    path.write_bytes(content)


def grow_shard(directory):
    path = directory / "model-00001-of-00002.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    path.write_bytes((length + 8).to_bytes(8, "little") + content[8 : 8 + length] + b" " * 8 + content[8 + length :])


def rename_shard(directory):
    (directory / "model-00001-of-00002.safetensors").rename(directory / "a.safetensors")
    path = directory / "model.safetensors.index.json"
    path.write_text(path.read_text().replace("model-00001-of-00002.safetensors", "a.safetensors"))


@pytest.mark.parametrize("edit", [edit_config, edit_index, edit_header, grow_shard, rename_shard])
def test_weights_digest_changes_with(checkpoint, edit):
    before = weights_digest(checkpoint)

    edit(checkpoint)

    assert weights_digest(checkpoint) != before


def test_weights_digest_ignores_the_tokenizer(checkpoint):
    (checkpoint / "tokenizer.json").write_bytes(b"other")

    assert weights_digest(checkpoint) == weights_digest(GOLDEN / "tiny_quant")
    assert tokenizer_digest(checkpoint) != tokenizer_digest(GOLDEN / "tiny_quant")


def test_single_file_without_index_has_a_digest(checkpoint):
    (checkpoint / "model.safetensors.index.json").unlink()

    assert weights_digest(checkpoint) != weights_digest(GOLDEN / "tiny_quant")


@pytest.mark.parametrize("name", ["config.json", "model-00001-of-00002.safetensors"])
def test_missing_file_is_a_checkpoint_error(checkpoint, name):
    (checkpoint / name).unlink()

    with pytest.raises(CheckpointError, match=name):
        weights_digest(checkpoint)


def test_missing_tokenizer_is_a_checkpoint_error(checkpoint):
    (checkpoint / "tokenizer.json").unlink()

    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        tokenizer_digest(checkpoint)
