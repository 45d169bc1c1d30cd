"""Product of one tile of rows with rows of a stored expert matrix: the device functions below `experts`.

Three paths:

exact: rows are bfloat16, weights are decoded to bfloat16 in registers (e2m1 * 2**k and e4m3 * 2**k are exact there) and go
    through shared memory into a bf16 product. Decoding works on pairs of bf16 in one 32-bit word: 4 integer instructions and 2
    packed products per two e2m1 weights, half of what float32 arithmetic takes. This is the one place where a kernel multiplies
    bf16 outside a matrix product, and every such product is exact.
block_scaled: codes and scales as they are, tl.dot_scaled (sm_100).
promoted: e2m1 codes become e4m3 codes, fp8 products of 32 channels, each scaled and added in float32 (sm_90, second choice).

Sums are float32 over the channels in order, 16 or 32 at a time; tiles have one shape per path: a row's result depends on
nothing but the row (decisions 22, C24). The traps: weight rows come as pointers, since gate and up lie in two tensors; and one
product of both, not two that share x: triton 3.6 fails on two block-scaled products with one scale operand.
"""

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from prefill_kernels.gpu.expert_rows import TILE_ROWS
from prefill_kernels.gpu.formats import e2m1_to_e4m3, pow2, unpack_fp4

_ROWS = tl.constexpr(TILE_ROWS)
_GROUP = tl.constexpr(32)
# The exponent fields of e2m1 and e4m3, read as bfloat16 exponents, are short by 126 and 120.
_E2M1_EXPONENT = tl.constexpr(2.0**126)
_E4M3_EXPONENT = tl.constexpr(2.0**120)


