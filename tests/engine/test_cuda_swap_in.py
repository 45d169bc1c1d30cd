"""The CUDA side of a swap-in with a stub driver: registration, copy paths, gate words. No GPU, no CUDA library."""

import ctypes
import threading
import time
from collections.abc import Iterator, Sequence

import pytest

from prefill_engine.kv.pool_memory import RECORDS_OFFSET
from prefill_engine.rank.cuda_plan import (
    POISON,
    CopyPath,
    Registration,
    choose_copy_path,
    gate_word,
    plan_registrations,
)
from prefill_engine.rank.cuda_pools import PinnedPools
from prefill_engine.rank.cuda_swap_in import NUM_WORDS, CudaCopier, CudaGates
from prefill_engine.rank.swap_counters import SwapCounters
from prefill_engine.rank.swap_in import LoadProgress
from prefill_engine.rank.swap_plan import Ending
from prefill_plan.config import RecordFormat
from prefill_plan.kv_layout import block_layout
from prefill_plan.model_spec import released_model_spec
from prefill_testing.stub_cuda import StubDriver

GIB = 1 << 30
RECORD = 114_688
PATIENCE_SECONDS = 30.0


# --- plans (kv.md 8, bug 15)
@pytest.mark.parametrize("pool_bytes", [RECORD * 10 + 8192, 64 * GIB, 64 * GIB + 1, 600 * GIB, 1337 * GIB])
def test_pool_is_registered_in_calls_of_64_gib_that_end_on_records(pool_bytes: int) -> None:
    chunks = plan_registrations(pool_bytes, first_record=8192, record_bytes=RECORD)
    assert chunks[0].start == 0
    assert chunks[-1].end == pool_bytes
    assert [chunk.end for chunk in chunks[:-1]] == [chunk.start for chunk in chunks[1:]]
    assert all(0 < chunk.end - chunk.start <= 64 * GIB for chunk in chunks)
    assert all((chunk.end - 8192) % RECORD == 0 for chunk in chunks[:-1])


def test_registrations_of_a_small_case_are_as_computed_by_hand() -> None:
    chunks = plan_registrations(1000, first_record=100, record_bytes=90, max_bytes=300)
    assert chunks == tuple(Registration(start=s, end=e) for s, e in [(0, 280), (280, 550), (550, 820), (820, 1000)])


def test_registration_refuses_records_larger_than_a_call() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        plan_registrations(1000, first_record=100, record_bytes=300, max_bytes=300)


@pytest.mark.parametrize(
    ("piece_bytes", "path"),
    [
        (22_784, CopyPath.GATHER),
        (28 * 1024 - 1, CopyPath.GATHER),
        (28 * 1024, CopyPath.BATCH),
        (113_920, CopyPath.BATCH),
    ],
)
def test_copy_path_follows_the_size_of_a_piece(piece_bytes: int, path: CopyPath) -> None:
    assert choose_copy_path(piece_bytes) is path


@pytest.mark.parametrize(
    ("groups", "is_over", "still", "word"),
    [
        pytest.param(0, False, 0.0, 0, id="nothing-yet"),
        pytest.param(2, False, 0.019, 2, id="moving"),
        pytest.param(2, False, 0.020, POISON, id="stands-still"),
        pytest.param(2, True, 0.0, POISON, id="ended-short"),
        pytest.param(4, True, 9.0, 4, id="whole"),
    ],
)
def test_gate_word_value(groups: int, is_over: bool, still: float, word: int) -> None:
    assert gate_word(groups=groups, is_over=is_over, num_groups=4, still_seconds=still, gate_seconds=0.020) == word


# --- with a driver
class StubPool:
    """What the copier needs of a pool."""

    address = 1 << 40
    num_bytes = RECORDS_OFFSET + 200 * RECORD


