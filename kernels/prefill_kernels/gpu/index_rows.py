"""Index keys and queries on their way into e2m1 and back: store_index, load_index, index_query, index_values (model.md 2.6, 3.4).

Called by the compressor (keys) and the indexer (queries). What the scorer reads differs by chip: on sm_90 the exact values in
bfloat16, on sm_100 packed e2m1 pairs with ue8m0 scales of 32. One pass each: a key is read as 2 bytes a channel and written as
17 / 32 bytes a channel; bound: memory. Profile R, equal to ref bit for bit: norm, RoPE and quantiser round where ref does.

The trap: keys live in two strided sections of each page, whose pages are 64-bit offsets apart.
"""

# N rows, H index heads, G groups that close, E entries, I index head dim; Z pages, E entries per page
from typing import Any

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from prefill_kernels.aot_case import AotCase, Mma
from prefill_kernels.gpu.chip import Chip
from prefill_kernels.gpu.formats import dequantise_fp4_ue8m0, pack_fp4, quantise_fp4_ue8m0, unpack_fp4
from prefill_kernels.gpu.rms_tile import rms_tile
from prefill_kernels.gpu.rope_device import cos_sin, rope_table, rotate
from prefill_kernels.numerics import Numerics
from prefill_kernels.ops import IndexRows

_GROUP = 32
_ROWS = 32
_WARPS = 4


