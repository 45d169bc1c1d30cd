"""Hyper-connections (model.md 2.2): from one sub-layer to the next in one launch, and the two ends that no turn covers.

mhc_turn, profile R. A program owns 32 rows and walks over their columns twice. Walk 1 reads output and streams, writes the new
streams, multiplies them with the mix matrix and leaves the collapsed row where the normed one will stand; walk 2 reads it back
(from L2: the same program has just written it; 32 rows x 10 KB x 2 programs on 132 SMs are 86 MB at most, half of it fits), norms
and quantises. Then the 24 mixes with Sinkhorn, in registers. Traffic per row, D = 5120: 51 KB read, 51 KB plus the quantised form
written; bound: memory. The mix matrix (2 MB) comes from L2 once per program, which is why a program has no fewer rows.

Against `ref`: new streams and collapse bitwise; the norm in the order of one sum (a bfloat16 step in one of 10^4 values); mixes
fp32-accurate (relative 2e-6): exact products, sums within 64 columns in the matrix unit, across them in float32 in order. The
matrix instruction is mma.sync on both chips: 32 rows leave room for two programs per SM, and wgmma or tcgen05 need 64 rows.
"""

# N rows, S = 4 streams, D hidden; R rows and C columns of a tile
from dataclasses import dataclass
from typing import Any

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from prefill_kernels.aot_case import AotCase, Mma
from prefill_kernels.gpu.chip import Chip
from prefill_kernels.gpu.mhc_tile import collapse_walk, load_streams, new_stream, norm_walk, store_mixes
from prefill_kernels.gpu.seen_rows import empty_seen
from prefill_kernels.numerics import Numerics
from prefill_kernels.ops import MhcMixes, MhcOutput, MhcTurn, Rows
from prefill_kernels.weights import MhcWeights

