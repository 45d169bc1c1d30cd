"""Routed and shared experts: two grouped products per range of row tiles, SwiGLU and quantiser fused between them.

Rows are grouped by `expert_rows`; a tile is 128 rows of one expert (C24). Launch 1 gathers the rows by index, makes gate and up
side by side and leaves bf(silu(gate) * up * routing weight), quantised, in scratch; launch 2 multiplies by w2 and writes each
row straight to its [row, slot]. Scratch is bounded: tiles go through in ranges of 448 (the pairs of 8,192 rows, perf.md 4.1);
ranges are host integers and change no result. Traffic per pair at D = 5120, inter = 2304: sm_90 10,240 + 2 * 4,608 + 10,240
bytes, sm_100 5,280 + 2 * 2,376 + 10,240, and the weights once per range; bound: matrix unit. The trap: the launches cover the
worst case of tiles; programs of tiles without rows end at once.
"""

from dataclasses import dataclass

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor

from prefill_kernels.aot_case import AotCase, Mma
from prefill_kernels.gpu.chip import Chip
from prefill_kernels.gpu.expanded_weight import ExpandedWeight
from prefill_kernels.gpu.expert_kernels import down_kernel, gate_up_kernel
from prefill_kernels.gpu.expert_rows import TILE_ROWS, ExpertRows, clear_absent_slots, group_rows
from prefill_kernels.gpu.norm_rows import quantise_rows
from prefill_kernels.numerics import Numerics
from prefill_kernels.ops import Routing, Rows
from prefill_kernels.weights import DenseWeight, ExpertWeights, Fp4Weight, Fp8Weight, Weight

RANGE_TILES = 448
"""Tiles per pair of launches: 448 * 128 rows of scratch, 264 MB on sm_90, 136 MB on sm_100."""
# Tiles that run side by side through all column blocks, so that they share weights in L2 and their rows stay there.
_SWIZZLE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What the kernels of one call are compiled for. path: see expert_tiles; quantised: x and the hidden values are."""

    path: str
    format: str
    quantised: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TileConfig:
    """block_n: weight rows of a program (gate and up: half of each); block_k: channels per step."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def _config(form: Form) -> TileConfig:
    """Tile shapes by path and format; figures are AOT's (triton 3.9 and 3.6), no spills anywhere.

    exact, decoded: 128 x 128 at <= 122 registers and <= 104 KiB, so that two programs share an SM and one decodes while the other
        multiplies. 128 x 256 takes 210 registers and is idle while it decodes; steps of 128 channels take 155 on triton 3.6.
    exact, bf16: the plain 128 x 256, 180 to 233 registers.
    block_scaled: 128 x 256, which fills tensor memory: three quarters of the loads per product that 128 x 128 needs.
    promoted: one scale group per step.
    """
    match form.path, form.format:
        case "block_scaled", _:
            return TileConfig(block_n=256, block_k=128, num_warps=8, num_stages=3)
        case "promoted", _:
            return TileConfig(block_n=128, block_k=32, num_warps=8, num_stages=4)
        case _, "bf16":
            return TileConfig(block_n=256, block_k=64, num_warps=8, num_stages=4)
        case _:
            return TileConfig(block_n=128, block_k=64, num_warps=8, num_stages=4)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Matrices:
    """One matrix of all experts as a kernel reads it. stride, scale_stride: from one expert to the next, 0 for a single one."""

    data: Tensor
    scale: Tensor
    stride: int
    scale_stride: int


