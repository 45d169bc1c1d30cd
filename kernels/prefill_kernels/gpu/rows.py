"""gather_rows and scatter_rows: bit copies of rows by index, between batches and strided pages of cache blocks.

Called by the model through Ops. Traffic: each row read once and written once; bound: memory (rows under 64 bytes: the launch).
A row moves as the widest words that its bytes, strides and address allow (plan_words), so any row width and dtype works. The
trap: pages [Z, E, R] cannot be flattened, an index is split into page and entry in the kernel.
"""

# M rows of the pool, N indices, R row; Z pages, E rows per page
from dataclasses import dataclass

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from prefill_kernels.aot_case import AotCase, Mma
from prefill_kernels.gpu.chip import Chip

WORD_DTYPES = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
# 2,048 words of 8 bytes are 16 KB in flight per program of 4 warps. AOT: 40 to 96 registers, the most for the narrowest rows.
_TILE_WORDS = 2048
_MAX_ROW_WORDS = 512
_WARPS = 4
_MAX_ROWS = 2**31 - 1
# Of a flat pool these are the step's rows: a kernel per divisibility would be compiled while requests wait.
_HOST_COUNTS = ("num_rows", "num_pool_rows", "entries_per_page")


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyTile:
    """rows x words of one program; both powers of two."""

    rows: int
    words: int


def plan_words(*byte_counts: int) -> int:
    """Bytes of the widest word (8, 4, 2 or 1) that divides sizes, strides and addresses."""
    return next(word for word in WORD_DTYPES if all(count % word == 0 for count in byte_counts))


