"""Hyper-connections against scalar loops."""

import math

import pytest
import torch
from torch import Tensor

from prefill_kernels.numerics import PRODUCTION
from prefill_kernels.ops import MhcOutput
from prefill_kernels.ref import mhc_expand, mhc_input, mhc_mean, mhc_turn, rms_norm
from prefill_kernels.ref.mhc import mhc_collapse, mhc_mixes
from prefill_kernels.weights import MhcWeights
from prefill_testing.numeric import assert_bitwise, assert_close, random_tensor

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_streams", [4, 3])
def test_mixes_match_a_loop(dtype: torch.dtype, num_streams: int) -> None:
    streams, fn, base, scale = _inputs(num_streams, 5, 24, dtype)
    mixes = mhc_mixes(streams, MhcWeights(fn=fn, base=base, scale=scale), num_iters=20, hc_eps=1e-6, rms_eps=1e-20)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for n in range(5):
        pre, post, comb = _slow_mixes(streams[n], fn, base, scale)
        for actual, expected in ((mixes.pre[n], pre), (mixes.post[n], post), (mixes.comb[n], comb)):
            assert actual.dtype == wide
            assert_close(actual, expected, dtype=wide)


def test_comb_is_doubly_stochastic_and_oriented_in_by_out() -> None:
    streams, fn, base, scale = _inputs(4, 30, 16, torch.float64)
    comb = mhc_mixes(streams, MhcWeights(fn=fn, base=base, scale=scale), num_iters=20, hc_eps=1e-6, rms_eps=1e-20).comb
    assert (comb.sum(1) - 1).abs().max() < 1e-5  # over in: normalised last
    assert 0 < (comb.sum(2) - 1).abs().max() < 0.1


