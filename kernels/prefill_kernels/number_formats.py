"""The number formats of model.md 3.1: e4m3 and e2m1 values with power-of-two (ue8m0) or e4m3 scales.

Called by `records` (KV cache), `linear` and `experts` (activations, weights), by tests and by the checkpoint writer.
All codes are uint8 tensors, one code per byte unless packed. The trap: quantisers see float32. Wider inputs are
rounded to float32 first (decisions C9), so float64 runs take the same rounding decisions as the specification.
"""

import torch
from torch import Tensor

from prefill_kernels.weights import DenseWeight, Fp4Weight, Fp8Weight, Weight

E4M3_MAX = 448.0
E2M1_MAX = 6.0
FP8_AMAX_FLOOR = 1e-4
FP4_UE8M0_AMAX_FLOOR = 6.0 * 2.0**-126
FP4_E4M3_AMAX_FLOOR = 6.0 * 2.0**-9
WEIGHT_TILE = 32

_E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Midpoints between neighbours, and whether the tie goes up (to the even code).
_E2M1_MIDPOINTS = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))


def quantise_fp8_ue8m0(x: Tensor, group: int = 32) -> tuple[Tensor, Tensor]:
    """e4m3 codes with one power-of-two scale per group of channels (fp8_32).

    Args:
        x: [.., C], C a multiple of `group`.

    Returns:
        (codes [.., C], scales [.., C / group]), uint8. amax has a floor of 1e-4; the scale is rounded up, so nothing
        clips.
    """
    groups = _groups(x, group)
    scale_bytes = _ue8m0_ceil(groups.abs().amax(-1).clamp_min(FP8_AMAX_FLOOR) / E4M3_MAX)
    scaled = groups / ue8m0_to_float(scale_bytes).unsqueeze(-1)
    return _e4m3_codes(scaled).flatten(-2), scale_bytes


def quantise_fp4_e4m3(x: Tensor, group: int = 16) -> tuple[Tensor, Tensor]:
    """e2m1 codes with one e4m3 scale per group (fp4_16, main KV).

    Args:
        x: [.., C], C a multiple of `group`.

    Returns:
        (codes [.., C] one per byte, scales [.., C / group] e4m3 bits), uint8. The scale is rounded to nearest within
        [2**-9, 448]; where that rounds down, values above 6 are clamped.
    """
    groups = _groups(x, group)
    amax = groups.abs().amax(-1).clamp_min(FP4_E4M3_AMAX_FLOOR)
    scales = (amax / E2M1_MAX).clamp_max(E4M3_MAX).to(torch.float8_e4m3fn)
    return e2m1_codes(groups / scales.float().unsqueeze(-1)).flatten(-2), scales.view(torch.uint8)


def quantise_fp4_ue8m0(x: Tensor, group: int = 32) -> tuple[Tensor, Tensor]:
    """e2m1 codes with one power-of-two scale per group (fp4_32, index queries and keys, routed experts' weights).

    Args:
        x: [.., C], C a multiple of `group`.

    Returns:
        (codes [.., C] one per byte, scales [.., C / group]), uint8.
    """
    groups = _groups(x, group)
    scale_bytes = _ue8m0_ceil(groups.abs().amax(-1).clamp_min(FP4_UE8M0_AMAX_FLOOR) / E2M1_MAX)
    return e2m1_codes(groups / ue8m0_to_float(scale_bytes).unsqueeze(-1)).flatten(-2), scale_bytes


def dequantise_fp8_ue8m0(codes: Tensor, scales: Tensor, group: int = 32) -> Tensor:
    """[.., C] float32 from codes [.., C] and scales [.., C / group]; exact (and exact in bfloat16)."""
    values = torch.unflatten(codes.contiguous().view(torch.float8_e4m3fn).float(), -1, (-1, group))
    return (values * ue8m0_to_float(scales).unsqueeze(-1)).flatten(-2)


def dequantise_fp4_e4m3(codes: Tensor, scales: Tensor, group: int = 16) -> Tensor:
    """[.., C] float32 from e2m1 codes, one per byte, and e4m3 scales; exact (and exact in bfloat16)."""
    values = torch.unflatten(e2m1_to_float(codes), -1, (-1, group))
    return (values * scales.contiguous().view(torch.float8_e4m3fn).float().unsqueeze(-1)).flatten(-2)


def dequantise_fp4_ue8m0(codes: Tensor, scales: Tensor, group: int = 32) -> Tensor:
    """[.., C] float32 from e2m1 codes, one per byte, and ue8m0 scales; exact (and exact in bfloat16)."""
    values = torch.unflatten(e2m1_to_float(codes), -1, (-1, group))
    return (values * ue8m0_to_float(scales).unsqueeze(-1)).flatten(-2)


def round_trip_fp8(x: Tensor, *, dtype: torch.dtype) -> Tensor:
    """x as the fp8 matmul sees it: quantise_fp8_ue8m0 and back, [.., C] in `dtype`."""
    return dequantise_fp8_ue8m0(*quantise_fp8_ue8m0(x)).to(dtype)


