"""The tensors of a loaded model, by layer. Filled by weights.py, read by the model; frozen, no behaviour.

Norm weights are bfloat16 or float32 [width]. Legend of shapes: model.md 4.1 and 4.2.
"""

from dataclasses import dataclass

from torch import Tensor

from prefill_kernels.weights import DenseWeight, EngramTable, ExpertWeights, MhcWeights, Weight


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressorParameters:
    """wkv [C, D]; wgate [C, D] (None at ratio 1); norm [C]. Only at KV source layers."""

    wkv: DenseWeight
    wgate: DenseWeight | None
    norm: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerParameters:
    """wq_b [heads * I, q_lora]; weights_proj [heads, D]; wk [I, C] and k_norm [I] only at KV source layers."""

    wq_b: Weight
    weights_proj: DenseWeight
    wk: DenseWeight | None
    k_norm: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionParameters:
    wq_a: Weight
    q_norm: Tensor
    wq_b: Weight
    wkv: Weight
    kv_norm: Tensor
    wo_a: Weight
    wo_b: Weight
    sink: Tensor
    """[H] float32 raw logits."""
    compressor: CompressorParameters | None
    indexer: IndexerParameters | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeParameters:
    gate: Tensor
    """[X, D] bfloat16."""
    bias: Tensor
    """[X] float32."""
    image_bias: Tensor | None
    """[X] float32; None in checkpoints without vision."""
    routed: ExpertWeights
    """Local experts only, [num_local, ..]."""
    shared: ExpertWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class EngramParameters:
    table: EngramTable
    wkv: Weight
    query_weight: Tensor
    """[S, D]."""
    key_weight: Tensor
    """[S, D]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerParameters:
    attn_norm: Tensor
    ffn_norm: Tensor
    mhc_attn: MhcWeights
    mhc_ffn: MhcWeights
    attention: AttentionParameters
    moe: MoeParameters
    engram: EngramParameters | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftParameters:
    """What prefill needs of DSpark (model.md 2.13): the main projection, and each draft layer's window-KV projection."""

    main_proj: Weight
    """[D, num_targets * D]."""
    main_norm: Tensor
    wkv: tuple[Weight, ...]
    kv_norm: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelParameters:
    embed: Tensor
    """[V, D] bfloat16."""
    layers: tuple[LayerParameters, ...]
    norm: Tensor
    head: DenseWeight
    draft: DraftParameters | None
    first_expert: int
    """Logical id of the first local routed expert; 0 with one EP rank."""