@triton.jit
def _rotated(x, cos, sin, is_rotated):  # type: ignore[no-untyped-def]
    """x [R, I] float32 with pairs turned where is_rotated [pairs]; cos, sin [R, pairs]; rounded to bfloat16 values."""
    even, odd = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
    turned_even, turned_odd = rotate(even, odd, cos, sin)
    even = tl.where(is_rotated[None, :], turned_even, even)
    odd = tl.where(is_rotated[None, :], turned_odd, odd)
    return tl.interleave(even, odd).to(tl.bfloat16).to(tl.float32)


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _store_kernel(  # type: ignore[no-untyped-def]
    key_ptr,
    weight_ptr,
    position_ptr,
    frequency_ptr,
    data_ptr,
    scale_ptr,
    slot_ptr,
    num_rows,
    num_slots,
    page_entries,
    data_page_stride,
    data_entry_stride,
    scale_page_stride,
    scale_entry_stride,
    eps,
    LOG_DIM: tl.constexpr,
    FIRST_PAIR: tl.constexpr,
    ROWS: tl.constexpr,
):
    DIM: tl.constexpr = 1 << LOG_DIM
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    in_range = row < num_rows
    channel = tl.arange(0, DIM)
    offset = row.to(tl.int64)[:, None] * DIM + channel[None, :]
    x = tl.load(key_ptr + offset, mask=in_range[:, None], other=0).to(tl.float32)
    x = rms_tile(x, tl.load(weight_ptr + channel).to(tl.float32), eps, LOG_DIM)
    pair = tl.arange(0, DIM // 2)
    position = tl.load(position_ptr + row, mask=in_range, other=0).to(tl.float32)
    frequency = tl.load(frequency_ptr + pair - FIRST_PAIR, mask=pair >= FIRST_PAIR, other=0.0)
    cos, sin = cos_sin(position[:, None] * frequency[None, :])
    codes, scale = quantise_fp4_ue8m0(_rotated(x, cos, sin, pair >= FIRST_PAIR))
    slot = tl.load(slot_ptr + row, mask=in_range, other=-1)
    is_stored = (slot >= 0) & (slot < num_slots)
    page, entry = (slot // page_entries).to(tl.int64), (slot % page_entries).to(tl.int64)
    data_at = page * data_page_stride + entry * data_entry_stride
    scale_at = page * scale_page_stride + entry * scale_entry_stride
    tl.store(data_ptr + data_at[:, None] + pair[None, :], pack_fp4(codes), mask=is_stored[:, None])
    group = tl.arange(0, DIM // 32)
    tl.store(scale_ptr + scale_at[:, None] + group[None, :], scale, mask=is_stored[:, None])


@triton.jit(do_not_specialize=["num_items"])  # type: ignore[untyped-decorator]
def _query_kernel(  # type: ignore[no-untyped-def]
    query_ptr,
    table_ptr,
    out_ptr,
    scale_ptr,
    num_items,
    num_heads,
    DIM: tl.constexpr,
    FIRST_PAIR: tl.constexpr,
    ROWS: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Rows are (row, head) pairs; table [row, cosines, sines] of the rotated pairs."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    in_range = row < num_items
    channel = tl.arange(0, DIM)
    x = tl.load(query_ptr + row[:, None] * DIM + channel[None, :], mask=in_range[:, None], other=0).to(tl.float32)
    pair = tl.arange(0, DIM // 2)
    NUM_PAIRS: tl.constexpr = DIM // 2 - FIRST_PAIR
    at = (row // num_heads)[:, None] * (2 * NUM_PAIRS) + (pair - FIRST_PAIR)[None, :]
    is_known = in_range[:, None] & (pair >= FIRST_PAIR)[None, :]
    cos = tl.load(table_ptr + at, mask=is_known, other=0.0)
    sin = tl.load(table_ptr + at + NUM_PAIRS, mask=is_known, other=0.0)
    codes, scale = quantise_fp4_ue8m0(_rotated(x, cos, sin, pair >= FIRST_PAIR))
    if PACKED:
        tl.store(out_ptr + row[:, None] * (DIM // 2) + pair[None, :], pack_fp4(codes), mask=in_range[:, None])
        group = tl.arange(0, DIM // 32)
        tl.store(scale_ptr + row[:, None] * (DIM // 32) + group[None, :], scale, mask=in_range[:, None])
    else:
        seen = dequantise_fp4_ue8m0(codes, scale).to(tl.bfloat16)
        tl.store(out_ptr + row[:, None] * DIM + channel[None, :], seen, mask=in_range[:, None])


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _load_kernel(  # type: ignore[no-untyped-def]
    data_ptr,
    scale_ptr,
    slot_ptr,
    out_ptr,
    out_scale_ptr,
    num_rows,
    num_slots,
    page_entries,
    data_page_stride,
    data_entry_stride,
    scale_page_stride,
    scale_entry_stride,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Without slots row r is slot r."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    in_range = row < num_rows
    slot = tl.load(slot_ptr + row, mask=in_range, other=-1) if HAS_SLOTS else row
    is_known = in_range & (slot >= 0) & (slot < num_slots)
    page, entry = (slot // page_entries).to(tl.int64), (slot % page_entries).to(tl.int64)
    byte = tl.arange(0, DIM // 2)
    data_at = page * data_page_stride + entry * data_entry_stride
    data = tl.load(data_ptr + data_at[:, None] + byte[None, :], mask=is_known[:, None], other=0)
    group = tl.arange(0, DIM // 32)
    scale_at = page * scale_page_stride + entry * scale_entry_stride
    scale = tl.load(scale_ptr + scale_at[:, None] + group[None, :], mask=is_known[:, None], other=0)
    out_row = row.to(tl.int64)[:, None]
    if PACKED:
        tl.store(out_ptr + out_row * (DIM // 2) + byte[None, :], data, mask=in_range[:, None])
        tl.store(out_scale_ptr + out_row * (DIM // 32) + group[None, :], scale, mask=in_range[:, None])
    else:
        values = dequantise_fp4_ue8m0(unpack_fp4(data), scale).to(tl.bfloat16)
        tl.store(out_ptr + out_row * DIM + tl.arange(0, DIM)[None, :], values, mask=in_range[:, None])


def store_index(
    key_GI: Tensor,
    norm_weight_I: Tensor,
    positions_G: Tensor,
    frequencies: Tensor,
    data_pages_ZER: Tensor,
    scale_pages_ZES: Tensor,
    slots_G: Tensor,
    *,
    eps: float,
    numerics: Numerics,  # noqa: ARG001 - one Numerics only
) -> None:
    """As Ops.store_index; the pages are written in place. A slot outside the pages writes nothing."""
    num_rows, dim = key_GI.shape
    _check_dim(dim)
    if not num_rows:
        return
    _store_kernel[(triton.cdiv(num_rows, _ROWS),)](
        key_GI.contiguous(),
        norm_weight_I,
        positions_G,
        frequencies,
        data_pages_ZER,
        scale_pages_ZES,
        slots_G,
        num_rows,
        *_page_sizes(data_pages_ZER, scale_pages_ZES),
        eps,
        LOG_DIM=dim.bit_length() - 1,
        FIRST_PAIR=dim // 2 - len(frequencies),
        ROWS=_ROWS,
        num_warps=_WARPS,
        enable_fp_fusion=False,
    )


def load_index(
    data_pages_ZER: Tensor,
    scale_pages_ZES: Tensor,
    slots_E: Tensor,
    *,
    numerics: Numerics,  # noqa: ARG001
    chip: Chip,
) -> IndexRows:
    """As Ops.load_index; sm_90: bfloat16 values, sm_100: e2m1 pairs and scales."""
    return _load(data_pages_ZER, scale_pages_ZES, slots_E, len(slots_E), is_packed=chip is Chip.SM_100)


def index_query(
    query_NHI: Tensor,
    positions_N: Tensor,
    frequencies: Tensor,
    *,
    numerics: Numerics,  # noqa: ARG001
    chip: Chip,
) -> IndexRows:
    """As Ops.index_query; sm_90: bfloat16 values, sm_100: e2m1 pairs and scales."""
    num_rows, num_heads, dim = query_NHI.shape
    _check_dim(dim)
    is_packed = chip is Chip.SM_100
    out = _empty(query_NHI.shape, device=query_NHI.device, is_packed=is_packed)
    if num_rows:
        _query_kernel[(triton.cdiv(num_rows * num_heads, _ROWS),)](
            query_NHI.contiguous(),
            rope_table(positions_N, frequencies),
            out.data,
            out.data if out.scales is None else out.scales,
            num_rows * num_heads,
            num_heads,
            DIM=dim,
            FIRST_PAIR=dim // 2 - len(frequencies),
            ROWS=_ROWS,
            PACKED=is_packed,
            num_warps=_WARPS,
            enable_fp_fusion=False,
        )
    return out


def index_values(rows: IndexRows, *, numerics: Numerics) -> Tensor:  # noqa: ARG001
    """As Ops.index_values."""
    if rows.scales is None:
        return rows.data
    data, scales = rows.data.flatten(0, -2).unsqueeze(0), rows.scales.flatten(0, -2).unsqueeze(0)
    values = _load(data, scales, None, data.shape[1], is_packed=False).data
    return values.view(*rows.data.shape[:-1], values.shape[-1])


def _load(
    data_pages: Tensor, scale_pages: Tensor, slots: Tensor | None, num_rows: int, *, is_packed: bool
) -> IndexRows:
    dim = 2 * data_pages.shape[-1]
    _check_dim(dim)
    out = _empty((num_rows, dim), device=data_pages.device, is_packed=is_packed)
    if num_rows:
        _load_kernel[(triton.cdiv(num_rows, _ROWS),)](
            data_pages,
            scale_pages,
            data_pages if slots is None else slots,
            out.data,
            out.data if out.scales is None else out.scales,
            num_rows,
            *_page_sizes(data_pages, scale_pages),
            DIM=dim,
            ROWS=_ROWS,
            HAS_SLOTS=slots is not None,
            PACKED=is_packed,
            num_warps=_WARPS,
        )
    return out


def _empty(shape: tuple[int, ...], *, device: torch.device, is_packed: bool) -> IndexRows:
    if not is_packed:
        return IndexRows(data=torch.empty(shape, dtype=torch.bfloat16, device=device))
    rows, dim = shape[:-1], shape[-1]
    return IndexRows(
        data=torch.empty(*rows, dim // 2, dtype=torch.uint8, device=device),
        scales=torch.empty(*rows, dim // _GROUP, dtype=torch.uint8, device=device),
    )


def _check_dim(dim: int) -> None:
    if dim < _GROUP or dim != triton.next_power_of_2(dim):
        raise ValueError(f"index head dim is {dim}: expected a power of two from {_GROUP}")


def _page_sizes(data_pages: Tensor, scale_pages: Tensor) -> tuple[int, ...]:
    """(slots, entries per page, data strides of page and entry, scale strides of page and entry), in bytes."""
    if data_pages.shape[:2] != scale_pages.shape[:2] or data_pages.stride(2) != 1 or scale_pages.stride(2) != 1:
        raise ValueError(
            f"index pages {tuple(data_pages.shape)} and {tuple(scale_pages.shape)} with strides {data_pages.stride()} and "
            f"{scale_pages.stride()}: expected the same pages and entries, contiguous records"
        )
    return (
        data_pages.shape[0] * data_pages.shape[1],
        data_pages.shape[1],
        data_pages.stride(0),
        data_pages.stride(1),
        scale_pages.stride(0),
        scale_pages.stride(1),
    )


def aot_cases(chip: Chip) -> tuple[AotCase, ...]:
    """A chunk of 32,768 rows: keys of a ratio-2 layer, queries, and the keys of 131,072 tokens read back."""
    groups, rows, entries, num_heads = 16384, 32768, 65536, 32
    is_packed = chip is Chip.SM_100
    record = 128 // 2 + 128 // _GROUP
    seen = record if is_packed else 2 * 128
    return (
        _case(
            "store_index",
            f"{groups} x 128",
            _store_kernel,
            {"LOG_DIM": 7, "FIRST_PAIR": 32},
            vectors={"key_ptr": "*bf16", "data_ptr": "*u8", "scale_ptr": "*u8"},
            num_programs=groups // _ROWS,
            bytes_moved=groups * (2 * 128 + 8 + record),
        ),
        _case(
            "index_query",
            f"{rows} x {num_heads} x 128",
            _query_kernel,
            {"DIM": 128, "FIRST_PAIR": 32, "PACKED": is_packed},
            vectors={"query_ptr": "*bf16"} | dict.fromkeys(("out_ptr", "scale_ptr"), "*u8" if is_packed else "*bf16"),
            num_programs=rows * num_heads // _ROWS,
            bytes_moved=rows * (num_heads * (2 * 128 + seen) + 4 * 64),
        ),
        _case(
            "load_index",
            f"{entries} x 128",
            _load_kernel,
            {"DIM": 128, "HAS_SLOTS": True, "PACKED": is_packed},
            vectors=dict.fromkeys(("data_ptr", "scale_ptr"), "*u8")
            | dict.fromkeys(("out_ptr", "out_scale_ptr"), "*u8" if is_packed else "*bf16"),
            num_programs=entries // _ROWS,
            bytes_moved=entries * (record + seen + 4),
            enable_fp_fusion=True,
        ),
    )


def _case(
    op: str,
    shape: str,
    kernel: Any,
    constants: dict[str, Any],
    *,
    vectors: dict[str, str],
    num_programs: int,
    bytes_moved: int,
    enable_fp_fusion: bool = False,
) -> AotCase:
    """One kernel of this module; arguments that `vectors` does not name have one type everywhere."""
    constants = constants | {"ROWS": _ROWS}
    types = vectors | dict.fromkeys(("position_ptr", "slot_ptr"), "*i32") | {"weight_ptr": "*bf16", "eps": "fp32"}
    types |= dict.fromkeys(("frequency_ptr", "table_ptr"), "*fp32")
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    # Entries of 64 + 4 bytes in pages of 64 or 128 entries, of blocks that are multiples of 16 bytes.
    sizes = ("num_slots", "page_entries", "data_page_stride", "data_entry_stride", "scale_page_stride", "num_heads")
    return AotCase(
        op=op,
        name=op,
        shape=shape,
        kernel=kernel,
        signature=signature,
        constexprs=constants,
        aligned=tuple(name for name, kind in signature.items() if kind.startswith("*") or name in sizes),
        num_warps=_WARPS,
        num_stages=3,
        mma=Mma.NONE,
        num_programs=num_programs,
        bytes_moved=bytes_moved,
        flops=0,
        enable_fp_fusion=enable_fp_fusion,
    )
