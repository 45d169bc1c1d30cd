"""The tables of k8s.md 6, and the exact model against counting every state by hand."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefill_operator.pool_api import AvailabilitySpec, RedundancyMode, RedundancySpec
from prefill_operator.spares import (
    FailureRates,
    SpareCount,
    availability,
    expected_availability,
    failure_rates,
    percentile_90,
    plan_spares,
    spares_for,
)

DAY = 86_400.0
FLEET = failure_rates(pe_mtbf=7 * DAY, restart=900, node_mtbf=60 * DAY, node_recovery=1200)
NO_SPARE_NODE = failure_rates(pe_mtbf=7 * DAY, restart=900, node_mtbf=60 * DAY, node_recovery=43_200)


@pytest.mark.parametrize(
    ("num_pes", "target", "expected"),
    [
        (2, 0.999, (1, 1, 1, 0)),
        (4, 0.999, (1, 1, 1, 0)),
        (8, 0.999, (2, 1, 1, 1)),
        (16, 0.999, (2, 1, 1, 1)),
        (32, 0.999, (3, 2, 1, 1)),
        (64, 0.999, (4, 2, 2, 1)),
        (2, 0.9999, (2, 1, 1, 1)),
        (8, 0.9999, (2, 2, 1, 1)),
        (16, 0.9999, (3, 2, 2, 1)),
        (32, 0.9999, (3, 2, 2, 1)),
        (64, 0.9999, (5, 3, 2, 2)),
    ],
)
def test_spares_for_pe_failures_only(num_pes: int, target: float, expected: tuple[int, ...]) -> None:
    """k8s.md 6.2: MTBF of 1, 3, 7, 30 days, restart in 10 min."""
    found = tuple(
        spares_for(num_pes, target=target, pes_per_node=1, rates=failure_rates(pe_mtbf=days * DAY, restart=600)).spares
        for days in (1, 3, 7, 30)
    )
    assert found == expected


@pytest.mark.parametrize(
    ("num_pes", "expected"),
    [
        (4, ((1, 4, 5), (1, 2, 4), (1, 1, 2))),
        (8, ((1, 4, 8), (2, 3, 4), (1, 2, 3))),
        (16, ((2, 5, 8), (2, 4, 5), (1, 2, 3))),
        (32, ((4, 8, 9), (2, 4, 6), (2, 3, 4))),
        (64, ((4, 9, 12), (2, 6, 8), (2, 4, 5))),
    ],
)
def test_spares_for_node_failures(num_pes: int, expected: tuple[tuple[int, int, int], ...]) -> None:
    """k8s.md 6.3: spare node, none, none at 0.9999; for 4, 2 and 1 PEs per node."""
    cases = ((0.999, FLEET), (0.999, NO_SPARE_NODE), (0.9999, NO_SPARE_NODE))
    found = tuple(
        tuple(spares_for(num_pes, target=target, pes_per_node=size, rates=rates).spares for target, rates in cases)
        for size in (4, 2, 1)
    )
    assert found == expected


@pytest.mark.parametrize(("num_pes", "without", "with_rollout"), [(4, 1, 2), (8, 2, 3), (16, 2, 3), (32, 2, 3)])
def test_spares_for_planned_absence(num_pes: int, without: int, with_rollout: int) -> None:
    found = [spares_for(num_pes, target=0.999, pes_per_node=2, rates=FLEET, extra=extra).spares for extra in (0, 1)]
    assert found == [without, with_rollout]


@pytest.mark.parametrize(
    ("spares", "per_node", "rates", "exact"),
    [
        (2, 4, FLEET, 0.999067),
        (3, 4, NO_SPARE_NODE, 0.967162),
        (5, 4, NO_SPARE_NODE, 0.999309),
        (4, 2, NO_SPARE_NODE, 0.999867),
        (2, 4, NO_SPARE_NODE, 0.967159),
    ],
)
def test_availability_of_sixteen_pes(spares: int, per_node: int, rates: FailureRates, exact: float) -> None:
    """k8s.md 6.1, checked there by 300 simulated years."""
    assert availability(16, spares, pes_per_node=per_node, rates=rates) == pytest.approx(exact, abs=5e-7)


def count_states(num_pes: int, spares: int, per_node: int, rates: FailureRates) -> float:
    """Probability of enough PEs by adding up every combination of down PEs and down nodes."""
    total = num_pes + spares
    nodes = [list(range(first, min(first + per_node, total))) for first in range(0, total, per_node)]
    reached = 0.0
    for dead in itertools.product((False, True), repeat=len(nodes)):
        for down in itertools.product((False, True), repeat=total):
            share = math.prod(rates.node_down if is_dead else 1 - rates.node_down for is_dead in dead)
            share *= math.prod(rates.pe_down if is_down else 1 - rates.pe_down for is_down in down)
            lost = {pe for pe in range(total) if down[pe]} | {
                pe for n, pes in enumerate(nodes) if dead[n] for pe in pes
            }
            reached += share if total - len(lost) >= num_pes else 0.0
    return reached


@settings(max_examples=40, deadline=None)
@given(
    num_pes=st.integers(1, 4),
    spares=st.integers(0, 2),
    per_node=st.integers(1, 3),
    pe_down=st.floats(0, 1),
    node_down=st.floats(0, 1),
)
def test_availability_equals_counting_every_state(
    num_pes: int, spares: int, per_node: int, pe_down: float, node_down: float
) -> None:
    rates = FailureRates(pe_down=pe_down, node_down=node_down)
    expected = count_states(num_pes, spares, per_node, rates)
    assert availability(num_pes, spares, pes_per_node=per_node, rates=rates) == pytest.approx(expected, abs=1e-9)


@settings(max_examples=100, deadline=None)
@given(
    num_pes=st.integers(1, 40),
    per_node=st.integers(1, 4),
    target=st.sampled_from([0.9, 0.99, 0.999, 0.9999]),
    extra=st.integers(0, 2),
    restart=st.floats(10, 5000),
)
def test_spares_for_is_the_least_number_that_reaches_the_target(
    num_pes: int, per_node: int, target: float, extra: int, restart: float
) -> None:
    rates = failure_rates(pe_mtbf=3 * DAY, restart=restart, node_mtbf=60 * DAY, node_recovery=restart + 300)
    found = spares_for(num_pes, target=target, pes_per_node=per_node, rates=rates, extra=extra)
    reached = availability(num_pes, found.spares, pes_per_node=per_node, rates=rates, extra=extra)
    assert found.availability == pytest.approx(reached, abs=1e-12)
    assert reached >= target
    if found.spares > extra:
        assert availability(num_pes, found.spares - 1, pes_per_node=per_node, rates=rates, extra=extra) < target


def test_spares_for_is_capped_and_says_so() -> None:
    found = spares_for(16, target=0.999, pes_per_node=4, rates=NO_SPARE_NODE, max_spares=3)
    assert (found.spares, found.capped) == (3, True)
    assert found.availability == pytest.approx(0.967162, abs=5e-7)


GIVEN = AvailabilitySpec(
    pe_mtbf_seconds=604_800, restart_seconds=900, node_mtbf_seconds=5_184_000, node_recovery_seconds=1200
)


def plan(redundancy: RedundancySpec, *, replicas: int = 16, measured: float | None = None) -> SpareCount:
    return plan_spares(redundancy, replicas=replicas, pes_per_node=2, measured_restart=measured, default_restart=600)


def test_plan_spares_worked_example() -> None:
    """k8s.md 6.3: 16 PEs at EP 4 need 2 spares."""
    assert plan(RedundancySpec(mode=RedundancyMode.AVAILABILITY, availability=GIVEN)).spares == 2


def test_plan_spares_by_mode() -> None:
    assert plan(RedundancySpec(mode=RedundancyMode.NONE)) == SpareCount(spares=0, availability=None)
    assert plan(RedundancySpec(spares=3)) == SpareCount(spares=3, availability=None, wanted=3)


def test_plan_spares_fixed_shows_what_to_expect() -> None:
    """C36."""
    found = plan(RedundancySpec(spares=1, availability=GIVEN))
    assert found.spares == 1
    assert found.availability == pytest.approx(availability(16, 1, pes_per_node=2, rates=FLEET))


@pytest.mark.parametrize("mode", list(RedundancyMode))
def test_plan_spares_of_nothing_are_none(mode: RedundancyMode) -> None:
    given_rates = GIVEN if mode is RedundancyMode.AVAILABILITY else None
    assert plan(RedundancySpec(mode=mode, spares=3, availability=given_rates), replicas=0).spares == 0


def test_plan_spares_measured_restart_enters_in_steps() -> None:
    """A p90 that moves by less than 20 % must not create or drain PEs."""
    unknown = AvailabilitySpec(pe_mtbf_seconds=86_400, target="0.9999")
    redundancy = RedundancySpec(mode=RedundancyMode.AVAILABILITY, availability=unknown)
    found = {plan(redundancy, measured=seconds).availability for seconds in (860.0, 900.0, 950.0, 1010.0)}
    assert len(found) == 1
    assert plan(redundancy, measured=4000.0).spares > plan(redundancy, measured=60.0).spares
    assert plan(redundancy).availability == plan(redundancy, measured=None).availability


def test_expected_availability_after_a_cap() -> None:
    redundancy = RedundancySpec(mode=RedundancyMode.AVAILABILITY, availability=GIVEN)
    found = expected_availability(
        redundancy, replicas=16, spares=0, pes_per_node=2, measured_restart=None, default_restart=600
    )
    assert found == pytest.approx(availability(16, 0, pes_per_node=2, rates=FLEET))
    none = expected_availability(
        RedundancySpec(), replicas=16, spares=0, pes_per_node=2, measured_restart=None, default_restart=600
    )
    assert none is None


@pytest.mark.parametrize(
    ("values", "expected"), [([], None), ([5.0], 5.0), (list(range(1, 11)), 9), (list(range(20, 0, -1)), 18)]
)
def test_percentile_90(values: list[float], expected: float | None) -> None:
    assert percentile_90(values) == expected
