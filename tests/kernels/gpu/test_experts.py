"""Routed and shared experts against ref, on every path: weight format x chip x form of the quantised rows."""

import pytest
import torch
from torch import Tensor

from prefill_kernels import ref
from prefill_kernels.gpu import experts as module
from prefill_kernels.gpu.chip import Chip
from prefill_kernels.gpu.expanded_weight import ExpandedWeight
from prefill_kernels.gpu.experts import routed_experts, shared_expert
from prefill_kernels.number_formats import (
    dequantise_weight,
    quantise_fp8_ue8m0,
    quantise_weight_fp4,
    quantise_weight_fp8,
    round_trip_fp8,
)
from prefill_kernels.numerics import PRODUCTION
from prefill_kernels.ops import Routing, Rows
from prefill_kernels.weights import DenseWeight, ExpertWeights, Weight
from prefill_testing.numeric import assert_bitwise, assert_close, fraction_equal, random_tensor

HIDDEN, INTER, EXPERTS = 160, 96, 4
LIMIT = 1.5  # low enough that random values are clamped
PATHS = {
    "fp4 exact": ("fp4", Chip.SM_90, "values"),
    "fp4 block-scaled": ("fp4", Chip.SM_100, "codes"),
    "fp4 promoted": ("fp4", Chip.SM_90, "codes"),
    "fp8 exact": ("fp8", Chip.SM_90, "values"),
    "fp8 block-scaled": ("fp8", Chip.SM_100, "codes"),
    "fp8 promoted": ("fp8", Chip.SM_90, "codes"),
    "dense": ("dense", Chip.SM_90, "plain"),
    "dense sm_100": ("dense", Chip.SM_100, "plain"),
}


def _paths(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("stored", "chip", "form"), [PATHS[name] for name in names], ids=names)


def _rows(plain: Tensor, form: str) -> Rows:
    if form == "codes":
        codes, scales = quantise_fp8_ue8m0(plain)
        return Rows(plain=plain, seen=codes, scales=scales)
    return Rows(plain=plain, seen=round_trip_fp8(plain, dtype=torch.bfloat16) if form == "values" else None)


