"""Copies one stretch of many block records between pinned host memory and the KV pool: layer groups of a swap-in, and saves
(kv.md 6.1).

A few programs walk over all blocks, so that most SMs stay with the model. Traffic: each byte crosses PCIe once and is read or
written once on the device; bound: the link (55 GB/s on gen5 as kv.md 6.2 assumes it, nothing measured here). The host side is
a bare device address of host memory, no tensor: torch does not own that pool. The trap: a save is done when the stream has
passed it, not when the launch returns.
"""

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from prefill_kernels.aot_case import AotCase, Mma
from prefill_kernels.gpu.chip import Chip

_WORD_BYTES = 8
# Every stretch of the real layout starts and ends on 32 (kv.md 1.3); 16 is what one load moves.
_ALIGN_BYTES = 16
_BLOCK_WORDS = 2048
# 16 programs saturate a PCIe gen5 link in published measurements (SGLang's `kernel` backend); to be tuned on a GPU.
_NUM_PROGRAMS = 16
_WARPS = 4


@triton.jit(do_not_specialize=["host_address", "num_blocks"])  # type: ignore[untyped-decorator]
def _move_blocks_kernel(  # type: ignore[no-untyped-def]
    host_address,
    host_slots_ptr,
    pool_ptr,
    pool_slots_ptr,
    num_blocks,
    host_stride,
    pool_stride,
    num_words,
    SAVE: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    host_ptr = host_address.to(tl.pointer_type(tl.int64))
    num_pieces = tl.cdiv(num_words, BLOCK_W)
    total = num_blocks * num_pieces
    for item in range(tl.program_id(0), total, tl.num_programs(0)):
        block = item // num_pieces
        word_W = (item % num_pieces) * BLOCK_W + tl.arange(0, BLOCK_W)
        in_stretch_W = word_W < num_words
        in_host = tl.load(host_slots_ptr + block).to(tl.int64) * host_stride
        in_pool = tl.load(pool_slots_ptr + block).to(tl.int64) * pool_stride
        # The cast from an integer lost what is known of its alignment.
        host_W = tl.max_contiguous(tl.multiple_of(host_ptr + in_host + word_W, 16), BLOCK_W)
        if SAVE:
            tl.store(host_W, tl.load(pool_ptr + in_pool + word_W, mask=in_stretch_W, other=0), mask=in_stretch_W)
        else:
            tl.store(pool_ptr + in_pool + word_W, tl.load(host_W, mask=in_stretch_W, other=0), mask=in_stretch_W)


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
    _move(
        (source_address, source_slots, source_stride_bytes),
        (target, target_slots, target_offset_bytes),
        num_bytes=num_bytes,
        save=False,
    )


def save_blocks(
    source: Tensor,
    source_slots: Tensor,
    target_address: int,
    target_slots: Tensor,
    *,
    source_offset_bytes: int,
    target_stride_bytes: int,
    num_bytes: int,
) -> None:
    """The other way: the bytes at target_address + target_slots[i] * stride = source[source_slots[i], offset : offset +
    num_bytes], for each i. Arguments and errors as in gather_blocks."""
    _move(
        (target_address, target_slots, target_stride_bytes),
        (source, source_slots, source_offset_bytes),
        num_bytes=num_bytes,
        save=True,
    )


def _move(host: tuple[int, Tensor, int], pool: tuple[Tensor, Tensor, int], *, num_bytes: int, save: bool) -> None:
    """host: address, slots, stride in bytes. pool: blocks, slots, offset in bytes."""
    (address, host_slots, host_stride), (blocks, pool_slots, offset) = host, pool
    sizes = (address, host_stride, blocks.stride(0), offset, num_bytes)
    if any(size % _ALIGN_BYTES for size in sizes) or blocks.dtype != torch.uint8:
        raise ValueError(
            f"host address, strides, offset, bytes {sizes}: expected multiples of {_ALIGN_BYTES}, uint8 rows"
        )
    if len(host_slots) == 0:
        return
    _move_blocks_kernel[(_NUM_PROGRAMS,)](
        address,
        host_slots,
        blocks.view(-1)[offset:].view(torch.int64),
        pool_slots,
        len(host_slots),
        host_stride // _WORD_BYTES,
        blocks.stride(0) // _WORD_BYTES,
        num_bytes // _WORD_BYTES,
        SAVE=save,
        BLOCK_W=_BLOCK_WORDS,
        num_warps=_WARPS,
    )


def aot_cases(chip: Chip) -> tuple[AotCase, ...]:  # noqa: ARG001 - the same launches on both chips
    """256 blocks (32,768 tokens), a quarter of their payload per stretch."""
    return _case("gather_blocks", save=False), _case("save_blocks", save=True)


def _case(name: str, *, save: bool) -> AotCase:
    pointers = {"host_slots_ptr": "*i32", "pool_ptr": "*i64", "pool_slots_ptr": "*i32"}
    strides = dict.fromkeys(("host_stride", "pool_stride", "num_words"), "i32")
    types = {"host_address": "i64", "num_blocks": "i32", "SAVE": "constexpr", "BLOCK_W": "constexpr"}
    return AotCase(
        op=name,
        name=name,
        shape="256 blocks x 28,480 B",
        kernel=_move_blocks_kernel,
        signature={key: (types | pointers | strides)[key] for key in _move_blocks_kernel.arg_names},
        constexprs={"SAVE": save, "BLOCK_W": _BLOCK_WORDS},
        aligned=("pool_ptr", "host_slots_ptr", "pool_slots_ptr", *strides),
        num_warps=_WARPS,
        num_stages=3,
        mma=Mma.NONE,
        num_programs=_NUM_PROGRAMS,
        bytes_moved=256 * 28480,
        flops=0,
    )
