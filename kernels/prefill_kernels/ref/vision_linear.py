"""Matrix products of the vision tower with what follows them (vision.md 4, 5, 8).

Operands are promoted, accumulated wide, the bias is added wide, then comes the first rounding; each following step rounds
again, so a fused kernel must round in its registers where these functions do.
"""

# N rows, K in, O out, I inner width
import torch
from torch import Tensor

from prefill_kernels.ref.fixed_math import silu, wide_dtype
from prefill_kernels.ref.tiled_matmul import tiled_matmul


def vision_linear(x_NK: Tensor, weight_OK: Tensor, bias_O: Tensor | None) -> Tensor:
    """x . weight^T + bias, rounded once.

    Args:
        x_NK: [N, K] act, N may be 0. weight_OK: [O, K]. bias_O: [O] or None.

    Returns:
        [N, O] act.
    """
    wide = wide_dtype(x_NK.dtype)
    out_NO = tiled_matmul(x_NK, weight_OK, dtype=wide)
    return (out_NO if bias_O is None else out_NO + bias_O.to(wide)).to(x_NK.dtype)


def vision_linear_add(x_NK: Tensor, weight_OK: Tensor, bias_O: Tensor | None, residual_NO: Tensor) -> Tensor:
    """residual + vision_linear(x): the product is rounded, then the sum. residual_NO, result: [N, O] act."""
    return residual_NO + vision_linear(x_NK, weight_OK, bias_O)


def vision_linear_swiglu(x_NK: Tensor, weight_2IK: Tensor) -> Tensor:
    """silu(g) * u with [g; u] = weight . x: g and u rounded, silu rounded, their product rounded again (vision.md 8; not as in
    tile_kernels, which rounds once).

    Args:
        x_NK: [N, K] act. weight_2IK: [2 * I, K], gate rows first.

    Returns:
        [N, I] act.
    """
    gate_NI, up_NI = vision_linear(x_NK, weight_2IK, None).chunk(2, dim=-1)
    return silu(gate_NI.to(wide_dtype(x_NK.dtype))).to(x_NK.dtype) * up_NI


def vision_linear_gelu(x_NK: Tensor, weight_OK: Tensor, bias_O: Tensor) -> Tensor:
    """y / 2 * (1 + erf(y / sqrt 2)) of y = vision_linear(x), computed wide, rounded once more. [N, O] act."""
    y_NO = vision_linear(x_NK, weight_OK, bias_O).to(wide_dtype(x_NK.dtype))
    return (y_NO * 0.5 * (1 + torch.erf(y_NO * 0.5**0.5))).to(x_NK.dtype)
