"""N-gram hash lookup added to the streams at the input of a layer, before its mixes (model.md 2.11).

The trap: the look-back is over token ids, so it crosses chunk starts and a replay's start: the ids before a chunk come with the
batch, true ids also where their rows are not recomputed.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from prefill_engine.batch import Batch
from prefill_engine.model.engram_tables import EngramTables
from prefill_engine.model.parameters import EngramParameters
from prefill_engine.model.step import Equipment, Step
from prefill_plan.model_spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedIds:
    """Token ids of one step in the compressed vocabulary, int64; -1 = image, or before the start.

    ids: [N]. history: [B, max n-gram - 1], oldest first.
    """

    ids: Tensor
    history: Tensor


def compress_ids(batch: Batch, tables: EngramTables) -> CompressedIds:
    """The step's token ids and history, mapped once for all Engram layers."""

    def compress(ids: Tensor) -> Tensor:
        return torch.where(ids < 0, -1, tables.token_map[ids.clamp(min=0).long()])

    return CompressedIds(ids=compress(batch.token_ids), history=compress(batch.history_ids))


@dataclass(frozen=True, slots=True, kw_only=True)
class Engram:
    layer: int
    parameters: EngramParameters
    tables: EngramTables
    spec: ModelSpec
    equipment: Equipment

    def forward(self, streams_NSD: Tensor, compressed: CompressedIds, step: Step) -> Tensor:
        """[N, S, D] streams with the gated value added; image rows unchanged."""
        ops, numerics = self.equipment.ops, self.equipment.numerics
        hashing = self.tables.for_layer(self.layer)
        rows_NR = ops.engram_hash(
            compressed.ids,
            compressed.history,
            step.batch.cu_rows,
            multipliers=hashing.multipliers,
            primes=hashing.primes,
            offsets=hashing.offsets,
            pad_id=self.tables.pad_id,
        )
        step.observe("hash_ids", self.layer, rows_NR)
        embedded = ops.engram_lookup(self.parameters.table, rows_NR, numerics=numerics)
        kv = ops.linear(embedded, self.parameters.wkv, numerics=numerics)
        out_NSD, gate_NS = ops.engram_gate(
            streams_NSD,
            kv,
            self.parameters.query_weight,
            self.parameters.key_weight,
            step.batch.encoder.is_image,
            rms_eps=self.spec.rms_eps,
        )
        step.observe("engram_gate", self.layer, gate_NS)
        step.observe("engram_out", self.layer, out_NSD)
        return out_NSD
