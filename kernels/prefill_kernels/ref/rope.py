"""Rotary position embedding on the last channels, adjacent pairs (model.md 2.4)."""

# N rows, C channels
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
        frequencies: [R/2] float32 from prefill_kernels.rope_tables; the last R channels are rotated, the others copied.
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