@triton.jit  # type: ignore[untyped-decorator]
def weight_offsets(row, WIDTH: tl.constexpr, FORMAT: tl.constexpr, PATH: tl.constexpr):  # type: ignore[no-untyped-def]
    """(element, scale) offsets of rows of a matrix [.., WIDTH].

    FORMAT: "e2m1" (uint8, two codes), "e4m3" (float8, on the exact path uint16, two codes) or "bf16".
    """
    PACK: tl.constexpr = 2 if FORMAT == "e2m1" or (FORMAT == "e4m3" and PATH == "exact") else 1
    scale_row = row // _GROUP if FORMAT == "e4m3" else row
    return row * (WIDTH // PACK), scale_row * (WIDTH // _GROUP)


@triton.jit  # type: ignore[untyped-decorator]
def tile_product(  # type: ignore[no-untyped-def]
    x_ptr,
    x_scale_ptr,
    x_row_M,
    w_ptr_N,
    w_scale_ptr_N,
    WIDTH: tl.constexpr,
    FORMAT: tl.constexpr,
    PATH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """[128, BLOCK_N] float32: rows x_row (int64) of x [.., WIDTH] times the weight rows at these pointers."""
    if PATH == "exact":
        acc = _exact_product(x_ptr, x_row_M, w_ptr_N, w_scale_ptr_N, WIDTH, FORMAT, BLOCK_N, BLOCK_K)
    else:
        acc = _coded_product(x_ptr, x_scale_ptr, x_row_M, w_ptr_N, w_scale_ptr_N, WIDTH, FORMAT, PATH, BLOCK_N, BLOCK_K)
    return acc


@triton.jit  # type: ignore[untyped-decorator]
def _exact_product(  # type: ignore[no-untyped-def]
    x_ptr,
    x_row_M,
    w_ptr_N,
    w_scale_ptr_N,
    WIDTH: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    PACK: tl.constexpr = 1 if FORMAT == "bf16" else 2
    x_tile = x_ptr + x_row_M[:, None] * WIDTH + tl.arange(0, BLOCK_K)[None, :]
    w_tile = _row_tile(w_ptr_N, BLOCK_K // PACK)
    # No load as small as the scales' is pipelined: they are fetched one step ahead.
    if FORMAT != "bf16":
        scale = _scales(w_scale_ptr_N, 0, WIDTH, BLOCK_K)
    acc = tl.zeros((_ROWS, BLOCK_N), tl.float32)
    for k in range(0, WIDTH, BLOCK_K):
        x = _columns(x_tile, k, WIDTH, BLOCK_K)
        w = _columns(w_tile, k // PACK, WIDTH // PACK, BLOCK_K // PACK)
        if FORMAT != "bf16":
            next_scale = _scales(w_scale_ptr_N, k + BLOCK_K, WIDTH, BLOCK_K)
            w = exact_weight(w, scale, FORMAT)
            scale = next_scale
        acc = tl.dot(x, tl.trans(w), acc)
    return acc


@triton.jit  # type: ignore[untyped-decorator]
def _coded_product(  # type: ignore[no-untyped-def]
    x_ptr,
    x_scale_ptr,
    x_row_M,
    w_ptr_N,
    w_scale_ptr_N,
    WIDTH: tl.constexpr,
    FORMAT: tl.constexpr,
    PATH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    PACK: tl.constexpr = 2 if FORMAT == "e2m1" else 1
    x_tile = x_ptr + x_row_M[:, None] * WIDTH + tl.arange(0, BLOCK_K)[None, :]
    x_scale_ptr_M = x_scale_ptr + x_row_M * (WIDTH // _GROUP)
    w_tile = _row_tile(w_ptr_N, BLOCK_K // PACK)
    acc = tl.zeros((_ROWS, BLOCK_N), tl.float32)
    for k in range(0, WIDTH, BLOCK_K):
        x = _columns(x_tile, k, WIDTH, BLOCK_K)
        x_scale = _scales(x_scale_ptr_M, k, WIDTH, BLOCK_K)
        w = _columns(w_tile, k // PACK, WIDTH // PACK, BLOCK_K // PACK)
        w_scale = _scales(w_scale_ptr_N, k, WIDTH, BLOCK_K)
        if PATH == "block_scaled":
            acc = tl.dot_scaled(x, x_scale, "e4m3", tl.trans(w), w_scale, FORMAT, acc)
        else:
            # One group of 32 channels per step.
            if FORMAT == "e2m1":
                w = e2m1_to_e4m3(unpack_fp4(w)).to(tl.float8e4nv, bitcast=True)
            acc += tl.dot(x, tl.trans(w)) * pow2(x_scale) * tl.trans(pow2(w_scale))
    return acc


@triton.jit  # type: ignore[untyped-decorator]
def _row_tile(ptr_N, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Pointers to the first BLOCK elements of rows, which start on 16 bytes. The compiler can't see that of a choice between two
    tensors (triton 3.9) and would load element by element."""
    tile = ptr_N[:, None] + tl.arange(0, BLOCK)[None, :]
    return tl.max_contiguous(tl.multiple_of(tile, (1, 16)), (1, BLOCK))


@triton.jit  # type: ignore[untyped-decorator]
def _columns(tile_ptr, k, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Columns [k, k + BLOCK) of a tile of rows, zeros beyond WIDTH."""
    if WIDTH % BLOCK == 0:
        tile = tl.load(tile_ptr + k)
    else:
        tile = tl.load(tile_ptr + k, mask=(k + tl.arange(0, BLOCK) < WIDTH)[None, :], other=0.0)
    return tile


@triton.jit  # type: ignore[untyped-decorator]
def _scales(scale_ptr_R, k, WIDTH: tl.constexpr, BLOCK_K: tl.constexpr):  # type: ignore[no-untyped-def]
    """[rows, BLOCK_K / 32] ue8m0 bytes from channel k on; beyond the last group that one again (its codes are zeros)."""
    group = tl.minimum(k // _GROUP + tl.arange(0, BLOCK_K // _GROUP), WIDTH // _GROUP - 1)
    return tl.load(scale_ptr_R[:, None] + group[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def exact_weight(codes, scale, FORMAT: tl.constexpr):  # type: ignore[no-untyped-def]
    """[R, C] bfloat16 values of codes [R, C / 2] (e2m1: uint8, e4m3: uint16; two codes each, the even channel low) with ue8m0
    bytes [R, C / 32]. The NaN codes of e4m3 read as +-480."""
    code = codes.to(tl.uint32)
    # Both values at once, as two bfloat16 in a word: sign bits at 15 and 31, the other bits at 8.. and 24.. (e4m3: 10, 26).
    if FORMAT == "e2m1":
        pair = ((code * 0x01001000) & 0x80008000) | ((code * 0x00040040) & 0x01C001C0)
    else:
        pair = (((code << 8) | (code << 16)) & 0x80008000) | (((code << 4) | (code << 12)) & 0x07F007F0)
    even = pair.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    odd = (pair >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    values = tl.reshape(tl.join(even, odd), (codes.shape[0], codes.shape[1] * 2 // _GROUP, _GROUP))
    values = values * (_E2M1_EXPONENT if FORMAT == "e2m1" else _E4M3_EXPONENT)
    return tl.reshape(values * _bf16_pow2(scale)[:, :, None], (codes.shape[0], codes.shape[1] * 2))


@triton.jit
def _bf16_pow2(byte):  # type: ignore[no-untyped-def]
    """2 ** (byte - 127) as bfloat16; 0 gives 2**-127 (a subnormal), 255 NaN."""
    exponent = byte.to(tl.uint16)
    bits = tl.where(exponent == 0, 0x40, tl.where(exponent == 255, 0x7FC0, exponent << 7))
    return bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)
