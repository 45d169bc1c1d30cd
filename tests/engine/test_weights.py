"""The loader against the golden checkpoints: every tensor in its place, bit by bit."""

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from prefill_engine.model.weights import load_parameters
from prefill_kernels.number_formats import dequantise_fp8_ue8m0, dequantise_weight
from prefill_kernels.weights import Fp4Weight
from prefill_plan.model_spec import load_model_spec

GOLDEN = Path(__file__).parents[1] / "golden"
CPU = torch.device("cpu")
INDEX = "model.safetensors.index.json"


def load(directory, *, expert_range=None):
    spec = load_model_spec(directory)
    experts = expert_range or range(spec.num_experts)
    return load_parameters(directory, spec, device=CPU, expert_range=experts)


def stored_tensors(directory):
    return {name: value for path in directory.glob("*.safetensors") for name, value in load_file(path).items()}


def as_bytes(tensor):
    return tensor.contiguous().view(torch.uint8)


def tensors_of(value):
    """All tensors of a tree of dataclasses and tuples."""
    if isinstance(value, torch.Tensor):
        return [value]
    if dataclasses.is_dataclass(value):
        return [t for field in dataclasses.fields(value) for t in tensors_of(getattr(value, field.name))]
    return [t for item in value for t in tensors_of(item)] if isinstance(value, tuple) else []


@pytest.fixture(scope="module", params=["tiny_dense", "tiny_quant"])
def golden(request):
    directory = GOLDEN / request.param
    return load(directory), stored_tensors(directory)


@pytest.fixture
def checkpoint(tmp_path):
    target = tmp_path / "model"
    shutil.copytree(GOLDEN / "tiny_quant", target, ignore=shutil.ignore_patterns("cases"))
    return target


@pytest.mark.parametrize(
    ("name", "pick"),
    [
        ("embed.weight", lambda m: m.embed),
        ("head.weight", lambda m: m.head.data),
        ("norm.weight", lambda m: m.norm),
        ("layers.0.attn.wq_a.weight", lambda m: m.layers[0].attention.wq_a.data),
        ("layers.1.attn.wo_a.weight", lambda m: m.layers[1].attention.wo_a.data),
        ("layers.3.attn.attn_sink", lambda m: m.layers[3].attention.sink),
        ("layers.2.hc_ffn_fn", lambda m: m.layers[2].mhc_ffn.fn),
        ("layers.2.hc_attn_scale", lambda m: m.layers[2].mhc_attn.scale),
        ("layers.1.engram.embed.weight", lambda m: m.layers[1].engram.table.data),
        ("layers.1.engram.k_weight", lambda m: m.layers[1].engram.key_weight),
        ("layers.1.engram.wkv.weight", lambda m: m.layers[1].engram.wkv.data),
        ("layers.2.ffn.gate.bias", lambda m: m.layers[2].moe.bias),
        ("layers.2.ffn.experts.5.w1.weight", lambda m: m.layers[2].moe.routed.w1.data[5]),
        ("layers.2.ffn.experts.7.w3.weight", lambda m: m.layers[2].moe.routed.w3.data[7]),
        ("layers.2.ffn.experts.0.w2.weight", lambda m: m.layers[2].moe.routed.w2.data[0]),
        ("layers.2.ffn.shared_experts.w3.weight", lambda m: m.layers[2].moe.shared.w3.data),
    ],
)
def test_tensor_of_both_golden_models_is_loaded_bit_by_bit(golden, name, pick):
    parameters, stored = golden

    assert torch.equal(as_bytes(pick(parameters)), as_bytes(stored[name]))


@pytest.mark.parametrize(
    ("name", "pick"),
    [
        ("layers.1.attn.wq_b.scale", lambda m: m.layers[1].attention.wq_b.scale),
        ("layers.1.engram.embed.scale", lambda m: m.layers[1].engram.table.scale),
        ("layers.4.ffn.experts.6.w2.scale", lambda m: m.layers[4].moe.routed.w2.scale[6]),
        ("layers.1.attn.compressor.wgate.weight", lambda m: m.layers[1].attention.compressor.wgate.data),
        ("layers.3.attn.compressor.norm.weight", lambda m: m.layers[3].attention.compressor.norm),
        ("layers.5.attn.indexer.wq_b.weight", lambda m: m.layers[5].attention.indexer.wq_b.data),
        ("layers.3.attn.indexer.wk.weight", lambda m: m.layers[3].attention.indexer.wk.data),
        ("mtp.0.main_proj.scale", lambda m: m.draft.main_proj.scale),
        ("mtp.0.attn.wkv.weight", lambda m: m.draft.wkv[0].data),
        ("mtp.0.attn.kv_norm.weight", lambda m: m.draft.kv_norm[0]),
    ],
)
def test_quantised_tensor_is_loaded_bit_by_bit(name, pick):
    parameters = load(GOLDEN / "tiny_quant")

    assert torch.equal(as_bytes(pick(parameters)), as_bytes(stored_tensors(GOLDEN / "tiny_quant")[name]))


