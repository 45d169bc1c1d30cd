"""Products with stored weights against their definition: exact dequantised operands, summed in float64."""

import pytest
import torch
from torch import Tensor

from prefill_kernels.gpu import library_linear
from prefill_kernels.gpu.chip import Chip
from prefill_kernels.gpu.expanded_weight import ExpandedWeight, expand_weight
from prefill_kernels.gpu.matmul import linear, linear_pair, lm_head, plan_product
from prefill_kernels.gpu.norm_rows import quantise_rows
from prefill_kernels.number_formats import (
    dequantise_weight,
    quantise_weight_fp4,
    quantise_weight_fp8,
    round_trip_fp8,
)
from prefill_kernels.numerics import PRODUCTION
from prefill_kernels.ops import Rows
from prefill_kernels.weights import DenseWeight, Fp8Weight, Weight
from prefill_testing.numeric import assert_bitwise, assert_close, random_tensor

poisoned = pytest.mark.usefixtures("poisoned")
# (chip, form): all a chip has.
FORMS = [(Chip.SM_90, "dense"), (Chip.SM_90, "float32"), (Chip.SM_90, "fp8"), (Chip.SM_90, "fp4")]
FORMS += [(Chip.SM_90, "expanded"), (Chip.SM_100, "dense"), (Chip.SM_100, "fp8"), (Chip.SM_100, "fp4")]
every_form = pytest.mark.parametrize(("chip", "form"), FORMS, ids=[f"{chip.name}-{form}" for chip, form in FORMS])


@pytest.mark.parametrize(
    ("form", "num_out", "width", "chip", "is_pair", "expected"),
    [
        # kernel form, scaled, reads seen, out, rows, K step
        ("dense", 512, 5120, Chip.SM_90, True, ("dense", False, False, 128, 256, 64)),
        ("dense", 32, 5120, Chip.SM_100, False, ("dense", False, False, 64, 256, 64)),
        ("fp8", 32768, 1280, Chip.SM_90, False, ("fp8", False, True, 128, 256, 64)),
        ("expanded", 32768, 1280, Chip.SM_90, False, ("dense", False, True, 128, 256, 64)),
        ("fp8", 32768, 1280, Chip.SM_100, False, ("fp8", True, True, 128, 128, 128)),
        ("fp8", 5120, 8192, Chip.SM_100, False, ("fp8", True, True, 128, 256, 128)),
        ("fp8", 1280, 5120, Chip.SM_100, True, ("fp8", True, True, 128, 128, 128)),
        ("fp8", 32, 5120, Chip.SM_100, False, ("fp8", True, True, 128, 256, 128)),
        ("fp4", 5120, 8192, Chip.SM_100, False, ("fp4", True, True, 128, 128, 128)),
    ],
)
def test_plan_depends_on_weight_and_chip(
    form: str, num_out: int, width: int, chip: Chip, is_pair: bool, expected: tuple[object, ...]
) -> None:
    plan = plan_product(form, num_out, width, chip, is_pair=is_pair)
    tile = plan.tile
    assert (plan.form, plan.scaled, plan.reads_seen, tile.out, tile.rows, tile.width) == expected


@poisoned
@every_form
@pytest.mark.parametrize(
    ("num_rows", "width", "num_out"),
    [
        pytest.param(1, 96, 40, id="one row, a part of every step"),
        pytest.param(261, 192, 140, id="rows and outputs cross a tile"),
        pytest.param(130, 256, 33, id="whole steps, a part of a weight block"),
    ],
)
def test_linear_is_the_product_of_dequantised_operands(
    num_rows: int, width: int, num_out: int, chip: Chip, form: str
) -> None:
    x = random_tensor(1, num_rows, width, dtype=torch.bfloat16)
    weight, matrix = _weight(2, num_out, width, form)
    expected = _seen(x, form).double() @ matrix.t()
    wide = linear(Rows(plain=x), weight, numerics=PRODUCTION, wide_output=True, chip=chip)
    assert wide.dtype == torch.float32
    assert_close(wide, expected, dtype=torch.float32)
    # The rounded output is the wide one, rounded.
    assert_bitwise(linear(Rows(plain=x), weight, numerics=PRODUCTION, chip=chip), wide.bfloat16())


