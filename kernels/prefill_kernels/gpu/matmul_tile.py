"""One output tile of a product with a stored weight: the device functions below `linear`, `lm_head` and `grouped_linear`.

The weight is the left operand: the tile is [out, rows], and its caller stores the transpose. So a weight that has to be decoded
goes from registers straight into the matrix unit (wgmma with A in registers, tcgen05 with A in tensor memory) and is decoded
once per 256 rows. Operands are exact (e4m3 * 2**k and e2m1 * 2**k fit bfloat16), sums are float32 over K in a fixed order, tiles
have a fixed shape per weight: a row's result depends on nothing but the row (decisions 22, C24). The trap: rows and columns
beyond the edge repeat the last one instead of being masked (cheaper loads); only the store knows the edge.
"""

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from prefill_kernels.gpu.chip import Chip
from prefill_kernels.gpu.formats import e2m1_to_float, pow2, unpack_fp4

_INTERPRETER_PROGRAMS = 3
MULTIPROCESSORS = {Chip.SM_90: 132, Chip.SM_100: 148}
"""Of H200 and B200, for figures made without a GPU."""


def persistent_programs(device: torch.device, num_tiles: int) -> int:
    """Programs of a launch whose programs walk over the tiles: one per multiprocessor. Never changes a result."""
    if device.type != "cuda":
        return min(num_tiles, _INTERPRETER_PROGRAMS)
    return min(num_tiles, torch.cuda.get_device_properties(device).multi_processor_count)