def plan_tile(num_words: int) -> CopyTile:
    """Rows short enough stay whole; the tile's size is always the same."""
    words = min(_MAX_ROW_WORDS, triton.next_power_of_2(num_words))
    return CopyTile(rows=_TILE_WORDS // words, words=words)


@triton.jit
def _row_offset(index_N, entries_per_page, stride_page, stride_row):  # type: ignore[no-untyped-def]
    """[N] int64 word offset of each row of the pages. The division is in 32 bits, which is what fits the chip."""
    index_N = index_N.to(tl.int32)
    page_N = index_N // entries_per_page
    return page_N.to(tl.int64) * stride_page + (index_N - page_N * entries_per_page).to(tl.int64) * stride_row


@triton.jit(do_not_specialize=_HOST_COUNTS)  # type: ignore[untyped-decorator]
def _gather_rows_kernel(  # type: ignore[no-untyped-def]
    pages_ptr,
    index_ptr,
    out_ptr,
    num_rows,
    num_pool_rows,
    entries_per_page,
    stride_page,
    stride_row,
    num_words,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
):
    row_N = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    word_W = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    index_N = tl.load(index_ptr + row_N, mask=row_N < num_rows, other=-1).to(tl.int64)
    is_row_N = (index_N >= 0) & (index_N < num_pool_rows)
    from_N = _row_offset(tl.where(is_row_N, index_N, 0), entries_per_page, stride_page, stride_row)
    in_row_W = word_W < num_words
    value = tl.load(pages_ptr + from_N[:, None] + word_W[None, :], mask=is_row_N[:, None] & in_row_W[None, :], other=0)
    to_ptr = out_ptr + row_N.to(tl.int64)[:, None] * num_words + word_W[None, :]
    tl.store(to_ptr, value, mask=(row_N < num_rows)[:, None] & in_row_W[None, :])


@triton.jit(do_not_specialize=_HOST_COUNTS)  # type: ignore[untyped-decorator]
def _scatter_rows_kernel(  # type: ignore[no-untyped-def]
    pages_ptr,
    index_ptr,
    rows_ptr,
    num_rows,
    num_pool_rows,
    entries_per_page,
    stride_page,
    stride_row,
    stride_from,
    num_words,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
):
    row_N = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    word_W = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    index_N = tl.load(index_ptr + row_N, mask=row_N < num_rows, other=-1).to(tl.int64)
    is_row_N = (index_N >= 0) & (index_N < num_pool_rows)
    mask = is_row_N[:, None] & (word_W < num_words)[None, :]
    value = tl.load(rows_ptr + row_N.to(tl.int64)[:, None] * stride_from + word_W[None, :], mask=mask, other=0)
    to_N = _row_offset(tl.where(is_row_N, index_N, 0), entries_per_page, stride_page, stride_row)
    tl.store(pages_ptr + to_N[:, None] + word_W[None, :], value, mask=mask)


def gather_rows(x_MR: Tensor, index_N: Tensor) -> Tensor:
    """Same contract as ref.gather_rows; rows themselves are contiguous."""
    out_NR = torch.empty(len(index_N), x_MR.shape[-1], dtype=x_MR.dtype, device=x_MR.device)
    if not out_NR.numel():
        return out_NR
    pages, out = _as_words(x_MR, out_NR)
    tile = plan_tile(out.shape[-1])
    _gather_rows_kernel[_grid(out, tile)](
        pages,
        index_N,
        out,
        len(index_N),
        *_page_sizes(pages),
        out.shape[-1],
        ROWS=tile.rows,
        WORDS=tile.words,
        num_warps=_WARPS,
    )
    return out_NR


def scatter_rows(x_MR: Tensor, index_N: Tensor, rows_NR: Tensor) -> None:
    """Same contract as ref.scatter_rows, but an index beyond the last row writes nothing instead of raising: the device has
    nobody to tell.

    Raises:
        ValueError: rows of another width or dtype than x's.
    """
    if rows_NR.dtype != x_MR.dtype or rows_NR.shape != (len(index_N), x_MR.shape[-1]):
        raise ValueError(
            f"rows {tuple(rows_NR.shape)} {rows_NR.dtype} for {len(index_N)} indices into {tuple(x_MR.shape)} {x_MR.dtype}: "
            "expected one row of x's width and dtype per index"
        )
    if not rows_NR.numel() or not x_MR.numel():
        return
    pages, rows = _as_words(x_MR, rows_NR)
    tile = plan_tile(rows.shape[-1])
    _scatter_rows_kernel[_grid(rows, tile)](
        pages,
        index_N,
        rows,
        len(index_N),
        *_page_sizes(pages),
        rows.stride(0),
        rows.shape[-1],
        ROWS=tile.rows,
        WORDS=tile.words,
        num_warps=_WARPS,
    )


def _as_words(pages: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Both seen as words of one width; nothing is copied."""
    if pages.stride(-1) != 1 or rows.stride(-1) != 1:
        raise ValueError(f"rows with strides {pages.stride()} and {rows.stride()}: expected contiguous rows")
    steps = [*pages.stride()[:-1], *rows.stride()[:-1], pages.shape[-1], pages.storage_offset(), rows.storage_offset()]
    addresses = (pages.untyped_storage().data_ptr(), rows.untyped_storage().data_ptr())
    word = plan_words(*(int(step) * pages.element_size() for step in steps), *addresses)
    return pages.view(torch.uint8).view(WORD_DTYPES[word]), rows.view(torch.uint8).view(WORD_DTYPES[word])


def _page_sizes(pages: Tensor) -> tuple[int, int, int, int]:
    """(rows in all, rows per page, page stride, row stride) in words; a flat pool is one page."""
    num_rows, entries = pages.shape[:-1].numel(), pages.shape[-2]
    if num_rows > _MAX_ROWS:
        raise ValueError(f"{num_rows} rows in {tuple(pages.shape)}: expected at most {_MAX_ROWS}")
    return num_rows, max(1, entries), pages.stride(0) if pages.dim() == 3 else 0, pages.stride(-2)


def _grid(rows: Tensor, tile: CopyTile) -> tuple[int, int]:
    return triton.cdiv(rows.shape[0], tile.rows), triton.cdiv(rows.shape[1], tile.words)


def aot_cases(chip: Chip) -> tuple[AotCase, ...]:  # noqa: ARG001 - the same launches on both chips
    """Kept rows of a replay, and the last two KV sources' records of a 32,768-row chunk (stride of a block: 114,688 bytes)."""
    return (
        _case(_gather_rows_kernel, "gather_rows streams", 140, row_bytes=40960, page_stride=0),
        _case(_gather_rows_kernel, "gather_rows pre, post", 140, row_bytes=16, page_stride=0),
        _case(_gather_rows_kernel, "gather_rows comb", 140, row_bytes=64, page_stride=0),
        _case(_gather_rows_kernel, "gather_rows main records", 131072, row_bytes=288, page_stride=114688),
        _case(_scatter_rows_kernel, "scatter_rows window records", 32768, row_bytes=528, page_stride=402 * 528),
        _case(_scatter_rows_kernel, "scatter_rows index scales", 32768, row_bytes=4, page_stride=114688),
    )


def _case(kernel: object, name: str, num_rows: int, *, row_bytes: int, page_stride: int) -> AotCase:
    word = plan_words(row_bytes, page_stride)
    num_words = row_bytes // word
    tile = plan_tile(num_words)
    pointer = {8: "*i64", 4: "*i32"}[word]
    names = list(kernel.arg_names)  # type: ignore[attr-defined]
    types = {"pages_ptr": pointer, "out_ptr": pointer, "rows_ptr": pointer, "index_ptr": "*i32"}
    signature = {key: types.get(key, "constexpr" if key.isupper() else "i32") for key in names}
    strides = {"stride_page": page_stride // word, "num_words": num_words, "stride_from": num_words}
    strides["stride_row"] = num_words
    return AotCase(
        op=name.split()[0],
        name=name,
        shape=f"{num_rows} x {row_bytes} B",
        kernel=kernel,
        signature=signature,
        constexprs={"ROWS": tile.rows, "WORDS": tile.words},
        aligned=(
            *(key for key in types if key in names),
            *(key for key, value in strides.items() if key in names and value % 16 == 0),
        ),
        num_warps=_WARPS,
        num_stages=3,
        mma=Mma.NONE,
        num_programs=triton.cdiv(num_rows, tile.rows) * triton.cdiv(num_words, tile.words),
        bytes_moved=num_rows * (2 * row_bytes + 4),
        flops=0,
    )
