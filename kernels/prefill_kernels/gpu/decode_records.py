"""Gathers fp8 and fp4 KV records by slot and decodes them to bfloat16: load_main, decode_window and the window's history.

Called by `main_entries` and `window_rows`. A program decodes a few records: 528 or 288 bytes read, 1 KiB written. Bound: memory.
Exact. The trap: pages [Z, E, R] cannot be flattened, and a pool passes 2**31 bytes, so offsets within pages are 64-bit.
"""

# N rows, R record bytes, C head dim; Z pages, E records per page
from typing import Any

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from prefill_kernels.aot_case import AotCase, Mma
from prefill_kernels.gpu.formats import dequantise_fp4_e4m3, dequantise_fp8, unpack_fp4

_ROWS = 8
_WARPS = 4
_MIN_WIDTH = 32
RECORD_FORMATS = ("fp4", "fp8")


@triton.jit
def record_offsets(slot, records_per_page, stride_page, stride_record):  # type: ignore[no-untyped-def]
    """[R] int64 offset of the records at slots [R] >= 0."""
    page = slot // records_per_page
    return page.to(tl.int64) * stride_page + (slot - page * records_per_page).to(tl.int64) * stride_record


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _decode_kernel(  # type: ignore[no-untyped-def]
    pages_ptr,
    slots_ptr,
    values_ptr,
    num_rows,
    num_records,
    records_per_page,
    stride_page,
    stride_record,
    HAS_SLOTS: tl.constexpr,
    IS_FP4: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slot = row
    if HAS_SLOTS:
        slot = tl.load(slots_ptr + row, mask=row < num_rows, other=-1).to(tl.int32)
    is_held = (row < num_rows) & (slot >= 0) & (slot < num_records)
    offset = record_offsets(tl.where(is_held, slot, 0), records_per_page, stride_page, stride_record)
    record_ptr = pages_ptr + offset[:, None]
    DATA: tl.constexpr = WIDTH // 2 if IS_FP4 else WIDTH
    GROUPS: tl.constexpr = WIDTH // 16 if IS_FP4 else WIDTH // 32
    data = tl.load(record_ptr + tl.arange(0, DATA)[None, :], mask=is_held[:, None], other=0)
    scales = tl.load(record_ptr + DATA + tl.arange(0, GROUPS)[None, :], mask=is_held[:, None], other=0)
    values = dequantise_fp4_e4m3(unpack_fp4(data), scales) if IS_FP4 else dequantise_fp8(data, scales)
    to_ptr = values_ptr + row.to(tl.int64)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    tl.store(to_ptr, values.to(tl.bfloat16), mask=(row < num_rows)[:, None])


def decode_fp8(pages_ZER: Tensor, slots_N: Tensor | None, values_NC: Tensor) -> None:
    """Writes the values of fp8 records (C e4m3 codes, then C/32 ue8m0 scales).

    Args:
        pages_ZER: [Z, E, C + C/32] uint8 pages, or flat [M, C + C/32]; may be strided.
        slots_N: [N] int32 or int64; one outside of the pages (-1) gives zeros. None: all records in order, flat ones only.
        values_NC: [N, C] bfloat16, contiguous, N > 0; written.
    """
    _decode(pages_ZER, slots_N, values_NC, is_fp4=False)


def decode_fp4(pages_ZER: Tensor, slots_N: Tensor, values_NC: Tensor) -> None:
    """decode_fp8 for fp4 records: C/2 bytes of e2m1 pairs, then C/16 e4m3 scales."""
    _decode(pages_ZER, slots_N, values_NC, is_fp4=True)


def _decode(pages: Tensor, slots: Tensor | None, values: Tensor, *, is_fp4: bool) -> None:
    num_rows, width = values.shape
    check_records(pages, width, is_fp4=is_fp4)
    _decode_kernel[(triton.cdiv(num_rows, _ROWS),)](
        pages,
        pages if slots is None else slots,
        values,
        num_rows,
        *page_sizes(pages),
        HAS_SLOTS=slots is not None,
        IS_FP4=is_fp4,
        WIDTH=width,
        ROWS=_ROWS,
        num_warps=_WARPS,
    )


def page_sizes(pages: Tensor) -> tuple[int, int, int, int]:
    """(records in all, records per page, page stride, record stride) in bytes; a flat pool is one page."""
    stride_page = pages.stride(0) if pages.dim() == 3 else 0
    return pages.shape[:-1].numel(), max(1, pages.shape[-2]), stride_page, pages.stride(-2)


def check_width(width: int) -> None:
    """Raises ValueError unless a tile can be as wide as a row."""
    if width < _MIN_WIDTH or width & (width - 1):
        raise ValueError(f"head dim is {width}: expected a power of two of at least {_MIN_WIDTH}")


def check_records(pages: Tensor, width: int, *, is_fp4: bool) -> None:
    """Raises ValueError unless the pages hold records of `width` channels."""
    record_bytes = width // 2 + width // 16 if is_fp4 else width + width // 32
    if pages.shape[-1] != record_bytes or pages.stride(-1) != 1 or pages.element_size() != 1:
        raise ValueError(
            f"pages {tuple(pages.shape)} {pages.dtype} with strides {pages.stride()}: expected contiguous uint8 records of "
            f"{record_bytes} bytes for {width} channels"
        )


def decode_case(op: str, name: str, record_format: str, num_rows: int, *, page_stride: int) -> AotCase:
    """The gate's case of a gather from pages `page_stride` bytes apart at the released head size."""
    width, is_fp4 = 512, record_format == "fp4"
    types: dict[str, Any] = {"pages_ptr": "*u8", "slots_ptr": "*i32", "values_ptr": "*bf16"}
    names = _decode_kernel.arg_names
    record_bytes = width // 2 + width // 16 if is_fp4 else width + width // 32
    assert page_stride % 16 == 0, f"page stride {page_stride} is not what the case says is aligned"
    return AotCase(
        op=op,
        name=name,
        shape=f"{num_rows} x {record_bytes} B",
        kernel=_decode_kernel,
        signature={key: "constexpr" if key.isupper() else types.get(key, "i32") for key in names},
        constexprs={"HAS_SLOTS": True, "IS_FP4": is_fp4, "WIDTH": width, "ROWS": _ROWS},
        aligned=(*types, "stride_page", "stride_record"),
        num_warps=_WARPS,
        num_stages=3,
        mma=Mma.NONE,
        num_programs=triton.cdiv(num_rows, _ROWS),
        bytes_moved=num_rows * (record_bytes + 2 * width + 4),
        flops=num_rows * width,
    )
