"""Snapshots taken and restored by the device's kernels against KvCache, whose images they must equal byte by byte."""

import pytest
import torch
from torch import Tensor

from prefill_engine.kv_cache import KvCache
from prefill_kernels.gpu.ring_rows import restore_images, take_images
from prefill_plan.config import RecordFormat
from prefill_plan.kv_layout import block_layout, state_layout
from prefill_plan.model_spec import released_model_spec
from prefill_testing.blocks import tiny_spec
from prefill_testing.numeric import assert_bitwise

SLOT = 1


@pytest.mark.parametrize(
    ("end", "first_valid"),
    [(0, 0), (1, 0), (7, 0), (22, 0), (23, 0), (100, 0), (250, 245), (250, 260), (137, -5)],
    ids=str,
)
def test_take_and_restore_equal_the_cache(end: int, first_valid: int) -> None:
    cache = _cache()
    rings = _rings(cache)
    rows = cache.state.snapshot_rows
    images = torch.full((cache.state.num_encoder_layers, cache.state.snapshot_layer_bytes), 0xA5, dtype=torch.uint8)
    take_images(rings, SLOT, images, image_rows=rows, end=end, first_valid=first_valid)
    expected = cache.take_snapshot(SLOT, end, first_valid=first_valid)
    assert images.numpy().tobytes() == expected

    images = _bytes(2, *images.shape)
    cache.restore_snapshot(SLOT, end, images.numpy().tobytes())
    before = images.clone()
    restore_images(images, rings, SLOT, image_rows=rows, end=end)
    assert_bitwise(rings, _rings(cache))
    assert_bitwise(images, before)


def test_one_layer_of_the_released_size() -> None:
    state = state_layout(released_model_spec(), keep_tokens=140, rollback_tokens=6)
    rings = _bytes(3, 1, 2, state.ring_rows, state.window_record_bytes)
    images = torch.full((1, state.snapshot_layer_bytes), 0xA5, dtype=torch.uint8)
    take_images(rings, 0, images, image_rows=state.snapshot_rows, end=100_000, first_valid=99_900)
    held = images[0, : state.snapshot_rows * state.window_record_bytes].view(state.snapshot_rows, -1)
    for token in range(100_000 - state.snapshot_rows, 100_000):
        row = rings[0, 0, token % state.ring_rows] if token >= 99_900 else torch.zeros_like(rings[0, 0, 0])
        assert_bitwise(held[token % state.snapshot_rows], row)


def test_layers_and_rows_of_no_whole_words() -> None:
    """17-byte rows of layers 1 and 2 of three, so bytes are what can be moved."""
    rings = _bytes(4, 3, 2, 5, 17)
    images = torch.full((2, 4 * 17 + 3), 0xA5, dtype=torch.uint8)
    take_images(rings[1:], SLOT, images, image_rows=4, end=9, first_valid=6)
    for layer in range(2):
        rows = images[layer, : 4 * 17].view(4, 17)
        assert_bitwise(rows[[6 % 4, 7 % 4, 8 % 4]], rings[1 + layer, SLOT, [6 % 5, 7 % 5, 8 % 5]])
        assert not rows[5 % 4].any()
        assert not images[layer, 4 * 17 :].any()
    target = torch.full_like(rings, 0xA5)
    restore_images(images, target[1:], SLOT, image_rows=4, end=9)
    assert_bitwise(target[1:, SLOT, [6 % 5, 7 % 5, 8 % 5]], rings[1:, SLOT, [6 % 5, 7 % 5, 8 % 5]])
    target[1:, SLOT, [5 % 5, 6 % 5, 7 % 5, 8 % 5]] = 0xA5
    assert (target == 0xA5).all()


@pytest.mark.parametrize(("image_rows", "slot", "image_bytes"), [(6, 0, 200), (5, 2, 200), (5, 0, 84), (0, 0, 200)])
def test_images_that_cannot_hold_the_rows_are_refused(image_rows: int, slot: int, image_bytes: int) -> None:
    rings, images = torch.zeros(1, 2, 5, 17, dtype=torch.uint8), torch.zeros(1, image_bytes, dtype=torch.uint8)
    with pytest.raises(ValueError, match="expected one contiguous image per layer"):
        take_images(rings, slot, images, image_rows=image_rows, end=3, first_valid=0)
    with pytest.raises(ValueError, match="expected one contiguous image per layer"):
        restore_images(images, rings, slot, image_rows=image_rows, end=3)


def _cache() -> KvCache:
    spec = tiny_spec()
    cache = KvCache(
        spec,
        layout=block_layout(spec, RecordFormat.FP4),
        state=state_layout(spec, keep_tokens=24, rollback_tokens=6),
        num_blocks=1,
        num_state_slots=3,
        device=torch.device("cpu"),
    )
    for layer in range(cache.state.num_layers):
        ring = cache.window_ring(layer)
        ring.copy_(_bytes(layer, *ring.shape))
    return cache


def _rings(cache: KvCache) -> Tensor:
    return torch.stack([cache.window_ring(layer) for layer in range(cache.state.num_encoder_layers)])


def _bytes(seed: int, *shape: int) -> Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
