"""Token embedding (model.md 2.1)."""

# N rows, V vocabulary, D hidden
from torch import Tensor

from prefill_kernels.numerics import Numerics
from prefill_kernels.ref.rows import gather_rows


def embed_tokens(weight_VD: Tensor, token_ids_N: Tensor, *, numerics: Numerics) -> Tensor:
    """Embedding rows by token id, unscaled.

    Args:
        weight_VD: [V, D] bfloat16 or float32.
        token_ids_N: [N] int32 or int64; ids outside [0, V) (image placeholders) give zero rows.

    Returns:
        [N, D] act.
    """
    return gather_rows(weight_VD, token_ids_N).to(numerics.activation)
