"""The CUDA side of a swap-in with a stub driver: registration, copy paths. No GPU, no CUDA library."""

from collections.abc import Sequence

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
from prefill_engine.rank.cuda_swap_in import CudaCopier
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
