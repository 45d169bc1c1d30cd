"""Images in the life of an attempt: its stage, its events, and that waiting for one is no sign of a rank that stands still."""

from prefill_engine.front.attempt import Attempt
from prefill_engine.front.events import ImageState
from prefill_engine.rpc.status import Failure
from prefill_testing.lifecycle_rig import LifecycleRig, events_of, kinds_of, reason_of


def running() -> tuple[LifecycleRig, Attempt]:
    """At 101 its images are asked for, at 102 it begins."""
    rig = LifecycleRig()
    attempt = rig.submit()
    rig.resolve()
    rig.now = 101.0
    attempt.begin_images(now=rig.now)
    rig.now = 102.0
    rig.start()
    rig.chunk(done=128)
    return rig, attempt


def test_attempt_that_waits_for_an_image_is_not_at_work() -> None:
    rig, attempt = running()
    rig.now = 120.0
    assert attempt.working_since is None
    attempt.image_ready(0, rows=40, took_seconds=19.0, is_last=True, now=rig.now)
    # From here on its rank owes steps, not since its first one.
    assert attempt.working_since == 120.0
    rig.computed()
    assert attempt.working_since is None


def test_attempt_without_images_is_at_work_since_its_first_step() -> None:
    rig = LifecycleRig()
    attempt = rig.submit()
    assert attempt.working_since is None
    rig.resolve()
    rig.start()
    assert attempt.working_since == rig.now


def test_images_are_told_in_order_and_make_a_stage_of_their_own() -> None:
    rig, attempt = running()
    rig.now = 103.0
    attempt.image_ready(1, rows=40, took_seconds=2.0, is_last=False, now=rig.now)
    rig.now = 104.0
    attempt.image_ready(0, rows=50, took_seconds=3.0, is_last=True, now=rig.now)
    bodies = [event.body for event in events_of(attempt) if isinstance(event.body, ImageState)]
    assert [(body.index, body.ready, body.rows, body.took_seconds) for body in bodies] == [
        (1, True, 40, 2.0),
        (0, True, 50, 3.0),
    ]
    assert attempt.stages["IMAGES"] == (101.0, 104.0)
    # A hit that shrinks asks for more: the stage goes on from where it began.
    attempt.begin_images(now=106.0)
    assert attempt.working_since is None
    attempt.image_ready(2, rows=40, took_seconds=1.0, is_last=True, now=107.0)
    assert attempt.stages["IMAGES"] == (101.0, 107.0)


def test_image_that_cannot_be_had_ends_a_living_attempt_once() -> None:
    rig, attempt = running()
    failure = Failure(reason="IMAGE_REJECTED", public_message="image 0: damaged", phase="IMAGES", image_index=0)
    rig.lifecycle.fail(attempt, failure)
    assert reason_of(attempt) == "IMAGE_REJECTED"
    assert rig.kinds_sent() == ["Submit", "Cancel"]
    rig.lifecycle.fail(attempt, failure)
    assert rig.kinds_sent() == ["Submit", "Cancel"]
    assert "Completed" not in kinds_of(attempt)
    assert attempt.stages["IMAGES"][1] == rig.now
