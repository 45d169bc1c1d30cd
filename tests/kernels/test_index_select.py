"""Indexer against a brute-force sort: exact on integer scores full of ties, and on random ones."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from prefill_kernels.numerics import PRODUCTION, Numerics
from prefill_kernels.ops import IndexRows, IndexSelection
from prefill_kernels.ref import index_select
from prefill_testing.numeric import (
    ALL_NUMERICS,
    BFLOAT16,
    FLOAT32,
    FLOAT64,
    assert_bitwise,
    fraction_equal,
    random_tensor,
)

# 2 heads of 32 channels: the scale 64 ** -0.5 is a power of two, so integer inputs give exact scores in bfloat16 too.
HEADS, DIM = 2, 32


@pytest.mark.parametrize("numerics", ALL_NUMERICS.values(), ids=ALL_NUMERICS.keys())
@pytest.mark.parametrize("num_entries", [1, 5, 255, 256, 257, 600])
def test_tied_scores_select_the_lowest_indices(numerics: Numerics, num_entries: int) -> None:
    query, weight, keys = _integer_inputs(20, num_entries, numerics)
    num_visible = torch.randint(0, num_entries + 1, (20,), generator=torch.Generator().manual_seed(1)).int()
    out = _select(query, weight, keys, num_visible, numerics, topk=7)
    scores = _slow_scores(query, weight, keys)
    assert out.candidates is None
    assert out.entries.dtype == torch.int32
    for n in range(20):
        assert out.entries[n].tolist() == _best(scores[n][: int(num_visible[n])], 7)


def test_several_sequences_never_see_each_other() -> None:
    query, weight, keys = _integer_inputs(40, 700, FLOAT32)
    lengths, counts = [300, 1, 399], [18, 3, 19]
    starts = torch.tensor([0, 300, 301]).repeat_interleave(torch.tensor(counts)).int()
    num_visible = torch.tensor([*range(270, 288), 0, 1, 1, *range(381, 400)]).int()
    query_rows, key_rows = IndexRows(data=query), IndexRows(data=keys)
    out = index_select(query_rows, weight, key_rows, starts, num_visible, topk=5, max_visible=399, numerics=FLOAT32)
    assert torch.equal(out.rows, torch.where(out.entries < 0, -1, out.entries + starts[:, None]))
    scores = _slow_scores(query, weight, keys)
    assert sum(lengths) == 700
    for n in range(40):
        first = int(starts[n])
        assert out.entries[n].tolist() == _best(scores[n][first : first + int(num_visible[n])], 5)


@pytest.mark.parametrize("numerics", [FLOAT32, FLOAT64, PRODUCTION], ids=["float32", "float64", "production"])
def test_candidate_blocks_pin_the_newest_and_rank_the_rest(numerics: Numerics) -> None:
    query, weight, keys = _integer_inputs(30, 90, numerics)
    num_visible = torch.arange(0, 90, 3).int()
    out = _select(query, weight, keys, num_visible, numerics, topk=4, candidate_block=8, num_candidate_blocks=3)
    plain = _select(query, weight, keys, num_visible, numerics, topk=4)
    assert_bitwise(out.entries, plain.entries)
    scores = _slow_scores(query, weight, keys)
    assert out.candidates is not None
    for n in range(30):
        visible = scores[n][: int(num_visible[n])]
        block_scores = [max(visible[b : b + 8]) for b in range(0, len(visible), 8)]
        if block_scores:
            block_scores[-1] = float("inf")
        assert out.candidates[n].tolist() == _best(block_scores, 3)


def test_infinite_scores_do_not_displace_the_newest_block() -> None:
    query, weight, keys = (torch.full(shape, 1e30) for shape in ((1, HEADS, DIM), (1, HEADS), (30, DIM)))
    out = _select(
        query, weight, keys, torch.tensor([26]).int(), FLOAT32, topk=2, candidate_block=8, num_candidate_blocks=1
    )
    assert out.candidates is not None
    assert out.candidates.tolist() == [[3]]


def test_consumers_select_inside_the_blocks_only() -> None:
    query, weight, keys = _integer_inputs(25, 61, FLOAT32)
    num_visible = torch.arange(37, 62).int()
    candidates = torch.tensor([[0, 3, 4], [2, 7, -1], [1, -1, -1], [-1, -1, -1], [5, 6, 7]]).repeat(5, 1).int()
    out = _select(query, weight, keys, num_visible, FLOAT32, topk=6, candidates_NB=candidates, candidate_block=8)
    scores = _slow_scores(query, weight, keys)
    for n in range(25):
        inside = set(candidates[n].tolist())
        visible = [
            score if j // 8 in inside else float("-inf") for j, score in enumerate(scores[n][: int(num_visible[n])])
        ]
        assert out.entries[n].tolist() == _best(visible, 6)
    assert (out.entries[3] == -1).all()


def test_random_scores_select_the_best_in_float64() -> None:
    query = random_tensor(1, 33, 3, 40, dtype=torch.float64)
    weight, keys = random_tensor(2, 33, 3, dtype=torch.float64), random_tensor(3, 310, 40, dtype=torch.float64)
    num_visible = torch.linspace(0, 310, 33).int()
    out = _select(query, weight, keys, num_visible, FLOAT64, topk=9)
    scores = _slow_scores(query, weight, keys)
    for n in range(33):
        assert out.entries[n].tolist() == _best(scores[n][: int(num_visible[n])], 9)


def test_bfloat16_scores_round_at_every_point_of_profile_r() -> None:
    query, weight, keys = (
        random_tensor(seed, *shape, dtype=torch.bfloat16)
        for seed, shape in ((4, (64, 4, 32)), (5, (64, 4)), (6, (900, 32)))
    )
    num_visible = torch.full((64,), 900, dtype=torch.int32)
    out = _select(query, weight, keys, num_visible, BFLOAT16, topk=20).entries
    scaled = (weight.double() * (32 * 4) ** -0.5).bfloat16().double()
    dots = torch.einsum("nhi,ei->nhe", query.double(), keys.double()).bfloat16().double().clamp_min(0)
    rounded = (dots * scaled.unsqueeze(-1)).bfloat16().double().sum(1).bfloat16()
    unrounded = _slow_scores(query, weight, keys)
    rounded_picks = torch.tensor([_best(row, 20) for row in rounded.double().tolist()])
    assert fraction_equal(out, rounded_picks) > 0.995
    assert fraction_equal(out, torch.tensor([_best(row, 20) for row in unrounded])) < 0.98


def test_no_rows_select_nothing() -> None:
    query, weight, keys = _integer_inputs(0, 10, PRODUCTION)
    out = _select(query, weight, keys, torch.empty(0, dtype=torch.int32), PRODUCTION, topk=3)
    assert out.entries.shape == (0, 3)


@settings(max_examples=25, deadline=None)
@given(data=st.data(), numerics=st.sampled_from([FLOAT32, PRODUCTION]))
def test_selection_is_the_same_in_any_batch_and_chunking(data: st.DataObject, numerics: Numerics) -> None:
    num_rows, num_entries = 50, 330
    query = random_tensor(7, num_rows, 4, 32, dtype=numerics.activation)
    weight = random_tensor(8, num_rows, 4, dtype=numerics.activation)
    keys = random_tensor(9, num_entries, 32, dtype=numerics.activation)
    num_visible = torch.arange(num_entries - num_rows, num_entries).int()
    options = {"topk": 12, "candidate_block": 8, "num_candidate_blocks": 6}
    whole = _select(query, weight, keys, num_visible, numerics, **options)
    first = data.draw(st.integers(0, num_rows - 1))
    last = data.draw(st.integers(first + 1, num_rows))
    before, after = data.draw(st.integers(0, 40)), data.draw(st.integers(0, 40))
    other = random_tensor(10, before + after, 4, 32, dtype=numerics.activation)
    keys_before = data.draw(st.integers(1, 270))
    batch_query = torch.cat([other[:before], query[first:last], other[before:]])
    batch_weight = torch.cat([other[:before, :, 0], weight[first:last], other[before:, :, 0]])
    shown = int(num_visible[last - 1])  # a chunk has only the entries up to its end
    batch_keys = torch.cat([random_tensor(11, keys_before, 32, dtype=numerics.activation), keys[:shown], keys[:9]])
    count = last - first
    starts = torch.tensor([0] * before + [keys_before] * count + [keys_before + shown] * after).int()
    visible = torch.cat([torch.full((before,), keys_before), num_visible[first:last], torch.full((after,), 9)]).int()
    query_rows, key_rows = IndexRows(data=batch_query), IndexRows(data=batch_keys)
    out = index_select(
        query_rows, batch_weight, key_rows, starts, visible, max_visible=num_entries, numerics=numerics, **options
    )
    assert whole.candidates is not None
    assert out.candidates is not None
    assert_bitwise(out.entries[before : before + count], whole.entries[first:last])
    assert_bitwise(out.candidates[before : before + count], whole.candidates[first:last])


def _integer_inputs(num_rows: int, num_entries: int, numerics: Numerics) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_entries)
    query = torch.randint(-1, 2, (num_rows, HEADS, DIM), generator=generator)
    weight = torch.randint(-2, 3, (num_rows, HEADS), generator=generator)
    keys = torch.randint(-1, 2, (num_entries, DIM), generator=generator)
    return query.to(numerics.activation), weight.to(numerics.activation), keys.to(numerics.activation)


def _select(
    query: Tensor,
    weight: Tensor,
    keys: Tensor,
    num_visible: Tensor,
    numerics: Numerics,
    *,
    topk: int,
    candidates_NB: Tensor | None = None,
    candidate_block: int = 0,
    num_candidate_blocks: int = 0,
) -> IndexSelection:
    return index_select(
        IndexRows(data=query),
        weight,
        IndexRows(data=keys),
        torch.zeros_like(num_visible),
        num_visible,
        topk=topk,
        max_visible=int(num_visible.max()) if len(num_visible) else 0,
        numerics=numerics,
        candidates_NB=candidates_NB,
        candidate_block=candidate_block,
        num_candidate_blocks=num_candidate_blocks,
    )


def _slow_scores(query: Tensor, weight: Tensor, keys: Tensor) -> list[list[float]]:
    """Unrounded, in float64."""
    dots = torch.einsum("nhi,ei->nhe", query.double(), keys.double()).clamp_min(0)
    scale = (query.shape[1] * query.shape[2]) ** -0.5
    return (torch.einsum("nhe,nh->ne", dots, weight.double()) * scale).tolist()


def _best(scores: list[float], k: int) -> list[int]:
    seen = [j for j, score in enumerate(scores) if score > float("-inf")]
    picked = sorted(sorted(seen, key=lambda j: (-scores[j], j))[:k])
    return picked + [-1] * (k - len(picked))
