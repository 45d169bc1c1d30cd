"""The reference set of vision ops: exactly the names of the `VisionOps` protocol, in plain torch, for any device."""

from prefill_kernels.ref.rms_norm import rms_norm
from prefill_kernels.ref.vision_attention import vision_attention
from prefill_kernels.ref.vision_linear import (
    vision_linear,
    vision_linear_add,
    vision_linear_gelu,
    vision_linear_swiglu,
)
from prefill_kernels.ref.vision_rows import vision_merge, vision_patches, vision_spans

__all__ = [
    "rms_norm",
    "vision_attention",
    "vision_linear",
    "vision_linear_add",
    "vision_linear_gelu",
    "vision_linear_swiglu",
    "vision_merge",
    "vision_patches",
    "vision_spans",
]
