"""Sparse attention against loops over rows, heads and keys."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from prefill_kernels.numerics import PRODUCTION, Numerics
from prefill_kernels.ref import sparse_attention
from prefill_kernels.ref.rope import rope
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

SCALE = 24**-0.5


@pytest.mark.parametrize("numerics", ALL_NUMERICS.values(), ids=ALL_NUMERICS.keys())
@pytest.mark.parametrize("num_rows", [1, 16, 21])
@pytest.mark.parametrize("has_entries", [True, False], ids=["entries", "window"])
def test_attention_matches_loops(numerics: Numerics, num_rows: int, has_entries: bool) -> None:
    case = _case(num_rows, numerics)
    if not has_entries:
        case["entries_EC"] = case["entry_index_NK"] = None
    out = sparse_attention(**case, scale=SCALE, numerics=numerics)
    assert out.dtype == numerics.activation
    assert_close(out, _slow_attention(case), dtype=numerics.activation)


def test_query_is_rotated_forth_and_the_result_back() -> None:
    case = _case(5, BFLOAT16)
    positions, frequencies = torch.arange(900, 905, dtype=torch.int32), torch.rand(4)
    at_zero = dict(case, query_NHC=rope(case["query_NHC"], positions, frequencies))
    expected = rope(sparse_attention(**at_zero, scale=SCALE, numerics=BFLOAT16), positions, frequencies, inverse=True)
    turned = dict(case, positions_N=positions, frequencies=frequencies)
    assert_bitwise(sparse_attention(**turned, scale=SCALE, numerics=BFLOAT16), expected)


def test_row_without_keys_is_zero_whatever_the_sink() -> None:
    case = _case(5, FLOAT32)
    case["window_index_NW"][2] = -1
    case["entry_index_NK"][2] = -1
    for sink in (-1e4, 0.0, 1e4):
        case["sink_H"] = torch.full((3,), sink)
        out = sparse_attention(**case, scale=SCALE, numerics=FLOAT32)
        assert out[2].abs().max() == 0
        assert torch.isfinite(out).all()


def test_sink_takes_probability_but_has_no_value() -> None:
    case = _case(4, FLOAT64)
    case["sink_H"] = torch.full((3,), -1e4)
    without = sparse_attention(**case, scale=SCALE, numerics=FLOAT64)
    case["sink_H"] = torch.zeros(3)
    with_sink = sparse_attention(**case, scale=SCALE, numerics=FLOAT64)
    ratio = with_sink / without
    assert_close(ratio, ratio[..., :1].expand_as(ratio), dtype=torch.float64)
    assert (ratio < 1).all()


def test_empty_slots_read_no_key_even_if_keys_are_nan() -> None:
    case = _case(17, FLOAT32)
    expected = sparse_attention(**case, scale=SCALE, numerics=FLOAT32)
    used = torch.unique(case["window_index_NW"])
    free = [row for row in range(len(case["window_keys_MC"])) if row not in used.tolist()]
    assert free
    case["window_keys_MC"][free] = float("nan")
    assert_bitwise(sparse_attention(**case, scale=SCALE, numerics=FLOAT32), expected)


def test_one_key_may_stand_in_both_sets() -> None:
    case = _case(6, FLOAT64)
    case["entries_EC"] = case["window_keys_MC"].clone()
    case["entry_index_NK"] = case["window_index_NW"].clone()
    doubled = sparse_attention(**case, scale=SCALE, numerics=FLOAT64)
    assert_close(doubled, _slow_attention(case), dtype=torch.float64)


def test_probabilities_are_rounded_before_the_values_and_not_in_the_denominator() -> None:
    case = _case(48, BFLOAT16)
    out = sparse_attention(**case, scale=SCALE, numerics=BFLOAT16)
    assert fraction_equal(out, _slow_attention(case, numerator=torch.bfloat16).bfloat16()) > 0.99
    assert fraction_equal(out, _slow_attention(case).bfloat16()) < 0.95


def test_no_rows_give_no_rows() -> None:
    assert sparse_attention(**_case(0, PRODUCTION), scale=SCALE, numerics=PRODUCTION).shape == (0, 3, 24)


@settings(max_examples=25, deadline=None)
@given(
    rows=st.lists(st.integers(0, 39), min_size=1, max_size=40),
    shift=st.integers(0, 50),
    numerics=st.sampled_from([FLOAT32, PRODUCTION]),
)
def test_row_is_the_same_in_any_batch_and_key_buffer(rows: list[int], shift: int, numerics: Numerics) -> None:
    case = _case(40, numerics)
    whole = sparse_attention(**case, scale=SCALE, numerics=numerics)
    moved = dict(case)
    for keys, index in (("window_keys_MC", "window_index_NW"), ("entries_EC", "entry_index_NK")):
        moved[keys] = torch.cat([random_tensor(9, shift, 24, dtype=numerics.activation), case[keys]])
        moved[index] = torch.where(case[index] < 0, -1, case[index] + shift)[rows]
    moved["query_NHC"] = case["query_NHC"][rows]
    moved["positions_N"] = case["positions_N"][rows]
    assert_bitwise(sparse_attention(**moved, scale=SCALE, numerics=numerics), whole[rows])


def _case(num_rows: int, numerics: Numerics):  # type: ignore[no-untyped-def]
    """Random keys, nothing rotated (all at position 0); every row has some empty slots, first of the window and last of
    the selection."""
    generator = torch.Generator().manual_seed(num_rows)
    window = torch.randint(0, 60, (num_rows, 11), generator=generator, dtype=torch.int32)
    entries = torch.randint(0, 35, (num_rows, 7), generator=generator, dtype=torch.int32)
    first = torch.randint(0, 11, (num_rows, 1), generator=generator)
    last = torch.randint(0, 8, (num_rows, 1), generator=generator)
    return {
        "query_NHC": random_tensor(1, num_rows, 3, 24, dtype=numerics.activation, scale=1.5),
        "positions_N": torch.zeros(num_rows, dtype=torch.int32),
        "frequencies": torch.ones(4),
        "window_keys_MC": random_tensor(2, 70, 24, dtype=numerics.activation),
        "window_index_NW": window.masked_fill(torch.arange(11) < first, -1),
        "entries_EC": random_tensor(3, 35, 24, dtype=numerics.activation),
        "entry_index_NK": entries.masked_fill(torch.arange(7) >= last, -1),
        "sink_H": random_tensor(4, 3),
    }


def _slow_attention(case, *, numerator: torch.dtype = torch.float64) -> Tensor:  # type: ignore[no-untyped-def]
    out = torch.zeros(case["query_NHC"].shape, dtype=torch.float64)
    for n, heads in enumerate(case["query_NHC"].double()):
        keys = [case["window_keys_MC"][j] for j in case["window_index_NW"][n].tolist() if j >= 0]
        if case["entries_EC"] is not None:
            keys += [case["entries_EC"][j] for j in case["entry_index_NK"][n].tolist() if j >= 0]
        for h, query in enumerate(heads):
            logits = [float((query * key.double()).sum()) * SCALE for key in keys]
            top = max(logits)
            weights = [math.exp(e - top) for e in logits]
            total = sum(weights) + math.exp(float(case["sink_H"][h]) - top)
            for weight, key in zip(weights, keys, strict=True):
                out[n, h] += float(torch.tensor(weight, dtype=torch.float64).to(numerator)) * key.double()
            out[n, h] /= total
    return out
