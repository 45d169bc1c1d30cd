"""Products with stored weights: `linear`, `linear_pair` and `lm_head` of the Ops protocol (profile R of model.md 0.3).

One persistent kernel for all of them. On sm_90 both operands are bfloat16, fp8 and fp4 weights decoded in registers or expanded
at load (expanded_weight.py); on sm_100 quantised products are block-scaled on the codes. Traffic of one launch: x once per group
of 8 row tiles and out tile in flight (L2), the weight once, the output once; bound: the matrix unit from about 150 rows on,
below that the weight. Row tiles are 256 rows (lm_head 32) whatever the batch (C24). Tolerance against `ref`: summation order.
"""

# N rows, K in, D hidden, V vocabulary
from dataclasses import dataclass
from typing import Any

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from prefill_kernels.aot_case import AotCase, Mma
from prefill_kernels.gpu.chip import Chip
from prefill_kernels.gpu.expanded_weight import ExpandedWeight
from prefill_kernels.gpu.matmul_tile import MULTIPROCESSORS, persistent_programs, row_halves, tile_of, tile_product
from prefill_kernels.gpu.norm_rows import quantise_rows
from prefill_kernels.numerics import Numerics
from prefill_kernels.ops import Rows
from prefill_kernels.weights import DenseWeight, Fp4Weight, Fp8Weight, Weight

