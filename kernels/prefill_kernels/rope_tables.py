"""Rotation frequencies of a layer, made once on the host and given to every kernel set (model.md 2.4)."""

import math

import torch
from torch import Tensor


def rope_frequencies(*, rope_dim: int, theta: float, yarn: tuple[float, float, float, int] | None) -> Tensor:
    """Frequency per rotated pair, [rope_dim / 2] float32.

    theta ** (-2i / rope_dim) computed in float32 as the official code does. With yarn = (factor, beta_fast, beta_slow,
    original tokens), slow pairs are divided by factor, with a linear ramp between the pairs that turn beta_fast and
    beta_slow times within the original length. It applies at every length; there is no amplitude factor.
    """
    frequencies = 1.0 / (theta ** (torch.arange(0, rope_dim, 2, dtype=torch.float32) / rope_dim))
    if yarn is None:
        return frequencies
    factor, beta_fast, beta_slow, original_tokens = yarn

    def pair_turning(num_turns: float) -> float:
        return rope_dim * math.log(original_tokens / (num_turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_turning(beta_fast)), 0)
    high = min(math.ceil(pair_turning(beta_slow)), rope_dim - 1)
    ramp = ((torch.arange(rope_dim // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)).clamp(0, 1)
    return frequencies / factor * ramp + frequencies * (1 - ramp)
