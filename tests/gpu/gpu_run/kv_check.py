"""Blocks and snapshots between device memory and a pool of kvd, at the released layout: every byte compared, ways timed.

The functions that compare take any cache, so a test runs them on a CPU.
"""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from gpu_run.sections import SEED, Bench

from prefill_engine.kv.pool_memory import PoolGeometry, PoolMemory
from prefill_engine.kv_cache import KvCache
from prefill_engine.rank.block_copy import BlockMovers
from prefill_engine.rank.cuda_gates import CudaGates
from prefill_engine.rank.cuda_plan import POISON
from prefill_engine.rank.payloads import Payloads, read_parts
from prefill_engine.rank.swap_counters import SwapCounters
from prefill_engine.rank.swap_in import LoadProgress
from prefill_plan.config import RecordFormat
from prefill_plan.kv_layout import block_layout, state_layout
from prefill_plan.model_spec import released_model_spec

NUM_BLOCKS = 256
GATE_SECONDS = 0.05


def check_kv(bench: Bench) -> None:
    """Verdicts into the results' correctness, times into "kv". Not in a dry run: it needs a driver."""
    from prefill_engine.rank.cuda_build import CudaParts
    from prefill_kernels.gpu import ring_rows

    spec = released_model_spec()
    layout, state = block_layout(spec, RecordFormat.FP4), state_layout(spec, keep_tokens=140, rollback_tokens=6)
    cache = KvCache(
        spec,
        layout=layout,
        state=state,
        num_blocks=NUM_BLOCKS,
        num_state_slots=1,
        device=bench.device,
        images=ring_rows,
    )
    path = f"/dev/shm/gpu-run-{os.getpid()}"
    pool = PoolMemory.create(path, pool_bytes=48 << 20, epoch=1)
    try:
        pool.prefault(2)
        pool.lay_out(PoolGeometry.of_layout(layout, snapshot_bytes=state.snapshot_bytes), 4 << 20)
        parts = CudaParts(cache, gate_seconds=GATE_SECONDS)
        times = bench.log.results.setdefault("kv", {})
        verdicts = {
            "kv blocks": check_blocks(cache, pool, parts.movers, times),
            "kv hand-over": check_payloads(cache, parts.payloads, times),
            "kv snapshot": check_snapshot(cache),
            "kv gates": check_gates(parts.make_gates(threading.Condition(), SwapCounters())),
        }
    finally:
        pool.close()
        Path(path).unlink()
    bench.log.results.setdefault("correctness", {}).update(verdicts)
    for name, verdict in verdicts.items():
        bench.log.say(f"{name}: {verdict}")


def check_blocks(cache: KvCache, pool: PoolMemory, movers: BlockMovers, times: dict[str, float]) -> str:
    """Random blocks saved into the pool in reverse order, while the device has yet to write them, and copied back by groups;
    times: gigabytes per second of each way."""
    layout, num_blocks = cache.layout, len(cache.blocks)
    generator = torch.Generator(cache.blocks.device).manual_seed(SEED)
    cache.blocks.random_(0, 256, generator=generator)
    payloads = cache.blocks[:, : layout.payload_bytes].cpu()
    sources, targets = range(num_blocks), range(num_blocks - 1, -1, -1)
    movers.saver.save(pool, sources=sources, targets=sources)  # the first time pins the pool and compiles
    _write_late(cache)
    movers.saver.wait_for(movers.saver.mark())
    movers.saver.save(pool, sources=sources, targets=targets)
    for source, target in zip(sources, targets, strict=True):
        if pool.payload(target) != payloads[source].numpy().data:
            return f"block {source} differs in pool slot {target}"
    save = _timed(lambda: movers.saver.save(pool, sources=sources, targets=targets))
    cache.blocks.zero_()
    load = 0.0
    for groups in (range(1), range(1, len(layout.sources))):
        first = movers.copier.copy
        load += _timed(lambda first=first, groups=groups: first(pool, groups=groups, sources=targets, targets=sources))  # type: ignore[misc]
    if not torch.equal(cache.blocks[:, : layout.payload_bytes].cpu(), payloads):
        return "blocks differ after they were copied back"
    total = num_blocks * layout.payload_bytes / 1e9
    times |= {"save_gb_per_s": total / save, "load_gb_per_s": total / load}
    return "ok"


