"""Engram: n-gram hash, table lookup and gate (model.md 2.11), one launch each.

engram_hash: integers, exact; 64-bit remainders, 24 per token; bound: the launch. engram_lookup: 24 random table rows of 264 bytes
per token; the table may stand in pinned host memory, then bound: the link, else memory. engram_gate, profile R: a program owns
4 rows, walks over the columns of each stream twice, the second time from L1; traffic 131 KB per row at D = 5120; bound: memory.

Against `ref`: hash and lookup bitwise (sm_100's codes are the stored ones: the values that requantising gives, as long as no
scale is below the quantiser's floor of 2**-22); the gate in the order of its three sums (float32, relative 2e-6), so a value of
the new streams is a bfloat16 step off in rare cases. Table offsets are 64 bits: 384 million rows.
"""

# N rows, B sequences, S = 4 streams, D hidden, H heads, T table rows of a program
import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from prefill_kernels.aot_case import AotCase, Mma
from prefill_kernels.gpu.chip import Chip
from prefill_kernels.gpu.formats import dequantise_fp8
from prefill_kernels.gpu.rows import gather_rows
from prefill_kernels.gpu.seen_rows import GROUP
from prefill_kernels.numerics import Numerics
from prefill_kernels.ops import Rows
from prefill_kernels.weights import EngramTable

_STREAMS = 4
_HASH_ROWS = 128
# 64 rows of 256 bytes in flight per program, 16 bytes per thread and load.
_LOOKUP_ROWS = 64
# AOT: 160 registers (168 on triton 3.6), 3 programs per SM: 32 values per thread of two tiles and three sums.
_GATE_TILE = {"R": 4, "C": 1024}
_WARPS = 4


