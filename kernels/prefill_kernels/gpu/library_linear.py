"""`linear` for bfloat16 weights through cuBLAS: a switch for sm_90, where the library is the faster of the two (perf.md 6.1).

Bound in place of matmul.linear only by whoever gives up decisions 22: the library picks its algorithm by the number of rows, so a
row's last bits depend on its batch, and ranks that share KV no longer agree on every bit. The trap: set
torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False first, else partial sums are rounded to bfloat16.
"""

import torch
from torch import Tensor

from prefill_kernels.gpu import matmul
from prefill_kernels.gpu.chip import Chip
from prefill_kernels.gpu.expanded_weight import ExpandedWeight
from prefill_kernels.gpu.norm_rows import quantise_rows
from prefill_kernels.numerics import Numerics
from prefill_kernels.ops import Rows
from prefill_kernels.weights import DenseWeight, Weight


def linear(
    x: Rows, weight: Weight | ExpandedWeight, *, numerics: Numerics, wide_output: bool = False, chip: Chip
) -> Tensor:
    """matmul.linear; bfloat16 weights with bfloat16 output go to the library, everything else to the kernel."""
    is_bfloat16 = isinstance(weight, DenseWeight | ExpandedWeight) and weight.data.dtype == torch.bfloat16
    if wide_output or not is_bfloat16 or chip is not Chip.SM_90:
        return matmul.linear(x, weight, numerics=numerics, wide_output=wide_output, chip=chip)
    if isinstance(weight, DenseWeight):
        return torch.mm(x.plain, weight.data.t())
    rows = x if x.seen is not None else quantise_rows(x.plain, numerics=numerics, chip=chip)
    if rows.seen is None or rows.scales is not None:
        raise ValueError("rows hold codes, a product with an expanded weight reads values")
    return torch.mm(rows.seen, weight.data.t())
