"""fp8 weights expanded to bfloat16 once at load: twice the bytes, no decoding inside the product (perf.md 3.5, option 1).

A loader calls `expand_weight` where the memory plan has room (6.5 GB for all dense fp8 weights of the released model) and gives
the result to the products in place of the Fp8Weight. The values are the same to the bit. The trap: an ExpandedWeight is no
DenseWeight: its product still reads the quantised form of its input.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from prefill_kernels.number_formats import dequantise_weight
from prefill_kernels.weights import Fp8Weight

_ROWS_AT_ONCE = 2048
"""Rows expanded per step: the float32 values in between stay below 250 MB for every weight of the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpandedWeight:
    """Values of an Fp8Weight. data: [out, in] bfloat16, exact."""

    data: Tensor


def expand_weight(weight: Fp8Weight) -> ExpandedWeight:
    """The weight's values as bfloat16, a new tensor on its device. weight: data [out, in], scale [ceil(out/32), ceil(in/32)]."""
    data = torch.empty(weight.data.shape, dtype=torch.bfloat16, device=weight.data.device)
    for start in range(0, len(data), _ROWS_AT_ONCE):
        end = start + _ROWS_AT_ONCE
        part = Fp8Weight(data=weight.data[start:end], scale=weight.scale[start // 32 : -(-end // 32)])
        data[start:end] = dequantise_weight(part, torch.bfloat16)
    return ExpandedWeight(data=data)
