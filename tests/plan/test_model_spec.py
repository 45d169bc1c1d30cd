import copy
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from prefill_plan.engram_primes import build_engram_primes
from prefill_plan.errors import ConfigError
from prefill_plan.model_spec import (
    AttnMode,
    CandidateRole,
    LayerSpec,
    Part,
    load_model_spec,
    parse_model_spec,
    released_model_spec,
)

GOLDEN = Path(__file__).parents[1] / "golden"
ABSENT = object()


def released_config() -> dict[str, Any]:
    config: dict[str, Any] = json.loads((files("prefill_plan") / "released_config.json").read_bytes())
    return config


def config_with(path: str, value: object) -> dict[str, Any]:
    """The released config with one key changed, or removed (ABSENT)."""
    config = copy.deepcopy(released_config())
    *parents, key = path.split(".")
    section = config
    for parent in parents:
        section = section[parent]
    if value is ABSENT:
        del section[key]
    else:
        section[key] = value
    return config


def layer(index: int, mode: AttnMode, ratio: int, kv: int, index_key: int, topk: int, **roles: Any) -> LayerSpec:
    return LayerSpec(
        index=index,
        part=Part.ENCODER if index < 20 else Part.DECODER,
        mode=mode,
        compress_ratio=ratio,
        kv_source=kv,
        index_key_source=index_key,
        topk_source=topk,
        candidate_role=roles.get("candidate", CandidateRole.NONE),
        has_engram=roles.get("engram", False),
    )


def test_layer_specs_of_the_release_are_the_table_of_model_md_1_2() -> None:
    table = [layer(0, AttnMode.SWA, 0, -1, -1, -1), layer(1, AttnMode.SWA, 0, -1, -1, -1, engram=True)]
    for source in (2, 8, 14):
        table.append(layer(source, AttnMode.FULL, 2, source, source, source, engram=source == 14))
        table += [layer(index, AttnMode.REUSE, 2, source, -1, source) for index in range(source + 1, source + 6)]
    table.append(layer(20, AttnMode.FULL, 1, 20, 20, 20, candidate=CandidateRole.SOURCE))
    table += [layer(index, AttnMode.REUSE, 1, 20, -1, 20) for index in (21, 22, 23)]
    for source in (24, 28, 32, 36):
        table.append(layer(source, AttnMode.REINDEX, 1, 20, 20, source, candidate=CandidateRole.CONSUMER))
        table += [layer(index, AttnMode.REUSE, 1, 20, -1, source) for index in range(source + 1, source + 4)]

    assert released_model_spec().layer_specs() == tuple(table)


def test_release_has_the_sizes_of_model_md_1_1() -> None:
    spec = released_model_spec()

    assert (spec.hidden_size, spec.num_layers, spec.vocab_size, spec.num_heads, spec.head_dim) == (
        5120, 40, 129280, 64, 512,
    )  # fmt: skip
    assert (spec.first_decoder_layer, spec.window_tokens, spec.max_position_tokens) == (20, 128, 1048576)
    assert spec.yarn is not None
    assert (spec.yarn.factor, spec.yarn.original_tokens) == (16.0, 65536)
    assert spec.draft is not None
    assert (spec.draft.num_layers, spec.draft.target_layers) == (3, (37, 38, 39))
    assert spec.engram is not None
    assert spec.engram.row_width == 6144
    assert spec.quantized


def test_tiny_dense_checkpoint_without_quantization_config_is_accepted() -> None:
    spec = load_model_spec(GOLDEN / "tiny_dense")

    assert not spec.quantized
    assert spec.draft is None
    assert spec.vision is not None
    assert [layer.mode for layer in spec.layer_specs()] == [
        "swa", "swa", "full", "reuse", "full", "reuse", "full", "reuse", "reindex", "reuse",
    ]  # fmt: skip