def test_copier_pins_once_and_chooses_the_path_by_piece() -> None:
    driver, gathers = StubDriver(), []

    def gather(address: int, sources: Sequence[int], targets: Sequence[int], *, offset: int, num_bytes: int) -> None:
        gathers.append((address, tuple(sources), tuple(targets), offset, num_bytes))

    layout = block_layout(released_model_spec(), RecordFormat.FP4)
    pools = PinnedPools(driver, record_bytes=layout.record_bytes)
    copier = CudaCopier(driver, pools=pools, layout=layout, cache_address=1 << 20, stream=5, gather=gather)
    assert copier.copy(StubPool(), groups=range(0, 1), sources=(3, 9), targets=(1, 0)) == 2 * 22_784
    base = StubPool.address + RECORDS_OFFSET + 768
    assert gathers == [(base, (3, 9), (1, 0), 0, 22_784)]
    assert copier.copy(StubPool(), groups=range(1, 4), sources=(3, 9), targets=(1, 0)) == 2 * 91_136
    offset = 22_784
    assert driver.copies == [
        ((1 << 20) + 1 * 114_048 + offset, base + 3 * RECORD + offset, 91_136),
        ((1 << 20) + 0 * 114_048 + offset, base + 9 * RECORD + offset, 91_136),
    ]
    assert driver.synchronized == [5, 5]  # nobody hears of bytes that have not arrived
    assert driver.registered == {StubPool.address: StubPool.num_bytes}
    pools.close()
    assert driver.registered == {}


@pytest.fixture
def gates() -> Iterator[CudaGates]:
    made = CudaGates(
        StubDriver(),
        changed=threading.Condition(),
        source_layers=(2, 8, 14, 20),
        gate_seconds=0.2,
        compute_stream=lambda: 7,
        counters=SwapCounters(),
    )
    yield made
    made.stop()


def move(gates: CudaGates, load: LoadProgress, *, groups: int, ending: Ending | None = None) -> None:
    with gates._changed:
        load.groups, load.progress, load.ending = groups, time.monotonic(), ending
        gates._changed.notify_all()


def wait_for_word(gates: CudaGates, address: int, value: int) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while ctypes.c_uint32.from_address(address).value != value:
        assert time.monotonic() < deadline, ctypes.c_uint32.from_address(address).value
        time.sleep(0.002)


def test_stream_waits_for_words_that_the_watcher_advances(gates: CudaGates) -> None:
    load = LoadProgress(progress=time.monotonic() + 3600)
    gate = gates.open({b"a": load})
    for layer in (2, 8, 14, 20):
        gate.wait(layer)
    (address,) = {address for _, address, _ in gates.driver.waits}
    assert [(stream, value) for stream, _, value in gates.driver.waits] == [(7, 1), (7, 2), (7, 3), (7, 4)]
    assert gates.driver.synchronized == []  # the step thread has not waited
    with gates._changed:
        load.groups = 2
        gates._changed.notify_all()
    wait_for_word(gates, address, 2)
    move(gates, load, groups=4, ending=Ending.WHOLE)
    wait_for_word(gates, address, 4)
    assert gate.poisoned == frozenset()
    assert gates.driver.synchronized == [7]


@pytest.mark.parametrize("ending", [None, Ending.LATE], ids=["stands-still", "ended-short"])
def test_late_attempt_is_poisoned_and_the_stream_goes_on(gates: CudaGates, ending: Ending | None) -> None:
    late, good = LoadProgress(groups=1, progress=time.monotonic()), LoadProgress(groups=4, ending=Ending.WHOLE)
    gate = gates.open({b"late": late, b"good": good})
    gate.wait(20)
    if ending is not None:
        move(gates, late, groups=1, ending=ending)
    first = gates.driver.waits[0][1]
    wait_for_word(gates, first, POISON)
    assert ctypes.c_int32(POISON - 4).value >= 0  # the stream's comparison is signed and cyclic
    assert gate.poisoned == {b"late"}


def test_words_come_back_and_attempts_beyond_them_are_poisoned_at_once(gates: CudaGates) -> None:
    whole = LoadProgress(groups=4, ending=Ending.WHOLE)
    many = {index.to_bytes(4, "big"): whole for index in range(NUM_WORDS + 3)}
    assert len(gates.open(many).poisoned) == 3
    assert gates.open({b"a": whole}).poisoned == frozenset()


def test_stop_lets_no_stream_wait_for_ever(gates: CudaGates) -> None:
    gate = gates.open({b"a": LoadProgress(progress=time.monotonic() + 3600)})
    gate.wait(2)
    gates.stop()
    assert gate.poisoned == {b"a"}
