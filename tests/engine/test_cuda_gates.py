"""Layer gates on CUDA with a stub driver: words, patience, stalls. No GPU, no CUDA library."""

import ctypes
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from prefill_engine.rank.cuda_gates import NUM_WORDS, CudaGates
from prefill_engine.rank.cuda_plan import POISON
from prefill_engine.rank.swap_counters import SwapCounters
from prefill_engine.rank.swap_in import LoadProgress
from prefill_engine.rank.swap_plan import Ending
from prefill_testing.stub_cuda import StubDriver

PATIENCE_SECONDS = 30.0
GATE_SECONDS = 0.2
COMPUTE = 7


@pytest.fixture
def driver() -> StubDriver:
    return StubDriver()


@pytest.fixture
def counters() -> SwapCounters:
    return SwapCounters()


@pytest.fixture
def gates(driver: StubDriver, counters: SwapCounters) -> Iterator[CudaGates]:
    made = CudaGates(
        driver,
        changed=threading.Condition(),
        source_layers=(2, 8, 14, 20),
        gate_seconds=GATE_SECONDS,
        compute_stream=lambda: COMPUTE,
        counters=counters,
    )
    yield made
    made.stop()


def still_moving(groups: int = 0) -> LoadProgress:
    """Its last movement is never long ago."""
    return LoadProgress(groups=groups, progress=time.monotonic() + 3600)


def move(gates: CudaGates, load: LoadProgress, *, groups: int, ending: Ending | None = None) -> None:
    with gates._changed:
        load.groups, load.progress, load.ending = groups, time.monotonic(), ending
        gates._changed.notify_all()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def word(address: int) -> int:
    return ctypes.c_uint32.from_address(address).value


def test_stream_waits_for_words_that_the_watcher_advances(gates: CudaGates, driver: StubDriver) -> None:
    load = still_moving()
    gate = gates.open({b"a": load}, is_shared=False)
    for layer in (2, 8, 14, 20):
        gate.wait(layer)
    (address,) = {address for _, address, _ in driver.waits}
    assert [(stream, value) for stream, _, value in driver.waits] == [(COMPUTE, group) for group in (1, 2, 3, 4)]
    assert driver.synchronized == []  # the step thread has not waited
    with gates._changed:
        load.groups = 2
        gates._changed.notify_all()
    wait_until(lambda: word(address) == 2)
    move(gates, load, groups=4, ending=Ending.WHOLE)
    wait_until(lambda: word(address) == 4)
    assert gate.poisoned == frozenset()
    assert driver.synchronized == [COMPUTE]


@pytest.mark.parametrize("ending", [None, Ending.LATE], ids=["stands-still", "ended-short"])
def test_late_attempt_is_poisoned_and_the_stream_goes_on(
    gates: CudaGates, driver: StubDriver, counters: SwapCounters, ending: Ending | None
) -> None:
    late, good = LoadProgress(groups=1, progress=time.monotonic()), LoadProgress(groups=4, ending=Ending.WHOLE)
    gate = gates.open({b"late": late, b"good": good}, is_shared=False)
    gate.wait(20)
    if ending is not None:
        move(gates, late, groups=1, ending=ending)
    first = driver.waits[0][1]
    wait_until(lambda: word(first) == POISON)
    assert ctypes.c_int32(POISON - 4).value >= 0  # the stream's comparison is signed and cyclic
    assert gate.poisoned == {b"late"}
    assert counters.snapshot()["kv_gate_poisoned"] == 1


def test_patience_begins_when_the_stream_has_come_to_the_gate(gates: CudaGates, driver: StubDriver) -> None:
    driver.is_standing_still = True
    gate = gates.open({b"a": LoadProgress(progress=0.0)}, is_shared=False)
    gate.wait(2)
    address = driver.waits[0][1]
    wait_until(lambda: driver.num_queries > 20)  # more than twice its patience
    assert word(address) == 0
    driver.is_standing_still = False
    wait_until(lambda: word(address) == POISON)
    assert gate.poisoned == {b"a"}
    assert gate.stall_seconds >= GATE_SECONDS


def test_load_that_trickles_holds_up_nobody_but_itself(gates: CudaGates, driver: StubDriver) -> None:
    shared, alone = (gates.open({b"a": still_moving(1)}, is_shared=is_shared) for is_shared in (True, False))
    shared.wait(8)
    alone.wait(8)
    first, second = (address for _, address, _ in driver.waits)
    wait_until(lambda: word(first) == POISON)
    assert word(second) == 1
    assert shared.poisoned == {b"a"}
    assert shared.stall_seconds >= GATE_SECONDS


def test_stalls_at_all_gates_of_a_shared_step_count_together(
    gates: CudaGates, driver: StubDriver, counters: SwapCounters
) -> None:
    load = still_moving()
    gate = gates.open({b"a": load}, is_shared=True)
    for layer in (2, 8):
        gate.wait(layer)
    address = driver.waits[0][1]
    wait_until(lambda: gate._step.gates[0].at is not None)
    with gates._changed:
        load.groups = 1
        gates._changed.notify_all()
    wait_until(lambda: word(address) == POISON)
    assert gate.poisoned == {b"a"}
    stalls = [counters.snapshot()[f"kv_swapin_stall_us_{group}"] for group in (0, 1)]
    assert sum(stalls) >= 1e6 * GATE_SECONDS
    assert sum(stalls) == pytest.approx(1e6 * gate.stall_seconds, abs=2)


def test_gate_that_is_open_when_the_stream_comes_costs_nothing(gates: CudaGates, counters: SwapCounters) -> None:
    gate = gates.open({b"a": LoadProgress(groups=4, ending=Ending.WHOLE)}, is_shared=True)
    for layer in (2, 8, 14, 20):
        gate.wait(layer)
    assert gate.poisoned == frozenset()
    assert gate.stall_seconds == 0.0


def test_events_are_used_again_when_their_step_has_ended(gates: CudaGates, driver: StubDriver) -> None:
    whole = {b"a": LoadProgress(groups=4, ending=Ending.WHOLE)}
    for _ in range(3):
        gate = gates.open(whole, is_shared=False)
        gate.wait(2)
        gate.wait(8)
        assert gate.poisoned == frozenset()
    assert len({event for kind, event, _ in driver.events if kind == "record"}) == 2


def test_words_come_back_and_attempts_beyond_them_are_poisoned_at_once(gates: CudaGates) -> None:
    whole = LoadProgress(groups=4, ending=Ending.WHOLE)
    many = {index.to_bytes(4, "big"): whole for index in range(NUM_WORDS + 3)}
    assert len(gates.open(many, is_shared=True).poisoned) == 3
    assert gates.open({b"a": whole}, is_shared=False).poisoned == frozenset()


def test_stop_lets_no_stream_wait_for_ever(gates: CudaGates) -> None:
    gate = gates.open({b"a": still_moving()}, is_shared=False)
    gate.wait(2)
    gates.stop()
    assert gate.poisoned == {b"a"}
