"""Window KV of a step: norm, RoPE, e4m3 records and decoded keys of its rows in one pass; decode_window (model.md 2.3, 3.4).

Called by attention in every layer. A program holds a few rows; per row 1 KiB is read, 528 bytes and 1 KiB are written. A second,
small launch gathers and decodes the history from the ring. Bound: memory. Profile R, equal to ref bit for bit: the norm's sum is
ref's tree, the rotation rounds its products, the quantiser sees both after their rounding to bfloat16.

The trap: keys are the decoded records, not the rows they were made of, and the ring is only read (C25).
"""

# N rows, C head dim, Z state slots, R ring rows
from typing import Any

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from prefill_kernels.aot_case import AotCase, Mma
from prefill_kernels.gpu.chip import Chip
from prefill_kernels.gpu.decode_records import check_width, decode_case, decode_fp8
from prefill_kernels.gpu.formats import dequantise_fp8, quantise_fp8
from prefill_kernels.gpu.rms_tile import rms_tile
from prefill_kernels.gpu.rope_device import row_angles, turn_last
from prefill_kernels.numerics import Numerics
from prefill_kernels.ops import WindowRows

_GROUP = 32
_ROWS = 8
_WARPS = 4


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _window_rows_kernel(  # type: ignore[no-untyped-def]
    kv_ptr,
    weight_ptr,
    position_ptr,
    frequency_ptr,
    records_ptr,
    keys_ptr,
    num_rows,
    eps,
    LOG_WIDTH: tl.constexpr,
    NUM_PAIRS: tl.constexpr,
    ROWS: tl.constexpr,
):
    WIDTH: tl.constexpr = 1 << LOG_WIDTH
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    in_range = (row < num_rows)[:, None]
    channel = tl.arange(0, WIDTH)
    offset = row.to(tl.int64)[:, None] * WIDTH + channel[None, :]
    x = tl.load(kv_ptr + offset, mask=in_range, other=0.0).to(tl.float32)
    x = rms_tile(x, tl.load(weight_ptr + channel).to(tl.float32), eps, LOG_WIDTH)
    cos, sin = row_angles(position_ptr, frequency_ptr, row, num_rows, NUM_PAIRS)
    x = turn_last(x, cos, sin).to(tl.bfloat16).to(tl.float32)
    codes, scales = quantise_fp8(x)
    record_ptr = records_ptr + row.to(tl.int64)[:, None] * (WIDTH + WIDTH // 32)
    tl.store(record_ptr + channel[None, :], codes, mask=in_range)
    tl.store(record_ptr + WIDTH + tl.arange(0, WIDTH // 32)[None, :], scales, mask=in_range)
    tl.store(keys_ptr + offset, dequantise_fp8(codes, scales).to(tl.bfloat16), mask=in_range)


def window_rows(
    kv_NC: Tensor,
    norm_weight_C: Tensor,
    positions_N: Tensor,
    frequencies: Tensor,
    ring_ZRC: Tensor,
    history_slots: Tensor,
    *,
    eps: float,
    numerics: Numerics,  # noqa: ARG001 - production only
) -> WindowRows:
    """Same contract as ref.window_rows, bfloat16 and records; C and the rotated pairs are powers of two."""
    num_rows, width = kv_NC.shape
    num_history, num_pairs = len(history_slots), len(frequencies)
    check_width(width)
    if not kv_NC.is_contiguous() or num_pairs & (num_pairs - 1) or 2 * num_pairs > width:
        raise ValueError(
            f"rows with strides {kv_NC.stride()} of {width} channels, {num_pairs} rotated pairs: expected contiguous rows "
            "and a power of two of pairs within them"
        )
    records = torch.empty(num_rows, width + width // _GROUP, dtype=torch.uint8, device=kv_NC.device)
    keys = torch.empty(num_history + num_rows, width, dtype=torch.bfloat16, device=kv_NC.device)
    if num_history:
        decode_fp8(ring_ZRC, history_slots, keys[:num_history])
    if num_rows:
        _window_rows_kernel[(triton.cdiv(num_rows, _ROWS),)](
            kv_NC,
            norm_weight_C,
            positions_N,
            frequencies,
            records,
            keys[num_history:],
            num_rows,
            eps,
            LOG_WIDTH=width.bit_length() - 1,
            NUM_PAIRS=num_pairs,
            ROWS=_ROWS,
            num_warps=_WARPS,
            enable_fp_fusion=False,
        )
    return WindowRows(records=records, keys=keys)


def decode_window(records_NR: Tensor, *, numerics: Numerics) -> Tensor:  # noqa: ARG001 - production only
    """Same contract as ref.decode_window, bfloat16."""
    width = records_NR.shape[-1] * _GROUP // (_GROUP + 1)
    check_width(width)
    values = torch.empty(len(records_NR), width, dtype=torch.bfloat16, device=records_NR.device)
    if len(records_NR):
        decode_fp8(records_NR, None, values)
    return values


def aot_cases(chip: Chip) -> tuple[AotCase, ...]:  # noqa: ARG001 - the same launches on both chips
    """A 32,768-row chunk, and the history of four sequences."""
    num_rows, width, num_pairs = 32768, 512, 32
    types: dict[str, Any] = dict.fromkeys(("kv_ptr", "keys_ptr", "weight_ptr"), "*bf16")
    types |= {"position_ptr": "*i32", "frequency_ptr": "*fp32", "records_ptr": "*u8", "num_rows": "i32", "eps": "fp32"}
    names = _window_rows_kernel.arg_names
    rows = AotCase(
        op="window_rows",
        name="window_rows",
        shape=f"{num_rows} x {width}",
        kernel=_window_rows_kernel,
        signature={key: types.get(key, "constexpr") for key in names},
        constexprs={"LOG_WIDTH": width.bit_length() - 1, "NUM_PAIRS": num_pairs, "ROWS": _ROWS},
        aligned=tuple(key for key in names if key.endswith("_ptr")),
        num_warps=_WARPS,
        num_stages=3,
        mma=Mma.NONE,
        num_programs=num_rows // _ROWS,
        bytes_moved=num_rows * (4 * width + width + width // _GROUP + 4),
        flops=num_rows * (width * 12 + num_pairs * 46),
        enable_fp_fusion=False,
    )
    return rows, decode_case("window_rows", "window history", "fp8", 4 * 128, page_stride=402 * 528)
