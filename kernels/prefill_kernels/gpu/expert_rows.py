"""Groups the (row, slot) pairs of a step by expert, for the grouped products; called by `experts`, no host sync.

A counting sort in two launches: every program counts the experts of its 1,024 pairs; then every program adds up the counts
before its own and places its pairs one after another. So pairs of one expert stand in ascending (row, slot) order whatever
the machine does; nothing depends on an order of atomics. Traffic: 8 bytes per pair, and num_programs**2 * experts * 4 bytes of
counts from L2; bound: latency. The trap: tiles are counted for the worst case, their true number is known on the device only;
tiles beyond it have no rows, and the grouped products leave them at once.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from prefill_kernels.aot_case import AotCase, Mma
from prefill_kernels.gpu.chip import Chip

TILE_ROWS = 128
"""Rows of a tile of the grouped products, on every chip and at every batch size (decisions C24)."""

_TILE_ROWS = tl.constexpr(TILE_ROWS)
_TILE_FIELDS = 3
_PAIRS = 1024
_COUNT_ROWS = 32
# One-hot tiles [pairs, bins]: 16 values per thread. A scan over more bins than threads would need a stack (AOT, 512 bins: 384
# experts on one GPU).
_ONE_HOT = 8192
_PLACE_WARPS = 16
_COUNT_WARPS = 8
_CLEAR_WARPS = 4
_CLEAR_PAIRS = 16
_CLEAR_WIDTH = 1024
# Numbers that change from step to step: a kernel per divisibility would be compiled while requests wait.
_HOST_COUNTS = ("num_pairs", "num_tiles", "first_expert", "num_local", "num_blocks")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRows:
    """Pairs of this rank's experts, by expert.

    pairs: [N * top-k] int32, n * top-k + slot of each, experts one after another; beyond the last: undefined.
    tiles: [max tiles, 3] int32: local expert, place in `pairs` of the first row, number of rows (0: no such tile).
    """

    pairs: Tensor
    tiles: Tensor


@triton.jit(do_not_specialize=_HOST_COUNTS)  # type: ignore[untyped-decorator]
def _count_pairs_kernel(  # type: ignore[no-untyped-def]
    expert_ids_ptr, counts_ptr, num_pairs, first_expert, num_local, BLOCK_P: tl.constexpr, BINS: tl.constexpr
):
    program = tl.program_id(0)
    pair = program * BLOCK_P + tl.arange(0, BLOCK_P)
    local = _local_experts(expert_ids_ptr, pair, num_pairs, first_expert, num_local)
    # Absent pairs share the last used bin, which nobody reads.
    counts = tl.histogram(local, BINS)
    tl.store(counts_ptr + program * BINS + tl.arange(0, BINS), counts)


@triton.jit(do_not_specialize=_HOST_COUNTS)  # type: ignore[untyped-decorator]
def _place_pairs_kernel(  # type: ignore[no-untyped-def]
    expert_ids_ptr,
    counts_ptr,
    pairs_ptr,
    tiles_ptr,
    num_pairs,
    num_tiles,
    first_expert,
    num_local,
    num_blocks,
    BLOCK_P: tl.constexpr,
    SUB_P: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BINS: tl.constexpr,
):
    """Programs below num_blocks place pairs, the others describe tiles."""
    program = tl.program_id(0)
    bin = tl.arange(0, BINS)
    total = tl.zeros((BINS,), tl.int32)
    before = tl.zeros((BINS,), tl.int32)
    for first in range(0, num_blocks, BLOCK_C):
        block = first + tl.arange(0, BLOCK_C)
        mask = (block < num_blocks)[:, None] & (bin < num_local)[None, :]
        counts = tl.load(counts_ptr + block[:, None] * BINS + bin[None, :], mask=mask, other=0)
        total += tl.sum(counts, axis=0)
        before += tl.sum(tl.where((block < program)[:, None], counts, 0), axis=0)
    start = tl.cumsum(total, axis=0) - total
    if program < num_blocks:
        place = start + before
        for first in range(0, BLOCK_P, SUB_P):
            pair = program * BLOCK_P + first + tl.arange(0, SUB_P)
            local = _local_experts(expert_ids_ptr, pair, num_pairs, first_expert, num_local)
            is_own = (local[:, None] == bin[None, :]).to(tl.int32)
            earlier = tl.cumsum(is_own, axis=0) - is_own
            at = tl.sum(is_own * (earlier + place[None, :]), axis=1)
            tl.store(pairs_ptr + at, pair, mask=local < num_local)
            place += tl.sum(is_own, axis=0)
    else:
        tiles = tl.cdiv(total, _TILE_ROWS)
        end = tl.cumsum(tiles, axis=0)
        tile = (program - num_blocks) * BLOCK_T + tl.arange(0, BLOCK_T)
        # Experts without rows end where they start and are passed over; beyond the last tile all have ended.
        expert = tl.sum((end[None, :] <= tile[:, None]).to(tl.int32), axis=1)
        is_own = (expert[:, None] == bin[None, :]).to(tl.int32)
        offset = (tile - tl.sum(is_own * (end - tiles)[None, :], axis=1)) * _TILE_ROWS
        rows = tl.minimum(tl.sum(is_own * total[None, :], axis=1) - offset, _TILE_ROWS)
        in_range = tile < num_tiles
        tl.store(tiles_ptr + tile * 3, expert, mask=in_range)
        tl.store(tiles_ptr + tile * 3 + 1, tl.sum(is_own * start[None, :], axis=1) + offset, mask=in_range)
        tl.store(tiles_ptr + tile * 3 + 2, tl.where(expert < num_local, rows, 0), mask=in_range)


@triton.jit
def _local_experts(expert_ids_ptr, pair, num_pairs, first_expert, num_local):  # type: ignore[no-untyped-def]
    """Local expert of each pair; num_local for pairs that are absent or beyond the end."""
    local = tl.load(expert_ids_ptr + pair, mask=pair < num_pairs, other=first_expert + num_local) - first_expert
    return tl.where((local >= 0) & (local < num_local), local, num_local)


@triton.jit(do_not_specialize=_HOST_COUNTS)  # type: ignore[untyped-decorator]
def _clear_absent_kernel(  # type: ignore[no-untyped-def]
    expert_ids_ptr,
    out_ptr,
    num_pairs,
    first_expert,
    num_local,
    WIDTH: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    column = tl.arange(0, BLOCK_W)
    zero = tl.zeros((BLOCK_W,), tl.bfloat16)
    for step in range(BLOCK_P):
        pair = tl.program_id(0) * BLOCK_P + step
        local = _local_experts(expert_ids_ptr, pair, num_pairs, first_expert, num_local)
        if (local == num_local) & (pair < num_pairs):
            row_ptr = out_ptr + pair.to(tl.int64) * WIDTH
            for first in range(0, WIDTH, BLOCK_W):
                tl.store(row_ptr + first + column, zero, mask=first + column < WIDTH)


def count_tiles(num_pairs: int, num_local: int) -> int:
    """Most tiles that num_pairs pairs of num_local experts can fill: every expert's last one may hold a single row."""
    num_used = min(num_pairs, num_local)
    return (num_pairs + (TILE_ROWS - 1) * num_used) // TILE_ROWS


