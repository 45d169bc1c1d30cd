"""What a swap-in copies next, when it is over, and how long a step waits for it: decisions without threads or kvd."""

import threading
import time

import pytest

from prefill_engine.rank.step_gate import CpuStepGate
from prefill_engine.rank.swap_counters import SwapCounters
from prefill_engine.rank.swap_in import LoadProgress
from prefill_engine.rank.swap_plan import Copy, Ending, find_ending, next_copy, whole_groups


def copy_of(groups: tuple[int, int], blocks: tuple[int, int]) -> Copy:
    return Copy(first_group=groups[0], end_group=groups[1], first=blocks[0], end=blocks[1])


@pytest.mark.parametrize(
    ("copied", "ready", "limit", "expected"),
    [
        pytest.param((0, 0, 0, 0), (0, 0, 0, 0), 9, None, id="nothing-verified"),
        pytest.param((0, 0, 0, 0), (9, 9, 9, 9), 9, copy_of((0, 1), (0, 4)), id="first-group-alone-at-most-four"),
        pytest.param((9, 0, 0, 0), (9, 9, 9, 9), 9, copy_of((1, 4), (0, 4)), id="the-rest-side-by-side"),
        pytest.param((9, 4, 4, 0), (9, 9, 9, 9), 9, copy_of((1, 3), (4, 8)), id="only-groups-that-stand-alike"),
        pytest.param((9, 4, 4, 4), (9, 6, 6, 5), 9, copy_of((1, 3), (4, 6)), id="only-groups-as-far-verified"),
        pytest.param((9, 9, 9, 2), (9, 9, 9, 3), 9, copy_of((3, 4), (2, 3)), id="last-group-trickles"),
        pytest.param((2, 0, 0, 0), (9, 2, 0, 0), 2, copy_of((1, 2), (0, 2)), id="not-beyond-the-limit"),
        pytest.param((0, 0, 0, 0), (0, 9, 0, 0), 9, copy_of((1, 2), (0, 4)), id="a-later-group-may-come-first"),
    ],
)
def test_next_copy_choice(copied: tuple[int, ...], ready: tuple[int, ...], limit: int, expected: Copy | None) -> None:
    assert next_copy(copied, ready, limit, at_most=4, lone_groups=1) == expected


def test_next_copy_takes_whole_blocks_where_no_group_goes_alone() -> None:
    assert next_copy((0, 0), (9, 9), 9, at_most=4, lone_groups=0) == copy_of((0, 2), (0, 4))
    assert next_copy((0, 0), (9, 3), 9, at_most=4, lone_groups=0) == copy_of((0, 1), (0, 4))


@pytest.mark.parametrize(
    ("copied", "limit", "now", "is_kvd_gone", "expected"),
    [
        pytest.param((5, 5), 5, 0.0, False, Ending.WHOLE, id="whole"),
        pytest.param((5, 3), 5, 0.0, False, None, id="goes-on"),
        pytest.param((5, 3), 3, 0.0, False, Ending.SHORT, id="cut-by-a-failed-read"),
        pytest.param((2, 2), 3, 0.0, False, None, id="what-is-before-the-failed-read-may-come"),
        pytest.param((5, 3), 5, 2.0, False, Ending.LATE, id="out-of-time"),
        pytest.param((5, 3), 5, 0.0, True, Ending.GONE, id="kvd-gone"),
    ],
)
def test_find_ending_choice(
    copied: tuple[int, ...], limit: int, now: float, is_kvd_gone: bool, expected: Ending | None
) -> None:
    assert find_ending(copied, 5, limit, now=now, late_at=1.0, is_kvd_gone=is_kvd_gone) is expected


@pytest.mark.parametrize(("copied", "groups"), [((5, 5, 4), 2), ((4, 5, 5), 0), ((5, 5, 5), 3), ((), 0)])
def test_whole_groups_count(copied: tuple[int, ...], groups: int) -> None:
    assert whole_groups(copied, 5) == groups


# --- gates
def make_gate(
    loads: dict[bytes, LoadProgress], *, gate_seconds: float, is_shared: bool
) -> tuple[CpuStepGate, threading.Condition]:
    changed = threading.Condition()
    gate = CpuStepGate(
        loads,
        changed=changed,
        source_layers=(2, 8),
        gate_seconds=gate_seconds,
        is_shared=is_shared,
        counters=SwapCounters(),
    )
    return gate, changed


def test_gate_lets_groups_pass_that_are_there_and_poisons_at_the_one_that_is_not() -> None:
    gate, _ = make_gate({b"a": LoadProgress(groups=1)}, gate_seconds=0.01, is_shared=False)
    gate.wait(2)
    assert gate.poisoned == frozenset()
    gate.wait(8)
    assert gate.poisoned == {b"a"}
    assert gate.stall_seconds >= 0.01


def test_gate_poisons_at_once_what_will_never_come() -> None:
    loads = {b"a": LoadProgress(ending=Ending.LOST), b"b": LoadProgress(groups=2, ending=Ending.WHOLE)}
    gate, _ = make_gate(loads, gate_seconds=3600.0, is_shared=True)
    gate.wait(2)
    gate.wait(8)
    assert gate.poisoned == {b"a"}


def test_shared_step_stands_still_once_however_many_gates_and_attempts_are_late() -> None:
    loads = {bytes([index]): LoadProgress(groups=index % 2) for index in range(8)}
    gate, _ = make_gate(loads, gate_seconds=0.05, is_shared=True)
    gate.wait(2)
    first = gate.stall_seconds
    gate.wait(8)
    assert gate.poisoned == set(loads)
    assert gate.stall_seconds - first < first


def test_lone_attempt_is_waited_for_as_long_as_its_load_moves() -> None:
    load = LoadProgress()
    gate, changed = make_gate({b"a": load}, gate_seconds=2.0, is_shared=False)

    def move() -> None:
        for _ in range(25):
            time.sleep(0.1)
            with changed:
                load.progress = time.monotonic()
                changed.notify_all()
        with changed:
            load.groups = 2
            changed.notify_all()

    mover = threading.Thread(target=move)
    mover.start()
    gate.wait(8)
    mover.join()
    assert gate.poisoned == frozenset()
    assert gate.stall_seconds > 2.0
