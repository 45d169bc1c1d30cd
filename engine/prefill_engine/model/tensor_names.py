"""Every tensor of an official checkpoint: name, shape and stored dtypes, derived from a ModelSpec (model.md 3.2, 4).

The table below is data: one Rule per kind of tensor, grouped by the kind of layer that has it. weights.py compares
shards with it, checkpoint_writer.py writes by it. No torch. The trap: a quantised `X.weight` has an `X.scale` of its
own shape, so one rule can mean two tensors.

Letters of the shapes: D hidden, V vocab, H heads, C head dim, P heads * C, Q q-lora rank, O o-groups * o-lora rank,
W P / o-groups, I index head dim, J index heads, K J * I, S streams, M mixes 2S + S * S, F S * D, X experts, N expert
inter size, L of the shared experts together, R Engram rows, E Engram head dim, G concatenated Engram rows, U (S + 1) * D,
T draft targets * D, B markov rank, A D + B. Vision: vd hidden, vq 3 * hidden, vi inter, vg 2 * inter, vp patch values,
vu unfolded.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from prefill_plan.model_spec import DraftSpec, EngramSpec, LayerSpec, ModelSpec, VisionSpec

BLOCK = 32
"""Side of an fp8 weight tile and columns per fp4 or Engram scale (config: weight_block_size)."""


class Storage(StrEnum):
    """How a quantised checkpoint stores a tensor. A dense one stores all but F32 as BF16 or F32."""

    FP8 = "fp8"
    """F8_E4M3 [out, in], scale F8_E8M0 [ceil(out/32), ceil(in/32)]."""
    FP4 = "fp4"
    """I8 [out, in/2] of packed e2m1, scale F8_E8M0 [out, in/32]."""
    ROWS = "rows"
    """F8_E4M3 [rows, width], scale F8_E8M0 [rows, width/32]: the Engram table."""
    BF16 = "bf16"
    NORM = "norm"
    """BF16 or F32 (decisions C56)."""
    F32 = "f32"


_STORED_DTYPES = {
    Storage.FP8: ("F8_E4M3",),
    Storage.FP4: ("I8",),
    Storage.ROWS: ("F8_E4M3",),
    Storage.BF16: ("BF16",),
    Storage.NORM: ("BF16", "F32"),
    Storage.F32: ("F32",),
}
SCALED = (Storage.FP8, Storage.FP4, Storage.ROWS)
SCALE_DTYPE = "F8_E8M0"


@dataclass(frozen=True, slots=True)
class Rule:
    """Name below its layer's prefix, storage, and the letters of its shape."""

    name: str
    storage: Storage
    shape: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedTensor:
    """One tensor that a checkpoint has, or (needed False) may have without prefill reading it."""

    name: str
    rule: Rule
    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    needed: bool
    is_scale: bool


