"""The block-diagonal product against its definition, and the quantiser behind it to the bit."""

import pytest
import torch
from torch import Tensor

from prefill_kernels.gpu.chip import Chip
from prefill_kernels.gpu.expanded_weight import ExpandedWeight, expand_weight
from prefill_kernels.gpu.grouped_linear import grouped_linear
from prefill_kernels.number_formats import (
    dequantise_weight,
    quantise_fp8_ue8m0,
    quantise_weight_fp4,
    quantise_weight_fp8,
    round_trip_fp8,
)
from prefill_kernels.numerics import PRODUCTION
from prefill_kernels.weights import DenseWeight, Weight
from prefill_testing.numeric import assert_bitwise, assert_close, random_tensor

pytestmark = pytest.mark.usefixtures("poisoned")
every_form = pytest.mark.parametrize("form", ["dense", "fp8", "expanded"])


@pytest.mark.parametrize("chip", Chip)
@every_form
@pytest.mark.parametrize(
    ("num_rows", "num_groups", "width", "num_out"),
    [
        pytest.param(1, 2, 96, 32, id="one row, a part of a step"),
        pytest.param(259, 3, 64, 160, id="rows and outputs cross a tile"),
        pytest.param(0, 2, 64, 32, id="no rows"),
    ],
)
def test_groups_are_multiplied_apart_and_quantised(
    num_rows: int, num_groups: int, width: int, num_out: int, form: str, chip: Chip
) -> None:
    x = random_tensor(1, num_rows, num_groups, width, dtype=torch.bfloat16)
    weight, matrix = _weight(2, num_groups * num_out, width, form)
    expected = torch.einsum("ngk,gok->ngo", x.double(), matrix.view(num_groups, num_out, width))
    rows = grouped_linear(x, weight, numerics=PRODUCTION, chip=chip)
    assert rows.plain.dtype == torch.bfloat16
    assert_close(rows.plain, expected.flatten(1), dtype=torch.bfloat16)
    assert rows.seen is not None
    if chip is Chip.SM_90:
        assert rows.scales is None
        assert_bitwise(rows.seen, round_trip_fp8(rows.plain, dtype=torch.bfloat16))
    else:
        codes, scales = quantise_fp8_ue8m0(rows.plain)
        assert rows.scales is not None
        assert_bitwise(rows.seen, codes)
        assert_bitwise(rows.scales, scales)


@pytest.mark.parametrize("chip", Chip)
@every_form
def test_a_row_does_not_depend_on_the_others(form: str, chip: Chip) -> None:
    x = random_tensor(3, 270, 2, 64, dtype=torch.bfloat16)
    weight, _ = _weight(4, 64, 64, form)
    batch = grouped_linear(x, weight, numerics=PRODUCTION, chip=chip)
    assert batch.seen is not None
    for first, end in ((0, 1), (255, 258)):
        part = grouped_linear(x[first:end], weight, numerics=PRODUCTION, chip=chip)
        assert part.seen is not None
        assert_bitwise(part.plain, batch.plain[first:end])
        assert_bitwise(part.seen, batch.seen[first:end])


def test_a_group_of_the_released_width_in_a_strided_tensor() -> None:
    storage = random_tensor(5, 3, 3, 4096, dtype=torch.bfloat16)
    x = storage[:, 1:]
    weight, matrix = _weight(6, 64, 4096, "fp8")
    rows = grouped_linear(x, weight, numerics=PRODUCTION, chip=Chip.SM_90)
    expected = torch.einsum("ngk,gok->ngo", x.double(), matrix.view(2, 32, 4096)).flatten(1)
    assert_close(rows.plain, expected, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("shape", "num_out"),
    [
        pytest.param((3, 2, 64), 80, id="40 outputs per group"),
        pytest.param((3, 3, 64), 64, id="64 outputs of 3 groups"),
    ],
)
def test_outputs_without_whole_scale_groups_are_refused(shape: tuple[int, ...], num_out: int) -> None:
    with pytest.raises(ValueError, match="multiple of 32 outputs per group"):
        grouped_linear(
            torch.zeros(shape, dtype=torch.bfloat16),
            _weight(7, num_out, 64, "dense")[0],
            numerics=PRODUCTION,
            chip=Chip.SM_90,
        )


def test_an_fp4_weight_is_refused() -> None:
    weight = quantise_weight_fp4(random_tensor(8, 64, 128))
    with pytest.raises(ValueError, match="Fp4Weight"):
        grouped_linear(torch.zeros(3, 2, 64, dtype=torch.bfloat16), weight, numerics=PRODUCTION, chip=Chip.SM_90)


def _weight(seed: int, num_out: int, width: int, form: str) -> tuple[Weight | ExpandedWeight, Tensor]:
    """A weight in this form and its values in float64."""
    values = random_tensor(seed, num_out, width, dtype=torch.bfloat16)
    values *= 2.0 ** (torch.arange(num_out)[:, None] // 32 % 5 - 2) * 2.0 ** (torch.arange(width) // 32 % 7 - 3)
    if form == "dense":
        return DenseWeight(data=values), values.double()
    stored = quantise_weight_fp8(values)
    return (expand_weight(stored) if form == "expanded" else stored), dequantise_weight(stored, torch.float64)
