import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prefill_kernels.ref.top_k import mask_to_indices, top_k_mask

SCORES = st.sampled_from([-torch.inf, -1.0, -0.0, 0.0, 0.5, 2.0, torch.inf])


@given(
    rows=st.integers(1, 30).flatmap(
        lambda n: st.lists(st.lists(SCORES, min_size=n, max_size=n), min_size=1, max_size=4)
    ),
    k=st.integers(1, 33),
)
def test_selection_is_a_stable_sort(rows: list[list[float]], k: int) -> None:
    picked = mask_to_indices(top_k_mask(torch.tensor(rows), k), k).tolist()
    for row, actual in zip(rows, picked, strict=True):
        visible = [j for j, score in enumerate(row) if score > -torch.inf]
        best = sorted(sorted(visible, key=lambda j: (-row[j], j))[:k])
        assert actual == best + [-1] * (k - len(best))


@pytest.mark.parametrize("num_rows", [0, 3])
def test_rows_that_see_nothing_select_nothing(num_rows: int) -> None:
    mask = top_k_mask(torch.full((num_rows, 5), -torch.inf), 2)
    assert mask_to_indices(mask, 2).tolist() == [[-1, -1]] * num_rows
