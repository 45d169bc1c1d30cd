"""Proof that compact truncation computes the kept rows of mask truncation (model.md 5.2-5.4): by metadata, then by numbers.

Level 1 needs no weights: it builds the batches of both modes for the released sizes and compares, on kept rows, everything that
the forward pass reads besides parameters. Level 2 runs a checkpoint in both modes along one fixed, teacher-forced trajectory.
The trap: both modes share build_batch, so level 1 also holds each kept row against the formula of model.md 5.4, written here once
more from positions alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from prefill_engine.batch import AttemptRows, Batch, build_batch
from prefill_engine.model.flash import DeepseekV41Flash
from prefill_engine.prompt_run import AttemptTerms, PromptRun
from prefill_engine.step_plan import ChunkPlan, StepPlan
from prefill_kernels.ops import Ops
from prefill_plan.config import Truncation
from prefill_plan.kv_layout import BLOCK_TOKENS, StateLayout, state_layout
from prefill_plan.model_spec import ModelSpec
from prefill_plan.positions import decoder_floor, effective_hit, replay_start

_ATTEMPT = b"equivalence-----"
_STATE_SLOT = 3
_FIRST_BLOCK_SLOT = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class MetadataCase:
    """One prompt cut one way. bounds: chunk bounds, the first one is where computing starts; hit: effective hit."""

    prompt_tokens: int
    keep_tokens: int
    hit_tokens: int
    bounds: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MetadataReport:
    """Counts of what was compared; mismatches: one line each, empty = equivalent."""

    num_cases: int
    num_chunks: int
    num_kept_rows: int
    num_dropped_rows: int
    num_window_keys: int
    mismatches: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryStep:
    """After one token of the trajectory. position: of that token. max_diff: largest |difference| of logprobs over the vocabulary;
    top_equal: the top-K tokens of both modes, in order, are the same."""

    position: int
    max_diff: float
    top_equal: bool


def metadata_cases(spec: ModelSpec) -> tuple[MetadataCase, ...]:
    """Lengths around every border (window, keep, block), several chunkings, hits with and without replay; and two long prompts:
    a step at the chunk cap, and the worked example (100,000 tokens, hit 96,896, with and without its snapshot)."""
    window = spec.window_tokens
    cases = []
    for keep in (window + 6, window + 12, 4 * window):
        for length in (1, 2, window, window + 1, keep, keep + 1, keep + window, 8 * window + 77):
            largest = effective_hit(length, length, keep_tokens=keep)
            for hit in sorted({0, effective_hit(largest // 2, length, keep_tokens=keep), largest}):
                for start in sorted({hit, replay_start(hit, window_tokens=window)}):
                    cases += [
                        MetadataCase(prompt_tokens=length, keep_tokens=keep, hit_tokens=hit, bounds=bounds)
                        for bounds in _chunkings(start, length, keep)
                    ]
    keep = window + 12
    long: list[tuple[int, tuple[int, ...]]] = [(0, (0, 16_384, 32_768 + keep + 1))]
    long += [(96_896, (start, 100_000)) for start in (96_896, replay_start(96_896, window_tokens=window))]
    cases += [MetadataCase(prompt_tokens=b[-1], keep_tokens=keep, hit_tokens=hit, bounds=b) for hit, b in long]
    return tuple(dict.fromkeys(cases))


def _chunkings(start: int, length: int, keep: int) -> list[tuple[int, ...]]:
    """One chunk, even chunks, odd chunks, and cuts just before, at and after the decoder floor."""
    floor = max(0, length - keep)
    cuts: list[Sequence[int]] = [
        (),
        range(start, length, max(128, length // 5)),
        range(start + 1, length, length // 3 + 1),
    ]
    cuts += [(floor - 1,), (floor,), (floor + 1,), (length - 1,), (floor, floor + 1, length - 1)]
    inner = [sorted({cut for cut in some if start < cut < length}) for some in cuts]
    return [(start, *some, length) for some in inner]


def compare_metadata(spec: ModelSpec, cases: Sequence[MetadataCase], *, rollback_tokens: int = 6) -> MetadataReport:
    """Level 1: kept rows of both modes, chunk by chunk.

    Compared as positions and slots, independent of buffer order: RoPE position, window keys, ring slots read and written, entry
    slots visible, block slots written, image flag, last rows.
    """
    mismatches: list[str] = []
    chunks = kept = dropped = keys = 0
    for case in cases:
        state = state_layout(spec, keep_tokens=case.keep_tokens, rollback_tokens=rollback_tokens)
        for start, end in pairwise(case.bounds):
            chunk = _chunk_plan(case, start, end)
            compact, mask = (_build(chunk, spec, state, truncation) for truncation in Truncation)
            first = min(max(chunk.decoder_floor, start), end)
            rows = end - first
            mismatches += [
                f"{case} chunk [{start}, {end}): {text}" for text in _differences(chunk, compact, mask, state, rows)
            ]
            chunks, kept, dropped = chunks + 1, kept + rows, dropped + first - start
            keys += int((mask.decoder.window_index >= 0).sum())
    return MetadataReport(
        num_cases=len(cases),
        num_chunks=chunks,
        num_kept_rows=kept,
        num_dropped_rows=dropped,
        num_window_keys=keys,
        mismatches=tuple(mismatches),
    )


def _chunk_plan(case: MetadataCase, start: int, end: int) -> ChunkPlan:
    length, hit = case.prompt_tokens, case.hit_tokens
    return ChunkPlan(
        attempt_id=_ATTEMPT,
        start=start,
        end=end,
        hit_tokens=hit,
        window_floor=case.bounds[0] if case.bounds[0] < hit else 0,
        decoder_floor=decoder_floor(length, keep_tokens=case.keep_tokens),
        prompt_tokens=length,
        block_slots=tuple(range(_FIRST_BLOCK_SLOT, _FIRST_BLOCK_SLOT + -(-length // BLOCK_TOKENS))),
        state_slot=_STATE_SLOT,
        snapshot_positions=(),
        is_last=end == length,
    )


def _build(chunk: ChunkPlan, spec: ModelSpec, state: StateLayout, truncation: Truncation) -> Batch:
    rows = AttemptRows(token_ids=np.zeros(chunk.prompt_tokens, dtype=np.int32))
    return build_batch(
        StepPlan(step_id=0, chunks=(chunk,)),
        {_ATTEMPT: rows},
        spec=spec,
        state=state,
        truncation=truncation,
        device=torch.device("cpu"),
    )


def _differences(chunk: ChunkPlan, compact: Batch, mask: Batch, state: StateLayout, num_kept: int) -> list[str]:
    """What is not equal on the last `num_kept` rows, and what both do against model.md 5.4."""
    found = []
    views = [_kept_rows(batch, chunk, state, num_kept) for batch in (compact, mask)]
    found += [name for name, value in views[0].items() if not np.array_equal(value, views[1][name])]
    expected = _expected_rows(chunk, state, num_kept)
    found += [f"{name} (rule)" for name, value in expected.items() if not np.array_equal(value, views[1][name])]
    step = [_step_values(batch) for batch in (compact, mask)]
    found += [name for name, value in step[0].items() if not np.array_equal(value, step[1][name])]
    ends = [batch.decoder.positions[batch.last_rows.long()].tolist() for batch in (compact, mask)]
    if ends != [[chunk.end - 1] if chunk.is_last else []] * 2:
        found.append("last rows")
    dropped = (mask.decoder.window_index[: len(mask.decoder.positions) - num_kept] >= 0).any()
    written = (mask.decoder.ring_slots[: len(mask.decoder.positions) - num_kept] >= 0).any()
    placeholder = num_kept == 0 and (len(compact.decoder.positions) != 1 or int(compact.decoder.ring_slots[0]) >= 0)
    if bool(dropped) or bool(written) or placeholder:
        found.append("a dropped row sees or keeps a window key")
    return found


def _kept_rows(batch: Batch, chunk: ChunkPlan, state: StateLayout, num_kept: int) -> dict[str, npt.NDArray[np.int64]]:
    """Values of the kept rows with every index resolved to a position or a cache slot."""
    rows = batch.decoder
    total = len(rows.positions)
    window_keys = _resolve(rows.window_index, _key_positions(batch, chunk, state))
    first, visible = rows.entries.r1.first.numpy(), rows.entries.r1.num_visible.numpy()
    return {
        "position": rows.positions.numpy()[total - num_kept :],
        "step row": batch.decoder_rows.numpy()[total - num_kept :],
        "window keys": window_keys[total - num_kept :],
        "ring slots read": _resolve(rows.window_index, _key_ring_slots(batch))[total - num_kept :],
        "ring slots written": rows.ring_slots.numpy()[total - num_kept :],
        "first entry": first[total - num_kept :],
        "visible entries": visible[total - num_kept :],
        "image": rows.is_image.numpy()[total - num_kept :].astype(np.int64),
    }


def _key_positions(batch: Batch, chunk: ChunkPlan, state: StateLayout) -> npt.NDArray[np.int64]:
    """Token position of each row of the key buffer [history | step]; the history's from the ring slot it is read from."""
    slots = batch.decoder.history_slots.numpy().astype(np.int64)
    before = np.arange(chunk.start - state.window_tokens, chunk.start)
    is_right = slots == _STATE_SLOT * state.ring_rows + before % state.ring_rows
    history = np.where((slots >= 0) & is_right, before, -1)
    return np.concatenate([history, batch.decoder.positions.numpy()])


