"""Seeds the window rings of the draft layers (DSpark) from inputs of decoder layers; no more of it runs here (model.md 2.13)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from prefill_engine.batch import RowBatch
from prefill_engine.model.parameters import DraftParameters
from prefill_engine.model.step import Equipment, Step
from prefill_plan.model_spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSeed:
    """frequencies: of window-only layers (no YaRN)."""

    parameters: DraftParameters
    frequencies: Tensor
    spec: ModelSpec
    equipment: Equipment

    def store(self, features: Sequence[Tensor], rows: RowBatch, step: Step) -> None:
        """Writes the window records of the decoder rows into each draft layer's ring, in place.

        Args:
            features: [M, D] act, stream means at the input of each target layer, in layer order.
        """
        ops, numerics, eps = self.equipment.ops, self.equipment.numerics, self.spec.rms_eps
        main = torch.cat(list(features), dim=-1)
        step.observe("main_hidden", -1, main)
        main = ops.linear(ops.quantise_rows(main, numerics=numerics), self.parameters.main_proj, numerics=numerics)
        rows_in = ops.norm_rows(main, self.parameters.main_norm, eps=eps, numerics=numerics)
        no_history = rows.history_slots[:0]
        for i, (wkv, kv_norm) in enumerate(zip(self.parameters.wkv, self.parameters.kv_norm, strict=True)):
            layer = self.spec.num_layers + i
            kv = ops.linear(rows_in, wkv, numerics=numerics)
            ring = step.cache.window_ring(layer)
            window = ops.window_rows(
                kv, kv_norm, rows.positions, self.frequencies, ring, no_history, eps=eps, numerics=numerics
            )
            step.observe("swa", layer, window.keys)
            ops.scatter_rows(ring, rows.ring_slots, window.records)
