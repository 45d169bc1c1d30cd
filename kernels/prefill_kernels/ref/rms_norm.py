"""RMS norm, alone and with the quantiser of the product that follows (model.md 0.3)."""

import torch
from torch import Tensor

from prefill_kernels.numerics import Numerics
from prefill_kernels.ops import Rows
from prefill_kernels.ref.fixed_math import mean_square, wide_dtype


def rms_norm(x_ND: Tensor, weight_D: Tensor, *, eps: float) -> Tensor:
    """(x * rsqrt(mean(x^2) + eps)) * weight over the last axis, computed wide, one rounding to x's dtype.

    Args:
        x_ND: [.., D] act. weight_D: [D] bfloat16 or float32.
        eps: 1e-20 for every text norm (an all-zero row gives 0), 1e-6 for vision.

    Returns:
        [.., D] in x's dtype.
    """
    wide = wide_dtype(x_ND.dtype)
    x = x_ND.to(wide)
    return (x * torch.rsqrt(mean_square(x) + eps) * weight_D.to(wide)).to(x_ND.dtype)


def norm_rows(x_ND: Tensor, weight_D: Tensor, *, eps: float, numerics: Numerics) -> Rows:  # noqa: ARG001 - see below
    """rms_norm as input of products; `ref` quantises inside the product, so there is nothing else to make here."""
    return Rows(plain=rms_norm(x_ND, weight_D, eps=eps))


def quantise_rows(x_ND: Tensor, *, numerics: Numerics) -> Rows:  # noqa: ARG001 - see norm_rows
    """x [N, D] act as input of products; see norm_rows."""
    return Rows(plain=x_ND)
