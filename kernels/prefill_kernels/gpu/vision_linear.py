"""Products of the vision tower with what follows them: the four `vision_linear` ops of VisionOps (vision.md 4, 5, 8).

One persistent kernel; bias, residual, SwiGLU or GELU run on the accumulators, each step rounded to bfloat16 where `ref` rounds.
For SwiGLU a tile is gate columns beside the up columns of the same channels. Traffic of one launch: x once per group of 8 row
tiles and out tile in flight (L2), weight, residual and output once; bound: the matrix unit. Tiles are 128 rows whatever the
batch (C24): a row's result depends on nothing but the row. Profile R; against `ref` the order of the sums differs, and the chip's
exp and division. The trap: rows beyond the edge repeat the last one; only loads of the residual and the store know the edge.
"""

# N rows, K in, O out, I inner width
from dataclasses import dataclass
from typing import Any

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from prefill_kernels.aot_case import AotCase, Mma
from prefill_kernels.gpu.chip import Chip
from prefill_kernels.gpu.gelu_device import gelu
from prefill_kernels.gpu.matmul_tile import MULTIPROCESSORS, dense_product, out_halves, persistent_programs, tile_of

_GROUP_ROW_TILES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionTile:
    """Shape and launch options of one tile: rows, weight rows (SwiGLU: half of them gate), width of a step over K; flat as in
    matmul.Tile."""

    rows: int
    out: int
    step: int
    num_warps: int
    num_stages: int
    flat: bool


# AOT, triton 3.9 and 3.6: 174 to 255 registers, 0 spills, 144 to 176 KB, one program per SM. 128 x 256 is the largest tile whose
# sums fit the registers, and with rows on the left they lie as they are stored.
TILES = {
    Chip.SM_90: VisionTile(rows=128, out=256, step=64, num_warps=8, num_stages=3, flat=True),
    Chip.SM_100: VisionTile(rows=128, out=256, step=64, num_warps=8, num_stages=3, flat=True),
}


@triton.jit  # type: ignore[untyped-decorator]
def _store_plain(  # type: ignore[no-untyped-def]
    acc,
    bias_ptr,
    residual_ptr,
    out_ptr,
    first_row,
    first_out,
    num_rows,
    num_out,
    BIAS: tl.constexpr,
    AFTER: tl.constexpr,
):
    """Bias, rounding, what follows, and the store of acc [rows, out]."""
    row_M = first_row + tl.arange(0, acc.shape[0])
    out_O = first_out + tl.arange(0, acc.shape[1])
    mask = (row_M < num_rows)[:, None] & (out_O < num_out)[None, :]
    where = row_M.to(tl.int64)[:, None] * num_out + out_O[None, :]
    if BIAS:
        acc += tl.load(bias_ptr + out_O, mask=out_O < num_out, other=0.0).to(tl.float32)[None, :]
    y = acc.to(tl.bfloat16)
    if AFTER == "add":
        residual = tl.load(residual_ptr + where, mask=mask, other=0.0).to(tl.float32)
        y = (residual + y.to(tl.float32)).to(tl.bfloat16)
    if AFTER == "gelu":
        y = gelu(y.to(tl.float32)).to(tl.bfloat16)
    tl.store(out_ptr + where, y, mask=mask)


