"""pool_pairs against ref: the same pairs from the same places, the ring bit by bit, values up to the rounding of exp."""

import pytest
import torch
from torch import Tensor

from prefill_kernels import ref
from prefill_kernels.gpu.pool_pairs import pool_pairs
from prefill_kernels.numerics import PRODUCTION
from prefill_testing.numeric import assert_bitwise, assert_close, fraction_equal, random_tensor

pytestmark = pytest.mark.usefixtures("poisoned")
RING_ROWS = 7
EPS = 1e-20


class Step:
    """Chunks of several sequences: (state slot, position of the first row, rows) each."""

    def __init__(self, *chunks: tuple[int, int, int], width: int = 64) -> None:
        self.slots, self.starts, counts = (torch.tensor(part, dtype=torch.int32) for part in zip(*chunks, strict=True))
        self.cu_rows = torch.cat([torch.zeros(1, dtype=torch.int32), counts.cumsum(0).int()])
        self.latent = random_tensor(1, int(counts.sum()), width)
        self.score = random_tensor(2, int(counts.sum()), width, scale=2)
        self.weight = random_tensor(3, width, dtype=torch.bfloat16)
        self.state = random_tensor(4, 6, RING_ROWS, 2, width)
        self.num_groups = sum((start + count) // 2 - start // 2 for _, start, count in chunks)

    def run(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(pooled, state after) of the kernel, then of ref."""
        results = []
        for op in (pool_pairs, ref.pool_pairs):
            state = self.state.clone()
            pooled = op(
                self.latent,
                self.score,
                self.weight,
                state,
                self.slots,
                self.starts,
                self.cu_rows,
                num_groups=self.num_groups,
                eps=EPS,
                numerics=PRODUCTION,
            )
            results += [pooled, state]
        return results[0], results[1], results[2], results[3]


@pytest.mark.parametrize(
    "chunks",
    [
        [(2, 0, 9)],
        [(0, 5, 1)],  # closes with the ring's token
        [(0, 4, 1)],  # closes nothing
        [(1, 7, 30)],  # the carried token's ring row is overwritten by this step
        [(3, 0, 3), (0, 11, 4), (-1, 1, 3), (5, 6, 0), (4, 3, 0), (1, 99, 22), (2, 131_070, 2)],
        [*((-1, start, 1 + start % 3) for start in range(17)), (3, 5, 4)],  # more than one kernel's sixteen
    ],
    ids=str,
)
def test_pairs_and_ring_are_those_of_ref(chunks: list[tuple[int, int, int]]) -> None:
    pooled, state, expected, expected_state = Step(*chunks).run()
    assert pooled.dtype == torch.bfloat16
    assert pooled.shape == expected.shape
    assert_bitwise(state, expected_state)
    assert_close(pooled, expected, dtype=torch.bfloat16)
    # exp differs by an ulp at most: a bf16 rounding flips about once in 2**15.
    assert fraction_equal(pooled, expected) > 0.999 or not pooled.numel()


def test_released_width() -> None:
    pooled, state, expected, expected_state = Step((1, 1, 6), (0, 0, 5), width=512).run()
    assert_bitwise(state, expected_state)
    assert fraction_equal(pooled, expected) > 0.999


def test_a_sequence_alone_gives_the_bits_it_gives_in_a_batch() -> None:
    batch = Step((3, 0, 3), (1, 9, 8), (0, 2, 5))
    pooled, _, _, _ = batch.run()
    alone = Step((1, 9, 8))
    alone.latent, alone.score, alone.state = batch.latent[3:11], batch.score[3:11], batch.state
    assert_bitwise(alone.run()[0], pooled[1:5])


def test_scores_far_apart_do_not_overflow() -> None:
    step = Step((0, 0, 4))
    step.score *= 1e30
    pooled, _, expected, _ = step.run()
    assert_bitwise(pooled, expected)


def test_an_empty_step_changes_nothing() -> None:
    step = Step((0, 3, 0), (1, 4, 0))
    pooled, state, _, _ = step.run()
    assert pooled.shape == (0, 64)
    assert_bitwise(state, step.state)


def test_a_width_without_a_kernel_is_refused() -> None:
    with pytest.raises(ValueError, match="48 channels"):
        Step((0, 0, 2), width=48).run()
