"""Sum of a row's expert outputs: one program per piece of a row. Traffic per row: (top-k + 2) * 2 * D bytes; bound: HBM.

Profile R, equal to `ref` bit for bit: slots are added in order in float32, then the shared expert, and rounded once.
"""

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from prefill_kernels.aot_case import AotCase, Mma
from prefill_kernels.gpu.chip import Chip

# 8 values per thread and load; all top-k + 1 loads of a piece are in flight at once.
_BLOCK_D = 1024
_NUM_WARPS = 4


@triton.jit  # type: ignore[untyped-decorator]
def _combine_experts_kernel(  # type: ignore[no-untyped-def]
    routed_ptr, shared_ptr, out_ptr, width, TOPK: tl.constexpr, BLOCK_D: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    in_range = column < width
    shared = tl.load(shared_ptr + row * width + column, mask=in_range, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK_D,), tl.float32)
    for slot in tl.static_range(TOPK):
        routed = tl.load(routed_ptr + (row * TOPK + slot) * width + column, mask=in_range, other=0.0)
        total += routed.to(tl.float32)
    tl.store(out_ptr + row * width + column, (total + shared).to(tl.bfloat16), mask=in_range)


def combine_experts(routed_NKD: Tensor, shared_ND: Tensor) -> Tensor:
    """Same contract as ref.combine_experts, bfloat16 only.

    Raises:
        ValueError: another dtype, or rows that are not contiguous.
    """
    num_rows, topk, width = routed_NKD.shape
    for x in (routed_NKD, shared_ND):
        if x.dtype != torch.bfloat16 or not x.is_contiguous():
            raise ValueError(f"expert outputs are {x.dtype}, strides {x.stride()}: expected contiguous bfloat16")
    out_ND = torch.empty_like(shared_ND)
    if num_rows == 0:
        return out_ND
    _combine_experts_kernel[(num_rows, triton.cdiv(width, _BLOCK_D))](
        routed_NKD, shared_ND, out_ND, width, TOPK=topk, BLOCK_D=_BLOCK_D, num_warps=_NUM_WARPS
    )
    return out_ND


def aot_cases(chip: Chip) -> tuple[AotCase, ...]:  # noqa: ARG001 - the same launches on both chips
    """The released model's combine at a 32,768-row chunk."""
    num_rows, topk, width = 32768, 6, 5120
    return (
        AotCase(
            op="combine_experts",
            name="combine_experts",
            shape=f"{num_rows} x ({topk} + 1) x {width}",
            kernel=_combine_experts_kernel,
            signature={
                "routed_ptr": "*bf16",
                "shared_ptr": "*bf16",
                "out_ptr": "*bf16",
                "width": "i32",
                "TOPK": "constexpr",
                "BLOCK_D": "constexpr",
            },
            constexprs={"TOPK": topk, "BLOCK_D": _BLOCK_D},
            aligned=("routed_ptr", "shared_ptr", "out_ptr", "width"),
            num_warps=_NUM_WARPS,
            num_stages=3,
            mma=Mma.NONE,
            num_programs=num_rows * triton.cdiv(width, _BLOCK_D),
            bytes_moved=num_rows * (topk + 2) * width * 2,
            flops=num_rows * (topk + 1) * width,
        ),
    )