def pack_fp4(codes: Tensor) -> Tensor:
    """[.., C / 2] uint8 from [.., C] codes: low nibble = even channel (model.md 3.1)."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_fp4(packed: Tensor) -> Tensor:
    """[.., C] codes, one per byte, from [.., C / 2]."""
    return torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2)


def e2m1_codes(x: Tensor) -> Tensor:
    """Nearest e2m1 code (sign << 3 | magnitude code) of each float32, clamped to +-6, ties to the even code."""
    magnitude = x.abs()
    codes = torch.signbit(x).to(torch.uint8) << 3
    for midpoint, tie_up in _E2M1_MIDPOINTS:
        codes += magnitude >= midpoint if tie_up else magnitude > midpoint
    return codes


def e2m1_to_float(codes: Tensor) -> Tensor:
    """float32 values of e2m1 codes, one per byte."""
    return _e2m1_values(codes.device)[codes.int()]


def ue8m0_to_float(scales: Tensor) -> Tensor:
    """2 ** (byte - 127) as float32; 255 is NaN."""
    return scales.contiguous().view(torch.float8_e8m0fnu).float()


def quantise_weight_fp8(w: Tensor) -> Fp8Weight:
    """e4m3 weight with one ue8m0 scale per 32 x 32 tile.

    w: [.., out, in], any float dtype; partial tiles at the right and bottom are allowed. The scale rule is
    quantise_fp8_ue8m0's.
    """
    num_out, num_in = w.shape[-2:]
    padded = torch.nn.functional.pad(w.float(), (0, -num_in % WEIGHT_TILE, 0, -num_out % WEIGHT_TILE))
    tiles = torch.unflatten(torch.unflatten(padded, -1, (-1, WEIGHT_TILE)), -3, (-1, WEIGHT_TILE))
    scale_bytes = _ue8m0_ceil(tiles.abs().amax((-3, -1)).clamp_min(FP8_AMAX_FLOOR) / E4M3_MAX)
    scaled = tiles / ue8m0_to_float(scale_bytes)[..., :, None, :, None]
    codes = _e4m3_codes(scaled).flatten(-4, -3).flatten(-2)[..., :num_out, :num_in]
    return Fp8Weight(data=codes.contiguous().view(torch.float8_e4m3fn), scale=scale_bytes)


def quantise_weight_fp4(w: Tensor) -> Fp4Weight:
    """Packed e2m1 weight with one ue8m0 scale per row and 32 columns; w [.., out, in], in a multiple of 32."""
    codes, scales = quantise_fp4_ue8m0(w)
    return Fp4Weight(data=pack_fp4(codes), scale=scales)


def dequantise_weight(weight: Weight, dtype: torch.dtype) -> Tensor:
    """[.., out, in] in `dtype`, the exact stored value (bfloat16 holds it exactly too); a dense weight is converted
    only."""
    match weight:
        case DenseWeight(data=data):
            return data.to(dtype)
        case Fp8Weight(data=data, scale=scale):
            num_out, num_in = data.shape[-2:]
            rows = ue8m0_to_float(scale).repeat_interleave(WEIGHT_TILE, dim=-1)[..., :num_in]
            return (data.float() * rows.repeat_interleave(WEIGHT_TILE, dim=-2)[..., :num_out, :]).to(dtype)
        case Fp4Weight(data=data, scale=scale):
            values = torch.unflatten(_e2m1_pairs(data.device)[data.int()].flatten(-2), -1, (-1, WEIGHT_TILE))
            return (values * ue8m0_to_float(scale).unsqueeze(-1)).flatten(-2).to(dtype)


def _groups(x: Tensor, group: int) -> Tensor:
    """[.., C / group, group] float32."""
    if x.shape[-1] % group:
        raise ValueError(f"cannot quantise {x.shape[-1]} channels in groups of {group}: not a multiple")
    return torch.unflatten(x.float(), -1, (-1, group))


def _ue8m0_ceil(x: Tensor) -> Tensor:
    """Byte of the smallest power of two >= x, from the float32 bits: exponent + (mantissa != 0) (model.md 3.1)."""
    return ((x.view(torch.int32) + 0x7FFFFF) >> 23).to(torch.uint8)


def _e4m3_codes(x: Tensor) -> Tensor:
    """Saturating, round to nearest even; beyond the range torch versions differ (2.11 gives NaN, 2.15 saturates)."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def _e2m1_values(device: torch.device) -> Tensor:
    """[16] float32."""
    return torch.tensor((*_E2M1_MAGNITUDES, *(-value for value in _E2M1_MAGNITUDES)), device=device)


def _e2m1_pairs(device: torch.device) -> Tensor:
    """[256, 2] float32: both values of each packed byte."""
    return e2m1_to_float(unpack_fp4(torch.arange(256, dtype=torch.uint8, device=device).unsqueeze(-1)))
