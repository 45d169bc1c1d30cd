"""Ratio-2 compressor: pools and norms pairs of tokens, carrying open pairs from chunk to chunk in a ring (model.md 2.5)."""

# N rows, B sequences, G groups closed, C head dim, Z state slots, R ring rows
import torch
from torch import Tensor

from prefill_kernels.numerics import Numerics
from prefill_kernels.ref.rms_norm import rms_norm


def pool_pairs(
    latent_NC: Tensor,
    score_NC: Tensor,
    norm_weight_C: Tensor,
    state_ZR2C: Tensor,
    state_slots_B: Tensor,
    starts_B: Tensor,
    cu_rows_B1: Tensor,
    *,
    num_groups: int,
    eps: float,
    numerics: Numerics,
) -> Tensor:
    """One latent per pair of tokens (2g, 2g+1) whose second token is in the step.

    Per channel: w = softmax over the two tokens' scores (maximum subtracted), pooled = latent[0] w[0] + latent[1]
    w[1], rounded to act at the end only (trap 29), then rms_norm. A pair that straddles the chunk's start takes its
    first token from the ring.

    Args:
        latent_NC, score_NC: [N, C] wide projections of the rows (linear with wide_output).
        state_ZR2C: [slots, ring rows, 2, C] float32 (float64 in float64 runs); axis 2: 0 = score, 1 = latent; row =
            position mod ring rows. Read first, then overwritten in place with each chunk's last min(ring rows, rows)
            tokens.
        state_slots_B: [B] int32 slot of each sequence, unique; -1 (placeholder): zeros are read, nothing is written.
        starts_B: [B] int32 position of each sequence's first row.
        cu_rows_B1: [B + 1] int32; a sequence may have no row.
        num_groups: G, which the host knows.

    Returns:
        [G, C] act, sequences in order: (start + rows) // 2 - start // 2 groups each.
    """
    pooled_GC = pool_latents(latent_NC, score_NC, state_ZR2C, state_slots_B, starts_B, cu_rows_B1).to(
        numerics.activation
    )
    assert len(pooled_GC) == num_groups, f"{len(pooled_GC)} groups close in these rows, the caller expects {num_groups}"
    return rms_norm(pooled_GC, norm_weight_C, eps=eps)


def pool_latents(
    latent_NC: Tensor,
    score_NC: Tensor,
    state_ZR2C: Tensor,
    state_slots_B: Tensor,
    starts_B: Tensor,
    cu_rows_B1: Tensor,
) -> Tensor:
    """[G, C] wide: pool_pairs before its roundings and its norm."""
    cu_rows = cu_rows_B1.tolist()
    pooled = [latent_NC.new_empty(0, latent_NC.shape[1])]
    for slot, start, first, end in zip(state_slots_B.tolist(), starts_B.tolist(), cu_rows, cu_rows[1:], strict=False):
        rows_T2C = torch.stack([score_NC[first:end], latent_NC[first:end]], dim=1)
        ring_R2C = torch.zeros_like(state_ZR2C[0]) if slot < 0 else state_ZR2C[slot]
        pooled.append(_pool_sequence(rows_T2C, ring_R2C, start))
        _store_tail(rows_T2C, ring_R2C, start)
    return torch.cat(pooled)


def _pool_sequence(rows_T2C: Tensor, ring_R2C: Tensor, start: int) -> Tensor:
    if start % 2 and rows_T2C.shape[0]:
        carried_12C = ring_R2C[(start - 1) % ring_R2C.shape[0]].unsqueeze(0)
        rows_T2C = torch.cat([carried_12C.to(rows_T2C.dtype), rows_T2C])
    num_groups = rows_T2C.shape[0] // 2
    score_G2C, latent_G2C = torch.unflatten(rows_T2C[: 2 * num_groups], 0, (num_groups, 2)).unbind(2)
    weight_G2C = torch.exp(score_G2C - score_G2C.amax(1, keepdim=True))
    weight_G2C = weight_G2C / (weight_G2C[:, :1] + weight_G2C[:, 1:])
    return latent_G2C[:, 0] * weight_G2C[:, 0] + latent_G2C[:, 1] * weight_G2C[:, 1]


def _store_tail(rows_T2C: Tensor, ring_R2C: Tensor, start: int) -> None:
    num_rows, ring_rows = rows_T2C.shape[0], ring_R2C.shape[0]
    num_kept = min(num_rows, ring_rows)
    positions = torch.arange(start + num_rows - num_kept, start + num_rows, device=ring_R2C.device)
    ring_R2C[positions % ring_rows] = rows_T2C[num_rows - num_kept :].to(ring_R2C.dtype)
