import numpy as np
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
from prefill_kernels.ops import Rows
from prefill_kernels.ref import grouped_linear, linear, lm_head
from prefill_kernels.ref.tiled_matmul import tiled_matmul
from prefill_kernels.weights import DenseWeight, Weight
from prefill_testing.numeric import (
    ALL_NUMERICS,
    BFLOAT16,
    CHECKED_QUANT,
    FLOAT64,
    assert_bitwise,
    assert_close,
    fraction_equal,
    random_tensor,
)

SHAPES = [(1, 32, 5), (17, 96, 40), (40, 64, 16), (0, 32, 24)]


@pytest.mark.parametrize("shape", [(1, 7, 1), (16, 33, 15), (33, 64, 100), (0, 8, 3), (5, 1, 2)], ids=str)
def test_tiled_matmul_matches_numpy(shape: tuple[int, int, int]) -> None:
    num_rows, width, num_columns = shape
    x, w = random_tensor(1, num_rows, width), random_tensor(2, num_columns, width)
    expected = torch.from_numpy(x.double().numpy() @ w.double().numpy().T)
    assert_close(tiled_matmul(x, w, dtype=torch.float64), expected, dtype=torch.float64)
    assert_close(tiled_matmul(x, w, dtype=torch.float32), expected, dtype=torch.float32)


def test_tiled_matmul_ignores_the_alignment_of_the_weight() -> None:
    x, storage = random_tensor(3, 20, 24), random_tensor(4, 40 * 24 + 1)
    shifted = storage[1:].view(40, 24)
    assert_bitwise(tiled_matmul(x, shifted, dtype=torch.float32), tiled_matmul(x, shifted.clone(), dtype=torch.float32))


@pytest.mark.parametrize("numerics", ALL_NUMERICS.values(), ids=ALL_NUMERICS.keys())
@pytest.mark.parametrize("stored", ["dense", "fp8", "fp4"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_linear_is_the_product_of_dequantised_operands(
    numerics: Numerics, stored: str, shape: tuple[int, int, int]
) -> None:
    num_rows, width, num_out = shape
    x = random_tensor(5, num_rows, width, dtype=numerics.activation)
    weight = _store(random_tensor(6, num_out, width, dtype=torch.bfloat16), stored)
    seen = x.double()
    if numerics.quantise_activations and stored != "dense":
        seen = dequantise_fp8_ue8m0(*quantise_fp8_ue8m0(x)).double()
    expected = torch.einsum("nk,ok->no", seen, dequantise_weight(weight, torch.float64))
    out = linear(Rows(plain=x), weight, numerics=numerics)
    assert out.dtype == numerics.activation
    assert_close(out, expected, dtype=numerics.activation)
    wide = linear(Rows(plain=x), weight, numerics=numerics, wide_output=True)
    assert wide.dtype == numerics.wide
    assert_close(wide, expected, dtype=numerics.wide)


def test_dense_input_is_never_quantised() -> None:
    x, w = random_tensor(7, 8, 64, dtype=torch.bfloat16), random_tensor(8, 20, 64, dtype=torch.bfloat16)
    assert_bitwise(
        linear(Rows(plain=x), DenseWeight(data=w), numerics=PRODUCTION),
        linear(Rows(plain=x), DenseWeight(data=w), numerics=BFLOAT16),
    )


def test_quantised_product_differs_from_the_plain_one() -> None:
    x, weight = random_tensor(9, 8, 64, dtype=torch.float64), quantise_weight_fp8(random_tensor(10, 20, 64))
    assert (
        fraction_equal(
            linear(Rows(plain=x), weight, numerics=CHECKED_QUANT), linear(Rows(plain=x), weight, numerics=FLOAT64)
        )
        < 0.1
    )


@pytest.mark.parametrize("stored", ["dense", "fp8"])
@pytest.mark.parametrize("numerics", ALL_NUMERICS.values(), ids=ALL_NUMERICS.keys())
def test_grouped_linear_is_block_diagonal_and_unquantised(numerics: Numerics, stored: str) -> None:
    x = random_tensor(11, 19, 3, 64, dtype=numerics.activation)
    weight = _store(random_tensor(12, 3 * 32, 64, dtype=torch.bfloat16), stored)
    matrix = dequantise_weight(weight, torch.float64).numpy()
    expected = np.concatenate([x[:, g].double().numpy() @ matrix[32 * g : 32 * (g + 1)].T for g in range(3)], axis=1)
    out = grouped_linear(x, weight, numerics=numerics).plain
    assert out.dtype == numerics.activation
    assert_close(out, torch.from_numpy(expected), dtype=numerics.activation)


def test_logits_are_wide_and_unrounded() -> None:
    h, w = random_tensor(13, 3, 40, dtype=torch.bfloat16), random_tensor(14, 131, 40, dtype=torch.bfloat16)
    out = lm_head(h, DenseWeight(data=w), numerics=PRODUCTION)
    assert out.dtype == torch.float32
    assert_close(out, h.double() @ w.double().T, dtype=torch.float32)


def _store(w: Tensor, stored: str) -> Weight:
    match stored:
        case "fp8":
            return quantise_weight_fp8(w)
        case "fp4":
            return quantise_weight_fp4(w)
        case _:
            return DenseWeight(data=w)