def group_rows(expert_ids_NK: Tensor, *, first_expert: int, num_local: int) -> ExpertRows:
    """Pairs of experts [first_expert, first_expert + num_local), grouped.

    Args:
        expert_ids_NK: [N, K] int32 contiguous, N >= 1; ids outside the range are left out.
    """
    num_pairs = expert_ids_NK.numel()
    num_blocks = triton.cdiv(num_pairs, _PAIRS)
    num_tiles = count_tiles(num_pairs, num_local)
    bins = _num_bins(num_local)
    device = expert_ids_NK.device
    counts = torch.empty((num_blocks, bins), dtype=torch.int32, device=device)
    rows = ExpertRows(
        pairs=torch.empty(num_pairs, dtype=torch.int32, device=device),
        tiles=torch.empty((num_tiles, _TILE_FIELDS), dtype=torch.int32, device=device),
    )
    _count_pairs_kernel[(num_blocks,)](
        expert_ids_NK, counts, num_pairs, first_expert, num_local, BLOCK_P=_PAIRS, BINS=bins, num_warps=_COUNT_WARPS
    )
    blocks = _place_blocks(bins)
    _place_pairs_kernel[(num_blocks + triton.cdiv(num_tiles, blocks["BLOCK_T"]),)](
        expert_ids_NK,
        counts,
        rows.pairs,
        rows.tiles,
        num_pairs,
        num_tiles,
        first_expert,
        num_local,
        num_blocks,
        num_warps=_PLACE_WARPS,
        **blocks,
    )
    return rows


