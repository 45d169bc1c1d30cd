"""What a write-back costs the reads of a hit: 757 blocks from the store into kvd's pool, alone and beside a full write queue.

    python tests/bench/bench_kv_reads.py [--reads N] [--directory DIR]

A Keeper in this process with the released layout and a real segment store; reads from the page cache, 30 ms between two of them,
three hits in turn in a pool that holds one. Beside them segments of 32 new blocks are committed, four at a time, without end: as
kvd does it (reads first, kv.md 7.4), and as it would without waiting for reads. Modes take turns, ten reads each. A figure is the
time from Open to the last group of the last block. The committer is in this process as well and takes its share of the
interpreter; a rank would not. No goal is set: kv.md asks for the order, not for a figure.
"""

import argparse
import asyncio
import itertools
import os
import platform
import random
import secrets
import statistics
import subprocess
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client import CollectorRegistry

from prefill_engine.kv.directory import Holder
from prefill_engine.kv.pool_geometry import PoolGeometry
from prefill_engine.kv.pool_memory import PoolMemory
from prefill_engine.kv.record import RecordCodec, RecordShape
from prefill_engine.kv.segment_store import FileSegmentStore
from prefill_engine.kv.segments import MAX_RECORDS
from prefill_engine.kvd import write_back
from prefill_engine.kvd.commits import SlotKey
from prefill_engine.kvd.directory_local import LocalDirectory, new_local_state
from prefill_engine.kvd.keeper import Keeper
from prefill_engine.kvd.kvd_metrics import KvdMetrics
from prefill_engine.kvd.opens import OpenAsk
from prefill_engine.kvd.store_link import StoreLink
from prefill_plan.block_keys import BlockKey
from prefill_plan.config import RecordFormat
from prefill_plan.kv_layout import block_layout
from prefill_plan.kvd_config import KvdConfig, KvdStoreConfig
from prefill_plan.model_spec import released_model_spec
from prefill_testing.kvd_fakes import FakeTransport

SHAPE = RecordShape.of_layout(block_layout(released_model_spec(), RecordFormat.FP4))
NUM_BLOCKS, NUM_HITS, POOL_BYTES, SNAPSHOT_BYTES = 757, 3, 128 << 20, 4 << 20
OWNER, TURN_READS, PAUSE_SECONDS, COMMITTERS = 7, 10, 0.03, 4
PATIENCE = {"alone": 0.0, "reads first": write_back.PATIENCE_SECONDS, "no order": 0.0}


@dataclass(kw_only=True)
class Bench:
    """seconds: of each read, by mode. segments: written beside them. busy_seconds: of a mode, pauses included."""

    keeper: Keeper
    pool: PoolMemory
    root: Path
    codec: RecordCodec
    payload: bytes
    hits: list[list[BlockKey]] = field(default_factory=list)
    kept: set[Path] = field(default_factory=set)
    seconds: dict[str, list[float]] = field(default_factory=lambda: {mode: [] for mode in PATIENCE})
    segments: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PATIENCE, 0))
    busy_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PATIENCE, 0.0))

    async def commit(self, keys: list[BlockKey]) -> None:
        """Raises SystemExit unless all of them are stored."""
        while (
            got := self.keeper.reserve(OWNER, num_blocks=len(keys), num_snapshots=0, tenant="")
        ) is None or not got.slots:
            await asyncio.sleep(0.001)
        blocks = [SlotKey(slot=slot, key=key) for slot, key in zip(got.slots, keys, strict=False)]
        for index, one in enumerate(blocks):
            record = self.pool.record(one.slot)
            header = self.codec.encode_header(
                key=BlockKey(one.key), payload=self.payload, block_index=index, provenance=0
            )
            record[: len(header)] = header
            record[len(header) :] = self.payload
        result = await self.keeper.commit(got.lease_id, blocks, [])
        if result.failure:
            raise SystemExit(f"a segment was not stored: {result.failure}")

    async def fill(self) -> None:
        for _ in range(NUM_HITS):
            keys = new_keys(NUM_BLOCKS)
            for start in range(0, NUM_BLOCKS, MAX_RECORDS):
                await self.commit(keys[start : start + MAX_RECORDS])
            self.hits.append(keys)
        self.kept = set(self.root.rglob("*.seg"))

    async def read(self, keys: list[BlockKey]) -> float:
        ask = OpenAsk(
            keys=keys,
            resident_blocks=0,
            tenant="",
            want_snapshot=False,
            limit_seconds=60.0,
            refuse_replayed=False,
        )
        started = time.perf_counter()
        answer = await self.keeper.open(OWNER, ask)
        if answer.found_blocks != NUM_BLOCKS:
            raise SystemExit(f"{answer.found_blocks} blocks were found: expected {NUM_BLOCKS}")
        row, last = self.pool.lease(answer.row), len(SHAPE.group_bytes) - 1
        while row.ready[last] < NUM_BLOCKS:
            await asyncio.sleep(0.0005)
        seconds = time.perf_counter() - started
        self.keeper.close([answer.lease_id])
        return seconds

    async def write_without_end(self, mode: str) -> None:
        while True:
            await self.commit(new_keys(MAX_RECORDS))
            self.segments[mode] += 1
            for path in set(self.root.rglob("*.seg")) - self.kept:  # the disk is not to be filled
                path.unlink(missing_ok=True)

    async def take_turn(self, mode: str, hits: "itertools.cycle[list[BlockKey]]") -> None:
        write_back.PATIENCE_SECONDS = PATIENCE[mode]
        writers = (
            [] if mode == "alone" else [asyncio.create_task(self.write_without_end(mode)) for _ in range(COMMITTERS)]
        )
        started = time.perf_counter()
        for _ in range(TURN_READS):
            await asyncio.sleep(PAUSE_SECONDS)
            self.seconds[mode].append(await self.read(next(hits)))
        self.busy_seconds[mode] += time.perf_counter() - started
        for writer in writers:
            writer.cancel()
        for writer in writers:
            with suppress(asyncio.CancelledError):
                await writer
        await self.keeper.drain(60.0)
        self.keeper.is_draining = False


