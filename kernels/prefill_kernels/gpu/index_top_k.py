"""Exact top-k of rows of 16-bit keys: threshold by two byte histograms, then compaction in ascending order (C26).

Called by index_select on the keys that index_scores wrote. One program per row; results do not depend on anything but the row.
Traffic: three passes over a row's keys (2 bytes each), the later ones from L2. Key 0 never competes; ties go to the lowest index.
"""

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from prefill_kernels.aot_case import AotCase, Mma
from prefill_kernels.gpu.chip import Chip

# Keys of a step (of blocks, their entries). AOT: at most 120 registers; 4,096 spill on triton 3.9.
_TILE = 2048
_NUM_WARPS = 8
# Order keys of the largest finite bf16 and of +inf.
_MAX_FINITE_KEY = tl.constexpr(0xFF7F)
_INFINITE_KEY = tl.constexpr(0xFF80)


@triton.jit  # type: ignore[untyped-decorator]
def _load_keys(row_ptr, column, num_columns, num_entries, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """[column] int32 keys, 0 beyond num_columns. BLOCK > 1: best of each block of entries, at most finite, the last one inf."""
    if BLOCK == 1:
        keys = tl.load(row_ptr + column, mask=column < num_columns, other=0).to(tl.int32) & 0xFFFF
    else:
        entry = column[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        all_keys = tl.load(row_ptr + entry, mask=entry < num_entries, other=0).to(tl.int32) & 0xFFFF
        best = tl.minimum(tl.max(all_keys, axis=1), _MAX_FINITE_KEY)
        keys = tl.where(column == num_columns - 1, _INFINITE_KEY, best)
    return keys


@triton.jit
def _find_bin(counts, k):  # type: ignore[no-untyped-def]
    """(highest bin such that it and all above hold at least k, how many lie above it); bin -1 if all hold fewer."""
    bins = tl.arange(0, 256)
    at_least = tl.sum(counts, axis=0) - tl.cumsum(counts, 0) + counts
    found = tl.sum((at_least >= k).to(tl.int32), axis=0) - 1
    return found, tl.sum(tl.where(bins > found, counts, 0), axis=0)


@triton.jit  # type: ignore[untyped-decorator]
def _find_threshold(  # type: ignore[no-untyped-def]
    keys_ptr, num_columns, num_entries, topk, BLOCK: tl.constexpr, TILE: tl.constexpr
):
    """(threshold, how many keys equal to it belong to the top k); all keys above it do. -1: everything that competes."""
    counts = tl.zeros((256,), tl.int32)
    for tile in range(0, num_columns, TILE):
        key = _load_keys(keys_ptr, tile + tl.arange(0, TILE), num_columns, num_entries, BLOCK)
        counts += tl.histogram(key >> 8, 256, mask=key > 0)
    high, num_above = _find_bin(counts, topk)
    counts = tl.zeros((256,), tl.int32)
    for tile in range(0, num_columns, TILE):
        key = _load_keys(keys_ptr, tile + tl.arange(0, TILE), num_columns, num_entries, BLOCK)
        counts += tl.histogram(key & 0xFF, 256, mask=key >> 8 == high)
    low, num_above_low = _find_bin(counts, topk - num_above)
    # With fewer than k competitors both bins are -1, and so is the threshold.
    return (high << 8) | low, topk - num_above - num_above_low


@triton.jit  # type: ignore[untyped-decorator]
def _pad(ptr, first, end, PADDED: tl.constexpr):  # type: ignore[no-untyped-def]
    slot = tl.arange(0, PADDED)
    tl.store(ptr + slot, -1, mask=(slot >= first) & (slot < end))


@triton.jit(do_not_specialize=["first_row", "max_visible", "num_slots"])  # type: ignore[untyped-decorator]
def _top_k_kernel(  # type: ignore[no-untyped-def]
    key_ptr,
    num_visible_ptr,
    key_start_ptr,
    candidate_ptr,
    entry_ptr,
    row_ptr,
    first_row,
    max_visible,
    num_slots,
    key_stride,
    candidate_stride,
    topk,
    BLOCK: tl.constexpr,
    INSIDE: tl.constexpr,
    TILE: tl.constexpr,
    PADDED_TOPK: tl.constexpr,
):
    row = (first_row + tl.program_id(0)).to(tl.int64)
    keys_ptr = key_ptr + tl.program_id(0).to(tl.int64) * key_stride
    if INSIDE:
        num_entries = num_slots
        num_columns = num_slots
    else:
        num_entries = tl.minimum(tl.load(num_visible_ptr + row), max_visible)
        num_columns = tl.cdiv(num_entries, BLOCK)
    threshold, num_tied_wanted = _find_threshold(keys_ptr, num_columns, num_entries, topk, BLOCK, TILE)
    num_above = 0
    num_tied = 0
    for tile in range(0, num_columns, TILE):
        column = tile + tl.arange(0, TILE)
        key = _load_keys(keys_ptr, column, num_columns, num_entries, BLOCK)
        is_above = (key > threshold) & (key > 0)
        is_tied = key == threshold
        # One scan for both counts: a tile is far below 2**15.
        packed = is_above.to(tl.int32) + (is_tied.to(tl.int32) << 16)
        ranks = tl.cumsum(packed, 0)
        tied_rank = num_tied + (ranks >> 16)
        place = num_above + (ranks & 0xFFFF) + tl.minimum(tied_rank, num_tied_wanted) - 1
        is_chosen = is_above | (is_tied & (tied_rank <= num_tied_wanted))
        entry = column
        if INSIDE:
            block = tl.load(candidate_ptr + row * candidate_stride + column // INSIDE, mask=is_chosen, other=0)
            entry = block * INSIDE + column % INSIDE
        tl.store(entry_ptr + row * topk + place, entry, mask=is_chosen)
        if BLOCK == 1:
            tl.store(row_ptr + row * topk + place, entry + tl.load(key_start_ptr + row), mask=is_chosen)
        total = tl.sum(packed, axis=0)
        num_above += total & 0xFFFF
        num_tied += total >> 16
    num_chosen = num_above + tl.minimum(num_tied, num_tied_wanted)
    _pad(entry_ptr + row * topk, num_chosen, topk, PADDED_TOPK)
    if BLOCK == 1:
        _pad(row_ptr + row * topk, num_chosen, topk, PADDED_TOPK)


def top_entries(
    keys_TJ: Tensor,
    num_visible_N: Tensor,
    key_start_N: Tensor,
    entries_NK: Tensor,
    rows_NK: Tensor,
    *,
    rows: range,
    max_visible: int,
) -> None:
    """Writes rows `rows` of entries and of rows (entries + key_start), ascending, -1 padded; keys as of dense_scores."""
    _launch(keys_TJ, num_visible_N, key_start_N, None, entries_NK, rows_NK, rows=rows, max_visible=max_visible)


def top_entries_inside(
    keys_TJ: Tensor,
    key_start_N: Tensor,
    candidates_NB: Tensor,
    entries_NK: Tensor,
    rows_NK: Tensor,
    *,
    rows: range,
    num_slots: int,
    candidate_block: int,
) -> None:
    """top_entries for keys as of scores_inside."""
    _launch(
        keys_TJ,
        key_start_N,
        key_start_N,
        candidates_NB,
        entries_NK,
        rows_NK,
        rows=rows,
        num_slots=num_slots,
        inside=candidate_block,
    )


def top_blocks(
    keys_TJ: Tensor, num_visible_N: Tensor, blocks_NB: Tensor, *, rows: range, max_visible: int, candidate_block: int
) -> None:
    """Writes rows `rows` of blocks: those with the best visible key, the newest always among them; ascending, -1 padded."""
    _launch(
        keys_TJ,
        num_visible_N,
        num_visible_N,
        None,
        blocks_NB,
        blocks_NB,
        rows=rows,
        max_visible=max_visible,
        block=candidate_block,
    )


def _launch(
    keys_TJ: Tensor,
    num_visible_N: Tensor,
    key_start_N: Tensor,
    candidates_NB: Tensor | None,
    entries_NK: Tensor,
    rows_NK: Tensor,
    *,
    rows: range,
    max_visible: int = 0,
    num_slots: int = 0,
    block: int = 1,
    inside: int = 0,
) -> None:
    candidates = key_start_N if candidates_NB is None else candidates_NB
    topk = entries_NK.shape[1]
    _top_k_kernel[(len(rows),)](
        keys_TJ,
        num_visible_N,
        key_start_N,
        candidates,
        entries_NK,
        rows_NK,
        rows.start,
        max_visible,
        num_slots,
        keys_TJ.stride(0),
        candidates.stride(0),
        topk,
        BLOCK=block,
        INSIDE=inside,
        TILE=_TILE // block,
        PADDED_TOPK=triton.next_power_of_2(topk),
        num_warps=_NUM_WARPS,
    )


def aot_cases(chip: Chip) -> tuple[AotCase, ...]:  # noqa: ARG001
    """Top 512 of 65,536 entries, top 2,048 blocks of 8 of 131,072 entries, top 512 inside those."""
    pointers = ("key_ptr", "num_visible_ptr", "key_start_ptr", "candidate_ptr", "entry_ptr", "row_ptr")
    sizes = ("first_row", "max_visible", "num_slots", "key_stride", "candidate_stride", "topk")

    def case(name: str, rows: int, columns: int, topk: int, block: int, inside: int) -> AotCase:
        return AotCase(
            op="index_select",
            name=f"index_select {name}",
            shape=f"{rows} rows, {topk} of {columns // block}",
            kernel=_top_k_kernel,
            signature=dict.fromkeys(pointers, "*i32")
            | {"key_ptr": "*i16"}
            | dict.fromkeys(sizes, "i32")
            | dict.fromkeys(("BLOCK", "INSIDE", "TILE", "PADDED_TOPK"), "constexpr"),
            constexprs={"BLOCK": block, "INSIDE": inside, "TILE": _TILE // block, "PADDED_TOPK": topk},
            aligned=(*pointers, "key_stride", "topk", *(("candidate_stride",) if inside else ())),
            num_warps=_NUM_WARPS,
            num_stages=3,
            mma=Mma.NONE,
            num_programs=rows,
            bytes_moved=rows * (3 * 2 * columns + (4 if block > 1 else 8) * topk),
            flops=0,
        )

    return (
        case("top entries", 8192, 65536, 512, 1, 0),
        case("top blocks", 4096, 131072, 2048, 8, 0),
        case("top entries inside blocks", 140, 16384, 512, 1, 8),
    )