@triton.jit  # type: ignore[untyped-decorator]
def tile_of(index, num_row_tiles, num_out_tiles, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """(row tile, out tile) of an index: GROUP row tiles at a time, so that tiles in flight share rows and weights in L2."""
    per_group = GROUP * num_out_tiles
    first = index // per_group * GROUP
    in_group = tl.minimum(num_row_tiles - first, GROUP)
    place = index % per_group
    return first + place % in_group, place // in_group


@triton.jit
def row_halves(acc):  # type: ignore[no-untyped-def]
    """([first half of the rows, out], [the other half, out]) of acc [out, rows]: a caller rounds and stores one after the other,
    since both at once don't fit the registers."""
    first, second = tl.split(tl.permute(tl.reshape(acc, (acc.shape[0], 2, acc.shape[1] // 2)), (2, 0, 1)))
    return first, second


@triton.jit
def out_halves(acc):  # type: ignore[no-untyped-def]
    """([rows, first half of out], [rows, the other half]) of acc [rows, out]; see row_halves."""
    first, second = tl.split(tl.permute(tl.reshape(acc, (acc.shape[0], 2, acc.shape[1] // 2)), (0, 2, 1)))
    return first, second


@triton.jit  # type: ignore[untyped-decorator]
def tile_product(  # type: ignore[no-untyped-def]
    x_ptr,
    x_scale_ptr,
    first_row,
    num_rows,
    stride_x_n,
    w_ptr,
    w_scale_ptr,
    first_out,
    out_end,
    width,
    FORMAT: tl.constexpr,
    SCALED: tl.constexpr,
    ROWS_LEFT: tl.constexpr,
    EVEN: tl.constexpr,
    OUT: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """[OUT, ROWS] float32 (ROWS_LEFT: [ROWS, OUT]): rows first_out.. of the weight times rows first_row.. of x.

    x: bfloat16, or with SCALED e4m3 with scales [N, width / 32]. FORMAT: "dense", "fp8", "fp4". ROWS_LEFT: x is the left operand
    (not with SCALED), for a caller that reduces over out. EVEN: width is a multiple of WIDTH.
    """
    row_M = tl.minimum(first_row + tl.arange(0, ROWS), num_rows - 1)
    out_O = tl.minimum(first_out + tl.arange(0, OUT), out_end - 1)
    k = tl.arange(0, WIDTH)
    x_tile = x_ptr + row_M.to(tl.int64)[:, None] * stride_x_n + k[None, :]
    if FORMAT == "fp4":
        w_tile = w_ptr + out_O.to(tl.int64)[:, None] * (width // 2) + tl.arange(0, WIDTH // 2)[None, :]
    else:
        w_tile = w_ptr + out_O.to(tl.int64)[:, None] * width + k[None, :]
    if SCALED:
        # Of an even width it is known that four scales make one aligned word, so their loads are asynchronous.
        num_groups = width // WIDTH * 4 if EVEN else width // 32
        x_scale_tile = x_scale_ptr + _scale_offsets(first_row, num_rows - 1, num_groups, 1, ROWS)
        shared_by = 1 if FORMAT == "fp4" else 32
        w_scale_tile = w_scale_ptr + _scale_offsets(first_out, out_end - 1, num_groups, shared_by, OUT)
        acc = _scaled_product(x_tile, x_scale_tile, w_tile, w_scale_tile, width, FORMAT, EVEN, OUT, ROWS, WIDTH)
    elif FORMAT == "dense":
        acc = dense_product(x_tile, w_tile, width, ROWS_LEFT, EVEN, OUT, ROWS, WIDTH)
    else:
        scale_row = out_O if FORMAT == "fp4" else out_O // 32
        w_scale_row = w_scale_ptr + scale_row.to(tl.int64) * tl.cdiv(width, 32)
        acc = _decoded_product(x_tile, w_tile, w_scale_row, width, FORMAT, ROWS_LEFT, EVEN, OUT, ROWS, WIDTH)
    return acc


@triton.jit  # type: ignore[untyped-decorator]
def _load(pointer, k, width, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """A tile of rows, columns k of `width`; zeros beyond."""
    return tl.load(pointer) if EVEN else tl.load(pointer, mask=(k < width)[None, :], other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _step(w, x, acc, ROWS_LEFT: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.dot(x, tl.trans(w), acc) if ROWS_LEFT else tl.dot(w, tl.trans(x), acc)


@triton.jit  # type: ignore[untyped-decorator]
def dense_product(  # type: ignore[no-untyped-def]
    x_tile,
    w_tile,
    width,
    ROWS_LEFT: tl.constexpr,
    EVEN: tl.constexpr,
    OUT: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """tile_product of a dense weight; x_tile, w_tile: pointers to the first WIDTH columns. vision_linear calls it, too."""
    k = tl.arange(0, WIDTH)
    acc = tl.zeros((ROWS, OUT) if ROWS_LEFT else (OUT, ROWS), tl.float32)
    for start in range(0, width, WIDTH):
        w = _load(w_tile, start + k, width, EVEN)
        x = _load(x_tile, start + k, width, EVEN)
        acc = _step(w.to(tl.bfloat16), x, acc, ROWS_LEFT)
        w_tile += WIDTH
        x_tile += WIDTH
    return acc


@triton.jit  # type: ignore[untyped-decorator]
def _decoded_product(  # type: ignore[no-untyped-def]
    x_tile,
    w_tile,
    w_scale_row,
    width,
    FORMAT: tl.constexpr,
    ROWS_LEFT: tl.constexpr,
    EVEN: tl.constexpr,
    OUT: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """WIDTH is 64, two scale groups; their bytes are fetched one step ahead, since no load this small is pipelined."""
    tl.static_assert(WIDTH == 64)
    k = tl.arange(0, WIDTH)
    last_group = tl.cdiv(width, 32) - 1
    low = tl.load(w_scale_row)
    high = tl.load(w_scale_row + tl.minimum(1, last_group))
    acc = tl.zeros((ROWS, OUT) if ROWS_LEFT else (OUT, ROWS), tl.float32)
    for start in range(0, width, WIDTH):
        if FORMAT == "fp4":
            packed = _load(w_tile, start // 2 + tl.arange(0, WIDTH // 2), width // 2, EVEN)
            w = e2m1_to_float(unpack_fp4(packed))
            w_tile += WIDTH // 2
        else:
            w = _load(w_tile, start + k, width, EVEN).to(tl.float32)
            w_tile += WIDTH
        x = _load(x_tile, start + k, width, EVEN)
        x_tile += WIDTH
        w = w * tl.where((k < 32)[None, :], pow2(low)[:, None], pow2(high)[:, None])
        group = start // 32 + 2
        low = tl.load(w_scale_row + tl.minimum(group, last_group))
        high = tl.load(w_scale_row + tl.minimum(group + 1, last_group))
        acc = _step(w.to(tl.bfloat16), x, acc, ROWS_LEFT)
    return acc


@triton.jit  # type: ignore[untyped-decorator]
def _scale_offsets(first, last, num_groups, SHARED_BY: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """[1, 4 * BLOCK] offsets of the scales of BLOCK rows from `first` on and four groups, in the order of the tensor memory's
    scale blocks (128 rows: row % 32, row / 32, group), so that they are copied there without a trip through registers.

    SHARED_BY: rows that share a row of scales. Rows beyond `last` repeat it.
    """
    byte = tl.arange(0, 4 * BLOCK)
    row = byte // 512 * 128 + byte // 4 % 4 * 32 + byte % 512 // 16
    row = tl.minimum(first + row, last) // SHARED_BY
    return (row.to(tl.int64) * num_groups + byte % 4)[None, :]


@triton.jit  # type: ignore[untyped-decorator]
def _scale_tile(chunks, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """[BLOCK, 4] scales from the order of _scale_offsets. The compiler knows exactly this chain, from one row of bytes."""
    blocks = tl.reshape(chunks, (BLOCK // 128, 1, 32, 4, 4))
    return tl.reshape(tl.trans(blocks, (0, 3, 2, 1, 4)), (BLOCK, 4))


@triton.jit  # type: ignore[untyped-decorator]
def _scaled_product(  # type: ignore[no-untyped-def]
    x_tile,
    x_scale_tile,
    w_tile,
    w_scale_tile,
    width,
    FORMAT: tl.constexpr,
    EVEN: tl.constexpr,
    OUT: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """WIDTH is 128, four scale groups."""
    tl.static_assert(WIDTH == 128)
    k = tl.arange(0, WIDTH)
    x_group = tl.arange(0, 4 * ROWS) % 4
    w_group = tl.arange(0, 4 * OUT) % 4
    acc = tl.zeros((OUT, ROWS), tl.float32)
    for start in range(0, width, WIDTH):
        x = tl.trans(_load(x_tile, start + k, width, EVEN))
        step = start // 32
        x_scale = _scale_tile(_load(x_scale_tile, step + x_group, width // 32, EVEN), ROWS)
        w_scale = _scale_tile(_load(w_scale_tile, step + w_group, width // 32, EVEN), OUT)
        if FORMAT == "fp4":
            w = _load(w_tile, start // 2 + tl.arange(0, WIDTH // 2), width // 2, EVEN)
            acc = tl.dot_scaled(w, w_scale, "e2m1", x, x_scale, "e4m3", acc)
            w_tile += WIDTH // 2
        else:
            w = _load(w_tile, start + k, width, EVEN)
            acc = tl.dot_scaled(w, w_scale, "e4m3", x, x_scale, "e4m3", acc)
            w_tile += WIDTH
        x_tile += WIDTH
        x_scale_tile += 4
        w_scale_tile += 4
    return acc
