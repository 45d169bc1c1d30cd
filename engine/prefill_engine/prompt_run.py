"""Runs one prompt through a model on a cache of its own, chunk by chunk, as a rank would run it alone.

For `check`, `equivalence`, probes and tests; the engine itself never uses it. The trap: block slots are those of block i = i for
every state slot, so a second attempt in another state slot sees the first one's Block KV as its hit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from prefill_engine.batch import AttemptRows, Batch, build_batch
from prefill_engine.kv_cache import KvCache
from prefill_engine.model.flash import DeepseekV41Flash
from prefill_engine.model.step import Observer
from prefill_engine.step_plan import ChunkPlan, StepPlan
from prefill_kernels.ops import Ops
from prefill_plan.config import RecordFormat, Truncation
from prefill_plan.kv_layout import BLOCK_TOKENS, block_layout, state_layout
from prefill_plan.model_spec import ModelSpec

_ATTEMPT = b"prompt-run------"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptTerms:
    """How an attempt is computed; see ChunkPlan. All 0 = a cold run of every layer on every row."""

    hit_tokens: int = 0
    window_floor: int = 0
    decoder_floor: int = 0
    state_slot: int = 0


class Recorder:
    """Keeps what a model shows its observer, by token position, over the chunks of one attempt."""

    def __init__(self, spec: ModelSpec) -> None:
        self._first_decoder_layer = spec.first_decoder_layer
        self._seen: dict[tuple[str, int], list[tuple[Tensor, Tensor]]] = {}

    def observer(self, batch: Batch) -> Observer:
        """Observer of one step with one sequence."""

        def observe(name: str, layer: int, tensor: Tensor) -> None:
            in_decoder = layer >= self._first_decoder_layer or (layer < 0 and name != "emb")
            positions = (batch.decoder if in_decoder else batch.encoder).positions
            self._seen.setdefault((name, layer), []).append((positions, tensor.clone()))

        return observe

    def at(self, name: str, layer: int, positions: Sequence[int]) -> Tensor:
        """[len(positions), ..] rows of the value at these token positions, the last computed ones; KeyError if one never was."""
        steps = self._seen[name, layer]
        places = {position: row for row, position in enumerate(torch.cat([step[0] for step in steps]).tolist())}
        return torch.cat([step[1] for step in steps])[[places[position] for position in positions]]

    def steps(self, name: str, layer: int) -> list[Tensor]:
        """The value as each step showed it."""
        return [tensor for _, tensor in self._seen.get((name, layer), [])]


class PromptRun:
    """One prompt and its cache.

    rows: the inputs; token ids beyond the prompt may follow (a teacher-forced continuation).
    """

    def __init__(
        self,
        model: DeepseekV41Flash,
        rows: AttemptRows,
        *,
        ops: Ops,
        keep_tokens: int,
        rollback_tokens: int,
        truncation: Truncation = Truncation.COMPACT,
        num_state_slots: int = 1,
    ) -> None:
        self.model = model
        self.rows = rows
        self.num_tokens = len(rows.token_ids)
        self._ops = ops
        self._truncation = truncation
        self._device = model.device
        numerics = model.numerics
        self.state = state_layout(model.spec, keep_tokens=keep_tokens, rollback_tokens=rollback_tokens)
        self.num_blocks = -(-self.num_tokens // BLOCK_TOKENS)
        self.cache = KvCache(
            model.spec,
            layout=block_layout(model.spec, RecordFormat(model.record_format)),
            state=self.state,
            num_blocks=self.num_blocks,
            num_state_slots=num_state_slots,
            device=self._device,
            raw_dtype=None if numerics.quantise_cache else numerics.activation,
        )

    def prefill(self, bounds: Sequence[int], terms: AttemptTerms, *, recorder: Recorder | None = None) -> Tensor | None:
        """Computes the chunks between successive bounds.

        Returns:
            [V] wide logits of the last row if the last bound is the end of the tokens, else None.
        """
        logits = None
        for start, end in pairwise(bounds):
            logits = self.step(start, end, terms, wants_logits=end == self.num_tokens, recorder=recorder)
        return logits

    def step(
        self, start: int, end: int, terms: AttemptTerms, *, wants_logits: bool, recorder: Recorder | None = None
    ) -> Tensor | None:
        """One chunk; its last row's [V] logits when asked for."""
        chunk = ChunkPlan(
            attempt_id=_ATTEMPT,
            start=start,
            end=end,
            hit_tokens=terms.hit_tokens,
            window_floor=terms.window_floor,
            decoder_floor=terms.decoder_floor,
            prompt_tokens=self.num_tokens,
            block_slots=tuple(range(self.num_blocks)),
            state_slot=terms.state_slot,
            snapshot_positions=(),
            is_last=wants_logits,
        )
        batch = build_batch(
            StepPlan(step_id=0, chunks=(chunk,)),
            {_ATTEMPT: self.rows},
            spec=self.model.spec,
            state=self.state,
            truncation=self._truncation,
            device=self._device,
        )
        observe = recorder.observer(batch) if recorder else None
        with torch.inference_mode():
            output = self.model.forward(batch, self.cache, on_layer=lambda _layer: None, observe=observe)
        return output.logits[0] if wants_logits else None

    def window_keys(self, layer: int, positions: Sequence[int], *, state_slot: int = 0) -> Tensor:
        """[len(positions), C] act window keys as the ring holds them."""
        rows = torch.tensor([position % self.state.ring_rows for position in positions])
        records = self.cache.window_ring(layer)[state_slot, rows.to(self._device)]
        return self._ops.decode_window(records, numerics=self.model.numerics)

    def hit_pages(self, layer: int, num_entries: int) -> list[Tensor]:
        """Copies of the first entries of a KV source as stored: main records, index data, index scales."""
        slots = torch.arange(num_entries, device=self._device)
        pages = (self.cache.main_pages(layer), *self.cache.index_pages(layer))
        return [self._ops.gather_rows(page, slots) for page in pages]
