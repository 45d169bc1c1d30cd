"""Experts against loops over rows and slots, with every rounding point written out."""

import pytest
import torch
from torch import Tensor

from prefill_kernels.number_formats import (
    dequantise_fp8_ue8m0,
    dequantise_weight,
    quantise_fp8_ue8m0,
    quantise_weight_fp4,
    quantise_weight_fp8,
)
from prefill_kernels.numerics import PRODUCTION, Numerics
from prefill_kernels.ops import Routing, Rows
from prefill_kernels.ref import combine_experts, routed_experts, shared_expert
from prefill_kernels.weights import DenseWeight, ExpertWeights
from prefill_testing.numeric import (
    ALL_NUMERICS,
    BFLOAT16,
    FLOAT64,
    assert_bitwise,
    assert_close,
    fraction_equal,
    random_tensor,
)

HIDDEN, INTER, EXPERTS = 64, 32, 5
LIMIT = 1.5  # low enough that random values are clamped


@pytest.mark.parametrize("numerics", ALL_NUMERICS.values(), ids=ALL_NUMERICS.keys())
@pytest.mark.parametrize("stored", ["dense", "fp4"])
@pytest.mark.parametrize("num_rows", [0, 1, 23])
def test_routed_experts_match_a_loop(numerics: Numerics, stored: str, num_rows: int) -> None:
    x, routing, experts = _inputs(num_rows, numerics, stored)
    out = routed_experts(Rows(plain=x), routing, experts, first_expert=0, swiglu_limit=LIMIT, numerics=numerics)
    assert out.dtype == numerics.activation
    expected = torch.zeros(num_rows, 2, HIDDEN, dtype=torch.float64)
    for n in range(num_rows):
        for slot in range(2):
            expert, weight = int(routing.expert_ids[n, slot]), float(routing.weights[n, slot])
            expected[n, slot] = _slow_expert(x[n], experts, expert, weight, numerics)
    # Quantised hidden values may flip a step on a rounding edge: few, but each is an eighth of a value.
    factor = 3 if numerics is PRODUCTION and stored == "fp4" else 1
    assert_close(out, expected, dtype=numerics.activation, factor=factor)


def test_other_ranks_experts_leave_zero_slots() -> None:
    x, routing, experts = _inputs(23, BFLOAT16, "fp4")
    whole = routed_experts(Rows(plain=x), routing, experts, first_expert=0, swiglu_limit=LIMIT, numerics=BFLOAT16)
    local = ExpertWeights(
        **{name: type(w)(data=w.data[2:4], scale=w.scale[2:4]) for name, w in _named(experts).items()}
    )
    part = routed_experts(Rows(plain=x), routing, local, first_expert=2, swiglu_limit=LIMIT, numerics=BFLOAT16)
    is_local = (routing.expert_ids >= 2) & (routing.expert_ids < 4)
    assert is_local.any()
    assert_bitwise(part[is_local], whole[is_local])
    assert part[~is_local].abs().max() == 0


@pytest.mark.parametrize("numerics", ALL_NUMERICS.values(), ids=ALL_NUMERICS.keys())
def test_shared_expert_has_no_routing_weight(numerics: Numerics) -> None:
    x, _, experts = _inputs(9, numerics, "dense")
    one = ExpertWeights(**{name: quantise_weight_fp8(w.data[1]) for name, w in _named(experts).items()})
    out = shared_expert(Rows(plain=x), one, swiglu_limit=LIMIT, numerics=numerics)
    expected = torch.stack([_slow_expert(row, one, None, 1.0, numerics) for row in x])
    assert_close(out, expected, dtype=numerics.activation, factor=3 if numerics is PRODUCTION else 1)


