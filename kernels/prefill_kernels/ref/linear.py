"""Matrix products with stored weights (model.md 0.3 fp8lin and bflin, 2.9, 2.12, 3.3).

The definition is the product of the exact dequantised operands, accumulated wide and rounded once; block-scaled
hardware products differ from it only in summation order.
"""

# N rows, K in, G groups, D hidden, V vocabulary
import torch
from torch import Tensor

from prefill_kernels.number_formats import dequantise_weight, round_trip_fp8
from prefill_kernels.numerics import Numerics
from prefill_kernels.ops import Rows
from prefill_kernels.ref.tiled_matmul import tiled_matmul
from prefill_kernels.weights import DenseWeight, Weight


def linear(x: Rows, weight: Weight, *, numerics: Numerics, wide_output: bool = False) -> Tensor:
    """x times the transpose of the weight.

    Args:
        x: plain [N, K] act. Quantised per token and 32 channels to e4m3/ue8m0 first if the weight is fp8 or fp4 and
            numerics.quantise_activations is set; never for a dense weight.
        wide_output: return the accumulator unrounded (ratio-2 compressor: its values stay fp32 up to the pooling).

    Returns:
        [N, out] act, or wide.
    """
    wide = numerics.wide
    out = tiled_matmul(quantised_input(x.plain, weight, numerics=numerics), dequantise_weight(weight, wide), dtype=wide)
    return out if wide_output else out.to(numerics.activation)


def linear_pair(
    x: Rows, first: Weight, second: Weight, *, numerics: Numerics, wide_output: bool = False
) -> tuple[Tensor, Tensor]:
    """linear with each of two weights."""
    return (
        linear(x, first, numerics=numerics, wide_output=wide_output),
        linear(x, second, numerics=numerics, wide_output=wide_output),
    )


def grouped_linear(x_NGK: Tensor, weight: Weight, *, numerics: Numerics) -> Rows:
    """Block-diagonal product of the output projection wo_a: group g of x times rows [g * out, (g + 1) * out) of the
    weight.

    Args:
        x_NGK: [N, G, K] act; not quantised, whatever the weight's format (profile R; traps 19 and 22 of model.md 7).
        weight: [G * out, K].

    Returns:
        plain [N, G * out] act, groups in order.
    """
    wide = numerics.wide
    weights_GOK = torch.unflatten(dequantise_weight(weight, wide), 0, (x_NGK.shape[1], -1))
    groups = [tiled_matmul(x_NGK[:, g], w_OK, dtype=wide) for g, w_OK in enumerate(weights_GOK)]
    return Rows(plain=torch.cat(groups, dim=-1).to(numerics.activation))


def lm_head(h_ND: Tensor, weight: DenseWeight, *, numerics: Numerics) -> Tensor:
    """Logits of final hidden rows, [N, V] wide: both operands promoted, nothing rounded (model.md 2.12)."""
    return tiled_matmul(h_ND, weight.data, dtype=numerics.wide)


def quantised_input(x_NK: Tensor, weight: Weight, *, numerics: Numerics) -> Tensor:
    """x as the product with `weight` sees it, wide: an e4m3 round trip unless the weight is dense or numerics says
    no."""
    if numerics.quantise_activations and not isinstance(weight, DenseWeight):
        return round_trip_fp8(x_NK, dtype=numerics.wide)
    return x_NK.to(numerics.wide)
