"""Device functions of mhc_turn: the two walks of one program over the columns of its rows, and the mixes at the end.

Called by mhc's kernels only; why it is built like this is written there. All tiles are [R, C]: rows of the program, columns of
one step. Pointers come in at the program's first row.
"""

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from prefill_kernels.gpu.seen_rows import store_seen


@triton.jit  # type: ignore[untyped-decorator]
def load_streams(streams_ptr, row_R, col_C, mask, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """The four streams as stored."""
    from_ptr = streams_ptr + row_R[:, None] * (4 * D) + col_C[None, :]
    x0 = tl.load(from_ptr, mask=mask, other=0, eviction_policy="evict_first")
    x1 = tl.load(from_ptr + D, mask=mask, other=0, eviction_policy="evict_first")
    x2 = tl.load(from_ptr + 2 * D, mask=mask, other=0, eviction_policy="evict_first")
    x3 = tl.load(from_ptr + 3 * D, mask=mask, other=0, eviction_policy="evict_first")
    return x0, x1, x2, x3


@triton.jit
def new_stream(out, x0, x1, x2, x3, y, post_ptr, comb_ptr, row_R, row_ok_R):  # type: ignore[no-untyped-def]
    """New stream `out` in bfloat16: old ones mixed by comb in order, then post * y; every product and sum rounded as in ref."""
    comb = comb_ptr + row_R * 16 + out
    c0 = tl.load(comb, mask=row_ok_R, other=0)
    c1 = tl.load(comb + 4, mask=row_ok_R, other=0)
    c2 = tl.load(comb + 8, mask=row_ok_R, other=0)
    c3 = tl.load(comb + 12, mask=row_ok_R, other=0)
    post = tl.load(post_ptr + row_R * 4 + out, mask=row_ok_R, other=0)
    total = c0[:, None] * x0.to(tl.float32) + c1[:, None] * x1.to(tl.float32)
    total = (total + c2[:, None] * x2.to(tl.float32)) + c3[:, None] * x3.to(tl.float32)
    return (total + post[:, None] * y.to(tl.float32)).to(tl.bfloat16)


@triton.jit  # type: ignore[untyped-decorator]
def mix_product(z, fn_ptr, col_ok_C, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """[R, 32] float32: z [R, C] bfloat16 times the same columns of fn [24, 4 D] float32, which is cut by truncation into three
    bfloat16 pieces that add up to it; products of bfloat16 are exact. fn_ptr: at the first column."""
    mix = tl.arange(0, 32)
    from_ptr = fn_ptr + mix[None, :] * (4 * D) + tl.arange(0, z.shape[1])[:, None]
    fn = tl.load(from_ptr, mask=(mix < 24)[None, :] & col_ok_C[:, None], other=0)
    part = tl.zeros((z.shape[0], 32), tl.float32)
    # A loop, not three dots: with dots that feed each other every warp would keep all of fn in registers.
    for _ in tl.range(0, 3, num_stages=1):
        bits = fn.to(tl.int32, bitcast=True)
        part = tl.dot(z, (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True), part)
        fn -= (bits & -65536).to(tl.float32, bitcast=True)
    return part


@triton.jit  # type: ignore[untyped-decorator]
def collapse_walk(  # type: ignore[no-untyped-def]
    streams_ptr,
    y_ptr,
    post_ptr,
    comb_ptr,
    pre_ptr,
    fn_ptr,
    new_streams_ptr,
    plain_ptr,
    row_R,
    row_ok_R,
    D: tl.constexpr,
    HAS_OUTPUT: tl.constexpr,
    HAS_MIXES: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    """Streams in, new streams and the collapsed rows out; (sum of squares of the rows [R], of the streams [R], mix product
    [R, 32])."""
    squares_x = tl.zeros((R,), tl.float32)
    squares_z = tl.zeros((R,), tl.float32)
    product = tl.zeros((R, 32), tl.float32)
    for start in tl.range(0, D, C, num_stages=1):
        col_C = start + tl.arange(0, C)
        col_ok_C = col_C < D
        mask = row_ok_R[:, None] & col_ok_C[None, :]
        to_plain = row_R[:, None] * D + col_C[None, :]
        if HAS_OUTPUT:
            x0, x1, x2, x3 = load_streams(streams_ptr, row_R, col_C, mask, D)
            y = tl.load(y_ptr + to_plain, mask=mask, other=0, eviction_policy="evict_first")
        x = tl.full((R, C), -0.0, tl.float32)  # what -0.0 is added to keeps its sign
        squares = tl.zeros((R, C), tl.float32)
        for s in tl.range(0, 4, num_stages=1):
            stream_at = row_R[:, None] * (4 * D) + (s * D + col_C)[None, :]
            if HAS_OUTPUT:
                z = new_stream(s, x0, x1, x2, x3, y, post_ptr, comb_ptr, row_R, row_ok_R)
                if HAS_MIXES:
                    tl.store(new_streams_ptr + stream_at, z, mask=mask, eviction_policy="evict_first")
            else:
                z = tl.load(streams_ptr + stream_at, mask=mask, other=0)
            wide = z.to(tl.float32)
            x += tl.load(pre_ptr + row_R * 4 + s, mask=row_ok_R, other=0)[:, None] * wide
            if HAS_MIXES:
                squares = tl.fma(wide, wide, squares)
                product += mix_product(z, fn_ptr + s * D + start, col_ok_C, D)
        squares_z += tl.sum(squares, axis=1)
        rounded = x.to(tl.bfloat16)
        tl.store(plain_ptr + to_plain, rounded, mask=mask)
        squares_x += tl.sum(rounded.to(tl.float32) * rounded.to(tl.float32), axis=1)
    return squares_x, squares_z, product


@triton.jit  # type: ignore[untyped-decorator]
def norm_walk(  # type: ignore[no-untyped-def]
    plain_ptr,
    norm_ptr,
    seen_ptr,
    scale_ptr,
    squares_R,
    row_R,
    num_rows,
    eps,
    D: tl.constexpr,
    CODES: tl.constexpr,
    C: tl.constexpr,
):
    """Norms the collapsed rows in place and writes their quantised form."""
    inverse = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(squares_R, 1.0 * D) + eps))
    for start in tl.range(0, D, C, num_stages=1):
        col_C = start + tl.arange(0, C)
        mask = (row_R < num_rows)[:, None] & (col_C < D)[None, :]
        at = row_R[:, None] * D + col_C[None, :]
        x = tl.load(plain_ptr + at, mask=mask, other=0).to(tl.float32)
        norm = tl.load(norm_ptr + col_C, mask=col_C < D, other=0).to(tl.float32)
        normed = (x * inverse[:, None] * norm[None, :]).to(tl.bfloat16)
        tl.store(plain_ptr + at, normed, mask=mask)
        group_G = start // 32 + tl.arange(0, C // 32)
        store_seen(seen_ptr, scale_ptr, normed.to(tl.float32), row_R, num_rows, col_C, group_G, D, D, CODES)


@triton.jit  # type: ignore[untyped-decorator]
def store_mixes(logits, pre_ptr, post_ptr, comb_ptr, num_rows, num_iters, hc_eps, R: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sigmoids and Sinkhorn of logits [R, 32]: groups of four, first pre, then post, then the rows of comb, then nothing."""
    logits = tl.reshape(logits, (R, 8, 4))
    row = tl.arange(0, R)[:, None, None]
    group = tl.arange(0, 8)[None, :, None]
    out = tl.arange(0, 4)[None, None, :]
    in_rows = row < num_rows
    gate = tl.div_rn(1.0, 1.0 + tl.exp(-logits))
    at = row * 4 + group * 0 + out
    tl.store(pre_ptr + at, gate + hc_eps, mask=in_rows & (group == 0))
    tl.store(post_ptr + at, 2.0 * gate, mask=in_rows & (group == 1))
    is_comb = (group >= 2) & (group < 6)
    comb = tl.exp(logits - tl.max(logits, axis=2)[:, :, None])
    comb = comb / tl.sum(comb, axis=2)[:, :, None] + hc_eps
    comb = tl.where(is_comb, comb, 0.0)
    comb = comb / (tl.sum(comb, axis=1)[:, None, :] + hc_eps)
    for _ in range(1, num_iters):
        comb = comb / (tl.sum(comb, axis=2)[:, :, None] + hc_eps)
        comb = comb / (tl.sum(comb, axis=1)[:, None, :] + hc_eps)
    tl.store(comb_ptr + row * 16 + (group - 2) * 4 + out, comb, mask=in_rows & is_comb)
