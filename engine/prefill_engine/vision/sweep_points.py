"""What `ve-sweep` measured: times per image size and batch size, and the line ms = a + b * patches through them. Pure.

The trap: attention inside an image grows with the square of its patches, so the line is an average over the sizes measured; the
fit is BatchCost's, the one a VE reports and balances by.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from prefill_engine.vision.batch_cost import BatchCost

TOWER, UNSEEN, CACHED = "tower", "unseen", "cached"
"""Ways: the tower in this process; a running encoder with images it has not seen; the same images again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepCase:
    """One cell of the sweep. patches: of one image. images: in one batch, or at once."""

    width: int
    height: int
    patches: int
    tokens: int
    images: int

    @property
    def total_patches(self) -> int:
        return self.patches * self.images


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPoint:
    """Measured times of a case. way: of TOWER, UNSEEN, CACHED. ms: one per round. peak_bytes: device memory allocated at most,
    weights included; None = not known there. hits: images of all rounds that came from the encoder's cache."""

    case: SweepCase
    way: str
    ms: tuple[float, ...]
    peak_bytes: int | None = None
    hits: int = 0

    @property
    def median_ms(self) -> float:
        return statistics.median(self.ms)

    @property
    def patches_per_second(self) -> float:
        return self.case.total_patches / self.median_ms * 1e3

    @property
    def images_per_second(self) -> float:
        return self.case.images / self.median_ms * 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepFit:
    """ms = a_ms + b_ms * patches, by medians; ranges: least and most of the rounds fitted one by one. worst_share: largest miss
    of a median, as a share of it."""

    way: str
    a_ms: float
    b_ms: float
    a_range: tuple[float, float]
    b_range: tuple[float, float]
    worst_share: float


def fit_points(points: Sequence[SweepPoint]) -> SweepFit:
    """Fit of points of one way, at least one."""
    rounds = [_fit(points, [point.ms[index] for point in points]) for index in range(len(points[0].ms))]
    a_ms, b_ms = _fit(points, [point.median_ms for point in points])
    return SweepFit(
        way=points[0].way,
        a_ms=a_ms,
        b_ms=b_ms,
        a_range=(min(a for a, _ in rounds), max(a for a, _ in rounds)),
        b_range=(min(b for _, b in rounds), max(b for _, b in rounds)),
        worst_share=max(
            abs(a_ms + b_ms * point.case.total_patches - point.median_ms) / point.median_ms for point in points
        ),
    )


def _fit(points: Sequence[SweepPoint], values: Sequence[float]) -> tuple[float, float]:
    cost = BatchCost()
    for point, ms in zip(points, values, strict=True):
        cost.note(patches=point.case.total_patches, ms=ms)
    a_ms, b_ms = cost.fit()
    return max(0.0, a_ms), b_ms  # a may come out as -1e-14
