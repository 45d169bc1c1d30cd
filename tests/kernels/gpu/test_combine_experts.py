"""The sum over expert slots against ref: only additions in a fixed order, so bit by bit."""

import pytest
import torch

from prefill_kernels import ref
from prefill_kernels.gpu.combine_experts import combine_experts
from prefill_testing.numeric import assert_bitwise, random_tensor


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    ("num_rows", "topk", "width"),
    [
        pytest.param(0, 6, 5120, id="no rows"),
        pytest.param(1, 6, 5120, id="one row"),
        pytest.param(5, 3, 1120, id="a part of a piece"),
        pytest.param(7, 1, 96, id="narrow"),
    ],
)
def test_slots_then_shared_are_added_in_order(num_rows: int, topk: int, width: int) -> None:
    routed = random_tensor(1, num_rows, topk, width, dtype=torch.bfloat16)
    # An absent expert's slot is zero; -0 + 0 is where a wrong start of the sum would show.
    routed[:, topk // 2] = -0.0
    shared = random_tensor(2, num_rows, width, dtype=torch.bfloat16, scale=0.01)
    shared[:, ::7] = -0.0
    assert_bitwise(combine_experts(routed, shared), ref.combine_experts(routed, shared))


def test_other_dtypes_and_strides_are_refused() -> None:
    routed, shared = torch.ones(2, 3, 32, dtype=torch.bfloat16), torch.ones(2, 32, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"torch.float32.*expected contiguous bfloat16"):
        combine_experts(routed.float(), shared)
    with pytest.raises(ValueError, match="strides"):
        combine_experts(routed, shared.repeat(1, 2)[:, ::2])
