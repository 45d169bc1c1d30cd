"""Rotary position embedding on the last channels, adjacent pairs (model.md 2.4)."""

# N rows, C channels
import math

import torch
from torch import Tensor

from prefill_kernels.ref.fixed_math import wide_dtype


def rope(x_NHC: Tensor, positions_N: Tensor, frequencies: Tensor, *, inverse: bool = False) -> Tensor:
    """Rotate the pairs (x[2i], x[2i+1]) of the last channels by position * frequency[i].

    y0 = x0 cos - x1 sin, y1 = x0 sin + x1 cos, each product rounded before the sum (a complex product, profile R; fused
    multiply-adds flip later fp4 steps, trap 27). The angle is a float32 product; cos and sin are correctly rounded to
    wide.

    Args:
        x_NHC: [N, .., C] act.
        positions_N: [N] int32 or int64, absolute; a compressed entry j of ratio r stands at j * r.
        frequencies: [R/2] float32 from rope_frequencies; the last R channels are rotated, the others copied.
        inverse: rotate back (attention output).

    Returns:
        A new tensor in x's dtype.
    """
    wide = wide_dtype(x_NHC.dtype)
    num_rotated = 2 * frequencies.shape[0]
    angles = (positions_N.float().unsqueeze(-1) * frequencies).double()
    shape = (-1, *[1] * (x_NHC.dim() - 2), frequencies.shape[0])
    cos = torch.cos(angles).to(wide).view(shape)
    sin = torch.sin(-angles if inverse else angles).to(wide).view(shape)
    x0, x1 = torch.unflatten(x_NHC[..., -num_rotated:].to(wide), -1, (-1, 2)).unbind(-1)
    rotated = torch.stack([x0 * cos - x1 * sin, x0 * sin + x1 * cos], dim=-1).flatten(-2)
    return torch.cat([x_NHC[..., :-num_rotated], rotated.to(x_NHC.dtype)], dim=-1)


def rope_frequencies(*, rope_dim: int, theta: float, yarn: tuple[float, float, float, int] | None) -> Tensor:
    """Frequency per rotated pair, [rope_dim / 2] float32.

    theta ** (-2i / rope_dim) computed in float32 as the official code does. With yarn = (factor, beta_fast, beta_slow,
    original tokens), slow pairs are divided by factor, with a linear ramp between the pairs that turn beta_fast and
    beta_slow times within the original length. It applies at every length; there is no amplitude factor.
    """
    frequencies = 1.0 / (theta ** (torch.arange(0, rope_dim, 2, dtype=torch.float32) / rope_dim))
    if yarn is None:
        return frequencies
    factor, beta_fast, beta_slow, original_tokens = yarn

    def pair_turning(num_turns: float) -> float:
        return rope_dim * math.log(original_tokens / (num_turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_turning(beta_fast)), 0)
    high = min(math.ceil(pair_turning(beta_slow)), rope_dim - 1)
    ramp = ((torch.arange(rope_dim // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)).clamp(0, 1)
    return frequencies / factor * ramp + frequencies * (1 - ramp)
