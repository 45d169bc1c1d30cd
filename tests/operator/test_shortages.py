"""How often a pool runs short: against 300 simulated years (k8s.md 6.1), and against a closed form."""

import pytest

from prefill_operator.shortages import shortages_per_year
from prefill_operator.spares import failure_rates

DAY = 86_400.0
YEAR = 365.25 * DAY


@pytest.mark.parametrize(
    ("num_pes", "spares", "per_node", "recovery", "expected"),
    [(16, 2, 4, 1200.0, 25.0), (16, 5, 4, 12 * 3600.0, 2.1)],
    ids=["spare-node", "repair"],
)
def test_shortages_equal_the_simulated_ones(
    num_pes: int, spares: int, per_node: int, recovery: float, expected: float
) -> None:
    rates = failure_rates(pe_mtbf=7 * DAY, restart=900.0, node_mtbf=60 * DAY, node_recovery=recovery)
    found = shortages_per_year(num_pes, spares, pes_per_node=per_node, rates=rates, pe_mtbf=7 * DAY, node_mtbf=60 * DAY)

    assert found == pytest.approx(expected, rel=0.03)


def test_without_spares_each_failure_of_a_full_pool_is_a_shortage() -> None:
    rates = failure_rates(pe_mtbf=DAY, restart=600.0)
    found = shortages_per_year(4, 0, pes_per_node=2, rates=rates, pe_mtbf=DAY, node_mtbf=None)

    assert found == pytest.approx(YEAR * 4 / DAY * (1 - rates.pe_down) ** 4)


def test_a_rest_node_counts_like_the_others() -> None:
    """Five PEs at two per node, nodes never failing, are five PEs at one per node."""
    rates = failure_rates(pe_mtbf=DAY, restart=600.0)
    packed, spread = (
        shortages_per_year(4, 1, pes_per_node=size, rates=rates, pe_mtbf=DAY, node_mtbf=None) for size in (2, 1)
    )

    assert packed == pytest.approx(spread)


def test_more_spares_mean_fewer_shortages() -> None:
    rates = failure_rates(pe_mtbf=7 * DAY, restart=900.0, node_mtbf=60 * DAY, node_recovery=1200.0)
    found = [
        shortages_per_year(8, spares, pes_per_node=4, rates=rates, pe_mtbf=7 * DAY, node_mtbf=60 * DAY)
        for spares in range(6)
    ]

    assert found == sorted(found, reverse=True)
