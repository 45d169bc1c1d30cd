"""embed_tokens: embedding rows by token id, rounded to bfloat16 where the table is wider (model.md 2.1).

Traffic: one table row read and one row written per token; bound: memory. Called once per step.
"""

# N rows, V vocabulary, D hidden
import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from prefill_kernels.aot_case import AotCase, Mma
from prefill_kernels.gpu.chip import Chip
from prefill_kernels.numerics import Numerics

# AOT: 16 values per thread in loads and stores of 16 bytes.
_ROWS = 2
_COLUMNS = 1024
_WARPS = 4


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])  # type: ignore[untyped-decorator]
def _embed_tokens_kernel(  # type: ignore[no-untyped-def]
    weight_ptr, token_ptr, out_ptr, num_rows, num_tokens, hidden, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    row_N = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col_C = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    token_N = tl.load(token_ptr + row_N, mask=row_N < num_rows, other=-1).to(tl.int64)
    is_token_N = (token_N >= 0) & (token_N < num_tokens)
    in_row_C = (col_C < hidden)[None, :]
    from_ptr = weight_ptr + tl.where(is_token_N, token_N, 0)[:, None] * hidden + col_C[None, :]
    value = tl.load(from_ptr, mask=is_token_N[:, None] & in_row_C, other=0).to(out_ptr.dtype.element_ty)
    to_ptr = out_ptr + row_N.to(tl.int64)[:, None] * hidden + col_C[None, :]
    tl.store(to_ptr, value, mask=(row_N < num_rows)[:, None] & in_row_C)


def embed_tokens(weight_VD: Tensor, token_ids_N: Tensor, *, numerics: Numerics) -> Tensor:
    """Same contract as ref.embed_tokens; weight contiguous."""
    num_rows, (num_tokens, hidden) = len(token_ids_N), weight_VD.shape
    out_ND = torch.empty(num_rows, hidden, dtype=numerics.activation, device=weight_VD.device)
    if not weight_VD.is_contiguous():
        raise ValueError(f"embedding with strides {weight_VD.stride()}: expected a contiguous [vocabulary, hidden]")
    if num_rows:
        _embed_tokens_kernel[(triton.cdiv(num_rows, _ROWS), triton.cdiv(hidden, _COLUMNS))](
            weight_VD,
            token_ids_N,
            out_ND,
            num_rows,
            num_tokens,
            hidden,
            ROWS=_ROWS,
            COLUMNS=_COLUMNS,
            num_warps=_WARPS,
        )
    return out_ND


def aot_cases(chip: Chip) -> tuple[AotCase, ...]:  # noqa: ARG001 - the same launch on both chips
    """A chunk of 32,768 tokens."""
    num_rows, hidden = 32768, 5120
    pointers = {"weight_ptr": "*bf16", "token_ptr": "*i32", "out_ptr": "*bf16"}
    sizes = {"num_rows": "i32", "num_tokens": "i32", "hidden": "i32"}
    case = AotCase(
        op="embed_tokens",
        name="embed_tokens",
        shape=f"{num_rows} of 129280 x {hidden}",
        kernel=_embed_tokens_kernel,
        signature={**pointers, **sizes, "ROWS": "constexpr", "COLUMNS": "constexpr"},
        constexprs={"ROWS": _ROWS, "COLUMNS": _COLUMNS},
        aligned=(*pointers, "hidden"),
        num_warps=_WARPS,
        num_stages=3,
        mma=Mma.NONE,
        num_programs=triton.cdiv(num_rows, _ROWS) * triton.cdiv(hidden, _COLUMNS),
        bytes_moved=num_rows * (4 * hidden + 4),
        flops=0,
    )
    return (case,)