def new_keys(num: int) -> list[BlockKey]:
    return [BlockKey(secrets.token_bytes(32)) for _ in range(num)]


async def run(directory: Path, num_reads: int) -> Bench:
    geometry = PoolGeometry(
        layout_digest=SHAPE.layout_digest,
        header_bytes=SHAPE.header_bytes,
        payload_bytes=SHAPE.payload_bytes,
        record_bytes=SHAPE.record_bytes,
        group_bytes=SHAPE.group_bytes,
        snapshot_payload_bytes=1 << 20,
    )
    path = f"/dev/shm/kvd-bench-reads-{os.getpid()}"
    store = FileSegmentStore(directory, geometry=SHAPE, config=KvdStoreConfig())
    config = KvdConfig(pool_bytes=POOL_BYTES, snapshot_bytes=SNAPSHOT_BYTES)
    memory = PoolMemory.create(path, pool_bytes=POOL_BYTES, epoch=1)
    try:
        memory.prefault(2)
        local = LocalDirectory(
            new_local_state(), Holder(holder_id="me", epoch=1, endpoint="127.0.0.1:1"), clock=time.monotonic
        )
        keeper = Keeper(
            config,
            memory,
            store=StoreLink(lambda _geometry: store, local),
            directory=local,
            transport=FakeTransport(),
            metrics=KvdMetrics(CollectorRegistry()),
        )
        keeper.start()
        session, _ = await keeper.connect(owner_epoch=OWNER, engine_id="e", rank=0, geometry=geometry, held_leases=())
        pool = PoolMemory.attach(memory.path, nonce=memory.nonce)
        pool.set_echo(session.echo_index, OWNER)
        keeper.attach(session)
        codec, payload = RecordCodec(SHAPE), random.Random(1).randbytes(SHAPE.payload_bytes)
        bench = Bench(keeper=keeper, pool=pool, root=directory, codec=codec, payload=payload)
        await bench.fill()
        hits = itertools.cycle(bench.hits)
        for keys in bench.hits:
            await bench.read(keys)
        for _ in range(num_reads // TURN_READS):
            for mode in PATIENCE:
                await bench.take_turn(mode, hits)
        await keeper.stop()
        pool.close()
        return bench
    finally:
        for name in (path, f"{path}.leases"):
            with suppress(FileNotFoundError):
                os.unlink(name)


def report(bench: Bench) -> None:
    alone = statistics.quantiles(bench.seconds["alone"], n=100)
    for mode, seconds in bench.seconds.items():
        centiles = statistics.quantiles(seconds, n=100)
        p50, p99 = centiles[49], centiles[98]
        rate = bench.segments[mode] / bench.busy_seconds[mode]
        print(
            f"{mode:12} p50 {p50 * 1e3:6.1f} ms ({p50 / alone[49]:.2f} x alone), p99 {p99 * 1e3:6.1f} ms "
            f"({p99 / alone[98]:.2f} x alone); {rate:5.1f} segments written per second"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reads", type=int, default=100, help="of each mode")
    parser.add_argument("--directory", type=Path, default=None, help="on a real disk; default: a temporary one")
    args = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
    print(
        f"read of {NUM_BLOCKS} blocks beside a write-back, {args.reads} reads of each mode; {os.cpu_count()} CPUs, load "
        f"{os.getloadavg()[0]:.1f}, Python {platform.python_version()}, commit {commit.strip()}"
    )
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        report(asyncio.run(run(Path(directory), args.reads)))


if __name__ == "__main__":
    main()
