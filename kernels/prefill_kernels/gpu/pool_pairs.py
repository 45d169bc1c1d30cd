"""Ratio-2 compressor: pools and norms the pairs of tokens that close in the step, then keeps the open ones (model.md 2.5).

Two launches, because the ring's rows are read before they are overwritten: one program per 4 pairs, then one per sequence and
ring row. Which sequence a pair belongs to is worked out from the starts and row counts on the device. Traffic: latent and score
read once (8 bytes a channel and token), a bfloat16 row written per pair; bound: memory. Profile R; against ref only exp differs.

The trap: every pair's first token is either a row of the step or, for the first pair of a chunk that starts at an odd position,
a row of the ring; the ring of slot -1 reads as zeros.
"""

# N rows, B sequences, G groups that close, C head dim, Z state slots, R ring rows
import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from prefill_kernels.aot_case import AotCase, Mma
from prefill_kernels.gpu.chip import Chip
from prefill_kernels.gpu.rms_tile import rms_tile
from prefill_kernels.numerics import Numerics

# 4 pairs x 512 channels are 16 values a thread.
_GROUPS = 4
# One kernel for all steps of so many sequences: another would be compiled while requests wait.
_MIN_SEQUENCES = 16
_WARPS = 4


@triton.jit  # type: ignore[untyped-decorator]
def _find_sequence(  # type: ignore[no-untyped-def]
    group_G, start_ptr, cu_row_ptr, num_sequences, SEQUENCES: tl.constexpr
):
    """(sequence of each pair, its number among the pairs of that sequence); num_sequences beyond the last pair."""
    sequence_B = tl.arange(0, SEQUENCES)
    is_sequence_B = sequence_B < num_sequences
    start_B = tl.load(start_ptr + sequence_B, mask=is_sequence_B, other=0)
    first_B = tl.load(cu_row_ptr + sequence_B, mask=is_sequence_B, other=0)
    end_B = tl.load(cu_row_ptr + sequence_B + 1, mask=is_sequence_B, other=0)
    count_B = (start_B + end_B - first_B) // 2 - start_B // 2
    is_before_GB = (tl.cumsum(count_B, 0)[None, :] <= group_G[:, None]) & is_sequence_B[None, :]
    sequence_G = tl.sum(is_before_GB.to(tl.int32), axis=1)
    return sequence_G, group_G - tl.sum(tl.where(is_before_GB, count_B[None, :], 0), axis=1)


@triton.jit
def _pool(score0, latent0, score1, latent1):  # type: ignore[no-untyped-def]
    """Latents weighted by the softmax of their scores, per channel, float32."""
    top = tl.maximum(score0, score1)
    weight0 = tl.exp(score0 - top)
    weight1 = tl.exp(score1 - top)
    total = weight0 + weight1
    return latent0 * tl.div_rn(weight0, total) + latent1 * tl.div_rn(weight1, total)


@triton.jit(do_not_specialize=["num_sequences", "num_groups"])  # type: ignore[untyped-decorator]
def _pool_kernel(  # type: ignore[no-untyped-def]
    latent_ptr,
    score_ptr,
    weight_ptr,
    state_ptr,
    slot_ptr,
    start_ptr,
    cu_row_ptr,
    out_ptr,
    num_sequences,
    num_groups,
    ring_rows,
    eps,
    LOG_WIDTH: tl.constexpr,
    SEQUENCES: tl.constexpr,
    GROUPS: tl.constexpr,
):
    WIDTH: tl.constexpr = 1 << LOG_WIDTH
    group_G = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    sequence_G, in_sequence_G = _find_sequence(group_G, start_ptr, cu_row_ptr, num_sequences, SEQUENCES)
    in_range_G = (group_G < num_groups) & (sequence_G < num_sequences)
    start_G = tl.load(start_ptr + sequence_G, mask=in_range_G, other=0)
    slot_G = tl.load(slot_ptr + sequence_G, mask=in_range_G, other=-1)
    # -1 where the pair's first token is the one before the chunk.
    token_G = 2 * (start_G // 2 + in_sequence_G) - start_G
    row_G = tl.load(cu_row_ptr + sequence_G, mask=in_range_G, other=0).to(tl.int64) + token_G
    is_row_G = in_range_G & (token_G >= 0)
    is_ring = (in_range_G & (token_G < 0) & (slot_G >= 0))[:, None]
    ring_G = (slot_G.to(tl.int64) * ring_rows + (start_G - 1) % ring_rows) * (2 * WIDTH)

    channel = tl.arange(0, WIDTH)[None, :]
    at = row_G[:, None] * WIDTH + channel
    ring_at = ring_G[:, None] + channel
    score0 = tl.load(score_ptr + at, mask=is_row_G[:, None], other=0.0)
    score0 = tl.where(is_ring, tl.load(state_ptr + ring_at, mask=is_ring, other=0.0), score0)
    latent0 = tl.load(latent_ptr + at, mask=is_row_G[:, None], other=0.0)
    latent0 = tl.where(is_ring, tl.load(state_ptr + ring_at + WIDTH, mask=is_ring, other=0.0), latent0)
    score1 = tl.load(score_ptr + at + WIDTH, mask=in_range_G[:, None], other=0.0)
    latent1 = tl.load(latent_ptr + at + WIDTH, mask=in_range_G[:, None], other=0.0)

    pooled = _pool(score0, latent0, score1, latent1).to(tl.bfloat16).to(tl.float32)
    weight = tl.load(weight_ptr + tl.arange(0, WIDTH)).to(tl.float32)
    normed = rms_tile(pooled, weight, eps, LOG_WIDTH).to(tl.bfloat16)
    tl.store(out_ptr + group_G.to(tl.int64)[:, None] * WIDTH + channel, normed, mask=(group_G < num_groups)[:, None])


@triton.jit  # type: ignore[untyped-decorator]
def _keep_kernel(  # type: ignore[no-untyped-def]
    latent_ptr,
    score_ptr,
    state_ptr,
    slot_ptr,
    start_ptr,
    cu_row_ptr,
    ring_rows,
    WIDTH: tl.constexpr,
):
    """One ring row of one sequence: its newest token of the step with that remainder, if there is one."""
    sequence, ring_row = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slot_ptr + sequence)
    start = tl.load(start_ptr + sequence)
    first = tl.load(cu_row_ptr + sequence)
    last = start + tl.load(cu_row_ptr + sequence + 1) - first - 1
    # May be before the step, or negative by less than ring_rows.
    position = last - (last + ring_rows - ring_row) % ring_rows
    if (slot >= 0) & (position >= start):
        channel = tl.arange(0, WIDTH)
        row_at = (first + position - start).to(tl.int64) * WIDTH + channel
        ring_at = (slot.to(tl.int64) * ring_rows + ring_row) * (2 * WIDTH) + channel
        tl.store(state_ptr + ring_at, tl.load(score_ptr + row_at))
        tl.store(state_ptr + ring_at + WIDTH, tl.load(latent_ptr + row_at))