@poisoned
@every_form
def test_no_rows_give_no_rows(chip: Chip, form: str) -> None:
    weight, _ = _weight(3, 40, 64, form)
    x = Rows(plain=torch.zeros(0, 64, dtype=torch.bfloat16))
    assert linear(x, weight, numerics=PRODUCTION, chip=chip).shape == (0, 40)


@every_form
def test_a_row_does_not_depend_on_the_others(chip: Chip, form: str) -> None:
    x = random_tensor(4, 300, 128, dtype=torch.bfloat16)
    weight, _ = _weight(5, 96, 128, form)
    batch = linear(Rows(plain=x), weight, numerics=PRODUCTION, wide_output=True, chip=chip)
    for first, end in ((0, 1), (131, 140), (299, 300)):
        part = linear(Rows(plain=x[first:end]), weight, numerics=PRODUCTION, wide_output=True, chip=chip)
        assert_bitwise(part, batch[first:end])


@pytest.mark.parametrize("chip", Chip)
def test_quantised_products_read_the_seen_form_and_dense_ones_the_plain(chip: Chip) -> None:
    x = random_tensor(6, 5, 64, dtype=torch.bfloat16)
    seen = quantise_rows(x, numerics=PRODUCTION, chip=chip)
    nothing = torch.full_like(x, float("nan"))
    fp8, _ = _weight(7, 40, 64, "fp8")
    only_seen = Rows(plain=nothing, seen=seen.seen, scales=seen.scales)
    expected = linear(Rows(plain=x), fp8, numerics=PRODUCTION, chip=chip)
    assert_bitwise(linear(only_seen, fp8, numerics=PRODUCTION, chip=chip), expected)
    dense, matrix = _weight(8, 40, 64, "dense")
    only_plain = Rows(plain=x, seen=nothing, scales=seen.scales)
    assert_close(
        linear(only_plain, dense, numerics=PRODUCTION, chip=chip), x.double() @ matrix.t(), dtype=torch.bfloat16
    )


@pytest.mark.parametrize(("chip", "other"), [(Chip.SM_90, Chip.SM_100), (Chip.SM_100, Chip.SM_90)])
def test_rows_of_another_chip_are_refused(chip: Chip, other: Chip) -> None:
    rows = quantise_rows(random_tensor(9, 5, 64, dtype=torch.bfloat16), numerics=PRODUCTION, chip=other)
    weight, _ = _weight(10, 40, 64, "fp8")
    with pytest.raises(ValueError, match=f"on {chip.name} reads"):
        linear(rows, weight, numerics=PRODUCTION, chip=chip)


@poisoned
@every_form
def test_a_pair_is_two_products(chip: Chip, form: str) -> None:
    x = Rows(plain=random_tensor(11, 37, 96, dtype=torch.bfloat16))
    first, _ = _weight(12, 150, 96, form)
    second, _ = _weight(13, 70, 96, form)
    for wide in (False, True):
        pair = linear_pair(x, first, second, numerics=PRODUCTION, wide_output=wide, chip=chip)
        for actual, weight in zip(pair, (first, second), strict=True):
            assert actual.is_contiguous()
            assert_bitwise(actual, linear(x, weight, numerics=PRODUCTION, wide_output=wide, chip=chip))


