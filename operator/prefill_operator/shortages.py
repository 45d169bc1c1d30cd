"""How often capacity falls short: availability is a share of time, but users feel the number of shortages (k8s.md 6.1).

The model is that of spares.py. A shortage begins when a failure of a PE or of a node leaves fewer than N PEs up.
"""

import math

from prefill_operator.spares import FailureRates

_YEAR_SECONDS = 365.25 * 86_400


def shortages_per_year(
    num_pes: int, spares: int, *, pes_per_node: int, rates: FailureRates, pe_mtbf: float, node_mtbf: float | None
) -> float:
    """Expected number per year with num_pes + spares PEs.

    Args:
        pe_mtbf, node_mtbf: mean seconds between failures of one PE, of one node; None = nodes never fail.
    """
    full, rest = divmod(num_pes + spares, pes_per_node)
    sizes = [pes_per_node] * full + ([rest] if rest else [])
    per_second = 0.0
    for size in set(sizes):
        others = list(sizes)
        others.remove(size)
        down_elsewhere = _distribution(others, rates)
        each = sum(
            share * _rate_of_shortage(down, size, down_elsewhere, spares, pe_mtbf=pe_mtbf, node_mtbf=node_mtbf)
            for down, share in enumerate(_alone(size, rates))
        )
        per_second += sizes.count(size) * (1 - rates.node_down) * each
    return per_second * _YEAR_SECONDS


def _rate_of_shortage(
    down: int, size: int, elsewhere: list[float], spares: int, *, pe_mtbf: float, node_mtbf: float | None
) -> float:
    """Per second, from a node that is up with `down` of its PEs down: one more PE, or all of them, makes it too many."""
    last_spare = elsewhere[spares - down] if 0 <= spares - down < len(elsewhere) else 0.0
    rate = (size - down) / pe_mtbf * last_spare
    if node_mtbf is not None:
        rate += math.fsum(elsewhere[max(0, spares - size + 1) : max(0, spares - down + 1)]) / node_mtbf
    return rate


def _distribution(sizes: list[int], rates: FailureRates) -> list[float]:
    """Of the number of PEs down on all these nodes."""
    total = [1.0]
    for size in sizes:
        node = [(1 - rates.node_down) * share for share in _alone(size, rates)]
        node[size] += rates.node_down
        out = [0.0] * (len(total) + size)
        for i, a in enumerate(total):
            for j, b in enumerate(node):
                out[i + j] += a * b
        total = out
    return total


def _alone(size: int, rates: FailureRates) -> list[float]:
    """Distribution of PEs down by themselves on a node that is up."""
    u = rates.pe_down
    return [math.comb(size, k) * u**k * (1 - u) ** (size - k) for k in range(size + 1)]
