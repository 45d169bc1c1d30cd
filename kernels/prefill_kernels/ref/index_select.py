"""Indexer: scores compressed entries and picks the best per row (model.md 2.6, 2.7).

Scores are computed in tiles of 16 rows x 256 entries counted from the sequence's first entry, so that an entry always
sits in the same place of the same product (decisions C10).
"""

# N rows, H index heads, I index head dim, E entries, K top-k, B candidate blocks; T tile rows, J entries of the
# sequence scored
import torch
from torch import Tensor

from prefill_kernels.numerics import Numerics
from prefill_kernels.ops import IndexRows, IndexSelection
from prefill_kernels.ref.fixed_math import tree_sum
from prefill_kernels.ref.top_k import mask_to_indices, top_k_mask

_TILE_ROWS = 16
_TILE_ENTRIES = 256


def index_select(
    query: IndexRows,
    head_weight_NH: Tensor,
    keys: IndexRows,
    key_start_N: Tensor,
    num_visible_N: Tensor,
    *,
    topk: int,
    max_visible: int,  # noqa: ARG001 - sizes launches; nothing is launched here
    numerics: Numerics,
    candidates_NB: Tensor | None = None,
    candidate_block: int = 0,
    num_candidate_blocks: int = 0,
) -> IndexSelection:
    """Best entries of each row: score[j] = sum over heads of w[h] * relu(query[h] . key[j]).

    Rounding (profile R): w is scaled by (I * H)^-0.5 and rounded, query . key is rounded, each product with w is
    rounded, the sum over heads is wide and rounded (all to act, so nothing in float32 and float64 runs).

    Args:
        query: data [N, H, I] act, from index_query. head_weight_NH: [N, H] act, unscaled.
        keys: data [E, I] act, entries of all sequences back to back.
        key_start_N: [N] int32 first entry of the row's sequence. Rows of one sequence are adjacent.
        num_visible_N: [N] int32: the row sees keys[key_start : key_start + num_visible]; (p + 1) // ratio of model.md
            2.6.
        topk: entries per row. max_visible: at least the largest num_visible.
        candidates_NB: [N, B] int32 blocks of `candidate_block` entries, -1 padded: entries elsewhere do not compete.
        num_candidate_blocks: > 0 at the candidate source: also return that many blocks with the highest best visible
            score, the block of the newest visible entry always among them. The row's own top-k is not restricted by
            them.

    Returns:
        Ascending, -1 padded, ties to the lowest index. A row that sees nothing is all -1.
    """
    query_NHI, keys_EI = query.data, keys.data
    num_rows = query_NHI.shape[0]
    entries_NK = torch.full((num_rows, topk), -1, dtype=torch.int32, device=query_NHI.device)
    blocks_NB = torch.full((num_rows, num_candidate_blocks), -1, dtype=torch.int32, device=query_NHI.device)
    for tile, key_start, num_scored in _row_tiles(key_start_N, num_visible_N):
        keys_JI = keys_EI[key_start : key_start + num_scored]
        scores_TJ = _scores(query_NHI[tile], head_weight_NH[tile], keys_JI, numerics)
        column_J = torch.arange(num_scored, device=scores_TJ.device)
        scores_TJ = scores_TJ.masked_fill(column_J >= num_visible_N[tile].unsqueeze(-1), -torch.inf)
        if num_candidate_blocks:
            best_TB = _block_scores(scores_TJ, num_visible_N[tile], candidate_block, numerics)
            blocks_NB[tile] = mask_to_indices(top_k_mask(best_TB, num_candidate_blocks), num_candidate_blocks)
        if candidates_NB is not None:
            outside_TJ = ~_inside_blocks(candidates_NB[tile], candidate_block, num_scored)
            scores_TJ = scores_TJ.masked_fill(outside_TJ, -torch.inf)
        entries_NK[tile] = mask_to_indices(top_k_mask(scores_TJ, topk), topk)
    rows_NK = torch.where(entries_NK >= 0, entries_NK + key_start_N[:, None], -1)
    return IndexSelection(entries=entries_NK, rows=rows_NK, candidates=blocks_NB if num_candidate_blocks else None)


