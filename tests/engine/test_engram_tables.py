"""Engram constants against the golden metadata and the released values printed in model.md 2.11."""

import json
from pathlib import Path

import msgspec
import pytest
import torch

from prefill_engine.model.engram_tables import build_engram_tables, build_token_map, engram_multipliers
from prefill_plan.engram_primes import build_engram_primes
from prefill_plan.errors import CheckpointError, ConfigError
from prefill_plan.model_spec import load_model_spec, released_model_spec

GOLDEN = Path(__file__).parents[1] / "golden"


def load_golden(name):
    directory = GOLDEN / name
    spec = load_model_spec(directory)
    meta = json.loads((directory / "engram_meta.json").read_text())
    return build_engram_tables(spec, directory / "tokenizer.json"), meta


@pytest.mark.parametrize("name", ["tiny_dense", "tiny_quant"])
def test_tables_equal_golden_metadata(name):
    tables, meta = load_golden(name)

    assert tables.token_map.tolist() == meta["token_map"]
    assert tables.pad_id == meta["pad_compressed_id"]
    assert [layer.multipliers.tolist() for layer in tables.layers] == meta["multipliers"]
    assert [layer.primes.flatten().tolist() for layer in tables.layers] == meta["primes"]
    assert [layer.offsets.tolist() for layer in tables.layers] == meta["offsets"]


def test_tables_have_one_prime_per_ngram_size_and_head():
    tables, _ = load_golden("tiny_dense")

    assert [tuple(layer.primes.shape) for layer in tables.layers] == [(3, 2), (3, 2)]
    assert {layer.primes.dtype for layer in tables.layers} == {torch.int64}


def test_for_layer_finds_engram_layers_only():
    tables, _ = load_golden("tiny_dense")

    assert tables.for_layer(4).layer == 4
    with pytest.raises(KeyError):
        tables.for_layer(2)


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (1, (76632096046245, 4839876093313, 35959672319349, 73987337458391)),
        (14, (67716810739261, 51510806800915, 30921347202721, 82619226485591)),
    ],
)
def test_released_multipliers(layer, expected):
    assert engram_multipliers(released_model_spec().engram, layer) == expected


def test_released_primes_and_row_counts():
    engram = released_model_spec().engram
    primes = build_engram_primes(
        len(engram.layers), max_ngram=engram.max_ngram, vocab_size=engram.vocab_size, num_heads=engram.num_heads
    )

    assert [prime - 16_000_000 for prime in primes[0][0]] == [57, 79, 81, 97, 121, 129, 133, 183]
    assert [prime - 16_000_000 for prime in primes[0][2]] == [339, 381, 393, 399, 403, 409, 447, 463]
    assert [prime - 16_000_000 for prime in primes[1][0]] == [477, 487, 499, 507, 511, 573, 609, 627]
    assert [prime - 16_000_000 for prime in primes[1][2]] == [781, 799, 813, 819, 841, 877, 879, 889]
    assert [sum(sum(size) for size in layer) for layer in primes] == [384_006_168, 384_016_682]


def tokenizer_of(*pieces: str) -> bytes:
    vocab = {piece: index for index, piece in enumerate(pieces)}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": pieces[0]}
    return json.dumps({"version": "1.0", "added_tokens": [], "model": model}).encode()


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        (("The", "the", "THE"), [0, 0, 0]),
        (("é", "e", "É"), [0, 0, 0]),
        (("ﬁ", "fi"), [0, 0]),
        ((" a", "a", "a\n"), [0, 0, 0]),
        ((" ", "\t \n", "x"), [0, 0, 1]),
        (("a b", "a \t b", "ab"), [0, 0, 1]),
        (("\u0301", "\u0300"), [0, 1]),
        (("b", "a", "B"), [0, 1, 0]),
        (("x\ufffd", "X\ufffd"), [0, 1]),
    ],
    ids=[
        "case",
        "accents",
        "compatibility",
        "strip",
        "lone space",
        "inner space",
        "empty after normalising keeps its text",
        "first appearance",
        "broken character keeps its piece",
    ],
)
def test_tokens_that_read_alike_share_a_compressed_id(pieces, expected):
    assert build_token_map(tokenizer_of(*pieces), source="test") == expected


def test_ids_beyond_the_tokenizer_mean_pad():
    directory = GOLDEN / "tiny_dense"
    spec = msgspec.structs.replace(load_model_spec(directory), vocab_size=520)

    tables = build_engram_tables(spec, directory / "tokenizer.json")

    assert tables.token_map[512:].tolist() == [tables.pad_id] * 8


def test_model_without_engram_has_no_tables(tmp_path):
    spec = msgspec.structs.replace(load_model_spec(GOLDEN / "tiny_dense"), engram=None)

    assert build_engram_tables(spec, tmp_path / "absent.json") is None


def test_foreign_tokenizer_is_refused_with_both_numbers():
    spec = load_model_spec(GOLDEN / "tiny_dense")
    engram = msgspec.structs.replace(spec.engram, compressed_vocab_size=344)

    with pytest.raises(CheckpointError, match=r"345 compressed tokens.*engram_compressed_vocab_size is 344"):
        build_engram_tables(msgspec.structs.replace(spec, engram=engram), GOLDEN / "tiny_dense" / "tokenizer.json")


def test_table_with_too_few_rows_is_refused_with_both_numbers():
    spec = load_model_spec(GOLDEN / "tiny_dense")
    engram = msgspec.structs.replace(spec.engram, num_embeddings=(630, 833))

    with pytest.raises(ConfigError, match=r"833 for layer 4.*834 rows"):
        build_engram_tables(msgspec.structs.replace(spec, engram=engram), GOLDEN / "tiny_dense" / "tokenizer.json")


def test_tokenizer_larger_than_the_vocabulary_is_refused():
    spec = msgspec.structs.replace(load_model_spec(GOLDEN / "tiny_dense"), vocab_size=500)

    with pytest.raises(CheckpointError, match=r"512 tokens.*vocab_size is 500"):
        build_engram_tables(spec, GOLDEN / "tiny_dense" / "tokenizer.json")


@pytest.mark.parametrize("content", [None, b"", b'{"model": 1}'], ids=["absent", "empty", "not a tokenizer"])
def test_unreadable_tokenizer_is_one_error(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        build_engram_tables(load_model_spec(GOLDEN / "tiny_dense"), path)
