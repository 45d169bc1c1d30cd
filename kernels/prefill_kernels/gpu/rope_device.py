"""Rotary embedding inside kernels, with the bits of `ref.rope`: window_rows, main_entries, index_rows call these functions.

An angle is a float32 product of up to 2**20 radians, and its cosine must be the correctly rounded float32, so it is made in
float64: reduction by pi/2 in two steps, then Taylor sums (checked equal to torch for every position below 2**20 and both
frequency sets). That is 40 float64 instructions per angle (AOT): little where each angle is wanted once; but a program that
turns many heads of one row repeats it in every warp, and some chips (GB300, H20) have only 2 to 4 float64 lanes per SM. Such
kernels (attention, index queries) read `rope_table` instead, which one small launch writes: 4 * R bytes a row.

The trap: the two products of a rotation are rounded before their sum (profile R, trap 27), so every kernel that calls `rotate`
is launched with enable_fp_fusion=False.
"""

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from prefill_kernels.aot_case import AotCase, Mma
from prefill_kernels.gpu.chip import Chip

# 32 rows x 32 pairs in float64 are 8 values a thread (AOT: 0 spills on both chips; memory- or float64-bound either way).
_TABLE_ROWS = 32
_TABLE_WARPS = 4


@triton.jit
def cos_sin(angle):  # type: ignore[no-untyped-def]
    """(cos, sin) of float32 angles of at most 2**20 radians, each correctly rounded to float32."""
    x = angle.to(tl.float64)
    turns = tl.floor(x * 0.6366197723675814 + 0.5)
    # pi / 2 as 33 bits, whose product with turns is exact, and the rest.
    r = (x - turns * 1.5707963267341256) - turns * 6.077100506506192e-11
    u = r * r
    # Taylor to r**15 and r**16: the next terms are below 2**-53 for |r| <= pi / 4.
    s = u * -7.647163731819816e-13 + 1.6059043836821613e-10
    s = s * u + -2.505210838544172e-08
    s = s * u + 2.7557319223985893e-06
    s = s * u + -0.0001984126984126984
    s = s * u + 0.008333333333333333
    s = (s * u + -0.16666666666666666) * u * r + r
    c = u * 4.779477332387385e-14 + -1.1470745597729725e-11
    c = c * u + 2.08767569878681e-09
    c = c * u + -2.755731922398589e-07
    c = c * u + 2.48015873015873e-05
    c = c * u + -0.001388888888888889
    c = c * u + 0.041666666666666664
    c = (c * u + -0.5) * u + 1.0
    quarter = turns.to(tl.int32) & 3
    is_odd = (quarter & 1) == 1
    cos = tl.where(is_odd, s, c)
    sin = tl.where(is_odd, c, s)
    cos = tl.where((quarter == 1) | (quarter == 2), -cos, cos)
    sin = tl.where(quarter >= 2, -sin, sin)
    return cos.to(tl.float32), sin.to(tl.float32)


@triton.jit
def rotate(even, odd, cos, sin):  # type: ignore[no-untyped-def]
    """The pair (even, odd), float32, turned by the angle; -sin turns back. See the trap above."""
    return even * cos - odd * sin, even * sin + odd * cos


@triton.jit
def turn_last(x, cos, sin):  # type: ignore[no-untyped-def]
    """x [R, C] float32 with its last channels, as many as cos and sin [R, pairs] say, turned; C a power of two."""
    ROWS: tl.constexpr = x.shape[0]
    PAIRS: tl.constexpr = cos.shape[1]
    PARTS: tl.constexpr = x.shape[1] // (2 * PAIRS)
    parts = tl.reshape(x, (ROWS, PARTS, 2 * PAIRS))
    is_last = (tl.arange(0, PARTS) == PARTS - 1)[None, :, None]
    # A maximum picks the last part without touching a bit of it (a sum would turn -0 into 0).
    last = tl.max(tl.where(is_last, parts, float("-inf")), axis=1)
    even, odd = tl.split(tl.reshape(last, (ROWS, PAIRS, 2)))
    turned_even, turned_odd = rotate(even, odd, cos, sin)
    turned = tl.interleave(turned_even, turned_odd)
    return tl.reshape(tl.where(is_last, turned[:, None, :], parts), (ROWS, x.shape[1]))


