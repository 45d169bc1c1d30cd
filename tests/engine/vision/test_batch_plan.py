"""Which images go through the tower next: tables, and the bound on how long a large image waits."""

import random

import pytest

from prefill_engine.vision.batch_cost import BatchCost
from prefill_engine.vision.batch_plan import BatchLimits, ReadyImage, plan_batch, seconds_until_due

LIMITS = BatchLimits(max_patches=16_384, max_images=8, max_delay=0.002)


def images(*patches: int | tuple[int, int]) -> list[ReadyImage]:
    """Of patches, or (patches, passed_patches)."""
    pairs = [one if isinstance(one, tuple) else (one, 0) for one in patches]
    return [ReadyImage(patches=count, passed_patches=passed, ready_at=0.0) for count, passed in pairs]


@pytest.mark.parametrize(
    ("waiting", "chosen", "passed"),
    [
        (images(), (), {}),
        (images(9_189), (0,), {}),
        # What fits goes in one batch, in arrival order.
        (images(9_189, 1_521, 1_521, 1_521, 1_521), (0, 1, 2, 3, 4), {}),
        # A large image does not hold four small ones: they fill the batch first.
        (images(9_189, 9_189, 1_521, 1_521, 1_521, 1_521), (0, 2, 3, 4, 5), {1: 6_084}),
        # Two large ones do not fit together.
        (images(9_189, 9_000), (1,), {0: 9_000}),
        # Passed by as many patches as it has itself, an image is due and goes first.
        (images((9_189, 9_200), 9_000, 1_521), (0, 2), {1: 1_521}),
        # A due one that does not fit closes the batch: the small one behind it waits.
        (images((9_000, 9_000), (9_189, 9_189), 1_521), (0,), {1: 9_189, 2: 0}),
        # Eight images at most.
        (images(*[100] * 10), tuple(range(8)), {8: 0, 9: 0}),
    ],
)
def test_next_batch(waiting: list[ReadyImage], chosen: tuple[int, ...], passed: dict[int, int]) -> None:
    plan = plan_batch(waiting, LIMITS)
    assert (plan.chosen, plan.passed) == (chosen, passed)


def test_no_image_is_passed_by_more_than_itself_and_a_batch() -> None:
    """Small images keep coming; every large one must get its turn, and each batch must be within the limits."""
    random.seed(3)
    waiting: list[ReadyImage] = []
    for _ in range(2_000):
        sizes = [random.choice((1_521, 1_610, 4_784, 8_418, 9_189)) for _ in range(random.choice((0, 2, 3, 6)))]
        waiting += images(*sizes)
        if not waiting:
            continue
        plan = plan_batch(waiting, LIMITS)
        assert plan.chosen
        assert len(plan.chosen) <= LIMITS.max_images
        assert sum(waiting[index].patches for index in plan.chosen) <= LIMITS.max_patches
        left = [
            ReadyImage(patches=waiting[index].patches, passed_patches=passed, ready_at=0.0)
            for index, passed in sorted(plan.passed.items())
        ]
        assert len(left) + len(plan.chosen) == len(waiting)
        for image in left:
            assert image.passed_patches < image.patches + LIMITS.max_patches
        waiting = left[-40:]


@pytest.mark.parametrize(
    ("waiting", "more", "seconds"),
    [
        (images(), True, None),
        (images(1_521), False, 0.0),
        (images(1_521), True, 0.0015),
        (images(9_189, 8_418), True, 0.0),
        (images(*[100] * 8), True, 0.0),
    ],
)
def test_when_a_batch_is_due(waiting: list[ReadyImage], more: bool, seconds: float | None) -> None:
    assert seconds_until_due(waiting, LIMITS, now=0.0005, more_to_come=more) == pytest.approx(seconds)


def test_cost_of_a_batch_is_found_from_its_times() -> None:
    cost = BatchCost()
    assert cost.fit() == (0.0, 0.0)
    assert cost.predicted_ms(10_000, batch_patches=16_384) == 0.0
    for patches in (1_521, 4_784, 9_189, 16_000):
        cost.note(patches=patches, ms=5.0 + 0.008 * patches)
    a_ms, b_ms = cost.fit()
    assert (a_ms, b_ms) == (pytest.approx(5.0), pytest.approx(0.008))
    assert cost.predicted_ms(20_000, batch_patches=16_384) == pytest.approx(2 * 5.0 + 160.0)


def test_cost_is_never_negative() -> None:
    cost = BatchCost()
    for patches, ms in ((1_000, 50.0), (9_000, 20.0)):
        cost.note(patches=patches, ms=ms)
    assert cost.fit() == (35.0, 0.0)
    steep = BatchCost()
    for patches, ms in ((1_000, 1.0), (9_000, 90.0)):
        steep.note(patches=patches, ms=ms)
    a_ms, b_ms = steep.fit()
    assert a_ms >= 0
    assert b_ms > 0