def test_tiny_quantised_checkpoint_has_a_draft_and_no_vision() -> None:
    spec = load_model_spec(GOLDEN / "tiny_quant" / "config.json")

    assert spec.quantized
    assert spec.vision is None
    assert spec.draft is not None
    assert spec.compress_ratios == (0, 2, 2, 1, 1, 1)


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("model_type", "deepseek_v4", "'deepseek_v41'"),
        ("text_config.tie_word_embeddings", True, "False"),
        ("tie_word_embeddings", True, "False"),
        ("text_config.num_key_value_heads", 8, "1"),
        ("text_config.attention_bias", True, "False"),
        ("text_config.hidden_act", "gelu", "'silu'"),
        ("text_config.scoring_func", "sigmoid", "'sqrtsoftplus'"),
        ("text_config.topk_method", "greedy", "'noaux_tc'"),
        ("text_config.norm_topk_prob", False, "True"),
        ("text_config.n_shared_experts", 2, "1"),
        ("text_config.rope_scaling.rope_type", "linear", "'yarn'"),
        ("quantization_config.quant_method", "awq", "'fp8'"),
        ("quantization_config.activation_scheme", "static", "'dynamic'"),
        ("quantization_config.weight_block_size", [128, 128], "[32, 32]"),
        ("quantization_config.scale_fmt", "e4m3", "'ue8m0'"),
        ("quantization_config.expert_dtype", "fp8", "'fp4'"),
        ("quantization_config.fmt", "e5m2", "'e4m3'"),
    ],
)
def test_unsupported_value_is_refused_with_key_value_and_expectation(path: str, value: object, expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_model_spec(config_with(path, value), source="some/config.json")

    assert (
        error.value.message == f"some/config.json: {path} = {value!r}, expected {expected} (the only supported value)"
    )


@pytest.mark.parametrize(
    "path",
    [
        "model_type",
        "text_config",
        "text_config.hidden_size",
        "text_config.compress_ratios",
        "text_config.rms_norm_eps",
        "text_config.scoring_func",
        "text_config.kv_source_layer_ids",
        "text_config.candidate_topk_blocks",
        "text_config.engram_vocab_size",
        "text_config.dspark_markov_rank",
        "text_config.rope_scaling.factor",
        "vision_config.patch_size",
        "quantization_config.scale_fmt",
        "image_token_id",
    ],
)
def test_missing_key_is_refused_by_its_path(path: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_model_spec(config_with(path, ABSENT), source="config.json")

    assert error.value.message.startswith(f"config.json: {path} is missing, expected ")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("text_config", []),
        ("text_config.hidden_size", "5120"),
        ("text_config.hidden_size", 5120.0),
        ("text_config.hidden_size", True),
        ("text_config.hidden_size", None),
        ("text_config.rms_norm_eps", "1e-20"),
        ("text_config.hc_eps", True),
        ("text_config.swiglu_limit", float("inf")),
        ("text_config.swiglu_limit", float("nan")),
        ("text_config.compress_ratios", 2),
        ("text_config.compress_ratios", "012"),
        ("text_config.kv_source_layer_ids", [2, 8.0, 14, 20]),
        ("text_config.rope_scaling", 16),
        ("vision_config.max_wh_ratio", "wide"),
    ],
)
def test_wrong_type_is_refused_by_its_path(path: str, value: object) -> None:
    with pytest.raises(ConfigError) as error:
        parse_model_spec(config_with(path, value), source="config.json")

    assert error.value.message.startswith(f"config.json: {path} = {value!r}, expected ")


