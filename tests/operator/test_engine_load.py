"""prefill_operator.engine_load: figures of encoders and their rounding."""

import pytest

from prefill_operator.api_status import LoadStatus
from prefill_operator.engine_load import (
    PatchCount,
    PatchRate,
    load_status,
    patch_rate,
    pool_load,
    progress_step,
    round_digits,
)
from prefill_operator.model import LoadProgress, PoolLoad

BEFORE = PatchCount(epoch=1, queued=5, encoded=1000)


@pytest.mark.parametrize(
    ("before", "after", "seconds", "per_second"),
    [
        (None, BEFORE, 30.0, None),
        (BEFORE, PatchCount(epoch=1, queued=9, encoded=4000), 30.0, 100.0),
        (BEFORE, PatchCount(epoch=1, queued=9, encoded=1000), 30.0, 0.0),
        (BEFORE, PatchCount(epoch=2, queued=9, encoded=4000), 30.0, None),
        (BEFORE, PatchCount(epoch=1, queued=9, encoded=10), 30.0, None),
        (BEFORE, PatchCount(epoch=1, queued=9, encoded=4000), 0.0, None),
    ],
    ids=["first", "traffic", "rest", "restarted", "counts-back", "no-time"],
)
def test_rate_is_what_was_encoded_in_between(
    before: PatchCount | None, after: PatchCount, seconds: float, per_second: float | None
) -> None:
    expected = None if per_second is None else PatchRate(queued=9, per_second=per_second)

    assert patch_rate(before, after, seconds=seconds) == expected


@pytest.mark.parametrize(
    ("queued", "expected"),
    [
        ([], None),
        ([0], PoolLoad(pending_patches=0, patches_per_second=120, imbalance="1.0")),
        ([0, 0], PoolLoad(pending_patches=0, patches_per_second=250, imbalance="1.0")),
        ([12_345, 0], PoolLoad(pending_patches=12_000, patches_per_second=250, imbalance="2.0")),
        ([100, 300, 200], PoolLoad(pending_patches=600, patches_per_second=370, imbalance="1.5")),
    ],
    ids=str,
)
def test_pool_load_is_sums_in_two_digits(queued: list[int], expected: PoolLoad | None) -> None:
    assert pool_load([PatchRate(queued=count, per_second=123.4) for count in queued]) == expected


@pytest.mark.parametrize(
    ("value", "rounded"),
    [(0, 0), (0.4, 0), (7.4, 7), (99, 99), (101, 100), (12_345, 12_000), (995_000, 1_000_000), (2**64, 10**15)],
)
def test_two_digits_are_kept(value: float, rounded: int) -> None:
    assert round_digits(value) == rounded


FOUND = PoolLoad(pending_patches=600, patches_per_second=370, imbalance="1.5")
OLD = LoadStatus(pending_patches=600, patches_per_second=370, imbalance="1.5", observed_at="then")


@pytest.mark.parametrize(
    ("previous", "found", "observed_at"),
    [(OLD, FOUND, "then"), (OLD, None, "then"), (None, FOUND, "now"), (LoadStatus(observed_at="then"), FOUND, "now")],
    ids=["equal", "unknown", "first", "another"],
)
def test_status_of_equal_load_keeps_its_time(
    previous: LoadStatus | None, found: PoolLoad | None, observed_at: str
) -> None:
    assert load_status(previous, found, now="now") == LoadStatus(
        pending_patches=600, patches_per_second=370, imbalance="1.5", observed_at=observed_at
    )


@pytest.mark.parametrize(
    ("loaded", "total", "step"), [(0, 100, 0), (4, 100, 0), (5, 100, 1), (99, 100, 19), (120, 100, 20), (1, 0, None)]
)
def test_progress_counts_steps_of_five_percent(loaded: int, total: int, step: int | None) -> None:
    assert progress_step(LoadProgress(loaded_bytes=loaded, total_bytes=total)) == step
