"""Value of each pixel byte after normalisation, made once on the host and given to every kernel set (vision.md 3)."""

import torch
from torch import Tensor


def pixel_levels() -> Tensor:
    """[256] bfloat16: (byte / 255 - 0.5) / 0.5 in separate float32 steps, then one rounding.

    A table and not a formula in the kernels: a fused multiply-add or an approximate division would change some levels (C54).
    """
    levels = torch.arange(256, dtype=torch.float32) / 255.0
    levels = levels - 0.5
    return (levels / 0.5).to(torch.bfloat16)
