import cmath
import math

import pytest
import torch

from prefill_kernels.ref.rope import rope
from prefill_kernels.rope_tables import rope_frequencies
from prefill_testing.numeric import assert_bitwise, assert_close, fraction_equal, random_tensor

YARN = (16.0, 32.0, 1.0, 65536)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(5, 24), (5, 3, 24), (0, 3, 24)], ids=str)
def test_rotation_is_a_complex_product_on_the_last_channels(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = random_tensor(1, *shape, dtype=dtype)
    positions = torch.tensor([0, 1, 130, 7, 99], dtype=torch.int32)[: shape[0]]
    frequencies = rope_frequencies(rope_dim=16, theta=10000.0, yarn=None)
    expected = x.double().clone()
    for row, position in zip(expected.view(shape[0], math.prod(shape[1:-1]), 24), positions.tolist(), strict=True):
        for vector in row:
            for i, frequency in enumerate(frequencies.tolist()):
                angle = float(torch.tensor(position, dtype=torch.float32) * torch.tensor(frequency))
                z = complex(vector[8 + 2 * i], vector[9 + 2 * i]) * cmath.exp(1j * angle)
                vector[8 + 2 * i], vector[9 + 2 * i] = z.real, z.imag
    out = rope(x, positions, frequencies)
    assert out.dtype == dtype
    assert_close(out, expected, dtype=dtype)
    assert_bitwise(out[..., :8], x[..., :8])


def test_inverse_undoes_the_rotation() -> None:
    x, positions = random_tensor(2, 6, 2, 64, dtype=torch.float64), torch.arange(0, 600, 100)
    frequencies = rope_frequencies(rope_dim=64, theta=160000.0, yarn=YARN)
    turned = rope(x, positions, frequencies)
    assert fraction_equal(turned, x) < 0.3
    assert_close(rope(turned, positions, frequencies, inverse=True), x, dtype=torch.float64)


def test_rotation_equals_the_official_complex_multiply() -> None:
    x, positions = random_tensor(3, 200, 4, 64, dtype=torch.bfloat16), torch.arange(200) * 97
    frequencies = rope_frequencies(rope_dim=64, theta=160000.0, yarn=YARN)
    polar = torch.polar(torch.ones(200, 32), positions.float().unsqueeze(-1) * frequencies).unsqueeze(1)
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    official = torch.view_as_real(pairs * polar).flatten(-2).bfloat16()
    assert fraction_equal(rope(x, positions, frequencies), official) > 0.9999


def test_plain_frequencies_fall_geometrically() -> None:
    frequencies = rope_frequencies(rope_dim=64, theta=10000.0, yarn=None)
    expected = torch.tensor([10000.0 ** (-2 * i / 64) for i in range(32)])
    assert torch.allclose(frequencies, expected, rtol=3e-7, atol=0)
    assert frequencies[0] == 1


def test_yarn_ramps_between_pairs_15_and_25_in_the_release() -> None:
    plain = rope_frequencies(rope_dim=64, theta=160000.0, yarn=None)
    scaled = rope_frequencies(rope_dim=64, theta=160000.0, yarn=YARN)
    for i in range(32):
        t = min(max((i - 15) / 10, 0), 1)
        assert math.isclose(float(scaled[i]), float(plain[i]) * (t / 16 + 1 - t), rel_tol=1e-6)
