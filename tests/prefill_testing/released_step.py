"""One step of the released model on any device, values unset: to time it on a GPU, or to count its launches on "meta".

On "meta" no tensor has data, so a launcher or a module that asks the host for a value raises: running a step there proves that it
has no host sync.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch

from prefill_engine.batch import AttemptRows, Batch, build_batch
from prefill_engine.kv_cache import KvCache
from prefill_engine.model.engram_tables import EngramLayerTables, EngramTables
from prefill_engine.model.flash import DeepseekV41Flash
from prefill_engine.model.parameters import ModelParameters
from prefill_engine.model.weights import blank_parameters
from prefill_engine.step_plan import ChunkPlan, StepPlan
from prefill_kernels.numerics import PRODUCTION
from prefill_kernels.ops import Ops
from prefill_plan.config import RecordFormat, Truncation
from prefill_plan.kv_layout import BLOCK_TOKENS, block_layout, state_layout
from prefill_plan.model_spec import EngramSpec, ModelSpec, released_model_spec

KEEP_TOKENS, ROLLBACK_TOKENS = 140, 6
LOCAL_EXPERTS = 52
"""One EP8 rank's share: 384 routed and 32 redundant experts."""
_ATTEMPT = b"\1" * 16


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """rows of one chunk that ends at token `context`; is_last: it ends the prompt, so the decoder replays KEEP_TOKENS rows."""

    rows: int
    context: int
    is_last: bool


def released_spec(*, engram_rows_per_head: int | None = None) -> ModelSpec:
    """The released model, or one with smaller Engram tables (the real ones have 101 GB per layer)."""
    spec = released_model_spec()
    if engram_rows_per_head is None or spec.engram is None:
        return spec
    engram = spec.engram
    num_rows = (engram.max_ngram - 1) * engram.num_heads * engram_rows_per_head
    small = replace_struct(engram, vocab_size=engram_rows_per_head, num_embeddings=(num_rows,) * len(engram.layers))
    return replace_struct(spec, engram=small)


def replace_struct(struct, **changes):  # type: ignore[no-untyped-def]
    """msgspec.structs.replace, or dataclasses.replace: whichever the struct is."""
    import msgspec

    return (
        msgspec.structs.replace(struct, **changes) if isinstance(struct, msgspec.Struct) else replace(struct, **changes)
    )


def released_parameters(spec: ModelSpec, device: torch.device) -> ModelParameters:
    return blank_parameters(spec, device=device, expert_range=range(LOCAL_EXPERTS))


def released_model(spec: ModelSpec, parameters: ModelParameters, ops: Ops) -> DeepseekV41Flash:
    return DeepseekV41Flash(
        spec,
        parameters,
        ops=ops,
        numerics=PRODUCTION,
        engram_tables=engram_tables(spec, parameters.embed.device),
        record_format=RecordFormat.FP4,
    )


def engram_tables(spec: ModelSpec, device: torch.device) -> EngramTables | None:
    """Hash constants that keep every row inside the table; not the release's (they need its tokenizer)."""
    engram = spec.engram
    if engram is None:
        return None
    layers = tuple(
        _layer_tables(engram, layer, num_rows)
        for layer, num_rows in zip(engram.layers, engram.num_embeddings, strict=True)
    )
    tables = EngramTables(token_map=torch.arange(spec.vocab_size), pad_id=2, layers=layers)
    return tables.to(device)


def _layer_tables(engram: EngramSpec, layer: int, num_rows: int) -> EngramLayerTables:
    num_sizes = engram.max_ngram - 1
    per_head = num_rows // (num_sizes * engram.num_heads)
    return EngramLayerTables(
        layer=layer,
        multipliers=torch.tensor([3 + 2 * n for n in range(engram.max_ngram)]),
        primes=torch.full((num_sizes, engram.num_heads), per_head),
        offsets=torch.arange(num_sizes * engram.num_heads) * per_head,
    )


def released_cache(spec: ModelSpec, shape: StepShape, device: torch.device) -> KvCache:
    """Room for one sequence of the step's context."""
    return KvCache(
        spec,
        layout=block_layout(spec, RecordFormat.FP4),
        state=state_layout(spec, keep_tokens=KEEP_TOKENS, rollback_tokens=ROLLBACK_TOKENS),
        num_blocks=-(-shape.context // BLOCK_TOKENS),
        num_state_slots=2,
        device=device,
    )


def released_batch(spec: ModelSpec, cache: KvCache, shape: StepShape, device: torch.device) -> Batch:
    """The step's chunk, tokens at random; everything before it is in the cache."""
    tokens = np.random.default_rng(1).integers(3, spec.vocab_size - 1000, shape.context).astype(np.int32)
    start = shape.context - shape.rows
    chunk = ChunkPlan(
        attempt_id=_ATTEMPT,
        start=start,
        end=shape.context,
        hit_tokens=start // BLOCK_TOKENS * BLOCK_TOKENS,
        window_floor=0,
        decoder_floor=shape.context - KEEP_TOKENS if shape.is_last else shape.context,
        prompt_tokens=shape.context,
        block_slots=tuple(range(-(-shape.context // BLOCK_TOKENS))),
        state_slot=0,
        snapshot_positions=(),
        is_last=shape.is_last,
    )
    return build_batch(
        StepPlan(step_id=1, chunks=(chunk,)),
        {_ATTEMPT: AttemptRows(token_ids=tokens)},
        spec=spec,
        state=cache.state,
        truncation=Truncation.COMPACT,
        device=device,
    )
