"""Attention of one layer in its four modes (model.md 2.3, 2.8, 2.9): window keys of its own, compressed entries of its sources.

The traps: this step's window keys are used in cache precision too; the ring is read before and written after attention, since the
step's rows overwrite history that its first rows need (C25); K = V, so the output is rotated back.

Legend: N rows, D hidden, Q query latent, H heads, C head dim, G output groups, R window record, W window.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from prefill_engine.batch import RowBatch
from prefill_engine.model.compressor import Compressor
from prefill_engine.model.indexer import Indexer
from prefill_engine.model.parameters import AttentionParameters
from prefill_engine.model.step import Equipment, SharedKv, Step
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

    def forward(self, x_ND: Tensor, shared: SharedKv, rows: RowBatch, step: Step) -> tuple[Tensor, SharedKv]:
        """([N, D] act output, the shared KV that later layers read). Writes this layer's window ring at rows.ring_slots.

        A KV source's entries must be published into `shared` before.
        """
        ops, numerics, spec = self.equipment.ops, self.equipment.numerics, self.spec
        latent_NQ = ops.linear(x_ND, self.parameters.wq_a, numerics=numerics)
        latent_NQ = ops.rms_norm(latent_NQ, self.parameters.q_norm, eps=spec.rms_eps)
        query_NHC = ops.linear(latent_NQ, self.parameters.wq_b, numerics=numerics)
        query_NHC = ops.rope(query_NHC.view(-1, spec.num_heads, spec.head_dim), rows.positions, self.frequencies)
        records_NR, keys_MC = self._window(x_ND, rows, step)
        match self.layer.mode:
            case AttnMode.SWA:
                entries_EC, selected_NK = None, None
            case AttnMode.FULL | AttnMode.REINDEX:
                assert self.indexer is not None, f"layer {self.layer.index}: index source without indexer"
                shared = self.indexer.select(x_ND, latent_NQ, shared, rows, step)
                entries_EC, selected_NK = shared.main_kv, shared.selected
            case AttnMode.REUSE:
                entries_EC, selected_NK = shared.main_kv, shared.selected
        out_NHC = ops.sparse_attention(
            query_NHC,
            keys_MC,
            rows.window_index,
            entries_EC,
            selected_NK,
            self.parameters.sink,
            scale=spec.head_dim**-0.5,
            numerics=numerics,
        )
        ops.scatter_rows(step.cache.window_ring(self.layer.index), rows.ring_slots, records_NR)
        return self._project(out_NHC, rows), shared

    def _window(self, x_ND: Tensor, rows: RowBatch, step: Step) -> tuple[Tensor, Tensor]:
        """Window records of the rows, and the decoded keys [history | rows] that rows.window_index points into."""
        ops, numerics = self.equipment.ops, self.equipment.numerics
        kv_NC = ops.linear(x_ND, self.parameters.wkv, numerics=numerics)
        kv_NC = ops.rms_norm(kv_NC, self.parameters.kv_norm, eps=self.spec.rms_eps)
        kv_NC = ops.rope(kv_NC, rows.positions, self.frequencies)
        records_NR = ops.encode_window(kv_NC, numerics=numerics)
        history_NR = ops.gather_rows(step.cache.window_ring(self.layer.index), rows.history_slots)
        keys_MC = ops.decode_window(torch.cat([history_NR, records_NR]), numerics=numerics)
        step.observe("swa", self.layer.index, keys_MC[len(history_NR) :])
        return records_NR, keys_MC

    def _project(self, out_NHC: Tensor, rows: RowBatch) -> Tensor:
        ops, numerics = self.equipment.ops, self.equipment.numerics
        out_NHC = ops.rope(out_NHC, rows.positions, self.frequencies, inverse=True)
        grouped = out_NHC.reshape(len(out_NHC), self.spec.o_groups, -1)
        return ops.linear(
            ops.grouped_linear(grouped, self.parameters.wo_a, numerics=numerics),
            self.parameters.wo_b,
            numerics=numerics,
        )