def _weights(stored: str, num_experts: int | None, hidden: int = HIDDEN, inter: int = INTER) -> ExpertWeights:
    leading = () if num_experts is None else (num_experts,)

    def weight(seed: int, *shape: int) -> Weight:
        # Scales differ by row and by group, and by tile of 32 x 32.
        data = random_tensor(seed, *leading, *shape, scale=0.2)
        data *= torch.exp2(torch.arange(shape[0] // 8 + 1).repeat_interleave(8)[: shape[0]] % 5 - 2.0).unsqueeze(-1)
        data *= torch.exp2(-(torch.arange(shape[1]) // 32 % 3.0))
        match stored:
            case "fp4":
                return quantise_weight_fp4(data)
            case "fp8":
                return quantise_weight_fp8(data)
            case _:
                return DenseWeight(data=data.bfloat16())

    return ExpertWeights(w1=weight(4, inter, hidden), w3=weight(5, inter, hidden), w2=weight(6, hidden, inter))


def _routing(num_rows: int, topk: int, num_experts: int) -> Routing:
    """Expert 0 takes two rows of three, the last one none."""
    generator = torch.Generator().manual_seed(num_rows)
    chance = torch.ones(num_rows, num_experts)
    chance[:, 0], chance[:, -1] = 30, 0
    chance[::3, 0] = 0
    ids = torch.multinomial(chance, topk, generator=generator).sort(1).values.int()
    return Routing(expert_ids=ids, weights=random_tensor(3, num_rows, topk).abs() + 0.1)


def _local(experts: ExpertWeights, first: int, end: int) -> ExpertWeights:
    def part(weight: Weight) -> Weight:
        if isinstance(weight, DenseWeight):
            return DenseWeight(data=weight.data[first:end])
        return type(weight)(data=weight.data[first:end], scale=weight.scale[first:end])

    return ExpertWeights(w1=part(experts.w1), w3=part(experts.w3), w2=part(experts.w2))


def _assert_as_ref(actual: Tensor, expected: Tensor) -> None:
    """Another order of sums moves a gate or an up by a bfloat16 step now and then, which may move an e4m3 step; a wrong rounding
    point would show in every second value."""
    assert_close(actual, expected, dtype=torch.bfloat16)
    assert fraction_equal(actual, expected) > 0.97


@pytest.mark.usefixtures("poisoned")
@_paths("fp4 exact", "fp4 block-scaled", "fp4 promoted", "dense")
def test_routed_experts_equal_ref(stored: str, chip: Chip, form: str) -> None:
    # Expert 0 has two tiles, the last one none; hidden and inter end within a step and a block.
    routing, experts = _routing(200, 2, EXPERTS), _weights(stored, EXPERTS)
    x = _rows(random_tensor(1, 200, HIDDEN, dtype=torch.bfloat16), form)
    assert (routing.expert_ids == 0).sum() > 128
    arguments = {"first_expert": 0, "swiglu_limit": LIMIT, "numerics": PRODUCTION}
    actual = routed_experts(x, routing, experts, **arguments, chip=chip)
    _assert_as_ref(actual, ref.routed_experts(x, routing, experts, **arguments))


@pytest.mark.usefixtures("poisoned")
@_paths("fp8 exact", "fp8 block-scaled", "fp8 promoted", "dense sm_100")
def test_shared_expert_equals_ref(stored: str, chip: Chip, form: str) -> None:
    expert = _weights(stored, None)
    x = _rows(random_tensor(1, 130, HIDDEN, dtype=torch.bfloat16), form)
    actual = shared_expert(x, expert, swiglu_limit=LIMIT, numerics=PRODUCTION, chip=chip)
    _assert_as_ref(actual, ref.shared_expert(x, expert, swiglu_limit=LIMIT, numerics=PRODUCTION))


@pytest.mark.usefixtures("poisoned")
@_paths("fp4 exact", "fp4 block-scaled")
def test_slots_of_absent_experts_are_zero(stored: str, chip: Chip, form: str) -> None:
    routing, experts = _routing(23, 2, EXPERTS), _weights(stored, EXPERTS)
    x = _rows(random_tensor(1, 23, HIDDEN, dtype=torch.bfloat16), form)
    arguments = {"swiglu_limit": LIMIT, "numerics": PRODUCTION}
    part = routed_experts(x, routing, _local(experts, 1, 3), first_expert=1, **arguments, chip=chip)
    is_local = (routing.expert_ids >= 1) & (routing.expert_ids < 3)
    assert is_local.any()
    assert_bitwise(part[~is_local], torch.zeros_like(part[~is_local]))
    whole = ref.routed_experts(x, routing, experts, first_expert=0, **arguments)
    _assert_as_ref(part[is_local], whole[is_local])


@pytest.mark.usefixtures("poisoned")
@_paths("fp4 exact", "fp4 block-scaled")
def test_one_row_equals_ref(stored: str, chip: Chip, form: str) -> None:
    routing, experts = _routing(1, 2, EXPERTS), _weights(stored, EXPERTS)
    x = _rows(random_tensor(1, 1, HIDDEN, dtype=torch.bfloat16), form)
    arguments = {"first_expert": 0, "swiglu_limit": LIMIT, "numerics": PRODUCTION}
    actual = routed_experts(x, routing, experts, **arguments, chip=chip)
    _assert_as_ref(actual, ref.routed_experts(x, routing, experts, **arguments))


@pytest.mark.parametrize("num_rows", [0, 3])
def test_no_rows_and_no_local_rows(num_rows: int) -> None:
    experts = _local(_weights("fp4", EXPERTS), 3, 4)
    x = _rows(random_tensor(1, num_rows, HIDDEN, dtype=torch.bfloat16), "values")
    settings = {"swiglu_limit": LIMIT, "numerics": PRODUCTION, "chip": Chip.SM_90}
    out = routed_experts(x, _routing(num_rows, 2, EXPERTS), experts, first_expert=3, **settings)
    assert_bitwise(out, torch.zeros(num_rows, 2, HIDDEN, dtype=torch.bfloat16))
    assert shared_expert(x, _weights("fp8", None), **settings).shape == (num_rows, HIDDEN)


@pytest.mark.usefixtures("poisoned")
def test_ranges_of_tiles_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    routing, experts = _routing(140, 2, EXPERTS), _weights("fp4", EXPERTS)
    x = _rows(random_tensor(1, 140, HIDDEN, dtype=torch.bfloat16), "codes")
    arguments = {"first_expert": 0, "swiglu_limit": LIMIT, "numerics": PRODUCTION, "chip": Chip.SM_100}
    at_once = routed_experts(x, routing, experts, **arguments)
    monkeypatch.setattr(module, "RANGE_TILES", 2)
    assert_bitwise(routed_experts(x, routing, experts, **arguments), at_once)


@_paths("fp4 exact", "fp4 block-scaled")
def test_a_routed_row_does_not_depend_on_the_others(stored: str, chip: Chip, form: str) -> None:
    routing, experts = _routing(40, 2, EXPERTS), _weights(stored, EXPERTS)
    x = random_tensor(1, 40, HIDDEN, dtype=torch.bfloat16)
    arguments = {"first_expert": 0, "swiglu_limit": LIMIT, "numerics": PRODUCTION, "chip": chip}
    together = routed_experts(_rows(x, form), routing, experts, **arguments)
    part = Routing(expert_ids=routing.expert_ids[37:].clone(), weights=routing.weights[37:].clone())
    assert_bitwise(routed_experts(_rows(x[37:], form), part, experts, **arguments), together[37:])


@_paths("fp8 exact", "fp8 block-scaled", "dense")
def test_a_shared_row_does_not_depend_on_the_others(stored: str, chip: Chip, form: str) -> None:
    x, expert = random_tensor(1, 130, HIDDEN, dtype=torch.bfloat16), _weights(stored, None)
    settings = {"swiglu_limit": LIMIT, "numerics": PRODUCTION, "chip": chip}
    together = shared_expert(_rows(x, form), expert, **settings)
    assert_bitwise(shared_expert(_rows(x[129:], form), expert, **settings), together[129:])


@pytest.mark.parametrize("chip", Chip)
def test_rows_without_a_quantised_form_are_quantised(chip: Chip) -> None:
    expert = _weights("fp8", None)
    plain = random_tensor(1, 9, HIDDEN, dtype=torch.bfloat16)
    settings = {"swiglu_limit": LIMIT, "numerics": PRODUCTION, "chip": chip}
    given = shared_expert(_rows(plain, "values" if chip is Chip.SM_90 else "codes"), expert, **settings)
    assert_bitwise(shared_expert(Rows(plain=plain), expert, **settings), given)


def test_expanded_weights_give_the_same_bits() -> None:
    expert = _weights("fp8", None)
    expanded = ExpertWeights(
        **{
            name: ExpandedWeight(data=dequantise_weight(getattr(expert, name), torch.bfloat16))
            for name in ("w1", "w3", "w2")
        }
    )
    x = _rows(random_tensor(1, 9, HIDDEN, dtype=torch.bfloat16), "values")
    settings = {"swiglu_limit": LIMIT, "numerics": PRODUCTION, "chip": Chip.SM_90}
    assert_bitwise(shared_expert(x, expanded, **settings), shared_expert(x, expert, **settings))
    with pytest.raises(ValueError, match="bfloat16 values"):
        shared_expert(_rows(x.plain, "codes"), expanded, **settings)


@pytest.mark.parametrize(("name", "hidden"), [("fp4 exact", 5120), ("fp4 block-scaled", 1280)])
def test_many_steps(name: str, hidden: int) -> None:
    stored, chip, form = PATHS[name]
    experts = _weights(stored, 2, hidden=hidden, inter=64)
    routing = Routing(expert_ids=torch.tensor([[1], [1], [1]], dtype=torch.int32), weights=torch.ones(3, 1))
    x = _rows(random_tensor(1, 3, hidden, dtype=torch.bfloat16, scale=0.1), form)
    arguments = {"first_expert": 0, "swiglu_limit": 10.0, "numerics": PRODUCTION}
    actual = routed_experts(x, routing, experts, **arguments, chip=chip)
    _assert_as_ref(actual, ref.routed_experts(x, routing, experts, **arguments))


def test_float32_and_mixed_weights_are_refused() -> None:
    x = Rows(plain=random_tensor(1, 2, HIDDEN, dtype=torch.bfloat16))
    fp8, dense = _weights("fp8", None), _weights("dense", None)
    wide = ExpertWeights(w1=DenseWeight(data=torch.ones(INTER, HIDDEN)), w3=dense.w3, w2=dense.w2)
    mixed = ExpertWeights(w1=fp8.w1, w3=dense.w3, w2=fp8.w2)
    for weights in (wide, mixed):
        with pytest.raises(ValueError, match="expected contiguous Fp4Weight, Fp8Weight, or bfloat16"):
            shared_expert(x, weights, swiglu_limit=LIMIT, numerics=PRODUCTION, chip=Chip.SM_90)
