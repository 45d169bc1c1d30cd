"""Patches, cells and spans of the vision tower in the interpreter: copies, so every bit is ref's."""

import pytest
import torch
from torch import Tensor

from prefill_kernels.gpu.vision_rows import vision_merge, vision_patches, vision_spans
from prefill_kernels.pixel_levels import pixel_levels
from prefill_kernels.ref import vision as ref
from prefill_testing.numeric import assert_bitwise, random_tensor

pytestmark = pytest.mark.usefixtures("poisoned")
BF16 = torch.bfloat16


def _canvases(side: int, *grids: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """(pixels, origins, strides) of canvases of so many patches (rows, columns), back to back."""
    generator = torch.Generator().manual_seed(1)
    origins, strides, start = [], [], 0
    for rows, columns in grids:
        stride = 3 * side * columns
        places = [start + side * (row * stride + 3 * column) for row in range(rows) for column in range(columns)]
        origins += places
        strides += [stride] * len(places)
        start += rows * side * stride
    pixels = torch.randint(0, 256, (start,), generator=generator, dtype=torch.uint8)
    return pixels, torch.tensor(origins), torch.tensor(strides, dtype=torch.int32)


@pytest.mark.parametrize(
    ("side", "grids"),
    [(14, [(3, 2), (1, 1), (2, 5)]), (14, [(1, 1)]), (2, [(7, 5)])],
    ids=["three images", "one patch", "another side"],
)
def test_patches_are_the_levels_of_their_bytes(side: int, grids: list[tuple[int, int]]) -> None:
    inputs = _canvases(side, *grids)
    out = vision_patches(*inputs, pixel_levels(), patch_size=side)
    assert_bitwise(out, ref.vision_patches(*inputs, pixel_levels(), patch_size=side))


def test_no_patches_give_no_patches() -> None:
    pixels, origins, strides = _canvases(14, (1, 1))
    assert vision_patches(pixels, origins[:0], strides[:0], pixel_levels(), patch_size=14).shape == (0, 588)


def test_other_activations_are_refused() -> None:
    with pytest.raises(ValueError, match=r"compute with bfloat16 activations, not with torch\.float32"):
        vision_patches(*_canvases(14, (1, 1)), pixel_levels().float(), patch_size=14)


@pytest.mark.parametrize(("width", "cells"), [(128, 7), (150, 3), (16, 0)], ids=str)
def test_cells_are_channel_major_with_zeros_outside(width: int, cells: int) -> None:
    x = random_tensor(1, 40, width, dtype=BF16)
    index = torch.randint(-1, 40, (cells, 9), generator=torch.Generator().manual_seed(2), dtype=torch.int32)
    index[cells // 2 :, 5:] = -1
    assert_bitwise(vision_merge(x, index), ref.vision_merge(x, index))


@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=["checkpoint's dtype", "wider delimiters"])
@pytest.mark.parametrize(("width", "rows"), [(96, 11), (1300, 6), (64, 0)], ids=str)
def test_spans_are_features_between_delimiters(width: int, rows: int, dtype: torch.dtype) -> None:
    features = random_tensor(1, 5, width, dtype=BF16)
    delimiters = [random_tensor(seed, width, dtype=dtype) for seed in (2, 3, 4)]
    source = torch.tensor([-1, 4, 0, -2, 3, 3, -2, 1, 2, -3, -1][:rows], dtype=torch.int32)
    assert_bitwise(vision_spans(features, *delimiters, source), ref.vision_spans(features, *delimiters, source))


def test_a_batch_without_cells_has_only_delimiters() -> None:
    features = torch.zeros(0, 96, dtype=BF16)
    delimiters = [random_tensor(seed, 96, dtype=BF16) for seed in (2, 3, 4)]
    out = vision_spans(features, *delimiters, torch.tensor([-1, -3], dtype=torch.int32))
    assert_bitwise(out, torch.stack([delimiters[0], delimiters[2]]))


def test_strided_tensors_are_refused() -> None:
    x, index = torch.zeros(4, 32, dtype=BF16), torch.zeros(2, 9, dtype=torch.int32)
    with pytest.raises(ValueError, match="expected contiguous tensors"):
        vision_merge(x[:, ::2], index)
    row = torch.zeros(32, dtype=BF16)
    with pytest.raises(ValueError, match="expected one width and contiguous tensors"):
        vision_spans(x, row, row[:16], row, torch.zeros(1, dtype=torch.int32))
