"""What each layer is: attention mode, ratio and the layers whose KV, index keys and top-k it reads (model.md 1.2).

Built by ModelSpec.layer_specs(); the model, the loader and the KV layout take roles from here, never from literals.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from prefill_plan.config import Struct
from prefill_plan.config_section import Section

BLOCK_TOKENS = 128
"""Tokens of a KV block: unit of hashing, storing and moving (kv.md 1.1)."""


class Part(StrEnum):
    """Half of the causal encoder-decoder: the decoder starts at the first layer with ratio 1 (model.md 1.3)."""

    ENCODER = "encoder"
    DECODER = "decoder"


class AttnMode(StrEnum):
    """SWA: window only. FULL: own KV and own top-k. REINDEX: shared KV, own top-k. REUSE: shares both."""

    SWA = "swa"
    FULL = "full"
    REINDEX = "reindex"
    REUSE = "reuse"


class CandidateRole(StrEnum):
    """SOURCE picks candidate blocks, CONSUMER searches only inside them (model.md 2.7)."""

    NONE = "none"
    SOURCE = "source"
    CONSUMER = "consumer"


class LayerSpec(Struct):
    """Roles of one main layer. -1 = none."""

    index: int
    part: Part
    mode: AttnMode
    compress_ratio: int
    """Tokens per main-KV entry: 2, 1, or 0 for window-only layers."""
    kv_source: int
    """Layer whose main KV this layer attends to; itself when it is a KV source."""
    index_key_source: int
    """Layer whose index keys this layer's indexer scores; -1 where no indexer runs."""
    topk_source: int
    """Layer whose selected entries this layer uses; itself when its indexer runs."""
    candidate_role: CandidateRole
    has_engram: bool


def nearest_source(sources: Sequence[int], layer: int) -> int:
    """The largest source <= layer, or -1. `sources` ascending (model.md 1.2: nearest source <= its own index)."""
    return max((source for source in sources if source <= layer), default=-1)


def build_layer_specs(
    compress_ratios: Sequence[int],
    *,
    kv_sources: Sequence[int],
    index_sources: Sequence[int],
    candidate_source: int,
    engram_layers: Sequence[int],
) -> tuple[LayerSpec, ...]:
    """Roles of all main layers. The arguments have passed the rules of read_layer_lists."""
    first_decoder_layer = compress_ratios.index(1)
    layers = []
    for index, ratio in enumerate(compress_ratios):
        runs_indexer = index in index_sources
        if ratio == 0:
            mode = AttnMode.SWA
        elif index in kv_sources:
            mode = AttnMode.FULL
        else:
            mode = AttnMode.REINDEX if runs_indexer else AttnMode.REUSE
        role = CandidateRole.NONE
        if candidate_source >= 0 and runs_indexer and index >= candidate_source:
            role = CandidateRole.SOURCE if index == candidate_source else CandidateRole.CONSUMER
        layers.append(
            LayerSpec(
                index=index,
                part=Part.ENCODER if index < first_decoder_layer else Part.DECODER,
                mode=mode,
                compress_ratio=ratio,
                kv_source=nearest_source(kv_sources, index) if ratio else -1,
                index_key_source=nearest_source(kv_sources, index) if runs_indexer else -1,
                topk_source=nearest_source(index_sources, index) if ratio else -1,
                candidate_role=role,
                has_engram=index in engram_layers,
            )
        )
    return tuple(layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerLists:
    """The per-layer lists of a config; draft layers are cut off compress_ratios and counted."""

    compress_ratios: tuple[int, ...]
    num_draft_layers: int
    kv_sources: tuple[int, ...]
    index_sources: tuple[int, ...]
    candidate_source: int
    candidate_topk_blocks: int
    candidate_block: int
    index_topk: int


def read_layer_lists(text: Section) -> LayerLists:
    """Reads and checks the layer lists of text_config against model.md 1.2, 1.3 and 8.1.

    Raises:
        ConfigError: a list that describes a model we do not compute.
    """
    num_layers = text.integer("num_hidden_layers")
    num_draft_layers = text.integer("num_nextn_predict_layers", low=0)
    ratios = text.integers("compress_ratios", low=0, high=2, length=num_layers + num_draft_layers)
    text.require(
        not any(ratios[num_layers:]), "compress_ratios", f"0 for the {num_draft_layers} draft layers at the end"
    )
    ratios = ratios[:num_layers]
    first_decoder_layer = ratios.index(1) if 1 in ratios else 0
    text.require(
        first_decoder_layer > 0 and all(ratio == 1 for ratio in ratios[first_decoder_layer:]),
        "compress_ratios",
        "encoder layers of ratio 0 or 2, then decoder layers of ratio 1, at least one of each",
    )
    kv_sources = _read_kv_sources(text, ratios)
    index_topk = text.integer("index_topk")
    candidate_source, topk_blocks, block = _read_candidates(text, first_decoder_layer, index_topk)
    return LayerLists(
        compress_ratios=ratios,
        num_draft_layers=num_draft_layers,
        kv_sources=kv_sources,
        index_sources=_read_index_sources(text, ratios, kv_sources),
        candidate_source=candidate_source,
        candidate_topk_blocks=topk_blocks,
        candidate_block=block,
        index_topk=index_topk,
    )


def _read_kv_sources(text: Section, ratios: Sequence[int]) -> tuple[int, ...]:
    key = "kv_source_layer_ids"
    sources = text.ascending(key, low=0, high=len(ratios) - 1)
    first_decoder_layer = ratios.index(1)
    text.require(
        sources[-1:] == (first_decoder_layer,),
        key,
        f"the first decoder layer {first_decoder_layer} as last source (decoder layers share one KV)",
    )
    for layer, ratio in enumerate(ratios):
        if ratio == 0:
            text.require(layer not in sources, key, f"for layer {layer} of ratio 0 no source")
        else:
            source = nearest_source(sources, layer)
            text.require(
                source >= 0 and ratios[source] == ratio,
                key,
                f"for layer {layer} of ratio {ratio} a nearest source <= it of the same ratio",
            )
    return sources


def _read_index_sources(text: Section, ratios: Sequence[int], kv_sources: Sequence[int]) -> tuple[int, ...]:
    sources = text.ascending("index_source_layer_ids", low=0, high=len(ratios) - 1)
    text.require(
        set(kv_sources) <= set(sources) and all(ratios[layer] for layer in sources),
        "index_source_layer_ids",
        f"all of kv_source_layer_ids {list(kv_sources)}, and only layers with ratio > 0",
    )
    return sources


def _read_candidates(text: Section, first_decoder_layer: int, index_topk: int) -> tuple[int, int, int]:
    """Source layer, blocks per query, entries per block; (-1, 0, 0) where the config names no source."""
    if "candidate_source_layer_id" not in text:
        return -1, 0, 0
    source = text.integer("candidate_source_layer_id", low=first_decoder_layer, high=first_decoder_layer)
    topk_blocks = text.integer("candidate_topk_blocks")
    block = text.integer("candidate_block_size")
    text.require(
        BLOCK_TOKENS % block == 0, "candidate_block_size", f"a divisor of {BLOCK_TOKENS}, the entries of a KV block"
    )
    text.require(
        topk_blocks * block - (block - 1) >= index_topk,
        "candidate_topk_blocks",
        f"topk_blocks * {block} - {block - 1} >= index_topk = {index_topk} (model.md 2.7)",
    )
    return source, topk_blocks, block