_ATTENTION = (
    Rule("attn.wq_a.weight", Storage.FP8, ("Q", "D")),
    Rule("attn.q_norm.weight", Storage.NORM, ("Q",)),
    Rule("attn.wq_b.weight", Storage.FP8, ("P", "Q")),
    Rule("attn.wkv.weight", Storage.FP8, ("C", "D")),
    Rule("attn.kv_norm.weight", Storage.NORM, ("C",)),
    Rule("attn.wo_a.weight", Storage.FP8, ("O", "W")),
    Rule("attn.wo_b.weight", Storage.FP8, ("D", "O")),
    Rule("attn.attn_sink", Storage.F32, ("H",)),
)
_LAYER = (
    Rule("attn_norm.weight", Storage.NORM, ("D",)),
    Rule("ffn_norm.weight", Storage.NORM, ("D",)),
    *_ATTENTION,
    Rule("hc_attn_fn", Storage.F32, ("M", "F")),
    Rule("hc_attn_base", Storage.F32, ("M",)),
    Rule("hc_attn_scale", Storage.F32, ("3",)),
    Rule("hc_ffn_fn", Storage.F32, ("M", "F")),
    Rule("hc_ffn_base", Storage.F32, ("M",)),
    Rule("hc_ffn_scale", Storage.F32, ("3",)),
    Rule("ffn.gate.weight", Storage.BF16, ("X", "D")),
    Rule("ffn.gate.bias", Storage.F32, ("X",)),
    Rule("ffn.shared_experts.w1.weight", Storage.FP8, ("L", "D")),
    Rule("ffn.shared_experts.w3.weight", Storage.FP8, ("L", "D")),
    Rule("ffn.shared_experts.w2.weight", Storage.FP8, ("D", "L")),
)
_IMAGE_BIAS = (Rule("ffn.gate.bias_vl", Storage.F32, ("X",)),)
_EXPERT = (
    Rule("w1.weight", Storage.FP4, ("N", "D")),
    Rule("w3.weight", Storage.FP4, ("N", "D")),
    Rule("w2.weight", Storage.FP4, ("D", "N")),
)
_COMPRESSOR = (
    Rule("attn.compressor.wkv.weight", Storage.BF16, ("C", "D")),
    Rule("attn.compressor.norm.weight", Storage.NORM, ("C",)),
)
_COMPRESSOR_GATE = (Rule("attn.compressor.wgate.weight", Storage.BF16, ("C", "D")),)
_INDEXER = (
    Rule("attn.indexer.wq_b.weight", Storage.FP8, ("K", "Q")),
    Rule("attn.indexer.weights_proj.weight", Storage.BF16, ("J", "D")),
)
_INDEX_KEY = (
    Rule("attn.indexer.wk.weight", Storage.BF16, ("I", "C")),
    Rule("attn.indexer.k_norm.weight", Storage.NORM, ("I",)),
)
_ENGRAM = (
    Rule("engram.embed.weight", Storage.ROWS, ("R", "E")),
    Rule("engram.wkv.weight", Storage.FP8, ("U", "G")),
    Rule("engram.q_weight", Storage.BF16, ("S", "D")),
    Rule("engram.k_weight", Storage.BF16, ("S", "D")),
)
_GLOBAL = (
    Rule("embed.weight", Storage.BF16, ("V", "D")),
    Rule("head.weight", Storage.BF16, ("V", "D")),
    Rule("norm.weight", Storage.NORM, ("D",)),
)
_DRAFT_FIRST = (
    Rule("main_proj.weight", Storage.FP8, ("D", "T")),
    Rule("main_norm.weight", Storage.NORM, ("D",)),
)
_DRAFT_LAST = (
    Rule("norm.weight", Storage.NORM, ("D",)),
    Rule("markov_head.embed.weight", Storage.BF16, ("V", "B")),
    Rule("markov_head.head.weight", Storage.BF16, ("V", "B")),
    Rule("confidence_head.proj.weight", Storage.BF16, ("1", "A")),
)
_DRAFT_NEEDED = ("attn.wkv.weight", "attn.kv_norm.weight", "main_proj.weight", "main_norm.weight")
"""All that prefill runs of DSpark (model.md 2.13)."""
_IMAGE_TOKENS = (
    Rule("image_start", Storage.BF16, ("D",)),
    Rule("image_newline", Storage.BF16, ("D",)),
    Rule("image_end", Storage.BF16, ("D",)),
)
_VISION = (
    Rule("vision.patch_embed.proj.weight", Storage.BF16, ("vd", "vp")),
    Rule("vision.patch_embed.proj.bias", Storage.BF16, ("vd",)),
    Rule("vision.norm.weight", Storage.NORM, ("vd",)),
    Rule("aligner.w1.weight", Storage.BF16, ("D", "vu")),
    Rule("aligner.w1.bias", Storage.BF16, ("D",)),
    Rule("aligner.w2.weight", Storage.BF16, ("D", "D")),
    Rule("aligner.w2.bias", Storage.BF16, ("D",)),
)
_VISION_BLOCK = (
    Rule("norm1.weight", Storage.NORM, ("vd",)),
    Rule("norm2.weight", Storage.NORM, ("vd",)),
    Rule("attn.wqkv.weight", Storage.BF16, ("vq", "vd")),
    Rule("attn.wqkv.bias", Storage.BF16, ("vq",)),
    Rule("attn.wo.weight", Storage.BF16, ("vd", "vd")),
    Rule("attn.wo.bias", Storage.BF16, ("vd",)),
    Rule("mlp.w1.weight", Storage.BF16, ("vg", "vd")),
    Rule("mlp.w2.weight", Storage.BF16, ("vd", "vi")),
)


def strip_prefix(name: str) -> str:
    """Official name of a stored tensor: an optional leading `model.` is accepted (model.md 4)."""
    return name.removeprefix("model.")


def scale_name(name: str) -> str:
    """`X.scale` of `X.weight`."""
    return name.removesuffix("weight") + "scale"


def build_expected_tensors(spec: ModelSpec) -> dict[str, ExpectedTensor]:
    """All tensors that a checkpoint of this shape may hold, by official name; 96,085 for the released model."""
    tensors = [
        *_expand(spec, "", _GLOBAL, _dimensions(spec)),
        *(tensor for layer in spec.layer_specs() for tensor in _layer_tensors(spec, layer)),
    ]
    if spec.draft:
        tensors += _draft_tensors(spec, spec.draft)
    if spec.vision:
        tensors += _vision_tensors(spec, spec.vision, needed=False)
    return {tensor.name: tensor for tensor in tensors}


def build_vision_tensors(spec: ModelSpec) -> dict[str, ExpectedTensor]:
    """The tensors of the vision tower and the aligner, by official name, all needed; empty without a vision_config."""
    return {tensor.name: tensor for tensor in _vision_tensors(spec, spec.vision, needed=True)} if spec.vision else {}


def is_vision_tensor(name: str) -> bool:
    """Whether an official name belongs to the tower, the aligner or the image delimiters."""
    return name.startswith(("vision.", "aligner.", "image_"))


