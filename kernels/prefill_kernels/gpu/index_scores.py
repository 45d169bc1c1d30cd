"""Index scores of rows against entries, written as 16-bit keys whose order is the order of the bf16 scores.

Called by index_select for a bounded number of rows at a time. Profile R, rounded where ref rounds: query . key to bf16, its
product with the head's weight to bf16, the sum over heads as ref's tree in float32, then to bf16. So the selection equals
ref's wherever the dot is exact, as it is for e2m1 operands whose scales lie within 2**10 of each other.

Entries are the rows of the MMA and (row, head) pairs its columns: a thread then holds all heads of its rows, and the sum over
heads needs no other thread. Traffic: a key tile is read once per 8 rows, from L2 since neighbouring programs share it; 2 bytes
are written per row and entry. Bound: the epilogue, 32 x (round, relu, product, round, add) per row and entry.
"""

from dataclasses import dataclass
from typing import Any

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from prefill_kernels.aot_case import AotCase, Mma
from prefill_kernels.gpu.chip import Chip
from prefill_kernels.gpu.index_score_tile import dots_with, load_heads, ordered_keys
from prefill_kernels.ops import IndexRows

_SCALE_GROUP = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class _Launch:
    """columns: (row, head) pairs of a program. tile: entries of a step. tiles: steps of a program. lanes: as ordered_keys."""

    columns: int
    tile: int
    tiles: int
    lanes: int
    num_warps: int
    num_stages: int


# AOT, triton 3.9 / 3.6. sm_90: 241 / 220 registers and 97 KiB, so that two programs share an SM and one's products run under
# the other's epilogue (8 warps and 128 entries leave room for one); a wgmma accumulator deals pairs of columns to 4 threads.
# sm_100: 168 / 164 registers, 256 columns of tensor memory; 256 (row, head) pairs or 4 warps spill; a thread has one entry's
# columns, so rows stay apart.
_DENSE = {
    Chip.SM_90: _Launch(columns=256, tile=64, tiles=64, lanes=4, num_warps=4, num_stages=2),
    Chip.SM_100: _Launch(columns=128, tile=128, tiles=32, lanes=1, num_warps=8, num_stages=3),
}
# One row per program (columns: its heads): its list of blocks is its own. At most 80 registers on both chips.
_INSIDE = {
    Chip.SM_90: _Launch(columns=1, tile=128, tiles=16, lanes=1, num_warps=4, num_stages=3),
    Chip.SM_100: _Launch(columns=1, tile=128, tiles=16, lanes=1, num_warps=4, num_stages=3),
}


@triton.jit
def _next_sequence(first, local_R, start_R, visible_R):  # type: ignore[no-untyped-def]
    """(key start of row `first`'s sequence, first row of the tile after it, visible of its rows, 0 elsewhere)."""
    start = tl.sum(tl.where(local_R == first, start_R, 0), axis=0)
    is_later = (local_R > first) & (start_R != start)
    after = tl.min(tl.where(is_later, local_R, local_R.shape[0]), axis=0)
    return start, after, tl.where((local_R >= first) & (local_R < after), visible_R, 0)


