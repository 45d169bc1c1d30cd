"""Hyper-connections: the residual stream is S parallel streams, mixed per token (model.md 2.2).

The trap is orientation: comb[in, out], softmax over out, and `pre` is used one sub-layer later than `post` and
`comb`, which is the model's business.
"""

# N rows, S streams, D hidden, F = S * D, M = 2S + S * S mixes
import torch
from torch import Tensor

from prefill_kernels.ops import MhcMixes
from prefill_kernels.ref.fixed_math import mean_square, sigmoid, wide_dtype
from prefill_kernels.ref.tiled_matmul import tiled_matmul


def mhc_mixes(
    streams_NSD: Tensor,
    fn_MF: Tensor,
    base_M: Tensor,
    scale_3: Tensor,
    *,
    num_iters: int,
    hc_eps: float,
    rms_eps: float,
) -> MhcMixes:
    """Mixing weights of one sub-layer, from the streams it reads.

    z = flattened streams (stream-major); m = (fn . z) * rsqrt(mean(z^2) + rms_eps); u = m * scale[group] + base with
    groups pre | post | comb; pre = sigmoid(u) + hc_eps; post = 2 sigmoid(u); comb = sinkhorn(u as [in, out]): softmax
    over out, + hc_eps, normalise over in, then num_iters - 1 times over out and over in, hc_eps in every denominator.

    Args:
        streams_NSD: [N, S, D] act.
        fn_MF: [2S + S*S, S*D] float32, rows: S pre, S post, S*S comb (row-major [in, out]).
        base_M: [2S + S*S] float32. scale_3: [3] float32.
        num_iters: 20 in the release, counted with the softmax.

    Returns:
        All float32 (float64 for float64 streams); nothing is rounded in between.
    """
    num_rows, num_streams, _ = streams_NSD.shape
    wide = wide_dtype(streams_NSD.dtype)
    z_NF = streams_NSD.flatten(1).to(wide)
    m_NM = tiled_matmul(z_NF, fn_MF, dtype=wide) * torch.rsqrt(mean_square(z_NF) + rms_eps)
    sizes = [num_streams, num_streams, num_streams * num_streams]
    scales_M = scale_3.to(wide).repeat_interleave(torch.tensor(sizes, device=scale_3.device))
    pre, post, comb = torch.split(m_NM * scales_M + base_M.to(wide), sizes, dim=-1)
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


def mhc_expand(y_ND: Tensor, streams_NSD: Tensor, post_NS: Tensor, comb_NSS: Tensor) -> Tensor:
    """New streams after a sub-layer: out[o] = bf(post[o] * y + sum over i of comb[i, o] * streams[i]).

    Args:
        y_ND: [N, D], the sub-layer's rounded output. streams_NSD: the streams its mixes were computed from.

    Returns:
        [N, S, D] in the streams' dtype, a new tensor. The sum over i runs in order, post * y is added last.
    """
    wide = wide_dtype(streams_NSD.dtype)
    mixed_NSD = comb_NSS[:, 0, :, None].to(wide) * streams_NSD[:, 0, None, :].to(wide)
    for i in range(1, streams_NSD.shape[1]):
        mixed_NSD += comb_NSS[:, i, :, None].to(wide) * streams_NSD[:, i, None, :].to(wide)
    mixed_NSD += post_NS.to(wide).unsqueeze(-1) * y_ND.to(wide).unsqueeze(1)
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
