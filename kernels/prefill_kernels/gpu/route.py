"""Expert router: logits with a bf16 product, then an exact top-k per row (two launches).

Logits: one program makes [128 rows, 128 experts] in float32, the hidden axis in one fixed order; the operands are never
quantised. Traffic: x once from HBM (column tiles of the same rows run side by side), 2 * 4 * X bytes of logits per row; bound:
HBM. Choice: a program holds all logits of a few rows, scores them and takes the best one top-k times, so ties go to the lowest
id (decisions C26), then walks the chosen ones by ascending id. The trap: scoring in the product's epilogue spills. A row with
NaN gets valid, meaningless ids. Profile R but for the order of the product's sums; log1p(u) is log(1 + u) * u / ((1 + u) - 1),
within 2 ulp.
"""

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from prefill_kernels.aot_case import AotCase, Mma
from prefill_kernels.gpu.chip import Chip
from prefill_kernels.numerics import Numerics
from prefill_kernels.ops import Routing

_NORMALISER_EPS = tl.constexpr(1e-20)
_BLOCK_N = 128
_BLOCK_X = 128
_BLOCK_D = 64
_LOGIT_WARPS = 8
_LOGIT_STAGES = 4
# 8 rows of 512 padded experts: 32 values per thread for each of score and rank.
_CHOICE_VALUES = 4096
_CHOICE_WARPS = 4


