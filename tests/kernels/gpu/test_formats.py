"""gpu/formats.py against number_formats.py, bit by bit: every code, every scale, every rounding boundary of either sign."""

from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from prefill_kernels import number_formats
from prefill_kernels.gpu import formats
from prefill_testing.numeric import assert_bitwise


@triton.jit
def _quantise_kernel(
    x_ptr, codes_ptr, scale_ptr, R: tl.constexpr, C: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr
):
    row = tl.arange(0, R)[:, None]
    x = tl.load(x_ptr + row * C + tl.arange(0, C)[None, :])
    if KIND == "fp8":
        codes, scale = formats.quantise_fp8(x)
    elif KIND == "fp4_ue8m0":
        codes, scale = formats.quantise_fp4_ue8m0(x)
    else:
        codes, scale = formats.quantise_fp4_e4m3(x)
    tl.store(scale_ptr + row * (C // GROUP) + tl.arange(0, C // GROUP)[None, :], scale)
    if KIND == "fp8":
        tl.store(codes_ptr + row * C + tl.arange(0, C)[None, :], codes)
    else:
        packed = formats.pack_fp4(codes)
        tl.store(codes_ptr + row * (C // 2) + tl.arange(0, C // 2)[None, :], packed)


@triton.jit
def _dequantise_kernel(
    codes_ptr, scale_ptr, out_ptr, R: tl.constexpr, C: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr
):
    row = tl.arange(0, R)[:, None]
    scale = tl.load(scale_ptr + row * (C // GROUP) + tl.arange(0, C // GROUP)[None, :])
    if KIND == "fp8":
        values = formats.dequantise_fp8(tl.load(codes_ptr + row * C + tl.arange(0, C)[None, :]), scale)
    else:
        codes = formats.unpack_fp4(tl.load(codes_ptr + row * (C // 2) + tl.arange(0, C // 2)[None, :]))
        if KIND == "fp4_ue8m0":
            values = formats.dequantise_fp4_ue8m0(codes, scale)
        elif KIND == "fp4_e4m3":
            values = formats.dequantise_fp4_e4m3(codes, scale)
        else:
            values = formats.dequantise_fp8(formats.e2m1_to_e4m3(codes), scale)
    tl.store(out_ptr + row * C + tl.arange(0, C)[None, :], values)


GROUPS = {"fp8": 32, "fp4_ue8m0": 32, "fp4_e4m3": 16}
QUANTISE: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "fp8": number_formats.quantise_fp8_ue8m0,
    "fp4_ue8m0": number_formats.quantise_fp4_ue8m0,
    "fp4_e4m3": number_formats.quantise_fp4_e4m3,
}
E4M3_SCALES = torch.arange(1, 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


def assert_quantised_as_ref(x: Tensor, kind: str) -> None:
    """x [R, C], both powers of two."""
    num_rows, width = x.shape
    codes = torch.full((num_rows, width // (1 if kind == "fp8" else 2)), 0xA5, dtype=torch.uint8)
    scale = torch.full((num_rows, width // GROUPS[kind]), 0xA5, dtype=torch.uint8)
    _quantise_kernel[(1,)](x, codes, scale, R=num_rows, C=width, GROUP=GROUPS[kind], KIND=kind)
    expected_codes, expected_scale = QUANTISE[kind](x)
    assert_bitwise(scale, expected_scale)
    assert_bitwise(codes, expected_codes if kind == "fp8" else number_formats.pack_fp4(expected_codes))


def neighbours(x: Tensor, reach: int = 2) -> Tensor:
    """[.., 2 * reach + 1]: positive float32 values and the next ones below and above."""
    return (x.float().view(torch.int32).unsqueeze(-1) + torch.arange(-reach, reach + 1)).int().view(torch.float32)


def groups_with_amax(amax: Tensor, width: int) -> Tensor:
    """[R, width], R a power of two: each amax (or 1) first in a row whose other values are fractions of it."""
    rows = torch.ones(1 << (len(amax) - 1).bit_length())
    rows[: len(amax)] = amax
    return rows[:, None] * torch.linspace(1, -1, width)[None, :]


@pytest.mark.parametrize("kind", QUANTISE)
def test_quantisers_equal_ref_on_values_of_every_size(kind: str) -> None:
    generator = torch.Generator().manual_seed(5)
    bits = torch.randint(-(2**31), 2**31, (256, 256), generator=generator).int().view(torch.float32)
    assert_quantised_as_ref(torch.where(bits.isfinite(), bits, 1.0), kind)
    spread = torch.randn(256, 256, generator=generator) * torch.exp2(
        torch.randint(-30, 30, (256, 1), generator=generator)
    )
    assert_quantised_as_ref(spread, kind)
    assert_quantised_as_ref(torch.zeros(16, 64) * torch.tensor([1.0, -1.0]).repeat(32), kind)


@pytest.mark.parametrize("kind", QUANTISE)
def test_scales_equal_ref_at_every_boundary_of_their_rule(kind: str) -> None:
    match kind:
        case "fp8":
            limits = torch.cat([448 * torch.exp2(torch.arange(-22.0, 118.0)), torch.tensor([1e-4, 3e38])])
        case "fp4_ue8m0":
            limits = torch.cat([6 * torch.exp2(torch.arange(-126.0, 125.0)), torch.tensor([1e-38, 3e38])])
        case _:
            between = (E4M3_SCALES[1:] + E4M3_SCALES[:-1]) / 2
            limits = 6 * torch.cat([E4M3_SCALES, between, torch.tensor([2.0**-10, 460.0, 1000.0])])
    assert_quantised_as_ref(groups_with_amax(neighbours(limits).flatten(), 32), kind)


def test_e2m1_codes_under_every_e4m3_scale_equal_ref_around_every_midpoint() -> None:
    midpoints = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    around = neighbours(E4M3_SCALES[:, None] * midpoints).flatten(1)
    rows = torch.cat([around, -around, torch.zeros(len(around), 80 - 70)], dim=1)
    groups = torch.cat([6 * E4M3_SCALES[:, None].expand(-1, 8).unsqueeze(-1), rows.unflatten(1, (8, 10))], dim=2)
    x = torch.nn.functional.pad(groups, (0, 5, 0, 0, 0, 2)).flatten(1)
    assert_quantised_as_ref(x, "fp4_e4m3")
    found = number_formats.quantise_fp4_e4m3(x)[1][: len(E4M3_SCALES)]
    assert_bitwise(found[:, 0], torch.arange(1, 0x7F, dtype=torch.uint8))


@pytest.mark.parametrize("kind", ["fp8", "fp4_ue8m0"])
def test_codes_under_a_power_of_two_equal_ref_around_every_midpoint(kind: str) -> None:
    codes = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float() if kind == "fp8" else None
    grid = codes if codes is not None else torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6])
    around = neighbours((grid[1:] + grid[:-1]) / 2).flatten()
    values = torch.cat([around, -around])
    values = torch.nn.functional.pad(values, (0, -len(values) % 31)).unflatten(0, (-1, 31))
    largest = torch.full((len(values), 1), float(grid[-1]))
    x = torch.cat([largest, values], dim=1)
    assert_quantised_as_ref(torch.nn.functional.pad(x, (0, 0, 0, 64 - len(x))) * 2.0**-7, kind)


@pytest.mark.parametrize("kind", ["fp8", "fp4_ue8m0", "fp4_e4m3", "fp4_as_e4m3"])
def test_every_code_under_every_scale_decodes_as_in_ref(kind: str) -> None:
    group = GROUPS.get(kind, 32)
    every = torch.arange(256, dtype=torch.uint8)
    stored = every.repeat(256, 1)
    codes = stored if kind == "fp8" else number_formats.unpack_fp4(stored)
    scale = every[:, None].repeat(1, codes.shape[1] // group)
    out = torch.full(codes.shape, float("nan"))
    _dequantise_kernel[(1,)](stored, scale, out, R=256, C=codes.shape[1], GROUP=group, KIND=kind)
    match kind:
        case "fp8":
            expected = number_formats.dequantise_fp8_ue8m0(codes, scale)
        case "fp4_e4m3":
            expected = number_formats.dequantise_fp4_e4m3(codes, scale)
        case _:
            expected = number_formats.dequantise_fp4_ue8m0(codes, scale)
    assert torch.equal(out.isnan(), expected.isnan())
    assert_bitwise(out.nan_to_num(nan=0.0), expected.nan_to_num(nan=0.0))
