import math

import pytest
import torch

from prefill_kernels.ref import rms_norm
from prefill_testing.numeric import assert_close, random_tensor


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("eps", [1e-20, 1e-6])
def test_norm_matches_a_loop(dtype: torch.dtype, eps: float) -> None:
    x, weight = random_tensor(1, 3, 4, 33, dtype=dtype), random_tensor(2, 33, dtype=torch.bfloat16)
    expected = torch.empty(3, 4, 33, dtype=torch.float64)
    for i in range(3):
        for j in range(4):
            row = [float(v) for v in x[i, j]]
            rho = 1 / math.sqrt(sum(v * v for v in row) / 33 + eps)
            expected[i, j] = torch.tensor(
                [v * rho * float(w) for v, w in zip(row, weight, strict=True)], dtype=torch.float64
            )
    out = rms_norm(x, weight, eps=eps)
    assert out.dtype == dtype
    assert_close(out, expected, dtype=dtype)


def test_zero_row_gives_zeros_at_the_smallest_eps() -> None:
    assert rms_norm(torch.zeros(2, 8, dtype=torch.bfloat16), torch.ones(8), eps=1e-20).abs().max() == 0


def test_bfloat16_is_rounded_once() -> None:
    x, weight = random_tensor(3, 50, 64, dtype=torch.bfloat16), random_tensor(4, 64, dtype=torch.bfloat16)
    exact = rms_norm(x.double(), weight, eps=1e-20)
    assert (rms_norm(x, weight, eps=1e-20) == exact.bfloat16()).double().mean() > 0.999


def test_no_rows_give_no_rows() -> None:
    assert rms_norm(torch.zeros(0, 8), torch.ones(8), eps=1e-20).shape == (0, 8)