@triton.jit(do_not_specialize=("num_rows",))  # type: ignore[untyped-decorator]
def _logit_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    gate_ptr,
    logit_ptr,
    num_rows,
    num_experts,
    WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_X: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    num_columns = tl.cdiv(num_experts, BLOCK_X)
    row = (tl.program_id(0) // num_columns) * BLOCK_N + tl.arange(0, BLOCK_N)
    expert = (tl.program_id(0) % num_columns) * BLOCK_X + tl.arange(0, BLOCK_X)
    d = tl.arange(0, BLOCK_D)
    # Rows and experts beyond the end repeat the last one and are not stored.
    x_tile = x_ptr + tl.minimum(row, num_rows - 1).to(tl.int64)[:, None] * WIDTH + d[None, :]
    gate_tile = gate_ptr + tl.minimum(expert, num_experts - 1)[:, None] * WIDTH + d[None, :]
    logit = tl.zeros((BLOCK_N, BLOCK_X), tl.float32)
    for first in range(0, WIDTH, BLOCK_D):
        if WIDTH % BLOCK_D == 0:
            x = tl.load(x_tile + first)
            gate = tl.load(gate_tile + first)
        else:
            mask = (first + d < WIDTH)[None, :]
            x = tl.load(x_tile + first, mask=mask, other=0.0)
            gate = tl.load(gate_tile + first, mask=mask, other=0.0)
        logit = tl.dot(x, tl.trans(gate), logit)
    mask = (row < num_rows)[:, None] & (expert < num_experts)[None, :]
    offset = row.to(tl.int64)[:, None] * num_experts + expert[None, :]
    tl.store(logit_ptr + offset, logit, mask=mask)


@triton.jit
def _softplus(x):  # type: ignore[no-untyped-def]
    """x above 20, else log1p(exp(x)); NaN stays NaN."""
    u = tl.exp(tl.where(x > 20.0, 20.0, x))
    sum = 1.0 + u
    log1p = tl.where(sum == 1.0, u, tl.log(sum) * tl.div_rn(u, sum - 1.0))
    return tl.where(x > 20.0, x, log1p)


@triton.jit(do_not_specialize=("num_rows",))  # type: ignore[untyped-decorator]
def _choose_kernel(  # type: ignore[no-untyped-def]
    logit_ptr,
    bias_ptr,
    image_bias_ptr,
    is_image_ptr,
    ids_ptr,
    weights_ptr,
    num_rows,
    num_experts,
    scaling,
    TOPK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_X: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    expert = tl.arange(0, BLOCK_X)
    in_range_X = expert < num_experts
    in_range_N = row < num_rows
    logit = tl.load(
        logit_ptr + row.to(tl.int64)[:, None] * num_experts + expert[None, :],
        mask=in_range_N[:, None] & in_range_X[None, :],
        other=0.0,
    )
    score = tl.sqrt_rn(_softplus(logit))
    bias = tl.load(bias_ptr + expert, mask=in_range_X, other=0.0)
    image_bias = tl.load(image_bias_ptr + expert, mask=in_range_X, other=0.0)
    is_image = tl.load(is_image_ptr + row, mask=in_range_N, other=0)
    rank = score + tl.where((is_image != 0)[:, None], image_bias[None, :], bias[None, :])
    # NaN loses against every number, but not against the columns that pad the tile.
    rank = tl.where(rank > -3.0e38, rank, -3.0e38)
    rank = tl.where(in_range_X[None, :], rank, -float("inf"))
    for _ in tl.static_range(TOPK):
        is_best = rank == tl.max(rank, axis=1)[:, None]
        best = tl.min(tl.where(is_best, expert[None, :], BLOCK_X), axis=1)
        rank = tl.where(expert[None, :] == best[:, None], -float("inf"), rank)
    is_chosen = (rank == -float("inf")) & in_range_X[None, :]
    total = tl.zeros((BLOCK_N,), tl.float32)
    id = tl.full((BLOCK_N,), -1, tl.int32)
    for slot in tl.static_range(TOPK):
        id, chosen = _next_chosen(id, is_chosen, expert, score, BLOCK_X)
        total += chosen
        tl.store(ids_ptr + row * TOPK + slot, id, mask=in_range_N)
    id = tl.full((BLOCK_N,), -1, tl.int32)
    for slot in tl.static_range(TOPK):
        id, chosen = _next_chosen(id, is_chosen, expert, score, BLOCK_X)
        weight = tl.div_rn(chosen, total + _NORMALISER_EPS) * scaling
        tl.store(weights_ptr + row * TOPK + slot, weight, mask=in_range_N)


@triton.jit  # type: ignore[untyped-decorator]
def _next_chosen(previous, is_chosen, expert, score, BLOCK_X: tl.constexpr):  # type: ignore[no-untyped-def]
    """(lowest chosen id above `previous`, its score) of each row."""
    is_later = is_chosen & (expert[None, :] > previous[:, None])
    id = tl.min(tl.where(is_later, expert[None, :], BLOCK_X), axis=1)
    return id, tl.sum(tl.where(expert[None, :] == id[:, None], score, 0.0), axis=1)


def route(
    x_ND: Tensor,
    gate_XD: Tensor,
    bias_X: Tensor,
    image_bias_X: Tensor | None,
    is_image_N: Tensor,
    *,
    topk: int,
    scaling: float,
    numerics: Numerics,  # noqa: ARG001
) -> Routing:
    """Same contract as ref.route; x and gate bfloat16.

    Raises:
        ValueError: another dtype, or tensors that are not contiguous.
    """
    for name, tensor in (("x", x_ND), ("gate", gate_XD)):
        if tensor.dtype != torch.bfloat16 or not tensor.is_contiguous():
            raise ValueError(f"{name} is {tensor.dtype}, strides {tensor.stride()}: expected contiguous bfloat16")
    num_rows, width = x_ND.shape
    num_experts = gate_XD.shape[0]
    ids_NK = torch.empty((num_rows, topk), dtype=torch.int32, device=x_ND.device)
    weights_NK = torch.empty((num_rows, topk), dtype=torch.float32, device=x_ND.device)
    if num_rows == 0:
        return Routing(expert_ids=ids_NK, weights=weights_NK)
    logit_NX = torch.empty((num_rows, num_experts), dtype=torch.float32, device=x_ND.device)
    _logit_kernel[(triton.cdiv(num_rows, _BLOCK_N) * triton.cdiv(num_experts, _BLOCK_X),)](
        x_ND,
        gate_XD,
        logit_NX,
        num_rows,
        num_experts,
        WIDTH=width,
        BLOCK_N=_BLOCK_N,
        BLOCK_X=_BLOCK_X,
        BLOCK_D=_BLOCK_D,
        num_warps=_LOGIT_WARPS,
        num_stages=_LOGIT_STAGES,
    )
    blocks = _choice_blocks(num_experts)
    _choose_kernel[(triton.cdiv(num_rows, blocks["BLOCK_N"]),)](
        logit_NX,
        bias_X,
        bias_X if image_bias_X is None else image_bias_X,
        is_image_N.view(torch.uint8),
        ids_NK,
        weights_NK,
        num_rows,
        num_experts,
        float(scaling),
        TOPK=topk,
        num_warps=_CHOICE_WARPS,
        **blocks,
    )
    return Routing(expert_ids=ids_NK, weights=weights_NK)


def _choice_blocks(num_experts: int) -> dict[str, int]:
    padded = max(16, triton.next_power_of_2(num_experts))
    return {"BLOCK_N": max(1, min(32, _CHOICE_VALUES // padded)), "BLOCK_X": padded}


def aot_cases(chip: Chip) -> tuple[AotCase, ...]:  # noqa: ARG001 - the same launches on both chips
    """The released model's router at a 32,768-row chunk; the same launches on both chips."""
    num_rows, width, num_experts, topk = 32768, 5120, 384, 6
    blocks = _choice_blocks(num_experts)
    logit_bytes = num_rows * num_experts * 4
    logits = AotCase(
        op="route",
        name="route logits",
        shape=f"{num_rows} x {width} -> {num_experts}",
        kernel=_logit_kernel,
        signature={
            "x_ptr": "*bf16",
            "gate_ptr": "*bf16",
            "logit_ptr": "*fp32",
            "num_rows": "i32",
            "num_experts": "i32",
            "WIDTH": "constexpr",
            "BLOCK_N": "constexpr",
            "BLOCK_X": "constexpr",
            "BLOCK_D": "constexpr",
        },
        constexprs={"WIDTH": width, "BLOCK_N": _BLOCK_N, "BLOCK_X": _BLOCK_X, "BLOCK_D": _BLOCK_D},
        aligned=("x_ptr", "gate_ptr", "logit_ptr", "num_experts"),
        num_warps=_LOGIT_WARPS,
        num_stages=_LOGIT_STAGES,
        mma=Mma.BF16,
        num_programs=triton.cdiv(num_rows, _BLOCK_N) * triton.cdiv(num_experts, _BLOCK_X),
        bytes_moved=(num_rows + num_experts) * width * 2 + logit_bytes,
        flops=2 * num_rows * width * num_experts,
    )
    pointers = {"logit_ptr": "*fp32", "bias_ptr": "*fp32", "image_bias_ptr": "*fp32", "is_image_ptr": "*u8"}
    choice = AotCase(
        op="route",
        name="route choice",
        shape=f"{num_rows} x top-{topk} of {num_experts}",
        kernel=_choose_kernel,
        signature={
            **pointers,
            "ids_ptr": "*i32",
            "weights_ptr": "*fp32",
            "num_rows": "i32",
            "num_experts": "i32",
            "scaling": "fp32",
            "TOPK": "constexpr",
            "BLOCK_N": "constexpr",
            "BLOCK_X": "constexpr",
        },
        constexprs={"TOPK": topk, **blocks},
        aligned=(*pointers, "ids_ptr", "weights_ptr", "num_experts"),
        num_warps=_CHOICE_WARPS,
        num_stages=3,
        mma=Mma.NONE,
        num_programs=triton.cdiv(num_rows, blocks["BLOCK_N"]),
        bytes_moved=logit_bytes + num_rows * (1 + topk * 8),
        flops=0,
    )
    return (logits, choice)