# Sizes that change from step to step are no reason to compile again.
@triton.jit(do_not_specialize=["first_row", "end_row", "max_visible"])  # type: ignore[untyped-decorator]
def _dense_kernel(  # type: ignore[no-untyped-def]
    query_ptr,
    query_scale_ptr,
    weight_ptr,
    key_ptr,
    key_scale_ptr,
    key_start_ptr,
    num_visible_ptr,
    out_ptr,
    first_row,
    end_row,
    max_visible,
    out_stride,
    weight_scale,
    DIM: tl.constexpr,
    LOG_HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    TILES: tl.constexpr,
    LANES: tl.constexpr,
    PACKED: tl.constexpr,
):
    HEADS: tl.constexpr = 1 << LOG_HEADS
    tile_row = first_row + tl.program_id(0) * ROWS
    first_key = tl.program_id(1) * (TILES * KEYS)
    local_R = tl.arange(0, ROWS)
    in_range_R = tile_row + local_R < end_row
    visible_R = tl.load(num_visible_ptr + tile_row + local_R, mask=in_range_R, other=0)
    visible_R = tl.minimum(visible_R, max_visible)
    if tl.max(visible_R, axis=0) <= first_key:
        return
    start_R = tl.load(key_start_ptr + tile_row + local_R, mask=in_range_R, other=-1)
    column = tl.arange(0, ROWS * HEADS)
    row_C = tile_row + column // (LANES * HEADS) * LANES + column % (2 * LANES) // 2
    head_C = column % (LANES * HEADS) // (2 * LANES) * 2 + column % 2
    index_C = row_C.to(tl.int64) * HEADS + head_C
    query, query_scale, weight = load_heads(
        query_ptr, query_scale_ptr, weight_ptr, weight_scale, index_C, row_C < end_row, DIM, PACKED
    )
    out_R = out_ptr + (tile_row - first_row + local_R).to(tl.int64) * out_stride
    num_rows = tl.minimum(end_row - tile_row, ROWS)
    # One turn per sequence that has rows in this tile.
    first = 0
    while first < num_rows:
        start, after, seen_R = _next_sequence(first, local_R, start_R, visible_R)
        num_seen = tl.max(seen_R, axis=0)
        dots = tl.zeros((KEYS, ROWS * HEADS), tl.float32)
        for tile_key in range(first_key, tl.minimum(num_seen, first_key + TILES * KEYS), KEYS):
            key = tile_key + tl.arange(0, KEYS)
            zero = tl.where(tile_key < 0, dots, 0.0)
            dots = dots_with(
                key_ptr, key_scale_ptr, start + key, key < num_seen, query, query_scale, zero, DIM=DIM, PACKED=PACKED
            )
            ordered = ordered_keys(dots, weight, LANES, LOG_HEADS)
            tl.store(out_R[None, :] + key[:, None], ordered.to(tl.int16), mask=key[:, None] < seen_R[None, :])
        first = after