def routed_experts(
    x: Rows,
    routing: Routing,
    experts: ExpertWeights,
    *,
    first_expert: int,
    swiglu_limit: float,
    numerics: Numerics,
    chip: Chip,
) -> Tensor:
    """Same contract as ref.routed_experts. All three weights Fp4Weight (checkpoint), Fp8Weight, or bfloat16 (Dense, Expanded).

    Raises:
        ValueError: float32 or mixed weights, tensors that are not contiguous, or codes of x for bfloat16 weights.
    """
    num_rows, topk = routing.expert_ids.shape
    num_local = experts.w1.data.shape[0]
    out_NKD = torch.empty((num_rows, topk, x.plain.shape[1]), dtype=torch.bfloat16, device=x.plain.device)
    if out_NKD.numel() == 0:
        return out_NKD
    rows = group_rows(routing.expert_ids, first_expert=first_expert, num_local=num_local)
    clear_absent_slots(out_NKD, routing.expert_ids, first_expert=first_expert, num_local=num_local)
    _swiglu(x, experts, out_NKD, (rows, routing), limit=swiglu_limit, numerics=numerics, chip=chip)
    return out_NKD


def shared_expert(x: Rows, expert: ExpertWeights, *, swiglu_limit: float, numerics: Numerics, chip: Chip) -> Tensor:
    """Same contract as ref.shared_expert. Weights and errors as in routed_experts; a checkpoint has Fp8Weight."""
    out_ND = torch.empty_like(x.plain)
    if out_ND.numel():
        _swiglu(x, expert, out_ND, None, limit=swiglu_limit, numerics=numerics, chip=chip)
    return out_ND


def _swiglu(
    x: Rows,
    experts: ExpertWeights,
    out: Tensor,
    grouped: tuple[ExpertRows, Routing] | None,
    *,
    limit: float,
    numerics: Numerics,
    chip: Chip,
) -> None:
    """Both launches for every range of tiles. out: [N, K, D] or, without grouped rows, [N, D]."""
    format, quantised = _format_of(experts)
    seen, seen_scale, path = _seen(x, format, quantised, numerics=numerics, chip=chip)
    form = Form(path=path, format=format, quantised=quantised)
    num_rows, width = x.plain.shape
    inter = experts.w1.data.shape[-2]
    w1, w3, w2 = (_matrices(weight, form) for weight in (experts.w1, experts.w3, experts.w2))
    if grouped is None:
        num_tiles, topk = triton.cdiv(num_rows, TILE_ROWS), 1
        pairs = tiles = routing_weights = seen
    else:
        rows, routing = grouped
        num_tiles, topk = rows.tiles.shape[0], routing.expert_ids.shape[1]
        pairs, tiles, routing_weights = rows.pairs, rows.tiles, routing.weights
    hidden, hidden_scale = _scratch(min(num_tiles, RANGE_TILES) * TILE_ROWS, inter, seen, form)
    config = _config(form)
    constants = _constants(form, width=width, inter=inter, is_routed=grouped is not None)
    for first_tile in range(0, num_tiles, RANGE_TILES):
        range_tiles = min(RANGE_TILES, num_tiles - first_tile)
        gate_up_kernel[(range_tiles * triton.cdiv(2 * inter, config.block_n),)](
            seen,
            seen_scale,
            pairs,
            tiles,
            routing_weights,
            w1.data,
            w1.scale,
            w3.data,
            w3.scale,
            w1.stride,
            w1.scale_stride,
            hidden,
            hidden_scale,
            first_tile,
            range_tiles,
            num_rows,
            float(limit),
            TOPK=topk,
            QUANTISED=quantised,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            **constants,
        )
        down_kernel[(range_tiles * triton.cdiv(width, config.block_n),)](
            hidden,
            hidden_scale,
            pairs,
            tiles,
            w2.data,
            w2.scale,
            w2.stride,
            w2.scale_stride,
            out,
            first_tile,
            range_tiles,
            num_rows,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            **constants,
        )


