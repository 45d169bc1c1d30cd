"""How many spare PEs keep N serving with a given probability: exact, by convolution over nodes (k8s.md 6).

The trap: PEs of one node fail together, so the binomial over PEs is far too optimistic: 16 PEs at 4 per node with 12 h of
repair seem to need 2 spares for 0.999 and need 5. Availability is a share of time.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from prefill_operator.pool_api import AvailabilitySpec, RedundancyMode, RedundancySpec

# Measured restart times enter in steps of this factor, so that small changes do not create and drain PEs (k8s.md 6.1).
_RESTART_STEP = 1.2


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureRates:
    """Shares of time in which one PE, or a whole node, is down (k8s.md 6.1: u and v)."""

    pe_down: float
    node_down: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SpareCount:
    spares: int
    availability: float | None
    """Probability of N serving with these spares; None when no failure rates are given."""
    capped: bool = False
    """More are needed than maxSpares allows."""
    wanted: int = 0
    """Spares before any cap."""


# The most spares that are tried: the CRD's bound of maxSpares.
_MAX_SEARCH = 256


def failure_rates(
    *, pe_mtbf: float, restart: float, node_mtbf: float | None = None, node_recovery: float = 0.0
) -> FailureRates:
    """From mean times between failures and to recovery, all in seconds; node_mtbf None = nodes never fail."""
    return FailureRates(
        pe_down=restart / (pe_mtbf + restart),
        node_down=node_recovery / (node_mtbf + node_recovery) if node_mtbf is not None else 0.0,
    )


def availability(num_pes: int, spares: int, *, pes_per_node: int, rates: FailureRates, extra: int = 0) -> float:
    """Probability that at least num_pes of num_pes + spares are up, `extra` of them being absent by plan."""
    tolerated = spares - extra
    if tolerated < 0:
        return 0.0
    total = num_pes + spares
    full, rest = divmod(total, pes_per_node)
    down = [1.0]
    for size in [pes_per_node] * full + ([rest] if rest else []):
        down = _convolve(down, _down_on_node(size, rates), keep=tolerated + 1)
    return math.fsum(down[: tolerated + 1])


def spares_for(
    num_pes: int,
    *,
    target: float,
    pes_per_node: int,
    rates: FailureRates,
    extra: int = 0,
    max_spares: int = _MAX_SEARCH,
) -> SpareCount:
    """The least number of spares that reaches the target; capped at max_spares if that is less.

    Args:
        pes_per_node: PEs that share a failure domain.
        extra: PEs absent by plan at any time, e.g. 1 for a permanent rolling replacement.
    """
    reached = 0.0
    keep = max(0, max_spares - extra) + 1
    whole = _down_on_node(pes_per_node, rates)
    nodes, down = 0, [1.0]
    for spares in range(extra, max_spares + 1):
        full, rest = divmod(num_pes + spares, pes_per_node)
        for _ in range(full - nodes):
            down = _convolve(down, whole, keep=keep)
        nodes = full
        total_down = _convolve(down, _down_on_node(rest, rates), keep=keep) if rest else down
        reached = math.fsum(total_down[: spares - extra + 1])
        if reached >= target:
            return SpareCount(spares=spares, availability=reached, wanted=spares)
    return SpareCount(spares=max_spares, availability=reached, capped=True, wanted=max_spares + 1)


def plan_spares(
    redundancy: RedundancySpec,
    *,
    replicas: int,
    pes_per_node: int,
    measured_restart: float | None,
    default_restart: float,
) -> SpareCount:
    """Spares of a pool by its mode; none for a pool scaled to zero. Mode Fixed with rates shows what to expect (C36).

    Args:
        measured_restart: p90 of the loads seen, seconds; used where the spec gives no restartSeconds.
        default_restart: used before the first load was measured.
    """
    given = redundancy.availability
    rates = _rates_of(given, measured_restart=measured_restart, default_restart=default_restart) if given else None
    if replicas == 0:
        return SpareCount(spares=0, availability=1.0 if rates else None)
    if redundancy.mode is RedundancyMode.AVAILABILITY and given and rates:
        return spares_for(
            replicas,
            target=float(given.target),
            pes_per_node=pes_per_node,
            rates=rates,
            max_spares=given.max_spares,
        )
    spares = redundancy.spares if redundancy.mode is RedundancyMode.FIXED else 0
    reached = availability(replicas, spares, pes_per_node=pes_per_node, rates=rates) if rates else None
    return SpareCount(spares=spares, availability=reached, wanted=spares)


def expected_availability(
    redundancy: RedundancySpec,
    *,
    replicas: int,
    spares: int,
    pes_per_node: int,
    measured_restart: float | None,
    default_restart: float,
) -> float | None:
    """What so many spares give, e.g. after a cap by quota; None without failure rates in the spec."""
    given = redundancy.availability
    if given is None:
        return None
    rates = _rates_of(given, measured_restart=measured_restart, default_restart=default_restart)
    return availability(replicas, spares, pes_per_node=pes_per_node, rates=rates)


def percentile_90(values: Sequence[float]) -> float | None:
    """The smallest value that at least 90 % do not exceed; None of an empty sequence."""
    if not values:
        return None
    return sorted(values)[math.ceil(0.9 * len(values)) - 1]


def _rates_of(given: AvailabilitySpec, *, measured_restart: float | None, default_restart: float) -> FailureRates:
    restart: float
    if given.restart_seconds is not None:
        restart = given.restart_seconds
    elif measured_restart is not None:
        restart = _RESTART_STEP ** math.ceil(math.log(max(1.0, measured_restart), _RESTART_STEP) - 1e-9)
    else:
        restart = default_restart
    return failure_rates(
        pe_mtbf=given.pe_mtbf_seconds,
        restart=restart,
        node_mtbf=given.node_mtbf_seconds,
        node_recovery=given.node_recovery_seconds or 0,
    )


def _down_on_node(size: int, rates: FailureRates) -> list[float]:
    """Distribution of PEs down on a node of `size` PEs: each by itself, or all with the node."""
    u = rates.pe_down
    alone = [math.comb(size, k) * u**k * (1 - u) ** (size - k) for k in range(size + 1)]
    node = [(1 - rates.node_down) * share for share in alone]
    node[size] += rates.node_down
    return node


def _convolve(left: list[float], right: list[float], *, keep: int) -> list[float]:
    """Distribution of the sum, cut to its first `keep` entries: the rest is never asked for."""
    out = [0.0] * min(keep, len(left) + len(right) - 1)
    for i, a in enumerate(left):
        for j, b in enumerate(right[: len(out) - i]):
            out[i + j] += a * b
    return out
