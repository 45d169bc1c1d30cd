"""DeepSeek-V4.1-Flash prefill: encoder over all rows, decoder replay over kept rows, head on last rows (model.md 1.4, 5).

Called once per step by the rank, by `check` and by `equivalence`. The trap: what a layer leaves for others goes through
SharedKv or through cache slots named by the batch; there is no other state, so a step can be repeated and gives the same
bytes.

observe(name, layer, tensor) sees, per layer: hash_ids, engram_gate, engram_out, ckv_pre [G, C], ckv_post [E, C] and
index_k [E, I] (all visible entries), swa [N, C] (the rows' window keys as attended), topk, candidates, attn_out, router_ids,
router_w, stream, premix; with layer -1: emb, main_hidden, final_hidden and logits. Layers of the decoder, and the last
three, have decoder rows.

Legend: N rows, M decoder rows, F finished prompts, S residual streams, D hidden, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from prefill_engine.batch import Batch
from prefill_engine.kv_cache import KvCache
from prefill_engine.model.assembly import build_draft, build_layers
from prefill_engine.model.draft import DraftSeed
from prefill_engine.model.engram import compress_ids
from prefill_engine.model.engram_tables import EngramTables
from prefill_engine.model.layer import Layer
from prefill_engine.model.parameters import ModelParameters
from prefill_engine.model.step import Equipment, Observer, Residual, SharedKv, Step, ignore, never_wait
from prefill_kernels.numerics import Numerics
from prefill_kernels.ops import MhcOutput, Ops
from prefill_plan.config import RecordFormat
from prefill_plan.model_spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """logits: [F, V] wide, of the last row of each chunk that ends its prompt, in chunk order."""

    logits: Tensor


class DeepseekV41Flash:
    """The model of one rank. Immutable; the caches it writes are arguments of forward()."""

    def __init__(
        self,
        spec: ModelSpec,
        parameters: ModelParameters,
        *,
        ops: Ops,
        numerics: Numerics,
        engram_tables: EngramTables | None,
        record_format: RecordFormat,
    ) -> None:
        self.spec = spec
        self.numerics = numerics
        self.record_format = record_format
        self.device = parameters.embed.device
        self._parameters = parameters
        self._tables = engram_tables
        self._equipment = Equipment(ops=ops, numerics=numerics, record_format=record_format.value)
        layers = build_layers(spec, parameters, engram_tables, self._equipment)
        self._encoder: tuple[Layer, ...] = layers[: spec.first_decoder_layer]
        self._decoder: tuple[Layer, ...] = layers[spec.first_decoder_layer :]
        self._draft: DraftSeed | None = build_draft(spec, parameters, self._equipment)

    def forward(
        self,
        batch: Batch,
        cache: KvCache,
        *,
        on_layer: Callable[[int], None],
        observe: Observer | None = None,
        wait_source: Callable[[int], None] = never_wait,
    ) -> StepOutput:
        """Runs one step and writes block entries, window rings and compressor state of its sequences into `cache`, in place.

        Args:
            batch: of build_batch, on the cache's device.
            cache: raw when numerics.quantise_cache is False, in the activation dtype; records otherwise.
            on_layer: called with a layer's index when the host has issued that layer.
            wait_source: see Step.
            observe: see above; given, final_hidden and logits are computed for all decoder rows.
        """
        step = Step(batch=batch, cache=cache, observe=observe or ignore, wait_source=wait_source)
        compressed = compress_ids(batch, self._tables) if self._tables is not None else None
        residual = self._embed(step)
        shared = SharedKv()
        for layer in self._encoder:
            residual = layer.enrich(residual, compressed, step)
            turn = layer.enter(residual)
            shared = layer.publish(turn.rows, shared, step)
            residual, shared = layer.forward(turn, shared, batch.encoder, step)
            on_layer(layer.layer.index)
        residual = self._replay_decoder(residual, shared, step, on_layer)
        last = self._gather(residual, batch.last_rows)
        if observe is not None:
            hidden_MD = self._final_hidden(residual)
            observe("final_hidden", -1, hidden_MD)
            observe("logits", -1, self._logits(hidden_MD))
        return StepOutput(logits=self._logits(self._final_hidden(last)))

    def _embed(self, step: Step) -> Residual:
        """Streams of the input rows, all equal, collapsed by stream 0 alone (model.md 2.2)."""
        ops, numerics, batch = self._equipment.ops, self.numerics, step.batch
        x_ND = ops.embed_tokens(self._parameters.embed, batch.token_ids, numerics=numerics)
        if batch.image_rows is not None and batch.image_embeddings is not None:
            ops.scatter_rows(x_ND, batch.image_rows, batch.image_embeddings.to(x_ND.dtype))
        step.observe("emb", -1, x_ND)
        pre_NS = torch.zeros(len(x_ND), self.spec.hc_mult, dtype=numerics.wide, device=x_ND.device)
        pre_NS[:, 0] = 1.0
        return Residual(streams=x_ND[:, None].repeat(1, self.spec.hc_mult, 1), pre=pre_NS)

    def _replay_decoder(
        self, residual: Residual, shared: SharedKv, step: Step, on_layer: Callable[[int], None]
    ) -> Residual:
        """Decoder layers on the kept rows; the first one makes its entries from all rows before that (model.md 5.3)."""
        ops, rows = self._equipment.ops, step.batch.decoder
        first = self._decoder[0]
        shared = first.publish(first.mhc_attn.input(residual), shared, step)
        residual = self._gather(residual, step.batch.decoder_rows)
        targets = self.spec.draft.target_layers if self.spec.draft else ()
        features: list[Tensor] = []
        for layer in self._decoder:
            turn = layer.enter(residual)
            if layer.layer.index in targets:
                features.append(ops.mhc_mean(turn.streams))
            if layer is not first:
                shared = layer.publish(turn.rows, shared, step)
            residual, shared = layer.forward(turn, shared, rows, step)
            on_layer(layer.layer.index)
        if self._draft is not None:
            self._draft.store(features, rows, step)
        return residual

    def _gather(self, residual: Residual, index: Tensor) -> Residual:
        """The residual of some rows."""

        def rows(x: Tensor) -> Tensor:
            picked = self._equipment.ops.gather_rows(x.flatten(1), index)
            return picked.view(-1, *x.shape[1:])

        output = residual.output
        if output is not None:
            output = MhcOutput(y=rows(output.y), post=rows(output.post), comb=rows(output.comb))
        return Residual(streams=rows(residual.streams), pre=rows(residual.pre), output=output)

    def _final_hidden(self, residual: Residual) -> Tensor:
        return self._equipment.ops.mhc_input(
            residual.streams,
            residual.pre,
            self._parameters.norm,
            output=residual.output,
            rms_eps=self.spec.rms_eps,
            numerics=self.numerics,
        ).plain

    def _logits(self, hidden_MD: Tensor) -> Tensor:
        return self._equipment.ops.lm_head(hidden_MD, self._parameters.head, numerics=self.numerics)
