"""The tile of index_scores: loads of queries and keys, their products on either chip, and the score's order key."""

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]


@triton.jit  # type: ignore[untyped-decorator]
def load_vectors(ptr, index, mask, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """[index, WIDTH] of contiguous rows; zeros where masked."""
    offset = index.to(tl.int64)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    return tl.load(ptr + offset, mask=mask[:, None], other=0)


@triton.jit  # type: ignore[untyped-decorator]
def load_heads(  # type: ignore[no-untyped-def]
    query_ptr, query_scale_ptr, weight_ptr, weight_scale, index, mask, DIM: tl.constexpr, PACKED: tl.constexpr
):
    """(queries [index, DIM or DIM / 2], their scales or a dummy, weights [index] float32 scaled and rounded)."""
    if PACKED:
        query = load_vectors(query_ptr, index, mask, DIM // 2)
        query_scale = load_vectors(query_scale_ptr, index, mask, DIM // 32)
    else:
        query = load_vectors(query_ptr, index, mask, DIM)
        query_scale = 0
    weight = tl.load(weight_ptr + index, mask=mask, other=0).to(tl.float32) * weight_scale
    return query, query_scale, weight.to(tl.bfloat16).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def dots_with(  # type: ignore[no-untyped-def]
    key_ptr, key_scale_ptr, index, mask, query, query_scale, zero, DIM: tl.constexpr, PACKED: tl.constexpr
):
    """[index, columns] float32: keys[index] . query; query [columns, DIM or DIM / 2].

    zero: [index, columns] that are 0 without the compiler's knowledge; triton 3.6 fails on a block-scaled product in a loop
    that starts from a known 0.
    """
    if PACKED:
        keys = load_vectors(key_ptr, index, mask, DIM // 2)
        scale = load_vectors(key_scale_ptr, index, mask, DIM // 32)
        dots = tl.dot_scaled(keys, scale, "e2m1", tl.trans(query), query_scale, "e2m1", zero)
    else:
        keys = load_vectors(key_ptr, index, mask, DIM)
        dots = tl.dot(keys, tl.trans(query))
    return dots


@triton.jit  # type: ignore[untyped-decorator]
def ordered_keys(dots, weight, LANES: tl.constexpr, LOG_HEADS: tl.constexpr):  # type: ignore[no-untyped-def]
    """[entries, rows] int32: 1..65535 in the order of the scores (-0 and +0 are one), 0 for -inf.

    dots [entries, rows * heads] float32, columns in the order (row // LANES, head // 2, row % LANES, head % 2); weight
    [columns] float32.
    """
    HEADS: tl.constexpr = 1 << LOG_HEADS
    KEYS: tl.constexpr = dots.shape[0]
    GROUPS: tl.constexpr = dots.shape[1] // (LANES * HEADS)
    rounded = tl.maximum(dots, 0.0).to(tl.bfloat16).to(tl.float32)
    x = (rounded * weight[None, :]).to(tl.bfloat16).to(tl.float32)
    # Each step adds two numbers, so the tree is ref's whatever order a reduction takes.
    for level in tl.static_range(LOG_HEADS - 1):
        x = tl.sum(tl.reshape(x, (KEYS, GROUPS, 2, HEADS >> (level + 2), LANES * 2)), axis=2)
    score = tl.sum(tl.reshape(x, (KEYS, GROUPS * LANES, 2)), axis=2)
    bits = score.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    key = tl.where(bits > 0x8000, bits ^ 0xFFFF, bits | 0x8000)
    return tl.where(bits == 0xFF80, 0, key)
