"""Builds the modules of the model from spec and parameters, once per engine. Pure wiring; the only place that knows which layer
gets which RoPE (model.md 2.4)."""

import torch
from torch import Tensor

from prefill_engine.model.attention import Attention
from prefill_engine.model.compressor import Compressor
from prefill_engine.model.draft import DraftSeed
from prefill_engine.model.engram import Engram
from prefill_engine.model.engram_tables import EngramTables
from prefill_engine.model.indexer import Indexer
from prefill_engine.model.layer import Layer
from prefill_engine.model.mhc import HyperConnection
from prefill_engine.model.moe import MixtureOfExperts
from prefill_engine.model.parameters import LayerParameters, ModelParameters
from prefill_engine.model.step import Equipment
from prefill_kernels.rope_tables import rope_frequencies
from prefill_plan.model_spec import LayerSpec, ModelSpec


def layer_frequencies(spec: ModelSpec, *, compressed: bool, device: torch.device) -> Tensor:
    """RoPE frequencies of layers with ratio > 0 (their own base, YaRN), or of window-only and draft layers (neither)."""
    yarn = spec.yarn if compressed else None
    return rope_frequencies(
        rope_dim=spec.rope_dim,
        theta=spec.compress_rope_theta if compressed else spec.rope_theta,
        yarn=None if yarn is None else (yarn.factor, yarn.beta_fast, yarn.beta_slow, yarn.original_tokens),
    ).to(device)


def build_layers(
    spec: ModelSpec, parameters: ModelParameters, tables: EngramTables | None, equipment: Equipment
) -> tuple[Layer, ...]:
    """All main layers."""
    device = parameters.embed.device
    compressed = layer_frequencies(spec, compressed=True, device=device)
    plain = layer_frequencies(spec, compressed=False, device=device)
    layers = []
    for layer, own in zip(spec.layer_specs(), parameters.layers, strict=True):
        layers.append(
            Layer(
                layer=layer,
                mhc_attn=HyperConnection(weights=own.mhc_attn, norm=own.attn_norm, spec=spec, equipment=equipment),
                mhc_ffn=HyperConnection(weights=own.mhc_ffn, norm=own.ffn_norm, spec=spec, equipment=equipment),
                attention=_build_attention(layer, own, compressed if layer.compress_ratio else plain, spec, equipment),
                moe=MixtureOfExperts(
                    layer=layer.index,
                    parameters=own.moe,
                    first_expert=parameters.first_expert,
                    spec=spec,
                    equipment=equipment,
                ),
                engram=_build_engram(layer, own, tables, spec, equipment),
                equipment=equipment,
            )
        )
    return tuple(layers)


def build_draft(spec: ModelSpec, parameters: ModelParameters, equipment: Equipment) -> DraftSeed | None:
    """The draft's window seed; None for a model without draft layers."""
    if spec.draft is None or parameters.draft is None:
        return None
    frequencies = layer_frequencies(spec, compressed=False, device=parameters.embed.device)
    return DraftSeed(parameters=parameters.draft, frequencies=frequencies, spec=spec, equipment=equipment)


def _build_attention(
    layer: LayerSpec, own: LayerParameters, frequencies: Tensor, spec: ModelSpec, equipment: Equipment
) -> Attention:
    parameters = own.attention
    compressor, indexer = None, None
    if layer.topk_source == layer.index:
        assert parameters.indexer is not None, f"layer {layer.index}: no indexer parameters"
        indexer = Indexer(
            layer=layer, parameters=parameters.indexer, frequencies=frequencies, spec=spec, equipment=equipment
        )
    if layer.kv_source == layer.index:
        assert parameters.compressor is not None, f"layer {layer.index}: no compressor parameters"
        assert parameters.indexer is not None, f"layer {layer.index}: no index-key parameters"
        compressor = Compressor(
            layer=layer,
            parameters=parameters.compressor,
            indexer=parameters.indexer,
            frequencies=frequencies,
            spec=spec,
            equipment=equipment,
        )
    return Attention(
        layer=layer,
        parameters=parameters,
        compressor=compressor,
        indexer=indexer,
        frequencies=frequencies,
        spec=spec,
        equipment=equipment,
    )


def _build_engram(
    layer: LayerSpec, own: LayerParameters, tables: EngramTables | None, spec: ModelSpec, equipment: Equipment
) -> Engram | None:
    if not layer.has_engram:
        return None
    assert own.engram is not None, f"layer {layer.index}: no Engram parameters"
    assert tables is not None, f"layer {layer.index}: no Engram tables"
    return Engram(layer=layer.index, parameters=own.engram, tables=tables, spec=spec, equipment=equipment)