def _scratch(num_rows: int, inter: int, seen: Tensor, form: Form) -> tuple[Tensor, Tensor]:
    """(hidden values of a range of tiles in x's format, their scales or a stand-in)."""
    hidden = torch.empty((num_rows, inter), dtype=seen.dtype, device=seen.device)
    if form.path == "exact":
        return hidden, hidden
    return hidden, torch.empty((num_rows, inter // 32), dtype=torch.uint8, device=seen.device)


def _constants(form: Form, *, width: int, inter: int, is_routed: bool) -> dict[str, int | str | bool]:
    config = _config(form)
    return {
        "WIDTH": width,
        "INTER": inter,
        "ROUTED": is_routed,
        "FORMAT": form.format,
        "PATH": form.path,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "SWIZZLE": _SWIZZLE,
    }


def _format_of(experts: ExpertWeights) -> tuple[str, bool]:
    """(format, whether x and the hidden values are quantised) of the three weights."""
    weights: tuple[Weight | ExpandedWeight, ...] = (experts.w1, experts.w3, experts.w2)
    kinds = {type(weight) for weight in weights}
    dtypes = {weight.data.dtype for weight in weights}
    if len(kinds) > 1 or torch.float32 in dtypes or not all(weight.data.is_contiguous() for weight in weights):
        raise ValueError(
            f"expert weights are {sorted(kind.__name__ for kind in kinds)} of {sorted(map(str, dtypes))}: expected contiguous "
            "Fp4Weight, Fp8Weight, or bfloat16 DenseWeight, one kind for w1, w3 and w2"
        )
    match experts.w1:
        case Fp4Weight():
            return "e2m1", True
        case Fp8Weight():
            return "e4m3", True
        case DenseWeight():
            return "bf16", False
        case _:
            return "bf16", True


def _seen(x: Rows, format: str, quantised: bool, *, numerics: Numerics, chip: Chip) -> tuple[Tensor, Tensor, str]:
    """(x as launch 1 reads it, its scales or a stand-in, path)."""
    if not quantised:
        return x.plain, x.plain, "exact"
    rows = x if x.seen is not None else quantise_rows(x.plain, numerics=numerics, chip=chip)
    assert rows.seen is not None
    if rows.scales is None:
        return rows.seen, rows.seen, "exact"
    if format == "bf16":
        raise ValueError("x is e4m3 codes with scales: expected its bfloat16 values for expanded expert weights")
    return rows.seen.view(torch.float8_e4m3fn), rows.scales, "block_scaled" if chip is Chip.SM_100 else "promoted"


def _matrices(weight: Weight | ExpandedWeight, form: Form) -> _Matrices:
    data = weight.data.view(torch.uint16) if form.format == "e4m3" and form.path == "exact" else weight.data
    scale = weight.scale if isinstance(weight, Fp4Weight | Fp8Weight) else data
    is_single = data.dim() == 2
    return _Matrices(
        data=data,
        scale=scale,
        stride=0 if is_single else data.stride(0),
        scale_stride=0 if is_single else scale.stride(0),
    )


# One rank of the released model at EP8, EP4 and EP2, redundant experts among them (perf.md 4.1); the code is the same.
_LOCAL_EXPERTS = (52, 104, 208)
_CHUNK_ROWS, _WIDTH, _INTER, _TOPK = 32768, 5120, 2304, 6
_BYTES_PER_WEIGHT = {"e2m1": 17 / 32, "e4m3": 1 + 2**-10, "bf16": 2.0}
_MMA = {"exact": Mma.BF16, "block_scaled": Mma.BLOCK_SCALED, "promoted": Mma.FP8}


def aot_cases(chip: Chip) -> tuple[AotCase, ...]:
    """Both launches of the routed experts (a full range of tiles) and of the shared one at a 32,768-row chunk."""
    path = "exact" if chip is Chip.SM_90 else "block_scaled"
    cases: list[AotCase] = []
    for num_local in _LOCAL_EXPERTS:
        cases += _cases(Form(path=path, format="e2m1", quantised=True), num_local)
    cases += _cases(Form(path=path, format="e4m3", quantised=True), None)
    if chip is Chip.SM_90:
        cases += _cases(Form(path="exact", format="bf16", quantised=True), None)
        cases += _cases(Form(path="exact", format="bf16", quantised=True), _LOCAL_EXPERTS[0], default=False)
        cases += _cases(Form(path="promoted", format="e2m1", quantised=True), _LOCAL_EXPERTS[0], default=False)
        cases += _cases(Form(path="promoted", format="e4m3", quantised=True), None, default=False)
    return tuple(cases)


def _cases(form: Form, num_local: int | None, *, default: bool = True) -> list[AotCase]:
    """num_local None: the shared expert."""
    is_routed = num_local is not None
    num_tiles = RANGE_TILES if is_routed else _CHUNK_ROWS // TILE_ROWS
    rows = num_tiles * TILE_ROWS
    # Of a range, with rows spread evenly.
    num_used = 1.0 if num_local is None else num_local * rows / (_CHUNK_ROWS * _TOPK)
    matrix_bytes = num_used * _WIDTH * _INTER * _BYTES_PER_WEIGHT[form.format]
    channel_bytes = 2.0 if form.path == "exact" else 33 / 32
    gate_up_bytes = rows * (_WIDTH + _INTER) * channel_bytes + 2 * matrix_bytes
    down_bytes = rows * (_INTER * channel_bytes + 2 * _WIDTH) + matrix_bytes
    config = _config(form)
    constants = _constants(form, width=_WIDTH, inter=_INTER, is_routed=is_routed)
    gate_up_constants = {"TOPK": _TOPK if is_routed else 1, "QUANTISED": form.quantised, **constants}
    cases = []
    for name, shape, kernel, constexprs, num_columns, num_bytes in (
        ("gate and up", f"{_WIDTH} -> 2 x {_INTER}", gate_up_kernel, gate_up_constants, 2 * _INTER, gate_up_bytes),
        ("down", f"{_INTER} -> {_WIDTH}", down_kernel, constants, _WIDTH, down_bytes),
    ):
        types = _argument_types(form, is_routed)
        cases.append(
            AotCase(
                op="routed_experts" if is_routed else "shared_expert",
                name=f"{'routed' if is_routed else 'shared'} {name} {form.format} {form.path} {num_local or ''}".strip(),
                shape=f"{rows} x {shape}",
                kernel=kernel,
                signature={argument: types.get(argument, "constexpr") for argument in kernel.arg_names},
                constexprs=constexprs,
                aligned=tuple(a for a in kernel.arg_names if a.endswith(("_ptr", "_stride"))),
                num_warps=config.num_warps,
                num_stages=config.num_stages,
                mma=_MMA[form.path],
                num_programs=num_tiles * triton.cdiv(num_columns, config.block_n),
                bytes_moved=int(num_bytes),
                flops=2 * rows * _WIDTH * _INTER * (2 if kernel is gate_up_kernel else 1),
                default=default,
            )
        )
    return cases


def _argument_types(form: Form, is_routed: bool) -> dict[str, str]:
    """Triton types of the arguments of both kernels that are not constants."""
    is_exact = form.path == "exact"
    codes, scale = ("*bf16", "*bf16") if is_exact else ("*fp8e4nv", "*u8")
    weight = {"e2m1": "*u8", "e4m3": "*u16" if is_exact else "*fp8e4nv", "bf16": "*bf16"}[form.format]
    weight_scale = "*bf16" if form.format == "bf16" else "*u8"
    # Without routing the first three stand for nothing and are x.
    types = dict.fromkeys(("pairs_ptr", "tiles_ptr"), "*i32" if is_routed else codes)
    types |= {"weight_ptr": "*fp32" if is_routed else codes, "out_ptr": "*bf16", "limit": "fp32"}
    types |= dict.fromkeys(("x_ptr", "hidden_ptr"), codes) | dict.fromkeys(("x_scale_ptr", "hidden_scale_ptr"), scale)
    types |= dict.fromkeys(("w1_ptr", "w3_ptr", "w2_ptr"), weight)
    types |= dict.fromkeys(("w1_scale_ptr", "w3_scale_ptr", "w2_scale_ptr"), weight_scale)
    return types | dict.fromkeys(("w_stride", "w_scale_stride", "first_tile", "num_tiles", "num_rows"), "i32")