def _layer_tensors(spec: ModelSpec, layer: LayerSpec) -> Iterator[ExpectedTensor]:
    prefix = f"layers.{layer.index}."
    dimensions = _dimensions(spec)
    rules = list(_LAYER)
    if spec.vision:
        rules += _IMAGE_BIAS
    is_kv_source = layer.kv_source == layer.index
    if is_kv_source:
        rules += _COMPRESSOR
    if is_kv_source and layer.compress_ratio == 2:
        rules += _COMPRESSOR_GATE
    if layer.topk_source == layer.index:
        rules += _INDEXER
    if layer.index_key_source == layer.index:
        rules += _INDEX_KEY
    if layer.has_engram and spec.engram:
        rules += _ENGRAM
        dimensions |= _engram_dimensions(spec, spec.engram, layer.index)
    yield from _expand(spec, prefix, tuple(rules), dimensions)
    for expert in range(spec.num_experts):
        yield from _expand(spec, f"{prefix}ffn.experts.{expert}.", _EXPERT, dimensions)


def _draft_tensors(spec: ModelSpec, draft: DraftSpec) -> Iterator[ExpectedTensor]:
    dimensions = _dimensions(spec) | {
        "X": draft.num_experts,
        "T": len(draft.target_layers) * spec.hidden_size,
        "B": draft.markov_rank,
        "A": spec.hidden_size + draft.markov_rank,
    }
    for index in range(draft.num_layers):
        rules = _LAYER + (_IMAGE_BIAS if spec.vision else ())
        if index == 0:
            rules += _DRAFT_FIRST
        if index == draft.num_layers - 1:
            rules += _DRAFT_LAST
        prefix = f"mtp.{index}."
        for rule in rules:
            yield from _expand(spec, prefix, (rule,), dimensions, needed=rule.name in _DRAFT_NEEDED)
        for expert in range(draft.num_experts):
            yield from _expand(spec, f"{prefix}ffn.experts.{expert}.", _EXPERT, dimensions, needed=False)


def _vision_tensors(spec: ModelSpec, vision: VisionSpec, *, needed: bool) -> Iterator[ExpectedTensor]:
    width = vision.hidden_size
    dimensions = {
        "D": spec.hidden_size,
        "vd": width,
        "vq": 3 * width,
        "vi": vision.intermediate_size,
        "vg": 2 * vision.intermediate_size,
        "vp": 3 * vision.patch_size**2,
        "vu": width * vision.downsample_ratio**2,
    }
    yield from _expand(spec, "", _IMAGE_TOKENS + _VISION, dimensions, needed=needed)
    for index in range(vision.num_layers):
        yield from _expand(spec, f"vision.blocks.{index}.", _VISION_BLOCK, dimensions, needed=needed)


def _dimensions(spec: ModelSpec) -> dict[str, int]:
    streams = spec.hc_mult
    width = spec.num_heads * spec.head_dim
    return {
        "1": 1,
        "3": 3,
        "D": spec.hidden_size,
        "V": spec.vocab_size,
        "H": spec.num_heads,
        "C": spec.head_dim,
        "P": width,
        "Q": spec.q_lora_rank,
        "O": spec.o_groups * spec.o_lora_rank,
        "W": width // spec.o_groups,
        "I": spec.index_head_dim,
        "J": spec.index_num_heads,
        "K": spec.index_num_heads * spec.index_head_dim,
        "S": streams,
        "M": 2 * streams + streams * streams,
        "F": streams * spec.hidden_size,
        "X": spec.num_experts,
        "N": spec.moe_inter_size,
        "L": spec.moe_inter_size * spec.num_shared_experts,
    }


def _engram_dimensions(spec: ModelSpec, engram: EngramSpec, layer: int) -> dict[str, int]:
    return {
        "R": engram.num_embeddings[engram.layers.index(layer)],
        "E": engram.head_dim,
        "G": engram.row_width,
        "U": (spec.hc_mult + 1) * spec.hidden_size,
    }


def _expand(
    spec: ModelSpec, prefix: str, rules: tuple[Rule, ...], dimensions: dict[str, int], *, needed: bool = True
) -> Iterator[ExpectedTensor]:
    for rule in rules:
        name = prefix + rule.name
        shape = tuple(dimensions[letter] for letter in rule.shape)
        if not spec.quantized or rule.storage not in SCALED:
            dtypes = _STORED_DTYPES[rule.storage]
            if not spec.quantized and rule.storage is not Storage.F32:
                dtypes = ("BF16", "F32")
            yield ExpectedTensor(name=name, rule=rule, shape=shape, dtypes=dtypes, needed=needed, is_scale=False)
            continue
        stored = (shape[0], shape[1] // 2) if rule.storage is Storage.FP4 else shape
        yield ExpectedTensor(
            name=name, rule=rule, shape=stored, dtypes=_STORED_DTYPES[rule.storage], needed=needed, is_scale=False
        )
        yield ExpectedTensor(
            name=scale_name(name),
            rule=rule,
            shape=_scale_shape(rule.storage, shape),
            dtypes=(SCALE_DTYPE,),
            needed=needed,
            is_scale=True,
        )


def _scale_shape(storage: Storage, shape: tuple[int, ...]) -> tuple[int, int]:
    rows, columns = shape
    if storage is Storage.FP8:
        rows = -(-rows // BLOCK)
    return rows, -(-columns // BLOCK)