def test_gate_is_clamped_from_above_only_and_up_on_both_sides() -> None:
    eye = torch.eye(32, dtype=torch.float64)
    expert = ExpertWeights(w1=DenseWeight(data=-eye), w3=DenseWeight(data=eye), w2=DenseWeight(data=eye))
    x = torch.full((1, 32), 20.0, dtype=torch.float64)
    silu_of_minus_20 = -20 / (1 + torch.exp(torch.tensor(20.0, dtype=torch.float64)))
    out = shared_expert(Rows(plain=x), expert, swiglu_limit=10.0, numerics=FLOAT64)
    assert_close(out, (silu_of_minus_20 * 10).expand(1, 32), dtype=torch.float64)
    out = shared_expert(Rows(plain=-x), expert, swiglu_limit=10.0, numerics=FLOAT64)
    silu_of_10 = 10 / (1 + torch.exp(torch.tensor(-10.0, dtype=torch.float64)))
    assert_close(out, (silu_of_10 * -10).expand(1, 32), dtype=torch.float64)


def test_hidden_is_rounded_after_the_routing_weight() -> None:
    x, routing, experts = _inputs(200, BFLOAT16, "dense")
    out = routed_experts(Rows(plain=x), routing, experts, first_expert=0, swiglu_limit=LIMIT, numerics=BFLOAT16)
    expected = torch.stack(
        [
            torch.stack(
                [_slow_expert(x[n], experts, int(e), float(w), BFLOAT16) for e, w in zip(ids, weights, strict=True)]
            )
            for n, (ids, weights) in enumerate(zip(routing.expert_ids, routing.weights, strict=True))
        ]
    )
    assert fraction_equal(out, expected.bfloat16()) > 0.99


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_combine_sums_slots_then_shared(dtype: torch.dtype) -> None:
    routed, shared = random_tensor(1, 7, 3, 10, dtype=dtype), random_tensor(2, 7, 10, dtype=dtype)
    out = combine_experts(routed, shared)
    assert out.dtype == dtype
    assert_close(out, routed.double().sum(1) + shared.double(), dtype=dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    ordered = routed[:, 0].to(wide) + routed[:, 1].to(wide) + routed[:, 2].to(wide) + shared.to(wide)
    assert_bitwise(out, ordered.to(dtype))


def _inputs(num_rows: int, numerics: Numerics, stored: str) -> tuple[Tensor, Routing, ExpertWeights]:
    x = random_tensor(1, num_rows, HIDDEN, dtype=numerics.activation)
    ids = random_tensor(2, num_rows, EXPERTS).argsort(1)[:, :2].sort(1).values.int()
    routing = Routing(expert_ids=ids, weights=random_tensor(3, num_rows, 2, dtype=numerics.wide).abs())
    w1, w3, w2 = (
        random_tensor(seed, EXPERTS, *shape, dtype=torch.bfloat16, scale=0.2)
        for seed, shape in ((4, (INTER, HIDDEN)), (5, (INTER, HIDDEN)), (6, (HIDDEN, INTER)))
    )
    if stored == "dense":
        return x, routing, ExpertWeights(w1=DenseWeight(data=w1), w3=DenseWeight(data=w3), w2=DenseWeight(data=w2))
    return x, routing, ExpertWeights(w1=quantise_weight_fp4(w1), w3=quantise_weight_fp4(w3), w2=quantise_weight_fp4(w2))


def _named(experts: ExpertWeights):  # type: ignore[no-untyped-def]
    return {"w1": experts.w1, "w3": experts.w3, "w2": experts.w2}


def _slow_expert(x: Tensor, experts: ExpertWeights, expert: int | None, weight: float, numerics: Numerics) -> Tensor:
    def product(vector: Tensor, stored) -> Tensor:  # type: ignore[no-untyped-def]
        matrix = dequantise_weight(stored, torch.float64)
        if not isinstance(stored, DenseWeight) and numerics.quantise_activations:
            vector = dequantise_fp8_ue8m0(*quantise_fp8_ue8m0(vector)).double()
        return ((matrix if expert is None else matrix[expert]) @ vector.double()).to(numerics.activation).double()

    gate, up = product(x, experts.w1), product(x, experts.w3)
    gate = torch.where(gate > LIMIT, LIMIT, gate)
    up = torch.where(up > LIMIT, LIMIT, torch.where(up < -LIMIT, -LIMIT, up))
    hidden = (gate * torch.sigmoid(gate) * up * weight).to(numerics.activation)
    return product(hidden, experts.w2)
