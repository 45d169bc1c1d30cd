"""Attention of one layer in its four modes (model.md 2.3, 2.8, 2.9): window keys of its own, compressed entries of its sources.

The traps: this step's window keys are used in cache precision too; the ring is read before and written after attention, since the
step's rows overwrite history that its first rows need (C25); K = V, so the output is rotated back.

Legend: N rows, D hidden, H heads, C head dim.
"""

from dataclasses import dataclass

from torch import Tensor

from prefill_engine.batch import RowBatch
from prefill_engine.model.compressor import Compressor
from prefill_engine.model.indexer import Indexer
from prefill_engine.model.parameters import AttentionParameters
from prefill_engine.model.step import Equipment, SharedKv, Step
from prefill_kernels.ops import Rows
from prefill_plan.model_spec import AttnMode, LayerSpec, ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """compressor: only at KV sources. indexer: only at index sources."""

    layer: LayerSpec
    parameters: AttentionParameters
    compressor: Compressor | None
    indexer: Indexer | None
    frequencies: Tensor
    spec: ModelSpec
    equipment: Equipment

    def forward(self, x: Rows, shared: SharedKv, rows: RowBatch, step: Step) -> tuple[Tensor, SharedKv]:
        """([N, D] act output, the shared KV that later layers read). Writes this layer's window ring at rows.ring_slots.

        A KV source's entries must be published into `shared` before.
        """
        ops, numerics, spec = self.equipment.ops, self.equipment.numerics, self.spec
        latent_NQ, kv_NC = ops.linear_pair(x, self.parameters.wq_a, self.parameters.wkv, numerics=numerics)
        latent = ops.norm_rows(latent_NQ, self.parameters.q_norm, eps=spec.rms_eps, numerics=numerics)
        query_NHC = ops.linear(latent, self.parameters.wq_b, numerics=numerics)
        window = ops.window_rows(
            kv_NC,
            self.parameters.kv_norm,
            rows.positions,
            self.frequencies,
            step.cache.window_ring(self.layer.index),
            rows.history_slots,
            eps=spec.rms_eps,
            numerics=numerics,
        )
        step.observe("swa", self.layer.index, window.keys[len(rows.history_slots) :])
        match self.layer.mode:
            case AttnMode.SWA:
                entries_EC, selected_NK = None, None
            case AttnMode.FULL | AttnMode.REINDEX:
                assert self.indexer is not None, f"layer {self.layer.index}: index source without indexer"
                shared = self.indexer.select(x, latent, shared, rows, step)
                entries_EC, selected_NK = shared.main_kv, shared.selected
            case AttnMode.REUSE:
                entries_EC, selected_NK = shared.main_kv, shared.selected
        out_NHC = ops.sparse_attention(
            query_NHC.view(-1, spec.num_heads, spec.head_dim),
            rows.positions,
            self.frequencies,
            window.keys,
            rows.window_index,
            entries_EC,
            selected_NK,
            self.parameters.sink,
            scale=spec.head_dim**-0.5,
            numerics=numerics,
        )
        ops.scatter_rows(step.cache.window_ring(self.layer.index), rows.ring_slots, window.records)
        return self._project(out_NHC), shared

    def _project(self, out_NHC: Tensor) -> Tensor:
        ops, numerics = self.equipment.ops, self.equipment.numerics
        grouped = out_NHC.view(len(out_NHC), self.spec.o_groups, -1)
        projected = ops.grouped_linear(grouped, self.parameters.wo_a, numerics=numerics)
        return ops.linear(projected, self.parameters.wo_b, numerics=numerics)