def _key_ring_slots(batch: Batch) -> npt.NDArray[np.int64]:
    """Ring slot of each row of the key buffer; -2 for rows of the step itself."""
    return np.concatenate(
        [batch.decoder.history_slots.numpy(), np.full(len(batch.decoder.positions), -2, dtype=np.int64)]
    )


def _resolve(index: Tensor, values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """values[index], -1 where the index is -1."""
    flat = index.numpy()
    return np.where(flat >= 0, values[np.maximum(flat, 0)], -1)


def _expected_rows(chunk: ChunkPlan, state: StateLayout, num_kept: int) -> dict[str, npt.NDArray[np.int64]]:
    """model.md 5.4 and 5.5 from positions: keys max(p - W + 1, floor) .. p, absolute positions, ring slots of the last rows."""
    position = np.arange(chunk.end - num_kept, chunk.end)
    keys = position[:, None] - np.arange(state.window_tokens - 1, -1, -1)
    floor = max(chunk.decoder_floor, chunk.window_floor)
    kept = position >= chunk.end - state.ring_rows
    return {
        "position": position,
        "window keys": np.where(keys >= floor, keys, -1),
        "ring slots written": np.where(kept, _STATE_SLOT * state.ring_rows + position % state.ring_rows, -1),
        "visible entries": position + 1,
    }


def _step_values(batch: Batch) -> dict[str, npt.NDArray[np.int64]]:
    """What both modes must agree on for the whole step: all encoder metadata and everything that is stored."""
    return {
        "entries written, ratio 1": batch.entries.r1.write_slots.numpy(),
        "entries written, ratio 2": batch.entries.r2.write_slots.numpy(),
        "entries read, ratio 1": batch.entries.r1.gather_slots.numpy(),
        "entries read, ratio 2": batch.entries.r2.gather_slots.numpy(),
        "encoder window": batch.encoder.window_index.numpy(),
        "encoder ring": batch.encoder.ring_slots.numpy(),
        "encoder history": batch.encoder.history_slots.numpy(),
    }


def compare_trajectory(
    model: DeepseekV41Flash,
    token_ids: npt.NDArray[np.int32],
    *,
    prompt_tokens: int,
    keep_tokens: int,
    chunk_tokens: int,
    ops: Ops,
    top_k: int = 20,
    rollback_tokens: int = 6,
) -> tuple[TrajectoryStep, ...]:
    """Level 2: prefill of the prompt in both modes, then the following tokens one by one, all given (teacher-forced).

    Args:
        token_ids: [prompt_tokens + steps] int32.
        chunk_tokens: rows per chunk of the prompt.

    Returns:
        One entry for the prompt's last token and one per following token.
    """
    floor = decoder_floor(prompt_tokens, keep_tokens=keep_tokens)
    bounds = [*range(0, prompt_tokens, chunk_tokens), *range(prompt_tokens, len(token_ids) + 1)]
    runs = [
        PromptRun(
            model,
            AttemptRows(token_ids=token_ids),
            ops=ops,
            keep_tokens=keep_tokens,
            rollback_tokens=rollback_tokens,
            truncation=truncation,
        )
        for truncation in Truncation
    ]
    steps = []
    for start, end in pairwise(bounds):
        wanted = end >= prompt_tokens
        compact, mask = (run.step(start, end, AttemptTerms(decoder_floor=floor), wants_logits=wanted) for run in runs)
        if compact is not None and mask is not None:
            steps.append(_compare_logits(end - 1, compact, mask, top_k))
    return tuple(steps)


def _compare_logits(position: int, compact: Tensor, mask: Tensor, top_k: int) -> TrajectoryStep:
    logprobs = [torch.log_softmax(logits.double(), dim=-1) for logits in (compact, mask)]
    # Stable, so that equal values are ordered by token and not by chance.
    top = [torch.sort(values, descending=True, stable=True).indices[:top_k].tolist() for values in logprobs]
    difference = (logprobs[0] - logprobs[1]).abs().max()
    return TrajectoryStep(position=position, max_diff=float(difference), top_equal=top[0] == top[1])
