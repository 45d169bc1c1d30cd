"""Sparse attention: a program per row turns its queries, walks the row's key slots once, turns the result back (model.md 2.8).

A tile of keys is gathered into shared memory and used twice, as keys and as values; window tiles come first, then tiles of
selected entries. Tiles before the first and behind the last key are not visited; an empty slot adds exactly 0, so that changes
no bit. Traffic per row at the released sizes: 640 gathered keys of 1 KiB, mostly from L2 (rows share entries), 64 KiB of queries
in and 64 KiB out; 84 MFLOP. Bound: matrix unit, closely followed by L2.

Profile D in one point: the softmax runs online, and its reference is the smallest power of two above the scores so far, where
ref subtracts the final maximum. Both round exp(e - m) to bfloat16 before the values, and not in the denominator. Raising m by
whole powers of two rescales without rounding, so the result is what a second pass with the final m would give; but ref's weights
lie elsewhere between the bfloat16 steps, and their roundings (2**-9 each) differ: the tolerance table's bfloat16 entry.

The second kernel, sparse_attention_records, decodes fp4 records in its loop: 288 gathered bytes instead of 1 KiB and no scratch
for decoded entries, at the price of registers (decisions C22).
"""

# N rows, H heads, C head dim, M window keys, W window slots, E entries, K entry slots, J slots of a tile; Z pages, R record
from dataclasses import dataclass
from typing import Any

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from prefill_kernels.aot_case import AotCase, Mma
from prefill_kernels.gpu.attention_tile import (
    add_keys,
    decoded_keys,
    end_tile,
    first_tile,
    gathered_keys,
    load_query,
    no_keys,
    store_output,
)
from prefill_kernels.gpu.chip import Chip
from prefill_kernels.gpu.rope_device import rope_table
from prefill_kernels.numerics import Numerics

_LOG2_E = 1.4426950408889634
_MIN_HEADS = 16
_MIN_WIDTH = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """Launch parameters. split: see attention_tile.scores."""

    key_tile: int
    num_warps: int
    num_stages: int
    split: bool


CONFIGS = {
    # AOT, triton 3.6 and 3.9: up to 255 registers, 0 spills, 156 KB of shared memory. Without the split 8 loads and stores spill
    # on 3.9, and both warp groups compute all scores. A tile of 64 wants 246 KB.
    Chip.SM_90: AttentionConfig(key_tile=32, num_warps=8, num_stages=2, split=True),
    # AOT, both versions: up to 228 registers, 0 spills, 165 KB, all 512 columns of tensor memory, where scores and sums stand.
    Chip.SM_100: AttentionConfig(key_tile=32, num_warps=8, num_stages=2, split=False),
}
RECORD_CONFIGS = {
    # AOT: 0 spills on triton 3.9, 4 spilled loads and stores on 3.6 (22 with a tile of 32).
    Chip.SM_90: AttentionConfig(key_tile=16, num_warps=8, num_stages=2, split=True),
    # AOT: 0 spills on 3.9, 2 on 3.6 (a tile of 32: 19 and 4; two stages: 43 and 20).
    Chip.SM_100: AttentionConfig(key_tile=16, num_warps=8, num_stages=1, split=False),
}