def test_every_byte_that_prefill_needs_is_loaded_once(golden):
    parameters, stored = golden
    skipped = ("vision.", "aligner.", "image_", "mtp.")
    draft = ("mtp.0.attn.wkv.", "mtp.0.attn.kv_norm", "mtp.0.main_")
    expected = sum(v.nbytes for n, v in stored.items() if n.startswith(draft) or not n.startswith(skipped))

    assert sum(tensor.nbytes for tensor in tensors_of(parameters)) == expected


def test_layer_parts_exist_where_the_roles_say():
    layers = load(GOLDEN / "tiny_quant").layers

    assert [layer.attention.compressor is not None for layer in layers] == [False, True, False, True, False, False]
    assert [layer.attention.indexer is not None for layer in layers] == [False, True, False, True, False, True]
    assert layers[3].attention.compressor.wgate is None  # ratio 1
    assert layers[5].attention.indexer.wk is None  # scores the keys of layer 3
    assert [layer.engram is not None for layer in layers] == [False, True, False, False, False, False]
    assert {layer.moe.image_bias for layer in layers} == {None}


def test_image_bias_is_loaded_with_a_vision_tower():
    stored = stored_tensors(GOLDEN / "tiny_dense")

    layers = load(GOLDEN / "tiny_dense").layers

    assert torch.equal(layers[9].moe.image_bias, stored["layers.9.ffn.gate.bias_vl"])


SAMPLES = load_file(GOLDEN / "tiny_quant" / "cases" / "dequant_samples.safetensors")


@pytest.mark.parametrize(
    ("name", "dequantise"),
    [
        ("layers.1.attn.wq_b.weight", lambda m: dequantise_weight(m.layers[1].attention.wq_b, torch.float32)),
        ("layers.2.attn.wo_a.weight", lambda m: dequantise_weight(m.layers[2].attention.wo_a, torch.float32)),
        ("layers.1.engram.wkv.weight", lambda m: dequantise_weight(m.layers[1].engram.wkv, torch.float32)),
        ("layers.1.ffn.experts.3.w1.weight", lambda m: dequantise_expert(m.layers[1].moe.routed.w1, 3)),
        ("layers.1.ffn.experts.3.w2.weight", lambda m: dequantise_expert(m.layers[1].moe.routed.w2, 3)),
        ("layers.1.engram.embed.weight", lambda m: dequantise_table(m.layers[1].engram.table)),
    ],
)
def test_dequantised_weight_equals_the_golden_sample(name, dequantise):
    assert torch.equal(dequantise(load(GOLDEN / "tiny_quant"))[:20].float(), SAMPLES[name])


def dequantise_expert(weight, expert):
    return dequantise_weight(Fp4Weight(data=weight.data[expert], scale=weight.scale[expert]), torch.float32)


def dequantise_table(table):
    return dequantise_fp8_ue8m0(table.data.view(torch.uint8), table.scale)


def test_expert_range_is_the_slice_of_the_full_load():
    full = load(GOLDEN / "tiny_quant")

    part = load(GOLDEN / "tiny_quant", expert_range=range(2, 5))

    assert (full.first_expert, part.first_expert) == (0, 2)
    for layer, whole in zip(part.layers, full.layers, strict=True):
        for mine, all_experts in zip(tensors_of(layer.moe.routed), tensors_of(whole.moe.routed), strict=True):
            assert torch.equal(as_bytes(mine), as_bytes(all_experts[2:5]))


def test_large_tensors_arrive_in_pieces(monkeypatch):
    whole = load(GOLDEN / "tiny_quant")
    monkeypatch.setattr("prefill_engine.model.shard_stream._PIECE_BYTES", 1000)

    pieces = load(GOLDEN / "tiny_quant")

    for one, other in zip(tensors_of(whole), tensors_of(pieces), strict=True):
        assert torch.equal(as_bytes(one), as_bytes(other))


@pytest.mark.parametrize("experts", [range(0), range(3, 3), range(0, 9), range(-1, 4), range(0, 8, 2)])
def test_impossible_expert_range_is_refused(experts):
    with pytest.raises(ValueError, match="8 experts"):
        load_parameters(GOLDEN / "tiny_quant", load_model_spec(GOLDEN / "tiny_quant"), device=CPU, expert_range=experts)


def test_single_file_with_prefixed_names_and_no_index_loads(checkpoint):
    merged = {f"model.{name}": value for name, value in stored_tensors(checkpoint).items()}
    for path in [*checkpoint.glob("*.safetensors"), checkpoint / INDEX]:
        path.unlink()
    save_file(merged, checkpoint / "model.safetensors")

    parameters = load(checkpoint)

    golden = load(GOLDEN / "tiny_quant")
    assert all(
        torch.equal(as_bytes(a), as_bytes(b)) for a, b in zip(tensors_of(parameters), tensors_of(golden), strict=True)
    )