RATIOS = [0, 0] + [2] * 18 + [1] * 20 + [0] * 3


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("text_config.compress_ratios", RATIOS[:-1], "43 integers"),
        ("text_config.compress_ratios", [0, 4, *RATIOS[2:]], "<= 2"),
        ("text_config.compress_ratios", [*RATIOS[:-1], 1], "0 for the 3 draft layers"),
        ("text_config.compress_ratios", [2] * 40 + [0] * 3, "at least one of each"),
        ("text_config.compress_ratios", [1] * 40 + [0] * 3, "at least one of each"),
        ("text_config.compress_ratios", [*RATIOS[:39], 2, 0, 0, 0], "then decoder layers of ratio 1"),
        ("text_config.compress_ratios", [0] * 3 + RATIOS[3:], "layer 2 of ratio 0 no source"),
        ("text_config.kv_source_layer_ids", [], "first decoder layer 20"),
        ("text_config.kv_source_layer_ids", [2, 8, 14], "first decoder layer 20"),
        ("text_config.kv_source_layer_ids", [2, 8, 14, 20, 30], "decoder layers share one KV"),
        ("text_config.kv_source_layer_ids", [8, 2, 14, 20], "strictly ascending"),
        ("text_config.kv_source_layer_ids", [2, 8, 8, 14, 20], "strictly ascending"),
        ("text_config.kv_source_layer_ids", [2, 8, 14, 20, 40], "<= 39"),
        ("text_config.kv_source_layer_ids", [3, 8, 14, 20], "layer 2 of ratio 2 a nearest source"),
        ("text_config.index_source_layer_ids", [2, 8, 20], "all of kv_source_layer_ids"),
        ("text_config.index_source_layer_ids", [1, 2, 8, 14, 20], "ratio > 0"),
        ("text_config.candidate_source_layer_id", 24, "20..20"),
        ("text_config.candidate_block_size", 24, "divisor of 128"),
        ("text_config.candidate_topk_blocks", 64, ">= index_topk = 512"),
        ("text_config.engram_layer_ids", [1, 20], "<= 19"),
        ("text_config.engram_num_embeddings", [384006168], "2 integers"),
        ("text_config.engram_num_embeddings", [384006168, 384016681], "[384006168, 384016682]"),
        ("text_config.engram_max_ngram_size", 5, "2..4"),
        ("text_config.engram_head_dim", 48, "multiple of 32"),
        ("text_config.engram_pad_token_id", 129280, "0..129279"),
        ("text_config.engram_compressed_vocab_size", 129281, "1..129280"),
        ("text_config.dspark_target_layer_ids", [19, 38, 39], ">= 20"),
        ("text_config.dspark_target_layer_ids", [], "at least one decoder layer"),
        ("text_config.dspark_num_experts_per_tok", 129, "1..128"),
        ("text_config.hidden_size", 5136, "multiple of 32"),
        ("text_config.q_lora_rank", 1288, "multiple of 32"),
        ("text_config.moe_intermediate_size", 2305, "multiple of 32"),
        ("text_config.head_dim", 500, "multiple of 32"),
        ("text_config.index_head_dim", 100, "multiple of 32"),
        ("text_config.o_groups", 7, "divisor of num_attention_heads = 64"),
        ("text_config.o_lora_rank", 1025, "multiple of 32"),
        ("text_config.qk_rope_head_dim", 63, "multiple of 2"),
        ("text_config.qk_rope_head_dim", 130, "2..128"),
        ("text_config.num_experts_per_tok", 385, "1..384"),
        ("text_config.sliding_window", 0, ">= 1"),
        ("text_config.rope_scaling.factor", 0.5, ">= 1"),
        ("text_config.rope_scaling.beta_fast", 0.5, "beta_slow = 1"),
        ("vision_config.num_attention_heads", 15, "divisor of hidden_size 1024"),
        ("vision_config.num_attention_heads", 512, "head dim % 4 == 0"),
        ("image_token_id", 129280, "0..129279"),
        ("eos_token_id", -1, "0..129279"),
    ],
)
def test_broken_rule_is_refused(path: str, value: object, expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_model_spec(config_with(path, value), source="config.json")

    assert error.value.message.startswith("config.json: ")
    assert expected in error.value.message


def test_unknown_key_is_tolerated() -> None:
    assert parse_model_spec(config_with("text_config.new_key", 1), source="x") == released_model_spec()


def test_absent_optional_parts_are_none() -> None:
    config = released_config()
    text = config["text_config"]
    text |= {
        "num_nextn_predict_layers": 0,
        "compress_ratios": RATIOS[:40],
        "engram_layer_ids": [],
        "rope_scaling": None,
    }
    text["candidate_source_layer_id"] = None
    del config["vision_config"]

    spec = parse_model_spec(config, source="x")

    assert (spec.draft, spec.engram, spec.yarn, spec.vision, spec.candidate_source) == (None, None, None, None, -1)
    assert all(layer.candidate_role == CandidateRole.NONE for layer in spec.layer_specs())


@pytest.mark.parametrize("data", [b"{", b"[]", b"\xff"])
def test_text_that_is_no_json_object_is_refused(data: bytes) -> None:
    with pytest.raises(ConfigError, match="x: not a JSON object"):
        parse_model_spec(data, source="x")


def test_unreadable_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: cannot read the model config: No such file"):
        load_model_spec(tmp_path)


@pytest.mark.parametrize("model", ["tiny_dense", "tiny_quant"])
def test_engram_primes_are_those_of_the_golden_model(model: str) -> None:
    engram = load_model_spec(GOLDEN / model).engram
    assert engram is not None
    golden = json.loads((GOLDEN / model / "engram_meta.json").read_bytes())["primes"]

    primes = build_engram_primes(
        len(engram.layers), max_ngram=engram.max_ngram, vocab_size=engram.vocab_size, num_heads=engram.num_heads
    )

    assert [[prime for heads in sizes for prime in heads] for sizes in primes] == golden


def test_engram_primes_of_the_release_are_those_of_model_md_2_11() -> None:
    primes = build_engram_primes(2, max_ngram=4, vocab_size=16_000_000, num_heads=8)

    assert primes[0][0] == tuple(16_000_000 + tail for tail in (57, 79, 81, 97, 121, 129, 133, 183))
    assert primes[1][2] == tuple(16_000_000 + tail for tail in (781, 799, 813, 819, 841, 877, 879, 889))
    assert [sum(sum(heads) for heads in sizes) for sizes in primes] == [384_006_168, 384_016_682]


@pytest.mark.parametrize(
    ("num_layers", "max_ngram", "vocab_size", "num_heads"),
    [(0, 4, 97, 2), (1, 1, 97, 2), (1, 4, 0, 2), (1, 4, 1 << 31, 2)],
)
def test_engram_primes_refuse_bad_counts(num_layers: int, max_ngram: int, vocab_size: int, num_heads: int) -> None:
    with pytest.raises(ValueError, match="expected counts >= 1"):
        build_engram_primes(num_layers, max_ngram=max_ngram, vocab_size=vocab_size, num_heads=num_heads)
