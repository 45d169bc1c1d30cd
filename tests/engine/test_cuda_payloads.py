"""Hand-over, pushes and a store without kvd for a cache in device memory, with a stub driver: bytes, order, faults. No GPU."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from prefill_engine.messages import ChunkFinished, Computed, ReadRange, StoreProgress
from prefill_engine.rank.cuda_payloads import DevicePayloads
from prefill_engine.rank.errors_at_exit import describe_failure
from prefill_engine.rank.payloads import read_parts
from prefill_plan.config import RecordFormat
from prefill_plan.errors import GpuFault
from prefill_plan.kv_layout import block_layout
from prefill_plan.model_spec import released_model_spec
from prefill_testing.kvd_rig import HIT, LONG, cold_bytes, replayed_bytes, run_whole
from prefill_testing.rank_harness import RankHarness, make_submit, tiny_engine_config, tiny_tokens
from prefill_testing.stub_cuda import READ_STREAM, LateDriver, StubDriver, caches_on_device

STRIDE, PAYLOAD = 114_048, 113_920
CACHE = 1 << 20


class BrokenDriver(LateDriver):
    """Its GPU is lost when the test says so."""

    is_broken = False

    def copy_from_device(self, stream: int, target: int, source: int, num_bytes: int) -> None:
        if self.is_broken:
            raise GpuFault("cuMemcpyDtoHAsync_v2 failed with CUresult 214")
        super().copy_from_device(stream, target, source, num_bytes)


def make_payloads(driver: StubDriver) -> DevicePayloads:
    layout = block_layout(released_model_spec(), RecordFormat.FP4)
    return DevicePayloads(driver, layout=layout, cache_address=CACHE, stream=READ_STREAM)


# --- the copies
def test_parts_are_a_sequence_whatever_the_number_of_slots() -> None:
    parts = make_payloads(StubDriver()).parts((4, 2, 7))

    assert (len(parts), len(parts[1:]), len(list(parts)), len(parts[-1])) == (3, 2, 3, PAYLOAD)
    assert not make_payloads(StubDriver()).parts(())
    with pytest.raises(IndexError):
        parts[3]


def test_part_is_copied_when_it_is_sliced_and_only_the_asked_bytes() -> None:
    driver = StubDriver()
    parts = make_payloads(driver).parts((3, 9))
    assert ([len(part) for part in parts], driver.saves) == ([PAYLOAD, PAYLOAD], [])
    data = read_parts(parts, PAYLOAD - 10, PAYLOAD + 4)
    assert len(data) == 14
    assert [(source, size) for _, source, size in driver.saves] == [
        (CACHE + 3 * STRIDE + PAYLOAD - 10, 10),
        (CACHE + 9 * STRIDE, 4),
    ]
    assert driver.synchronized == [READ_STREAM] * 2
    assert parts[0][5:5] == parts[0][PAYLOAD:] == b""
    assert len(driver.saves) == 2


def test_miss_of_the_store_leaves_the_device_alone_and_a_hit_is_one_whole_copy() -> None:
    driver = StubDriver()
    payloads = make_payloads(driver)
    assert payloads.fill(3, lambda _out: None) is None
    assert (driver.copies, driver.synchronized) == ([], [])
    assert payloads.fill(3, len) == PAYLOAD
    assert [(target, size) for target, _, size in driver.copies] == [(CACHE + 3 * STRIDE, PAYLOAD)]
    assert driver.synchronized == [READ_STREAM]


# --- a rank whose cache counts as device memory
@pytest.fixture
def driver() -> Iterator[BrokenDriver]:
    made = BrokenDriver()
    with caches_on_device(made):
        yield made


def test_hand_over_is_read_from_the_device(driver: BrokenDriver) -> None:
    rank = RankHarness(tiny_engine_config())
    assert run_whole(rank, make_submit(tiny_tokens(LONG))) == cold_bytes()
    assert driver.saves
    rank.assert_nothing_held()
    rank.close()


def test_blocks_of_one_device_come_back_to_another_through_a_store(driver: BrokenDriver, tmp_path: Path) -> None:
    first = RankHarness(tiny_engine_config(store_path=tmp_path))
    submit = make_submit(tiny_tokens(LONG))
    run_whole(first, submit)
    store = first.event(submit, StoreProgress)
    assert (store.committed, store.failed) == (HIT // 128, 0)
    first.close()
    other = RankHarness(tiny_engine_config(store_path=tmp_path))
    again = make_submit(tiny_tokens(LONG), attempt=2)
    assert run_whole(other, again) == replayed_bytes(HIT)
    assert other.event(again, Computed).cached_tokens == HIT
    assert len(driver.copies) == HIT // 128
    other.close()


def test_read_that_finds_the_gpu_lost_says_so_and_ends_the_rank(driver: BrokenDriver) -> None:
    rank = RankHarness(tiny_engine_config())
    submit = make_submit(tiny_tokens(LONG), store="skip")
    rank.finish(submit, until=Computed)
    driver.is_broken = True
    reply = rank.reads.read(ReadRange(read_id=1, attempt_id=submit.attempt_id, kind=1, offset=0, length=100))
    assert reply.data == b""
    assert "cannot be read: cuMemcpyDtoHAsync_v2 failed with CUresult 214" in reply.error
    with pytest.raises(GpuFault) as raised:
        rank.turn()
    assert describe_failure(raised.value, rank=0, phase="serve").exit_code == 14
    rank.close()


def test_store_write_that_finds_the_gpu_lost_ends_the_rank(driver: BrokenDriver, tmp_path: Path) -> None:
    rank = RankHarness(tiny_engine_config(store_path=tmp_path))
    driver.is_broken = True
    rank.submit(make_submit(tiny_tokens(LONG)))
    with pytest.raises(GpuFault):
        rank.run_until(lambda: False)
    rank.close()


# --- the end of a step
def test_step_is_waited_for_before_anything_of_it_is_told() -> None:
    rank = RankHarness(tiny_engine_config())
    told: list[int] = []
    runner = rank.loop._stepper._runner
    submit = make_submit(tiny_tokens(LONG))
    runner._wait_for_device = lambda: told.append(rank.names(submit).count(ChunkFinished.__name__))
    run_whole(rank, submit)
    assert told == list(range(rank.names(submit).count(ChunkFinished.__name__)))
    assert len(told) >= 3
    rank.close()