@triton.jit  # type: ignore[untyped-decorator]
def row_angles(position_ptr, frequency_ptr, row, num_rows, NUM_PAIRS: tl.constexpr):  # type: ignore[no-untyped-def]
    """cos_sin [R, NUM_PAIRS] of the rows [R]; NUM_PAIRS a power of two."""
    position = tl.load(position_ptr + row, mask=row < num_rows, other=0).to(tl.float32)
    frequency = tl.load(frequency_ptr + tl.arange(0, NUM_PAIRS))
    return cos_sin(position[:, None] * frequency[None, :])


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _rope_table_kernel(  # type: ignore[no-untyped-def]
    positions_ptr,
    frequencies_ptr,
    table_ptr,
    num_rows,
    NUM_PAIRS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    pair = tl.arange(0, BLOCK_P)
    position = tl.load(positions_ptr + n, mask=n < num_rows, other=0).to(tl.float32)
    frequency = tl.load(frequencies_ptr + pair, mask=pair < NUM_PAIRS, other=0.0)
    cos, sin = cos_sin(position[:, None] * frequency[None, :])
    in_range = (n < num_rows)[:, None] & (pair < NUM_PAIRS)[None, :]
    row_ptr = table_ptr + n.to(tl.int64)[:, None] * (2 * NUM_PAIRS) + pair[None, :]
    tl.store(row_ptr, cos, mask=in_range)
    tl.store(row_ptr + NUM_PAIRS, sin, mask=in_range)


def rope_table(positions_N: Tensor, frequencies: Tensor) -> Tensor:
    """Cosines and sines of a step's rows, for kernels that turn many heads of a row.

    Args:
        positions_N: [N] int32 or int64, below 2**20. frequencies: [R / 2] float32.

    Returns:
        [N, R] float32: cosines of the R / 2 pairs, then their sines.
    """
    num_rows, num_pairs = len(positions_N), len(frequencies)
    table = torch.empty(num_rows, 2 * num_pairs, dtype=torch.float32, device=positions_N.device)
    if num_rows:
        _rope_table_kernel[(triton.cdiv(num_rows, _TABLE_ROWS),)](
            positions_N,
            frequencies,
            table,
            num_rows,
            NUM_PAIRS=num_pairs,
            BLOCK_N=_TABLE_ROWS,
            BLOCK_P=triton.next_power_of_2(num_pairs),
            num_warps=_TABLE_WARPS,
            enable_fp_fusion=False,
        )
    return table


def aot_cases(chip: Chip) -> tuple[AotCase, ...]:  # noqa: ARG001 - one configuration for both
    """The table of a 32,768-row chunk."""
    num_rows, num_pairs = 32768, 32
    return (
        AotCase(
            op="sparse_attention",
            name="rope_table",
            shape=f"{num_rows} x {2 * num_pairs}",
            kernel=_rope_table_kernel,
            signature={
                "positions_ptr": "*i32",
                "frequencies_ptr": "*fp32",
                "table_ptr": "*fp32",
                "num_rows": "i32",
                "NUM_PAIRS": "constexpr",
                "BLOCK_N": "constexpr",
                "BLOCK_P": "constexpr",
            },
            constexprs={"NUM_PAIRS": num_pairs, "BLOCK_N": _TABLE_ROWS, "BLOCK_P": num_pairs},
            aligned=("positions_ptr", "frequencies_ptr", "table_ptr"),
            num_warps=_TABLE_WARPS,
            num_stages=3,
            mma=Mma.NONE,
            num_programs=num_rows // _TABLE_ROWS,
            bytes_moved=num_rows * (4 + 8 * num_pairs),
            flops=num_rows * num_pairs * 40,
            enable_fp_fusion=False,
        ),
    )
