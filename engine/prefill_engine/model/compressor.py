"""Makes the compressed entries of a KV source layer: main KV and index keys (model.md 2.5, 2.6).

Called for all rows of a step, also where a layer computes kept rows only (model.md 5.3). The traps: the index key comes from the
normed latent before RoPE; entries are read back from the cache after they were written there, so this step's own entries carry
cache precision, and entries below the hit are the cache's, not the ones computed here (R3).

Legend: N rows, D hidden, C head dim, I index head dim, G groups that close in the step, E visible entries.
"""

from dataclasses import dataclass

from torch import Tensor

from prefill_engine.batch import EntryBatch
from prefill_engine.model.parameters import CompressorParameters, IndexerParameters
from prefill_engine.model.step import Equipment, SharedKv, Step
from prefill_plan.model_spec import LayerSpec, ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Compressor:
    """frequencies: of the layer's RoPE."""

    layer: LayerSpec
    parameters: CompressorParameters
    indexer: IndexerParameters
    frequencies: Tensor
    spec: ModelSpec
    equipment: Equipment

    def publish(self, x_ND: Tensor, step: Step) -> SharedKv:
        """Writes the entries of groups that close in this step, then reads all visible ones.

        Args:
            x_ND: attention input of the layer, all rows of the step.

        Returns:
            main KV and index keys of every sequence; nothing selected yet. The caches' pages and, at ratio 2, the compressor
            state are written in place.
        """
        entries = step.batch.entries.of(self.layer.compress_ratio)
        latent_GC = self._latent(x_ND, step)
        step.observe("ckv_pre", self.layer.index, latent_GC)
        self._write(latent_GC, entries, step)
        step.wait_source(self.layer.index)
        return self._read(entries, step)

    def _latent(self, x_ND: Tensor, step: Step) -> Tensor:
        """[G, C] act, normed, before RoPE."""
        ops, numerics = self.equipment.ops, self.equipment.numerics
        if self.layer.compress_ratio == 1:
            pooled_GC = ops.linear(x_ND, self.parameters.wkv, numerics=numerics)
        else:
            assert self.parameters.wgate is not None, f"layer {self.layer.index}: ratio 2 without a gate"
            pooled_GC = ops.pool_pairs(
                ops.linear(x_ND, self.parameters.wkv, numerics=numerics, wide_output=True),
                ops.linear(x_ND, self.parameters.wgate, numerics=numerics, wide_output=True),
                step.cache.compress_state(self.layer.index),
                step.batch.state_slots,
                step.batch.starts,
                step.batch.cu_rows,
                numerics=numerics,
            )
        return ops.rms_norm(pooled_GC, self.parameters.norm, eps=self.spec.rms_eps)

    def _write(self, latent_GC: Tensor, entries: EntryBatch, step: Step) -> None:
        ops, numerics = self.equipment.ops, self.equipment.numerics
        assert self.indexer.wk is not None, f"layer {self.layer.index}: KV source without index keys"
        assert self.indexer.k_norm is not None, f"layer {self.layer.index}: KV source without an index-key norm"
        main_GC = ops.rope(latent_GC, entries.write_positions, self.frequencies)
        records = ops.encode_main(main_GC, record_format=self.equipment.record_format, numerics=numerics)
        key_GI = ops.linear(latent_GC, self.indexer.wk, numerics=numerics)
        key_GI = ops.rms_norm(key_GI, self.indexer.k_norm, eps=self.spec.rms_eps)
        key_GI = ops.rope(key_GI, entries.write_positions, self.frequencies)
        data, scales = ops.encode_index(key_GI, numerics=numerics)
        data_pages, scale_pages = step.cache.index_pages(self.layer.index)
        ops.scatter_rows(step.cache.main_pages(self.layer.index), entries.write_slots, records)
        ops.scatter_rows(data_pages, entries.write_slots, data)
        ops.scatter_rows(scale_pages, entries.write_slots, scales)

    def _read(self, entries: EntryBatch, step: Step) -> SharedKv:
        ops, numerics = self.equipment.ops, self.equipment.numerics
        records = ops.gather_rows(step.cache.main_pages(self.layer.index), entries.gather_slots)
        main_EC = ops.decode_main(records, record_format=self.equipment.record_format, numerics=numerics)
        data_pages, scale_pages = step.cache.index_pages(self.layer.index)
        keys_EI = ops.decode_index(
            ops.gather_rows(data_pages, entries.gather_slots),
            ops.gather_rows(scale_pages, entries.gather_slots),
            numerics=numerics,
        )
        step.observe("ckv_post", self.layer.index, main_EC)
        step.observe("index_k", self.layer.index, keys_EI)
        return SharedKv(main_kv=main_EC, index_keys=keys_EI)