def clear_absent_slots(out_NKD: Tensor, expert_ids_NK: Tensor, *, first_expert: int, num_local: int) -> None:
    """Writes zeros to the slots of absent experts, and nothing else. out: [N, K, D] bfloat16, contiguous, N >= 1."""
    num_pairs = expert_ids_NK.numel()
    _clear_absent_kernel[(triton.cdiv(num_pairs, _CLEAR_PAIRS),)](
        expert_ids_NK,
        out_NKD,
        num_pairs,
        first_expert,
        num_local,
        WIDTH=out_NKD.shape[2],
        BLOCK_P=_CLEAR_PAIRS,
        BLOCK_W=_CLEAR_WIDTH,
        num_warps=_CLEAR_WARPS,
    )


def _num_bins(num_local: int) -> int:
    """One bin per local expert and one for all others, at least 32."""
    return max(32, int(triton.next_power_of_2(num_local + 1)))


def _place_blocks(bins: int) -> dict[str, int]:
    one_hot_rows = min(_PAIRS, max(16, _ONE_HOT // bins))
    return {
        "BLOCK_P": _PAIRS,
        "SUB_P": one_hot_rows,
        "BLOCK_T": one_hot_rows,
        "BLOCK_C": min(_COUNT_ROWS, one_hot_rows),
        "BINS": bins,
    }


def aot_cases(chip: Chip) -> tuple[AotCase, ...]:  # noqa: ARG001 - the same launches on both chips
    """Grouping of the pairs of a 32,768-row chunk for one rank of the released model at EP8, EP4, EP2 and alone."""
    return tuple(case for num_local in (52, 104, 208, 384) for case in _cases(num_local))


def _cases(num_local: int) -> tuple[AotCase, ...]:
    num_pairs, width = 32768 * 6, 5120
    bins = _num_bins(num_local)
    blocks = _place_blocks(bins)
    num_blocks = triton.cdiv(num_pairs, _PAIRS)
    num_tiles = count_tiles(num_pairs, num_local)
    num_placers = num_blocks + triton.cdiv(num_tiles, blocks["BLOCK_T"])
    count_bytes = num_blocks * bins * 4
    clear = {"WIDTH": width, "BLOCK_P": _CLEAR_PAIRS, "BLOCK_W": _CLEAR_WIDTH}
    num_absent = num_pairs - num_pairs * num_local // 416 if num_local < 384 else 0
    case = partial(_case, num_pairs, num_local)
    return (
        case(
            _count_pairs_kernel,
            "count pairs",
            {"BLOCK_P": _PAIRS, "BINS": bins},
            _COUNT_WARPS,
            num_blocks,
            num_pairs * 4 + count_bytes,
        ),
        case(
            _place_pairs_kernel,
            "place pairs",
            blocks,
            _PLACE_WARPS,
            num_placers,
            num_pairs * 8 + num_tiles * 12 + num_placers * count_bytes,
        ),
        case(
            _clear_absent_kernel,
            "clear absent slots",
            clear,
            _CLEAR_WARPS,
            triton.cdiv(num_pairs, _CLEAR_PAIRS),
            num_pairs * 4 + num_absent * width * 2,
        ),
    )


def _case(
    num_pairs: int,
    num_local: int,
    kernel: Any,
    name: str,
    constexprs: dict[str, int],
    num_warps: int,
    num_programs: int,
    bytes_moved: int,
) -> AotCase:
    pointer_types = {"out_ptr": "*bf16"}
    return AotCase(
        op="routed_experts",
        name=f"{name} {num_local}",
        shape=f"{num_pairs} pairs, {num_local} experts",
        kernel=kernel,
        signature={
            name: "constexpr"
            if name in constexprs
            else pointer_types.get(name, "*i32" if name.endswith("_ptr") else "i32")
            for name in kernel.arg_names
        },
        constexprs=constexprs,
        aligned=tuple(name for name in kernel.arg_names if name.endswith("_ptr")),
        num_warps=num_warps,
        num_stages=3,
        mma=Mma.NONE,
        num_programs=num_programs,
        bytes_moved=bytes_moved,
        flops=0,
    )