@triton.jit  # type: ignore[untyped-decorator]
def _attention_kernel(  # type: ignore[no-untyped-def]
    query_ptr,
    table_ptr,
    window_ptr,
    window_index_ptr,
    entries_ptr,
    entry_index_ptr,
    sink_ptr,
    out_ptr,
    scale,
    NUM_WINDOW: tl.constexpr,
    NUM_ENTRIES: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_J: tl.constexpr,
    SPLIT: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    WIDTH: tl.constexpr,
    NUM_PAIRS: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    query_ptr += n * (NUM_HEADS * WIDTH)
    out_ptr += n * (NUM_HEADS * WIDTH)
    table_ptr += n * (2 * NUM_PAIRS)
    window_index_ptr += n * NUM_WINDOW
    entry_index_ptr += n * NUM_ENTRIES
    q = load_query(query_ptr, out_ptr, table_ptr, NUM_HEADS, BLOCK_H, WIDTH, NUM_PAIRS)
    WINDOW_TILES: tl.constexpr = (NUM_WINDOW + BLOCK_J - 1) // BLOCK_J
    end = WINDOW_TILES
    if NUM_ENTRIES > 0:
        end += end_tile(entry_index_ptr, NUM_ENTRIES, BLOCK_E, BLOCK_J)
    channel = tl.arange(0, WIDTH)[None, :]
    reference, total, acc = no_keys(BLOCK_H, WIDTH)
    for tile in range(first_tile(window_index_ptr, NUM_WINDOW, BLOCK_W, BLOCK_J), end):
        # One loop for both key sets: two do not fit the registers.
        in_window = tile < WINDOW_TILES
        slot = tl.where(in_window, tile, tile - WINDOW_TILES) * BLOCK_J + tl.arange(0, BLOCK_J)
        num_slots = tl.where(in_window, NUM_WINDOW, NUM_ENTRIES)
        row = tl.load(tl.where(in_window, window_index_ptr, entry_index_ptr) + slot, mask=slot < num_slots, other=-1)
        keys = gathered_keys(tl.where(in_window, window_ptr, entries_ptr), row, channel, WIDTH)
        reference, total, acc = add_keys(q, keys, row >= 0, scale, reference, total, acc, SPLIT)
    store_output(acc, total, reference, sink_ptr, out_ptr, table_ptr, NUM_HEADS, BLOCK_H, WIDTH, NUM_PAIRS)


@triton.jit  # type: ignore[untyped-decorator]
def _attention_records_kernel(  # type: ignore[no-untyped-def]
    query_ptr,
    table_ptr,
    window_ptr,
    window_index_ptr,
    pages_ptr,
    slots_ptr,
    entry_index_ptr,
    sink_ptr,
    out_ptr,
    scale,
    records_per_page,
    stride_page,
    stride_record,
    NUM_WINDOW: tl.constexpr,
    NUM_ENTRIES: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_J: tl.constexpr,
    SPLIT: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    WIDTH: tl.constexpr,
    NUM_PAIRS: tl.constexpr,
):
    n = tl.program_id(0).to(tl.int64)
    query_ptr += n * (NUM_HEADS * WIDTH)
    out_ptr += n * (NUM_HEADS * WIDTH)
    table_ptr += n * (2 * NUM_PAIRS)
    window_index_ptr += n * NUM_WINDOW
    entry_index_ptr += n * NUM_ENTRIES
    q = load_query(query_ptr, out_ptr, table_ptr, NUM_HEADS, BLOCK_H, WIDTH, NUM_PAIRS)
    reference, total, acc = no_keys(BLOCK_H, WIDTH)
    first = first_tile(window_index_ptr, NUM_WINDOW, BLOCK_W, BLOCK_J)
    for tile in range(first, (NUM_WINDOW + BLOCK_J - 1) // BLOCK_J):
        slot = tile * BLOCK_J + tl.arange(0, BLOCK_J)
        row = tl.load(window_index_ptr + slot, mask=slot < NUM_WINDOW, other=-1)
        keys = gathered_keys(window_ptr, row, tl.arange(0, WIDTH)[None, :], WIDTH)
        reference, total, acc = add_keys(q, keys, row >= 0, scale, reference, total, acc, SPLIT)
    for tile in range(end_tile(entry_index_ptr, NUM_ENTRIES, BLOCK_E, BLOCK_J)):
        slot = tile * BLOCK_J + tl.arange(0, BLOCK_J)
        row = tl.load(entry_index_ptr + slot, mask=slot < NUM_ENTRIES, other=-1)
        keys = decoded_keys(pages_ptr, slots_ptr, row, records_per_page, stride_page, stride_record, WIDTH)
        reference, total, acc = add_keys(q, keys, row >= 0, scale, reference, total, acc, SPLIT)
    store_output(acc, total, reference, sink_ptr, out_ptr, table_ptr, NUM_HEADS, BLOCK_H, WIDTH, NUM_PAIRS)


def sparse_attention(
    query_NHC: Tensor,
    positions_N: Tensor,
    frequencies: Tensor,
    window_keys_MC: Tensor,
    window_index_NW: Tensor,
    entries_EC: Tensor | None,
    entry_index_NK: Tensor | None,
    sink_H: Tensor,
    *,
    scale: float,
    numerics: Numerics,  # noqa: ARG001 - production only
    chip: Chip,
) -> Tensor:
    """Same contract as ref.sparse_attention, bfloat16; C a power of two, rotated channels a multiple of 8."""
    out_NHC = _empty_output(query_NHC, frequencies, window_keys_MC, window_index_NW, scale)
    if not out_NHC.numel():
        return out_NHC
    if entries_EC is None or entry_index_NK is None:
        entries_EC, entry_index_NK = window_keys_MC, window_index_NW[:, :0]
    _check_rows(entries_EC, entry_index_NK)
    config = CONFIGS[chip]
    _attention_kernel[(len(query_NHC),)](
        query_NHC,
        rope_table(positions_N, frequencies),
        window_keys_MC,
        window_index_NW,
        entries_EC,
        entry_index_NK,
        sink_H,
        out_NHC,
        scale * _LOG2_E,
        **_constants(config, query_NHC.shape, window_index_NW.shape[1], entry_index_NK.shape[1], len(frequencies)),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        enable_fp_fusion=False,
    )
    return out_NHC


def sparse_attention_records(
    query_NHC: Tensor,
    positions_N: Tensor,
    frequencies: Tensor,
    window_keys_MC: Tensor,
    window_index_NW: Tensor,
    pages_ZER: Tensor,
    slots_E: Tensor,
    entry_index_NK: Tensor,
    sink_H: Tensor,
    *,
    scale: float,
    chip: Chip,
) -> Tensor:
    """sparse_attention over load_main(pages, slots, "fp4") without that tensor.

    Args:
        pages_ZER: [Z, E, C/2 + C/16] uint8 fp4 records, strided pages. slots_E: [E] int32, none of them -1 if selected.
        entry_index_NK: [N, K] int32 into slots_E, -1 = empty slot.
    """
    out_NHC = _empty_output(query_NHC, frequencies, window_keys_MC, window_index_NW, scale)
    if not out_NHC.numel():
        return out_NHC
    config = RECORD_CONFIGS[chip]
    _attention_records_kernel[(len(query_NHC),)](
        query_NHC,
        rope_table(positions_N, frequencies),
        window_keys_MC,
        window_index_NW,
        pages_ZER,
        slots_E,
        entry_index_NK.contiguous(),
        sink_H,
        out_NHC,
        scale * _LOG2_E,
        pages_ZER.shape[1],
        pages_ZER.stride(0),
        pages_ZER.stride(1),
        **_constants(config, query_NHC.shape, window_index_NW.shape[1], entry_index_NK.shape[1], len(frequencies)),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        enable_fp_fusion=False,
    )
    return out_NHC


def _empty_output(
    query: Tensor, frequencies: Tensor, window_keys: Tensor, window_index: Tensor, scale: float
) -> Tensor:
    """Output of the query's shape, after its checks."""
    width, num_rotated = query.shape[-1], 2 * len(frequencies)
    is_power = width >= _MIN_WIDTH and width & (width - 1) == 0
    if not is_power or num_rotated % 8 or num_rotated > width or scale <= 0:
        raise ValueError(
            f"head dim {width}, {num_rotated} rotated channels, scale {scale}: expected a power of two of at least "
            f"{_MIN_WIDTH}, a multiple of 8 within it, and a positive scale"
        )
    if not query.is_contiguous() or query.data_ptr() % 16:
        raise ValueError(f"queries with strides {query.stride()}: expected contiguous rows at a multiple of 16 bytes")
    _check_rows(window_keys, window_index)
    return torch.empty_like(query)


def _check_rows(keys: Tensor, index: Tensor) -> None:
    if not keys.is_contiguous() or not (index.is_contiguous() or index.shape[1] == 0):
        raise ValueError(f"keys with strides {keys.stride()}, index {index.stride()}: expected contiguous tensors")


def _constants(
    config: AttentionConfig, query_shape: torch.Size, num_window: int, num_entries: int, num_pairs: int
) -> dict[str, Any]:
    """Constexpr arguments that both kernels share."""
    _, num_heads, width = query_shape
    return {
        "NUM_WINDOW": num_window,
        "NUM_ENTRIES": num_entries,
        "BLOCK_W": triton.next_power_of_2(num_window),
        "BLOCK_E": triton.next_power_of_2(num_entries),
        "BLOCK_J": config.key_tile,
        "SPLIT": config.split,
        "NUM_HEADS": num_heads,
        "BLOCK_H": max(_MIN_HEADS, triton.next_power_of_2(num_heads)),
        "WIDTH": width,
        "NUM_PAIRS": num_pairs,
    }


def aot_cases(chip: Chip) -> tuple[AotCase, ...]:
    """A 32,768-row chunk at the end of 131,072 tokens: window and 512 of 65,536 entries, window only (layers 0 and 1), and
    the kernel that decodes in its loop."""
    return (
        _case("sparse_attention", _attention_kernel, CONFIGS[chip], num_entries=512),
        _case("sparse_attention window", _attention_kernel, CONFIGS[chip], num_entries=0),
        _case("sparse_attention records", _attention_records_kernel, RECORD_CONFIGS[chip], num_entries=512),
    )


def _case(name: str, kernel: Any, config: AttentionConfig, *, num_entries: int) -> AotCase:
    num_rows, num_heads, width, num_window = 32768, 64, 512, 128
    types = dict.fromkeys(("table_ptr", "sink_ptr"), "*fp32") | {"scale": "fp32", "pages_ptr": "*u8"}
    types |= dict.fromkeys(("window_index_ptr", "entry_index_ptr", "slots_ptr"), "*i32")
    types |= dict.fromkeys(("records_per_page", "stride_page", "stride_record"), "i32")
    signature = {key: "constexpr" if key.isupper() else types.get(key, "*bf16") for key in kernel.arg_names}
    # Keys count once: later reads of a key come from L2.
    entry_bytes = width * 9 // 16 if kernel is _attention_records_kernel else 2 * width
    key_bytes = num_rows * 2 * width + (65536 * entry_bytes if num_entries else 0)
    return AotCase(
        op="sparse_attention",
        name=name,
        shape=f"{num_rows} x {num_heads} x {width}, {num_window} + {num_entries} keys",
        kernel=kernel,
        signature=signature,
        constexprs=_constants(config, torch.Size((num_rows, num_heads, width)), num_window, num_entries, 32),
        aligned=tuple(key for key in signature if key.endswith("_ptr") or key.startswith("stride")),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        mma=Mma.BF16,
        num_programs=num_rows,
        bytes_moved=key_bytes + num_rows * (4 * num_heads * width + 4 * (num_window + num_entries) + 256),
        flops=4 * num_rows * num_heads * width * (num_window + num_entries),
        default=kernel is _attention_kernel,
        enable_fp_fusion=False,
    )
