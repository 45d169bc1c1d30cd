"""The two kernels of `experts`; a program makes one block of columns of a 128-row tile of one expert.

gate_up_kernel gathers rows by index, makes gate and up side by side and leaves the SwiGLU output, weighted and quantised, in
scratch; down_kernel multiplies it by w2 and writes each row straight to its [row, slot]. Profile R: gate, up and the SwiGLU
output are rounded to bfloat16, the quantiser sees the rounded values; against `ref` only the order of the sums and the chip's exp
and division differ. The trap: rows of a tile beyond its own repeat its last one, up to the last store.
"""

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from prefill_kernels.gpu.expert_rows import TILE_ROWS
from prefill_kernels.gpu.expert_tiles import tile_product, weight_offsets
from prefill_kernels.gpu.formats import dequantise_fp8, quantise_fp8

_ROWS = tl.constexpr(TILE_ROWS)
_GROUP = tl.constexpr(32)


@triton.jit  # type: ignore[untyped-decorator]
def _tile_of_program(num_tiles, num_blocks, SWIZZLE: tl.constexpr):  # type: ignore[no-untyped-def]
    """(tile, column block) of this program: SWIZZLE tiles at a time, the tile running fastest."""
    program = tl.program_id(0)
    first = program // (SWIZZLE * num_blocks) * SWIZZLE
    height = tl.minimum(num_tiles - first, SWIZZLE)
    place = program % (SWIZZLE * num_blocks)
    return first + place % height, place // height


@triton.jit  # type: ignore[untyped-decorator]
def _tile_rows(tiles_ptr, tile, num_rows, ROUTED: tl.constexpr):  # type: ignore[no-untyped-def]
    """(expert, place of the first pair, number of rows) of a tile; without routing pairs are the rows themselves."""
    if ROUTED:
        expert = tl.load(tiles_ptr + tile * 3)
        first_pair = tl.load(tiles_ptr + tile * 3 + 1)
        count = tl.load(tiles_ptr + tile * 3 + 2)
    else:
        expert = tile * 0
        first_pair = tile * _ROWS
        count = tl.minimum(num_rows - first_pair, _ROWS)
    return expert, first_pair, count


@triton.jit  # type: ignore[untyped-decorator]
def _pairs_of(pairs_ptr, place, ROUTED: tl.constexpr):  # type: ignore[no-untyped-def]
    pair = place
    if ROUTED:
        pair = tl.load(pairs_ptr + place)
    return pair


