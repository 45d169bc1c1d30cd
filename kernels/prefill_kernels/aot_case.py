"""What a kernel module tells the AOT gate about its kernels: one AotCase per kernel, shape and chip."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Mma(StrEnum):
    """Matrix instructions a kernel must (and may only) use (decisions C23)."""

    NONE = "none"
    BF16 = "bf16"
    """wgmma on sm_90, tcgen05 without block scale on sm_100."""
    TF32 = "tf32"
    FP8 = "fp8"
    BLOCK_SCALED = "block_scaled"
    """tcgen05 with block scales; sm_100 only."""
    SYNC_BF16 = "sync_bf16"
    """mma.sync on both chips: for products too narrow for the chip's own unit (mhc_turn: 24 columns, 32 rows)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AotCase:
    """One kernel at one shape of the released model, exactly as its launcher would launch it there.

    op: name in the Ops protocol. name: unique, e.g. "linear wq_b". shape: for people, e.g. "32768 x 1280 -> 32768".
    kernel: the @triton.jit function. signature: argument name -> triton type ("*bf16", "i32", "constexpr", ..), in order.
    constexprs: values of the constexpr arguments. aligned: names of pointers and integers divisible by 16.
    num_warps, num_stages, enable_fp_fusion: launch options. mma: expected family. default: the configuration in use (the gate
    holds for it); False: an alternative, printed only. num_programs: of the launch. bytes_moved, flops: of one launch.
    """

    op: str
    name: str
    shape: str
    kernel: Any
    signature: dict[str, str]
    constexprs: dict[str, Any]
    aligned: tuple[str, ...]
    num_warps: int
    num_stages: int
    mma: Mma
    num_programs: int
    bytes_moved: int
    flops: int
    default: bool = True
    enable_fp_fusion: bool = True
    options: dict[str, Any] = field(default_factory=dict)
