import torch

from prefill_kernels.numerics import PRODUCTION
from prefill_kernels.ref import embed_tokens
from prefill_testing.numeric import FLOAT32, assert_bitwise, random_tensor


def test_embedding_gathers_rows_in_the_activation_dtype() -> None:
    weight = random_tensor(1, 11, 6, dtype=torch.bfloat16)
    ids = torch.tensor([3, 10, 0, 3], dtype=torch.int32)
    assert_bitwise(embed_tokens(weight, ids, numerics=PRODUCTION), weight[ids.long()])
    assert_bitwise(embed_tokens(weight, ids, numerics=FLOAT32), weight[ids.long()].float())


def test_ids_outside_the_vocabulary_give_zero_rows() -> None:
    out = embed_tokens(random_tensor(2, 11, 6), torch.tensor([-1, 11, 4]), numerics=FLOAT32)
    assert out[:2].abs().sum() == 0
    assert out[2].abs().sum() > 0
