"""Copies one stretch of many block records from pinned host memory into the KV pool: the layer groups of a swap-in (kv.md 6.1).

A few programs walk over all blocks, so that most SMs stay with the model. Traffic: each byte read once over PCIe and written
once; bound: the link (55 GB/s on gen5 as kv.md 6.2 assumes it, nothing measured here). The source is a bare device address of
host memory, no tensor: torch does not own the pool.
"""

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

_WORD_BYTES = 8
# Every stretch of the real layout starts and ends on 32 (kv.md 1.3); 16 is what one load moves.
_ALIGN_BYTES = 16
_BLOCK_WORDS = 2048
# 16 programs saturate a PCIe gen5 link in published measurements (SGLang's `kernel` backend); to be tuned on a GPU.
_NUM_PROGRAMS = 16


@triton.jit  # type: ignore[untyped-decorator]
def _gather_blocks_kernel(  # type: ignore[no-untyped-def]
    source_address,
    source_slots_ptr,
    target_ptr,
    target_slots_ptr,
    num_blocks,
    source_stride,
    target_stride,
    num_words,
    BLOCK_W: tl.constexpr,
):
    source_ptr = source_address.to(tl.pointer_type(tl.int64))
    num_pieces = tl.cdiv(num_words, BLOCK_W)
    total = num_blocks * num_pieces
    for item in range(tl.program_id(0), total, tl.num_programs(0)):
        block = item // num_pieces
        word = (item % num_pieces) * BLOCK_W + tl.arange(0, BLOCK_W)
        source = tl.load(source_slots_ptr + block).to(tl.int64) * source_stride
        target = tl.load(target_slots_ptr + block).to(tl.int64) * target_stride
        in_range = word < num_words
        # The cast from an integer lost what is known of its alignment.
        from_ptr = tl.max_contiguous(tl.multiple_of(source_ptr + source + word, 16), BLOCK_W)
        value = tl.load(from_ptr, mask=in_range, other=0)
        tl.store(target_ptr + target + word, value, mask=in_range)


def gather_blocks(
    source_address: int,
    source_slots: Tensor,
    target: Tensor,
    target_slots: Tensor,
    *,
    source_stride_bytes: int,
    target_offset_bytes: int,
    num_bytes: int,
) -> None:
    """target[target_slots[i], offset : offset + num_bytes] = the bytes at source_address + source_slots[i] * stride, for each i.

    Args:
        source_address: device address of the stretch in record 0, a multiple of 16.
        source_slots, target_slots: [num_blocks] int32 on the device; no target twice.
        target: [num_slots, stride] uint8, contiguous, on the device; written in place.

    Raises:
        ValueError: an address, stride or size that is no multiple of 16.
    """
    sizes = (source_address, source_stride_bytes, target.stride(0), target_offset_bytes, num_bytes)
    if any(size % _ALIGN_BYTES for size in sizes) or target.dtype != torch.uint8:
        raise ValueError(
            f"source address, strides, offset, bytes {sizes}: expected multiples of {_ALIGN_BYTES}, uint8 rows"
        )
    if len(source_slots) == 0:
        return
    words = target.view(-1)[target_offset_bytes:].view(torch.int64)
    _gather_blocks_kernel[(_NUM_PROGRAMS,)](
        source_address,
        source_slots,
        words,
        target_slots,
        len(source_slots),
        source_stride_bytes // _WORD_BYTES,
        target.stride(0) // _WORD_BYTES,
        num_bytes // _WORD_BYTES,
        BLOCK_W=_BLOCK_WORDS,
    )
