import pytest
import torch

from prefill_kernels.ref import gather_rows, scatter_rows
from prefill_testing.numeric import assert_bitwise, random_tensor


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32], ids=str)
def test_gather_copies_rows_and_zeroes_absent_ones(dtype: torch.dtype) -> None:
    x = random_tensor(1, 5, 7, scale=50).to(dtype)
    out = gather_rows(x, torch.tensor([4, -1, 0, 0, 5], dtype=torch.int32))
    assert_bitwise(out, torch.stack([x[4], torch.zeros_like(x[0]), x[0], x[0], torch.zeros_like(x[0])]))


def test_gather_of_nothing_is_empty() -> None:
    assert gather_rows(torch.ones(3, 2), torch.empty(0, dtype=torch.int32)).shape == (0, 2)
    assert gather_rows(torch.ones(0, 2), torch.tensor([0, -1])).tolist() == [[0, 0], [0, 0]]


def test_gather_reads_pages_inside_strided_blocks() -> None:
    blocks = random_tensor(2, 3, 40, scale=50).to(torch.uint8)
    pages = blocks[:, 4:34].view(torch.uint8).as_strided((3, 5, 6), (40, 6, 1), 4)
    out = gather_rows(pages, torch.tensor([14, 0, 7, 15], dtype=torch.int32))
    expected = torch.stack([blocks[2, 28:34], blocks[0, 4:10], blocks[1, 16:22], torch.zeros(6, dtype=torch.uint8)])
    assert_bitwise(out, expected)


def test_scatter_writes_named_rows_only() -> None:
    x = random_tensor(3, 6, 4)
    before = x.clone()
    rows = random_tensor(4, 3, 4)
    scatter_rows(x, torch.tensor([5, -1, 2], dtype=torch.int32), rows)
    assert_bitwise(x[[5, 2]], rows[[0, 2]])
    assert_bitwise(x[[0, 1, 3, 4]], before[[0, 1, 3, 4]])


def test_scatter_into_pages_leaves_the_rest_of_the_block() -> None:
    blocks = random_tensor(5, 2, 20, scale=50).to(torch.uint8)
    before = blocks.clone()
    pages = blocks.as_strided((2, 3, 4), (20, 4, 1), 6)
    rows = torch.full((2, 4), 201, dtype=torch.uint8)
    scatter_rows(pages, torch.tensor([1, 5], dtype=torch.int32), rows)
    before[0, 10:14] = 201
    before[1, 14:18] = 201
    assert_bitwise(blocks, before)


def test_scatter_beyond_the_last_row_is_refused() -> None:
    with pytest.raises(IndexError):
        scatter_rows(torch.zeros(2, 3), torch.tensor([2]), torch.ones(1, 3))