_STREAMS = 4
_MIXES = 24
_TILE = {"R": 32, "C": 64}
_WARPS = 8
# AOT, triton 3.9: 128 registers on sm_90, 126 on sm_100 when told (146 otherwise), so two programs of 8 warps fit an SM. 64 rows
# (wgmma, 238 registers) or 16 warps (128, one program) leave nothing that runs while a program waits at its barriers.
_MAX_REGISTERS = {Chip.SM_90: None, Chip.SM_100: 128}
_PLAIN_TILE = {"R": 8, "C": 256}
_PLAIN_WARPS = 4


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _mhc_turn_kernel(  # type: ignore[no-untyped-def]
    streams_ptr,
    y_ptr,
    post_ptr,
    comb_ptr,
    pre_ptr,
    norm_ptr,
    fn_ptr,
    base_ptr,
    scale_ptr,
    new_streams_ptr,
    plain_ptr,
    seen_ptr,
    seen_scale_ptr,
    new_pre_ptr,
    new_post_ptr,
    new_comb_ptr,
    num_rows,
    num_iters,
    hc_eps,
    rms_eps,
    D: tl.constexpr,
    HAS_OUTPUT: tl.constexpr,
    HAS_MIXES: tl.constexpr,
    CODES: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * R
    rows_left = (num_rows - first).to(tl.int32)
    row_R = tl.arange(0, R)
    plain_ptr += first * D
    squares_x, squares_z, product = collapse_walk(
        streams_ptr + first * (4 * D),
        y_ptr + first * D,
        post_ptr + first * 4,
        comb_ptr + first * 16,
        pre_ptr + first * 4,
        fn_ptr,
        new_streams_ptr + first * (4 * D),
        plain_ptr,
        row_R,
        row_R < rows_left,
        D,
        HAS_OUTPUT,
        HAS_MIXES,
        R,
        C,
    )
    # Walk 2 reads what other threads of this program wrote.
    tl.debug_barrier()
    seen_ptr += first * D
    seen_scale_ptr += first * (D // 32)
    norm_walk(plain_ptr, norm_ptr, seen_ptr, seen_scale_ptr, squares_x, row_R, rows_left, rms_eps, D, CODES, C)
    if HAS_MIXES:
        mix = tl.arange(0, 32)
        base = tl.load(base_ptr + mix, mask=mix < 24, other=0)
        scale = tl.load(scale_ptr + tl.minimum(mix // 4, 2))
        inverse = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(squares_z, 4.0 * D) + rms_eps))
        logits = product * inverse[:, None] * scale[None, :] + base[None, :]
        new_pre_ptr += first * 4
        new_post_ptr += first * 4
        store_mixes(logits, new_pre_ptr, new_post_ptr, new_comb_ptr + first * 16, rows_left, num_iters, hc_eps, R)


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _mhc_expand_kernel(  # type: ignore[no-untyped-def]
    streams_ptr,
    y_ptr,
    post_ptr,
    comb_ptr,
    new_streams_ptr,
    num_rows,
    D: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * R
    row_R = tl.arange(0, R)
    row_ok_R = row_R < num_rows - first
    col_C = tl.program_id(1) * C + tl.arange(0, C)
    mask = row_ok_R[:, None] & (col_C < D)[None, :]
    x0, x1, x2, x3 = load_streams(streams_ptr + first * (4 * D), row_R, col_C, mask, D)
    y = tl.load(y_ptr + first * D + row_R[:, None] * D + col_C[None, :], mask=mask, other=0)
    new_ptr = new_streams_ptr + first * (4 * D)
    for s in tl.static_range(4):
        z = new_stream(s, x0, x1, x2, x3, y, post_ptr + first * 4, comb_ptr + first * 16, row_R, row_ok_R)
        tl.store(new_ptr + row_R[:, None] * (4 * D) + (s * D + col_C)[None, :], z, mask=mask)


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _mhc_mean_kernel(streams_ptr, mean_ptr, num_rows, D: tl.constexpr, R: tl.constexpr, C: tl.constexpr):  # type: ignore[no-untyped-def]
    first = tl.program_id(0).to(tl.int64) * R
    row_R = tl.arange(0, R)
    col_C = tl.program_id(1) * C + tl.arange(0, C)
    mask = (row_R < num_rows - first)[:, None] & (col_C < D)[None, :]
    x0, x1, x2, x3 = load_streams(streams_ptr + first * (4 * D), row_R, col_C, mask, D)
    total = ((x0.to(tl.float32) + x1.to(tl.float32)) + x2.to(tl.float32)) + x3.to(tl.float32)
    mean = (total * 0.25).to(tl.bfloat16)
    tl.store(mean_ptr + first * D + row_R[:, None] * D + col_C[None, :], mean, mask=mask)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mixing:
    """What mhc_turn does beyond mhc_input: the new streams and mixes it writes, and what the mixes are made with."""

    streams: Tensor
    mixes: MhcMixes
    weights: MhcWeights
    num_iters: int
    hc_eps: float


def mhc_turn(
    streams_NSD: Tensor,
    pre_NS: Tensor,
    norm_weight_D: Tensor,
    *,
    output: MhcOutput | None,
    weights: MhcWeights,
    num_iters: int,
    hc_eps: float,
    rms_eps: float,
    numerics: Numerics,  # noqa: ARG001 - one Numerics only
    chip: Chip,
) -> MhcTurn:
    """Same contract as ref.mhc_turn: four streams, bfloat16, contiguous; D a multiple of 32. Without output the streams come
    back as they are, the same tensor."""
    num_rows, num_streams, hidden = streams_NSD.shape
    if weights.fn.shape != (_MIXES, _STREAMS * hidden):
        raise ValueError(f"fn is {tuple(weights.fn.shape)}: expected {(_MIXES, _STREAMS * hidden)}")
    mixing = _Mixing(
        streams=streams_NSD if output is None else torch.empty_like(streams_NSD),
        mixes=_empty_mixes(num_rows, num_streams, device=streams_NSD.device),
        weights=weights,
        num_iters=num_iters,
        hc_eps=hc_eps,
    )
    rows = _turn(streams_NSD, pre_NS, norm_weight_D, output=output, mixing=mixing, rms_eps=rms_eps, chip=chip)
    return MhcTurn(streams=mixing.streams, rows=rows, mixes=mixing.mixes)


def mhc_input(
    streams_NSD: Tensor,
    pre_NS: Tensor,
    norm_weight_D: Tensor,
    *,
    output: MhcOutput | None,
    rms_eps: float,
    numerics: Numerics,  # noqa: ARG001 - one Numerics only
    chip: Chip,
) -> Rows:
    """Same contract as ref.mhc_input: mhc_turn without its writes of streams and mixes."""
    return _turn(streams_NSD, pre_NS, norm_weight_D, output=output, mixing=None, rms_eps=rms_eps, chip=chip)


def mhc_expand(output: MhcOutput, streams_NSD: Tensor) -> Tensor:
    """Same contract as ref.mhc_expand."""
    _check(streams_NSD, output.y, output.post, output.comb)
    new_NSD = torch.empty_like(streams_NSD)
    num_rows, _, hidden = streams_NSD.shape
    if num_rows:
        _mhc_expand_kernel[_plain_grid(num_rows, hidden)](
            streams_NSD,
            output.y,
            output.post,
            output.comb,
            new_NSD,
            num_rows,
            D=hidden,
            **_PLAIN_TILE,
            num_warps=_PLAIN_WARPS,
            enable_fp_fusion=False,
        )
    return new_NSD


def mhc_mean(streams_NSD: Tensor) -> Tensor:
    """Same contract as ref.mhc_mean."""
    _check(streams_NSD)
    num_rows, _, hidden = streams_NSD.shape
    mean_ND = torch.empty(num_rows, hidden, dtype=streams_NSD.dtype, device=streams_NSD.device)
    if num_rows:
        _mhc_mean_kernel[_plain_grid(num_rows, hidden)](
            streams_NSD, mean_ND, num_rows, D=hidden, **_PLAIN_TILE, num_warps=_PLAIN_WARPS
        )
    return mean_ND


def _turn(
    streams: Tensor,
    pre: Tensor,
    norm_weight: Tensor,
    *,
    output: MhcOutput | None,
    mixing: _Mixing | None,
    rms_eps: float,
    chip: Chip,
) -> Rows:
    """One launch; absent inputs and outputs are named by a tensor that the kernel then leaves alone."""
    inputs = (output.y, output.post, output.comb) if output is not None else (streams, pre, pre)
    _check(streams, pre, *inputs)
    num_rows, _, hidden = streams.shape
    plain = torch.empty(num_rows, hidden, dtype=streams.dtype, device=streams.device)
    seen, scales = empty_seen(num_rows, hidden, device=streams.device, chip=chip)
    rows = Rows(plain=plain, seen=seen, scales=scales)
    if num_rows == 0:
        return rows
    matrix, new = (pre, pre, pre), (pre, pre, pre)
    if mixing is not None:
        matrix = (mixing.weights.fn, mixing.weights.base, mixing.weights.scale)
        new = (mixing.mixes.pre, mixing.mixes.post, mixing.mixes.comb)
    _mhc_turn_kernel[(triton.cdiv(num_rows, _TILE["R"]),)](
        streams,
        *inputs,
        pre,
        norm_weight,
        *matrix,
        streams if mixing is None else mixing.streams,
        plain,
        seen,
        plain if scales is None else scales,
        *new,
        num_rows,
        0 if mixing is None else mixing.num_iters,
        0.0 if mixing is None else mixing.hc_eps,
        rms_eps,
        D=hidden,
        HAS_OUTPUT=output is not None,
        HAS_MIXES=mixing is not None,
        CODES=scales is not None,
        **_TILE,
        num_warps=_WARPS,
        num_stages=1,
        maxnreg=_MAX_REGISTERS[chip],
        enable_fp_fusion=False,
    )
    return rows


def _empty_mixes(num_rows: int, num_streams: int, *, device: torch.device) -> MhcMixes:
    def wide(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=device)

    return MhcMixes(
        pre=wide(num_rows, num_streams),
        post=wide(num_rows, num_streams),
        comb=wide(num_rows, num_streams, num_streams),
    )


def _check(streams: Tensor, *others: Tensor) -> None:
    is_contiguous = all(x.is_contiguous() for x in (streams, *others))
    if streams.shape[1] != _STREAMS or streams.dtype != torch.bfloat16 or not is_contiguous:
        raise ValueError(
            f"streams {tuple(streams.shape)} {streams.dtype}: expected [rows, {_STREAMS}, hidden] bfloat16, and all inputs "
            "contiguous"
        )


def _plain_grid(num_rows: int, hidden: int) -> tuple[int, int]:
    return triton.cdiv(num_rows, _PLAIN_TILE["R"]), triton.cdiv(hidden, _PLAIN_TILE["C"])


def aot_cases(chip: Chip) -> tuple[AotCase, ...]:
    """A chunk of 32,768 rows; mhc_input and mhc_mean: the 140 rows of a replay."""
    return (
        _turn_case(chip, "mhc_turn", 32768, has_output=True, has_mixes=True),
        _turn_case(chip, "mhc_turn first", 32768, has_output=False, has_mixes=True),
        _turn_case(chip, "mhc_input", 140, has_output=True, has_mixes=False),
        _plain_case("mhc_expand", _mhc_expand_kernel, 32768, row_bytes=18 * 5120 + 80, flops=36),
        _plain_case("mhc_mean", _mhc_mean_kernel, 140, row_bytes=10 * 5120, flops=4),
    )


_TYPES = {"fn": "*fp32", "base": "*fp32", "scale": "*fp32", "seen_scale": "*u8", "num_rows": "i32", "num_iters": "i32"}
_BFLOAT16 = ("streams", "y", "norm", "new_streams", "plain", "seen", "mean")
_CONSTEXPRS = ("D", "HAS_OUTPUT", "HAS_MIXES", "CODES", "R", "C")


def _signature(kernel: Any) -> dict[str, str]:
    """Types by argument name; pointers without an entry are float32."""

    def type_of(name: str) -> str:
        stem = name.removesuffix("_ptr")
        if name in _CONSTEXPRS:
            return "constexpr"
        return "*bf16" if stem in _BFLOAT16 else _TYPES.get(stem, "*fp32" if stem != name else "fp32")

    return {name: type_of(name) for name in kernel.arg_names}


def _pointers(signature: dict[str, str]) -> tuple[str, ...]:
    return tuple(name for name, kind in signature.items() if kind.startswith("*"))


def _turn_case(chip: Chip, name: str, num_rows: int, *, has_output: bool, has_mixes: bool) -> AotCase:
    hidden, codes = 5120, chip is Chip.SM_100
    signature = _signature(_mhc_turn_kernel)
    if codes:
        signature["seen_ptr"] = "*u8"
    else:
        signature["seen_scale_ptr"] = "*bf16"
    values = 4 + has_output + 4 * (has_output and has_mixes) + 1
    row_bytes = (
        2 * hidden * values + (hidden * 33 // 32 if codes else 2 * hidden) + 4 * _MIXES * (has_output + has_mixes)
    )
    return AotCase(
        op=name.split()[0],
        name=name,
        shape=f"{num_rows} x 4 x {hidden}",
        kernel=_mhc_turn_kernel,
        signature=signature,
        constexprs={"D": hidden, "HAS_OUTPUT": has_output, "HAS_MIXES": has_mixes, "CODES": codes, **_TILE},
        aligned=_pointers(signature),
        num_warps=_WARPS,
        num_stages=1,
        mma=Mma.SYNC_BF16 if has_mixes else Mma.NONE,
        num_programs=triton.cdiv(num_rows, _TILE["R"]),
        bytes_moved=num_rows * row_bytes + (4 * _MIXES * 4 * hidden if has_mixes else 0),
        flops=num_rows * hidden * ((36 if has_output else 0) + 20 + (8 * _MIXES if has_mixes else 0)),
        enable_fp_fusion=False,
        options={"maxnreg": _MAX_REGISTERS[chip]},
    )


def _plain_case(name: str, kernel: Any, num_rows: int, *, row_bytes: int, flops: int) -> AotCase:
    signature = _signature(kernel)
    rows, columns = _plain_grid(num_rows, 5120)
    return AotCase(
        op=name,
        name=name,
        shape=f"{num_rows} x 4 x 5120",
        kernel=kernel,
        signature=signature,
        constexprs={"D": 5120, **_PLAIN_TILE},
        aligned=_pointers(signature),
        num_warps=_PLAIN_WARPS,
        num_stages=3,
        mma=Mma.NONE,
        num_programs=rows * columns,
        bytes_moved=num_rows * row_bytes,
        flops=num_rows * 5120 * flops,
        enable_fp_fusion=kernel is _mhc_mean_kernel,
    )
