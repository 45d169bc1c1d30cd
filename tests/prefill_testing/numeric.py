"""How close is close enough, per format; and the ways tests compare tensors.

The table is the house's only one: an op that needs more says so at its call, with the reason.
"""

import torch
from torch import Tensor

from prefill_kernels.numerics import PRODUCTION, Numerics

FLOAT64 = Numerics(activation=torch.float64, quantise_activations=False, quantise_cache=False)
FLOAT32 = Numerics(activation=torch.float32, quantise_activations=False, quantise_cache=False)
BFLOAT16 = Numerics(activation=torch.bfloat16, quantise_activations=False, quantise_cache=False)
CHECKED_QUANT = Numerics(activation=torch.float64, quantise_activations=True, quantise_cache=True)
"""What `prefill-engine check` runs for quant32 and fp32q (decisions C9)."""

ALL_NUMERICS = {"float64": FLOAT64, "float32": FLOAT32, "bfloat16": BFLOAT16, "production": PRODUCTION}

RELATIVE_L2 = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 4e-3}
"""Of an op's output against an unrounded float64 formulation; bfloat16 has one rounding of at most 2**-9 per value,
and a few inside."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def relative_l2(actual: Tensor, expected: Tensor) -> float:
    """|actual - expected| / |expected| in float64; 0 for two empty tensors."""
    assert actual.shape == expected.shape, f"shape is {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    if not expected.numel():
        return 0.0
    distance = torch.linalg.vector_norm(actual.double() - expected.double())
    return float(distance / torch.linalg.vector_norm(expected.double()).clamp_min(1e-300))


def assert_close(actual: Tensor, expected: Tensor, *, dtype: torch.dtype, factor: float = 1.0) -> None:
    """Relative L2 within `factor` times the table's entry for `dtype` (the activation dtype of the run)."""
    error = relative_l2(actual, expected)
    limit = factor * RELATIVE_L2[dtype]
    assert error <= limit, f"relative L2 error {error:.3e} is over {limit:.3e} for {dtype}"


def assert_bitwise(actual: Tensor, expected: Tensor) -> None:
    """Same shape, dtype and bits (so NaN equals itself and -0 differs from 0)."""
    assert actual.dtype == expected.dtype, f"dtype is {actual.dtype}, expected {expected.dtype}"
    assert actual.shape == expected.shape, f"shape is {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    bits = _BITS[actual.element_size()]
    different = actual.contiguous().view(bits) != expected.contiguous().view(bits)
    assert not different.any(), (
        f"{int(different.sum())} of {different.numel()} values differ, first at {different.nonzero()[0].tolist()}"
    )


def fraction_equal(actual: Tensor, expected: Tensor) -> float:
    """Share of equal elements: how a test tells apart two rounding rules that both pass a tolerance."""
    assert actual.shape == expected.shape
    return float((actual == expected).double().mean())


def random_tensor(seed: int, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    """Normal values, the same in every process."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype)
