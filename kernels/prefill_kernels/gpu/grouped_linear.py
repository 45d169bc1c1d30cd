"""grouped_linear of the Ops protocol: the block-diagonal output projection wo_a, with the quantiser of wo_b's input behind it.

Persistent; the product is matmul_tile's, bfloat16 on both chips because x is never quantised (profile R): the fp8 weight is
decoded on the way or expanded at load, which on sm_100 alone lets products run one behind the other. Traffic: x and the weight
once, plain and quantised output once; bound: the matrix unit. Tolerance against `ref`: summation order; quantiser: none. The
trap: the quantiser sees the bfloat16 rounding of the sum, not the sum.
"""

# N rows, G groups, K in, O out of one group
from typing import Any

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from prefill_kernels.aot_case import AotCase, Mma
from prefill_kernels.gpu.chip import Chip
from prefill_kernels.gpu.expanded_weight import ExpandedWeight
from prefill_kernels.gpu.matmul_tile import (
    MULTIPROCESSORS,
    out_halves,
    persistent_programs,
    row_halves,
    tile_of,
    tile_product,
)
from prefill_kernels.gpu.seen_rows import GROUP, empty_seen, store_seen
from prefill_kernels.numerics import Numerics
from prefill_kernels.ops import Rows
from prefill_kernels.weights import DenseWeight, Fp8Weight, Weight

# As the dense tile of `linear`; the store goes by halves (sm_100: quarters), else the quantiser spills. On sm_100 x is the left
# operand: then a thread holds whole scale groups of a row, while with the weight on the left 32 threads share one (480 spills).
_OUT, _ROWS, _WIDTH = 128, 256, 64
_WARPS, _STAGES = 8, 3
_GROUP_ROW_TILES = 8


@triton.jit  # type: ignore[untyped-decorator]
def _store_both(  # type: ignore[no-untyped-def]
    plain_ptr, seen_ptr, scale_ptr, acc, first_row, num_rows, first_out, out_end, num_out, CODES: tl.constexpr
):
    """Rounds acc [rows, out] to bfloat16, writes it and its quantised form."""
    row_M = first_row + tl.arange(0, acc.shape[0])
    out_O = first_out + tl.arange(0, acc.shape[1])
    plain = acc.to(tl.bfloat16)
    mask = (row_M < num_rows)[:, None] & (out_O < out_end)[None, :]
    tl.store(plain_ptr + row_M.to(tl.int64)[:, None] * num_out + out_O[None, :], plain, mask=mask)
    group = first_out // 32 + tl.arange(0, acc.shape[1] // 32)
    store_seen(seen_ptr, scale_ptr, plain.to(tl.float32), row_M, num_rows, out_O, group, out_end, num_out, CODES)


@triton.jit  # type: ignore[untyped-decorator]
def _store_quarters(  # type: ignore[no-untyped-def]
    plain_ptr, seen_ptr, scale_ptr, acc, first_row, num_rows, first_out, out_end, num_out, CODES: tl.constexpr
):
    """_store_both of half a tile in two parts."""
    first, second = out_halves(acc)
    _store_both(plain_ptr, seen_ptr, scale_ptr, first, first_row, num_rows, first_out, out_end, num_out, CODES)
    first_out += first.shape[1]
    _store_both(plain_ptr, seen_ptr, scale_ptr, second, first_row, num_rows, first_out, out_end, num_out, CODES)


@triton.jit  # type: ignore[untyped-decorator]
def _store_tile(  # type: ignore[no-untyped-def]
    plain_ptr,
    seen_ptr,
    scale_ptr,
    acc,
    first_row,
    num_rows,
    first_out,
    out_end,
    num_out,
    CODES: tl.constexpr,
    ROWS_LEFT: tl.constexpr,
):
    """_store_both of a tile: two halves of the rows, or with ROWS_LEFT four quarters of the outputs."""
    if ROWS_LEFT:
        left, right = out_halves(acc)
        _store_quarters(plain_ptr, seen_ptr, scale_ptr, left, first_row, num_rows, first_out, out_end, num_out, CODES)
        first_out += left.shape[1]
        _store_quarters(plain_ptr, seen_ptr, scale_ptr, right, first_row, num_rows, first_out, out_end, num_out, CODES)
    else:
        first, second = row_halves(acc)
        _store_both(plain_ptr, seen_ptr, scale_ptr, first, first_row, num_rows, first_out, out_end, num_out, CODES)
        first_row += first.shape[0]
        _store_both(plain_ptr, seen_ptr, scale_ptr, second, first_row, num_rows, first_out, out_end, num_out, CODES)


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _grouped_linear_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    w_ptr,
    w_scale_ptr,
    plain_ptr,
    seen_ptr,
    scale_ptr,
    num_rows,
    num_groups,
    out_per_group,
    width,
    stride_x_n,
    stride_x_g,
    FORMAT: tl.constexpr,
    CODES: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS_LEFT: tl.constexpr,
    GROUP_TILES: tl.constexpr,
    OUT: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row_tiles = tl.cdiv(num_rows, ROWS)
    tiles_per_group = tl.cdiv(out_per_group, OUT)
    out_tiles = num_groups * tiles_per_group
    num_out = num_groups * out_per_group
    for index in tl.range(tl.program_id(0), row_tiles * out_tiles, tl.num_programs(0), flatten=True):
        row_tile, out_tile = tile_of(index, row_tiles, out_tiles, GROUP_TILES)
        group = out_tile // tiles_per_group
        first_out = group * out_per_group + out_tile % tiles_per_group * OUT
        out_end = (group + 1) * out_per_group
        first_row = row_tile * ROWS
        acc = tile_product(
            x_ptr + group.to(tl.int64) * stride_x_g,
            x_ptr,
            first_row,
            num_rows,
            stride_x_n,
            w_ptr,
            w_scale_ptr,
            first_out,
            out_end,
            width,
            FORMAT=FORMAT,
            SCALED=False,
            ROWS_LEFT=ROWS_LEFT,
            EVEN=EVEN,
            OUT=OUT,
            ROWS=ROWS,
            WIDTH=WIDTH,
        )
        _store_tile(
            plain_ptr, seen_ptr, scale_ptr, acc, first_row, num_rows, first_out, out_end, num_out, CODES, ROWS_LEFT
        )


