"""Main KV entries into strided pages and back, against ref: every byte of the block, records and what lies between them."""

import pytest
import torch
from torch import Tensor

from prefill_kernels import ref
from prefill_kernels.gpu.main_entries import load_main, store_main
from prefill_kernels.numerics import PRODUCTION
from prefill_kernels.ref.records import encode_main
from prefill_kernels.rope_tables import rope_frequencies
from prefill_testing.numeric import assert_bitwise, random_tensor

pytestmark = pytest.mark.usefixtures("poisoned")
NUM_PAGES, ENTRIES = 6, 7
both_formats = pytest.mark.parametrize("record_format", ["fp4", "fp8"])


def _pages(record_format: str, width: int) -> tuple[Tensor, Tensor]:
    """(blocks, pages inside them), everything poisoned."""
    record = width // 2 + width // 16 if record_format == "fp4" else width + width // 32
    blocks = torch.full((NUM_PAGES, 48 + ENTRIES * record + 80), 0x5A, dtype=torch.uint8)
    return blocks, blocks[:, 48 : 48 + ENTRIES * record].unflatten(1, (ENTRIES, record))


def _case(num_rows: int, width: int, rope_dim: int) -> dict[str, Tensor]:
    """Latents of very different sizes: all scales of e4m3 and its limits, zeros of both signs; slots in any order."""
    latent = random_tensor(1, num_rows, width) * torch.logspace(-4, 4, num_rows).unsqueeze(-1)
    if num_rows > 3:
        latent[2] = 0
        latent[3, ::2] = -0.0
    positions = torch.linspace(0, 131_070, num_rows).int()
    positions[3:4] = 0  # an angle of 0 keeps the sign of a zero
    slots = torch.randperm(NUM_PAGES * ENTRIES, generator=torch.Generator().manual_seed(2))[:num_rows].int()
    slots[1::5] = -1
    return {
        "latent_GC": latent.bfloat16(),
        "positions_G": positions,
        "frequencies": rope_frequencies(rope_dim=rope_dim, theta=160_000.0, yarn=(16.0, 32.0, 1.0, 65536)),
        "slots_G": slots,
    }


@both_formats
@pytest.mark.parametrize(("width", "rope_dim"), [(512, 64), (64, 16)])
@pytest.mark.parametrize("num_rows", [0, 1, 37])
def test_stored_entries_have_the_bytes_of_ref_and_nothing_else_is_written(
    num_rows: int, width: int, rope_dim: int, record_format: str
) -> None:
    case = _case(num_rows, width, rope_dim)
    blocks, pages = _pages(record_format, width)
    expected, expected_pages = _pages(record_format, width)
    store_main(**case, pages_ZER=pages, record_format=record_format, numerics=PRODUCTION)
    ref.store_main(**case, pages_ZER=expected_pages, record_format=record_format, numerics=PRODUCTION)
    assert_bitwise(blocks, expected)
    assert bool((blocks != 0x5A).any()) == (num_rows > 0)


@both_formats
@pytest.mark.parametrize("width", [512, 64])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_loaded_entries_have_the_bits_of_ref(width: int, record_format: str, index_dtype: torch.dtype) -> None:
    _, pages = _pages(record_format, width)
    kv = random_tensor(3, NUM_PAGES * ENTRIES, width) * torch.logspace(-3, 3, NUM_PAGES * ENTRIES).unsqueeze(-1)
    records = encode_main(kv.bfloat16(), record_format=record_format, numerics=PRODUCTION)
    pages.copy_(records.unflatten(0, (NUM_PAGES, ENTRIES)))
    slots = torch.tensor([41, 0, -1, 6, 7, 13, 14, 0, 40, -7, 42, 29], dtype=index_dtype)
    actual = load_main(pages, slots, record_format=record_format, numerics=PRODUCTION)
    expected = ref.load_main(pages, slots, record_format=record_format, numerics=PRODUCTION)
    assert_bitwise(actual, expected)
    assert not actual[[2, 9, 10]].any()
    assert load_main(pages, slots[:0], record_format=record_format, numerics=PRODUCTION).shape == (0, width)


def test_a_slot_beyond_the_pages_writes_nothing() -> None:
    case = _case(5, 64, 16)
    case["slots_G"] = torch.tensor([42, -1, 2**30, 3, -(2**31)], dtype=torch.int32)
    blocks, pages = _pages("fp4", 64)
    store_main(**case, pages_ZER=pages, record_format="fp4", numerics=PRODUCTION)
    written = (pages != 0x5A).any(-1).flatten().nonzero().flatten()
    assert written.tolist() == [3]
    assert (blocks[1:] == 0x5A).all()


def test_entry_is_the_same_in_any_batch() -> None:
    case = _case(37, 64, 16)
    _, pages = _pages("fp4", 64)
    _, again = _pages("fp4", 64)
    store_main(**case, pages_ZER=pages, record_format="fp4", numerics=PRODUCTION)
    for start in (0, 5, 31):
        part = {name: value if name == "frequencies" else value[start:][:26] for name, value in case.items()}
        store_main(**part, pages_ZER=again, record_format="fp4", numerics=PRODUCTION)
    assert_bitwise(again, pages)


def test_wrong_formats_are_refused() -> None:
    case = _case(3, 64, 16)
    _, pages = _pages("fp4", 64)
    with pytest.raises(ValueError, match="record format is 'fp5': expected 'fp4' or 'fp8'"):
        store_main(**case, pages_ZER=pages, record_format="fp5", numerics=PRODUCTION)
    with pytest.raises(ValueError, match="expected contiguous uint8 records of 66 bytes for 64 channels"):
        store_main(**case, pages_ZER=pages, record_format="fp8", numerics=PRODUCTION)
    with pytest.raises(ValueError, match="record format is 'raw'"):
        load_main(pages, case["slots_G"], record_format="raw", numerics=PRODUCTION)
