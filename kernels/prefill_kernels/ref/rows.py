"""Copies of rows by index: cache pages, compacted batches, ring buffers."""

# M rows of the pool, N indices, R row; Z pages, E rows per page
import torch
from torch import Tensor


def gather_rows(x_MR: Tensor, index_N: Tensor) -> Tensor:
    """Rows of x by index.

    Args:
        x_MR: [M, R], or pages [Z, E, R] whose rows are counted through (row e of page z is z * E + e). Any dtype; may
            be strided: pages inside larger blocks cannot be flattened.
        index_N: [N] int32 or int64; an index outside [0, rows) (-1 by habit) gives a zero row.

    Returns:
        [N, R] in x's dtype, bitwise copies.
    """
    num_rows = x_MR.shape[:-1].numel()
    in_range_N = (index_N >= 0) & (index_N < num_rows)
    out_NR = x_MR.new_zeros(index_N.shape[0], x_MR.shape[-1])
    out_NR[in_range_N] = x_MR[_coordinates(x_MR, index_N[in_range_N])]
    return out_NR


def scatter_rows(x_MR: Tensor, index_N: Tensor, rows_NR: Tensor) -> None:
    """Write rows[n] to row index[n] of x in place, bitwise.

    Args:
        x_MR: [M, R] or pages [Z, E, R] as in gather_rows, written; may be strided.
        index_N: [N] int32 or int64, unique but for -1, which writes nothing.
        rows_NR: [N, R] of x's dtype.

    Raises:
        IndexError: an index beyond the last row.
    """
    valid_N = index_N >= 0
    x_MR[_coordinates(x_MR, index_N[valid_N])] = rows_NR[valid_N]


def _coordinates(x_MR: Tensor, index_N: Tensor) -> tuple[Tensor, ...]:
    """Index tensors of x's leading axes."""
    index_N = index_N.long()
    if x_MR.dim() == 2:
        return (index_N,)
    page_N = torch.div(index_N, x_MR.shape[1], rounding_mode="floor")
    return page_N, index_N - page_N * x_MR.shape[1]