_GROUP_ROW_TILES = 8
"""2,048 rows and about as many weight rows are in flight at once: the least traffic for 132 to 160 tiles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Shape and launch options of one output tile: out weight rows, rows, width of a step over K."""

    out: int
    rows: int
    width: int
    num_warps: int
    num_stages: int
    flat: bool = True
    """Loads of a program's next tile start before this one's store: overlaps the two, wants more registers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductPlan:
    """How a product runs.

    form: "dense", "fp8" or "fp4", how the kernel reads the weight. scaled: codes and scales go to the matrix unit. reads_seen:
    the input is the quantised form.
    """

    form: str
    scaled: bool
    reads_seen: bool
    tile: Tile


# AOT with triton 3.9 and 3.6, all without spills: see kernels/README.md. 128 x 256 is the largest tile that fits the registers;
# K steps of 64 bfloat16 or 128 codes are 128 bytes, one swizzle row of shared memory. Scaled: four warps, because only then the
# 512 scale bytes of 128 rows are an asynchronous load and the products run one behind the other; two accumulators of 256 columns
# don't fit the tensor memory, so 128 x 256 is not flat, and short sums, whose store weighs more, take 128 x 128, which is; so do
# pairs and fp4, which spill a little at 128 x 256 with triton 3.6.
_DENSE = Tile(out=128, rows=256, width=64, num_warps=8, num_stages=3)
_DECODED = Tile(out=128, rows=256, width=64, num_warps=8, num_stages=3)
_SCALED = Tile(out=128, rows=256, width=128, num_warps=4, num_stages=4, flat=False)
_SCALED_SHORT = Tile(out=128, rows=128, width=128, num_warps=4, num_stages=4)
_SHORT_WIDTH = 2048
# Narrow weights (weights_proj: 32 rows) get the smallest tile wgmma has.
_NARROW = Tile(out=64, rows=256, width=64, num_warps=4, num_stages=3)
# Few rows, 1.3 GB of weight: the memory is the bound, so small row tiles and 160 KB of loads in flight.
_LOGITS = Tile(out=128, rows=32, width=128, num_warps=4, num_stages=4)


_LOGITS_PLAN = ProductPlan(form="dense", scaled=False, reads_seen=False, tile=_LOGITS)


def plan_product(form: str, num_out: int, width: int, chip: Chip, *, is_pair: bool = False) -> ProductPlan:
    """Pure: how a product with a weight [num_out, width] runs; depends on the weight, never on the rows.

    form: "dense", "expanded", "fp8" or "fp4".
    """
    scaled = form in ("fp8", "fp4") and chip is Chip.SM_100
    if scaled:
        tile = _SCALED if form == "fp8" and width > _SHORT_WIDTH and not is_pair else _SCALED_SHORT
    elif num_out <= _NARROW.out:
        tile = _NARROW
    else:
        tile = _DECODED if form in ("fp8", "fp4") else _DENSE
    return ProductPlan(
        form="dense" if form == "expanded" else form, scaled=scaled, reads_seen=form != "dense", tile=tile
    )


@triton.jit
def _store_rows(out_ptr, acc, first_row, first_out, num_rows, num_out):  # type: ignore[no-untyped-def]
    """Rounds acc [rows, out] to the output's dtype and writes what lies inside [num_rows, num_out]."""
    row_M = first_row + tl.arange(0, acc.shape[0])
    out_O = first_out + tl.arange(0, acc.shape[1])
    mask = (row_M < num_rows)[:, None] & (out_O < num_out)[None, :]
    where = row_M.to(tl.int64)[:, None] * num_out + out_O[None, :]
    tl.store(out_ptr + where, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _matmul_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    x_scale_ptr,
    first_ptr,
    first_scale_ptr,
    first_out_ptr,
    second_ptr,
    second_scale_ptr,
    second_out_ptr,
    num_rows,
    num_first,
    num_second,
    width,
    stride_x_n,
    FORMAT: tl.constexpr,
    SCALED: tl.constexpr,
    PAIR: tl.constexpr,
    EVEN: tl.constexpr,
    FLAT: tl.constexpr,
    GROUP: tl.constexpr,
    OUT: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row_tiles = tl.cdiv(num_rows, ROWS)
    first_tiles = tl.cdiv(num_first, OUT)
    out_tiles = first_tiles
    if PAIR:
        out_tiles += tl.cdiv(num_second, OUT)
    for index in tl.range(tl.program_id(0), row_tiles * out_tiles, tl.num_programs(0), flatten=FLAT):
        row_tile, out_tile = tile_of(index, row_tiles, out_tiles, GROUP)
        w_ptr, w_scale_ptr, out_ptr, num_out = first_ptr, first_scale_ptr, first_out_ptr, num_first
        if PAIR:
            is_second = out_tile >= first_tiles
            w_ptr = tl.where(is_second, second_ptr, first_ptr)
            w_scale_ptr = tl.where(is_second, second_scale_ptr, first_scale_ptr)
            out_ptr = tl.where(is_second, second_out_ptr, first_out_ptr)
            num_out = tl.where(is_second, num_second, num_first)
            out_tile -= tl.where(is_second, first_tiles, 0)
        first_row, first_out = row_tile * ROWS, out_tile * OUT
        acc = tile_product(
            x_ptr,
            x_scale_ptr,
            first_row,
            num_rows,
            stride_x_n,
            w_ptr,
            w_scale_ptr,
            first_out,
            num_out,
            width,
            FORMAT=FORMAT,
            SCALED=SCALED,
            ROWS_LEFT=False,
            EVEN=EVEN,
            OUT=OUT,
            ROWS=ROWS,
            WIDTH=WIDTH,
        )
        first, second = row_halves(acc)
        _store_rows(out_ptr, first, first_row, first_out, num_rows, num_out)
        _store_rows(out_ptr, second, first_row + ROWS // 2, first_out, num_rows, num_out)


def linear(
    x: Rows, weight: Weight | ExpandedWeight, *, numerics: Numerics, wide_output: bool = False, chip: Chip
) -> Tensor:
    """Same contract as ref.linear; rows of x may be strided. float32 dense weights are rounded to bfloat16 in the load."""
    plan = plan_product(_form_of(weight), weight.data.shape[0], x.plain.shape[1], chip)
    data, scales = _operand(x, plan, numerics=numerics, chip=chip)
    return _launch(data, scales, (weight,), plan, wide_output=wide_output)[0]


def linear_pair(
    x: Rows,
    first: Weight | ExpandedWeight,
    second: Weight | ExpandedWeight,
    *,
    numerics: Numerics,
    wide_output: bool = False,
    chip: Chip,
) -> tuple[Tensor, Tensor]:
    """Same contract as ref.linear_pair.

    Raises:
        ValueError: weights of two formats or widths.
    """
    if type(first) is not type(second) or first.data.dtype != second.data.dtype:
        raise ValueError(f"a pair of {type(first).__name__} and {type(second).__name__}: expected one format")
    num_out = max(len(first.data), len(second.data))
    plan = plan_product(_form_of(first), num_out, x.plain.shape[1], chip, is_pair=True)
    data, scales = _operand(x, plan, numerics=numerics, chip=chip)
    outputs = _launch(data, scales, (first, second), plan, wide_output=wide_output)
    return outputs[0], outputs[1]


def lm_head(h_ND: Tensor, weight: DenseWeight, *, numerics: Numerics) -> Tensor:  # noqa: ARG001 - one Numerics only
    """Same contract as ref.lm_head, bfloat16 operands."""
    return _launch(h_ND, None, (weight,), _LOGITS_PLAN, wide_output=True)[0]


def _form_of(weight: Weight | ExpandedWeight) -> str:
    match weight:
        case DenseWeight():
            return "dense"
        case ExpandedWeight():
            return "expanded"
        case Fp8Weight():
            return "fp8"
        case Fp4Weight():
            return "fp4"


def _operand(x: Rows, plan: ProductPlan, *, numerics: Numerics, chip: Chip) -> tuple[Tensor, Tensor | None]:
    """What the product reads of x: (plain, None), (bfloat16 values, None) or (e4m3 codes, scales)."""
    if not plan.reads_seen:
        return x.plain, None
    rows = x if x.seen is not None else quantise_rows(x.plain, numerics=numerics, chip=chip)
    if rows.seen is None or (rows.scales is not None) != plan.scaled:
        raise ValueError(
            f"rows hold {'codes' if rows.scales is not None else 'values'}, a {plan.form} product on {chip.name} reads "
            f"{'codes' if plan.scaled else 'values'}"
        )
    return (rows.seen.view(torch.float8_e4m3fn) if plan.scaled else rows.seen), rows.scales


def _launch(
    x: Tensor,
    x_scales: Tensor | None,
    weights: tuple[Weight | ExpandedWeight, ...],
    plan: ProductPlan,
    *,
    wide_output: bool,
) -> list[Tensor]:
    """One product per weight, in one launch."""
    num_rows, width = x.shape
    for weight in weights:
        _check_operands(x, weight)
    dtype = torch.float32 if wide_output else torch.bfloat16
    outs = [torch.empty(num_rows, len(weight.data), dtype=dtype, device=x.device) for weight in weights]
    if num_rows == 0:
        return outs
    tile = plan.tile
    first, second = weights[0], weights[-1]
    num_tiles = triton.cdiv(num_rows, tile.rows) * sum(triton.cdiv(len(weight.data), tile.out) for weight in weights)
    _matmul_kernel[(persistent_programs(x.device, num_tiles),)](
        x,
        x if x_scales is None else x_scales,
        first.data,
        _scale_of(first),
        outs[0],
        second.data,
        _scale_of(second),
        outs[-1],
        num_rows,
        len(first.data),
        len(second.data),
        width,
        x.stride(0),
        **_constexprs(plan, width, is_pair=len(weights) == 2),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return outs


def _constexprs(plan: ProductPlan, width: int, *, is_pair: bool) -> dict[str, Any]:
    tile = plan.tile
    return {
        "FORMAT": plan.form,
        "SCALED": plan.scaled,
        "PAIR": is_pair,
        "EVEN": width % tile.width == 0,
        "FLAT": tile.flat,
        "GROUP": _GROUP_ROW_TILES,
        "OUT": tile.out,
        "ROWS": tile.rows,
        "WIDTH": tile.width,
    }


def _scale_of(weight: Weight | ExpandedWeight) -> Tensor:
    """Scales, or for a dense weight any tensor: the kernel does not read it."""
    return weight.scale if isinstance(weight, Fp8Weight | Fp4Weight) else weight.data


def _check_operands(x: Tensor, weight: Weight | ExpandedWeight) -> None:
    width = weight.data.shape[1] * (2 if isinstance(weight, Fp4Weight) else 1)
    scale = weight.scale if isinstance(weight, Fp8Weight | Fp4Weight) else weight.data
    if x.shape[1] != width or x.stride(1) != 1 or not weight.data.is_contiguous() or not scale.is_contiguous():
        raise ValueError(
            f"x {tuple(x.shape)} with strides {x.stride()}, {type(weight).__name__} [out, {width}] with strides "
            f"{weight.data.stride()}: expected one width, contiguous rows of x and a contiguous weight"
        )


_CASE_ROWS = 32768
_DENSE_CASES = {"wk": (32768, 512, 128), "weights_proj": (32768, 5120, 32), "compressor wkv": (32768, 5120, 512)}
_FP8_CASES = {
    "wq_b": (32768, 1280, 32768),
    "index wq_b": (32768, 1280, 4096),
    "wo_b": (32768, 8192, 5120),
    "engram wkv": (32768, 6144, 25600),
    "main_proj": (140, 15360, 5120),
}


def aot_cases(chip: Chip) -> tuple[AotCase, ...]:
    """Products of the released model at a 32,768-row chunk; on sm_90 the fp8 ones also with expanded weights."""
    cases = [_case("linear", f"linear {name}", chip, "dense", *sizes) for name, sizes in _DENSE_CASES.items()]
    cases += [_case("linear", f"linear {name}", chip, "fp8", *sizes) for name, sizes in _FP8_CASES.items()]
    cases.append(_case("linear_pair", "linear_pair wq_a, wkv", chip, "fp8", _CASE_ROWS, 5120, 1280, 512))
    compressor = (_CASE_ROWS, 5120, 512, 512)
    cases.append(_case("linear_pair", "linear_pair compressor wkv, wgate", chip, "dense", *compressor, out="*fp32"))
    if chip is Chip.SM_90:
        expanded = {name: sizes for name, sizes in _FP8_CASES.items() if name != "main_proj"}
        cases += [
            _case("linear", f"linear {name}, expanded", chip, "expanded", *sizes) for name, sizes in expanded.items()
        ]
        pair = (_CASE_ROWS, 5120, 1280, 512)
        cases.append(_case("linear_pair", "linear_pair wq_a, wkv, expanded", chip, "expanded", *pair))
    cases.append(_case("lm_head", "lm_head", chip, "logits", 64, 5120, 129280, out="*fp32"))
    return tuple(cases)


def _case(
    op: str, name: str, chip: Chip, form: str, num_rows: int, width: int, *num_outs: int, out: str = "*bf16"
) -> AotCase:
    is_pair = len(num_outs) == 2
    plan = _LOGITS_PLAN if form == "logits" else plan_product(form, max(num_outs), width, chip, is_pair=is_pair)
    x, weight = "*fp8e4nv" if plan.scaled else "*bf16", "*fp8e4nv" if plan.form == "fp8" else "*bf16"
    types = {"x_ptr": x, "x_scale_ptr": "*u8" if plan.scaled else x}
    for which in ("first", "second"):
        types |= {f"{which}_ptr": weight, f"{which}_scale_ptr": "*u8" if plan.form == "fp8" else weight}
        types |= {f"{which}_out_ptr": out}
    constexprs = _constexprs(plan, width, is_pair=is_pair)
    signature = {
        argument: "constexpr" if argument in constexprs else types.get(argument, "i32")
        for argument in _matmul_kernel.arg_names
    }
    num_out = sum(num_outs)
    row_bytes = width * (1 + 1 / 32 if plan.scaled else 2)
    weight_bytes = width * (1 + 1 / 1024 if plan.form == "fp8" else 2)
    tiles = triton.cdiv(num_rows, plan.tile.rows) * sum(triton.cdiv(number, plan.tile.out) for number in num_outs)
    return AotCase(
        op=op,
        name=name,
        shape=f"{num_rows} x {width} -> {' + '.join(map(str, num_outs))}",
        kernel=_matmul_kernel,
        signature=signature,
        constexprs=constexprs,
        aligned=tuple(argument for argument in signature if argument not in constexprs and argument != "num_rows"),
        num_warps=plan.tile.num_warps,
        num_stages=plan.tile.num_stages,
        mma=Mma.BLOCK_SCALED if plan.scaled else Mma.BF16,
        num_programs=min(tiles, MULTIPROCESSORS[chip]),
        bytes_moved=int(
            num_rows * row_bytes + num_out * weight_bytes + num_rows * num_out * (4 if out == "*fp32" else 2)
        ),
        flops=2 * num_rows * width * num_out,
    )
