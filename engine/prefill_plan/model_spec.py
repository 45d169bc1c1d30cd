"""ModelSpec: the shape of a DeepSeek-V4.1-Flash checkpoint, read from its official nested config.json and validated.

Everything that depends on the model's size starts here: KV layout, memory plan, loader, model. The trap: the file is
foreign, so unknown keys are tolerated, but each key that changes the computation is checked and refused if we do not
compute that.
"""

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

import msgspec

from prefill_plan.config import Struct
from prefill_plan.config_section import Section
from prefill_plan.errors import ConfigError
from prefill_plan.layer_spec import (
    AttnMode,
    CandidateRole,
    LayerLists,
    LayerSpec,
    Part,
    build_layer_specs,
    read_layer_lists,
)
from prefill_plan.model_parts import (
    DraftSpec,
    EngramSpec,
    VisionSpec,
    YarnSpec,
    read_draft,
    read_engram,
    read_vision,
    read_yarn,
)

__all__ = [
    "AttnMode",
    "CandidateRole",
    "DraftSpec",
    "EngramSpec",
    "LayerSpec",
    "ModelSpec",
    "Part",
    "VisionSpec",
    "YarnSpec",
    "load_model_spec",
    "parse_model_spec",
    "released_model_spec",
]


class ModelSpec(Struct):
    """Validated shape of one checkpoint. Layer lists are main layers only; draft layers are num_layers and up."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    rope_dim: int
    """Rotated channels: the last ones of a head (and of an index head)."""
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    window_tokens: int
    compress_ratios: tuple[int, ...]
    kv_sources: tuple[int, ...]
    index_sources: tuple[int, ...]
    index_num_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source: int
    """-1: no candidate filter."""
    candidate_topk_blocks: int
    candidate_block: int
    """Entries per candidate block."""
    num_experts: int
    experts_per_token: int
    num_shared_experts: int
    moe_inter_size: int
    routed_scaling: float
    swiglu_limit: float
    hc_mult: int
    """Residual streams."""
    hc_sinkhorn_iters: int
    hc_eps: float
    rms_eps: float
    rope_theta: float
    compress_rope_theta: float
    """Base of all rotations in layers with ratio > 0."""
    yarn: YarnSpec | None
    max_position_tokens: int
    engram: EngramSpec | None
    draft: DraftSpec | None
    vision: VisionSpec | None
    """None: the checkpoint has no vision tower (no vision_config, or 0 layers); then routers have no bias_vl."""
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    image_token_id: int
    quantized: bool
    """True: fp8 dense weights, fp4 experts, fp8 Engram rows. False: a dense bf16 checkpoint (C11)."""

    @property
    def first_decoder_layer(self) -> int:
        """First layer with ratio 1; layers before it are the encoder (model.md 1.3)."""
        return self.compress_ratios.index(1)

    def layer_specs(self) -> tuple[LayerSpec, ...]:
        """Roles of the main layers, by index (the table of model.md 1.2)."""
        return build_layer_specs(
            self.compress_ratios,
            kv_sources=self.kv_sources,
            index_sources=self.index_sources,
            candidate_source=self.candidate_source,
            engram_layers=self.engram.layers if self.engram else (),
        )


def load_model_spec(path: Path) -> ModelSpec:
    """Spec of a checkpoint directory, or of a config.json given directly.

    Raises:
        ConfigError: unreadable file, or any rule of parse_model_spec.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        data = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{file}: cannot read the model config: {error.strerror}", path=str(file)) from error
    return parse_model_spec(data, source=str(file))


def released_model_spec() -> ModelSpec:
    """The released DeepSeek-V4.1-Flash; its config.json is package data, built from model.md 1.1."""
    resource = files("prefill_plan") / "released_config.json"
    return parse_model_spec(resource.read_bytes(), source="released_config.json")


def parse_model_spec(config: bytes | Mapping[str, object], *, source: str) -> ModelSpec:
    """Reads the official nested config.

    Args:
        config: JSON text, or the decoded object.
        source: file name used in messages.

    Raises:
        ConfigError: bad JSON, a missing key, a wrong type, a value we do not compute, or a broken rule of model.md 1
            and 8.1/8.2. The message names the file, the path of the key, the value and what was expected.
    """
    if isinstance(config, bytes):
        try:
            config = msgspec.json.decode(config, type=dict[str, object])
        except msgspec.DecodeError as error:
            raise ConfigError(f"{source}: not a JSON object: {error}", path=source) from error
    top = Section(config, source=source)
    text = top.section("text_config")
    _check_supported(top, text)
    _check_heads(text)
    return _build_spec(top, text, read_layer_lists(text))


