"""Start-up steps on a made-up prompt: they prove that the model runs here, and give the cost model its first fit (C47).

Runs before the rank is ready, on slots borrowed from the pools and given back. The trap: the first step pays for one-time
set-up, so it is run but not measured.
"""

from collections.abc import Callable

import numpy as np
import torch

from prefill_engine.batch import AttemptRows
from prefill_engine.chunk_cut import chunk_work
from prefill_engine.cost_model import CostModel, StepSample, calibrated_from
from prefill_engine.rank.kv_keeper import KvKeeper
from prefill_engine.rank.model_runner import ModelRunner
from prefill_engine.step_plan import ChunkPlan
from prefill_plan.errors import PlanError
from prefill_plan.kv_layout import BLOCK_TOKENS

_ATTEMPT_ID = b"calibration-step"
_SEED = 20260928


def calibrate(runner: ModelRunner, kv: KvKeeper, *, vocab_size: int, on_layer: Callable[[int, int], None]) -> CostModel:
    """Cost model fitted to this machine; the pools are as before.

    Raises:
        PlanError: the pools are too small for one block, or the model gives values that are not finite.
    """
    num_blocks = min(3, kv.blocks.num_free)
    slots = kv.blocks.allocate(num_blocks)
    state_slot = kv.states.allocate_state()
    if not slots or state_slot is None:
        raise PlanError(
            f"KV pool of {kv.blocks.num_blocks} blocks has no room for a start-up step: expected at least 2"
        )
    tokens = np.random.default_rng(_SEED).integers(3, vocab_size, num_blocks * BLOCK_TOKENS, dtype=np.int32)
    samples = []
    for index, chunk in enumerate([_chunks(slots, state_slot)[0], *_chunks(slots, state_slot)]):
        rows = {_ATTEMPT_ID: AttemptRows(token_ids=tokens[: chunk.prompt_tokens])}
        result = runner.run((chunk,), rows, on_layer=on_layer)
        if not bool(torch.isfinite(result.logits).all()):
            raise PlanError(f"start-up step {index} gave logits that are not finite: the checkpoint cannot be served")
        work = chunk_work(chunk.start, chunk.end, decoder_floor=chunk.decoder_floor, prompt_tokens=chunk.prompt_tokens)
        samples.append(
            StepSample(
                step_ms=result.seconds * 1e3,
                encoder_rows=work.encoder_rows,
                decoder_rows=work.decoder_rows,
                row_context_products=work.row_context_products,
                flagged=index == 0,
            )
        )
    kv.states.release_state(state_slot)
    kv.blocks.release(slots)
    return calibrated_from(samples, warmup_steps=0)


def _chunks(slots: tuple[int, ...], state_slot: int) -> list[ChunkPlan]:
    """Steps that tell the terms of the model apart: few and many rows, all or one in the decoder, short and long context."""
    total = len(slots) * BLOCK_TOKENS
    shapes = [
        (0, 16, 16, 0),
        (0, 64, 64, 0),
        (0, total, total, 0),
        (0, total - 1, total, total),
        (total - 32, total, total, 0),
        (total - 64, total - 1, total, total),
    ]
    return [
        ChunkPlan(
            attempt_id=_ATTEMPT_ID,
            start=start,
            end=end,
            hit_tokens=0,
            window_floor=0,
            decoder_floor=decoder_floor,
            prompt_tokens=prompt_tokens,
            block_slots=slots,
            state_slot=state_slot,
            snapshot_positions=(),
            is_last=end == prompt_tokens,
        )
        for start, end, prompt_tokens, decoder_floor in shapes
    ]
