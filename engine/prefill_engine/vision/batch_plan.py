"""Which images go through the tower next: pure arithmetic on the images whose canvases are ready (serving.md 4.1).

Called by encode_queue. Small images go first, since a large one costs them more than they cost it; but each image lets only as
many patches pass as it has itself, after that it is due and later images wait for it. The trap: a due image that does not fit
into the rest of a batch closes the batch, or a stream of small ones could fill every rest.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyImage:
    """patches: of the image. passed_patches: of images that came later and were encoded before it. ready_at: seconds."""

    patches: int
    passed_patches: int
    ready_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """max_delay: seconds that a ready image waits for company."""

    max_patches: int
    max_images: int
    max_delay: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """chosen: indices into the images, in arrival order. passed: new passed_patches of every image that is left, by index."""

    chosen: tuple[int, ...]
    passed: dict[int, int]


def plan_batch(images: Sequence[ReadyImage], limits: BatchLimits) -> BatchPlan:
    """The next batch.

    Args:
        images: in arrival order, none larger than limits.max_patches.
    """
    due = [index for index, image in enumerate(images) if image.passed_patches >= image.patches]
    others = sorted(set(range(len(images))) - set(due), key=lambda index: (images[index].patches, index))
    chosen: list[int] = []
    room = limits.max_patches
    for index in [*due, *others]:
        if len(chosen) == limits.max_images:
            break
        if images[index].patches > room:
            if index in due:
                break
            continue
        chosen.append(index)
        room -= images[index].patches
    passed = {
        index: image.passed_patches + sum(images[other].patches for other in chosen if other > index)
        for index, image in enumerate(images)
        if index not in chosen
    }
    return BatchPlan(chosen=tuple(sorted(chosen)), passed=passed)


def seconds_until_due(
    images: Sequence[ReadyImage], limits: BatchLimits, *, now: float, more_to_come: bool
) -> float | None:
    """When the next batch should start: 0 = now, None = nothing is ready.

    Args:
        more_to_come: images are being decoded, so waiting may bring company.
    """
    if not images:
        return None
    is_full = len(images) >= limits.max_images or sum(image.patches for image in images) >= limits.max_patches
    if is_full or not more_to_come:
        return 0.0
    return max(0.0, min(image.ready_at for image in images) + limits.max_delay - now)
