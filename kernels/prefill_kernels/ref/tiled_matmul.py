"""The one matrix product of `ref`: rows are computed in zero-padded tiles of one fixed shape.

Called by every op that multiplies by a weight. The trap: a plain `x @ w.T` picks its kernel by the number of rows
(and by the number of columns below 16), so the last bits of a row change with the rest of the batch. A fixed shape
always runs the same kernel, and no row of a tile sees another (measured: 0 differences; decisions C10 and 22).
`torch.bmm` over the tiles is not the same and must not replace the loop.
"""

import torch
from torch import Tensor

# M rows, K contracted, N columns
TILE_ROWS = 16
MIN_COLUMNS = 16
# BLAS kernels may peel differently off a cache-line boundary; torch's own allocations are aligned, slices may not be.
_ALIGNMENT_BYTES = 64


def tiled_matmul(x_MK: Tensor, w_NK: Tensor, *, dtype: torch.dtype) -> Tensor:
    """x times the transpose of w, both promoted to `dtype` first.

    Args:
        x_MK: [rows, K], any float dtype, rows may be 0.
        w_NK: [columns, K], any float dtype.
        dtype: float32 or float64; operands and accumulation. Products of bfloat16 operands are exact in float32.

    Returns:
        [rows, columns] in `dtype`; each row bitwise independent of the number, the values and the place of the others.
    """
    num_rows, width = x_MK.shape
    num_columns = w_NK.shape[0]
    num_tiles = -(-num_rows // TILE_ROWS)
    tiles = torch.zeros(num_tiles * TILE_ROWS, width, dtype=dtype, device=x_MK.device)
    tiles[:num_rows] = x_MK
    weight = _padded_weight(w_NK, dtype).t()
    out = torch.empty(num_tiles * TILE_ROWS, weight.shape[1], dtype=dtype, device=x_MK.device)
    for start in range(0, num_tiles * TILE_ROWS, TILE_ROWS):
        torch.mm(tiles[start : start + TILE_ROWS], weight, out=out[start : start + TILE_ROWS])
    return out[:num_rows, :num_columns]


def _padded_weight(w_NK: Tensor, dtype: torch.dtype) -> Tensor:
    """Contiguous, aligned, at least MIN_COLUMNS rows."""
    weight = w_NK.to(dtype).contiguous()
    missing = MIN_COLUMNS - weight.shape[0]
    if missing > 0:
        return torch.nn.functional.pad(weight, (0, 0, 0, missing))
    return weight.clone() if weight.data_ptr() % _ALIGNMENT_BYTES else weight
