"""Expert router (model.md 2.10)."""

# N rows, D hidden, X experts, K top-k
import torch
from torch import Tensor

from prefill_kernels.numerics import Numerics
from prefill_kernels.ops import Routing
from prefill_kernels.ref.fixed_math import softplus
from prefill_kernels.ref.tiled_matmul import tiled_matmul
from prefill_kernels.ref.top_k import mask_to_indices, top_k_mask

_NORMALISER_EPS = 1e-20


def route(
    x_ND: Tensor,
    gate_XD: Tensor,
    bias_X: Tensor,
    image_bias_X: Tensor | None,
    is_image_N: Tensor,
    *,
    topk: int,
    scaling: float,
    numerics: Numerics,
) -> Routing:
    """Experts of each row and their weights.

    s = sqrt(softplus(x . gate)); the top-k of s + bias are chosen, ties to the lowest id; weight = s / (sum of chosen
    s + 1e-20) * scaling, from the unbiased scores, summed by ascending id. Nothing is rounded to act.

    Args:
        x_ND: [N, D] act, never quantised. gate_XD: [X, D] bfloat16 or float32.
        bias_X: [X] float32. image_bias_X: [X] float32 for rows of an image span, delimiters included; None: bias for
            all rows.
        is_image_N: [N] bool.

    Returns:
        ids [N, topk] int32 ascending, weights [N, topk] wide in that order.
    """
    wide = numerics.wide
    score_NX = torch.sqrt(softplus(tiled_matmul(x_ND, gate_XD, dtype=wide)))
    bias_NX = bias_X.to(wide).expand_as(score_NX)
    if image_bias_X is not None:
        bias_NX = torch.where(is_image_N.unsqueeze(-1), image_bias_X.to(wide), bias_NX)
    ids_NK = mask_to_indices(top_k_mask(score_NX + bias_NX, topk), topk)
    chosen_NK = score_NX.gather(1, ids_NK.long())
    total_N1 = chosen_NK[:, :1].clone()
    for slot in range(1, topk):
        total_N1 += chosen_NK[:, slot : slot + 1]
    return Routing(expert_ids=ids_NK, weights=chosen_NK / (total_N1 + _NORMALISER_EPS) * scaling)
