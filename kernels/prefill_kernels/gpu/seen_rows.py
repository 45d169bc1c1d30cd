"""The quantised form of rows (ops.Rows.seen): its memory and its store, for kernels that end in a quantiser.

Called by norm_rows and grouped_linear. On sm_90 the form is bfloat16 values, on sm_100 uint8 e4m3 codes with ue8m0 scales
(decisions 21). The trap: the quantiser sees rows after their rounding to bfloat16.
"""

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from prefill_kernels.gpu.chip import Chip
from prefill_kernels.gpu.formats import dequantise_fp8, quantise_fp8

GROUP = 32


def empty_seen(num_rows: int, width: int, *, device: torch.device, chip: Chip) -> tuple[Tensor, Tensor | None]:
    """Uninitialised (seen, scales) of [num_rows, width] rows.

    Raises:
        ValueError: width is no multiple of 32.
    """
    if width % GROUP:
        raise ValueError(f"cannot quantise {width} channels in groups of {GROUP}: not a multiple")
    if chip is Chip.SM_90:
        return torch.empty(num_rows, width, dtype=torch.bfloat16, device=device), None
    scales = torch.empty(num_rows, width // GROUP, dtype=torch.uint8, device=device)
    return torch.empty(num_rows, width, dtype=torch.uint8, device=device), scales


@triton.jit  # type: ignore[untyped-decorator]
def store_seen(  # type: ignore[no-untyped-def]
    seen_ptr, scale_ptr, y, row_R, row_end, col_C, group_G, col_end, width, CODES: tl.constexpr
):
    """Quantises y [R, C], float32 of bfloat16 values, and writes it to rows row_R, columns col_C of [rows, width].

    group_G: the columns' scale groups, col_C / 32. Rows from row_end and columns from col_end on are not written.
    """
    codes, scale = quantise_fp8(y)
    where = row_R.to(tl.int64)[:, None] * width + col_C[None, :]
    mask = (row_R < row_end)[:, None] & (col_C < col_end)[None, :]
    if CODES:
        tl.store(seen_ptr + where, codes, mask=mask)
        scale_where = row_R.to(tl.int64)[:, None] * (width // 32) + group_G[None, :]
        tl.store(scale_ptr + scale_where, scale, mask=(row_R < row_end)[:, None] & (group_G < col_end // 32)[None, :])
    else:
        tl.store(seen_ptr + where, dequantise_fp8(codes, scale).to(tl.bfloat16), mask=mask)