def _row_tiles(key_start_N: Tensor, num_visible_N: Tensor) -> list[tuple[slice, int, int]]:
    """(rows, first key, entries to score) of tiles of adjacent rows of one sequence; tiles that see nothing are left
    out."""
    starts, counts = torch.unique_consecutive(key_start_N, return_counts=True)
    tiles = []
    first = 0
    for key_start, count in zip(starts.tolist(), counts.tolist(), strict=True):
        for row in range(first, first + count, _TILE_ROWS):
            rows = slice(row, min(row + _TILE_ROWS, first + count))
            num_scored = int(num_visible_N[rows].max())
            if num_scored > 0:
                tiles.append((rows, key_start, num_scored))
        first += count
    return tiles


def _scores(query_THI: Tensor, head_weight_TH: Tensor, keys_JI: Tensor, numerics: Numerics) -> Tensor:
    """[T, J] wide, rounded to act."""
    num_rows, num_heads, head_dim = query_THI.shape
    num_scored = keys_JI.shape[0]
    num_tiles = -(-num_scored // _TILE_ENTRIES)
    act, wide = numerics.activation, numerics.wide
    query_MI = query_THI.new_zeros(_TILE_ROWS * num_heads, head_dim, dtype=wide)
    query_MI[: num_rows * num_heads] = query_THI.flatten(0, 1)
    keys_ZI = keys_JI.new_zeros(num_tiles * _TILE_ENTRIES, head_dim, dtype=wide)
    keys_ZI[:num_scored] = keys_JI
    dots = torch.stack([query_MI @ tile.t() for tile in torch.split(keys_ZI, _TILE_ENTRIES)])
    dots_ZTHJ = dots.view(num_tiles, _TILE_ROWS, num_heads, _TILE_ENTRIES)[:, :num_rows]
    weight_TH = (head_weight_TH.to(wide) * (head_dim * num_heads) ** -0.5).to(act)
    products_ZTHJ = torch.relu(dots_ZTHJ.to(act)) * weight_TH.unsqueeze(-1)
    scores_ZTJ = tree_sum(products_ZTHJ.to(wide), dim=2).to(act).to(wide)
    return scores_ZTJ.transpose(0, 1).flatten(1)[:, :num_scored]


def _block_scores(scores_TJ: Tensor, num_visible_T: Tensor, block: int, numerics: Numerics) -> Tensor:
    """[T, blocks] best visible score per block, -inf where nothing is visible, +inf for the newest visible entry's
    block."""
    num_scored = scores_TJ.shape[1]
    padded = torch.nn.functional.pad(scores_TJ, (0, -num_scored % block), value=-torch.inf)
    best_TB = padded.view(len(padded), -1, block).amax(-1).clamp_max(torch.finfo(numerics.activation).max)
    block_index_B = torch.arange(best_TB.shape[1], device=best_TB.device)
    newest_T1 = ((num_visible_T - 1) // block).unsqueeze(-1)
    return best_TB.masked_fill((block_index_B == newest_T1) & (num_visible_T > 0).unsqueeze(-1), torch.inf)


def _inside_blocks(candidates_TB: Tensor, block: int, num_scored: int) -> Tensor:
    """[T, J] bool: entry j is in one of the row's candidate blocks."""
    num_blocks = -(-num_scored // block)
    inside_TB = torch.zeros(candidates_TB.shape[0], num_blocks + 1, dtype=torch.bool, device=candidates_TB.device)
    known = (candidates_TB >= 0) & (candidates_TB < num_blocks)
    inside_TB.scatter_(1, torch.where(known, candidates_TB, num_blocks).long(), True)
    return inside_TB[:, :num_blocks].repeat_interleave(block, dim=1)[:, :num_scored]
