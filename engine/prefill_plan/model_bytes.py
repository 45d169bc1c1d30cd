"""Bytes of a checkpoint's tensors by class, counted from the ModelSpec (model.md 4, perf.md 1).

The memory plan multiplies and shards them. The trap: the classes are those of the memory plan, so `dense` is what every
rank holds whole (embedding and head included), and experts, Engram tables, draft and vision are apart.
"""

from prefill_plan.config import Struct
from prefill_plan.model_spec import ModelSpec

_BF16 = 2
_FP32 = 4
# One ue8m0 byte per 32 x 32 tile of an fp8 weight; per 32 columns of a row in fp4 and in the Engram tables (perf.md 1).
_TILE = 32


class ModelBytes(Struct):
    """All counts in bytes but engram_rows."""

    expert: int
    """One routed expert of one layer; draft experts have the same shape."""
    dense: int
    """Attention, shared experts, routers, mHC, norms, compressors, indexers, Engram projections, embedding, head."""
    engram_rows: int
    """Rows of all Engram tables."""
    engram_row: int
    draft: int
    """Draft layers without their routed experts."""
    vision: int
    """Tower, aligner, and the embeddings of image start, end and newline."""
    dense_expansion: int
    """What attention and shared-expert weights grow by when kept as bf16 (sm_90 exact path)."""


def count_model_bytes(spec: ModelSpec) -> ModelBytes:
    """Counts every tensor class of model.md 4. For the release: 18,800,640 B per expert, 9,846,748,608 B dense."""
    attention = sum(_matrix(spec, *shape) for shape in _attention_shapes(spec))
    shared = sum(_matrix(spec, *shape) for shape in _expert_shapes(spec))
    layer = attention + shared + _router(spec, spec.num_experts) + _mhc(spec) + _layer_norms(spec)
    top = 2 * spec.vocab_size * spec.hidden_size * _BF16 + spec.hidden_size * _BF16
    fp8_shapes = (*_attention_shapes(spec), *_expert_shapes(spec))
    engram = spec.engram
    return ModelBytes(
        expert=sum(_expert_matrix(spec, *shape) for shape in _expert_shapes(spec)),
        dense=spec.num_layers * layer + top + _indexers(spec) + _compressors(spec) + _engram_projections(spec),
        engram_rows=sum(engram.num_embeddings) if engram else 0,
        engram_row=_table_row(spec, engram.head_dim) if engram else 0,
        draft=_draft(spec, layer_without_router=layer - _router(spec, spec.num_experts)),
        vision=_vision(spec),
        dense_expansion=spec.num_layers * sum(o * i * _BF16 - _matrix(spec, o, i) for o, i in fp8_shapes),
    )


def _matrix(spec: ModelSpec, out_size: int, in_size: int) -> int:
    """An fp8 weight with its tile scales; bf16 in a dense checkpoint."""
    if not spec.quantized:
        return out_size * in_size * _BF16
    return out_size * in_size + -(-out_size // _TILE) * -(-in_size // _TILE)


def _expert_matrix(spec: ModelSpec, out_size: int, in_size: int) -> int:
    """An fp4 weight with its row scales; bf16 in a dense checkpoint."""
    if not spec.quantized:
        return out_size * in_size * _BF16
    return out_size * in_size // 2 + out_size * in_size // _TILE


def _table_row(spec: ModelSpec, width: int) -> int:
    return width + width // _TILE if spec.quantized else width * _BF16


def _attention_shapes(spec: ModelSpec) -> tuple[tuple[int, int], ...]:
    heads_width = spec.num_heads * spec.head_dim
    o_width = spec.o_groups * spec.o_lora_rank
    return (
        (spec.q_lora_rank, spec.hidden_size),
        (heads_width, spec.q_lora_rank),
        (spec.head_dim, spec.hidden_size),
        (o_width, heads_width // spec.o_groups),
        (spec.hidden_size, o_width),
    )


def _expert_shapes(spec: ModelSpec) -> tuple[tuple[int, int], ...]:
    gate_or_up = (spec.moe_inter_size, spec.hidden_size)
    return gate_or_up, gate_or_up, (spec.hidden_size, spec.moe_inter_size)


def _router(spec: ModelSpec, num_experts: int) -> int:
    biases = 2 if spec.vision else 1
    return num_experts * (spec.hidden_size * _BF16 + biases * _FP32)


def _mhc(spec: ModelSpec) -> int:
    """fn, base and scale of the attention and the FFN side (model.md 2.2)."""
    mixes = spec.hc_mult * (2 + spec.hc_mult)
    return 2 * (mixes * spec.hc_mult * spec.hidden_size + mixes + 3) * _FP32


def _layer_norms(spec: ModelSpec) -> int:
    """attn_norm, ffn_norm, q_norm, kv_norm and the fp32 sinks."""
    return (2 * spec.hidden_size + spec.q_lora_rank + spec.head_dim) * _BF16 + spec.num_heads * _FP32


def _indexers(spec: ModelSpec) -> int:
    query = _matrix(spec, spec.index_num_heads * spec.index_head_dim, spec.q_lora_rank)
    head_weights = spec.index_num_heads * spec.hidden_size * _BF16
    key_and_norm = (spec.head_dim + 1) * spec.index_head_dim * _BF16
    return len(spec.index_sources) * (query + head_weights) + len(spec.kv_sources) * key_and_norm


def _compressors(spec: ModelSpec) -> int:
    """wkv and norm of each KV source; wgate of those that pool pairs (model.md 2.5)."""
    projection = spec.head_dim * spec.hidden_size * _BF16
    pairs = sum(spec.compress_ratios[layer] == 2 for layer in spec.kv_sources)
    return (len(spec.kv_sources) + pairs) * projection + len(spec.kv_sources) * spec.head_dim * _BF16


def _engram_projections(spec: ModelSpec) -> int:
    if spec.engram is None:
        return 0
    key_value = _matrix(spec, (spec.hc_mult + 1) * spec.hidden_size, spec.engram.row_width)
    gate_weights = 2 * spec.hc_mult * spec.hidden_size * _BF16
    return len(spec.engram.layers) * (key_value + gate_weights)


def _draft(spec: ModelSpec, *, layer_without_router: int) -> int:
    """Draft layers, main_proj, main_norm, last norm, Markov head, confidence head (model.md 4.4)."""
    draft = spec.draft
    if draft is None:
        return 0
    layers = draft.num_layers * (layer_without_router + _router(spec, draft.num_experts))
    main_projection = _matrix(spec, spec.hidden_size, len(draft.target_layers) * spec.hidden_size)
    markov = 2 * spec.vocab_size * draft.markov_rank
    confidence = spec.hidden_size + draft.markov_rank
    return layers + main_projection + (2 * spec.hidden_size + markov + confidence) * _BF16


def _vision(spec: ModelSpec) -> int:
    """Everything of model.md 4.5 and the three image embeddings of 4.3, all bf16."""
    vision = spec.vision
    if vision is None:
        return 0
    width, inter, hidden = vision.hidden_size, vision.intermediate_size, spec.hidden_size
    patch = width * (3 * vision.patch_size**2) + width
    block = 2 * width + 3 * width * (width + 1) + width * (width + 1) + 2 * inter * width + width * inter
    aligner = hidden * (vision.downsample_ratio**2 * width + 1) + hidden * (hidden + 1)
    return (patch + vision.num_layers * block + width + aligner + 3 * hidden) * _BF16
