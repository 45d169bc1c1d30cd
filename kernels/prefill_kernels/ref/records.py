"""KV cache records: what one token or one compressed entry looks like at rest (model.md 3.4).

Written by the model after RoPE, all channels included (traps 7 and 8 of model.md 7), and read back before every use,
the step's own rows included. With numerics.quantise_cache off all records are raw rows in the caller's dtype (the
KvCache's test-only format).
"""

# N rows, C head dim, R record bytes, I index head dim, H index heads, S scale bytes
import torch
from torch import Tensor

from prefill_kernels.number_formats import (
    dequantise_fp4_e4m3,
    dequantise_fp4_ue8m0,
    dequantise_fp8_ue8m0,
    pack_fp4,
    quantise_fp4_e4m3,
    quantise_fp4_ue8m0,
    quantise_fp8_ue8m0,
    unpack_fp4,
)
from prefill_kernels.numerics import Numerics

FP8_GROUP = 32
MAIN_FP4_GROUP = 16


def encode_window(kv_NC: Tensor, *, numerics: Numerics) -> Tensor:
    """Window records: C e4m3 codes, then C/32 ue8m0 scales.

    Args:
        kv_NC: [N, C] act, normed and rotated.

    Returns:
        [N, C + C/32] uint8; raw format: kv itself.
    """
    if not numerics.quantise_cache:
        return kv_NC
    return torch.cat(quantise_fp8_ue8m0(kv_NC), dim=-1)


def decode_window(records_NR: Tensor, *, numerics: Numerics) -> Tensor:
    """[N, C] act from window records; exact."""
    if not numerics.quantise_cache:
        return records_NR.to(numerics.activation)
    num_channels = records_NR.shape[-1] * FP8_GROUP // (FP8_GROUP + 1)
    values_NC = dequantise_fp8_ue8m0(records_NR[..., :num_channels], records_NR[..., num_channels:])
    return values_NC.to(numerics.activation)


def encode_main(kv_NC: Tensor, *, record_format: str, numerics: Numerics) -> Tensor:
    """Main-KV records of compressed entries.

    Args:
        kv_NC: [N, C] act, rotated at the entry's first token.
        record_format: "fp4" = C/2 bytes of e2m1 pairs, then C/16 e4m3 scales; "fp8" = the window record.

    Returns:
        [N, C/2 + C/16] or [N, C + C/32] uint8; raw format: kv itself.

    Raises:
        ValueError: another record format.
    """
    if _is_window_format(record_format, numerics):
        return encode_window(kv_NC, numerics=numerics)
    codes_NC, scales_NS = quantise_fp4_e4m3(kv_NC)
    return torch.cat([pack_fp4(codes_NC), scales_NS], dim=-1)


def decode_main(records_NR: Tensor, *, record_format: str, numerics: Numerics) -> Tensor:
    """[N, C] act from main-KV records; exact.

    Raises:
        ValueError: an unknown record format.
    """
    if _is_window_format(record_format, numerics):
        return decode_window(records_NR, numerics=numerics)
    num_packed = records_NR.shape[-1] * MAIN_FP4_GROUP // (MAIN_FP4_GROUP + 2)
    codes_NC = unpack_fp4(records_NR[..., :num_packed])
    return dequantise_fp4_e4m3(codes_NC, records_NR[..., num_packed:]).to(numerics.activation)


def encode_index(key_NI: Tensor, *, numerics: Numerics) -> tuple[Tensor, Tensor]:
    """Index-key records; data and scales are apart because pages keep them in two sections.

    Args:
        key_NI: [N, I] act, from the pre-RoPE latent, normed, rotated.

    Returns:
        (data [N, I/2] e2m1 pairs, scales [N, I/32] ue8m0), uint8; raw format: (key itself, empty [N, 0]).
    """
    if not numerics.quantise_cache:
        return key_NI, key_NI.new_empty(key_NI.shape[0], 0)
    codes_NI, scales_NS = quantise_fp4_ue8m0(key_NI)
    return pack_fp4(codes_NI), scales_NS


def decode_index(data_NR: Tensor, scales_NS: Tensor, *, numerics: Numerics) -> Tensor:
    """[N, I] act from index-key records; exact."""
    if not numerics.quantise_cache:
        return data_NR.to(numerics.activation)
    return dequantise_fp4_ue8m0(unpack_fp4(data_NR), scales_NS).to(numerics.activation)


def quantise_index_query(query_NHI: Tensor, *, numerics: Numerics) -> Tensor:
    """Index queries as the scorer sees them: e2m1 with a ue8m0 scale per 32 channels and back, [N, H, I] act."""
    if not numerics.quantise_cache:
        return query_NHI
    return dequantise_fp4_ue8m0(*quantise_fp4_ue8m0(query_NHI)).to(numerics.activation)


def _is_window_format(record_format: str, numerics: Numerics) -> bool:
    if record_format not in ("fp4", "fp8"):
        raise ValueError(f"record format is {record_format!r}: expected 'fp4' or 'fp8'")
    return record_format == "fp8" or not numerics.quantise_cache
