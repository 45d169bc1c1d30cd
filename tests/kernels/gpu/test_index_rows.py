"""Index keys and queries against ref, bit by bit: norm, RoPE and quantiser round in the same places."""

import pytest
import torch
from torch import Tensor

from prefill_kernels import ref
from prefill_kernels.gpu.chip import Chip
from prefill_kernels.gpu.index_rows import index_query, index_values, load_index, store_index
from prefill_kernels.number_formats import dequantise_fp4_ue8m0, unpack_fp4
from prefill_kernels.numerics import PRODUCTION
from prefill_kernels.ops import IndexRows
from prefill_kernels.rope_tables import rope_frequencies
from prefill_testing.numeric import assert_bitwise, random_tensor

pytestmark = pytest.mark.usefixtures("poisoned")
both_chips = pytest.mark.parametrize("chip", Chip)
# (head dim, rotated channels): the released model, the tiny one, all channels rotated.
DIMS = [(128, 64), (32, 16), (64, 64)]


def _frequencies(rope_dim: int) -> Tensor:
    return rope_frequencies(rope_dim=rope_dim, theta=160_000.0, yarn=(16.0, 32.0, 1.0, 65536))


def _pages(num_pages: int, entries: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """(blocks, data pages, scale pages): two sections inside larger blocks, everything poisoned."""
    data_bytes, scale_bytes = entries * dim // 2, entries * dim // 32
    blocks = torch.full((num_pages, 48 + data_bytes + scale_bytes + 16), 0x5A, dtype=torch.uint8)
    data, scales = blocks[:, 48 : 48 + data_bytes], blocks[:, 48 + data_bytes : 48 + data_bytes + scale_bytes]
    return blocks, data.unflatten(1, (entries, -1)), scales.unflatten(1, (entries, -1))


@pytest.mark.parametrize(("dim", "rope_dim"), DIMS)
@pytest.mark.parametrize("num_rows", [1, 45])
def test_stored_keys_have_the_bytes_of_ref_and_nothing_else_is_written(dim: int, rope_dim: int, num_rows: int) -> None:
    keys = random_tensor(1, num_rows, dim, dtype=torch.bfloat16, scale=3)
    keys[0] = 0
    weight = random_tensor(2, dim, dtype=torch.bfloat16)
    positions = torch.linspace(0, 130_000, num_rows).int()
    slots = torch.randperm(6 * 9, generator=torch.Generator().manual_seed(3))[:num_rows].int()
    slots[1::7] = -1
    blocks, *pages = _pages(6, 9, dim)
    expected, *expected_pages = _pages(6, 9, dim)
    arguments = (keys, weight, positions, _frequencies(rope_dim))
    store_index(*arguments, *pages, slots, eps=1e-20, numerics=PRODUCTION)
    ref.store_index(*arguments, *expected_pages, slots, eps=1e-20, numerics=PRODUCTION)
    assert_bitwise(blocks, expected)
    assert (blocks != 0x5A).any()


def test_no_keys_write_nothing() -> None:
    blocks, *pages = _pages(2, 3, 32)
    none = torch.empty(0, dtype=torch.int32)
    keys, weight = torch.empty(0, 32, dtype=torch.bfloat16), torch.ones(32, dtype=torch.bfloat16)
    store_index(keys, weight, none, _frequencies(16), *pages, none, eps=1e-20, numerics=PRODUCTION)
    assert (blocks == 0x5A).all()


@both_chips
@pytest.mark.parametrize("dim", [128, 32])
@pytest.mark.parametrize("num_rows", [0, 1, 45])
def test_loaded_keys_are_those_of_the_slots(chip: Chip, dim: int, num_rows: int) -> None:
    _, data, scales = _pages(6, 9, dim)
    generator = torch.Generator().manual_seed(4)
    data.copy_(torch.randint(0, 256, data.shape, generator=generator))
    scales.copy_(torch.randint(0, 255, scales.shape, generator=generator))  # scale 0 is 2 ** -127
    slots = torch.randint(-1, 54, (num_rows,), generator=generator).int()
    slots[:1] = 53
    loaded = load_index(data, scales, slots, numerics=PRODUCTION, chip=chip)
    assert (loaded.scales is None) == (chip is Chip.SM_90)
    expected = ref.load_index(data, scales, slots, numerics=PRODUCTION).data
    assert_bitwise(_values(loaded), expected)
    if num_rows:
        assert_bitwise(index_values(loaded, numerics=PRODUCTION), expected)


@both_chips
@pytest.mark.parametrize(("dim", "rope_dim"), DIMS)
def test_queries_are_rotated_and_quantised_as_ref_does(chip: Chip, dim: int, rope_dim: int) -> None:
    query = random_tensor(5, 7, 5, dim, dtype=torch.bfloat16, scale=3)
    query[2, 1] = -0.0
    positions = torch.tensor([0, 1, 2, 77, 4_095, 65_537, 131_071]).int()
    out = index_query(query, positions, _frequencies(rope_dim), numerics=PRODUCTION, chip=chip)
    assert (out.scales is None) == (chip is Chip.SM_90)
    expected = ref.index_query(query, positions, _frequencies(rope_dim), numerics=PRODUCTION).data
    assert_bitwise(_values(out), expected)
    assert_bitwise(index_values(out, numerics=PRODUCTION), expected)
    alone = index_query(query[5:6], positions[5:6], _frequencies(rope_dim), numerics=PRODUCTION, chip=chip)
    assert_bitwise(_values(alone), expected[5:6])


@both_chips
def test_no_queries(chip: Chip) -> None:
    query = torch.empty(0, 5, 64, dtype=torch.bfloat16)
    positions = torch.empty(0, dtype=torch.int32)
    out = index_query(query, positions, _frequencies(32), numerics=PRODUCTION, chip=chip)
    assert index_values(out, numerics=PRODUCTION).shape == (0, 5, 64)


def test_head_dims_and_pages_without_a_kernel_are_refused() -> None:
    with pytest.raises(ValueError, match="head dim is 96"):
        index_query(
            torch.zeros(1, 2, 96, dtype=torch.bfloat16),
            torch.zeros(1, dtype=torch.int32),
            _frequencies(32),
            numerics=PRODUCTION,
            chip=Chip.SM_90,
        )
    _, data, scales = _pages(2, 3, 64)
    with pytest.raises(ValueError, match="same pages"):
        load_index(data, scales[:1], torch.zeros(1, dtype=torch.int32), numerics=PRODUCTION, chip=Chip.SM_90)


def _values(rows: IndexRows) -> Tensor:
    """Decoded by number_formats."""
    if rows.scales is None:
        return rows.data
    return dequantise_fp4_ue8m0(unpack_fp4(rows.data), rows.scales).bfloat16()
