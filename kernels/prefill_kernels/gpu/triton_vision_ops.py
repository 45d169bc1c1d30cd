"""The Triton set of vision ops: its launchers, bound to one chip. load_vision_ops calls it; the tests play either chip."""

from functools import partial
from types import SimpleNamespace
from typing import cast

from prefill_kernels.gpu.chip import Chip
from prefill_kernels.gpu.norm_rows import rms_norm
from prefill_kernels.gpu.vision_attention import vision_attention
from prefill_kernels.gpu.vision_linear import (
    vision_linear,
    vision_linear_add,
    vision_linear_gelu,
    vision_linear_swiglu,
)
from prefill_kernels.gpu.vision_rows import vision_merge, vision_patches, vision_spans
from prefill_kernels.vision_ops import VisionOps

_LAUNCHERS = (rms_norm, vision_merge, vision_patches, vision_spans)
_LAUNCHERS_BY_CHIP = (
    vision_attention,
    vision_linear,
    vision_linear_add,
    vision_linear_gelu,
    vision_linear_swiglu,
)


def triton_vision_ops(chip: Chip) -> VisionOps:
    """Every vision op, its configuration chosen for `chip`. bfloat16 activations only; the first op of a pass refuses others."""
    bound = {launcher.__name__: launcher for launcher in _LAUNCHERS}
    bound |= {launcher.__name__: partial(launcher, chip=chip) for launcher in _LAUNCHERS_BY_CHIP}
    return cast(VisionOps, SimpleNamespace(**bound))
