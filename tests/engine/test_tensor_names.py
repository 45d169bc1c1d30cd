"""The name table against model.md 4 and the golden checkpoints."""

import json
from pathlib import Path

import pytest

from prefill_engine.model.tensor_names import build_expected_tensors, scale_name, strip_prefix
from prefill_plan.model_spec import load_model_spec, released_model_spec

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture(scope="module")
def released():
    return build_expected_tensors(released_model_spec())


def test_released_model_has_the_counted_number_of_tensors(released):
    assert len(released) == 96_085  # model.md 4.6, equal to a scan of the released shards


@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [
        ("layers.0.attn.wq_a.weight", "F8_E4M3", (1280, 5120)),
        ("layers.0.attn.wq_a.scale", "F8_E8M0", (40, 160)),
        ("layers.39.attn.wq_b.scale", "F8_E8M0", (1024, 40)),
        ("layers.5.attn.wo_a.weight", "F8_E4M3", (8192, 4096)),
        ("layers.5.attn.wo_b.scale", "F8_E8M0", (160, 256)),
        ("layers.7.attn.attn_sink", "F32", (64,)),
        ("layers.7.hc_ffn_fn", "F32", (24, 20480)),
        ("layers.7.ffn.gate.bias_vl", "F32", (384,)),
        ("layers.7.ffn.experts.383.w1.weight", "I8", (2304, 2560)),
        ("layers.7.ffn.experts.383.w2.scale", "F8_E8M0", (5120, 72)),
        ("layers.7.ffn.shared_experts.w2.scale", "F8_E8M0", (160, 72)),
        ("layers.14.attn.compressor.wgate.weight", "BF16", (512, 5120)),
        ("layers.36.attn.indexer.wq_b.weight", "F8_E4M3", (4096, 1280)),
        ("layers.20.attn.indexer.wk.weight", "BF16", (128, 512)),
        ("layers.14.engram.embed.weight", "F8_E4M3", (384016682, 256)),
        ("layers.1.engram.embed.scale", "F8_E8M0", (384006168, 8)),
        ("layers.1.engram.wkv.scale", "F8_E8M0", (800, 192)),
        ("mtp.0.main_proj.weight", "F8_E4M3", (5120, 15360)),
        ("mtp.2.confidence_head.proj.weight", "BF16", (1, 5376)),
        ("mtp.1.ffn.experts.127.w3.weight", "I8", (2304, 2560)),
        ("vision.patch_embed.proj.weight", "BF16", (1024, 588)),
        ("vision.blocks.31.mlp.w1.weight", "BF16", (5632, 1024)),
        ("aligner.w1.weight", "BF16", (5120, 9216)),
        ("head.weight", "BF16", (129280, 5120)),
    ],
)
def test_released_tensor_is_as_in_the_inventory(released, name, dtype, shape):
    assert (released[name].dtypes[0], released[name].shape) == (dtype, shape)


@pytest.mark.parametrize(
    "name",
    [
        "layers.20.attn.compressor.wgate.weight",  # ratio 1 has no gate
        "layers.24.attn.indexer.wk.weight",  # reindex layers score the shared keys
        "layers.3.attn.compressor.wkv.weight",
        "layers.0.attn.indexer.wq_b.weight",
        "mtp.0.ffn.experts.128.w1.weight",
        "mtp.1.main_norm.weight",
        "hc_head_fn",
    ],
)
def test_tensor_of_another_kind_of_layer_is_not_expected(released, name):
    assert name not in released


def test_prefill_needs_only_the_window_projection_of_a_draft_layer(released):
    needed = {name for name, tensor in released.items() if name.startswith("mtp.1.") and tensor.needed}

    assert needed == {"mtp.1.attn.wkv.weight", "mtp.1.attn.wkv.scale", "mtp.1.attn.kv_norm.weight"}


@pytest.mark.parametrize("name", ["tiny_dense", "tiny_quant"])
def test_golden_index_lists_exactly_the_expected_names(name):
    index = json.loads((GOLDEN / name / "model.safetensors.index.json").read_text())

    assert set(build_expected_tensors(load_model_spec(GOLDEN / name))) == set(index["weight_map"])


def test_names_lose_the_optional_prefix_and_gain_a_scale():
    assert strip_prefix("model.layers.0.attn_norm.weight") == "layers.0.attn_norm.weight"
    assert scale_name("layers.0.attn.wkv.weight") == "layers.0.attn.wkv.scale"
