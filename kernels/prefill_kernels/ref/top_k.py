"""Exact top-k as a mask: ties go to the lowest index, whatever torch.topk does with them (decisions C26)."""

# N rows, E entries, K top-k
import torch
from torch import Tensor


def top_k_mask(scores_NE: Tensor, k: int) -> Tensor:
    """[N, E] bool: the min(k, finite entries) highest scores of each row; -inf never counts, NaN is not allowed."""
    k = min(k, scores_NE.shape[-1])
    threshold_N1 = scores_NE.topk(k, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    above_NE = scores_NE > threshold_N1
    tied_NE = (scores_NE == threshold_N1) & (scores_NE > -torch.inf)
    num_open_N1 = k - above_NE.sum(-1, keepdim=True)
    return above_NE | (tied_NE & (tied_NE.cumsum(-1) <= num_open_N1))


def mask_to_indices(mask_NE: Tensor, width: int) -> Tensor:
    """[N, width] int32: the set columns of each row, ascending, -1 padded; no row has more than `width`."""
    rows, columns = mask_NE.nonzero(as_tuple=True)
    out_NK = torch.full((mask_NE.shape[0], width), -1, dtype=torch.int32, device=mask_NE.device)
    out_NK[rows, mask_NE.cumsum(-1)[rows, columns] - 1] = columns.int()
    return out_NK
