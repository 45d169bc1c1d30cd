"""norm_rows against ref: the norm within the order of one sum, the quantiser behind it to the bit."""

import pytest
import torch
from torch import Tensor

from prefill_kernels import ref
from prefill_kernels.gpu.chip import Chip
from prefill_kernels.gpu.norm_rows import norm_rows, quantise_rows, rms_norm
from prefill_kernels.number_formats import quantise_fp8_ue8m0, round_trip_fp8
from prefill_kernels.numerics import PRODUCTION
from prefill_kernels.ops import Rows
from prefill_testing.numeric import assert_bitwise, assert_close, fraction_equal, random_tensor

pytestmark = pytest.mark.usefixtures("poisoned")
SHAPES = [(1, 32), (7, 96), (5, 1280), (3, 5120)]


@pytest.mark.parametrize("eps", [1e-20, 1e-6])
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (2, 3, 33)], ids=str)
def test_norm_equals_ref(shape: tuple[int, ...], weight_dtype: torch.dtype, eps: float) -> None:
    x = random_tensor(1, *shape, dtype=torch.bfloat16, scale=3.0)
    weight = random_tensor(2, shape[-1], dtype=weight_dtype)
    out = rms_norm(x, weight, eps=eps)
    expected = ref.rms_norm(x, weight, eps=eps)
    assert out.dtype == torch.bfloat16
    assert_close(out, expected, dtype=torch.bfloat16)
    # Only a sum's order differs, which moves a value over a rounding boundary once in many thousands.
    assert fraction_equal(out, expected) > 0.999


def test_norm_keeps_float32() -> None:
    x, weight = random_tensor(3, 4, 96), random_tensor(4, 96)
    out = rms_norm(x, weight, eps=1e-6)
    assert out.dtype == torch.float32
    assert_close(out, ref.rms_norm(x.double(), weight, eps=1e-6), dtype=torch.float32)


def test_a_zero_row_gives_zeros_at_the_smallest_eps() -> None:
    assert rms_norm(torch.zeros(2, 96, dtype=torch.bfloat16), torch.ones(96), eps=1e-20).abs().max() == 0


@pytest.mark.parametrize("chip", Chip)
@pytest.mark.parametrize("shape", [*SHAPES, (0, 96)], ids=str)
def test_norm_is_followed_by_the_quantiser(shape: tuple[int, int], chip: Chip) -> None:
    x = random_tensor(5, *shape, dtype=torch.bfloat16)
    weight = random_tensor(6, shape[1], dtype=torch.bfloat16)
    rows = norm_rows(x, weight, eps=1e-20, numerics=PRODUCTION, chip=chip)
    assert_close(rows.plain, ref.rms_norm(x, weight, eps=1e-20), dtype=torch.bfloat16)
    _assert_seen(rows, chip)


@pytest.mark.parametrize("chip", Chip)
@pytest.mark.parametrize("shape", [(1, 32), (133, 96), (2, 15360), (0, 64)], ids=str)
def test_rows_are_quantised_as_ref_does(shape: tuple[int, int], chip: Chip) -> None:
    # Magnitudes from below the quantiser's floor to far above one: every scale byte between.
    x = random_tensor(7, *shape, dtype=torch.float32) * 10.0 ** random_tensor(8, *shape, scale=3.0)
    x[: shape[0] // 2, :32] = 0
    rows = quantise_rows(x.bfloat16(), numerics=PRODUCTION, chip=chip)
    assert_bitwise(rows.plain, x.bfloat16())
    _assert_seen(rows, chip)


@pytest.mark.parametrize("chip", Chip)
def test_strided_rows_are_read_where_they_lie(chip: Chip) -> None:
    wide = random_tensor(9, 5, 192, dtype=torch.bfloat16)
    view, weight = wide[:, 64:160], random_tensor(10, 96, dtype=torch.bfloat16)
    _assert_seen(quantise_rows(view, numerics=PRODUCTION, chip=chip), chip)
    assert_bitwise(
        norm_rows(view, weight, eps=1e-20, numerics=PRODUCTION, chip=chip).plain,
        rms_norm(view.contiguous(), weight, eps=1e-20),
    )


@pytest.mark.parametrize("chip", Chip)
def test_a_row_does_not_depend_on_the_others(chip: Chip) -> None:
    x, weight = random_tensor(11, 40, 160, dtype=torch.bfloat16), random_tensor(12, 160, dtype=torch.bfloat16)
    batch = norm_rows(x, weight, eps=1e-20, numerics=PRODUCTION, chip=chip)
    for row in (0, 17, 39):
        alone = norm_rows(x[row : row + 1], weight, eps=1e-20, numerics=PRODUCTION, chip=chip)
        assert_bitwise(alone.plain, batch.plain[row : row + 1])
        assert_bitwise(alone.seen, batch.seen[row : row + 1])


def test_widths_without_whole_scale_groups_are_refused() -> None:
    x = torch.zeros(2, 40, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="40 channels"):
        quantise_rows(x, numerics=PRODUCTION, chip=Chip.SM_90)
    with pytest.raises(ValueError, match="40 channels"):
        norm_rows(x, torch.ones(40), eps=1e-6, numerics=PRODUCTION, chip=Chip.SM_100)


def _assert_seen(rows: Rows, chip: Chip) -> None:
    """seen and scales are what number_formats makes of plain."""
    seen: Tensor | None = rows.seen
    assert seen is not None
    if chip is Chip.SM_90:
        assert rows.scales is None
        assert_bitwise(seen, round_trip_fp8(rows.plain, dtype=torch.bfloat16))
    else:
        codes, scales = quantise_fp8_ue8m0(rows.plain)
        assert rows.scales is not None
        assert_bitwise(seen, codes)
        assert_bitwise(rows.scales, scales)
