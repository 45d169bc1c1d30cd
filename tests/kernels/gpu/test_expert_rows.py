"""Grouping of (row, slot) pairs by expert against a loop, and the launches' bounds."""

import pytest
import torch
from torch import Tensor

from prefill_kernels.gpu.expert_rows import TILE_ROWS, clear_absent_slots, count_tiles, group_rows
from prefill_testing.numeric import assert_bitwise


def _expert_ids(num_rows: int, topk: int, num_experts: int, seed: int) -> Tensor:
    """[N, K] int32, distinct and ascending per row, low ids more often."""
    generator = torch.Generator().manual_seed(seed)
    chance = 1 / (1 + torch.arange(num_experts, dtype=torch.float32))
    return torch.multinomial(chance.expand(num_rows, -1), topk, generator=generator).sort(1).values.int()


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    ("num_rows", "topk", "num_experts", "first_expert", "num_local"),
    [
        pytest.param(1, 1, 4, 0, 4, id="one pair"),
        pytest.param(1, 3, 9, 3, 2, id="one row of another rank or two"),
        pytest.param(700, 3, 9, 0, 9, id="several blocks, tiles and a part of one"),
        pytest.param(700, 3, 9, 4, 3, id="the middle of the experts"),
        pytest.param(400, 6, 384, 52, 52, id="an EP8 rank"),
        pytest.param(200, 6, 384, 0, 384, id="all experts, most with few rows"),
    ],
)
def test_pairs_are_grouped_by_expert_in_order(
    num_rows: int, topk: int, num_experts: int, first_expert: int, num_local: int
) -> None:
    expert_ids = _expert_ids(num_rows, topk, num_experts, seed=num_rows + first_expert)
    rows = group_rows(expert_ids, first_expert=first_expert, num_local=num_local)

    expected_pairs, expected_tiles = [], []
    for local in range(num_local):
        pairs = (expert_ids.flatten() == first_expert + local).nonzero().flatten().tolist()
        for start in range(0, len(pairs), TILE_ROWS):
            expected_tiles.append([local, len(expected_pairs) + start, min(TILE_ROWS, len(pairs) - start)])
        expected_pairs += pairs
    assert rows.pairs[: len(expected_pairs)].tolist() == expected_pairs
    assert rows.tiles[: len(expected_tiles)].tolist() == expected_tiles
    assert not rows.tiles[len(expected_tiles) :, 2].any()


def test_ids_of_no_expert_are_left_out() -> None:
    expert_ids = torch.tensor([[-1, 2, 512], [1, 2, 2**31 - 1]], dtype=torch.int32)
    rows = group_rows(expert_ids, first_expert=1, num_local=2)
    assert rows.pairs[:3].tolist() == [3, 1, 4]
    assert rows.tiles.tolist() == [[0, 0, 1], [1, 1, 2]]


@pytest.mark.parametrize(
    ("num_pairs", "num_local", "expected"),
    [(1, 52, 1), (2, 52, 2), (52, 52, 52), (128, 1, 1), (129, 1, 2), (129, 2, 2), (256, 2, 3), (257, 2, 3)],
)
def test_the_worst_case_of_tiles_is_tight(num_pairs: int, num_local: int, expected: int) -> None:
    worst = max(_most_tiles(num_pairs, num_local))
    assert count_tiles(num_pairs, num_local) == worst == expected


def _most_tiles(num_pairs: int, num_local: int) -> list[int]:
    """Tiles when all experts but one have `rows` rows each."""
    counts = [[rows] * (num_local - 1) for rows in range(num_pairs + 1) if rows * (num_local - 1) <= num_pairs]
    if num_pairs < num_local:
        counts.append([1] * num_pairs + [0] * (num_local - 1 - num_pairs))
    return [
        sum(-(-rows // TILE_ROWS) for rows in (*few, num_pairs - sum(few))) for few in counts if sum(few) <= num_pairs
    ]


def test_only_absent_slots_are_cleared() -> None:
    expert_ids = _expert_ids(13, 3, 9, seed=4)
    out = torch.full((13, 3, 1100), torch.nan, dtype=torch.bfloat16)
    expected = out.clone()
    expected[(expert_ids < 2) | (expert_ids >= 6)] = 0
    clear_absent_slots(out, expert_ids, first_expert=2, num_local=4)
    assert_bitwise(out, expected)
