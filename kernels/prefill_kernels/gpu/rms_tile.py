"""RMS norm of a tile inside kernels, with the bits of `ref.rms_norm`: index_rows and pool_pairs call it.

The sum of squares is ref's tree (first half plus second half, again and again), so the quantisers that follow see ref's bits.
The trap: launch with enable_fp_fusion=False, else a square and a sum become one rounding.
"""

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]


@triton.jit  # type: ignore[untyped-decorator]
def rms_tile(x, weight, eps, LOG_WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """x [R, W] normed and times weight [W], all float32, rounded to bfloat16 values; W = 2 ** LOG_WIDTH."""
    ROWS: tl.constexpr = x.shape[0]
    square = x * x
    # Each step adds two numbers, so the tree is ref's whatever order a reduction takes.
    for level in tl.static_range(LOG_WIDTH):
        square = tl.sum(tl.reshape(square, (ROWS, 2, 1 << (LOG_WIDTH - level - 1))), axis=1)
    mean = square * (1.0 / (1 << LOG_WIDTH))
    normed = x * tl.div_rn(1.0, tl.sqrt_rn(mean + eps)) * weight[None, :]
    return normed.to(tl.bfloat16).to(tl.float32)
