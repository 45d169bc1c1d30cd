"""`prefill-engine ve-balance`: a trace of images over N simulated encoders, chosen in three ways. Pure, with its own clock.

Batches are planned by batch_plan and encoders chosen by vision_client.choose, so this replays what runs. The traps: decoding,
transport and full queues are not simulated; and the balancer knows the load of this instant, as a PE that is alone does of its
own images, while other PEs' images are known from reports of up to 100 ms ago.
"""

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from statistics import fmean

from prefill_engine.vision.balance_trace import Arrival
from prefill_engine.vision.batch_plan import BatchLimits, ReadyImage, plan_batch
from prefill_engine.vision_client.choose import EncoderLoad, choose_encoder


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """ms_per_patch: of each encoder. batch_ms: what a batch takes beside its patches."""

    ms_per_patch: tuple[float, ...]
    batch_ms: float
    limits: BatchLimits

    def load_of(self, trace: Sequence[Arrival]) -> float:
        """Share of the encoders' time that the trace asks for, if batches were as full as their limits allow on average."""
        seconds = trace[-1].time - trace[0].time
        return (
            sum(image.patches for image in trace) / seconds / self.patches_per_second if seconds > 0 else float("inf")
        )

    @property
    def patches_per_second(self) -> float:
        """Of all encoders, batches full of patches."""
        share = self.batch_ms / self.limits.max_patches
        return sum(1e3 / (ms + share) for ms in self.ms_per_patch)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outstanding:
    """What a balancer knows of one encoder: images and patches sent there and not answered."""

    images: int
    patches: int
    batch_ms: float
    ms_per_patch: float


Policy = Callable[[Sequence[Outstanding], int, int], int]
"""(encoders, patches of the image, its number in the trace) -> index of the encoder."""


def by_round_robin(encoders: Sequence[Outstanding], _patches: int, number: int) -> int:
    """One after the other."""
    return number % len(encoders)


def by_images(encoders: Sequence[Outstanding], _patches: int, _number: int) -> int:
    """Fewest images outstanding; ties go to the first."""
    return min(range(len(encoders)), key=lambda index: encoders[index].images)


def by_patches(encoders: Sequence[Outstanding], patches: int, _number: int) -> int:
    """Patches outstanding x ms per patch, as a PE chooses."""
    loads = [
        EncoderLoad(address=f"{index:06d}", patches=each.patches, a_ms=each.batch_ms, b_ms=each.ms_per_patch)
        for index, each in enumerate(encoders)
    ]
    chosen = choose_encoder(loads, patches=patches)
    assert chosen is not None, "a fleet has at least one encoder"
    return int(chosen)


POLICIES: tuple[tuple[str, Policy], ...] = (
    ("round robin", by_round_robin),
    ("images", by_images),
    ("patches", by_patches),
)


def replay(trace: Sequence[Arrival], fleet: Fleet, policy: Policy) -> tuple[float, ...]:
    """Milliseconds from each image's arrival to the end of its batch, in the trace's order.

    Args:
        trace: sorted by time, no image larger than a batch. Images of one time are all placed before a batch starts.
    """
    encoders = [_Encoder(fleet, ms_per_patch) for ms_per_patch in fleet.ms_per_patch]
    latencies = [0.0] * len(trace)
    ends: list[tuple[float, int]] = []

    def start(index: int, now: float) -> None:
        if (end := encoders[index].start_batch(now)) is not None:
            heapq.heappush(ends, (end, index))

    def settle(until: float) -> None:
        while ends and ends[0][0] <= until:
            end, index = heapq.heappop(ends)
            for number in encoders[index].end_batch():
                latencies[number] = (end - trace[number].time) * 1e3
            start(index, end)

    for now, group in groupby(enumerate(trace), key=lambda each: each[1].time):
        settle(now)
        for number, image in group:
            chosen = policy([encoder.outstanding() for encoder in encoders], image.patches, number)
            encoders[chosen].put(number, image.patches, now)
        for index in range(len(encoders)):
            start(index, now)
    settle(float("inf"))
    return tuple(latencies)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyResult:
    """Latencies in ms by one policy, one value per trace."""

    policy: str
    p50: tuple[float, ...]
    p99: tuple[float, ...]
    mean: tuple[float, ...]


def compare_policies(traces: Sequence[Sequence[Arrival]], fleet: Fleet) -> tuple[PolicyResult, ...]:
    """Every trace by every policy."""
    results = []
    for name, policy in POLICIES:
        runs = [replay(trace, fleet, policy) for trace in traces]
        results.append(
            PolicyResult(
                policy=name,
                p50=tuple(percentile(latencies, 0.5) for latencies in runs),
                p99=tuple(percentile(latencies, 0.99) for latencies in runs),
                mean=tuple(fmean(latencies) for latencies in runs),
            )
        )
    return tuple(results)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest of the values that at least `share` of them do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values) - 1e-9) - 1)]


@dataclass(slots=True)
class _Waiting:
    number: int
    patches: int
    arrived: float
    passed_patches: int = 0


@dataclass(slots=True)
class _Encoder:
    """Owner of one encoder's queue and of the batch that it computes."""

    fleet: Fleet
    ms_per_patch: float
    images: int = 0
    patches: int = 0
    waiting: list[_Waiting] = field(default_factory=list)
    batch: list[_Waiting] = field(default_factory=list)

    def outstanding(self) -> Outstanding:
        return Outstanding(
            images=self.images, patches=self.patches, batch_ms=self.fleet.batch_ms, ms_per_patch=self.ms_per_patch
        )

    def put(self, number: int, patches: int, now: float) -> None:
        self.waiting.append(_Waiting(number, patches, now))
        self.images += 1
        self.patches += patches

    def start_batch(self, now: float) -> float | None:
        """When the batch will end; None: one is under way, or nothing waits."""
        if self.batch or not self.waiting:
            return None
        ready = [
            ReadyImage(patches=each.patches, passed_patches=each.passed_patches, ready_at=each.arrived)
            for each in self.waiting
        ]
        plan = plan_batch(ready, self.fleet.limits)
        for index, passed in plan.passed.items():
            self.waiting[index].passed_patches = passed
        self.batch = [self.waiting[index] for index in plan.chosen]
        self.waiting = [each for index, each in enumerate(self.waiting) if index not in plan.chosen]
        ms = self.fleet.batch_ms + self.ms_per_patch * sum(each.patches for each in self.batch)
        return now + ms / 1e3

    def end_batch(self) -> list[int]:
        """Numbers of its images."""
        ended, self.batch = self.batch, []
        self.images -= len(ended)
        self.patches -= sum(each.patches for each in ended)
        return [each.number for each in ended]