def test_a_pair_of_two_formats_is_refused() -> None:
    x = Rows(plain=torch.zeros(3, 64, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="one format"):
        linear_pair(
            x, _weight(14, 40, 64, "fp8")[0], _weight(15, 40, 64, "dense")[0], numerics=PRODUCTION, chip=Chip.SM_90
        )


@pytest.mark.parametrize("chip", Chip)
def test_strided_rows_are_read_where_they_lie(chip: Chip) -> None:
    wide = random_tensor(16, 9, 200, dtype=torch.bfloat16)
    weight, _ = _weight(17, 40, 64, "dense")
    expected = linear(Rows(plain=wide[:, 8:72].contiguous()), weight, numerics=PRODUCTION, chip=chip)
    assert_bitwise(linear(Rows(plain=wide[:, 8:72]), weight, numerics=PRODUCTION, chip=chip), expected)


def test_offsets_beyond_31_bits() -> None:
    stride = 2**30
    storage = torch.empty(2 * stride + 64, dtype=torch.bfloat16)  # never touched but for three rows
    x = storage.as_strided((3, 64), (stride, 1))
    x.copy_(random_tensor(18, 3, 64))
    weight, matrix = _weight(19, 40, 64, "dense")
    out = linear(Rows(plain=x), weight, numerics=PRODUCTION, chip=Chip.SM_90)
    assert_close(out, x.double() @ matrix.t(), dtype=torch.bfloat16)


@pytest.mark.parametrize("chip", Chip)
def test_the_narrowest_weight_of_the_released_model(chip: Chip) -> None:
    x = random_tensor(20, 3, 5120, dtype=torch.bfloat16)
    weight, matrix = _weight(21, 32, 5120, "dense")
    out = linear(Rows(plain=x), weight, numerics=PRODUCTION, wide_output=True, chip=chip)
    assert_close(out, x.double() @ matrix.t(), dtype=torch.float32)


@poisoned
@pytest.mark.parametrize("num_rows", [0, 1, 33])
def test_logits_are_wide_and_unrounded(num_rows: int) -> None:
    h = random_tensor(22, num_rows, 200, dtype=torch.bfloat16)
    weight, matrix = _weight(23, 131, 200, "dense")
    assert isinstance(weight, DenseWeight)
    out = lm_head(h, weight, numerics=PRODUCTION)
    assert out.dtype == torch.float32
    assert_close(out, h.double() @ matrix.t(), dtype=torch.float32)


def test_logits_of_a_row_do_not_depend_on_the_others() -> None:
    h, weight = random_tensor(24, 40, 128, dtype=torch.bfloat16), _weight(25, 131, 128, "dense")[0]
    assert isinstance(weight, DenseWeight)
    batch = lm_head(h, weight, numerics=PRODUCTION)
    assert_bitwise(lm_head(h[35:36], weight, numerics=PRODUCTION), batch[35:36])


def test_widths_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match="expected one width"):
        linear(
            Rows(plain=torch.zeros(3, 64, dtype=torch.bfloat16)),
            _weight(26, 40, 96, "dense")[0],
            numerics=PRODUCTION,
            chip=Chip.SM_90,
        )


@pytest.mark.parametrize("shape", [(70, 40), (2080, 64)], ids=str)
def test_an_expanded_weight_holds_the_same_values(shape: tuple[int, int]) -> None:
    weight = quantise_weight_fp8(random_tensor(27, *shape))
    assert_bitwise(expand_weight(weight).data, dequantise_weight(weight, torch.bfloat16))


@pytest.mark.parametrize("form", ["dense", "expanded", "fp8"])
def test_the_library_path_computes_the_same_products(form: str) -> None:
    x = random_tensor(28, 7, 96, dtype=torch.bfloat16)
    weight, matrix = _weight(29, 40, 96, form)
    for wide in (False, True):
        out = library_linear.linear(Rows(plain=x), weight, numerics=PRODUCTION, wide_output=wide, chip=Chip.SM_90)
        dtype = torch.float32 if wide else torch.bfloat16
        assert out.dtype == dtype
        assert_close(out, _seen(x, form).double() @ matrix.t(), dtype=dtype)


def _weight(seed: int, num_out: int, width: int, form: str) -> tuple[Weight | ExpandedWeight, Tensor]:
    """A weight in this form and its values in float64."""
    values = random_tensor(seed, num_out, width, dtype=torch.bfloat16)
    # Each block of 32 rows and each scale group gets a magnitude of its own, so that a wrong scale shows.
    values *= 2.0 ** (torch.arange(num_out)[:, None] // 32 % 5 - 2) * 2.0 ** (torch.arange(width) // 32 % 7 - 3)
    match form:
        case "fp8" | "expanded":
            stored: Weight = quantise_weight_fp8(values)
        case "fp4":
            stored = quantise_weight_fp4(values)
        case "float32":
            stored = DenseWeight(data=values.float())
        case _:
            stored = DenseWeight(data=values)
    matrix = dequantise_weight(stored, torch.float64)
    if form == "expanded":
        assert isinstance(stored, Fp8Weight)
        return expand_weight(stored), matrix
    return stored, matrix


def _seen(x: Tensor, form: str) -> Tensor:
    return x if form in ("dense", "float32") else round_trip_fp8(x, dtype=torch.bfloat16)
