"""The vision ops against loops, and their rounding points; batch invariance of the whole tower is in tests/engine/vision."""

import inspect
import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from prefill_kernels.pixel_levels import pixel_levels
from prefill_kernels.ref import vision as ref
from prefill_kernels.ref.vision_attention import vision_attention
from prefill_kernels.rope_tables import rope_frequencies
from prefill_kernels.vision_ops import SPAN_END, SPAN_NEWLINE, SPAN_START, VisionOps, load_vision_ops
from prefill_testing.numeric import assert_bitwise, assert_close, fraction_equal, random_tensor

NAMES = sorted(name for name in vars(VisionOps) if not name.startswith("_"))
DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)


@pytest.mark.parametrize("name", NAMES)
def test_ref_has_the_signature_of_the_protocol_and_a_contract(name: str) -> None:
    function = getattr(load_vision_ops("ref"), name)
    expected = list(inspect.signature(getattr(VisionOps, name)).parameters.values())[1:]
    assert [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()] == [
        (p.name, p.kind, p.default) for p in expected
    ]
    assert function.__doc__


def test_ref_exports_the_protocol_and_nothing_else() -> None:
    assert sorted(ref.__all__) == NAMES


def test_unknown_op_set_is_refused() -> None:
    with pytest.raises(ValueError, match="vision ops 'cuda' are not available: expected 'ref'"):
        load_vision_ops("cuda")


def test_levels_are_the_release_s_float32_steps_rounded_once() -> None:
    levels = pixel_levels()
    exact = torch.tensor([(byte / 255 - 0.5) / 0.5 for byte in range(256)], dtype=torch.float64)
    assert (levels.dtype, levels[0], levels[255]) == (torch.bfloat16, -1, 1)
    assert float(levels[127]) == pytest.approx(-0.0039, abs=1e-4)
    assert (levels.double() - exact).abs().max() < 2**-9
    assert levels.unique().numel() > 200


def test_patches_are_read_channel_by_channel_from_their_own_canvas() -> None:
    side, canvases = 2, [torch.arange(4 * 6 * 3), 255 - torch.arange(2 * 4 * 3)]
    canvases = [c.to(torch.uint8).view(h, w, 3) for c, (h, w) in zip(canvases, ((4, 6), (2, 4)), strict=True)]
    levels = torch.arange(256, dtype=torch.float32) * 3
    origins, strides, expected = [], [], []
    start = 0
    for canvas in canvases:
        for row in range(0, canvas.shape[0], side):
            for column in range(0, canvas.shape[1], side):
                origins.append(start + 3 * (row * canvas.shape[1] + column))
                strides.append(3 * canvas.shape[1])
                patch = canvas[row : row + side, column : column + side].permute(2, 0, 1)
                expected.append(patch.flatten().float() * 3)
        start += canvas.numel()
    out = ref.vision_patches(
        torch.cat([canvas.flatten() for canvas in canvases]),
        torch.tensor(origins),
        torch.tensor(strides, dtype=torch.int32),
        levels,
        patch_size=side,
    )
    assert_bitwise(out, torch.stack(expected))


@DTYPES
def test_linear_adds_the_bias_before_the_only_rounding(dtype: torch.dtype) -> None:
    x, residual = random_tensor(1, 21, 40, dtype=dtype), random_tensor(2, 21, 24, dtype=dtype)
    weight, bias = (random_tensor(seed, *shape, dtype=torch.bfloat16) for seed, shape in ((3, (24, 40)), (4, (24,))))
    exact = x.double() @ weight.double().t() + bias.double()
    out = ref.vision_linear(x, weight, bias)
    assert out.dtype == dtype
    assert_close(out, exact, dtype=dtype)
    if dtype == torch.bfloat16:
        assert fraction_equal(out, exact.bfloat16()) > 0.99
    assert_close(ref.vision_linear(x, weight, None), exact - bias.double(), dtype=dtype)
    assert_bitwise(ref.vision_linear_add(x, weight, bias, residual), residual + out)


@DTYPES
def test_swiglu_takes_the_gate_from_the_first_half(dtype: torch.dtype) -> None:
    x, weight = random_tensor(1, 21, 40, dtype=dtype), random_tensor(2, 2 * 18, 40, dtype=torch.bfloat16, scale=0.3)
    gate, up = (x.double() @ weight.double().t()).chunk(2, dim=-1)
    out = ref.vision_linear_swiglu(x, weight)
    assert out.shape == (21, 18)
    assert_close(out, gate * torch.sigmoid(gate) * up, dtype=dtype, factor=2)


def test_swiglu_rounds_at_every_step() -> None:
    x, weight = random_tensor(1, 50, 40, dtype=torch.bfloat16), random_tensor(2, 64, 40, dtype=torch.bfloat16)
    gate, up = (x.double() @ weight.double().t()).bfloat16().chunk(2, dim=-1)
    stepwise = torch.nn.functional.silu(gate.double()).bfloat16() * up
    once = (torch.nn.functional.silu(gate.double()) * up.double()).bfloat16()
    out = ref.vision_linear_swiglu(x, weight)
    assert fraction_equal(out, stepwise) > 0.99
    assert fraction_equal(out, once) < 0.9


