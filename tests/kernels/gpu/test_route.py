"""The router against ref. Logits differ by the order of a sum, so ids are compared exactly where sums are exact."""

import pytest
import torch
from torch import Tensor

from prefill_kernels import ref
from prefill_kernels.gpu.route import route
from prefill_kernels.numerics import PRODUCTION
from prefill_testing.numeric import assert_bitwise, assert_close, random_tensor


def _whole_numbers(seed: int, *shape: int, limit: int, scale: float) -> Tensor:
    """Small multiples of a power of two: every sum of their products is exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randint(-limit, limit + 1, shape, generator=generator) * scale).bfloat16()


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    ("num_rows", "width", "num_experts", "topk"),
    [
        pytest.param(0, 64, 9, 3, id="no rows"),
        pytest.param(1, 96, 9, 3, id="one row, a part of a step"),
        pytest.param(19, 64, 16, 6, id="two thirds of the experts"),
        pytest.param(5, 128, 3, 3, id="all experts"),
        pytest.param(135, 64, 384, 6, id="two row tiles, released experts"),
    ],
)
def test_choice_and_weights_equal_ref_where_sums_are_exact(
    num_rows: int, width: int, num_experts: int, topk: int
) -> None:
    # Logits are multiples of 1/8 with many ties, so that the lowest id decides often.
    x = _whole_numbers(1, num_rows, width, limit=3, scale=0.5)
    gate = _whole_numbers(2, num_experts, width, limit=2, scale=0.25)
    bias = torch.arange(num_experts).remainder(3) * 0.25
    image_bias = torch.arange(num_experts).remainder(2) * 4.0
    is_image = torch.arange(num_rows) % 3 == 1
    inputs = (x, gate, bias, image_bias, is_image)
    actual = route(*inputs, topk=topk, scaling=1.5, numerics=PRODUCTION)
    expected = ref.route(*inputs, topk=topk, scaling=1.5, numerics=PRODUCTION)
    assert_bitwise(actual.expert_ids, expected.expert_ids)
    # log1p has another formula than torch's: a few units in the last place.
    assert_close(actual.weights, expected.weights, dtype=torch.float32)


def test_random_rows_of_the_released_width_choose_as_ref() -> None:
    x = random_tensor(3, 9, 5120, dtype=torch.bfloat16)
    gate = random_tensor(4, 384, 5120, dtype=torch.bfloat16, scale=0.02)
    bias = random_tensor(5, 384, scale=0.1)
    inputs = (x, gate, bias, None, torch.ones(9, dtype=torch.bool))
    actual = route(*inputs, topk=6, scaling=1.5, numerics=PRODUCTION)
    expected = ref.route(*inputs, topk=6, scaling=1.5, numerics=PRODUCTION)
    # Ranks at the border of the choice are 2e-3 apart at least, a thousand times what the order of a sum changes.
    assert_bitwise(actual.expert_ids, expected.expert_ids)
    assert_close(actual.weights, expected.weights, dtype=torch.float32)


def test_a_row_does_not_depend_on_the_others() -> None:
    x = random_tensor(6, 150, 96, dtype=torch.bfloat16)
    gate, bias = random_tensor(7, 130, 96, dtype=torch.bfloat16), random_tensor(8, 130)
    is_image = torch.arange(150) % 2 == 0

    def routed(rows: slice) -> tuple[Tensor, Tensor]:
        routing = route(x[rows], gate, bias, -bias, is_image[rows], topk=6, scaling=1.5, numerics=PRODUCTION)
        return routing.expert_ids, routing.weights

    together = routed(slice(0, 150))
    for rows in (slice(0, 1), slice(127, 130), slice(149, 150)):
        for alone, of_all in zip(routed(rows), together, strict=True):
            assert_bitwise(alone, of_all[rows])


def test_a_row_of_nan_gets_valid_ids_and_leaves_the_others_alone() -> None:
    x = random_tensor(9, 4, 64, dtype=torch.bfloat16)
    gate, bias = random_tensor(10, 20, 64, dtype=torch.bfloat16), random_tensor(11, 20)
    is_image = torch.zeros(4, dtype=torch.bool)
    clean = route(x, gate, bias, None, is_image, topk=6, scaling=1.5, numerics=PRODUCTION)
    x[2] = torch.nan
    spoiled = route(x, gate, bias, None, is_image, topk=6, scaling=1.5, numerics=PRODUCTION)
    assert spoiled.expert_ids[2].tolist() == [0, 1, 2, 3, 4, 5]
    assert spoiled.weights[2].isnan().all()
    others = [0, 1, 3]
    assert_bitwise(spoiled.expert_ids[others], clean.expert_ids[others])
    assert_bitwise(spoiled.weights[others], clean.weights[others])


def test_scores_at_both_ends_of_the_softplus() -> None:
    # One channel, so that logit e is gate e: from e**-60 over the border at 20 to 3e38.
    logits = torch.tensor([-60, -20, -3, -0.5, 0, 0.5, 3, 19.875, 20, 20.125, 60, 3e38]).bfloat16()
    gate = torch.zeros(12, 32, dtype=torch.bfloat16)
    gate[:, 0] = logits
    x = torch.zeros(1, 32, dtype=torch.bfloat16)
    x[0, 0] = 1
    inputs = (x, gate, torch.zeros(12), None, torch.zeros(1, dtype=torch.bool))
    for topk in (6, 12):
        actual = route(*inputs, topk=topk, scaling=1.0, numerics=PRODUCTION)
        expected = ref.route(*inputs, topk=topk, scaling=1.0, numerics=PRODUCTION)
        assert_bitwise(actual.expert_ids, expected.expert_ids)
        assert torch.allclose(actual.weights, expected.weights, rtol=2e-6, atol=0)


def test_other_dtypes_are_refused() -> None:
    x = torch.ones(2, 32, dtype=torch.bfloat16)
    is_image = torch.zeros(2, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"gate is torch.float32.*expected contiguous bfloat16"):
        route(x, torch.ones(4, 32), torch.zeros(4), None, is_image, topk=2, scaling=1.0, numerics=PRODUCTION)
