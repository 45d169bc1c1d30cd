"""Compares loaded weights, dequantised, with golden samples under the checkpoint's tensor names: bit for bit."""

from collections.abc import Mapping

import torch
from torch import Tensor

from prefill_engine.check.compare import Judge
from prefill_engine.model.parameters import AttentionParameters, LayerParameters, ModelParameters
from prefill_kernels.number_formats import dequantise_weight
from prefill_kernels.numerics import Numerics
from prefill_kernels.ops import Ops
from prefill_kernels.weights import DenseWeight, ExpertWeights, Fp4Weight, Fp8Weight, Weight

_WIDE = Numerics(activation=torch.float32, quantise_activations=False, quantise_cache=False)


def compare_dequantised(judge: Judge, samples: Mapping[str, Tensor], parameters: ModelParameters, *, ops: Ops) -> None:
    """One finding per sample: the number of elements of its leading rows that differ."""
    for name, want in samples.items():
        prefix, layer, *path = name.removesuffix(".weight").split(".")
        if prefix != "layers":
            raise ValueError(f"sample {name}: expected a tensor of a main layer")
        judge.exact(name, _rows(parameters.layers[int(layer)], path, len(want), ops), want)


def _rows(layer: LayerParameters, path: list[str], num_rows: int, ops: Ops) -> Tensor:
    match path:
        case ["engram", "embed"]:
            assert layer.engram is not None, "sample of an Engram table in a layer without one"
            return ops.engram_lookup(layer.engram.table, torch.arange(num_rows)[:, None], numerics=_WIDE).plain
        case ["engram", "wkv"]:
            assert layer.engram is not None, "sample of an Engram weight in a layer without one"
            weight = layer.engram.wkv
        case ["attn", "indexer", "wq_b"]:
            assert layer.attention.indexer is not None, "sample of an indexer in a layer without one"
            weight = layer.attention.indexer.wq_b
        case ["attn", matrix]:
            weight = _attention_weight(layer.attention, matrix)
        case ["ffn", "shared_experts", matrix]:
            weight = _expert_weight(layer.moe.shared, matrix)
        case ["ffn", "experts", expert, matrix]:
            weight = _expert(_expert_weight(layer.moe.routed, matrix), int(expert))
        case _:
            raise ValueError(f"sample {'.'.join(path)}: no quantised tensor of that name")
    return dequantise_weight(weight, torch.float32)[:num_rows]


def _attention_weight(attention: AttentionParameters, matrix: str) -> Weight:
    weights = {
        "wq_a": attention.wq_a,
        "wq_b": attention.wq_b,
        "wkv": attention.wkv,
        "wo_a": attention.wo_a,
        "wo_b": attention.wo_b,
    }
    return weights[matrix]


def _expert_weight(experts: ExpertWeights, matrix: str) -> Weight:
    return {"w1": experts.w1, "w2": experts.w2, "w3": experts.w3}[matrix]


def _expert(stacked: Weight, expert: int) -> Weight:
    match stacked:
        case DenseWeight():
            return DenseWeight(data=stacked.data[expert])
        case Fp8Weight():
            return Fp8Weight(data=stacked.data[expert], scale=stacked.scale[expert])
        case Fp4Weight():
            return Fp4Weight(data=stacked.data[expert], scale=stacked.scale[expert])
