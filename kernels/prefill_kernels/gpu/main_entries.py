"""Main KV entries: store_main (RoPE, quantise, scatter into pages) and load_main (gather, decode) (model.md 2.5, 3.4).

Called by the compressor of a KV source. Storing reads 1 KiB an entry and writes 288 bytes (fp4) or 528 (fp8) straight into the
page; loading is decode_records. Bound: memory. Profile R, equal to ref bit for bit.

The traps: the rotation rounds its products (enable_fp_fusion=False) and its result to bfloat16 before the quantiser; a slot of -1
writes nothing, and one beyond the pages neither, where ref raises: the device has nobody to tell.
"""

# G groups, E entries, C head dim; Z pages, R record bytes
from typing import Any

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from prefill_kernels.aot_case import AotCase, Mma
from prefill_kernels.gpu.chip import Chip
from prefill_kernels.gpu.decode_records import (
    RECORD_FORMATS,
    check_records,
    check_width,
    decode_case,
    decode_fp4,
    decode_fp8,
    page_sizes,
    record_offsets,
)
from prefill_kernels.gpu.formats import pack_fp4, quantise_fp4_e4m3, quantise_fp8
from prefill_kernels.gpu.rope_device import row_angles, turn_last
from prefill_kernels.numerics import Numerics

_ROWS = 8
_WARPS = 4


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _store_main_kernel(  # type: ignore[no-untyped-def]
    latent_ptr,
    position_ptr,
    frequency_ptr,
    pages_ptr,
    slots_ptr,
    num_rows,
    num_records,
    records_per_page,
    stride_page,
    stride_record,
    IS_FP4: tl.constexpr,
    WIDTH: tl.constexpr,
    NUM_PAIRS: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(slots_ptr + row, mask=row < num_rows, other=-1).to(tl.int32)
    is_stored = (slot >= 0) & (slot < num_records)
    offset = row.to(tl.int64)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    x = tl.load(latent_ptr + offset, mask=is_stored[:, None], other=0.0).to(tl.float32)
    cos, sin = row_angles(position_ptr, frequency_ptr, row, num_rows, NUM_PAIRS)
    x = turn_last(x, cos, sin).to(tl.bfloat16).to(tl.float32)
    record = record_offsets(tl.where(is_stored, slot, 0), records_per_page, stride_page, stride_record)
    record_ptr = pages_ptr + record[:, None]
    if IS_FP4:
        codes, scales = quantise_fp4_e4m3(x)
        data = pack_fp4(codes)
    else:
        data, scales = quantise_fp8(x)
    DATA: tl.constexpr = data.shape[1]
    tl.store(record_ptr + tl.arange(0, DATA)[None, :], data, mask=is_stored[:, None])
    tl.store(record_ptr + DATA + tl.arange(0, scales.shape[1])[None, :], scales, mask=is_stored[:, None])


def store_main(
    latent_GC: Tensor,
    positions_G: Tensor,
    frequencies: Tensor,
    pages_ZER: Tensor,
    slots_G: Tensor,
    *,
    record_format: str,
    numerics: Numerics,  # noqa: ARG001 - production only
) -> None:
    """Same contract as ref.store_main but for slots beyond the pages; C and the rotated pairs are powers of two."""
    num_rows, width = latent_GC.shape
    num_pairs, is_fp4 = len(frequencies), _is_fp4(record_format)
    check_width(width)
    check_records(pages_ZER, width, is_fp4=is_fp4)
    if not latent_GC.is_contiguous() or num_pairs & (num_pairs - 1) or 2 * num_pairs > width:
        raise ValueError(
            f"rows with strides {latent_GC.stride()} of {width} channels, {num_pairs} rotated pairs: expected contiguous "
            "rows and a power of two of pairs within them"
        )
    if not num_rows:
        return
    _store_main_kernel[(triton.cdiv(num_rows, _ROWS),)](
        latent_GC,
        positions_G,
        frequencies,
        pages_ZER,
        slots_G,
        num_rows,
        *page_sizes(pages_ZER),
        IS_FP4=is_fp4,
        WIDTH=width,
        NUM_PAIRS=num_pairs,
        ROWS=_ROWS,
        num_warps=_WARPS,
        enable_fp_fusion=False,
    )


def load_main(
    pages_ZER: Tensor,
    slots_E: Tensor,
    *,
    record_format: str,
    numerics: Numerics,  # noqa: ARG001 - production only
) -> Tensor:
    """Same contract as ref.load_main, bfloat16."""
    record_bytes = pages_ZER.shape[-1]
    is_fp4 = _is_fp4(record_format)
    width = record_bytes * 16 // 9 if is_fp4 else record_bytes * 32 // 33
    check_width(width)
    values = torch.empty(len(slots_E), width, dtype=torch.bfloat16, device=pages_ZER.device)
    if len(slots_E):
        (decode_fp4 if is_fp4 else decode_fp8)(pages_ZER, slots_E, values)
    return values


def _is_fp4(record_format: str) -> bool:
    if record_format not in RECORD_FORMATS:
        raise ValueError(f"record format is {record_format!r}: expected 'fp4' or 'fp8'")
    return record_format == "fp4"


def aot_cases(chip: Chip) -> tuple[AotCase, ...]:  # noqa: ARG001 - the same launches on both chips
    """Entries of a 32,768-row chunk at one per token, and all of a 131,072-token context; pages are 114,688 bytes apart."""
    return (
        _store_case("fp4"),
        _store_case("fp8"),
        decode_case("load_main", "load_main fp4", "fp4", 131072, page_stride=114688),
        decode_case("load_main", "load_main fp8", "fp8", 131072, page_stride=114688),
    )


def _store_case(record_format: str) -> AotCase:
    num_rows, width, num_pairs = 32768, 512, 32
    is_fp4 = record_format == "fp4"
    types: dict[str, Any] = {"latent_ptr": "*bf16", "frequency_ptr": "*fp32", "pages_ptr": "*u8"}
    types |= {"position_ptr": "*i32", "slots_ptr": "*i32"}
    names = _store_main_kernel.arg_names
    record_bytes = width // 2 + width // 16 if is_fp4 else width + width // 32
    return AotCase(
        op="store_main",
        name=f"store_main {record_format}",
        shape=f"{num_rows} x {width}",
        kernel=_store_main_kernel,
        signature={key: "constexpr" if key.isupper() else types.get(key, "i32") for key in names},
        constexprs={"IS_FP4": is_fp4, "WIDTH": width, "NUM_PAIRS": num_pairs, "ROWS": _ROWS},
        aligned=(*types, "stride_page", "stride_record"),
        num_warps=_WARPS,
        num_stages=3,
        mma=Mma.NONE,
        num_programs=num_rows // _ROWS,
        bytes_moved=num_rows * (2 * width + record_bytes + 8),
        flops=num_rows * (width * 8 + num_pairs * 46),
        enable_fp_fusion=False,
    )
