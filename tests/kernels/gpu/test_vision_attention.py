"""Attention of the vision tower in the interpreter: against float64 within bfloat16's tolerance, images apart bit by bit."""

import math
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from prefill_kernels.gpu import vision_attention as module
from prefill_kernels.gpu.chip import Chip
from prefill_kernels.gpu.vision_attention import CONFIGS, vision_attention
from prefill_kernels.ref import vision_attention as ref
from prefill_kernels.rope_tables import rope_frequencies
from prefill_testing.numeric import assert_bitwise, assert_close, fraction_equal, random_tensor

pytestmark = pytest.mark.usefixtures("poisoned")
both_chips = pytest.mark.parametrize("chip", Chip)
BF16 = torch.bfloat16
Case = dict[str, Any]


def _case(*sizes: int, heads: int = 2, width: int = 32) -> Case:
    """Images of so many patches, eleven to a row."""
    places = torch.tensor([place for size in sizes for place in range(size)], dtype=torch.int64)
    return {
        "qkv_N3D": random_tensor(1, sum(sizes), 3 * heads * width, dtype=BF16, scale=1.5),
        # As the tower makes them: strided.
        "positions_N2": torch.stack([places // 11, places % 11]).int().t(),
        "frequencies": rope_frequencies(rope_dim=width // 2, theta=10000.0, yarn=None),
        "cu_rows_B1": torch.tensor(list(accumulate(sizes, initial=0)), dtype=torch.int32),
        "num_heads": heads,
        "max_rows": max(sizes, default=0),
    }


def _exact(case: Case, chip: Chip | None = None) -> Tensor:
    """The rotation of ref, then loops in float64. chip: with the kernel's stated rounding of the probabilities."""
    heads = case["num_heads"]
    q, k, v = case["qkv_N3D"].unflatten(-1, (3, heads, -1)).unbind(1)
    q, k = (ref._rotate(x, case["positions_N2"], case["frequencies"]).double() for x in (q, k))
    out = torch.zeros(v.shape, dtype=torch.float64)
    for start, end in pairwise(case["cu_rows_B1"].tolist()):
        for head in range(heads):
            powers = q[start:end, head] @ k[start:end, head].t() * (q.shape[-1] ** -0.5 * math.log2(math.e))
            weights = torch.exp2(powers - powers.amax(-1, keepdim=True).ceil())
            rounded = weights if chip is None else _rounded_by_tiles(weights, powers, CONFIGS[chip].keys)
            out[start:end, head] = rounded @ v[start:end, head].double() / weights.sum(-1, keepdim=True)
    return out.flatten(1)


def _rounded_by_tiles(weights: Tensor, powers: Tensor, tile: int) -> Tensor:
    """Probabilities rounded against the reference of their tile: all are powers of two apart, so no rounding sees which."""
    references = [powers[:, :end].amax(-1, keepdim=True).ceil() for end in range(tile, powers.shape[1] + tile, tile)]
    top = powers.amax(-1, keepdim=True).ceil()
    parts = [
        torch.exp2(powers[:, start : start + tile] - reference).bfloat16().double() * torch.exp2(reference - top)
        for start, reference in zip(range(0, powers.shape[1], tile), references, strict=True)
    ]
    return torch.cat(parts, dim=1)


@both_chips
@pytest.mark.parametrize("sizes", [(300, 1, 21), (1,), (128, 256), (129,)], ids=str)
def test_attention_is_full_inside_an_image_and_none_between(sizes: tuple[int, ...], chip: Chip) -> None:
    case = _case(*sizes)
    out = vision_attention(**case, chip=chip)
    assert_close(out, _exact(case), dtype=BF16)
    assert fraction_equal(out, _exact(case, chip).bfloat16()) > 0.99


@both_chips
def test_the_released_heads(chip: Chip) -> None:
    case = _case(130, heads=16, width=64)
    expected = ref.vision_attention(**case)
    assert_close(vision_attention(**case, chip=chip), expected, dtype=BF16)


@pytest.mark.parametrize("width", [16, 32, 64])
def test_the_rotation_has_the_bits_of_ref(width: int) -> None:
    """Positions up to the longest side of a canvas, 1,170 patches."""
    case = _case(70, heads=3, width=width)
    positions = torch.randint(0, 1170, (70, 2), generator=torch.Generator().manual_seed(3), dtype=torch.int32)
    turned = module._turned(case["qkv_N3D"], positions, case["frequencies"], 3, width)
    q, k, _ = case["qkv_N3D"].unflatten(-1, (3, 3, width)).unbind(1)
    expected = [ref._rotate(x, positions, case["frequencies"]) for x in (q, k)]
    assert_bitwise(turned.unflatten(-1, (2, 3, width)), torch.stack(expected, dim=1))


@both_chips
def test_an_image_alone_and_in_any_batch_give_the_same_bits(chip: Chip) -> None:
    sizes = (140, 3, 261)
    case = _case(*sizes)
    whole = vision_attention(**case, chip=chip)
    for number, (start, end) in enumerate(pairwise(case["cu_rows_B1"].tolist())):
        alone = case | {
            "qkv_N3D": case["qkv_N3D"][start:end],
            "positions_N2": case["positions_N2"][start:end],
            "cu_rows_B1": torch.tensor([0, end - start], dtype=torch.int32),
            # A looser bound only adds programs that end at once.
            "max_rows": sizes[number] + 500 * (number == 1),
        }
        assert_bitwise(vision_attention(**alone, chip=chip), whole[start:end])


@both_chips
def test_nothing_of_another_image_is_seen(chip: Chip) -> None:
    case = _case(140, 9, 30)
    whole = vision_attention(**case, chip=chip)
    case["qkv_N3D"] = case["qkv_N3D"].clone()
    case["qkv_N3D"][:140] = float("nan")
    case["qkv_N3D"][149:] = float("inf")
    assert_bitwise(vision_attention(**case, chip=chip)[140:149], whole[140:149])


@both_chips
def test_a_later_key_may_be_far_above_all_before(chip: Chip) -> None:
    """References rise by hundreds of powers of two from tile to tile."""
    case = _case(300, heads=1, width=32)
    case["positions_N2"] = torch.zeros_like(case["positions_N2"])
    for row in (0, 130, 131, 299):
        case["qkv_N3D"][row, 32:64] = case["qkv_N3D"][row // 2, :32] * (10 + row)
    assert_close(vision_attention(**case, chip=chip), _exact(case), dtype=BF16)


@both_chips
def test_no_images_and_images_without_patches(chip: Chip) -> None:
    assert vision_attention(**_case(), chip=chip).shape == (0, 64)
    images = _case(5) | {"cu_rows_B1": torch.tensor([0, 0, 5, 5], dtype=torch.int32)}
    assert_bitwise(vision_attention(**images, chip=chip), vision_attention(**_case(5), chip=chip))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qkv_N3D": torch.zeros(4, 3 * 2 * 32)}, "expected bfloat16"),
        ({"num_heads": 3}, "3 heads"),
        ({"num_heads": 8}, "a power of two of at least 16"),
        ({"frequencies": torch.ones(16)}, "16 frequencies"),
        ({"positions_N2": torch.zeros(3, 2, dtype=torch.int32)}, "a row and a column for each of 4 patches"),
        ({"qkv_N3D": torch.zeros(4, 384, dtype=BF16)[:, ::2]}, "contiguous tensors"),
        ({"max_rows": 2**31 // 192 + 1}, "expected at most"),
    ],
    ids=["dtype", "heads", "head dim", "frequencies", "positions", "strides", "image size"],
)
def test_arguments_that_no_tile_fits_are_refused(changes: Case, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        vision_attention(**(_case(4) | changes), chip=Chip.SM_90)
