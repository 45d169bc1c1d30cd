"""2-D rotary embedding and full attention inside each image of a packed batch (vision.md 4)."""

# N patches of the batch, n of one image, m queries of it, H heads, C head dim
from itertools import pairwise

import torch
from torch import Tensor

from prefill_kernels.ref.fixed_math import tree_sum, wide_dtype

_QUERY_ROWS = 256
"""Queries at once: bounds the scores to 9,189 keys x 256 x 4 bytes = 9 MB per head."""


def vision_attention(
    qkv_N3D: Tensor,
    positions_N2: Tensor,
    frequencies: Tensor,
    cu_rows_B1: Tensor,
    *,
    num_heads: int,
    max_rows: int,  # noqa: ARG001 - sizes launches on a GPU
) -> Tensor:
    """softmax(q . k^T / sqrt C) . v over the keys of the query's own image.

    q and k are rotated wide and rounded to act; scores, softmax and the sum over keys are wide, the result is rounded once. (A
    kernel may round the probabilities to act before the second product, as flash attention does; its test says so.)

    Args:
        qkv_N3D: [N, 3 * H * C] act: q of all heads, then k, then v.
        positions_N2: [N, 2] int32 row and column of each patch in its image, from 0.
        frequencies: [C / 4] float32, rope_frequencies(rope_dim=C / 2).
        cu_rows_B1: [B + 1] int32: patches of image b are cu_rows[b]..cu_rows[b + 1].

    Returns:
        [N, H * C] act. An image's rows do not depend on the other images: each is computed from copies of its own shape.
    """
    q_NHC, k_NHC, v_NHC = torch.unflatten(qkv_N3D, -1, (3, num_heads, -1)).unbind(1)
    q_NHC, k_NHC = (_rotate(x_NHC, positions_N2, frequencies) for x_NHC in (q_NHC, k_NHC))
    out_NHC = torch.empty_like(v_NHC, memory_format=torch.contiguous_format)
    bounds = cu_rows_B1.tolist()
    for start, end in pairwise(bounds):
        out_NHC[start:end] = _attend(q_NHC[start:end], k_NHC[start:end], v_NHC[start:end])
    return out_NHC.flatten(1)


def _rotate(x_NHC: Tensor, positions_N2: Tensor, frequencies: Tensor) -> Tensor:
    """Half-split pairs (i, i + C / 2): the first C / 4 pairs turn by row * frequency, the others by column * frequency."""
    wide = wide_dtype(x_NHC.dtype)
    angles = (positions_N2.float().unsqueeze(-1) * frequencies).flatten(1).double()
    cos, sin = (table.to(wide).unsqueeze(1) for table in (torch.cos(angles), torch.sin(angles)))
    x0, x1 = x_NHC.to(wide).chunk(2, dim=-1)
    return torch.cat([x0 * cos - x1 * sin, x0 * sin + x1 * cos], dim=-1).to(x_NHC.dtype)


def _attend(q_nHC: Tensor, k_nHC: Tensor, v_nHC: Tensor) -> Tensor:
    """[n, H, C] act of one image, head by head."""
    wide = wide_dtype(q_nHC.dtype)
    heads = []
    for head in range(q_nHC.shape[1]):
        q_nC, k_nC, v_nC = (x_nHC[:, head].to(wide, copy=True).contiguous() for x_nHC in (q_nHC, k_nHC, v_nHC))
        heads.append(torch.cat([_attend_head(q_mC, k_nC, v_nC) for q_mC in torch.split(q_nC, _QUERY_ROWS)]))
    return torch.stack(heads, dim=1).to(q_nHC.dtype)


def _attend_head(q_mC: Tensor, k_nC: Tensor, v_nC: Tensor) -> Tensor:
    scores_mn = q_mC @ k_nC.t() * q_mC.shape[-1] ** -0.5
    weights_mn = torch.exp(scores_mn - scores_mn.amax(-1, keepdim=True))
    return weights_mn @ v_nC / tree_sum(weights_mn).unsqueeze(-1)
