"""Parts of a ModelSpec that a checkpoint may lack: YaRN, Engram, draft, vision. Each struct stands beside its reader.

The readers are called by parse_model_spec and raise ConfigError naming the key (model.md 2.4, 2.11, 2.13, 6, 8.2).
"""

from prefill_plan.config import Struct
from prefill_plan.config_section import Section
from prefill_plan.engram_primes import build_engram_primes
from prefill_plan.layer_spec import LayerLists


class YarnSpec(Struct):
    """YaRN frequency scaling of the layers with ratio > 0, at every length, without amplitude (model.md 2.4)."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_tokens: int


class EngramSpec(Struct):
    """N-gram hash lookup added to the streams (model.md 2.11)."""

    layers: tuple[int, ...]
    num_embeddings: tuple[int, ...]
    """Table rows, one count per layer of `layers`; at least the sum of that layer's primes."""
    max_ngram: int
    vocab_size: int
    """Where the search for primes starts; not the tokenizer's."""
    num_heads: int
    head_dim: int
    pad_token_id: int
    """Raw token id; hashing uses its compressed id."""
    compressed_vocab_size: int

    @property
    def row_width(self) -> int:
        """Channels of the concatenated rows of one token."""
        return (self.max_ngram - 1) * self.num_heads * self.head_dim


class DraftSpec(Struct):
    """DSpark layers `mtp.i`; prefill only seeds their window KV (model.md 2.13)."""

    num_layers: int
    target_layers: tuple[int, ...]
    """Decoder layers whose input feeds the draft."""
    num_experts: int
    experts_per_token: int
    markov_rank: int
    block_size: int
    noise_token_id: int


class VisionSpec(Struct):
    """Vision tower and aligner (model.md 6)."""

    num_layers: int
    hidden_size: int
    num_heads: int
    intermediate_size: int
    patch_size: int
    """Pixels per side."""
    rope_theta: float
    downsample_ratio: int
    """Patches per side of the square that becomes one token."""
    max_image_tokens: int
    """Start, newlines and end included."""
    min_pixels: int
    max_wh_ratio: float | None
    """None: any shape."""


def read_yarn(text: Section) -> YarnSpec | None:
    if "rope_scaling" not in text:
        return None
    scaling = text.section("rope_scaling")
    scaling.only("rope_type", "yarn")
    yarn = YarnSpec(
        factor=scaling.number("factor"),
        beta_fast=scaling.number("beta_fast"),
        beta_slow=scaling.number("beta_slow"),
        original_tokens=scaling.integer("original_max_position_embeddings"),
    )
    scaling.require(yarn.factor >= 1.0, "factor", "a number >= 1")
    scaling.require(yarn.beta_fast >= yarn.beta_slow, "beta_fast", f"a number >= beta_slow = {yarn.beta_slow:g}")
    return yarn


def read_engram(text: Section, *, vocab_size: int, first_decoder_layer: int) -> EngramSpec | None:
    layers = text.ascending("engram_layer_ids", low=0, high=first_decoder_layer - 1)
    if not layers:
        return None
    engram = EngramSpec(
        layers=layers,
        num_embeddings=text.integers("engram_num_embeddings", low=1, length=len(layers)),
        # The hand-over carries the last 3 token ids (C5), so no longer n-gram can be continued.
        max_ngram=text.integer("engram_max_ngram_size", low=2, high=4),
        vocab_size=text.integer("engram_vocab_size", high=1 << 30),
        num_heads=text.integer("engram_n_heads"),
        head_dim=text.integer("engram_head_dim", multiple_of=32),
        pad_token_id=text.integer("engram_pad_token_id", low=0, high=vocab_size - 1),
        compressed_vocab_size=text.integer("engram_compressed_vocab_size", high=vocab_size),
    )
    primes = build_engram_primes(
        len(layers), max_ngram=engram.max_ngram, vocab_size=engram.vocab_size, num_heads=engram.num_heads
    )
    needed = tuple(sum(sum(heads) for heads in sizes) for sizes in primes)
    text.require(
        all(rows >= least for rows, least in zip(engram.num_embeddings, needed, strict=True)),
        "engram_num_embeddings",
        f"at least the sums of the hash primes {list(needed)}",
    )
    return engram


def read_draft(text: Section, *, vocab_size: int, lists: LayerLists) -> DraftSpec | None:
    if lists.num_draft_layers == 0:
        return None
    # Decoder replay keeps decoder rows only, so the features of an encoder layer would be of other rows (2.13).
    low, high = lists.compress_ratios.index(1), len(lists.compress_ratios) - 1
    targets = text.ascending("dspark_target_layer_ids", low=low, high=high)
    text.require(bool(targets), "dspark_target_layer_ids", f"at least one decoder layer in {low}..{high}")
    experts = text.integer("dspark_n_routed_experts")
    return DraftSpec(
        num_layers=lists.num_draft_layers,
        target_layers=targets,
        num_experts=experts,
        experts_per_token=text.integer("dspark_num_experts_per_tok", high=experts),
        markov_rank=text.integer("dspark_markov_rank"),
        block_size=text.integer("dspark_block_size"),
        noise_token_id=text.integer("dspark_noise_token_id", low=0, high=vocab_size - 1),
    )


def read_vision(top: Section) -> VisionSpec | None:
    if "vision_config" not in top:
        return None
    vision = top.section("vision_config")
    if vision.integer("num_hidden_layers", low=0) == 0:
        return None
    spec = VisionSpec(
        num_layers=vision.integer("num_hidden_layers"),
        hidden_size=vision.integer("hidden_size"),
        num_heads=vision.integer("num_attention_heads"),
        intermediate_size=vision.integer("intermediate_size"),
        patch_size=vision.integer("patch_size"),
        rope_theta=vision.number("rope_theta", low=1.0),
        downsample_ratio=vision.integer("downsample_ratio"),
        max_image_tokens=vision.integer("max_image_tokens", low=4),
        min_pixels=vision.integer("min_pixels"),
        max_wh_ratio=vision.number("max_wh_ratio") if "max_wh_ratio" in vision else None,
    )
    # Two position axes, each rotating pairs (model.md 6.3).
    head_dim, rest = divmod(spec.hidden_size, spec.num_heads)
    vision.require(
        rest == 0 and head_dim % 4 == 0,
        "num_attention_heads",
        f"a divisor of hidden_size {spec.hidden_size} with head dim % 4 == 0",
    )
    return spec
