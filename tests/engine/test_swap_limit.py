"""How long a swap-in may take, as a function of what earlier ones brought: tables, no threads."""

import pytest

from prefill_engine.rank.swap_limit import Arrival, SwapLimits, add_arrival, awaited_bytes, limit_seconds
from prefill_plan.config import KvdLink

LIMITS = SwapLimits(least_seconds=0.05, most_seconds=2.0)
HIT_BYTES = 86_237_440


def arrivals_of(*loads: tuple[int, float]) -> tuple[Arrival, ...]:
    """Whole ones."""
    return tuple(Arrival(num_awaited=num_bytes, num_come=num_bytes, seconds=seconds) for num_bytes, seconds in loads)


def cut(num_awaited: int, num_come: int, seconds: float) -> Arrival:
    return Arrival(num_awaited=num_awaited, num_come=num_come, seconds=seconds)


@pytest.mark.parametrize(
    ("arrivals", "num_bytes", "seconds"),
    [
        pytest.param((), HIT_BYTES, 2.0, id="nothing-measured"),
        pytest.param((cut(10**9, 0, 2.0),), HIT_BYTES, 2.0, id="nothing-came"),
        pytest.param(arrivals_of((10**9, 1.0)), 0, 0.05, id="nothing-awaited"),
        pytest.param(arrivals_of((10**9, 1.0)), 10**8, 0.45, id="four-times-the-expected-tenth-of-a-second"),
        pytest.param(arrivals_of((10**9, 1.0)), 10**9, 2.0, id="at-most"),
        pytest.param(
            arrivals_of((10**10, 1.0)), HIT_BYTES, 0.05 + 4 * HIT_BYTES / 10**10, id="worked-example-10-GB-per-s"
        ),
        pytest.param(
            (*arrivals_of((10**9, 1.0)), cut(10**9, 0, 1.0)), 10**8, 2.0, id="a-load-cut-to-nothing-makes-patient"
        ),
        pytest.param(
            (*arrivals_of((10**9, 1.0)), cut(10**9, 10**8, 0.2)), 10**8, 0.85, id="a-cut-load-counts-as-it-came"
        ),
        pytest.param(arrivals_of((10**8, 0.5), *[(10**8, 0.03)] * 4), 10**7, 0.25, id="slowest-of-page-cache-and-disk"),
        pytest.param(arrivals_of((10**9, 1.0), (10**5, 0.01)), 10**8, 0.45, id="short-loads-tell-nothing-of-long-ones"),
        pytest.param(arrivals_of((10**6, 0.01)), 10**7, 0.45, id="unless-there-are-no-others"),
    ],
)
def test_limit_of_a_load(arrivals: tuple[Arrival, ...], num_bytes: int, seconds: float) -> None:
    assert limit_seconds(LIMITS, arrivals, num_bytes=num_bytes) == pytest.approx(seconds)


def test_five_loads_are_remembered() -> None:
    arrivals: tuple[Arrival, ...] = ()
    for arrival in arrivals_of((10**8, 9.0), *[(10**8, 0.1)] * 5):
        arrivals = add_arrival(arrivals, arrival)
    assert arrivals == arrivals_of(*[(10**8, 0.1)] * 5)


def test_limit_follows_a_medium_that_became_ten_times_slower_though_loads_are_cut() -> None:
    """The first load of the slow medium is cut at its limit and counts with what had come; so the limit lets the next through."""
    fast, slow, size = 10**9, 10**8, 5 * 10**7
    arrivals = arrivals_of(*[(size, size / fast)] * 5)
    num_cut = 0
    while (limit := limit_seconds(LIMITS, arrivals, num_bytes=size)) < size / slow:
        arrivals = add_arrival(arrivals, cut(size, round(limit * slow), limit))
        num_cut += 1
    assert num_cut == 1


@pytest.mark.parametrize(
    ("changes", "on_gpu", "expected"),
    [
        pytest.param({}, True, SwapLimits(least_seconds=0.05, most_seconds=2.0), id="gpu"),
        pytest.param({}, False, SwapLimits(least_seconds=2.0, most_seconds=2.0), id="cpu-waits-to-the-end"),
        pytest.param(
            {"swap_in_min_seconds": 0.2}, False, SwapLimits(least_seconds=0.2, most_seconds=2.0), id="as-set-on-cpu"
        ),
        pytest.param(
            {"swap_in_min_seconds": 0.2}, True, SwapLimits(least_seconds=0.2, most_seconds=2.0), id="as-set-on-gpu"
        ),
    ],
)
def test_bounds_come_from_the_settings(changes: dict[str, float], on_gpu: bool, expected: SwapLimits) -> None:
    assert SwapLimits.of(KvdLink(**changes), on_gpu=on_gpu) == expected


def test_least_beyond_most_is_most() -> None:
    limits = SwapLimits(least_seconds=20.0, most_seconds=4.0)
    assert limit_seconds(limits, arrivals_of((10**9, 1.0)), num_bytes=1) == 4.0


@pytest.mark.parametrize(
    ("present", "num_bytes"),
    [((0, 0, 0), 5 * 60), ((5, 5, 5), 0), ((5, 2, 0), 3 * 20 + 5 * 30), ((7, 7, 5), 0)],
    ids=["nothing-there", "all-there", "group-by-group", "more-than-wanted"],
)
def test_awaited_bytes(present: tuple[int, ...], num_bytes: int) -> None:
    assert awaited_bytes((10, 20, 30), present, 5) == num_bytes
