"""Products of the vision tower in the interpreter: against float64, and the roundings of what follows them bit by bit."""

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from prefill_kernels.gpu.chip import Chip
from prefill_kernels.gpu.gelu_device import gelu
from prefill_kernels.gpu.vision_linear import (
    TILES,
    vision_linear,
    vision_linear_add,
    vision_linear_gelu,
    vision_linear_swiglu,
)
from prefill_kernels.ref import vision as ref_vision
from prefill_testing.numeric import assert_bitwise, assert_close, fraction_equal, random_tensor

pytestmark = pytest.mark.usefixtures("poisoned")
both_chips = pytest.mark.parametrize("chip", Chip)
BF16 = torch.bfloat16
SIZES = pytest.mark.parametrize(
    ("num_rows", "width", "num_out"),
    [
        pytest.param(1, 588, 24, id="one row, patches' width"),
        pytest.param(131, 128, 300, id="rows and outputs cross a tile"),
        pytest.param(5, 352, 128, id="the tiny tower's inner width"),
    ],
)


def _operands(num_rows: int, width: int, num_out: int, *, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    x = random_tensor(1, num_rows, width, dtype=BF16, scale=scale)
    weight = random_tensor(2, num_out, width, dtype=BF16, scale=width**-0.5)
    # Each block of columns has a magnitude of its own, so that a wrong column shows.
    weight *= 2.0 ** (torch.arange(num_out)[:, None] // 16 % 3 - 1)
    return x, weight, random_tensor(3, num_out, dtype=BF16)


@both_chips
@SIZES
def test_linear_adds_the_bias_before_its_only_rounding(num_rows: int, width: int, num_out: int, chip: Chip) -> None:
    x, weight, bias = _operands(num_rows, width, num_out)
    exact = x.double() @ weight.double().t()
    out = vision_linear(x, weight, bias, chip=chip)
    assert_close(out, exact + bias.double(), dtype=BF16)
    assert fraction_equal(out, (exact + bias.double()).bfloat16()) > 0.99
    plain = vision_linear(x, weight, None, chip=chip)
    assert fraction_equal(plain, exact.bfloat16()) > 0.99


@both_chips
@SIZES
def test_the_residual_is_added_to_the_rounded_product(num_rows: int, width: int, num_out: int, chip: Chip) -> None:
    x, weight, bias = _operands(num_rows, width, num_out)
    residual = random_tensor(4, num_rows, num_out, dtype=BF16)
    for chosen in (bias, None):
        product = vision_linear(x, weight, chosen, chip=chip)
        assert_bitwise(vision_linear_add(x, weight, chosen, residual, chip=chip), residual + product)


@both_chips
@pytest.mark.parametrize(
    ("num_rows", "width", "inner"),
    [(1, 128, 352), (131, 64, 140)],
    ids=["the tiny tower's inner width", "rows and columns cross a tile"],
)
def test_swiglu_rounds_gate_up_activation_and_product(num_rows: int, width: int, inner: int, chip: Chip) -> None:
    x, weight, _ = _operands(num_rows, width, 2 * inner, scale=2)
    out = vision_linear_swiglu(x, weight, chip=chip)
    # The same sums in the same order: gate and up as two products, then every step by torch.
    gate, up = (vision_linear(x, half.contiguous(), None, chip=chip) for half in weight.chunk(2))
    active = (gate.float() / (1 + torch.exp(-gate.float()))).bfloat16()
    assert fraction_equal(out, active * up) > 0.9999
    assert_close(out, ref_vision.vision_linear_swiglu(x, weight), dtype=BF16)
    once = (torch.nn.functional.silu(gate.double()) * up.double()).bfloat16()
    assert fraction_equal(out, once) < 0.9


@both_chips
def test_gelu_follows_the_rounded_product(chip: Chip) -> None:
    x, weight, bias = _operands(131, 96, 300, scale=3)
    y = vision_linear(x, weight, bias, chip=chip).float()
    expected = (y * 0.5 * (1 + torch.erf(y * 0.5**0.5))).bfloat16()
    out = vision_linear_gelu(x, weight, bias, chip=chip)
    # Below -5.3 see test_gelu_of_every_bfloat16.
    assert_bitwise(out[y > -5], expected[y > -5])
    assert_close(out, ref_vision.vision_linear_gelu(x, weight, bias), dtype=BF16)
    tanh = torch.nn.functional.gelu(y, approximate="tanh").bfloat16()
    assert fraction_equal(out, tanh) < 0.95


@triton.jit
def _gelu_kernel(y_ptr, out_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    where = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + where, gelu(tl.load(y_ptr + where)))


def test_gelu_of_every_bfloat16() -> None:
    """The stated error of the hand-written erf, and how many rounded values differ from ref's."""
    y = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(BF16).float()
    out = torch.empty_like(y)
    _gelu_kernel[(4,)](y, out, BLOCK=2**14)
    expected = y * 0.5 * (1 + torch.erf(y * 0.5**0.5))
    usual = y.abs() < 1e4
    exact = y.double() * 0.5 * (1 + torch.erf(y.double() * 0.5**0.5))
    # gelu = y / 2 * (1 + erf): its error is y / 2 times erf's and two roundings of its own.
    assert ((out - exact).abs()[usual] <= y.abs()[usual] / 2 * (2e-7 + 2**-23 * 2)).all()
    is_nan = torch.isnan(expected)
    assert torch.equal(torch.isnan(out), is_nan)
    different = (out.bfloat16() != expected.bfloat16()) & ~is_nan
    assert different.sum() <= 8
    assert (y[different] < -5).all()
    assert ((out - expected).abs()[different] < 2e-7).all()


@both_chips
def test_a_row_does_not_depend_on_the_others(chip: Chip) -> None:
    rows = 2 * TILES[chip].rows + 7
    x, weight, bias = _operands(rows, 96, 280)
    residual = random_tensor(4, rows, 280, dtype=BF16)

    def compute(part: slice) -> list[Tensor]:
        return [
            vision_linear_add(x[part], weight, bias, residual[part], chip=chip),
            vision_linear_gelu(x[part], weight, bias, chip=chip),
            vision_linear_swiglu(x[part], weight, chip=chip),
        ]

    whole = compute(slice(0, rows))
    for part in (slice(0, 1), slice(120, 135), slice(rows - 1, rows)):
        for got, all_rows in zip(compute(part), whole, strict=True):
            assert_bitwise(got, all_rows[part])


@both_chips
def test_no_rows_give_no_rows(chip: Chip) -> None:
    x, weight, bias = _operands(0, 64, 48)
    assert vision_linear(x, weight, bias, chip=chip).shape == (0, 48)
    assert vision_linear_add(x, weight, None, torch.zeros(0, 48, dtype=BF16), chip=chip).shape == (0, 48)
    assert vision_linear_swiglu(x, weight, chip=chip).shape == (0, 24)
    assert vision_linear_gelu(x, weight, bias, chip=chip).shape == (0, 48)


@pytest.mark.parametrize(
    "changes",
    [
        {"x_NK": torch.zeros(3, 64)},
        {"x_NK": torch.zeros(3, 128, dtype=BF16)[:, ::2]},
        {"x_NK": torch.zeros(3, 32, dtype=BF16)},
        {"weight_OK": torch.zeros(48, 64)},
        {"bias_O": torch.zeros(47, dtype=BF16)},
        {"residual_NO": torch.zeros(2, 48, dtype=BF16)},
        {"residual_NO": torch.zeros(3, 48)},
    ],
    ids=["dtype", "strides", "width", "weight dtype", "bias", "residual rows", "residual dtype"],
)
def test_operands_that_do_not_fit_are_refused(changes: dict[str, Any]) -> None:
    x, weight, bias = _operands(3, 64, 48)
    operands = {"x_NK": x, "weight_OK": weight, "bias_O": bias, "residual_NO": torch.zeros(3, 48, dtype=BF16)}
    with pytest.raises(ValueError, match="expected contiguous bfloat16"):
        vision_linear_add(**(operands | changes), chip=Chip.SM_90)