def test_number_of_iterations_counts_the_softmax_round() -> None:
    streams, fn, base, scale = _inputs(4, 3, 16, torch.float64)
    first = mhc_mixes(streams, MhcWeights(fn=fn, base=base, scale=scale), num_iters=1, hc_eps=1e-6, rms_eps=1e-20).comb
    expected = torch.stack([_slow_mixes(row, fn, base, scale, num_iters=1)[2] for row in streams])
    assert_close(first, expected, dtype=torch.float64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_collapse_weighs_streams(dtype: torch.dtype) -> None:
    streams, pre = random_tensor(1, 7, 4, 9, dtype=dtype), random_tensor(2, 7, 4)
    expected = torch.zeros(7, 9, dtype=torch.float64)
    for s in range(4):
        expected += pre[:, s, None].double() * streams[:, s].double()
    out = mhc_collapse(streams, pre)
    assert out.dtype == dtype
    assert_close(out, expected, dtype=dtype)


def test_one_hot_collapse_copies_the_stream() -> None:
    streams = random_tensor(3, 5, 4, 9, dtype=torch.bfloat16)
    assert_bitwise(mhc_collapse(streams, torch.tensor([[0.0, 1, 0, 0]]).expand(5, 4)), streams[:, 1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_expand_routes_in_streams_to_out_streams(dtype: torch.dtype) -> None:
    streams, y = random_tensor(4, 6, 4, 9, dtype=dtype), random_tensor(5, 6, 9, dtype=dtype)
    post, comb = random_tensor(6, 6, 4), random_tensor(7, 6, 4, 4)
    expected = torch.zeros(6, 4, 9, dtype=torch.float64)
    for o in range(4):
        expected[:, o] = post[:, o, None].double() * y.double()
        for i in range(4):
            expected[:, o] += comb[:, i, o, None].double() * streams[:, i].double()
    before = streams.clone()
    out = mhc_expand(MhcOutput(y=y, post=post, comb=comb), streams)
    assert out.dtype == dtype
    assert_close(out, expected, dtype=dtype)
    assert_bitwise(streams, before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mean_is_over_streams(dtype: torch.dtype) -> None:
    streams = random_tensor(8, 3, 4, 10, dtype=dtype)
    out = mhc_mean(streams)
    assert out.dtype == dtype
    assert_close(out, streams.double().mean(1), dtype=dtype)


def test_no_rows_give_no_rows() -> None:
    streams, fn, base, scale = _inputs(4, 0, 16, torch.bfloat16)
    mixes = mhc_mixes(streams, MhcWeights(fn=fn, base=base, scale=scale), num_iters=20, hc_eps=1e-6, rms_eps=1e-20)
    assert mixes.comb.shape == (0, 4, 4)
    assert mhc_collapse(streams, mixes.pre).shape == (0, 16)
    assert mhc_expand(MhcOutput(y=streams[:, 0], post=mixes.post, comb=mixes.comb), streams).shape == (0, 4, 16)


def test_turn_is_expand_collapse_norm_and_mixes_of_the_new_streams() -> None:
    streams, fn, base, scale = _inputs(4, 6, 32, torch.bfloat16)
    weights = MhcWeights(fn=fn, base=base, scale=scale)
    pre, norm_weight = random_tensor(5, 6, 4), random_tensor(6, 32)
    output = MhcOutput(
        y=random_tensor(7, 6, 32, dtype=torch.bfloat16), post=random_tensor(8, 6, 4), comb=random_tensor(9, 6, 4, 4)
    )
    turn = mhc_turn(
        streams,
        pre,
        norm_weight,
        output=output,
        weights=weights,
        num_iters=20,
        hc_eps=1e-6,
        rms_eps=1e-20,
        numerics=PRODUCTION,
    )
    new = mhc_expand(output, streams)
    assert_bitwise(turn.streams, new)
    assert_bitwise(turn.rows.plain, rms_norm(mhc_collapse(new, pre), norm_weight, eps=1e-20))
    expected = mhc_mixes(new, weights, num_iters=20, hc_eps=1e-6, rms_eps=1e-20)
    for actual, want in (
        (turn.mixes.pre, expected.pre),
        (turn.mixes.post, expected.post),
        (turn.mixes.comb, expected.comb),
    ):
        assert_bitwise(actual, want)
    alone = mhc_input(streams, pre, norm_weight, output=output, rms_eps=1e-20, numerics=PRODUCTION)
    assert_bitwise(alone.plain, turn.rows.plain)
    same = mhc_input(new, pre, norm_weight, output=None, rms_eps=1e-20, numerics=PRODUCTION)
    assert_bitwise(same.plain, turn.rows.plain)


def _inputs(num_streams: int, num_rows: int, hidden: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_mixes = 2 * num_streams + num_streams**2
    streams = random_tensor(1, num_rows, num_streams, hidden, dtype=dtype, scale=3)
    fn = random_tensor(2, num_mixes, num_streams * hidden, scale=0.2)
    return streams, fn, random_tensor(3, num_mixes), random_tensor(4, 3).abs() + 0.5


def _slow_mixes(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *, num_iters: int = 20, eps: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    num_streams = streams.shape[0]
    z = [float(v) for v in streams.flatten()]
    rho = 1 / math.sqrt(sum(v * v for v in z) / len(z) + 1e-20)
    dots = [rho * sum(float(a) * b for a, b in zip(row, z, strict=True)) for row in fn]
    group = [0] * num_streams + [1] * num_streams + [2] * num_streams**2
    u = [dot * float(scale[g]) + float(b) for dot, g, b in zip(dots, group, base, strict=True)]
    pre = [1 / (1 + math.exp(-v)) + eps for v in u[:num_streams]]
    post = [2 / (1 + math.exp(-v)) for v in u[num_streams : 2 * num_streams]]
    a = [u[2 * num_streams + i * num_streams :][:num_streams] for i in range(num_streams)]
    comb = []
    for row in a:
        exps = [math.exp(v - max(row)) for v in row]
        comb.append([v / sum(exps) + eps for v in exps])
    for iteration in range(num_iters):
        if iteration:
            comb = [[v / (sum(row) + eps) for v in row] for row in comb]
        sums = [sum(row[o] for row in comb) + eps for o in range(num_streams)]
        comb = [[v / sums[o] for o, v in enumerate(row)] for row in comb]
    return (*(torch.tensor(v, dtype=torch.float64) for v in (pre, post)), torch.tensor(comb, dtype=torch.float64))
