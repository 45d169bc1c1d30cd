from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from prefill_kernels.ref import fixed_math
from prefill_testing.numeric import assert_bitwise, random_tensor, relative_l2


@pytest.mark.parametrize("width", [1, 2, 3, 7, 96, 255, 640])
def test_tree_sum_equals_the_sum(width: int) -> None:
    x = random_tensor(width, 4, 3, width)
    assert relative_l2(fixed_math.tree_sum(x), x.double().sum(-1)) < 1e-6


def test_tree_sum_skips_zeros_exactly() -> None:
    x = random_tensor(1, 5, 40)
    padded = torch.cat([x, torch.zeros(5, 40)], dim=-1)
    assert_bitwise(fixed_math.tree_sum(padded), fixed_math.tree_sum(x))


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (fixed_math.sigmoid, torch.sigmoid),
        (fixed_math.silu, torch.nn.functional.silu),
        (fixed_math.softplus, torch.nn.functional.softplus),
    ],
    ids=["sigmoid", "silu", "softplus"],
)
def test_activations_agree_with_torch_over_the_whole_range(
    ours: Callable[[Tensor], Tensor], theirs: Callable[[Tensor], Tensor]
) -> None:
    x = torch.cat([torch.linspace(-120, 120, 4801), torch.tensor([-1e30, 1e30, -0.0, 20.0, 20.0001])])
    actual = ours(x)
    assert torch.isfinite(actual).all()
    assert torch.allclose(actual.double(), theirs(x.double()), rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("function", [fixed_math.sigmoid, fixed_math.silu, fixed_math.softplus])
def test_activations_do_not_depend_on_the_place_in_the_tensor(function: Callable[[Tensor], Tensor]) -> None:
    x = random_tensor(2, 5000, scale=5)
    whole = function(x)
    for length in range(1, 40):
        for start in range(0, 4000, 97):
            assert_bitwise(function(x[start : start + length].clone()), whole[start : start + length])
