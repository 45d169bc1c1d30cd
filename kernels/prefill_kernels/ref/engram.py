"""Engram: hashed n-gram memory added to the streams (model.md 2.11)."""

# N rows, B sequences, S streams, D hidden, R table rows per token, G longest n-gram
import torch
from torch import Tensor

from prefill_kernels.number_formats import dequantise_fp8_ue8m0
from prefill_kernels.numerics import Numerics
from prefill_kernels.ops import Rows
from prefill_kernels.ref.fixed_math import mean_square, sigmoid, tree_sum, wide_dtype
from prefill_kernels.weights import EngramTable

_GATE_FLOOR = 1e-6


def engram_hash(
    compressed_ids_N: Tensor,
    history_B3: Tensor,
    cu_rows_B1: Tensor,
    *,
    multipliers: Tensor,
    primes: Tensor,
    offsets: Tensor,
    pad_id: int,
) -> Tensor:
    """Table rows of every n-gram that ends at each token.

    t_r = id r tokens back; from the first image or missing token on, t_r = pad for that r and all larger. v = t_0
    M_0, then for i = 1, 2, .. v = v xor (t_i M_i) and row[heads (i-1) + k] = offset + v mod prime[i-1, k].

    Args:
        compressed_ids_N: [N] int64 ids through the token map, -1 = image token.
        history_B3: [B, G - 1] int64, the ids before each chunk, oldest first, -1 = image or before the start of the
            prompt.
        cu_rows_B1: [B + 1] int32.
        multipliers: [G]; primes: [G - 1, heads]; offsets: [(G - 1) * heads], all int64.
        pad_id: compressed id of the pad token.

    Returns:
        [N, (G - 1) * heads] int64, 2-gram heads first.
    """
    num_back = multipliers.shape[0] - 1
    cu_rows = cu_rows_B1.tolist()
    tokens = [compressed_ids_N.new_empty(num_back + 1, 0)]
    for history, first, end in zip(history_B3, cu_rows[:-1], cu_rows[1:], strict=True):
        padded = torch.cat([history, compressed_ids_N[first:end]])
        tokens.append(torch.stack([padded[num_back - r : num_back - r + end - first] for r in range(num_back + 1)]))
    tokens_GN = torch.cat(tokens, dim=1)
    is_blocked_GN = (tokens_GN < 0).cumsum(0) > 0
    tokens_GN = torch.where(is_blocked_GN, pad_id, tokens_GN)
    hash_N = tokens_GN[0] * multipliers[0]
    rows = []
    for i in range(1, num_back + 1):
        hash_N = hash_N ^ (tokens_GN[i] * multipliers[i])
        rows.append(hash_N.unsqueeze(-1) % primes[i - 1])
    return torch.cat(rows, dim=-1) + offsets


def engram_lookup(table: EngramTable, rows_NR: Tensor, *, numerics: Numerics) -> Rows:
    """Dequantised table rows, concatenated.

    Args:
        rows_NR: [N, R] int64 from engram_hash.

    Returns:
        plain [N, R * head_dim] act (exact: e4m3 * 2^k). `linear` requantises them (profile R).
    """
    index = rows_NR.flatten()
    if table.scale is None:
        values = table.data[index]
    else:
        values = dequantise_fp8_ue8m0(table.data.view(torch.uint8)[index], table.scale[index])
    return Rows(plain=values.to(numerics.activation).view(rows_NR.shape[0], rows_NR.shape[1] * values.shape[1]))


def engram_gate(
    streams_NSD: Tensor,
    kv_ND5: Tensor,
    query_weight_SD: Tensor,
    key_weight_SD: Tensor,
    is_image_N: Tensor,
    *,
    rms_eps: float,
) -> tuple[Tensor, Tensor]:
    """Add the gated value to every stream.

    dot = sum of X[s] (qw[s] kw[s]) k_s, times rsqrt(mean X[s]^2 + eps) * rsqrt(mean k_s^2 + eps) * D^-0.5;
    gate = sigmoid(copysign(sqrt(max(|dot|, 1e-6)), dot)); X[s] = bf(X[s] + gate v).

    Args:
        streams_NSD: [N, S, D] act. kv_ND5: [N, (S + 1) * D] act: k_0 .. k_{S-1}, then v (trap 20).
        query_weight_SD, key_weight_SD: [S, D] bfloat16; their product is formed wide.
        is_image_N: [N] bool; these rows pass unchanged with gate 0.

    Returns:
        (new streams [N, S, D] in the streams' dtype, gates [N, S] wide).
    """
    wide = wide_dtype(streams_NSD.dtype)
    num_streams, hidden = streams_NSD.shape[1:]
    x_NSD = streams_NSD.to(wide)
    keys_NSD, value_ND = torch.split(kv_ND5.to(wide), [num_streams * hidden, hidden], dim=-1)
    keys_NSD = torch.unflatten(keys_NSD, -1, (num_streams, hidden))
    weight_SD = query_weight_SD.to(wide) * key_weight_SD.to(wide)
    dot_NS = tree_sum(x_NSD * weight_SD * keys_NSD)
    dot_NS = dot_NS * (_inverse_rms(x_NSD, rms_eps) * _inverse_rms(keys_NSD, rms_eps) * hidden**-0.5)
    gate_NS = sigmoid(torch.copysign(dot_NS.abs().clamp_min(_GATE_FLOOR).sqrt(), dot_NS))
    gate_NS = gate_NS.masked_fill(is_image_N.unsqueeze(-1), 0)
    added_NSD = (x_NSD + gate_NS.unsqueeze(-1) * value_ND.unsqueeze(1)).to(streams_NSD.dtype)
    return torch.where(is_image_N[:, None, None], streams_NSD, added_NSD), gate_NS


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(mean_square(x) + eps).squeeze(-1)
