"""Routed and shared experts (model.md 2.10).

The traps: the gate is clamped from above only, after its rounding; the routing weight multiplies before w2 and before
its quantiser.
"""

# N rows, D hidden, K top-k, P rows of one expert
import torch
from torch import Tensor

from prefill_kernels.number_formats import dequantise_weight
from prefill_kernels.numerics import Numerics
from prefill_kernels.ops import Routing, Rows
from prefill_kernels.ref.fixed_math import silu, wide_dtype
from prefill_kernels.ref.linear import linear, quantised_input
from prefill_kernels.ref.tiled_matmul import tiled_matmul
from prefill_kernels.weights import DenseWeight, ExpertWeights, Fp4Weight, Fp8Weight, Weight


def routed_experts(
    x: Rows,
    routing: Routing,
    experts: ExpertWeights,
    *,
    first_expert: int,
    swiglu_limit: float,
    numerics: Numerics,
) -> Tensor:
    """Output of each chosen expert, one slot per (row, choice), already weighted.

    gate = x w1^T and up = x w3^T, rounded to act; gate = min(gate, limit), up = clamp(up, +-limit);
    h = bf(silu(gate) * up * weight); slot = bf(h w2^T). x and h are quantised as in `linear`.

    Args:
        x: plain [N, D] act.
        experts: weights of experts [first_expert, first_expert + local), leading axis = local expert.

    Returns:
        [N, K, D] act, in routing's slot order; slots of other ranks' experts are zero.
    """
    out_NKD = x.plain.new_zeros(*routing.expert_ids.shape, x.plain.shape[1], dtype=numerics.activation)
    seen_ND = quantised_input(x.plain, experts.w1, numerics=numerics)
    local_ids_NK = routing.expert_ids - first_expert
    num_local = experts.w1.data.shape[0]
    for local_id in torch.unique(local_ids_NK[(local_ids_NK >= 0) & (local_ids_NK < num_local)]).tolist():
        rows_P, slots_P = (local_ids_NK == local_id).nonzero(as_tuple=True)
        expert = ExpertWeights(
            w1=_expert(experts.w1, local_id), w3=_expert(experts.w3, local_id), w2=_expert(experts.w2, local_id)
        )
        weight_P1 = routing.weights[rows_P, slots_P].unsqueeze(-1)
        out_NKD[rows_P, slots_P] = _swiglu(seen_ND[rows_P], expert, weight_P1, swiglu_limit, numerics)
    return out_NKD


def shared_expert(x: Rows, expert: ExpertWeights, *, swiglu_limit: float, numerics: Numerics) -> Tensor:
    """[N, D] act: the same computation as a routed expert, with no routing weight."""
    return _swiglu(quantised_input(x.plain, expert.w1, numerics=numerics), expert, None, swiglu_limit, numerics)


def combine_experts(routed_NKD: Tensor, shared_ND: Tensor) -> Tensor:
    """[N, D]: slots in order (ascending expert id), then the shared expert, summed wide; one rounding to the inputs'
    dtype."""
    wide = wide_dtype(shared_ND.dtype)
    total_ND = torch.zeros_like(shared_ND, dtype=wide)
    for slot in range(routed_NKD.shape[1]):
        total_ND += routed_NKD[:, slot].to(wide)
    return (total_ND + shared_ND.to(wide)).to(shared_ND.dtype)


def _swiglu(
    seen_PD: Tensor, expert: ExpertWeights, weight_P1: Tensor | None, swiglu_limit: float, numerics: Numerics
) -> Tensor:
    """[P, D] act; seen = the input after its quantiser, which is the same for w1 and w3 of all experts."""
    act, wide = numerics.activation, numerics.wide
    gate = tiled_matmul(seen_PD, dequantise_weight(expert.w1, wide), dtype=wide).to(act).to(wide)
    up = tiled_matmul(seen_PD, dequantise_weight(expert.w3, wide), dtype=wide).to(act).to(wide)
    hidden = silu(gate.clamp(max=swiglu_limit)) * up.clamp(-swiglu_limit, swiglu_limit)
    if weight_P1 is not None:
        hidden = hidden * weight_P1.to(wide)
    return linear(Rows(plain=hidden.to(act)), expert.w2, numerics=numerics)


def _expert(weight: Weight, local_id: int) -> Weight:
    """One expert's matrix out of the stack; a view."""
    match weight:
        case DenseWeight(data=data):
            return DenseWeight(data=data[local_id])
        case Fp8Weight(data=data, scale=scale):
            return Fp8Weight(data=data[local_id], scale=scale[local_id])
        case Fp4Weight(data=data, scale=scale):
            return Fp4Weight(data=data[local_id], scale=scale[local_id])