@DTYPES
def test_gelu_is_the_exact_one(dtype: torch.dtype) -> None:
    x = random_tensor(1, 21, 40, dtype=dtype)
    weight, bias = (
        random_tensor(seed, *shape, dtype=torch.bfloat16, scale=0.3) for seed, shape in ((3, (24, 40)), (4, (24,)))
    )
    y = ref.vision_linear(x, weight, bias).double()
    values = [v * 0.5 * (1 + math.erf(v / math.sqrt(2))) for v in y.flatten().tolist()]
    expected = torch.tensor(values, dtype=torch.float64).view(21, 24)
    assert_close(ref.vision_linear_gelu(x, weight, bias), expected, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_of_a_product_does_not_depend_on_the_others(dtype: torch.dtype) -> None:
    """GELU's erf is the one function here that no other op of ref uses."""
    x = random_tensor(1, 200, 48, dtype=dtype, scale=2)
    weight, bias = random_tensor(2, 37, 48, dtype=torch.bfloat16), random_tensor(3, 37, dtype=torch.bfloat16)
    whole = ref.vision_linear_gelu(x, weight, bias)
    for start, length in ((0, 1), (3, 2), (17, 5), (64, 33), (100, 100), (199, 1)):
        assert_bitwise(ref.vision_linear_gelu(x[start : start + length], weight, bias), whole[start : start + length])


def naive_attention(qkv: Tensor, positions: Tensor, frequencies: Tensor, bounds: list[int], num_heads: int) -> Tensor:
    """Complex rotation, explicit loops, float64."""
    q, k, v = qkv.double().unflatten(-1, (3, num_heads, -1)).unbind(1)
    head_dim = q.shape[-1]
    half = head_dim // 2
    angles = torch.cat([positions[:, :1].float() * frequencies, positions[:, 1:].float() * frequencies], dim=1).double()
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]
    turned = []
    for x in (q, k):
        pairs = torch.complex(x[..., :half], x[..., half:]) * turn
        turned.append(torch.cat([pairs.real, pairs.imag], dim=-1))
    out = torch.empty_like(v)
    for start, end in pairwise(bounds):
        scores = torch.einsum("nhc,mhc->hnm", turned[0][start:end], turned[1][start:end]) / math.sqrt(head_dim)
        out[start:end] = torch.einsum("hnm,mhc->nhc", scores.softmax(-1), v[start:end])
    return out.flatten(1)


@DTYPES
@pytest.mark.parametrize("num_heads", [1, 3])
def test_attention_is_full_inside_an_image_and_none_between(dtype: torch.dtype, num_heads: int) -> None:
    bounds = [0, 300, 301, 322]  # more queries than one block; a single patch; few
    qkv = random_tensor(1, bounds[-1], 3 * num_heads * 16, dtype=dtype, scale=1.5)
    positions = torch.stack([torch.arange(bounds[-1]) % 11, torch.arange(bounds[-1]) // 11], dim=1).int()
    frequencies = rope_frequencies(rope_dim=8, theta=10000.0, yarn=None)
    out = vision_attention(
        qkv, positions, frequencies, torch.tensor(bounds, dtype=torch.int32), num_heads=num_heads, max_rows=300
    )
    assert out.dtype == dtype
    assert_close(out, naive_attention(qkv, positions, frequencies, bounds, num_heads), dtype=dtype, factor=3)


def test_merge_is_channel_major_with_zeros_outside() -> None:
    x = torch.arange(1, 7, dtype=torch.float32).view(3, 2)  # patches (1, 2), (3, 4), (5, 6)
    out = ref.vision_merge(x, torch.tensor([[0, 1, -1, 2], [-1, -1, -1, 1]], dtype=torch.int32))
    assert out.tolist() == [[1, 3, 0, 5, 2, 4, 0, 6], [0, 0, 0, 3, 0, 0, 0, 4]]


def test_spans_put_features_between_delimiters() -> None:
    features = torch.tensor([[1.0], [2.0]])
    start, newline, end = (torch.tensor([value], dtype=torch.bfloat16) for value in (10.0, 20.0, 30.0))
    source = torch.tensor([SPAN_START, 1, SPAN_NEWLINE, 0, SPAN_END], dtype=torch.int32)
    out = ref.vision_spans(features, start, newline, end, source)
    assert out.dtype == torch.float32
    assert out.flatten().tolist() == [10, 2, 20, 1, 30]


def test_no_rows_give_no_rows() -> None:
    assert ref.vision_linear(torch.zeros(0, 8), torch.zeros(4, 8), None).shape == (0, 4)
    assert ref.vision_merge(torch.zeros(3, 2), torch.zeros(0, 9, dtype=torch.int32)).shape == (0, 18)
