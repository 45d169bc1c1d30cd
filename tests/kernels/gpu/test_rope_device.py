"""Angles inside kernels against torch in float64, bit by bit: the quantisers behind a rotation see every one."""

import pytest
import torch
from torch import Tensor

from prefill_kernels.gpu.rope_device import rope_table
from prefill_kernels.rope_tables import rope_frequencies
from prefill_testing.numeric import assert_bitwise

pytestmark = pytest.mark.usefixtures("poisoned")
YARN = (16.0, 32.0, 1.0, 65536)


def _expected(positions: Tensor, frequencies: Tensor) -> Tensor:
    angles = (positions.float().unsqueeze(-1) * frequencies).double()
    return torch.cat([angles.cos().float(), angles.sin().float()], dim=-1)


@pytest.mark.parametrize(("theta", "yarn"), [(10_000.0, None), (160_000.0, YARN)], ids=["plain", "yarn"])
def test_table_is_correctly_rounded_at_all_lengths(theta: float, yarn: tuple[float, float, float, int] | None) -> None:
    frequencies = rope_frequencies(rope_dim=64, theta=theta, yarn=yarn)
    positions = torch.randint(0, 2**20, (2000,), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    positions[:300] = torch.arange(300)
    positions[300:600] = torch.arange(2**20 - 300, 2**20)
    assert_bitwise(rope_table(positions, frequencies), _expected(positions, frequencies))


@pytest.mark.parametrize("num_pairs", [8, 12, 32])
@pytest.mark.parametrize("num_rows", [0, 1, 33])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_table_of_any_size(num_rows: int, num_pairs: int, dtype: torch.dtype) -> None:
    frequencies = rope_frequencies(rope_dim=2 * num_pairs, theta=10_000.0, yarn=None)
    positions = torch.arange(num_rows, dtype=dtype) * 3971
    table = rope_table(positions, frequencies)
    assert table.shape == (num_rows, 2 * num_pairs)
    assert_bitwise(table, _expected(positions, frequencies))