@triton.jit
def _store_swiglu(gate, up, out_ptr, first_row, first_out, num_rows, num_out):  # type: ignore[no-untyped-def]
    row_M = first_row + tl.arange(0, gate.shape[0])
    out_O = first_out + tl.arange(0, gate.shape[1])
    mask = (row_M < num_rows)[:, None] & (out_O < num_out)[None, :]
    gate = gate.to(tl.bfloat16).to(tl.float32)
    up = up.to(tl.bfloat16).to(tl.float32)
    active = (gate / (1.0 + tl.exp(-gate))).to(tl.bfloat16).to(tl.float32)
    tl.store(out_ptr + row_M.to(tl.int64)[:, None] * num_out + out_O[None, :], (active * up).to(tl.bfloat16), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _vision_linear_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    num_rows,
    num_out,
    WIDTH: tl.constexpr,
    BIAS: tl.constexpr,
    AFTER: tl.constexpr,
    FLAT: tl.constexpr,
    GROUP: tl.constexpr,
    OUT: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
):
    COLUMNS: tl.constexpr = OUT // 2 if AFTER == "swiglu" else OUT
    row_tiles = tl.cdiv(num_rows, ROWS)
    out_tiles = tl.cdiv(num_out, COLUMNS)
    for index in tl.range(tl.program_id(0), row_tiles * out_tiles, tl.num_programs(0), flatten=FLAT):
        row_tile, out_tile = tile_of(index, row_tiles, out_tiles, GROUP)
        first_row, first_out = row_tile * ROWS, out_tile * COLUMNS
        row_M = tl.minimum(first_row + tl.arange(0, ROWS), num_rows - 1)
        n = tl.arange(0, OUT)
        weight_O = tl.minimum(first_out + n % COLUMNS, num_out - 1)
        if AFTER == "swiglu":
            weight_O += tl.where(n < COLUMNS, 0, num_out)
        # The width is a constant, so the compiler knows how rows of 588 are aligned (8 bytes) and loads them asynchronously, too.
        k = tl.arange(0, STEP)[None, :]
        x_tile = x_ptr + row_M.to(tl.int64)[:, None] * WIDTH + k
        w_tile = weight_ptr + weight_O.to(tl.int64)[:, None] * WIDTH + k
        acc = dense_product(x_tile, w_tile, WIDTH, True, WIDTH % STEP == 0, OUT, ROWS, STEP)
        first, second = out_halves(acc)
        if AFTER == "swiglu":
            _store_swiglu(first, second, out_ptr, first_row, first_out, num_rows, num_out)
        else:
            _store_plain(first, bias_ptr, residual_ptr, out_ptr, first_row, first_out, num_rows, num_out, BIAS, AFTER)
            first_out += OUT // 2
            _store_plain(second, bias_ptr, residual_ptr, out_ptr, first_row, first_out, num_rows, num_out, BIAS, AFTER)


def vision_linear(x_NK: Tensor, weight_OK: Tensor, bias_O: Tensor | None, *, chip: Chip) -> Tensor:
    """Same contract as ref.vision_linear, bfloat16 x and weights, contiguous.

    Raises:
        ValueError: of this and the following ops: another dtype, shapes that do not fit, tensors that are not contiguous.
    """
    return _launch(x_NK, weight_OK, len(weight_OK), chip, bias=bias_O)


def vision_linear_add(
    x_NK: Tensor, weight_OK: Tensor, bias_O: Tensor | None, residual_NO: Tensor, *, chip: Chip
) -> Tensor:
    """Same contract as ref.vision_linear_add; see vision_linear."""
    return _launch(x_NK, weight_OK, len(weight_OK), chip, bias=bias_O, residual=residual_NO, after="add")


