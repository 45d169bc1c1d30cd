import math

import pytest
import torch

from prefill_kernels.numerics import PRODUCTION, Numerics
from prefill_kernels.ref import route
from prefill_testing.numeric import ALL_NUMERICS, FLOAT32, assert_close, random_tensor


@pytest.mark.parametrize("numerics", ALL_NUMERICS.values(), ids=ALL_NUMERICS.keys())
@pytest.mark.parametrize("num_experts", [9, 24])
def test_routing_matches_a_loop(numerics: Numerics, num_experts: int) -> None:
    x = random_tensor(1, 19, 32, dtype=numerics.activation)
    gate = random_tensor(2, num_experts, 32, dtype=torch.bfloat16)
    bias, image_bias = random_tensor(3, num_experts), random_tensor(4, num_experts)
    is_image = torch.arange(19) % 3 == 1
    out = route(x, gate, bias, image_bias, is_image, topk=3, scaling=1.5, numerics=numerics)
    assert out.expert_ids.dtype == torch.int32
    assert out.weights.dtype == numerics.wide
    for n in range(19):
        logits = [float((x[n].double() * row.double()).sum()) for row in gate]
        scores = [math.sqrt(v if v > 20 else math.log1p(math.exp(v))) for v in logits]
        chosen_bias = (image_bias if is_image[n] else bias).tolist()
        ranked = sorted(range(num_experts), key=lambda e: (-(scores[e] + chosen_bias[e]), e))
        ids = sorted(ranked[:3])
        total = sum(scores[e] for e in ids) + 1e-20
        assert out.expert_ids[n].tolist() == ids
        expected = torch.tensor([1.5 * scores[e] / total for e in ids], dtype=torch.float64)
        assert_close(out.weights[n], expected, dtype=numerics.wide)


def test_ties_go_to_the_lowest_id() -> None:
    gate = torch.zeros(8, 16)
    gate[5] = 1
    routing = route(
        torch.ones(2, 16),
        gate,
        torch.zeros(8),
        None,
        torch.zeros(2, dtype=torch.bool),
        topk=3,
        scaling=1,
        numerics=FLOAT32,
    )
    assert routing.expert_ids.tolist() == [[0, 1, 5]] * 2


def test_without_an_image_bias_image_rows_use_the_text_bias() -> None:
    x, gate, bias = random_tensor(5, 6, 16), random_tensor(6, 8, 16), random_tensor(7, 8)
    text, image = (
        route(x, gate, bias, None, torch.full((6,), flag), topk=2, scaling=1.5, numerics=FLOAT32)
        for flag in (False, True)
    )
    assert text.expert_ids.tolist() == image.expert_ids.tolist()


def test_weights_sum_to_the_scaling_and_large_logits_stay_finite() -> None:
    x, gate = random_tensor(8, 10, 32, dtype=torch.bfloat16, scale=40), random_tensor(9, 8, 32, dtype=torch.bfloat16)
    out = route(
        x, gate, torch.zeros(8), None, torch.zeros(10, dtype=torch.bool), topk=8, scaling=1.5, numerics=PRODUCTION
    )
    assert torch.allclose(out.weights.sum(1), torch.tensor(1.5), atol=1e-6)


def test_no_rows_route_nowhere() -> None:
    out = route(
        torch.zeros(0, 16),
        torch.ones(8, 16),
        torch.zeros(8),
        None,
        torch.zeros(0, dtype=torch.bool),
        topk=2,
        scaling=1,
        numerics=FLOAT32,
    )
    assert out.expert_ids.shape == out.weights.shape == (0, 2)