def pool_pairs(
    latent_NC: Tensor,
    score_NC: Tensor,
    norm_weight_C: Tensor,
    state_ZR2C: Tensor,
    state_slots_B: Tensor,
    starts_B: Tensor,
    cu_rows_B1: Tensor,
    *,
    num_groups: int,
    eps: float,
    numerics: Numerics,  # noqa: ARG001 - one Numerics only
) -> Tensor:
    """As Ops.pool_pairs; all float32 tensors contiguous, C a power of two."""
    num_rows, width = latent_NC.shape
    num_sequences, ring_rows = len(state_slots_B), state_ZR2C.shape[1]
    _check(width, latent_NC, score_NC, state_ZR2C)
    ring = (state_ZR2C, state_slots_B, starts_B, cu_rows_B1)
    pooled_GC = torch.empty(num_groups, width, dtype=torch.bfloat16, device=latent_NC.device)
    if num_groups:
        _pool_kernel[(triton.cdiv(num_groups, _GROUPS),)](
            latent_NC,
            score_NC,
            norm_weight_C,
            *ring,
            pooled_GC,
            num_sequences,
            num_groups,
            ring_rows,
            eps,
            LOG_WIDTH=width.bit_length() - 1,
            SEQUENCES=max(_MIN_SEQUENCES, triton.next_power_of_2(num_sequences)),
            GROUPS=_GROUPS,
            num_warps=_WARPS,
            enable_fp_fusion=False,
        )
    if num_rows:
        _keep_kernel[(num_sequences, ring_rows)](
            latent_NC,
            score_NC,
            *ring,
            ring_rows,
            WIDTH=width,
            num_warps=_WARPS,
        )
    return pooled_GC


def _check(width: int, *tensors: Tensor) -> None:
    if width != triton.next_power_of_2(width):
        raise ValueError(f"{width} channels to pool: expected a power of two")
    if not all(tensor.is_contiguous() for tensor in tensors):
        raise ValueError("latents, scores and state of pool_pairs: expected contiguous tensors")


def aot_cases(chip: Chip) -> tuple[AotCase, ...]:  # noqa: ARG001 - one configuration for both
    """A chunk of 32,768 rows of 4 sequences; 7 ring rows (ratio 2, 6 tokens of rollback)."""
    rows, groups, width, log_width, sequences, ring_rows = 32768, 16384, 512, 9, 4, 7
    vectors = {"latent_ptr": "*fp32", "score_ptr": "*fp32"}
    indices = {"state_ptr": "*fp32", "slot_ptr": "*i32", "start_ptr": "*i32", "cu_row_ptr": "*i32"}
    return (
        AotCase(
            op="pool_pairs",
            name="pool_pairs",
            shape=f"{rows} x {width} -> {groups}",
            kernel=_pool_kernel,
            signature=vectors
            | {"weight_ptr": "*bf16"}
            | indices
            | {"out_ptr": "*bf16", "num_sequences": "i32", "num_groups": "i32", "ring_rows": "i32", "eps": "fp32"}
            | dict.fromkeys(("LOG_WIDTH", "SEQUENCES", "GROUPS"), "constexpr"),
            constexprs={"LOG_WIDTH": log_width, "SEQUENCES": _MIN_SEQUENCES, "GROUPS": _GROUPS},
            aligned=(*vectors, "weight_ptr", *indices, "out_ptr"),
            num_warps=_WARPS,
            num_stages=3,
            mma=Mma.NONE,
            num_programs=groups // _GROUPS,
            bytes_moved=rows * 8 * width + groups * 2 * width,
            flops=0,
            enable_fp_fusion=False,
        ),
        AotCase(
            op="pool_pairs",
            name="pool_pairs keep",
            shape=f"{sequences} x {ring_rows} x {width}",
            kernel=_keep_kernel,
            signature=vectors | indices | {"ring_rows": "i32", "WIDTH": "constexpr"},
            constexprs={"WIDTH": width},
            aligned=(*vectors, *indices),
            num_warps=_WARPS,
            num_stages=3,
            mma=Mma.NONE,
            num_programs=sequences * ring_rows,
            bytes_moved=sequences * ring_rows * 16 * width,
            flops=0,
        ),
    )