@triton.jit(do_not_specialize=["num_rows", "num_sequences", "pad_id"])  # type: ignore[untyped-decorator]
def _engram_hash_kernel(  # type: ignore[no-untyped-def]
    ids_ptr,
    history_ptr,
    cu_rows_ptr,
    multiplier_ptr,
    prime_ptr,
    offset_ptr,
    out_ptr,
    num_rows,
    num_sequences,
    pad_id,
    NUM_BACK: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row_N = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_ok_N = row_N < num_rows
    head_H = tl.arange(0, BLOCK_H)
    head_ok_H = head_H < HEADS
    sequence_N = tl.zeros((BLOCK_N,), tl.int32)
    start_N = tl.zeros((BLOCK_N,), tl.int32)
    for sequence in range(1, num_sequences):
        start = tl.load(cu_rows_ptr + sequence).to(tl.int32)
        sequence_N += (row_N >= start).to(tl.int32)
        start_N = tl.where(row_N >= start, start, start_N)
    blocked_N = row_N < 0
    hash_N = tl.zeros((BLOCK_N,), tl.int64)
    for back in tl.static_range(0, NUM_BACK + 1):
        in_chunk_N = row_N - back >= start_N
        id_N = tl.load(ids_ptr + (row_N - back), mask=row_ok_N & in_chunk_N, other=-1)
        history_at_N = sequence_N * NUM_BACK + (NUM_BACK + row_N - start_N - back)
        past_N = tl.load(history_ptr + history_at_N, mask=row_ok_N & (row_N - back < start_N), other=-1)
        token_N = tl.where(in_chunk_N, id_N, past_N)
        blocked_N = blocked_N | (token_N < 0)
        token_N = tl.where(blocked_N, pad_id.to(tl.int64), token_N)
        hash_N = hash_N ^ (token_N * tl.load(multiplier_ptr + back))
        if back > 0:
            at_H = (back - 1) * HEADS + head_H
            prime_H = tl.load(prime_ptr + at_H, mask=head_ok_H, other=1)
            offset_H = tl.load(offset_ptr + at_H, mask=head_ok_H, other=0)
            to_ptr = out_ptr + row_N.to(tl.int64)[:, None] * (NUM_BACK * HEADS) + at_H[None, :]
            slot = hash_N[:, None] % prime_H[None, :] + offset_H[None, :]
            tl.store(to_ptr, slot, mask=row_ok_N[:, None] & head_ok_H[None, :])


@triton.jit(do_not_specialize=["num_table_rows"])  # type: ignore[untyped-decorator]
def _engram_lookup_kernel(  # type: ignore[no-untyped-def]
    data_ptr,
    scale_ptr,
    index_ptr,
    plain_ptr,
    seen_ptr,
    seen_scale_ptr,
    num_table_rows,
    WIDTH: tl.constexpr,
    BLOCK_C: tl.constexpr,
    CODES: tl.constexpr,
    T: tl.constexpr,
):
    """num_table_rows: of the output, N * rows per token."""
    row_T = tl.program_id(0).to(tl.int64) * T + tl.arange(0, T)
    col_C = tl.arange(0, BLOCK_C)
    group_G = tl.arange(0, BLOCK_C // 32)
    row_ok_T = row_T < num_table_rows
    index_T = tl.load(index_ptr + row_T, mask=row_ok_T, other=0)
    mask = row_ok_T[:, None] & (col_C < WIDTH)[None, :]
    scale_mask = row_ok_T[:, None] & (group_G < WIDTH // 32)[None, :]
    codes = tl.load(data_ptr + index_T[:, None] * WIDTH + col_C[None, :], mask=mask, other=0)
    scale = tl.load(scale_ptr + index_T[:, None] * (WIDTH // 32) + group_G[None, :], mask=scale_mask, other=127)
    plain = dequantise_fp8(codes, scale).to(tl.bfloat16)
    tl.store(plain_ptr + row_T[:, None] * WIDTH + col_C[None, :], plain, mask=mask)
    if CODES:
        tl.store(seen_ptr + row_T[:, None] * WIDTH + col_C[None, :], codes, mask=mask)
        tl.store(seen_scale_ptr + row_T[:, None] * (WIDTH // 32) + group_G[None, :], scale, mask=scale_mask)


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _engram_gate_kernel(  # type: ignore[no-untyped-def]
    streams_ptr,
    kv_ptr,
    query_ptr,
    key_ptr,
    is_image_ptr,
    out_ptr,
    gate_ptr,
    num_rows,
    rms_eps,
    scale,
    D: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * R
    row_R = tl.arange(0, R)
    row_ok_R = row_R < num_rows - first
    is_image_R = tl.load(is_image_ptr + first + row_R, mask=row_ok_R, other=1) != 0
    kv_ptr += first * (5 * D)
    for s in tl.range(0, 4, num_stages=1):
        from_ptr = streams_ptr + first * (4 * D) + s * D
        dot_R = _gate_dot(
            from_ptr, kv_ptr + s * D, query_ptr + s * D, key_ptr + s * D, row_R, row_ok_R, rms_eps, scale, D, R, C
        )
        size_R = tl.sqrt_rn(tl.maximum(tl.abs(dot_R), 1e-6))
        # copysign: a negative zero counts as negative.
        size_R = tl.where(dot_R.to(tl.int32, bitcast=True) < 0, -size_R, size_R)
        gate_R = tl.where(is_image_R, 0.0, tl.div_rn(1.0, 1.0 + tl.exp(-size_R)))
        tl.store(gate_ptr + first * 4 + row_R * 4 + s, gate_R, mask=row_ok_R)
        for start in tl.range(0, D, C, num_stages=1):
            col_C = start + tl.arange(0, C)
            mask = row_ok_R[:, None] & (col_C < D)[None, :]
            at = row_R[:, None] * (4 * D) + col_C[None, :]
            x = tl.load(from_ptr + at, mask=mask, other=0)
            value = tl.load(kv_ptr + row_R[:, None] * (5 * D) + 4 * D + col_C[None, :], mask=mask, other=0)
            added = (x.to(tl.float32) + gate_R[:, None] * value.to(tl.float32)).to(tl.bfloat16)
            to_ptr = out_ptr + first * (4 * D) + s * D
            tl.store(to_ptr + at, tl.where(is_image_R[:, None], x, added), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _gate_dot(  # type: ignore[no-untyped-def]
    x_ptr,
    k_ptr,
    query_ptr,
    key_ptr,
    row_R,
    row_ok_R,
    rms_eps,
    scale,
    D: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    """[R] weighted product of a stream and its key, both normed; scale: D ** -0.5."""
    dot = tl.zeros((R, C), tl.float32)
    squares_x = tl.zeros((R, C), tl.float32)
    squares_k = tl.zeros((R, C), tl.float32)
    for start in tl.range(0, D, C, num_stages=1):
        col_C = start + tl.arange(0, C)
        col_ok_C = col_C < D
        mask = row_ok_R[:, None] & col_ok_C[None, :]
        x = tl.load(x_ptr + row_R[:, None] * (4 * D) + col_C[None, :], mask=mask, other=0).to(tl.float32)
        k = tl.load(k_ptr + row_R[:, None] * (5 * D) + col_C[None, :], mask=mask, other=0).to(tl.float32)
        query_C = tl.load(query_ptr + col_C, mask=col_ok_C, other=0).to(tl.float32)
        weight_C = query_C * tl.load(key_ptr + col_C, mask=col_ok_C, other=0).to(tl.float32)
        dot += x * weight_C[None, :] * k
        squares_x = tl.fma(x, x, squares_x)
        squares_k = tl.fma(k, k, squares_k)
    norm_x = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(tl.sum(squares_x, axis=1), 1.0 * D) + rms_eps))
    norm_k = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(tl.sum(squares_k, axis=1), 1.0 * D) + rms_eps))
    return tl.sum(dot, axis=1) * (norm_x * norm_k * scale)


def engram_hash(
    compressed_ids_N: Tensor,
    history_B3: Tensor,
    cu_rows_B1: Tensor,
    *,
    multipliers: Tensor,
    primes: Tensor,
    offsets: Tensor,
    pad_id: int,
) -> Tensor:
    """Same contract as ref.engram_hash."""
    num_back, num_heads = primes.shape
    tensors = (compressed_ids_N, history_B3, multipliers, primes, offsets)
    if not all(x.dtype == torch.int64 and x.is_contiguous() for x in tensors) or history_B3.shape[1] != num_back:
        raise ValueError(
            f"ids, history {tuple(history_B3.shape)}, multipliers, primes {tuple(primes.shape)}, offsets: expected "
            "contiguous int64, and one id of history per n-gram size"
        )
    num_rows = len(compressed_ids_N)
    rows = torch.empty(num_rows, num_back * num_heads, dtype=torch.int64, device=compressed_ids_N.device)
    if num_rows:
        _engram_hash_kernel[(triton.cdiv(num_rows, _HASH_ROWS),)](
            compressed_ids_N,
            history_B3,
            cu_rows_B1,
            multipliers,
            primes,
            offsets,
            rows,
            num_rows,
            len(cu_rows_B1) - 1,
            pad_id,
            NUM_BACK=num_back,
            HEADS=num_heads,
            BLOCK_H=triton.next_power_of_2(num_heads),
            BLOCK_N=_HASH_ROWS,
            num_warps=_WARPS,
        )
    return rows


def engram_lookup(table: EngramTable, rows_NR: Tensor, *, numerics: Numerics, chip: Chip) -> Rows:  # noqa: ARG001
    """Same contract as ref.engram_lookup, with the quantised form: on sm_90 the values, on sm_100 the stored codes and scales.
    A table in host memory must be pinned."""
    num_rows, per_token = rows_NR.shape
    if table.scale is None:
        return Rows(plain=gather_rows(table.data, rows_NR.flatten()).view(num_rows, -1))
    width = table.data.shape[1]
    if width % GROUP or not (table.data.is_contiguous() and table.scale.is_contiguous() and rows_NR.is_contiguous()):
        raise ValueError(
            f"table rows of {width} values, indices with strides {rows_NR.stride()}: expected a multiple of {GROUP}, and "
            "contiguous tensors"
        )

    def empty(per_row: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(num_rows, per_token * per_row, dtype=dtype, device=rows_NR.device)

    plain, seen, scales = empty(width, torch.bfloat16), None, None
    if chip is Chip.SM_100:
        seen, scales = empty(width, torch.uint8), empty(width // GROUP, torch.uint8)
    if rows_NR.numel():
        _engram_lookup_kernel[(triton.cdiv(rows_NR.numel(), _LOOKUP_ROWS),)](
            table.data.view(torch.uint8),
            table.scale,
            rows_NR,
            plain,
            plain if seen is None else seen,
            plain if scales is None else scales,
            rows_NR.numel(),
            WIDTH=width,
            BLOCK_C=triton.next_power_of_2(width),
            CODES=seen is not None,
            T=_LOOKUP_ROWS,
            num_warps=_WARPS,
        )
    return Rows(plain=plain, seen=plain if seen is None else seen, scales=scales)


def engram_gate(
    streams_NSD: Tensor,
    kv_ND5: Tensor,
    query_weight_SD: Tensor,
    key_weight_SD: Tensor,
    is_image_N: Tensor,
    *,
    rms_eps: float,
) -> tuple[Tensor, Tensor]:
    """Same contract as ref.engram_gate; four streams, bfloat16, contiguous."""
    num_rows, num_streams, hidden = streams_NSD.shape
    tensors = (streams_NSD, kv_ND5, query_weight_SD, key_weight_SD)
    if (
        num_streams != _STREAMS
        or kv_ND5.shape != (num_rows, (_STREAMS + 1) * hidden)
        or not all(x.dtype == torch.bfloat16 and x.is_contiguous() for x in tensors)
    ):
        raise ValueError(
            f"streams {tuple(streams_NSD.shape)}, kv {tuple(kv_ND5.shape)}: expected {_STREAMS} streams, kv of one more width, "
            "all bfloat16 and contiguous"
        )
    out_NSD = torch.empty_like(streams_NSD)
    gates_NS = torch.empty(num_rows, num_streams, dtype=torch.float32, device=streams_NSD.device)
    if num_rows:
        _engram_gate_kernel[(triton.cdiv(num_rows, _GATE_TILE["R"]),)](
            streams_NSD,
            kv_ND5,
            query_weight_SD,
            key_weight_SD,
            is_image_N.view(torch.uint8),
            out_NSD,
            gates_NS,
            num_rows,
            rms_eps,
            hidden**-0.5,
            D=hidden,
            **_GATE_TILE,
            num_warps=_WARPS,
            # As ref: gate * value is rounded before the sum.
            enable_fp_fusion=False,
        )
    return out_NSD, gates_NS


def aot_cases(chip: Chip) -> tuple[AotCase, ...]:
    """A chunk of 32,768 rows, 24 table rows of 264 bytes per row."""
    return _hash_case(), _lookup_case(chip), _gate_case()


def _hash_case() -> AotCase:
    pointers = ("ids_ptr", "history_ptr", "multiplier_ptr", "prime_ptr", "offset_ptr", "out_ptr")
    types = dict.fromkeys(pointers, "*i64") | {"cu_rows_ptr": "*i32"}
    names = _engram_hash_kernel.arg_names
    return AotCase(
        op="engram_hash",
        name="engram_hash",
        shape="32768 x 24",
        kernel=_engram_hash_kernel,
        signature={name: types.get(name, "constexpr" if name.isupper() else "i32") for name in names},
        constexprs={"NUM_BACK": 3, "HEADS": 8, "BLOCK_H": 8, "BLOCK_N": _HASH_ROWS},
        aligned=tuple(types),
        num_warps=_WARPS,
        num_stages=3,
        mma=Mma.NONE,
        num_programs=32768 // _HASH_ROWS,
        bytes_moved=32768 * (8 + 24 * 8),
        flops=0,
    )


def _lookup_case(chip: Chip) -> AotCase:
    codes, num_rows, width = chip is Chip.SM_100, 32768 * 24, 256
    types = {"data_ptr": "*u8", "scale_ptr": "*u8", "index_ptr": "*i64", "plain_ptr": "*bf16"}
    types |= dict.fromkeys(("seen_ptr", "seen_scale_ptr"), "*u8" if codes else "*bf16")
    names = _engram_lookup_kernel.arg_names
    return AotCase(
        op="engram_lookup",
        name="engram_lookup",
        shape=f"32768 x 24 x {width}",
        kernel=_engram_lookup_kernel,
        signature={name: types.get(name, "i32" if name == "num_table_rows" else "constexpr") for name in names},
        constexprs={"WIDTH": width, "BLOCK_C": width, "CODES": codes, "T": _LOOKUP_ROWS},
        aligned=tuple(types),
        num_warps=_WARPS,
        num_stages=3,
        mma=Mma.NONE,
        num_programs=num_rows // _LOOKUP_ROWS,
        bytes_moved=num_rows * (264 + 8 + 512 + (264 if codes else 0)),
        flops=num_rows * width,
    )


def _gate_case() -> AotCase:
    num_rows, hidden = 32768, 5120
    types = dict.fromkeys(("streams_ptr", "kv_ptr", "query_ptr", "key_ptr", "out_ptr"), "*bf16")
    types |= {"is_image_ptr": "*u8", "gate_ptr": "*fp32"}
    scalars = {"num_rows": "i32", "rms_eps": "fp32", "scale": "fp32"}
    names = _engram_gate_kernel.arg_names
    return AotCase(
        op="engram_gate",
        name="engram_gate",
        shape=f"{num_rows} x 4 x {hidden}",
        kernel=_engram_gate_kernel,
        signature={name: (types | scalars).get(name, "constexpr") for name in names},
        constexprs={"D": hidden, **_GATE_TILE},
        aligned=tuple(types),
        num_warps=_WARPS,
        num_stages=3,
        mma=Mma.NONE,
        num_programs=num_rows // _GATE_TILE["R"],
        bytes_moved=num_rows * (2 * hidden * 13 + 17),
        flops=num_rows * 4 * hidden * 9,
        enable_fp_fusion=False,
    )
