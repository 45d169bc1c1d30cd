"""Sums and sigmoids whose result for one row never depends on the other rows (decisions C10).

Used inside `ref` instead of torch.sum, torch.sigmoid and friends: torch.sum picks its order by shape and thread
count, and torch.sigmoid, silu and softplus round vector tails differently from vector bodies. exp, log1p, sqrt and
the four basic operations do not (measured), so everything is built from those.
"""

import torch
from torch import Tensor


def tree_sum(x: Tensor, dim: int = -1) -> Tensor:
    """Sum over one axis as a fixed binary tree of element-wise additions.

    The axis has W >= 1 elements and is dropped; the result has x's dtype and its order depends on W alone.
    """
    while (width := x.shape[dim]) > 1:
        half = width // 2
        folded = x.narrow(dim, 0, half) + x.narrow(dim, half, half)
        x = torch.cat([folded, x.narrow(dim, width - 1, 1)], dim=dim) if width % 2 else folded
    return x.squeeze(dim)


def mean_square(x: Tensor) -> Tensor:
    """mean(x * x) over the last axis, kept as an axis of size 1; x in a wide dtype."""
    return (tree_sum(x * x) / x.shape[-1]).unsqueeze(-1)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)); exp may overflow to inf, the result then is 0."""
    return 1 / (1 + torch.exp(-x))


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x), as x / (1 + exp(-x))."""
    return x / (1 + torch.exp(-x))


def softplus(x: Tensor) -> Tensor:
    """x above 20, else log1p(exp(x)) (model.md 2.10)."""
    return torch.where(x > 20, x, torch.log1p(torch.exp(x.clamp(max=20))))


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Accumulation dtype of ops that take no Numerics: float64 for float64 operands, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
