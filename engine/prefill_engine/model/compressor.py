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
from prefill_kernels.ops import Rows
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

    def publish(self, x: Rows, step: Step) -> SharedKv:
        """Writes the entries of groups that close in this step, then reads all visible ones.

        Args:
            x: attention input of the layer, all rows of the step.

        Returns:
            main KV and index keys of every sequence; nothing selected yet. The caches' pages and, at ratio 2, the compressor
            state are written in place.
        """
        entries = step.batch.entries.of(self.layer.compress_ratio)
        latent_GC = self._latent(x, entries, step)
        step.observe("ckv_pre", self.layer.index, latent_GC)
        self._write(latent_GC, entries, step)
        step.wait_source(self.layer.index)
        return self._read(entries, step)

    def _latent(self, x: Rows, entries: EntryBatch, step: Step) -> Tensor:
        """[G, C] act, normed, before RoPE."""
        ops, numerics, eps = self.equipment.ops, self.equipment.numerics, self.spec.rms_eps
        if self.layer.compress_ratio == 1:
            return ops.rms_norm(ops.linear(x, self.parameters.wkv, numerics=numerics), self.parameters.norm, eps=eps)
        assert self.parameters.wgate is not None, f"layer {self.layer.index}: ratio 2 without a gate"
        latent_NC, score_NC = ops.linear_pair(
            x, self.parameters.wkv, self.parameters.wgate, numerics=numerics, wide_output=True
        )
        return ops.pool_pairs(
            latent_NC,
            score_NC,
            self.parameters.norm,
            step.cache.compress_state(self.layer.index),
            step.batch.state_slots,
            step.batch.starts,
            step.batch.cu_rows,
            num_groups=len(entries.write_slots),
            eps=eps,
            numerics=numerics,
        )

    def _write(self, latent_GC: Tensor, entries: EntryBatch, step: Step) -> None:
        ops, numerics = self.equipment.ops, self.equipment.numerics
        assert self.indexer.wk is not None, f"layer {self.layer.index}: KV source without index keys"
        assert self.indexer.k_norm is not None, f"layer {self.layer.index}: KV source without an index-key norm"
        ops.store_main(
            latent_GC,
            entries.write_positions,
            self.frequencies,
            step.cache.main_pages(self.layer.index),
            entries.write_slots,
            record_format=self.equipment.record_format,
            numerics=numerics,
        )
        data_pages, scale_pages = step.cache.index_pages(self.layer.index)
        ops.store_index(
            ops.linear(Rows(plain=latent_GC), self.indexer.wk, numerics=numerics),
            self.indexer.k_norm,
            entries.write_positions,
            self.frequencies,
            data_pages,
            scale_pages,
            entries.write_slots,
            eps=self.spec.rms_eps,
            numerics=numerics,
        )

    def _read(self, entries: EntryBatch, step: Step) -> SharedKv:
        ops, numerics = self.equipment.ops, self.equipment.numerics
        main_EC = ops.load_main(
            step.cache.main_pages(self.layer.index),
            entries.gather_slots,
            record_format=self.equipment.record_format,
            numerics=numerics,
        )
        keys = ops.load_index(*step.cache.index_pages(self.layer.index), entries.gather_slots, numerics=numerics)
        step.observe("ckv_post", self.layer.index, main_EC)
        if step.is_observed:
            step.observe("index_k", self.layer.index, ops.index_values(keys, numerics=numerics))
        return SharedKv(main_kv=main_EC, index_keys=keys)
