"""vision_attention: full attention inside each image of a packed batch, after the 2-D rotation of q and k (vision.md 4).

Two launches. The first turns q and k of all heads once, with the bits of `ref`, into scratch (4 * D bytes a row); turning keys in
the second would repeat that for each of up to 72 query tiles. The second is flash attention: a program takes 128 queries of one
image and head and walks over that image's keys from its first. Tiles start with the image, so an image's rows never depend on the
others. Traffic: q and the output once, keys and values of an image and head (2.3 MB at 9,189 patches) from L2 per query tile;
bound: the matrix unit and the exponentials.

Profile D in one point, as sparse_attention: probabilities are rounded to bfloat16 before the values, and not in the denominator;
`ref` does not round them. The reference of the running softmax is the smallest power of two above the scores so far, so raising
it rescales without rounding.
"""

# N patches, B images, H heads, C head dim, D = H * C
from dataclasses import dataclass
from typing import Any

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from prefill_kernels.aot_case import AotCase, Mma
from prefill_kernels.gpu.chip import Chip
from prefill_kernels.gpu.rope_device import cos_sin, rotate

_LOG2_E = 1.4426950408889634
_MIN_WIDTH = 16
_MAX_OFFSET = 2**31 - 1
# 32 rows x 32 pairs are 8 values of each half a thread; the float64 angles are made once for all 32 heads of q and k.
_TURN_ROWS = 32
_TURN_WARPS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionAttentionConfig:
    """queries, keys: of a tile."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int


# AOT: 113 and 126 registers (triton 3.9), so two programs share an SM and one makes exponentials while the other multiplies; with
# tiles of 128 keys it is 160 and 188, and one program.
CONFIGS = {
    Chip.SM_90: VisionAttentionConfig(queries=128, keys=64, num_warps=8, num_stages=3),
    Chip.SM_100: VisionAttentionConfig(queries=128, keys=64, num_warps=8, num_stages=3),
}


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _turn_rows_kernel(  # type: ignore[no-untyped-def]
    qkv_ptr,
    positions_ptr,
    frequencies_ptr,
    turned_ptr,
    num_rows,
    stride_position_n,
    stride_position_axis,
    NUM_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    PAIRS: tl.constexpr = WIDTH // 2
    row_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    pair = tl.arange(0, PAIRS)
    mask = (row_R < num_rows)[:, None]
    # The first half of the pairs turns by the patch's row, the other by its column.
    axis = pair // (PAIRS // 2)
    place_ptr = positions_ptr + row_R[:, None] * stride_position_n + axis[None, :] * stride_position_axis
    position = tl.load(place_ptr, mask=mask, other=0).to(tl.float32)
    frequency = tl.load(frequencies_ptr + pair % (PAIRS // 2))
    cos, sin = cos_sin(position * frequency[None, :])
    from_ptr = qkv_ptr + row_R.to(tl.int64)[:, None] * (3 * NUM_HEADS * WIDTH) + pair[None, :]
    to_ptr = turned_ptr + row_R.to(tl.int64)[:, None] * (2 * NUM_HEADS * WIDTH) + pair[None, :]
    for head in range(0, 2 * NUM_HEADS):
        x0 = tl.load(from_ptr + head * WIDTH, mask=mask, other=0.0).to(tl.float32)
        x1 = tl.load(from_ptr + head * WIDTH + PAIRS, mask=mask, other=0.0).to(tl.float32)
        y0, y1 = rotate(x0, x1, cos, sin)
        tl.store(to_ptr + head * WIDTH, y0.to(tl.bfloat16), mask=mask)
        tl.store(to_ptr + head * WIDTH + PAIRS, y1.to(tl.bfloat16), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _add_keys(q, keys, values, is_key, scale, reference, total, acc, MASKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """One tile of the running softmax; scale > 0 includes log2(e)."""
    product = tl.dot(q, tl.trans(keys))
    if MASKED:
        product = tl.where(is_key[None, :], product, float("-inf"))
    raised = tl.maximum(reference, tl.ceil(tl.max(product, axis=1) * scale))
    shrink = tl.exp2(reference - raised)
    weights = tl.exp2(product * scale - raised[:, None])
    total = total * shrink + tl.sum(weights, axis=1)
    acc = tl.dot(weights.to(tl.bfloat16), values, acc * shrink[:, None])
    return raised, total, acc


@triton.jit  # type: ignore[untyped-decorator]
def _vision_attention_kernel(  # type: ignore[no-untyped-def]
    turned_ptr,
    qkv_ptr,
    cu_rows_ptr,
    out_ptr,
    scale,
    NUM_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    DIM: tl.constexpr = NUM_HEADS * WIDTH
    head = tl.program_id(1)
    image_ptr = cu_rows_ptr + tl.program_id(2)
    first = tl.load(image_ptr)
    num_keys = tl.load(image_ptr + 1) - first
    query = tl.program_id(0) * QUERIES
    if query >= num_keys:
        return
    channel = tl.arange(0, WIDTH)[None, :]
    turned_ptr += first.to(tl.int64) * (2 * DIM) + head * WIDTH
    row_Q = query + tl.arange(0, QUERIES)
    q = tl.load(turned_ptr + tl.minimum(row_Q, num_keys - 1)[:, None] * (2 * DIM) + channel)
    key_J = tl.arange(0, KEYS)
    key_tile = turned_ptr + DIM + key_J[:, None] * (2 * DIM) + channel
    value_tile = (
        qkv_ptr + first.to(tl.int64) * (3 * DIM) + 2 * DIM + head * WIDTH + key_J[:, None] * (3 * DIM) + channel
    )
    reference = tl.full((QUERIES,), -1e30, tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    acc = tl.zeros((QUERIES, WIDTH), tl.float32)
    whole = num_keys // KEYS * KEYS
    for _ in range(0, whole, KEYS):
        keys = tl.load(key_tile)
        values = tl.load(value_tile)
        reference, total, acc = _add_keys(q, keys, values, key_J, scale, reference, total, acc, False)
        key_tile += KEYS * 2 * DIM
        value_tile += KEYS * 3 * DIM
    if whole < num_keys:
        is_key = whole + key_J < num_keys
        keys = tl.load(key_tile, mask=is_key[:, None], other=0.0)
        values = tl.load(value_tile, mask=is_key[:, None], other=0.0)
        reference, total, acc = _add_keys(q, keys, values, is_key, scale, reference, total, acc, True)
    out = acc * tl.div_rn(1.0, total)[:, None]
    to_ptr = out_ptr + (first + row_Q).to(tl.int64)[:, None] * DIM + head * WIDTH + channel
    tl.store(to_ptr, out.to(tl.bfloat16), mask=(row_Q < num_keys)[:, None])


def vision_attention(
    qkv_N3D: Tensor,
    positions_N2: Tensor,
    frequencies: Tensor,
    cu_rows_B1: Tensor,
    *,
    num_heads: int,
    max_rows: int,
    chip: Chip,
) -> Tensor:
    """Same contract as ref.vision_attention, bfloat16, positions strided, the others contiguous; C a power of two of at least 16.
    Rows of an image beyond max_rows would not be written.

    Raises:
        ValueError: another dtype, head dim or stride, or images too large for 32-bit offsets.
    """
    num_rows, width = _check(qkv_N3D, positions_N2, frequencies, cu_rows_B1, num_heads, max_rows)
    out_ND = torch.empty(num_rows, num_heads * width, dtype=qkv_N3D.dtype, device=qkv_N3D.device)
    num_images = len(cu_rows_B1) - 1
    if not num_rows or not num_images or not max_rows:
        return out_ND
    config = CONFIGS[chip]
    _vision_attention_kernel[(triton.cdiv(max_rows, config.queries), num_heads, num_images)](
        _turned(qkv_N3D, positions_N2, frequencies, num_heads, width),
        qkv_N3D,
        cu_rows_B1,
        out_ND,
        width**-0.5 * _LOG2_E,
        **_constants(config, num_heads, width),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return out_ND


def _turned(qkv: Tensor, positions: Tensor, frequencies: Tensor, num_heads: int, width: int) -> Tensor:
    """[N, 2 * D]: q, then k of all heads, rotated and rounded."""
    turned = torch.empty(len(qkv), 2 * num_heads * width, dtype=qkv.dtype, device=qkv.device)
    _turn_rows_kernel[(triton.cdiv(len(qkv), _TURN_ROWS),)](
        qkv,
        positions,
        frequencies,
        turned,
        len(qkv),
        *positions.stride(),
        NUM_HEADS=num_heads,
        WIDTH=width,
        ROWS=_TURN_ROWS,
        num_warps=_TURN_WARPS,
        enable_fp_fusion=False,
    )
    return turned


def _check(
    qkv: Tensor, positions: Tensor, frequencies: Tensor, cu_rows: Tensor, num_heads: int, max_rows: int
) -> tuple[int, int]:
    """(N, C)."""
    num_rows, columns = qkv.shape
    width = columns // (3 * num_heads)
    is_power = width >= _MIN_WIDTH and width & (width - 1) == 0 and columns == 3 * num_heads * width
    if qkv.dtype != torch.bfloat16 or not is_power or len(frequencies) != width // 4:
        raise ValueError(
            f"qkv {tuple(qkv.shape)} {qkv.dtype}, {num_heads} heads, {len(frequencies)} frequencies: expected bfloat16 "
            f"[N, 3 * heads * C], C a power of two of at least {_MIN_WIDTH}, and C / 4 frequencies"
        )
    tensors = (qkv, frequencies, cu_rows)
    if positions.shape != (num_rows, 2) or not all(tensor.is_contiguous() for tensor in tensors):
        raise ValueError(
            f"positions {tuple(positions.shape)}; qkv, frequencies, cu_rows with strides "
            f"{[tensor.stride() for tensor in tensors]}: expected a row and a column for each of {num_rows} patches and "
            "contiguous tensors"
        )
    if max_rows * columns > _MAX_OFFSET:
        raise ValueError(f"{max_rows} patches in an image x {columns} columns: expected at most {_MAX_OFFSET}")
    return num_rows, width


def _constants(config: VisionAttentionConfig, num_heads: int, width: int) -> dict[str, Any]:
    return {"NUM_HEADS": num_heads, "WIDTH": width, "QUERIES": config.queries, "KEYS": config.keys}


def aot_cases(chip: Chip) -> tuple[AotCase, ...]:
    """A batch of 16,384 patches: rotation; attention of the two largest images that fit, 8,192 patches each."""
    num_rows, max_rows, num_heads, width = 16384, 8192, 16, 64
    dim = num_heads * width
    turn = {"NUM_HEADS": num_heads, "WIDTH": width, "ROWS": _TURN_ROWS}
    config = CONFIGS[chip]
    return (
        _case(
            "vision_attention turn",
            f"{num_rows} x {2 * num_heads} x {width}",
            _turn_rows_kernel,
            turn,
            launch=(_TURN_WARPS, 3, triton.cdiv(num_rows, _TURN_ROWS)),
            bytes_moved=num_rows * (8 * dim + 8),
            flops=num_rows * (num_heads * width * 6 + width // 2 * 40),
            mma=Mma.NONE,
        ),
        _case(
            "vision_attention",
            f"2 images x {max_rows} x {num_heads} x {width}",
            _vision_attention_kernel,
            _constants(config, num_heads, width),
            launch=(config.num_warps, config.num_stages, triton.cdiv(max_rows, config.queries) * num_heads * 2),
            # Keys and values count once: later reads come from L2.
            bytes_moved=num_rows * 8 * dim,
            flops=4 * num_rows * max_rows * dim,
            mma=Mma.BF16,
        ),
    )


def _case(
    name: str,
    shape: str,
    kernel: Any,
    constexprs: dict[str, Any],
    *,
    launch: tuple[int, int, int],
    bytes_moved: int,
    flops: int,
    mma: Mma,
) -> AotCase:
    types = {"positions_ptr": "*i32", "cu_rows_ptr": "*i32", "frequencies_ptr": "*fp32", "num_rows": "i32"}
    types |= dict.fromkeys(("stride_position_n", "stride_position_axis"), "i32")
    types |= {"scale": "fp32"} | dict.fromkeys(constexprs, "constexpr")
    signature = {argument: types.get(argument, "*bf16") for argument in kernel.arg_names}
    num_warps, num_stages, num_programs = launch
    return AotCase(
        op="vision_attention",
        name=name,
        shape=shape,
        kernel=kernel,
        signature=signature,
        constexprs=constexprs,
        aligned=tuple(argument for argument in signature if argument.endswith("_ptr")),
        num_warps=num_warps,
        num_stages=num_stages,
        mma=mma,
        num_programs=num_programs,
        bytes_moved=bytes_moved,
        flops=flops,
        enable_fp_fusion=mma is not Mma.NONE,
    )
