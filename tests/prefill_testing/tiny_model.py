"""The golden tiny models as loaded models, and a bench that steps several prompts through one cache. With torch."""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from prefill_engine.batch import AttemptRows, build_batch
from prefill_engine.kv_cache import KvCache
from prefill_engine.model.engram_tables import build_engram_tables
from prefill_engine.model.flash import DeepseekV41Flash
from prefill_engine.model.weights import load_parameters
from prefill_engine.prompt_run import PromptRun
from prefill_engine.step_plan import ChunkPlan, StepPlan
from prefill_kernels.numerics import PRODUCTION, Numerics
from prefill_kernels.op_sets import load_ops
from prefill_plan.config import RecordFormat, Truncation
from prefill_plan.kv_layout import block_layout, state_layout
from prefill_plan.model_spec import load_model_spec

GOLDEN = Path(__file__).parents[1] / "golden"
CPU = torch.device("cpu")
KEEP_TOKENS = 24
ROLLBACK_TOKENS = 6


@cache
def tiny_model(
    name: str = "tiny_quant", *, numerics: Numerics = PRODUCTION, record_format: RecordFormat = RecordFormat.FP4
) -> DeepseekV41Flash:
    """A golden checkpoint under production numerics (bf16, caches and activations quantised) unless said otherwise."""
    spec = load_model_spec(GOLDEN / name)
    return DeepseekV41Flash(
        spec,
        load_parameters(GOLDEN / name, spec, device=CPU, expert_range=range(spec.num_experts)),
        ops=load_ops("ref"),
        numerics=numerics,
        engram_tables=build_engram_tables(spec, GOLDEN / name / "tokenizer.json"),
        record_format=record_format,
    )


def random_tokens(seed: int, num_tokens: int, *, vocab_size: int = 499) -> np.ndarray:
    """[num_tokens] int32 text ids; 500 is the image token of the tiny models."""
    return np.random.default_rng(seed).integers(3, vocab_size, num_tokens).astype(np.int32)


def prompt_run(
    model: DeepseekV41Flash,
    rows: AttemptRows,
    *,
    truncation: Truncation = Truncation.COMPACT,
    num_state_slots: int = 2,
) -> PromptRun:
    return PromptRun(
        model,
        rows,
        ops=load_ops("ref"),
        keep_tokens=KEEP_TOKENS,
        rollback_tokens=ROLLBACK_TOKENS,
        truncation=truncation,
        num_state_slots=num_state_slots,
    )


def tiny_cache(model: DeepseekV41Flash, *, num_blocks: int, num_state_slots: int) -> KvCache:
    """Production records of `model`, zeroed."""
    return KvCache(
        model.spec,
        layout=block_layout(model.spec, RecordFormat(model.record_format)),
        state=state_layout(model.spec, keep_tokens=KEEP_TOKENS, rollback_tokens=ROLLBACK_TOKENS),
        num_blocks=num_blocks,
        num_state_slots=num_state_slots,
        device=CPU,
    )


def run_step(
    model: DeepseekV41Flash,
    kv_cache: KvCache,
    chunks: Sequence[ChunkPlan],
    rows: Mapping[bytes, AttemptRows],
    *,
    truncation: Truncation = Truncation.COMPACT,
) -> Tensor:
    """One step of several sequences; [finished prompts, V] logits."""
    batch = build_batch(
        StepPlan(step_id=1, chunks=tuple(chunks)),
        rows,
        spec=model.spec,
        state=kv_cache.state,
        truncation=truncation,
        device=CPU,
    )
    with torch.inference_mode():
        return model.forward(batch, kv_cache, on_layer=lambda _layer: None).logits


def state_bytes(kv_cache: KvCache, state_slot: int) -> Tensor:
    """Every byte of one state slot: window rings of all layers, then compressor state."""
    rings = [kv_cache.window_ring(layer)[state_slot] for layer in range(kv_cache.state.num_layers)]
    pairs = [
        kv_cache.compress_state(source.layer)[state_slot] for source in kv_cache.layout.sources if source.ratio == 2
    ]
    return torch.cat([part.contiguous().view(torch.uint8).flatten() for part in (*rings, *pairs)])