def grouped_linear(x_NGK: Tensor, weight: Weight | ExpandedWeight, *, numerics: Numerics, chip: Chip) -> Rows:  # noqa: ARG001
    """Same contract as ref.grouped_linear, with the quantised form; weight dense, fp8 or expanded.

    Raises:
        ValueError: out per group or its quantiser's groups don't divide, or x is not contiguous along K.
    """
    num_rows, num_groups, width = x_NGK.shape
    num_out = weight.data.shape[0]
    out_per_group = num_out // num_groups
    if (
        num_out % num_groups
        or out_per_group % GROUP
        or weight.data.shape[1] != width
        or x_NGK.stride(2) != 1
        or not weight.data.is_contiguous()
        or not isinstance(weight, DenseWeight | ExpandedWeight | Fp8Weight)
    ):
        raise ValueError(
            f"x {tuple(x_NGK.shape)} with strides {x_NGK.stride()}, {type(weight).__name__} {tuple(weight.data.shape)}: expected "
            f"a contiguous dense or fp8 weight of the same width and a multiple of {GROUP} outputs per group"
        )
    plain = torch.empty(num_rows, num_out, dtype=torch.bfloat16, device=x_NGK.device)
    seen, scales = empty_seen(num_rows, num_out, device=x_NGK.device, chip=chip)
    if num_rows == 0:
        return Rows(plain=plain, seen=seen, scales=scales)
    num_tiles = triton.cdiv(num_rows, _ROWS) * num_groups * triton.cdiv(out_per_group, _OUT)
    form = "fp8" if isinstance(weight, Fp8Weight) else "dense"
    _grouped_linear_kernel[(persistent_programs(x_NGK.device, num_tiles),)](
        x_NGK,
        weight.data,
        weight.scale if isinstance(weight, Fp8Weight) else weight.data,
        plain,
        seen,
        seen if scales is None else scales,
        num_rows,
        num_groups,
        out_per_group,
        width,
        x_NGK.stride(0),
        x_NGK.stride(1),
        **_constexprs(form, width, chip),
        num_warps=_WARPS,
        num_stages=_STAGES,
    )
    return Rows(plain=plain, seen=seen, scales=scales)


def _constexprs(form: str, width: int, chip: Chip) -> dict[str, Any]:
    return {
        "FORMAT": form,
        "CODES": chip is Chip.SM_100,
        "ROWS_LEFT": chip is Chip.SM_100,
        "EVEN": width % _WIDTH == 0,
        "GROUP_TILES": _GROUP_ROW_TILES,
        "OUT": _OUT,
        "ROWS": _ROWS,
        "WIDTH": _WIDTH,
    }


def aot_cases(chip: Chip) -> tuple[AotCase, ...]:
    """wo_a of the released model at a 32,768-row chunk, from the stored weight and from the expanded one."""
    return (_case("grouped_linear wo_a", "fp8", chip), _case("grouped_linear wo_a, expanded", "dense", chip))


def _case(name: str, form: str, chip: Chip) -> AotCase:
    num_rows, num_groups, width, out_per_group = 32768, 8, 4096, 1024
    num_out = num_groups * out_per_group
    weight = "*fp8e4nv" if form == "fp8" else "*bf16"
    seen = "*u8" if chip is Chip.SM_100 else "*bf16"
    types = {"x_ptr": "*bf16", "w_ptr": weight, "w_scale_ptr": "*u8" if form == "fp8" else weight, "plain_ptr": "*bf16"}
    types |= {"seen_ptr": seen, "scale_ptr": seen}
    constexprs = _constexprs(form, width, chip)
    signature = {
        argument: "constexpr" if argument in constexprs else types.get(argument, "i32")
        for argument in _grouped_linear_kernel.arg_names
    }
    unaligned = ("num_rows", "num_groups")
    return AotCase(
        op="grouped_linear",
        name=name,
        shape=f"{num_rows} x {num_groups} x {width} -> {num_groups} x {out_per_group}",
        kernel=_grouped_linear_kernel,
        signature=signature,
        constexprs=constexprs,
        aligned=tuple(a for a in signature if a not in constexprs and a not in unaligned),
        num_warps=_WARPS,
        num_stages=_STAGES,
        mma=Mma.BF16,
        num_programs=MULTIPROCESSORS[chip],
        bytes_moved=int(
            num_rows * num_groups * width * 2
            + num_out * width * (1 + 1 / 1024 if form == "fp8" else 2)
            + num_rows * num_out * (3 + 1 / 32 if chip is Chip.SM_100 else 4)
        ),
        flops=2 * num_rows * width * num_out,
    )
