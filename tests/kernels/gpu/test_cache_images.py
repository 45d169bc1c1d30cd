"""A cache whose rings are moved by the device's kernels gives and takes the same bytes as one without."""

import pytest
import torch

from prefill_engine.kv_cache import KvCache, RingImages
from prefill_kernels.gpu import ring_rows
from prefill_plan.config import RecordFormat
from prefill_plan.kv_layout import block_layout, state_layout
from prefill_testing.blocks import tiny_spec
from prefill_testing.numeric import assert_bitwise

SLOT = 1


def make_cache(images: RingImages | None) -> KvCache:
    spec = tiny_spec()
    cache = KvCache(
        spec,
        layout=block_layout(spec, RecordFormat.FP4),
        state=state_layout(spec, keep_tokens=24, rollback_tokens=6),
        num_blocks=1,
        num_state_slots=3,
        device=torch.device("cpu"),
        images=images,
    )
    generator = torch.Generator().manual_seed(7)
    for layer in range(cache.state.num_layers):
        ring = cache.window_ring(layer)
        ring.copy_(torch.randint(0, 256, ring.shape, generator=generator, dtype=torch.uint8))
    return cache


@pytest.mark.parametrize(("end", "first"), [(7, 0), (250, 240), (250, 0)], ids=str)
def test_snapshots_and_hand_over_state_are_the_same_bytes(end: int, first: int) -> None:
    plain, device = make_cache(None), make_cache(ring_rows)
    taken = plain.take_snapshot(SLOT, end, first_valid=first)
    state = plain.export_state(SLOT, end, first_valid=first, decoder_floor=max(0, end - 5))
    assert device.take_snapshot(SLOT, end, first_valid=first) == taken
    assert device.export_state(SLOT, end, first_valid=first, decoder_floor=max(0, end - 5)) == state
    for cache in (plain, device):
        cache.clear_state(SLOT)
        cache.import_state(SLOT, end, state)
        cache.restore_snapshot(SLOT, end, taken)
    for layer in range(plain.state.num_layers):
        assert_bitwise(device.window_ring(layer), plain.window_ring(layer))
