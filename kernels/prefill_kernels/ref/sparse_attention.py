"""Attention over window keys and selected entries with a sink (model.md 2.8).

Rows are processed in tiles of 16 and every row has the same number of key slots, so a row's sums never change shape
(decisions C10); an empty slot reads a zero key and has probability exactly 0.
"""

# N rows, H heads, C head dim, M window keys, W window slots, E entries, K entry slots, J = W + K slots, T tile rows
import torch
from torch import Tensor

from prefill_kernels.numerics import Numerics
from prefill_kernels.ref.fixed_math import tree_sum
from prefill_kernels.ref.rope import rope

_TILE_ROWS = 16


def sparse_attention(
    query_NHC: Tensor,
    positions_N: Tensor,
    frequencies: Tensor,
    window_keys_MC: Tensor,
    window_index_NW: Tensor,
    entries_EC: Tensor | None,
    entry_index_NK: Tensor | None,
    sink_H: Tensor,
    *,
    scale: float,
    numerics: Numerics,
) -> Tensor:
    """One softmax over window keys and selected entries; keys are the values, so the result is rotated back.

    e[j] = (q . k[j]) * scale, m = max e, out = sum exp(e[j] - m) k[j] / (sum exp(e[j] - m) + exp(sink - m)). In the
    numerator exp(e[j] - m) is rounded to act, in the denominator it is not. No de-duplication between the two key sets.

    Args:
        query_NHC: [N, H, C] act, as projected. positions_N, frequencies: as in rope.
        window_keys_MC: [M, C] act, decoded window records of all sequences.
        window_index_NW: [N, W] int32 rows of window_keys, -1 = empty slot. For chunk invariance a key's slot must be
            a function of the row's and the key's positions.
        entries_EC: [E, C] act, decoded main records; None together with entry_index_NK: window only.
        entry_index_NK: [N, K] int32 rows of entries, -1 = empty slot.
        sink_H: [H] float32 raw logit, not scaled.

    Returns:
        [N, H, C] act; a row with no key gives 0.
    """
    query_NHC = rope(query_NHC, positions_N, frequencies)
    wide = numerics.wide
    num_rows = query_NHC.shape[0]
    keys, index = [window_keys_MC], [window_index_NW]
    if entries_EC is not None and entry_index_NK is not None:
        keys.append(entries_EC)
        index.append(torch.where(entry_index_NK < 0, -1, entry_index_NK + window_keys_MC.shape[0]))
    keys.append(query_NHC.new_zeros(1, query_NHC.shape[2]))
    keys_XC = torch.cat([part.to(wide) for part in keys])
    zero_key = keys_XC.shape[0] - 1
    num_padding = -num_rows % _TILE_ROWS
    index_NJ = torch.nn.functional.pad(torch.cat(index, dim=1), (0, 0, 0, num_padding), value=-1)
    index_NJ = torch.where(index_NJ < 0, zero_key, index_NJ).int()
    query = torch.nn.functional.pad(query_NHC.to(wide), (0, 0, 0, 0, 0, num_padding)).contiguous()
    out_NHC = torch.empty_like(query, dtype=numerics.activation)
    for start in range(0, num_rows, _TILE_ROWS):
        tile = slice(start, start + _TILE_ROWS)
        keys_TJC = keys_XC.index_select(0, index_NJ[tile].flatten()).view(_TILE_ROWS, -1, keys_XC.shape[1])
        is_empty_TJ = index_NJ[tile] == zero_key
        out_NHC[tile] = _attend(query[tile], keys_TJC, is_empty_TJ, sink_H.to(wide), scale, numerics)
    return rope(out_NHC[:num_rows], positions_N, frequencies, inverse=True)


def _attend(
    query_THC: Tensor, keys_TJC: Tensor, is_empty_TJ: Tensor, sink_H: Tensor, scale: float, numerics: Numerics
) -> Tensor:
    logits_THJ = torch.bmm(query_THC, keys_TJC.transpose(1, 2)) * scale
    logits_THJ = logits_THJ.masked_fill(is_empty_TJ.unsqueeze(1), -torch.inf)
    has_key_T11 = ~is_empty_TJ.all(-1)[:, None, None]
    top_TH1 = torch.where(has_key_T11, logits_THJ.amax(-1, keepdim=True), 0)
    weight_THJ = torch.exp(logits_THJ - top_TH1)
    total_TH1 = tree_sum(weight_THJ).unsqueeze(-1) + torch.exp(sink_H[:, None] - top_TH1)
    rounded_THJ = weight_THJ.to(numerics.activation).to(numerics.wide)
    # Without keys the total is exp(sink), which may underflow: 0 / 0.
    return torch.bmm(rounded_THJ, keys_TJC) / torch.where(has_key_T11, total_TH1, 1)