def _check_supported(top: Section, text: Section) -> None:
    """Refuses every variant of the architecture that model.md 1 and 2 do not describe."""
    top.only("model_type", "deepseek_v41")
    top.only("tie_word_embeddings", False, optional=True)
    text.only("tie_word_embeddings", False, optional=True)
    text.only("num_key_value_heads", 1)
    text.only("attention_bias", False, optional=True)
    text.only("hidden_act", "silu")
    text.only("scoring_func", "sqrtsoftplus")
    text.only("topk_method", "noaux_tc")
    text.only("norm_topk_prob", True)
    text.only("n_shared_experts", 1)
    if "quantization_config" in top:
        quantization = top.section("quantization_config")
        quantization.only("quant_method", "fp8")
        quantization.only("fmt", "e4m3", optional=True)
        quantization.only("activation_scheme", "dynamic")
        quantization.only("weight_block_size", [32, 32])
        quantization.only("scale_fmt", "ue8m0")
        quantization.only("expert_dtype", "fp4")


def _check_heads(text: Section) -> None:
    """Divisibility of the attention shapes (model.md 8.2); fp8 blocks are 32 wide."""
    head_dim = text.integer("head_dim", multiple_of=32)
    index_head_dim = text.integer("index_head_dim", multiple_of=32)
    num_heads = text.integer("num_attention_heads")
    o_groups = text.integer("o_groups")
    text.require(num_heads % o_groups == 0, "o_groups", f"a divisor of num_attention_heads = {num_heads}")
    # A head of 32 channels or more keeps num_heads * head_dim / o_groups a multiple of 32.
    o_width = o_groups * text.integer("o_lora_rank")
    text.require(o_width % 32 == 0, "o_lora_rank", f"o_groups * o_lora_rank = {o_width} to be a multiple of 32")
    # Strictly below head_dim: some channels must carry no position.
    rope_high = min(head_dim - 2, index_head_dim)
    text.integer("qk_rope_head_dim", low=2, high=rope_high, multiple_of=2)


def _build_spec(top: Section, text: Section, lists: LayerLists) -> ModelSpec:
    vocab_size = text.integer("vocab_size", low=2)
    num_experts = text.integer("n_routed_experts")
    return ModelSpec(
        vocab_size=vocab_size,
        hidden_size=text.integer("hidden_size", multiple_of=32),
        num_layers=len(lists.compress_ratios),
        num_heads=text.integer("num_attention_heads"),
        head_dim=text.integer("head_dim"),
        rope_dim=text.integer("qk_rope_head_dim"),
        q_lora_rank=text.integer("q_lora_rank", multiple_of=32),
        o_lora_rank=text.integer("o_lora_rank"),
        o_groups=text.integer("o_groups"),
        window_tokens=text.integer("sliding_window"),
        compress_ratios=lists.compress_ratios,
        kv_sources=lists.kv_sources,
        index_sources=lists.index_sources,
        index_num_heads=text.integer("index_n_heads"),
        index_head_dim=text.integer("index_head_dim"),
        index_topk=lists.index_topk,
        candidate_source=lists.candidate_source,
        candidate_topk_blocks=lists.candidate_topk_blocks,
        candidate_block=lists.candidate_block,
        num_experts=num_experts,
        experts_per_token=text.integer("num_experts_per_tok", high=num_experts),
        num_shared_experts=text.integer("n_shared_experts"),
        moe_inter_size=text.integer("moe_intermediate_size", multiple_of=32),
        routed_scaling=text.number("routed_scaling_factor"),
        swiglu_limit=text.number("swiglu_limit"),
        hc_mult=text.integer("hc_mult"),
        hc_sinkhorn_iters=text.integer("hc_sinkhorn_iters"),
        hc_eps=text.number("hc_eps"),
        rms_eps=text.number("rms_norm_eps"),
        rope_theta=text.number("rope_theta", low=1.0),
        compress_rope_theta=text.number("compress_rope_theta", low=1.0),
        yarn=read_yarn(text),
        max_position_tokens=text.integer("max_position_embeddings"),
        engram=read_engram(text, vocab_size=vocab_size, first_decoder_layer=lists.compress_ratios.index(1)),
        draft=read_draft(text, vocab_size=vocab_size, lists=lists),
        vision=read_vision(top),
        bos_token_id=top.integer("bos_token_id", low=0, high=vocab_size - 1),
        eos_token_id=top.integer("eos_token_id", low=0, high=vocab_size - 1),
        pad_token_id=top.integer("pad_token_id", low=0, high=vocab_size - 1),
        image_token_id=top.integer("image_token_id", low=0, high=vocab_size - 1),
        quantized="quantization_config" in top,
    )
