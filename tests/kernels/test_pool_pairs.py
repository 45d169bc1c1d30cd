"""Ratio-2 pooling: whole sequences against a loop, and any cutting into chunks against the whole."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from prefill_kernels.numerics import Numerics
from prefill_kernels.ref import pool_pairs, rms_norm
from prefill_kernels.ref.pool_pairs import pool_latents
from prefill_testing.numeric import (
    ALL_NUMERICS,
    BFLOAT16,
    FLOAT32,
    FLOAT64,
    assert_bitwise,
    assert_close,
    fraction_equal,
    random_tensor,
)

NUM_CHANNELS = 5
RING_ROWS = 7


@pytest.mark.parametrize("numerics", ALL_NUMERICS.values(), ids=ALL_NUMERICS.keys())
@pytest.mark.parametrize("length", [1, 2, 9, 24])
def test_whole_sequence_matches_a_loop(numerics: Numerics, length: int) -> None:
    latent, score = _projections(length, numerics)
    out = _pool(latent, score, _state(1, numerics), [0], [0], [length], numerics)
    assert out.dtype == numerics.activation
    assert_close(out, _slow_pool(latent, score), dtype=numerics.activation)


def test_pooled_value_is_rounded_at_the_end_only() -> None:
    latent, score = _projections(400, BFLOAT16)
    out = _pool(latent, score, _state(1, BFLOAT16), [0], [0], [400], BFLOAT16)
    rounded_first = _slow_pool(latent.bfloat16(), score.bfloat16()).bfloat16()
    assert fraction_equal(out, _slow_pool(latent, score).bfloat16()) > 0.999
    assert fraction_equal(out, rounded_first) < 0.9


def test_pooled_latents_are_normed_after_their_rounding() -> None:
    latent, score = _projections(9, BFLOAT16)
    weight = random_tensor(7, NUM_CHANNELS, dtype=torch.bfloat16)
    batch = (torch.tensor([0], dtype=torch.int32), torch.tensor([0], dtype=torch.int32), torch.tensor([0, 9]).int())
    state = _state(1, BFLOAT16)
    out = pool_pairs(latent, score, weight, state, *batch, num_groups=4, eps=1e-20, numerics=BFLOAT16)
    pooled = _pool(latent, score, _state(1, BFLOAT16), [0], [0], [9], BFLOAT16)
    assert_bitwise(out, rms_norm(pooled, weight, eps=1e-20))


def test_scores_far_apart_do_not_overflow() -> None:
    latent = torch.tensor([[1.0], [2.0]])
    score = torch.tensor([[1e30], [-1e30]])
    out = _pool(latent, score, torch.zeros(1, 3, 2, 1), [0], [0], [2], FLOAT32)
    assert out.tolist() == [[1.0]]


@settings(max_examples=40, deadline=None)
@given(data=st.data(), numerics=st.sampled_from([FLOAT32, BFLOAT16]))
def test_any_chunking_of_any_batch_equals_each_sequence_alone(data: st.DataObject, numerics: Numerics) -> None:
    lengths = data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=3))
    whole = [_projections(length, numerics, seed=b) for b, length in enumerate(lengths)]
    alone = [_pool(latent, score, _state(1, numerics), [0], [0], [len(latent)], numerics) for latent, score in whole]
    state = _state(5, numerics)
    slots = data.draw(st.permutations(range(5)))[: len(lengths)]
    num_steps = data.draw(st.integers(1, 5))
    cuts = [[0, *sorted(data.draw(st.integers(0, length)) for _ in range(num_steps - 1)), length] for length in lengths]
    parts: list[list[Tensor]] = [[] for _ in lengths]
    for step in range(num_steps):
        starts, ends = ([cut[i] for cut in cuts] for i in (step, step + 1))
        latent, score = (torch.cat([w[i][s:e] for w, s, e in zip(whole, starts, ends, strict=True)]) for i in range(2))
        counts = [e - s for s, e in zip(starts, ends, strict=True)]
        pooled = _pool(latent, score, state, slots, starts, counts, numerics)
        groups = [e // 2 - s // 2 for s, e in zip(starts, ends, strict=True)]
        for part, rows in zip(parts, pooled.split(groups), strict=True):
            part.append(rows)
    for part, expected in zip(parts, alone, strict=True):
        assert_bitwise(torch.cat(part), expected)


@pytest.mark.parametrize(("start", "count"), [(0, 3), (5, 1), (3, 20), (100, 7)], ids=str)
def test_ring_holds_the_last_tokens_and_nothing_else_changes(start: int, count: int) -> None:
    latent, score = _projections(count, FLOAT32)
    state = _state(2, FLOAT32)
    before = state.clone()
    _pool(latent, score, state, [1], [start], [count], FLOAT32)
    assert_bitwise(state[0], before[0])
    written = {(start + i) % RING_ROWS: i for i in range(count)}
    for row in range(RING_ROWS):
        expected = torch.stack([score[written[row]], latent[written[row]]]) if row in written else before[1, row]
        assert_bitwise(state[1, row], expected)


def test_pair_across_the_start_is_read_before_the_ring_is_overwritten() -> None:
    latent, score = _projections(2 * RING_ROWS + 2, FLOAT64)
    state = torch.zeros(1, RING_ROWS, 2, NUM_CHANNELS, dtype=torch.float64)
    _pool(latent[:1], score[:1], state, [0], [0], [1], FLOAT64)
    out = _pool(latent[1:], score[1:], state, [0], [1], [len(latent) - 1], FLOAT64)
    assert_close(out, _slow_pool(latent, score), dtype=torch.float64)


def test_absent_state_reads_zeros_and_writes_nothing() -> None:
    latent, score = _projections(3, FLOAT64)
    state = _state(2, FLOAT64)
    before = state.clone()
    out = _pool(latent, score, state, [-1], [1], [3], FLOAT64)
    zero = torch.zeros(1, NUM_CHANNELS, dtype=torch.float64)
    assert_close(out, _slow_pool(torch.cat([zero, latent]), torch.cat([zero, score])), dtype=torch.float64)
    assert_bitwise(state, before)


def test_empty_step_pools_nothing() -> None:
    latent, score = _projections(0, FLOAT32)
    assert _pool(latent, score, _state(1, FLOAT32), [0], [3], [0], FLOAT32).shape == (0, NUM_CHANNELS)


def _projections(length: int, numerics: Numerics, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    latent = random_tensor(100 + seed, length, NUM_CHANNELS, dtype=numerics.wide)
    return latent, random_tensor(200 + seed, length, NUM_CHANNELS, dtype=numerics.wide, scale=2)


def _state(num_slots: int, numerics: Numerics) -> Tensor:
    """Poisoned: whatever an earlier attempt left."""
    return random_tensor(300, num_slots, RING_ROWS, 2, NUM_CHANNELS, dtype=numerics.wide, scale=100)


def _pool(
    latent: Tensor,
    score: Tensor,
    state: Tensor,
    slots: list[int],
    starts: list[int],
    counts: list[int],
    numerics: Numerics,
) -> Tensor:
    cu_rows = torch.tensor([0, *counts]).cumsum(0).int()
    slot_tensor, start_tensor = torch.tensor(slots, dtype=torch.int32), torch.tensor(starts, dtype=torch.int32)
    pooled = pool_latents(latent, score, state, slot_tensor, start_tensor, cu_rows)
    return pooled.to(numerics.activation)


def _slow_pool(latent: Tensor, score: Tensor) -> Tensor:
    out = torch.empty(len(latent) // 2, latent.shape[1], dtype=torch.float64)
    for g in range(len(out)):
        for c in range(latent.shape[1]):
            s0, s1 = float(score[2 * g, c]), float(score[2 * g + 1, c])
            w0 = 1 / (1 + math.exp(s1 - s0))
            out[g, c] = float(latent[2 * g, c]) * w0 + float(latent[2 * g + 1, c]) * (1 - w0)
    return out
