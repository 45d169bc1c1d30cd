"""The golden tiny model under two op sets, tensor by tensor: what the model's observer sees of each layer."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from prefill_engine.batch import AttemptRows, build_batch
from prefill_engine.kv_cache import KvCache
from prefill_engine.model.engram_tables import build_engram_tables
from prefill_engine.model.flash import DeepseekV41Flash
from prefill_engine.model.weights import load_parameters
from prefill_engine.step_plan import ChunkPlan, StepPlan
from prefill_kernels.numerics import PRODUCTION
from prefill_kernels.ops import Ops
from prefill_plan.config import RecordFormat, Truncation
from prefill_plan.kv_layout import BLOCK_TOKENS, block_layout, state_layout
from prefill_plan.model_spec import load_model_spec
from prefill_testing.tiny_model import GOLDEN, KEEP_TOKENS, ROLLBACK_TOKENS

Seen = dict[tuple[int, str, int], Tensor]
"""Tensors by (step, name, layer)."""
_ATTEMPT = b"\1" * 16


def run_observed(
    ops: Ops, device: torch.device, tokens: npt.NDArray[np.int32], *, chunk: int, name: str = "tiny_quant"
) -> Seen:
    """One prompt in chunks of `chunk` tokens; clones of everything the observer saw."""
    spec = load_model_spec(GOLDEN / name)
    tables = build_engram_tables(spec, GOLDEN / name / "tokenizer.json")
    model = DeepseekV41Flash(
        spec,
        load_parameters(GOLDEN / name, spec, device=device, expert_range=range(spec.num_experts)),
        ops=ops,
        numerics=PRODUCTION,
        engram_tables=None if tables is None else tables.to(device),
        record_format=RecordFormat.FP4,
    )
    state = state_layout(spec, keep_tokens=KEEP_TOKENS, rollback_tokens=ROLLBACK_TOKENS)
    num_blocks = -(-len(tokens) // BLOCK_TOKENS)
    cache = KvCache(
        spec,
        layout=block_layout(spec, RecordFormat.FP4),
        state=state,
        num_blocks=num_blocks,
        num_state_slots=1,
        device=device,
    )
    seen: Seen = {}
    for step, start in enumerate(range(0, len(tokens), chunk)):
        plan = _chunk(start, min(start + chunk, len(tokens)), len(tokens), num_blocks)
        batch = build_batch(
            StepPlan(step_id=step, chunks=(plan,)),
            {_ATTEMPT: AttemptRows(token_ids=tokens)},
            spec=spec,
            state=state,
            truncation=Truncation.COMPACT,
            device=device,
        )

        def note(what: str, layer: int, tensor: Tensor, step: int = step) -> None:
            seen[step, what, layer] = tensor.clone()

        with torch.inference_mode():
            model.forward(batch, cache, on_layer=lambda _layer: None, observe=note)
    return seen


def _chunk(start: int, end: int, total: int, num_blocks: int) -> ChunkPlan:
    return ChunkPlan(
        attempt_id=_ATTEMPT,
        start=start,
        end=end,
        hit_tokens=0,
        window_floor=0,
        decoder_floor=total - KEEP_TOKENS,
        prompt_tokens=total,
        block_slots=tuple(range(num_blocks)),
        state_slot=0,
        snapshot_positions=(),
        is_last=end == total,
    )


def compare_layers(actual: Seen, expected: Seen) -> list[dict[str, Any]]:
    """One row per tensor, in order of computation: relative L2 distance, or the share of unequal integers."""
    assert actual.keys() == expected.keys()
    rows = []
    for key, want in expected.items():
        got = actual[key]
        assert got.shape == want.shape, f"{key}: {tuple(got.shape)}, ref {tuple(want.shape)}"
        if want.is_floating_point():
            norm = torch.linalg.vector_norm(want.double()).clamp_min(1e-30)
            distance = float(torch.linalg.vector_norm(got.double() - want.double()) / norm)
        else:
            distance = float((got != want).double().mean()) if want.numel() else 0.0
        rows.append({"step": key[0], "name": key[1], "layer": key[2], "distance": distance})
    return rows
