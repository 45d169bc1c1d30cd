"""One layer: hyper-connection -> attention -> hyper-connection -> experts (model.md 1.4).

The three steps `enrich`, `enter` and `forward` are apart because the decoder's first layer makes its entries for all rows and
runs on kept rows only (model.md 5.3).
"""

from dataclasses import dataclass

from torch import Tensor

from prefill_engine.batch import RowBatch
from prefill_engine.model.attention import Attention
from prefill_engine.model.engram import CompressedIds, Engram
from prefill_engine.model.mhc import HyperConnection
from prefill_engine.model.moe import MixtureOfExperts
from prefill_engine.model.step import Equipment, Residual, SharedKv, Step
from prefill_plan.model_spec import LayerSpec, ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """attn_norm, ffn_norm: [D]."""

    layer: LayerSpec
    attn_norm: Tensor
    ffn_norm: Tensor
    mhc_attn: HyperConnection
    mhc_ffn: HyperConnection
    attention: Attention
    moe: MixtureOfExperts
    engram: Engram | None
    spec: ModelSpec
    equipment: Equipment

    def enrich(self, residual: Residual, compressed: CompressedIds | None, step: Step) -> Residual:
        """The layer's input after its Engram, if it has one."""
        if self.engram is None:
            return residual
        assert compressed is not None, f"layer {self.layer.index}: Engram without compressed ids"
        return Residual(streams=self.engram.forward(residual.streams, compressed, step), pre=residual.pre)

    def enter(self, residual: Residual, shared: SharedKv, step: Step) -> tuple[Tensor, SharedKv]:
        """([N, D] attention input, shared KV). A KV source publishes its entries here, so its rows must be all of the step."""
        x_ND = self.equipment.ops.mhc_collapse(residual.streams, residual.pre)
        x_ND = self.equipment.ops.rms_norm(x_ND, self.attn_norm, eps=self.spec.rms_eps)
        if self.attention.compressor is not None:
            shared = self.attention.compressor.publish(x_ND, step)
        return x_ND, shared

    def forward(
        self, x_ND: Tensor, streams_NSD: Tensor, shared: SharedKv, rows: RowBatch, step: Step
    ) -> tuple[Residual, SharedKv]:
        """Both sub-layers on `rows`.

        Args:
            x_ND: the rows' attention input. streams_NSD: their streams, from which x was collapsed.
        """
        ops = self.equipment.ops
        attn_mixes = self.mhc_attn.mixes(streams_NSD)
        y_ND, shared = self.attention.forward(x_ND, shared, rows, step)
        step.observe("attn_out", self.layer.index, y_ND)
        streams_NSD = self.mhc_attn.expand(y_ND, streams_NSD, attn_mixes)
        ffn_mixes = self.mhc_ffn.mixes(streams_NSD)
        x_ND = ops.rms_norm(ops.mhc_collapse(streams_NSD, attn_mixes.pre), self.ffn_norm, eps=self.spec.rms_eps)
        y_ND = self.moe.forward(x_ND, rows.is_image, step.observe)
        streams_NSD = self.mhc_ffn.expand(y_ND, streams_NSD, ffn_mixes)
        step.observe("stream", self.layer.index, streams_NSD)
        step.observe("premix", self.layer.index, ffn_mixes.pre)
        return Residual(streams=streams_NSD, pre=ffn_mixes.pre), shared
