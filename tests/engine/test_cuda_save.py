"""New blocks from device memory into kvd's pool, with stub drivers: order, bytes, and who waits. No GPU, no CUDA library."""

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest

from prefill_engine.kv.pool_memory import RECORDS_OFFSET
from prefill_engine.messages import StoreProgress
from prefill_engine.rank.cuda_driver import LibCuda
from prefill_engine.rank.cuda_pools import PinnedPools
from prefill_engine.rank.cuda_save import CudaSaver
from prefill_plan.config import RecordFormat
from prefill_plan.errors import GpuFault
from prefill_plan.kv_layout import block_layout
from prefill_plan.model_spec import released_model_spec
from prefill_testing.fake_kvd import FakeKvd
from prefill_testing.kvd_rig import HIT, LONG, cold_bytes, count, kvd_config, run_whole
from prefill_testing.rank_harness import RankHarness, make_submit, tiny_tokens
from prefill_testing.stub_cuda import LateDriver, StubDriver

RECORD, STRIDE, PAYLOAD = 114_688, 114_048, 113_920
COMPUTE, SAVE = 7, 5
CACHE = 1 << 20


class StubPool:
    """What the saver needs of a pool."""

    address = 1 << 40
    num_bytes = RECORDS_OFFSET + 200 * RECORD


def make_saver(driver: StubDriver) -> CudaSaver:
    layout = block_layout(released_model_spec(), RecordFormat.FP4)

    def scatter(sources: Sequence[int], target_address: int, targets: Sequence[int], *, num_bytes: int) -> None:
        raise AssertionError("a whole payload goes by the copy engine")

    return CudaSaver(
        driver,
        pools=PinnedPools(driver, record_bytes=layout.record_bytes),
        layout=layout,
        cache_address=CACHE,
        compute_stream=lambda: COMPUTE,
        stream=SAVE,
        scatter=scatter,
    )


def test_mark_makes_nobody_wait_and_each_block_is_one_copy_behind_it() -> None:
    driver = StubDriver()
    saver = make_saver(driver)
    mark = saver.mark()
    assert (driver.events, driver.synchronized) == ([("record", mark, COMPUTE)], [])
    saver.wait_for(mark)
    assert driver.events[1:] == [("wait", mark, SAVE)]
    assert driver.synchronized == []
    saver.save(StubPool(), sources=(3, 9), targets=(1, 0))
    base = StubPool.address + RECORDS_OFFSET + 768
    assert driver.saves == [(base + RECORD, CACHE + 3 * STRIDE, PAYLOAD), (base, CACHE + 9 * STRIDE, PAYLOAD)]
    assert driver.synchronized == [SAVE]  # a header is of bytes that have arrived
    assert driver.registered == {StubPool.address: StubPool.num_bytes}


def test_event_is_used_again_only_after_its_wait_was_queued() -> None:
    saver = make_saver(StubDriver())
    first, second = saver.mark(), saver.mark()
    assert first != second
    saver.wait_for(first)
    assert saver.mark() == first
    assert saver.mark() not in (first, second)


