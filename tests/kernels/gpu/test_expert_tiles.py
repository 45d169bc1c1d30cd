"""Decoding of expert weights in bf16 arithmetic: every code with every scale that keeps it normal, bit by bit."""

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from prefill_kernels.gpu.expert_tiles import exact_weight
from prefill_kernels.number_formats import dequantise_weight
from prefill_kernels.weights import Fp4Weight, Fp8Weight
from prefill_testing.numeric import assert_bitwise

ROWS, WIDTH = 256, 256


@triton.jit
def _decode_kernel(codes_ptr, scale_ptr, out_ptr, R: tl.constexpr, C: tl.constexpr, FORMAT: tl.constexpr):
    row = tl.arange(0, R)[:, None]
    codes = tl.load(codes_ptr + row * (C // 2) + tl.arange(0, C // 2)[None, :])
    scale = tl.load(scale_ptr + row * (C // 32) + tl.arange(0, C // 32)[None, :])
    tl.store(out_ptr + row * C + tl.arange(0, C)[None, :], exact_weight(codes, scale, FORMAT))


def _decoded(codes: Tensor, scale: Tensor, format: str) -> Tensor:
    out = torch.full((ROWS, WIDTH), torch.nan, dtype=torch.bfloat16)
    _decode_kernel[(1,)](codes, scale, out, R=ROWS, C=WIDTH, FORMAT=format)
    return out


def test_every_pair_of_e2m1_codes() -> None:
    # Row r holds byte r (both nibbles in all combinations) 128 times; 8 groups with scales over the whole range.
    packed = torch.arange(256, dtype=torch.uint8).unsqueeze(1).repeat(1, WIDTH // 2)
    scale = torch.tensor([1, 2, 100, 120, 127, 130, 200, 252], dtype=torch.uint8).repeat(ROWS, 1)
    expected = dequantise_weight(Fp4Weight(data=packed, scale=scale), torch.bfloat16)
    assert_bitwise(_decoded(packed, scale, "e2m1"), expected)


@pytest.mark.parametrize("order", [1, -1], ids=["rising", "falling"])
def test_every_e4m3_code_next_to_every_other(order: int) -> None:
    # Column c of row r holds code c + r: each pair of neighbours occurs; NaN codes are left out.
    codes = (torch.arange(WIDTH) * order + torch.arange(ROWS).unsqueeze(1)).remainder(256).to(torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0x3C
    by_tile = torch.tensor([16, 60, 118, 119, 127, 130, 180, 246], dtype=torch.uint8).repeat(ROWS // 32, 1)
    data = codes.view(torch.float8_e4m3fn)
    expected = dequantise_weight(Fp8Weight(data=data, scale=by_tile), torch.bfloat16)
    assert_bitwise(_decoded(data.view(torch.uint16), by_tile.repeat_interleave(32, dim=0), "e4m3"), expected)


def test_extreme_scales() -> None:
    # Codes of 1.0: the value is the scale itself, 2**-127 (a subnormal), 2**127, NaN.
    packed = torch.full((ROWS, WIDTH // 2), 0x22, dtype=torch.uint8)
    scale = torch.tensor([0, 1, 254, 255, 0, 1, 254, 255], dtype=torch.uint8).repeat(ROWS, 1)
    values = _decoded(packed, scale, "e2m1")[0, ::32]
    expected = torch.tensor([2.0**-127, 2.0**-126, 2.0**127, torch.nan] * 2, dtype=torch.bfloat16)
    assert torch.equal(values.isnan(), expected.isnan())
    assert_bitwise(values.nan_to_num(0), expected.nan_to_num(0))
