"""Hyper-connections: the residual stream is S parallel streams, mixed per token (model.md 2.2).

The trap is orientation: comb[in, out], softmax over out, and `pre` is used one sub-layer later than `post` and
`comb`, which is the model's business.
"""

# N rows, S streams, D hidden, F = S * D, M = 2S + S * S mixes
import torch
from torch import Tensor

from prefill_kernels.numerics import Numerics
from prefill_kernels.ops import MhcMixes, MhcOutput, MhcTurn, Rows
from prefill_kernels.ref.fixed_math import mean_square, sigmoid, wide_dtype
from prefill_kernels.ref.rms_norm import norm_rows
from prefill_kernels.ref.tiled_matmul import tiled_matmul
from prefill_kernels.weights import MhcWeights


def mhc_turn(
    streams_NSD: Tensor,
    pre_NS: Tensor,
    norm_weight_D: Tensor,
    *,
    output: MhcOutput | None,
    weights: MhcWeights,
    num_iters: int,
    hc_eps: float,
    rms_eps: float,
    numerics: Numerics,
) -> MhcTurn:
    """mhc_expand of the last sub-layer's output, then the next one's input (mhc_collapse and norm) and mixes (mhc_mixes).

    Args:
        streams_NSD: [N, S, D] act, the streams the last sub-layer's mixes were computed from; without `output` the
            streams themselves.
        pre_NS: [N, S] wide, of the last sub-layer too. norm_weight_D: [D] of the next one.
        weights: of the next one.
    """
    streams_NSD = streams_NSD if output is None else mhc_expand(output, streams_NSD)
    return MhcTurn(
        streams=streams_NSD,
        rows=mhc_input(streams_NSD, pre_NS, norm_weight_D, output=None, rms_eps=rms_eps, numerics=numerics),
        mixes=mhc_mixes(streams_NSD, weights, num_iters=num_iters, hc_eps=hc_eps, rms_eps=rms_eps),
    )


def mhc_input(
    streams_NSD: Tensor,
    pre_NS: Tensor,
    norm_weight_D: Tensor,
    *,
    output: MhcOutput | None,
    rms_eps: float,
    numerics: Numerics,
) -> Rows:
    """As mhc_turn, but the rows only."""
    streams_NSD = streams_NSD if output is None else mhc_expand(output, streams_NSD)
    return norm_rows(mhc_collapse(streams_NSD, pre_NS), norm_weight_D, eps=rms_eps, numerics=numerics)


def mhc_mixes(streams_NSD: Tensor, weights: MhcWeights, *, num_iters: int, hc_eps: float, rms_eps: float) -> MhcMixes:
    """Mixing weights of one sub-layer, from the streams it reads.

    z = flattened streams (stream-major); m = (fn . z) * rsqrt(mean(z^2) + rms_eps); u = m * scale[group] + base with
    groups pre | post | comb; pre = sigmoid(u) + hc_eps; post = 2 sigmoid(u); comb = sinkhorn(u as [in, out]): softmax
    over out, + hc_eps, normalise over in, then num_iters - 1 times over out and over in, hc_eps in every denominator.

    Args:
        streams_NSD: [N, S, D] act.
        weights: fn [2S + S*S, S*D] has rows S pre, S post, S*S comb (row-major [in, out]).
        num_iters: 20 in the release, counted with the softmax.

    Returns:
        All float32 (float64 for float64 streams); nothing is rounded in between.
    """
    num_rows, num_streams, _ = streams_NSD.shape
    wide = wide_dtype(streams_NSD.dtype)
    z_NF = streams_NSD.flatten(1).to(wide)
    m_NM = tiled_matmul(z_NF, weights.fn, dtype=wide) * torch.rsqrt(mean_square(z_NF) + rms_eps)
    sizes = [num_streams, num_streams, num_streams * num_streams]
    scales_M = weights.scale.to(wide).repeat_interleave(torch.tensor(sizes, device=weights.scale.device))
    pre, post, comb = torch.split(m_NM * scales_M + weights.base.to(wide), sizes, dim=-1)
    return MhcMixes(
        pre=sigmoid(pre) + hc_eps,
        post=2 * sigmoid(post),
        comb=_sinkhorn(comb.reshape(num_rows, num_streams, num_streams), num_iters, hc_eps),
    )


def mhc_collapse(streams_NSD: Tensor, pre_NS: Tensor) -> Tensor:
    """Input of a sub-layer: sum over s of pre[s] * streams[s], wide in stream order, one rounding to the streams'
    dtype."""
    wide = wide_dtype(streams_NSD.dtype)
    return _sum_axis(streams_NSD.to(wide) * pre_NS.to(wide).unsqueeze(-1), axis=1).squeeze(1).to(streams_NSD.dtype)


def mhc_expand(output: MhcOutput, streams_NSD: Tensor) -> Tensor:
    """New streams after a sub-layer: out[o] = bf(post[o] * y + sum over i of comb[i, o] * streams[i]).

    Args:
        output: y is rounded to act. streams_NSD: the streams its mixes were computed from.

    Returns:
        [N, S, D] in the streams' dtype, a new tensor. The sum over i runs in order, post * y is added last.
    """
    wide = wide_dtype(streams_NSD.dtype)
    comb_NSS = output.comb.to(wide)
    mixed_NSD = comb_NSS[:, 0, :, None] * streams_NSD[:, 0, None, :].to(wide)
    for i in range(1, streams_NSD.shape[1]):
        mixed_NSD += comb_NSS[:, i, :, None] * streams_NSD[:, i, None, :].to(wide)
    mixed_NSD += output.post.to(wide).unsqueeze(-1) * output.y.to(wide).unsqueeze(1)
    return mixed_NSD.to(streams_NSD.dtype)


def mhc_mean(streams_NSD: Tensor) -> Tensor:
    """[N, D] mean over streams (DSpark feature, model.md 2.13), wide in stream order, one rounding to the streams'
    dtype."""
    wide_NSD = streams_NSD.to(wide_dtype(streams_NSD.dtype))
    return (_sum_axis(wide_NSD, axis=1).squeeze(1) / streams_NSD.shape[1]).to(streams_NSD.dtype)


def _sinkhorn(logits_NSS: Tensor, num_iters: int, eps: float) -> Tensor:
    comb = torch.exp(logits_NSS - logits_NSS.amax(-1, keepdim=True))
    comb = comb / _sum_axis(comb, axis=2) + eps
    comb = comb / (_sum_axis(comb, axis=1) + eps)
    for _ in range(num_iters - 1):
        comb = comb / (_sum_axis(comb, axis=2) + eps)
        comb = comb / (_sum_axis(comb, axis=1) + eps)
    return comb


def _sum_axis(x: Tensor, *, axis: int) -> Tensor:
    """Sum over a short axis in index order, kept with size 1."""
    total, *others = x.unbind(axis)
    for part in others:
        total = total + part
    return total.unsqueeze(axis)
