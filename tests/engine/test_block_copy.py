"""Stretches of slots that one copy takes."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefill_engine.rank.block_copy import slot_runs

SLOTS = st.lists(st.integers(0, 40), unique=True, max_size=40)


@pytest.mark.parametrize(
    ("sources", "targets", "runs"),
    [
        pytest.param((), (), [], id="none"),
        pytest.param((7,), (3,), [(7, 3, 1)], id="one"),
        pytest.param((4, 5, 6), (0, 1, 2), [(4, 0, 3)], id="whole"),
        pytest.param((4, 5, 6), (0, 1, 9), [(4, 0, 2), (6, 9, 1)], id="break-of-targets"),
        pytest.param((4, 5, 9), (0, 1, 2), [(4, 0, 2), (9, 2, 1)], id="break-of-sources"),
        pytest.param((6, 5, 4), (2, 1, 0), [(6, 2, 1), (5, 1, 1), (4, 0, 1)], id="backwards"),
    ],
)
def test_runs(sources: tuple[int, ...], targets: tuple[int, ...], runs: list[tuple[int, int, int]]) -> None:
    assert slot_runs(sources, targets) == runs


@given(SLOTS, SLOTS)
def test_runs_cover_every_pair_once_in_order_and_are_as_long_as_they_can_be(sources: list[int], targets: list[int]):
    pairs = list(zip(sources, targets, strict=False))
    runs = slot_runs([source for source, _ in pairs], [target for _, target in pairs])
    assert [(s + i, t + i) for s, t, length in runs for i in range(length)] == pairs
    for (source, target, length), following in pairwise(runs):
        assert (source + length, target + length) != following[:2]
