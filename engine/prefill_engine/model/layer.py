"""One layer: hyper-connection -> attention -> hyper-connection -> experts (model.md 1.4).

The steps `enrich`, `publish`, `enter` and `forward` are apart because the decoder's first layer makes its entries for all rows
and runs on kept rows only (model.md 5.3).
"""

from dataclasses import dataclass

from prefill_engine.batch import RowBatch
from prefill_engine.model.attention import Attention
from prefill_engine.model.engram import CompressedIds, Engram
from prefill_engine.model.mhc import HyperConnection
from prefill_engine.model.moe import MixtureOfExperts
from prefill_engine.model.step import Equipment, Residual, SharedKv, Step
from prefill_kernels.ops import MhcOutput, MhcTurn, Rows
from prefill_plan.model_spec import LayerSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    layer: LayerSpec
    mhc_attn: HyperConnection
    mhc_ffn: HyperConnection
    attention: Attention
    moe: MixtureOfExperts
    engram: Engram | None
    equipment: Equipment

    def enrich(self, residual: Residual, compressed: CompressedIds | None, step: Step) -> Residual:
        """The layer's input after its Engram, if it has one."""
        if self.engram is None:
            return residual
        assert compressed is not None, f"layer {self.layer.index}: Engram without compressed ids"
        streams_NSD = residual.streams
        if residual.output is not None:
            streams_NSD = self.equipment.ops.mhc_expand(residual.output, streams_NSD)
        return Residual(streams=self.engram.forward(streams_NSD, compressed, step), pre=residual.pre)

    def enter(self, residual: Residual) -> MhcTurn:
        """Streams at the layer's input, attention input and mixes."""
        return self.mhc_attn.turn(residual)

    def publish(self, x: Rows, shared: SharedKv, step: Step) -> SharedKv:
        """The shared KV after this layer's entries, if it is a KV source; then x must be all rows of the step."""
        return shared if self.attention.compressor is None else self.attention.compressor.publish(x, step)

    def forward(self, turn: MhcTurn, shared: SharedKv, rows: RowBatch, step: Step) -> tuple[Residual, SharedKv]:
        """Both sub-layers on `rows`, from what `enter` gave for them."""
        y_ND, shared = self.attention.forward(turn.rows, shared, rows, step)
        step.observe("attn_out", self.layer.index, y_ND)
        turn = self.mhc_ffn.turn(_residual(turn, MhcOutput(y=y_ND, post=turn.mixes.post, comb=turn.mixes.comb)))
        y_ND = self.moe.forward(turn.rows, rows.is_image, step.observe)
        output = MhcOutput(y=y_ND, post=turn.mixes.post, comb=turn.mixes.comb)
        if step.is_observed:
            step.observe("stream", self.layer.index, self.equipment.ops.mhc_expand(output, turn.streams))
        step.observe("premix", self.layer.index, turn.mixes.pre)
        return _residual(turn, output), shared


def _residual(turn: MhcTurn, output: MhcOutput) -> Residual:
    return Residual(streams=turn.streams, pre=turn.mixes.pre, output=output)
