import pytest
import torch

from prefill_kernels import ref
from prefill_kernels.gpu.embed_tokens import embed_tokens
from prefill_kernels.numerics import PRODUCTION
from prefill_testing.numeric import assert_bitwise, random_tensor

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("hidden", [33, 64, 1100])
def test_rows_of_the_table_and_zeros_for_placeholders(
    hidden: int, weight_dtype: torch.dtype, id_dtype: torch.dtype
) -> None:
    weight = random_tensor(1, 19, hidden, dtype=weight_dtype)
    ids = torch.tensor([18, 0, -1, 19, 7, 7, 129264], dtype=id_dtype)
    out = embed_tokens(weight, ids, numerics=PRODUCTION)
    assert_bitwise(out, ref.embed_tokens(weight, ids, numerics=PRODUCTION))


def test_one_token_and_none() -> None:
    weight = random_tensor(2, 5, 64, dtype=torch.bfloat16)
    assert_bitwise(embed_tokens(weight, torch.tensor([3]), numerics=PRODUCTION), weight[3:4])
    assert embed_tokens(weight, torch.empty(0, dtype=torch.int32), numerics=PRODUCTION).shape == (0, 64)


def test_a_transposed_table_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a contiguous"):
        embed_tokens(torch.ones(64, 5).t(), torch.tensor([0]), numerics=PRODUCTION)