def _write_late(cache: KvCache) -> None:
    """Has the device write the blocks anew, behind work that takes it a good part of a second; on a CPU at once."""
    held = cache.blocks.clone()
    cache.blocks.zero_()
    if cache.blocks.device.type == "cuda":
        wide = torch.randn(8192, 8192, device=cache.blocks.device)
        for _ in range(40):
            wide = (wide @ wide).clamp_(-1.0, 1.0)
    cache.blocks.copy_(held)


def check_payloads(cache: KvCache, payloads: Payloads, times: dict[str, float]) -> str:
    """Random blocks read as a hand-over reads them, in pieces that end anywhere, and one filled as a store fills it."""
    num_blocks, piece = len(cache.blocks), (1 << 20) - 7
    cache.blocks.random_(0, 256, generator=torch.Generator(cache.blocks.device).manual_seed(SEED + 1))
    expected = cache.blocks[:, : payloads.num_bytes].cpu().clone()
    parts, total = payloads.parts(range(num_blocks)), num_blocks * payloads.num_bytes
    read: list[bytes] = []
    seconds = _timed(lambda: read.extend(read_parts(parts, start, start + piece) for start in range(0, total, piece)))
    if b"".join(read) != expected.numpy().tobytes():
        return "the hand-over's bytes differ from the cache"

    def first_block(out: memoryview) -> bool:
        out[:] = expected[0].numpy().data
        return True

    payloads.fill(num_blocks - 1, first_block)
    expected[-1] = expected[0]
    if not torch.equal(cache.blocks[:, : payloads.num_bytes].cpu(), expected):
        return "blocks differ after one was filled"
    times["handover_gb_per_s"] = total / seconds / 1e9
    return "ok"


def check_snapshot(cache: KvCache) -> str:
    """A snapshot of random rings holds the rows that it should, and brings them back."""
    state, end = cache.state, 100_000
    for layer in range(state.num_encoder_layers):
        cache.window_ring(layer).random_(0, 256)
    positions = torch.arange(end - state.snapshot_rows, end)
    rows = [cache.window_ring(layer)[0].cpu()[positions % state.ring_rows] for layer in range(state.num_encoder_layers)]
    data = cache.take_snapshot(0, end, first_valid=0)
    images = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(state.num_encoder_layers, -1)
    width = state.window_record_bytes
    held = images[:, : state.snapshot_rows * width].view(state.num_encoder_layers, state.snapshot_rows, width)
    if not torch.equal(held[:, positions % state.snapshot_rows], torch.stack(rows)):
        return "rows of the snapshot differ from the rings"
    cache.clear_state(0)
    cache.restore_snapshot(0, end, data)
    return "ok" if cache.take_snapshot(0, end, first_valid=0) == data else "the restored snapshot differs"


def check_gates(gates: CudaGates) -> str:
    """A stream passes a gate that is open, and one that nobody opens within the gate's time, poisoned."""
    whole = LoadProgress(groups=4, progress=time.monotonic())
    late = LoadProgress(progress=time.monotonic())
    gate = gates.open({b"whole": whole, b"late": late}, is_shared=True)
    started = time.monotonic()
    for layer in gates.group_of:
        gate.wait(layer)
    queued = time.monotonic() - started
    poisoned = gate.poisoned
    waited = time.monotonic() - started
    gates.stop()
    if poisoned != {b"late"}:
        return f"poisoned: {sorted(poisoned)}, expected the late one ({POISON:#x} in its word)"
    if queued > GATE_SECONDS / 2 or waited < GATE_SECONDS / 2:
        return (
            f"waits were queued in {queued:.3f} s and over after {waited:.3f} s: expected at once, and {GATE_SECONDS} s"
        )
    return "ok"


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
