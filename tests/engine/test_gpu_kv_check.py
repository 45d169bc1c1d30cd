"""The GPU script's comparison of blocks and snapshots, on a CPU: right ways pass, and a wrong one is told."""

import secrets
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from prefill_engine.kv.pool_memory import PoolGeometry, PoolMemory
from prefill_engine.kv_cache import KvCache
from prefill_engine.rank.block_copy import BlockMovers, CpuCopier
from prefill_engine.rank.block_save import CpuSaver
from prefill_engine.rank.payloads import HostPayloads, Part
from prefill_plan.config import RecordFormat
from prefill_plan.kv_layout import block_layout, state_layout
from prefill_plan.model_spec import released_model_spec

T = TypeVar("T")
NUM_BLOCKS = 5


@pytest.fixture
def kv_check(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "gpu"))
    import gpu_run.kv_check

    return gpu_run.kv_check


@pytest.fixture
def cache() -> KvCache:
    spec = released_model_spec()
    return KvCache(
        spec,
        layout=block_layout(spec, RecordFormat.FP4),
        state=state_layout(spec, keep_tokens=140, rollback_tokens=6),
        num_blocks=NUM_BLOCKS,
        num_state_slots=1,
        device=torch.device("cpu"),
    )


@pytest.fixture
def pool(cache: KvCache) -> Iterator[PoolMemory]:
    path = Path(f"/dev/shm/test-gpu-kv-{secrets.token_hex(6)}")
    pool = PoolMemory.create(str(path), pool_bytes=4 << 20, epoch=1)
    pool.lay_out(PoolGeometry.of_layout(cache.layout, snapshot_bytes=cache.state.snapshot_bytes), 2 << 20)
    yield pool
    pool.close()
    path.unlink()


class CrossedSaver(CpuSaver):
    """Two blocks change places."""

    def save(self, pool: PoolMemory, *, sources: Sequence[int], targets: Sequence[int]) -> None:
        super().save(pool, sources=sources, targets=[targets[1], targets[0], *targets[2:]])


@pytest.mark.parametrize(("saver", "verdict"), [(CpuSaver, "ok"), (CrossedSaver, "block 0 differs in pool slot 4")])
def test_blocks(kv_check: Any, cache: KvCache, pool: PoolMemory, saver: type[CpuSaver], verdict: str) -> None:
    times: dict[str, float] = {}
    movers = BlockMovers(copier=CpuCopier(cache), saver=saver(cache.block_view))
    assert kv_check.check_blocks(cache, pool, movers, times) == verdict
    assert set(times) == ({"save_gb_per_s", "load_gb_per_s"} if verdict == "ok" else set())


class ShiftedPayloads(HostPayloads):
    """Reads the block before."""

    def parts(self, slots: Sequence[int]) -> list[Part]:
        return super().parts([max(0, slot - 1) for slot in slots])


class LostPayloads(HostPayloads):
    """What is filled does not arrive."""

    def fill(self, slot: int, read: Callable[[memoryview], T | None]) -> T | None:
        return read(memoryview(bytearray(self.num_bytes)))


@pytest.mark.parametrize(
    ("payloads", "verdict"),
    [
        (HostPayloads, "ok"),
        (ShiftedPayloads, "the hand-over's bytes differ from the cache"),
        (LostPayloads, "blocks differ after one was filled"),
    ],
)
def test_hand_over(kv_check: Any, cache: KvCache, payloads: type[HostPayloads], verdict: str) -> None:
    assert kv_check.check_payloads(cache, payloads(cache), {}) == verdict


def test_snapshot(kv_check: Any, cache: KvCache) -> None:
    assert kv_check.check_snapshot(cache) == "ok"
