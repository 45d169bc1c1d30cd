"""Picks the compressed entries that each row attends to (model.md 2.6, 2.7). Runs at index source layers only.

The trap: the candidate source publishes candidate blocks but selects among everything visible itself; consumers search inside
the blocks, with their own queries against the KV source's index keys.

Legend: N rows, D hidden, Q query latent, H index heads, I index head dim, K index top-k.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from prefill_engine.batch import RowBatch
from prefill_engine.model.parameters import IndexerParameters
from prefill_engine.model.step import Equipment, SharedKv, Step
from prefill_plan.model_spec import CandidateRole, LayerSpec, ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Indexer:
    layer: LayerSpec
    parameters: IndexerParameters
    frequencies: Tensor
    spec: ModelSpec
    equipment: Equipment

    def select(self, x_ND: Tensor, latent_NQ: Tensor, shared: SharedKv, rows: RowBatch, step: Step) -> SharedKv:
        """shared with this layer's selection, and its candidates when it is the candidate source.

        Args:
            x_ND: attention input. latent_NQ: normed query latent.
        """
        ops, numerics, spec = self.equipment.ops, self.equipment.numerics, self.spec
        assert shared.index_keys is not None, f"layer {self.layer.index}: no index keys before it"
        is_source = self.layer.candidate_role is CandidateRole.SOURCE
        is_consumer = self.layer.candidate_role is CandidateRole.CONSUMER
        visible = rows.entries.of(self.layer.compress_ratio)
        query_NHI = ops.linear(latent_NQ, self.parameters.wq_b, numerics=numerics)
        query_NHI = query_NHI.view(-1, spec.index_num_heads, spec.index_head_dim)
        query_NHI = ops.rope(query_NHI, rows.positions, self.frequencies)
        selection = ops.index_select(
            ops.quantise_index_query(query_NHI, numerics=numerics),
            ops.linear(x_ND, self.parameters.weights_proj, numerics=numerics),
            shared.index_keys,
            visible.first,
            visible.num_visible,
            topk=spec.index_topk,
            numerics=numerics,
            candidates_NB=shared.candidates if is_consumer else None,
            candidate_block=spec.candidate_block,
            num_candidate_blocks=spec.candidate_topk_blocks if is_source else 0,
        )
        step.observe("topk", self.layer.index, selection.entries)
        if selection.candidates is not None:
            step.observe("candidates", self.layer.index, selection.candidates)
        chosen = selection.entries >= 0
        return SharedKv(
            main_kv=shared.main_kv,
            index_keys=shared.index_keys,
            selected=torch.where(chosen, selection.entries + visible.first[:, None], -1),
            candidates=selection.candidates if is_source else shared.candidates,
        )
