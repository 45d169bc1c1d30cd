"""How long a swap-in may take: 4 times what its bytes took lately, within bounds (serving.md 1.1). Pure.

Called by the copy thread. Only awaited bytes count: those that lie in kvd's pool already are copied in any case, and their speed
says nothing of the store. The trap: loads that were cut count as well, else a medium that became slow would have all of them cut.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from prefill_plan.config import KvdLink

_GPU_MIN_SECONDS = 0.050
_MARGIN = 4.0
_REMEMBERED = 5
# A load says how fast the medium is for one of at most so many times its bytes; short ones measure its latency.
_COMPARABLE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapLimits:
    """Bounds of every load's limit, in seconds; least_seconds beyond most_seconds has the effect of most_seconds."""

    least_seconds: float
    most_seconds: float

    @classmethod
    def of(cls, settings: KvdLink, *, on_gpu: bool) -> "SwapLimits":
        least, most = settings.swap_in_min_seconds, settings.swap_in_seconds
        if least is None:
            least = _GPU_MIN_SECONDS if on_gpu else most
        return cls(least_seconds=least, most_seconds=most)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One load that ended, whole or cut: bytes that were awaited, those of them that came, and how long that took."""

    num_awaited: int
    num_come: int
    seconds: float


def add_arrival(arrivals: tuple[Arrival, ...], arrival: Arrival) -> tuple[Arrival, ...]:
    """The last few, in order."""
    return (*arrivals, arrival)[-_REMEMBERED:]


def awaited_bytes(group_bytes: Sequence[int], present: Sequence[int], num_blocks: int) -> int:
    """Bytes of a load that are not there. present: leading blocks per layer group. num_blocks: of the load."""
    return sum(size * max(0, num_blocks - done) for size, done in zip(group_bytes, present, strict=True))


def limit_seconds(limits: SwapLimits, arrivals: Sequence[Arrival], *, num_bytes: int) -> float:
    """From the start of a load to its cut. num_bytes: awaited. The upper bound while nothing has come yet.

    The slowest of the last loads counts, not their mean: some hits lie in the page cache and some on the disk.
    """
    num_come = sum(arrival.num_come for arrival in arrivals)
    if not num_come:
        return limits.most_seconds
    if not num_bytes:
        return min(limits.most_seconds, limits.least_seconds)
    comparable = [arrival for arrival in arrivals if arrival.num_awaited * _COMPARABLE >= num_bytes]
    paces = [arrival.seconds / arrival.num_come if arrival.num_come else inf for arrival in comparable]
    pace = max(paces, default=sum(arrival.seconds for arrival in arrivals) / num_come)
    return min(limits.most_seconds, limits.least_seconds + _MARGIN * num_bytes * pace)
