"""prefill_operator.imbalance: when uneven load of encoders is worth a word, and the word (k8s.md 4.10)."""

from dataclasses import replace

import pytest

from prefill_operator.imbalance import IMBALANCE_LIMIT, EncoderQueue, is_uneven, judge_imbalance
from prefill_operator.model import EmitEvent, ImbalanceNote, PoolLoad
from prefill_operator.names import EventReason
from prefill_testing.cluster_model import ClusterModel, settled_cluster
from prefill_testing.planner_pools import make_pool, make_ve_spec

BATCH = 16_384
FULL = 4 * BATCH


def queues(*queued: int, batch: int = BATCH) -> list[EncoderQueue]:
    return [EncoderQueue(uid=f"u{index}", queued=count, batch=batch) for index, count in enumerate(queued)]


@pytest.mark.parametrize(
    ("queued", "expected"),
    [
        ((), False),
        ((FULL,), False),
        ((0, 0), False),
        ((FULL, FULL), False),
        ((40_000, 24_000), False),
        ((60_000, 20_000), False),
        ((60_000, 10_000), True),
        ((BATCH, 0), False),
        ((BATCH + 1, 0), True),
        ((9_216, 0, 0, 0, 0, 0, 0, 0), False),
        ((FULL, 0, 0, 0, 0, 0, 0, 0), True),
        ((FULL, FULL, FULL, 0), False),
    ],
    ids=[
        "nobody",
        "one",
        "rest",
        "even",
        "1.25",
        "exactly-1.5",
        "1.7",
        "one-batch-runs",
        "one-patch-waits",
        "one-image-in-a-large-pool",
        "one-of-eight-is-full",
        "one-of-four-is-idle",
    ],
)
def test_uneven_is_above_the_limit_where_images_wait(queued: tuple[int, ...], expected: bool) -> None:
    assert is_uneven(queues(*queued)) == expected


def test_floor_is_a_batch_of_that_pool() -> None:
    assert is_uneven(queues(3_000, 0, batch=2_048))
    assert not is_uneven(queues(3_000, 0, batch=4_096))


@pytest.mark.parametrize(
    ("seconds", "span"),
    [
        (0.0, None),
        (299.9, None),
        (300.0, "5 min"),
        (899.0, "5 min"),
        (900.0, "15 min"),
        (3_600.0, "1 h"),
        (21_600.0, "6 h"),
        (86_400.0, "1 day"),
        (1e9, "1 day"),
    ],
)
def test_it_is_said_after_five_minutes_and_in_steps(seconds: float, span: str | None) -> None:
    note = judge_imbalance(queues(1_000, 61_234, 0), seconds=seconds)
    expected = None
    if span is not None:
        expected = ImbalanceNote(imbalance="3.0", span=span, worst_uid="u1", most_patches=61_000)

    assert note == expected


def test_nothing_is_said_of_even_load_however_long() -> None:
    assert judge_imbalance(queues(30_000, 30_000), seconds=1e6) is None


NOTE = ImbalanceNote(imbalance="1.9", span="15 min", worst_uid="", most_patches=52_000)
LOAD = PoolLoad(pending_patches=55_000, patches_per_second=900, imbalance="1.9")


def encoders() -> tuple[ClusterModel, ImbalanceNote]:
    cluster = settled_cluster(make_pool(make_ve_spec(replicas=2)))
    return cluster, replace(NOTE, worst_uid=cluster.pods[cluster.name_of(2)].uid)


def run_with(cluster: ClusterModel, note: ImbalanceNote | None) -> list[EmitEvent]:
    """Events of the pass."""
    decision = cluster.run_pass(replace(cluster.observe(), load=replace(LOAD, uneven=note)))
    return [action for action in decision.actions if isinstance(action, EmitEvent)]


def test_ready_says_where_and_how_much_and_stays_true() -> None:
    cluster, note = encoders()
    before = cluster.condition("Ready").message
    run_with(cluster, note)
    ready = cluster.condition("Ready")
    pod = cluster.pods[cluster.name_of(2)]

    assert (ready.status, ready.reason) == ("True", "AllReady")
    assert ready.message == (
        f"{before}; patches wait unevenly for over 15 min: imbalance 1.9, expected at most {IMBALANCE_LIMIT}; "
        f"look first at {pod.name} on {pod.node}, where most are (52000): "
        "PEs send each image to the VE that by its own report is done first"
    )
    run_with(cluster, None)
    assert cluster.condition("Ready").message == before


def test_pod_that_is_gone_is_not_named() -> None:
    cluster, note = encoders()
    run_with(cluster, replace(note, worst_uid="of another time"))

    assert "expected at most 1.5: PEs send" in cluster.condition("Ready").message


def test_one_event_tells_that_it_began() -> None:
    """Other figures, and passes that repeat, are no second beginning; after a pause it is one."""
    cluster, note = encoders()
    worse = replace(note, imbalance="2.0", most_patches=64_000, span="1 h")
    passes = [run_with(cluster, each) for each in (note, note, worse, None, worse)]

    assert [[event.reason for event in events] for events in passes] == [
        [EventReason.LOAD_IMBALANCE],
        [],
        [],
        [],
        [EventReason.LOAD_IMBALANCE],
    ]
    assert passes[0][0].type == "Warning"
    assert "imbalance 1.9" in passes[0][0].message
