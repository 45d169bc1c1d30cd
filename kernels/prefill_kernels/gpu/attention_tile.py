"""What a program of sparse attention does with one row: turn the queries, add a tile of keys, divide and turn back.

Called by the kernels of `sparse_attention` only. The trap: the tail of a row is turned through global memory, the output row
being the scratch, since 64 x 512 accumulators leave no registers to turn them in place; barriers order the turns. Launch with
enable_fp_fusion=False, as every rotation.
"""

# H heads, C head dim, J slots of a tile
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from prefill_kernels.gpu.decode_records import record_offsets
from prefill_kernels.gpu.formats import dequantise_fp4_e4m3, unpack_fp4


@triton.jit  # type: ignore[untyped-decorator]
def turn_tail(  # type: ignore[no-untyped-def]
    from_ptr,
    to_ptr,
    table_ptr,
    INVERSE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    WIDTH: tl.constexpr,
    NUM_PAIRS: tl.constexpr,
):
    """Rotates the last channels of all heads of one row; in place if both rows are one. Ordered by two barriers."""
    h = tl.arange(0, BLOCK_H)[:, None]
    channel = tl.arange(0, 2 * NUM_PAIRS)
    start = h * WIDTH + (WIDTH - 2 * NUM_PAIRS)
    own = tl.load(from_ptr + start + channel[None, :], mask=h < NUM_HEADS, other=0.0).to(tl.float32)
    mate = tl.load(from_ptr + start + (channel ^ 1)[None, :], mask=h < NUM_HEADS, other=0.0).to(tl.float32)
    cos = tl.load(table_ptr + channel // 2)
    sin = tl.load(table_ptr + NUM_PAIRS + channel // 2)
    # y0 = x0 cos - x1 sin, y1 = x1 cos + x0 sin; turning back swaps the signs.
    sin = tl.where((channel % 2 == 0) != INVERSE, -sin, sin)
    turned = own * cos[None, :] + mate * sin[None, :]
    tl.debug_barrier()
    tl.store(to_ptr + start + channel[None, :], turned.to(tl.bfloat16), mask=h < NUM_HEADS)
    tl.debug_barrier()


@triton.jit  # type: ignore[untyped-decorator]
def scores(q, keys, scale, SPLIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """q [H, C] times keys [J, C] transposed, scaled, [H, J] float32.

    SPLIT: the product stands in a branch that is always taken. That hides from the compiler that a second product follows, for
    which it would give all warps to the heads: 64 heads are one warp group's worth, so the other would compute the same.
    """
    if SPLIT:
        if scale > 0:  # noqa: SIM108 - a ternary hides that this is a branch
            product = tl.dot(q, tl.trans(keys))
        else:
            product = tl.zeros((q.shape[0], keys.shape[0]), tl.float32)
    else:
        product = tl.dot(q, tl.trans(keys))
    return product * scale


@triton.jit  # type: ignore[untyped-decorator]
def add_keys(q, keys, is_key, scale, reference, total, acc, SPLIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """One tile of the online softmax; returns the new reference [H], total [H] and acc [H, C]."""
    logits = tl.where(is_key[None, :], scores(q, keys, scale, SPLIT), float("-inf"))
    raised = tl.maximum(reference, tl.ceil(tl.max(logits, axis=1)))
    shrink = tl.exp2(reference - raised)
    weights = tl.exp2(logits - raised[:, None])
    total = total * shrink + tl.sum(weights, axis=1)
    acc = tl.dot(weights.to(tl.bfloat16), keys, acc * shrink[:, None])
    return raised, total, acc


@triton.jit  # type: ignore[untyped-decorator]
def no_keys(BLOCK_H: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """reference [H], total [H] and acc [H, C] before the first tile."""
    reference = tl.full((BLOCK_H,), -1e30, tl.float32)
    return reference, tl.zeros((BLOCK_H,), tl.float32), tl.zeros((BLOCK_H, WIDTH), tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def first_tile(index_ptr, NUM_SLOTS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_J: tl.constexpr):  # type: ignore[no-untyped-def]
    """First tile of a row with a key, or the number of tiles."""
    slot = tl.arange(0, BLOCK_S)
    row = tl.load(index_ptr + slot, mask=slot < NUM_SLOTS, other=-1)
    tile = tl.min(tl.where(row >= 0, slot, BLOCK_S), axis=0) // BLOCK_J
    return tl.minimum(tile, (NUM_SLOTS + BLOCK_J - 1) // BLOCK_J)


@triton.jit  # type: ignore[untyped-decorator]
def end_tile(index_ptr, NUM_SLOTS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_J: tl.constexpr):  # type: ignore[no-untyped-def]
    """Number of tiles up to the last key of a row."""
    slot = tl.arange(0, BLOCK_S)
    row = tl.load(index_ptr + slot, mask=slot < NUM_SLOTS, other=-1)
    return tl.cdiv(tl.max(tl.where(row >= 0, slot + 1, 0), axis=0), BLOCK_J)


@triton.jit
def gathered_keys(keys_ptr, row, channel, WIDTH):  # type: ignore[no-untyped-def]
    """Keys [J, C] bfloat16 of the rows [J]; -1 gives zeros."""
    return tl.load(keys_ptr + row.to(tl.int64)[:, None] * WIDTH + channel, mask=(row >= 0)[:, None], other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def decoded_keys(  # type: ignore[no-untyped-def]
    pages_ptr, slots_ptr, row, records_per_page, stride_page, stride_record, WIDTH: tl.constexpr
):
    """gathered_keys of fp4 records in pages, row j at slots[j]."""
    is_key = (row >= 0)[:, None]
    slot = tl.load(slots_ptr + row, mask=row >= 0, other=0).to(tl.int32)
    record_ptr = pages_ptr + record_offsets(slot, records_per_page, stride_page, stride_record)[:, None]
    packed = tl.load(record_ptr + tl.arange(0, WIDTH // 2)[None, :], mask=is_key, other=0)
    scales = tl.load(record_ptr + WIDTH // 2 + tl.arange(0, WIDTH // 16)[None, :], mask=is_key, other=0)
    return dequantise_fp4_e4m3(unpack_fp4(packed), scales).to(tl.bfloat16)


@triton.jit  # type: ignore[untyped-decorator]
def load_query(  # type: ignore[no-untyped-def]
    query_ptr,
    out_ptr,
    table_ptr,
    NUM_HEADS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    WIDTH: tl.constexpr,
    NUM_PAIRS: tl.constexpr,
):
    """Turned queries [H, C] bfloat16 of a row; the tail comes from the output row."""
    turn_tail(query_ptr, out_ptr, table_ptr, False, NUM_HEADS, BLOCK_H, WIDTH, NUM_PAIRS)
    h = tl.arange(0, BLOCK_H)[:, None]
    channel = tl.arange(0, WIDTH)[None, :]
    row_ptr = tl.where(channel < WIDTH - 2 * NUM_PAIRS, query_ptr, out_ptr) + h * WIDTH + channel
    # Heads are aligned and both parts are whole pieces of 8 channels; triton 3.9 does not see it through the choice.
    row_ptr = tl.max_contiguous(tl.multiple_of(row_ptr, (1, 16)), (1, 8))
    return tl.load(row_ptr, mask=h < NUM_HEADS, other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def store_output(  # type: ignore[no-untyped-def]
    acc,
    total,
    reference,
    sink_ptr,
    out_ptr,
    table_ptr,
    NUM_HEADS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    WIDTH: tl.constexpr,
    NUM_PAIRS: tl.constexpr,
):
    """Divides, rounds, stores and turns back. Without keys the sum is not the sink's, which may underflow: 0 / 1."""
    h = tl.arange(0, BLOCK_H)
    has_key = total > 0
    sink = tl.load(sink_ptr + h, mask=h < NUM_HEADS, other=0.0) * 1.4426950408889634
    total = tl.where(has_key, total + tl.exp2(sink - reference), 1.0)
    out = acc * tl.div_rn(1.0, total)[:, None]
    to_ptr = out_ptr + h[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    tl.store(to_ptr, out.to(tl.bfloat16), mask=(h < NUM_HEADS)[:, None])
    tl.debug_barrier()
    turn_tail(out_ptr, out_ptr, table_ptr, True, NUM_HEADS, BLOCK_H, WIDTH, NUM_PAIRS)