@triton.jit(do_not_specialize=("first_tile", "num_tiles", "num_rows"))  # type: ignore[untyped-decorator]
def gate_up_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    x_scale_ptr,
    pairs_ptr,
    tiles_ptr,
    weight_ptr,
    w1_ptr,
    w1_scale_ptr,
    w3_ptr,
    w3_scale_ptr,
    w_stride,
    w_scale_stride,
    hidden_ptr,
    hidden_scale_ptr,
    first_tile,
    num_tiles,
    num_rows,
    limit,
    WIDTH: tl.constexpr,
    INTER: tl.constexpr,
    TOPK: tl.constexpr,
    ROUTED: tl.constexpr,
    QUANTISED: tl.constexpr,
    FORMAT: tl.constexpr,
    PATH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWIZZLE: tl.constexpr,
):
    COLUMNS: tl.constexpr = BLOCK_N // 2
    tile, block = _tile_of_program(num_tiles, tl.cdiv(INTER, COLUMNS), SWIZZLE)
    expert, first_pair, count = _tile_rows(tiles_ptr, first_tile + tile, num_rows, ROUTED)
    if count == 0:
        return
    m = tl.arange(0, _ROWS)
    pair = _pairs_of(pairs_ptr, first_pair + tl.minimum(m, count - 1), ROUTED)
    n = tl.arange(0, BLOCK_N)
    offset, scale_offset = weight_offsets(tl.minimum(block * COLUMNS + n % COLUMNS, INTER - 1), WIDTH, FORMAT, PATH)
    offset += expert.to(tl.int64) * w_stride
    scale_offset += expert.to(tl.int64) * w_scale_stride
    acc = tile_product(
        x_ptr,
        x_scale_ptr,
        (pair // TOPK).to(tl.int64),
        tl.where(n < COLUMNS, w1_ptr + offset, w3_ptr + offset),
        tl.where(n < COLUMNS, w1_scale_ptr + scale_offset, w3_scale_ptr + scale_offset),
        WIDTH,
        FORMAT,
        PATH,
        BLOCK_N,
        BLOCK_K,
    )
    gate, up = tl.split(tl.permute(tl.reshape(acc, (_ROWS, 2, COLUMNS)), (0, 2, 1)))
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    gate = gate.to(tl.bfloat16).to(tl.float32)
    up = up.to(tl.bfloat16).to(tl.float32)
    # Comparisons, unlike minimum and maximum, let NaN through.
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    hidden = gate / (1.0 + tl.exp(-gate)) * up
    if ROUTED:
        hidden *= tl.load(weight_ptr + pair)[:, None]
    hidden = hidden.to(tl.bfloat16)
    row_M = (tile * _ROWS + m).to(tl.int64)
    hidden_tile = hidden_ptr + row_M[:, None] * INTER + column[None, :]
    # All 128 rows are stored: those beyond the tile's own repeat its last one, and launch 2 reads them unmasked.
    mask = (column < INTER)[None, :]
    if not QUANTISED:
        tl.store(hidden_tile, hidden, mask=mask)
    else:
        codes, scale = quantise_fp8(hidden.to(tl.float32))
        if PATH == "exact":
            tl.store(hidden_tile, dequantise_fp8(codes, scale).to(tl.bfloat16), mask=mask)
        else:
            tl.store(hidden_tile, codes.to(tl.float8e4nv, bitcast=True), mask=mask)
            group = block * (COLUMNS // _GROUP) + tl.arange(0, COLUMNS // _GROUP)
            scale_tile = hidden_scale_ptr + row_M[:, None] * (INTER // _GROUP) + group[None, :]
            tl.store(scale_tile, scale, mask=(group < INTER // _GROUP)[None, :])


@triton.jit(do_not_specialize=("first_tile", "num_tiles", "num_rows"))  # type: ignore[untyped-decorator]
def down_kernel(  # type: ignore[no-untyped-def]
    hidden_ptr,
    hidden_scale_ptr,
    pairs_ptr,
    tiles_ptr,
    w2_ptr,
    w2_scale_ptr,
    w_stride,
    w_scale_stride,
    out_ptr,
    first_tile,
    num_tiles,
    num_rows,
    WIDTH: tl.constexpr,
    INTER: tl.constexpr,
    ROUTED: tl.constexpr,
    FORMAT: tl.constexpr,
    PATH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWIZZLE: tl.constexpr,
):
    tile, block = _tile_of_program(num_tiles, tl.cdiv(WIDTH, BLOCK_N), SWIZZLE)
    expert, first_pair, count = _tile_rows(tiles_ptr, first_tile + tile, num_rows, ROUTED)
    if count == 0:
        return
    m = tl.arange(0, _ROWS)
    column = block * BLOCK_N + tl.arange(0, BLOCK_N)
    offset, scale_offset = weight_offsets(tl.minimum(column, WIDTH - 1), INTER, FORMAT, PATH)
    acc = tile_product(
        hidden_ptr,
        hidden_scale_ptr,
        (tile * _ROWS + m).to(tl.int64),
        w2_ptr + (expert.to(tl.int64) * w_stride + offset),
        w2_scale_ptr + (expert.to(tl.int64) * w_scale_stride + scale_offset),
        INTER,
        FORMAT,
        PATH,
        BLOCK_N,
        BLOCK_K,
    )
    pair = _pairs_of(pairs_ptr, first_pair + tl.minimum(m, count - 1), ROUTED)
    out_tile = out_ptr + pair.to(tl.int64)[:, None] * WIDTH + column[None, :]
    tl.store(out_tile, acc.to(tl.bfloat16), mask=(m < count)[:, None] & (column < WIDTH)[None, :])
