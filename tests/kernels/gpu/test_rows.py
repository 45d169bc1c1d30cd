"""gather_rows and scatter_rows on the chip's kernels: every byte, of every width, through strided pages."""

import pytest
import torch
from torch import Tensor

from prefill_kernels import ref
from prefill_kernels.gpu.rows import CopyTile, gather_rows, plan_tile, plan_words, scatter_rows
from prefill_testing.numeric import assert_bitwise, random_tensor

pytestmark = pytest.mark.usefixtures("poisoned")
WIDTHS = [
    (torch.uint8, 288),
    (torch.uint8, 68),
    (torch.uint8, 1),
    (torch.uint8, 33),
    (torch.bfloat16, 5),
    (torch.float32, 520),
]


@pytest.mark.parametrize(
    ("counts", "word"),
    [((288, 114688), 8), ((68,), 4), ((288, 6), 2), ((8, 8, 33), 1), ((64, 0), 8), ((16, 1 << 40), 8)],
)
def test_word_is_the_widest_that_divides_everything(counts: tuple[int, ...], word: int) -> None:
    assert plan_words(*counts) == word


@pytest.mark.parametrize(("num_words", "rows", "words"), [(1, 2048, 1), (36, 32, 64), (512, 4, 512), (5120, 4, 512)])
def test_tile_keeps_its_size(num_words: int, rows: int, words: int) -> None:
    assert plan_tile(num_words) == CopyTile(rows=rows, words=words)


@pytest.mark.parametrize(("dtype", "width"), WIDTHS, ids=str)
def test_gather_and_scatter_flat_rows(dtype: torch.dtype, width: int) -> None:
    pool = _bits(1, 50, width, dtype=dtype)
    index = _index([49, -1, 0, 7, 50, 7, -9, 2**31 - 1])
    assert_bitwise(gather_rows(pool, index), ref.gather_rows(pool, index))
    rows, expected = _bits(2, 4, width, dtype=dtype), pool.clone()
    unique = _index([3, -1, 49, 0])
    ref.scatter_rows(expected, unique, rows)
    scatter_rows(pool, unique, rows)
    assert_bitwise(pool, expected)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(("offset", "stride", "width"), [(0, 512, 64), (24, 520, 8), (3, 517, 31), (4, 516, 4)])
def test_pages_inside_larger_blocks(offset: int, stride: int, width: int, index_dtype: torch.dtype) -> None:
    num_pages, entries = 6, 5
    blocks = _bits(3, num_pages, stride, dtype=torch.uint8)
    pages = blocks[:, offset : offset + entries * width].view(num_pages, entries, width)
    index = torch.tensor([29, 0, 4, 5, -1, 13, 30], dtype=index_dtype)
    assert_bitwise(gather_rows(pages, index), ref.gather_rows(pages, index))
    expected = blocks.clone()
    rows = _bits(4, 3, width, dtype=torch.uint8)
    target = torch.tensor([29, -1, 5], dtype=index_dtype)
    ref.scatter_rows(expected[:, offset : offset + entries * width].view(num_pages, entries, width), target, rows)
    scatter_rows(pages, target, rows)
    assert_bitwise(blocks, expected)


def test_more_rows_than_a_tile_and_rows_wider_than_one() -> None:
    pool = _bits(5, 9, 1100 * 8, dtype=torch.uint8)
    index = torch.arange(70, dtype=torch.int32).flip(0) % 11 - 1
    assert_bitwise(gather_rows(pool, index), ref.gather_rows(pool, index))


def test_scatter_takes_strided_rows_and_leaves_all_else() -> None:
    pool, wide = _bits(6, 40, 24, dtype=torch.uint8), _bits(7, 40, 64, dtype=torch.uint8)
    expected, index = pool.clone(), _index([*range(39, 4, -1), -1, -1, 2, 1, 0])
    ref.scatter_rows(expected, index, wide[:, 8:32])
    scatter_rows(pool, index, wide[:, 8:32])
    assert_bitwise(pool, expected)


def test_nothing_to_move() -> None:
    none = torch.empty(0, dtype=torch.int32)
    assert gather_rows(torch.ones(3, 2), none).shape == (0, 2)
    assert gather_rows(torch.ones(3, 0), _index([1, 2])).shape == (2, 0)
    assert gather_rows(torch.ones(0, 2), _index([0, -1])).tolist() == [[0, 0], [0, 0]]
    pool = torch.ones(3, 2)
    scatter_rows(pool, none, torch.empty(0, 2))
    scatter_rows(pool, _index([-1]), torch.zeros(1, 2))
    assert pool.tolist() == [[1, 1]] * 3


def test_rows_of_another_kind_are_refused() -> None:
    with pytest.raises(ValueError, match="expected one row of x's width and dtype per index"):
        scatter_rows(torch.ones(3, 2), _index([0]), torch.ones(1, 2, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="expected contiguous rows"):
        gather_rows(torch.ones(4, 4).t()[:, ::2], _index([0]))


def _bits(seed: int, *shape: int, dtype: torch.dtype) -> Tensor:
    return random_tensor(seed, *shape, scale=70).to(dtype) if dtype.is_floating_point else _bytes(seed, *shape)


def _bytes(seed: int, *shape: int) -> Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def _index(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)