def test_pool_is_pinned_once_for_both_threads() -> None:
    class SlowDriver(StubDriver):
        calls = 0

        def register_host(self, address: int, num_bytes: int) -> None:
            self.calls += 1
            both.wait(1.0)  # the other thread would come in here
            super().register_host(address, num_bytes)

    both, driver = threading.Event(), SlowDriver()
    pools = PinnedPools(driver, record_bytes=RECORD)
    threads = [threading.Thread(target=pools.device_address, args=(StubPool(),)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert driver.calls == 1


# --- a rank whose cache counts as device memory
@pytest.fixture
def kvd() -> Iterator[FakeKvd]:
    with FakeKvd.running() as fake:
        yield fake


def save_by(driver: LateDriver, rank: RankHarness) -> None:
    """Blocks go out as a GPU's would: written by a kernel that runs when something waits for it, copied by another one."""
    cache = rank.cache
    layout, base = cache.layout, cache.blocks.data_ptr()

    def scatter(sources: Sequence[int], target_address: int, targets: Sequence[int], *, num_bytes: int) -> None:
        def run() -> None:
            for source, target in zip(sources, targets, strict=True):
                at = target_address + target * layout.record_bytes
                ctypes.memmove(at, base + source * layout.stride_bytes, num_bytes)

        driver.queue(SAVE, run)

    rank.source._writer._saver = CudaSaver(
        driver,
        pools=PinnedPools(driver, record_bytes=layout.record_bytes),
        layout=layout,
        cache_address=base,
        compute_stream=lambda: COMPUTE,
        stream=SAVE,
        scatter=scatter,
    )
    publish = rank.kv.publish

    def publish_late(attempt: Any, *, upto_blocks: int) -> None:
        """The bytes of newly complete blocks are there only when the compute stream has run, as it has before the next step."""
        for index in range(attempt.num_published, upto_blocks):
            view = cache.block_view(attempt.block_slots[index])
            right, view[:] = bytes(view), bytes(len(view))
            driver.queue(COMPUTE, _writing(view, right))
        publish(attempt, upto_blocks=upto_blocks)

    rank.kv.publish = publish_late
    rank.turn = lambda: rank.loop.turn(timeout_seconds=0.05, before_step=lambda: driver.reach(COMPUTE))


def _writing(view: memoryview, data: bytes) -> Callable[[], None]:
    def write() -> None:
        view[:] = data

    return write


def test_blocks_saved_from_a_device_are_a_hit_for_another_rank(kvd: FakeKvd) -> None:
    driver, first = LateDriver(), RankHarness(kvd_config(kvd.socket))
    save_by(driver, first)
    submit = make_submit(tiny_tokens(LONG))
    run_whole(first, submit)
    store = first.event(submit, StoreProgress)
    assert (store.committed, store.failed) == (HIT // 128, 0)
    first.assert_nothing_held()
    first.close()
    assert COMPUTE not in driver.synchronized
    other = RankHarness(kvd_config(kvd.socket))
    assert run_whole(other, make_submit(tiny_tokens(LONG), attempt=2)) == cold_bytes()
    assert count(other, "kv_swapin_whole") == 1
    other.close()


# --- libcuda
class FakeLibrary:
    """Functions by name; the context is per thread, as in libcuda."""

    def __init__(self, context: int | None = 77) -> None:
        self.calls: list[tuple[int, str, list[Any]]] = []
        self.codes: dict[str, int] = {}
        self._context = context

    def __getitem__(self, name: str) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            plain = [getattr(argument, "value", argument) for argument in arguments]
            self.calls.append((threading.get_ident(), name, plain))
            if name == "cuCtxGetCurrent":
                arguments[0]._obj.value = self._context
            return self.codes.get(name, 0)

        return call


def test_every_thread_gets_the_context_before_its_first_call() -> None:
    library = FakeLibrary()
    cuda = LibCuda(library)
    cuda.record_event(5, 6)

    def save() -> None:
        cuda.wait_event(8, 5)
        cuda.copy_from_device(8, 1 << 40, 1 << 41, 114)
        cuda.synchronize(8)

    thread = threading.Thread(target=save)
    thread.start()
    thread.join(30)
    assert [(name, plain) for _, name, plain in library.calls[1:]] == [
        ("cuEventRecord", [5, 6]),
        ("cuCtxSetCurrent", [77]),
        ("cuStreamWaitEvent", [8, 5, 0]),
        ("cuMemcpyDtoHAsync_v2", [1 << 40, 1 << 41, 114, 8]),
        ("cuStreamSynchronize", [8]),
    ]
    assert [one[0] == two[0] for one, two in pairwise(library.calls)] == [True, False, True, True, True]


def test_driver_without_a_context_or_with_an_error_says_so() -> None:
    with pytest.raises(RuntimeError, match="no CUDA context"):
        LibCuda(FakeLibrary(context=None))
    library = FakeLibrary()
    cuda = LibCuda(library)
    for code, is_reached in ((600, False), (0, True)):
        library.codes["cuEventQuery"] = code
        assert cuda.is_reached(5) is is_reached
    for code, expected in ((700, GpuFault), (214, GpuFault), (2, MemoryError), (1, RuntimeError), (600, RuntimeError)):
        library.codes["cuStreamSynchronize"] = code
        with pytest.raises(expected, match=f"cuStreamSynchronize failed with CUresult {code}"):
            cuda.synchronize(1)
