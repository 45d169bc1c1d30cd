"""rms_norm, norm_rows and quantise_rows: rows as the next products read them, each in one pass (model.md 0.3, 3.1).

Called by the model through Ops and by `linear` for rows that no kernel has quantised yet. Traffic: each row read once, its plain
and its quantised form written once; bound: memory. Profile R; against `ref` the norm differs in the order of one sum (a fixed one
per width), the quantiser in nothing. The trap: the quantiser sees the norm after its rounding to bfloat16.
"""

# N rows, D width; G groups of 32 channels
from typing import Any

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from prefill_kernels.aot_case import AotCase, Mma
from prefill_kernels.gpu.chip import Chip
from prefill_kernels.gpu.seen_rows import GROUP, empty_seen, store_seen
from prefill_kernels.numerics import Numerics
from prefill_kernels.ops import Rows

# AOT: 32 values of a row per thread, 0 spills on both chips.
_WARPS = 4
_NORM_ELEMENTS = 4096
"""Elements of a program: as many rows as fit, at least one, of the width rounded up to a power of two."""
_QUANTISE_GROUPS = 128


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _norm_rows_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    weight_ptr,
    plain_ptr,
    seen_ptr,
    scale_ptr,
    num_rows,
    width,
    stride_x_n,
    eps,
    QUANTISE: tl.constexpr,
    CODES: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col_C = tl.arange(0, WIDTH)
    mask = (row_R < num_rows)[:, None] & (col_C < width)[None, :]
    x = tl.load(x_ptr + row_R.to(tl.int64)[:, None] * stride_x_n + col_C[None, :], mask=mask, other=0).to(tl.float32)
    weight = tl.load(weight_ptr + col_C, mask=col_C < width, other=0).to(tl.float32)
    mean = tl.div_rn(tl.sum(x * x, axis=1), width.to(tl.float32))
    scale = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
    plain = (x * scale[:, None] * weight[None, :]).to(plain_ptr.dtype.element_ty)
    tl.store(plain_ptr + row_R.to(tl.int64)[:, None] * width + col_C[None, :], plain, mask=mask)
    if QUANTISE:
        group_G = tl.arange(0, WIDTH // 32)
        store_seen(seen_ptr, scale_ptr, plain.to(tl.float32), row_R, num_rows, col_C, group_G, width, width, CODES)


@triton.jit(do_not_specialize=["num_groups"])  # type: ignore[untyped-decorator]
def _quantise_rows_kernel(  # type: ignore[no-untyped-def]
    x_ptr, seen_ptr, scale_ptr, num_groups, groups_per_row, stride_x_n, CODES: tl.constexpr, GROUPS: tl.constexpr
):
    """Rows of the tile are groups: each is a row of 32 channels with one scale."""
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    channel = tl.arange(0, 32)
    start = group // groups_per_row * stride_x_n + group % groups_per_row * 32
    mask = (group < num_groups)[:, None] & (channel < 32)[None, :]
    y = tl.load(x_ptr + start[:, None] + channel[None, :], mask=mask, other=0).to(tl.float32)
    store_seen(seen_ptr, scale_ptr, y, group, num_groups, channel, tl.arange(0, 1), 32, 32, CODES)


def rms_norm(x_ND: Tensor, weight_D: Tensor, *, eps: float) -> Tensor:
    """Same contract as ref.rms_norm."""
    x = x_ND.reshape(-1, x_ND.shape[-1])
    plain = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch_norm(x, weight_D, plain, None, None, eps=eps)
    return plain.view(x_ND.shape)


def norm_rows(x_ND: Tensor, weight_D: Tensor, *, eps: float, numerics: Numerics, chip: Chip) -> Rows:  # noqa: ARG001
    """rms_norm with the quantised form as products on `chip` read it; x [N, D] bfloat16, D a multiple of 32."""
    plain = torch.empty(x_ND.shape, dtype=x_ND.dtype, device=x_ND.device)
    seen, scales = empty_seen(*x_ND.shape, device=x_ND.device, chip=chip)
    _launch_norm(x_ND, weight_D, plain, seen, scales, eps=eps)
    return Rows(plain=plain, seen=seen, scales=scales)


def quantise_rows(x_ND: Tensor, *, numerics: Numerics, chip: Chip) -> Rows:  # noqa: ARG001 - one Numerics only
    """x [N, D] bfloat16, rows contiguous, D a multiple of 32, with its quantised form; sm_90: values, sm_100: codes."""
    seen, scales = empty_seen(*x_ND.shape, device=x_ND.device, chip=chip)
    if x_ND.stride(1) != 1:
        raise ValueError(f"x with strides {x_ND.stride()}: expected contiguous rows")
    groups_per_row = x_ND.shape[1] // GROUP
    num_groups = x_ND.shape[0] * groups_per_row
    if num_groups:
        _quantise_rows_kernel[(triton.cdiv(num_groups, _QUANTISE_GROUPS),)](
            x_ND,
            seen,
            seen if scales is None else scales,
            num_groups,
            groups_per_row,
            x_ND.stride(0),
            CODES=scales is not None,
            GROUPS=_QUANTISE_GROUPS,
            num_warps=_WARPS,
        )
    return Rows(plain=x_ND, seen=seen, scales=scales)


def _launch_norm(
    x: Tensor, weight: Tensor, plain: Tensor, seen: Tensor | None, scales: Tensor | None, *, eps: float
) -> None:
    num_rows, width = x.shape
    if weight.shape != (width,) or x.stride(1) != 1:
        raise ValueError(
            f"x {tuple(x.shape)} with strides {x.stride()}, weight {tuple(weight.shape)}: expected contiguous rows and one "
            "weight per channel"
        )
    if num_rows == 0:
        return
    block_width = triton.next_power_of_2(width)
    rows = _rows_per_program(block_width)
    _norm_rows_kernel[(triton.cdiv(num_rows, rows),)](
        x,
        weight,
        plain,
        plain if seen is None else seen,
        plain if scales is None else scales,
        num_rows,
        width,
        x.stride(0),
        eps,
        QUANTISE=seen is not None,
        CODES=scales is not None,
        ROWS=rows,
        WIDTH=block_width,
        num_warps=_WARPS,
        # As ref: squares are rounded before their sum.
        enable_fp_fusion=False,
    )


def _rows_per_program(block_width: int) -> int:
    """A power of two."""
    return max(1, _NORM_ELEMENTS // block_width)


def aot_cases(chip: Chip) -> tuple[AotCase, ...]:
    """The q norm and the norm of the decoder's latents, and the widest rows that are quantised alone, 32,768 of each; the norm
    before the draft's keys; the norms of a full batch of the vision tower."""
    return (
        _norm_case("norm_rows", "norm_rows q_norm", 1280, chip),
        _norm_case("norm_rows", "norm_rows draft", 5120, chip, num_rows=140),
        _norm_case("rms_norm", "rms_norm latent", 512, chip),
        _norm_case("rms_norm", "rms_norm vision", 1024, chip, num_rows=16384),
        _quantise_case(15360, chip),
    )


def _norm_case(op: str, name: str, width: int, chip: Chip, *, num_rows: int = 32768) -> AotCase:
    quantise, codes = op == "norm_rows", op == "norm_rows" and chip is Chip.SM_100
    block_width = triton.next_power_of_2(width)
    rows = _rows_per_program(block_width)
    constexprs = {"QUANTISE": quantise, "CODES": codes, "ROWS": rows, "WIDTH": block_width}
    types = {"x_ptr": "*bf16", "weight_ptr": "*bf16", "plain_ptr": "*bf16", "eps": "fp32"}
    types |= dict.fromkeys(("seen_ptr", "scale_ptr"), "*u8" if codes else "*bf16")
    return _memory_case(
        (op, name, f"{num_rows} x {width}"),
        _norm_rows_kernel,
        types,
        constexprs,
        num_programs=triton.cdiv(num_rows, rows),
        bytes_moved=num_rows * width * 4 + (_seen_bytes(num_rows * width, chip) if quantise else 0),
        enable_fp_fusion=False,
    )


def _quantise_case(width: int, chip: Chip) -> AotCase:
    num_rows = 32768
    codes = chip is Chip.SM_100
    seen = "*u8" if codes else "*bf16"
    return _memory_case(
        ("quantise_rows", "quantise_rows", f"{num_rows} x {width}"),
        _quantise_rows_kernel,
        {"x_ptr": "*bf16", "seen_ptr": seen, "scale_ptr": seen},
        {"CODES": codes, "GROUPS": _QUANTISE_GROUPS},
        num_programs=triton.cdiv(num_rows * width // GROUP, _QUANTISE_GROUPS),
        bytes_moved=num_rows * width * 2 + _seen_bytes(num_rows * width, chip),
        enable_fp_fusion=True,
    )


_UNALIGNED = ("num_rows", "num_groups", "groups_per_row", "eps")


def _memory_case(
    title: tuple[str, str, str],
    kernel: Any,
    types: dict[str, str],
    constexprs: dict[str, Any],
    *,
    num_programs: int,
    bytes_moved: int,
    enable_fp_fusion: bool,
) -> AotCase:
    op, name, shape = title
    signature = {a: "constexpr" if a in constexprs else types.get(a, "i32") for a in kernel.arg_names}
    return AotCase(
        op=op,
        name=name,
        shape=shape,
        kernel=kernel,
        signature=signature,
        constexprs=constexprs,
        aligned=tuple(a for a in signature if a not in constexprs and a not in _UNALIGNED),
        num_warps=_WARPS,
        num_stages=3,
        mma=Mma.NONE,
        num_programs=num_programs,
        bytes_moved=bytes_moved,
        flops=0,
        enable_fp_fusion=enable_fp_fusion,
    )


def _seen_bytes(num_values: int, chip: Chip) -> int:
    return num_values + num_values // GROUP if chip is Chip.SM_100 else num_values * 2
