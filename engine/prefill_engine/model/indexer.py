"""Picks the compressed entries that each row attends to (model.md 2.6, 2.7). Runs at index source layers only.

The trap: the candidate source publishes candidate blocks but selects among everything visible itself; consumers search inside
the blocks, with their own queries against the KV source's index keys.

Legend: N rows, H index heads, I index head dim.
"""

from dataclasses import dataclass

from torch import Tensor

from prefill_engine.batch import RowBatch
from prefill_engine.model.parameters import IndexerParameters
from prefill_engine.model.step import Equipment, SharedKv, Step
from prefill_kernels.ops import Rows
from prefill_plan.model_spec import CandidateRole, LayerSpec, ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Indexer:
    layer: LayerSpec
    parameters: IndexerParameters
    frequencies: Tensor
    spec: ModelSpec
    equipment: Equipment

    def select(self, x: Rows, latent: Rows, shared: SharedKv, rows: RowBatch, step: Step) -> SharedKv:
        """shared with this layer's selection, and its candidates when it is the candidate source.

        Args:
            x: attention input. latent: normed query latent.
        """
        ops, numerics, spec = self.equipment.ops, self.equipment.numerics, self.spec
        assert shared.index_keys is not None, f"layer {self.layer.index}: no index keys before it"
        is_source = self.layer.candidate_role is CandidateRole.SOURCE
        is_consumer = self.layer.candidate_role is CandidateRole.CONSUMER
        visible = rows.entries.of(self.layer.compress_ratio)
        query_NHI = ops.linear(latent, self.parameters.wq_b, numerics=numerics)
        query_NHI = query_NHI.view(-1, spec.index_num_heads, spec.index_head_dim)
        selection = ops.index_select(
            ops.index_query(query_NHI, rows.positions, self.frequencies, numerics=numerics),
            ops.linear(x, self.parameters.weights_proj, numerics=numerics),
            shared.index_keys,
            visible.first,
            visible.num_visible,
            topk=spec.index_topk,
            max_visible=visible.max_visible,
            numerics=numerics,
            candidates_NB=shared.candidates if is_consumer else None,
            candidate_block=spec.candidate_block,
            num_candidate_blocks=spec.candidate_topk_blocks if is_source else 0,
        )
        step.observe("topk", self.layer.index, selection.entries)
        if selection.candidates is not None:
            step.observe("candidates", self.layer.index, selection.candidates)
        return SharedKv(
            main_kv=shared.main_kv,
            index_keys=shared.index_keys,
            selected=selection.rows,
            candidates=selection.candidates if is_source else shared.candidates,
        )