@triton.jit(do_not_specialize=["first_row", "num_slots"])  # type: ignore[untyped-decorator]
def _inside_kernel(  # type: ignore[no-untyped-def]
    query_ptr,
    query_scale_ptr,
    weight_ptr,
    key_ptr,
    key_scale_ptr,
    key_start_ptr,
    num_visible_ptr,
    candidate_ptr,
    out_ptr,
    first_row,
    candidate_stride,
    num_slots,
    out_stride,
    weight_scale,
    DIM: tl.constexpr,
    LOG_HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK: tl.constexpr,
    PACKED: tl.constexpr,
):
    HEADS: tl.constexpr = 1 << LOG_HEADS
    row = (first_row + tl.program_id(0)).to(tl.int64)
    first_slot = tl.program_id(1) * (TILES * KEYS)
    visible = tl.load(num_visible_ptr + row)
    start = tl.load(key_start_ptr + row)
    index_C = row * HEADS + tl.arange(0, HEADS)
    query, query_scale, weight = load_heads(
        query_ptr, query_scale_ptr, weight_ptr, weight_scale, index_C, index_C >= 0, DIM, PACKED
    )
    out_row_ptr = out_ptr + tl.program_id(0).to(tl.int64) * out_stride
    dots = tl.zeros((KEYS, HEADS), tl.float32)
    for tile_slot in range(first_slot, tl.minimum(num_slots, first_slot + TILES * KEYS), KEYS):
        slot = tile_slot + tl.arange(0, KEYS)
        block = tl.load(candidate_ptr + row * candidate_stride + slot // BLOCK, mask=slot < num_slots, other=-1)
        entry = block * BLOCK + slot % BLOCK
        competes = (block >= 0) & (entry < visible)
        zero = tl.where(tile_slot < 0, dots, 0.0)
        dots = dots_with(
            key_ptr, key_scale_ptr, start + entry, competes, query, query_scale, zero, DIM=DIM, PACKED=PACKED
        )
        ordered = tl.reshape(ordered_keys(dots, weight, 1, LOG_HEADS), (KEYS,))
        tl.store(out_row_ptr + slot, tl.where(competes, ordered, 0).to(tl.int16), mask=slot < num_slots)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreInputs:
    """What index_select was called with; shapes as in Ops.index_select. query and keys have scales both or neither."""

    query: IndexRows
    head_weight_NH: Tensor
    keys: IndexRows
    key_start_N: Tensor
    num_visible_N: Tensor

    def check(self, chip: Chip) -> None:
        """Raises ValueError for a shape that the kernels are not built for."""
        num_heads, dim = self.head_weight_NH.shape[1], _dim(self.query)
        if dim != triton.next_power_of_2(dim) or dim < _SCALE_GROUP:
            raise ValueError(f"index head dim is {dim}: expected a power of two from {_SCALE_GROUP}")
        most = _DENSE[chip].columns // _DENSE[chip].lanes
        if num_heads != triton.next_power_of_2(num_heads) or not 2 <= num_heads <= most:
            raise ValueError(f"{num_heads} index heads on {chip.name}: expected a power of two from 2 to {most}")
        tensors = (self.query.data, _scales(self.query), self.keys.data, _scales(self.keys), self.head_weight_NH)
        if not all(tensor.is_contiguous() for tensor in tensors):
            raise ValueError("index queries, keys and head weights: expected contiguous tensors")

    def arguments(self) -> tuple[Tensor, ...]:
        """Leading arguments of both kernels."""
        query, keys = self.query, self.keys
        vectors = (query.data, _scales(query), self.head_weight_NH, keys.data, _scales(keys))
        return (*vectors, self.key_start_N, self.num_visible_N)

    def constants(self) -> dict[str, int]:
        """Compile-time arguments of both kernels."""
        log_heads = self.head_weight_NH.shape[1].bit_length() - 1
        return {"DIM": _dim(self.query), "LOG_HEADS": log_heads, "PACKED": self.query.scales is not None}

    @property
    def weight_scale(self) -> float:
        return float((_dim(self.query) * self.head_weight_NH.shape[1]) ** -0.5)


def dense_scores(inputs: ScoreInputs, out_TJ: Tensor, *, rows: range, max_visible: int, chip: Chip) -> None:
    """out[n - rows.start, j] = key of row n and its entry j, for all j < num_visible; the rest of out is not touched.

    out_TJ: [>= len(rows), >= max_visible] int16 (read as unsigned).
    """
    launch = _DENSE[chip]
    tile_rows = launch.columns // inputs.head_weight_NH.shape[1]
    grid = (triton.cdiv(len(rows), tile_rows), triton.cdiv(max_visible, launch.tiles * launch.tile))
    _dense_kernel[grid](
        *inputs.arguments(),
        out_TJ,
        rows.start,
        rows.stop,
        max_visible,
        out_TJ.stride(0),
        inputs.weight_scale,
        **inputs.constants(),
        ROWS=tile_rows,
        KEYS=launch.tile,
        TILES=launch.tiles,
        LANES=launch.lanes,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )


def scores_inside(
    inputs: ScoreInputs,
    candidates_NB: Tensor,
    out_TJ: Tensor,
    *,
    rows: range,
    num_slots: int,
    candidate_block: int,
    chip: Chip,
) -> None:
    """out[n - rows.start, c] = key of row n and entry candidates[n, c // block] * block + c % block, 0 where that is no
    visible entry, for all c < num_slots."""
    launch = _INSIDE[chip]
    _inside_kernel[(len(rows), triton.cdiv(num_slots, launch.tiles * launch.tile))](
        *inputs.arguments(),
        candidates_NB,
        out_TJ,
        rows.start,
        candidates_NB.stride(0),
        num_slots,
        out_TJ.stride(0),
        inputs.weight_scale,
        **inputs.constants(),
        KEYS=launch.tile,
        TILES=launch.tiles,
        BLOCK=candidate_block,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )


def _dim(rows: IndexRows) -> int:
    return rows.data.shape[-1] * (1 if rows.scales is None else 2)


def _scales(rows: IndexRows) -> Tensor:
    """The scales, or any pointer where the kernel reads none."""
    return rows.data if rows.scales is None else rows.scales


def aot_cases(chip: Chip) -> tuple[AotCase, ...]:
    """8,192 rows against 65,536 entries (a pass of layer 2 at 131,072 tokens); 140 replayed rows inside 2,048 blocks of 8."""
    dense, inside, num_heads, dim = _DENSE[chip], _INSIDE[chip], 32, 128
    rows, visible, replayed, slots = 8192, 65536, 140, 16384
    vector_bytes = dim // 2 + dim // _SCALE_GROUP if chip is Chip.SM_100 else 2 * dim
    return (
        _case(
            chip,
            dense,
            name="index_select dense scores",
            shape=f"{rows} x {num_heads} x {dim} against {visible}",
            kernel=_dense_kernel,
            pointers=("out_ptr",),
            sizes=("first_row", "end_row", "max_visible", "out_stride"),
            constants={"ROWS": dense.columns // num_heads, "LANES": dense.lanes},
            num_programs=rows * num_heads // dense.columns * (visible // (dense.tiles * dense.tile)),
            bytes_moved=(rows * num_heads + visible) * vector_bytes + 2 * rows * visible,
            flops=2 * rows * visible * num_heads * dim,
        ),
        _case(
            chip,
            inside,
            name="index_select scores inside blocks",
            shape=f"{replayed} x {num_heads} x {dim} against {slots} each",
            kernel=_inside_kernel,
            pointers=("candidate_ptr", "out_ptr"),
            sizes=("first_row", "candidate_stride", "num_slots", "out_stride"),
            constants={"BLOCK": 8},
            num_programs=replayed * slots // (inside.tiles * inside.tile),
            bytes_moved=replayed * slots * (vector_bytes + 2),
            flops=2 * replayed * slots * num_heads * dim,
        ),
    )


def _case(
    chip: Chip,
    launch: _Launch,
    *,
    kernel: Any,
    pointers: tuple[str, ...],
    sizes: tuple[str, ...],
    constants: dict[str, int],
    **figures: Any,
) -> AotCase:
    """What both kernels have in common at 32 heads x 128."""
    is_packed = chip is Chip.SM_100
    vectors = (
        "query_ptr",
        "query_scale_ptr",
        "weight_ptr",
        "key_ptr",
        "key_scale_ptr",
        "key_start_ptr",
        "num_visible_ptr",
    )
    types = dict.fromkeys(vectors, "*u8" if is_packed else "*bf16")
    types |= {"weight_ptr": "*bf16", "out_ptr": "*i16", "weight_scale": "fp32"}
    types |= dict.fromkeys(("key_start_ptr", "num_visible_ptr", "candidate_ptr"), "*i32") | dict.fromkeys(sizes, "i32")
    constants = constants | {
        "DIM": 128,
        "LOG_HEADS": 5,
        "KEYS": launch.tile,
        "TILES": launch.tiles,
        "PACKED": is_packed,
    }
    return AotCase(
        op="index_select",
        kernel=kernel,
        signature={name: "constexpr" if name in constants else types[name] for name in kernel.arg_names},
        constexprs=constants,
        aligned=(*vectors, *pointers, *(size for size in sizes if size.endswith("_stride"))),
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        mma=Mma.BLOCK_SCALED if is_packed else Mma.BF16,
        **figures,
    )
