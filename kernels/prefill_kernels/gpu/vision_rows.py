"""vision_patches, vision_merge and vision_spans: moving rows of the vision tower; values are copied bit by bit.

Traffic: what is read and written, once (patches read 3 bytes a pixel and write 6); bound: memory. The trap: one pixel, patch or
feature row out of range is undefined here, where `ref` raises: the device has nobody to tell.
"""

# N patches, P patch side, G cells, M patches per cell, D tower width, W text width, T rows of spans
from typing import Any

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from prefill_kernels.aot_case import AotCase, Mma
from prefill_kernels.gpu.chip import Chip
from prefill_kernels.vision_ops import SPAN_END, SPAN_NEWLINE, SPAN_START

# 32 values a thread; patches of 588 leave 436 of 1,024 lanes idle, which no memory-bound kernel feels.
_ELEMENTS = 4096
_MERGE_ELEMENTS = 1024
_SPAN_ROWS, _SPAN_COLUMNS = 4, 512
_WARPS = 4
_START, _NEWLINE, _END = (tl.constexpr(source) for source in (SPAN_START, SPAN_NEWLINE, SPAN_END))


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _vision_patches_kernel(  # type: ignore[no-untyped-def]
    pixels_ptr,
    origins_ptr,
    strides_ptr,
    levels_ptr,
    out_ptr,
    num_rows,
    SIDE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    value = tl.arange(0, BLOCK)
    channel = value // (SIDE * SIDE)
    row = value // SIDE % SIDE
    column = value % SIDE
    mask = (n < num_rows)[:, None] & (value < 3 * SIDE * SIDE)[None, :]
    origin = tl.load(origins_ptr + n, mask=n < num_rows, other=0).to(tl.int64)
    stride = tl.load(strides_ptr + n, mask=n < num_rows, other=0).to(tl.int64)
    byte = origin[:, None] + stride[:, None] * row[None, :] + (3 * column + channel)[None, :]
    level = tl.load(pixels_ptr + byte, mask=mask, other=0).to(tl.int32)
    to_ptr = out_ptr + n.to(tl.int64)[:, None] * (3 * SIDE * SIDE) + value[None, :]
    tl.store(to_ptr, tl.load(levels_ptr + level, mask=mask, other=0.0), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _vision_merge_kernel(  # type: ignore[no-untyped-def]
    x_ptr, index_ptr, out_ptr, WIDTH: tl.constexpr, NUM_PATCHES: tl.constexpr, BLOCK: tl.constexpr
):
    cell = tl.program_id(0).to(tl.int64)
    value = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = value < WIDTH * NUM_PATCHES
    row = tl.load(index_ptr + cell * NUM_PATCHES + value % NUM_PATCHES, mask=mask, other=-1).to(tl.int64)
    patch = tl.load(x_ptr + row * WIDTH + value // NUM_PATCHES, mask=mask & (row >= 0), other=0.0)
    tl.store(out_ptr + cell * (WIDTH * NUM_PATCHES) + value, patch, mask=mask)


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _vision_spans_kernel(  # type: ignore[no-untyped-def]
    features_ptr,
    start_ptr,
    newline_ptr,
    end_ptr,
    source_ptr,
    out_ptr,
    num_rows,
    width,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    mask = (t < num_rows)[:, None] & (column < width)
    source = tl.load(source_ptr + t, mask=t < num_rows, other=_END)[:, None]
    act = out_ptr.dtype.element_ty
    # At most one of the four is read.
    feature = tl.load(features_ptr + source.to(tl.int64) * width + column, mask=mask & (source >= 0), other=0.0)
    start = tl.load(start_ptr + column, mask=mask & (source == _START), other=0.0).to(act)
    newline = tl.load(newline_ptr + column, mask=mask & (source == _NEWLINE), other=0.0).to(act)
    end = tl.load(end_ptr + column, mask=mask & (source == _END), other=0.0).to(act)
    delimiter = tl.where(source == _START, start, tl.where(source == _NEWLINE, newline, end))
    to_ptr = out_ptr + t.to(tl.int64)[:, None] * width + column
    tl.store(to_ptr, tl.where(source >= 0, feature, delimiter), mask=mask)


def vision_patches(pixels: Tensor, origins_N: Tensor, strides_N: Tensor, levels: Tensor, *, patch_size: int) -> Tensor:
    """Same contract as ref.vision_patches, bfloat16 levels.

    Raises:
        ValueError: other levels (this is the tower's first op, so it refuses activations that no other op could compute with).
    """
    if levels.dtype != torch.bfloat16:
        raise ValueError(
            f"Triton vision ops compute with bfloat16 activations, not with {levels.dtype}; op set 'ref' does both"
        )
    columns = 3 * patch_size**2
    out = torch.empty(len(origins_N), columns, dtype=levels.dtype, device=pixels.device)
    if len(origins_N):
        block = triton.next_power_of_2(columns)
        rows = _rows_per_program(block)
        _vision_patches_kernel[(triton.cdiv(len(origins_N), rows),)](
            pixels,
            origins_N,
            strides_N,
            levels,
            out,
            len(origins_N),
            SIDE=patch_size,
            ROWS=rows,
            BLOCK=block,
            num_warps=_WARPS,
        )
    return out


def vision_merge(x_ND: Tensor, index_GM: Tensor) -> Tensor:
    """Same contract as ref.vision_merge, contiguous tensors."""
    (num_cells, num_patches), width = index_GM.shape, x_ND.shape[1]
    if not x_ND.is_contiguous() or not index_GM.is_contiguous():
        raise ValueError(f"strides {x_ND.stride()} and {index_GM.stride()}: expected contiguous tensors")
    out = torch.empty(num_cells, width * num_patches, dtype=x_ND.dtype, device=x_ND.device)
    if out.numel():
        _vision_merge_kernel[(num_cells, triton.cdiv(out.shape[1], _MERGE_ELEMENTS))](
            x_ND,
            index_GM,
            out,
            WIDTH=width,
            NUM_PATCHES=num_patches,
            BLOCK=_MERGE_ELEMENTS,
            num_warps=_WARPS,
        )
    return out


def vision_spans(features_GW: Tensor, start_W: Tensor, newline_W: Tensor, end_W: Tensor, source_T: Tensor) -> Tensor:
    """Same contract as ref.vision_spans, contiguous tensors."""
    width = features_GW.shape[1]
    delimiters = (start_W, newline_W, end_W)
    is_dense = all(tensor.is_contiguous() for tensor in (features_GW, *delimiters, source_T))
    if not is_dense or any(row.shape != (width,) for row in delimiters):
        raise ValueError(
            f"features {tuple(features_GW.shape)}, delimiters {[tuple(row.shape) for row in delimiters]}: expected one width "
            "and contiguous tensors"
        )
    out = torch.empty(len(source_T), width, dtype=features_GW.dtype, device=features_GW.device)
    if out.numel():
        grid = (triton.cdiv(len(source_T), _SPAN_ROWS), triton.cdiv(width, _SPAN_COLUMNS))
        _vision_spans_kernel[grid](
            features_GW,
            *delimiters,
            source_T,
            out,
            len(source_T),
            width,
            ROWS=_SPAN_ROWS,
            BLOCK=_SPAN_COLUMNS,
            num_warps=_WARPS,
        )
    return out


def _rows_per_program(block: int) -> int:
    """A power of two."""
    return max(1, _ELEMENTS // block)


def aot_cases(chip: Chip) -> tuple[AotCase, ...]:  # noqa: ARG001 - the same launches on both chips
    """A full batch of the released tower: 16,384 patches, 1,821 cells, spans of 1,870 rows."""
    num_patches, num_cells, num_spans, columns = 16384, 1821, 1870, 3 * 14 * 14
    block = triton.next_power_of_2(columns)
    rows = _rows_per_program(block)
    return (
        _case(
            "vision_patches",
            f"{num_patches} x {columns}",
            _vision_patches_kernel,
            {"SIDE": 14, "ROWS": rows, "BLOCK": block},
            num_programs=triton.cdiv(num_patches, rows),
            bytes_moved=num_patches * (3 * columns + 12),
        ),
        _case(
            "vision_merge",
            f"{num_cells} x 9 x 1024",
            _vision_merge_kernel,
            {"WIDTH": 1024, "NUM_PATCHES": 9, "BLOCK": _MERGE_ELEMENTS},
            num_programs=num_cells * triton.cdiv(9216, _MERGE_ELEMENTS),
            bytes_moved=num_cells * (4 * 9216 + 36),
        ),
        _case(
            "vision_spans",
            f"{num_spans} x 5120",
            _vision_spans_kernel,
            {"ROWS": _SPAN_ROWS, "BLOCK": _SPAN_COLUMNS},
            num_programs=triton.cdiv(num_spans, _SPAN_ROWS) * triton.cdiv(5120, _SPAN_COLUMNS),
            bytes_moved=num_spans * (4 * 5120 + 4),
        ),
    )


def _case(
    op: str, shape: str, kernel: Any, constexprs: dict[str, Any], *, num_programs: int, bytes_moved: int
) -> AotCase:
    types = {"pixels_ptr": "*u8", "origins_ptr": "*i64", "strides_ptr": "*i32", "index_ptr": "*i32"}
    types |= {"source_ptr": "*i32", "num_rows": "i32", "width": "i32"} | dict.fromkeys(constexprs, "constexpr")
    signature = {argument: types.get(argument, "*bf16") for argument in kernel.arg_names}
    return AotCase(
        op=op,
        name=op,
        shape=shape,
        kernel=kernel,
        signature=signature,
        constexprs=constexprs,
        aligned=tuple(argument for argument in signature if argument.endswith("_ptr") or argument == "width"),
        num_warps=_WARPS,
        num_stages=3,
        mma=Mma.NONE,
        num_programs=num_programs,
        bytes_moved=bytes_moved,
        flops=0,
    )