def vision_linear_swiglu(x_NK: Tensor, weight_2IK: Tensor, *, chip: Chip) -> Tensor:
    """Same contract as ref.vision_linear_swiglu; see vision_linear."""
    return _launch(x_NK, weight_2IK, len(weight_2IK) // 2, chip, after="swiglu")


def vision_linear_gelu(x_NK: Tensor, weight_OK: Tensor, bias_O: Tensor, *, chip: Chip) -> Tensor:
    """Same contract as ref.vision_linear_gelu; see vision_linear and gelu_device."""
    return _launch(x_NK, weight_OK, len(weight_OK), chip, bias=bias_O, after="gelu")


def _launch(
    x: Tensor,
    weight: Tensor,
    num_out: int,
    chip: Chip,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    after: str = "",
) -> Tensor:
    num_rows, width = x.shape
    _check(x, weight, num_out, bias, residual, after)
    out = torch.empty(num_rows, num_out, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    tile = TILES[chip]
    num_tiles = triton.cdiv(num_rows, tile.rows) * triton.cdiv(num_out, _columns(tile, after))
    _vision_linear_kernel[(persistent_programs(x.device, num_tiles),)](
        x,
        weight,
        x if bias is None else bias,
        x if residual is None else residual,
        out,
        num_rows,
        num_out,
        **_constexprs(tile, width, has_bias=bias is not None, after=after),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out


def _check(x: Tensor, weight: Tensor, num_out: int, bias: Tensor | None, residual: Tensor | None, after: str) -> None:
    num_rows, width = x.shape
    expected = (2 * num_out if after == "swiglu" else num_out, width)
    fits = weight.shape == expected and (bias is None or bias.shape == (num_out,))
    fits = fits and (residual is None or (residual.shape == (num_rows, num_out) and residual.dtype == x.dtype))
    tensors = [tensor for tensor in (x, weight, bias, residual) if tensor is not None]
    is_dense = all(tensor.is_contiguous() for tensor in tensors)
    if not fits or not is_dense or x.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16:
        shapes = ", ".join(f"{tuple(tensor.shape)} {tensor.dtype} strides {tensor.stride()}" for tensor in tensors)
        raise ValueError(
            f"x, weight, bias, residual as given: {shapes}: expected contiguous bfloat16 [N, K], {list(expected)}, [O], [N, O]"
        )


def _columns(tile: VisionTile, after: str) -> int:
    return tile.out // 2 if after == "swiglu" else tile.out


def _constexprs(tile: VisionTile, width: int, *, has_bias: bool, after: str) -> dict[str, Any]:
    return {
        "WIDTH": width,
        "BIAS": has_bias,
        "AFTER": after,
        # GELU's temporaries do not fit beside the next tile's addresses (38 spills on sm_90 with triton 3.6).
        "FLAT": tile.flat and after != "gelu",
        "GROUP": _GROUP_ROW_TILES,
        "OUT": tile.out,
        "ROWS": tile.rows,
        "STEP": tile.step,
    }


def aot_cases(chip: Chip) -> tuple[AotCase, ...]:
    """Products of the released tower for a full batch: 16,384 patches, 1,821 cells."""
    return (
        _case("vision_linear", "patch_embed", chip, (16384, 588, 1024), has_bias=True),
        _case("vision_linear", "wqkv", chip, (16384, 1024, 3072), has_bias=True),
        _case("vision_linear_add", "wo", chip, (16384, 1024, 1024), has_bias=True, after="add"),
        _case("vision_linear_swiglu", "w1", chip, (16384, 1024, 2816), has_bias=False, after="swiglu"),
        _case("vision_linear_add", "w2", chip, (16384, 2816, 1024), has_bias=False, after="add"),
        _case("vision_linear_gelu", "aligner w1", chip, (1821, 9216, 5120), has_bias=True, after="gelu"),
        _case("vision_linear", "aligner w2", chip, (1821, 5120, 5120), has_bias=True),
    )


def _case(op: str, weight: str, chip: Chip, sizes: tuple[int, int, int], *, has_bias: bool, after: str = "") -> AotCase:
    num_rows, width, num_out = sizes
    tile = TILES[chip]
    constexprs = _constexprs(tile, width, has_bias=has_bias, after=after)
    kernel = _vision_linear_kernel
    signature = {
        name: "constexpr" if name in constexprs else "i32" if name.startswith("num_") else "*bf16"
        for name in kernel.arg_names
    }
    weight_rows = 2 * num_out if after == "swiglu" else num_out
    return AotCase(
        op=op,
        name=f"{op} {weight}",
        shape=f"{num_rows} x {width} -> {num_out}",
        kernel=kernel,
        signature=signature,
        constexprs=constexprs,
        aligned=tuple(name for name in signature if name.endswith("_ptr") or name == "num_out"),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        mma=Mma.BF16,
        num_programs=min(
            triton.cdiv(num_rows, tile.rows) * triton.cdiv(num_out, _columns(tile, after)), MULTIPROCESSORS[chip]
        ),
        bytes_moved=2 * (num_rows * (width + num_out * (2 if after == "add" else 1)) + weight_rows * width),
        flops=2 * num_rows * width * weight_rows,
    )
