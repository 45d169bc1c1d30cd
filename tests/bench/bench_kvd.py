"""kvd's costs with the released layout: time of an Open of 781 keys, memory beyond the pool (C19). Figures, not tests.

A real kvd process with a 2 GiB pool and the real gRPC socket; the caller's Python is part of the time. Row: name, value, unit,
p20, p80, goal.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from prefill_engine.kv.pool_memory import PoolGeometry
from prefill_engine.kv.record import RecordCodec, RecordShape
from prefill_engine.kvd.slot_pool import SlotPool
from prefill_engine.rpc import kv_pb2 as pb
from prefill_plan.config import RecordFormat
from prefill_plan.kv_layout import block_layout
from prefill_plan.model_spec import released_model_spec
from prefill_testing.kvd_fakes import chain
from prefill_testing.kvd_process import KvdProcess, RankClient

NUM_KEYS = 781
SNAPSHOT_BYTES = 1_415_040
MIB = 1 << 20


def released_geometry() -> PoolGeometry:
    shape = RecordShape.of_layout(block_layout(released_model_spec(), RecordFormat.FP4))
    return PoolGeometry(
        layout_digest=shape.layout_digest,
        header_bytes=shape.header_bytes,
        payload_bytes=shape.payload_bytes,
        record_bytes=shape.record_bytes,
        group_bytes=shape.group_bytes,
        snapshot_payload_bytes=SNAPSHOT_BYTES,
    )


def measure(call: Callable[[], object], *, runs: int) -> list[float]:
    """Milliseconds, sorted."""
    for _ in range(5):
        call()
    times = []
    for _ in range(runs):
        started = time.perf_counter()
        call()
        times.append((time.perf_counter() - started) * 1e3)
    return sorted(times)


def report(name: str, values: list[float], unit: str, goal: str) -> None:
    p20, p80 = values[len(values) // 5], values[len(values) * 4 // 5]
    print(f"{name:34} {statistics.median(values):10.3f} {unit:4} p20 {p20:.3f} p80 {p80:.3f}  goal {goal}")


def private_mib(pid: int) -> float:
    """RSS without shared memory, so without the pool; libraries count in full."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return sum(int(lines[name].split()[0]) for name in ("RssAnon", "RssFile")) / 1024


def fill(rank: RankClient, keys: list[bytes], codec: RecordCodec) -> None:
    payload = os.urandom(codec.shape.payload_bytes)
    for start in range(0, len(keys), 64):
        part = keys[start : start + 64]
        reserved = rank.reserve(len(part))
        for index, (slot, key) in enumerate(zip(reserved.slots, part, strict=True)):
            record = rank.pool.record(slot)
            header = codec.encode_header(key=key, payload=payload, block_index=index, provenance=0)
            record[: len(header)] = header
            record[len(header) :] = payload
        blocks = [pb.CommitBlock(key=key, slot=slot) for slot, key in zip(reserved.slots, part, strict=True)]
        result = rank.stub.Commit(pb.CommitRequest(reservation_id=reserved.reservation_id, blocks=blocks))
        assert result.stored_blocks == len(part), result


def bench_opens(rank: RankClient, keys: list[bytes], runs: int) -> None:
    def open_and_close(wanted: list[bytes], found: int, resident: int = 0) -> Callable[[], None]:
        def call() -> None:
            answer = rank.open(wanted, resident_blocks=resident)
            assert answer.found_blocks == found
            open_leases.append(answer.lease_id)

        return call

    open_leases: list[int] = []
    cases = {
        f"open {NUM_KEYS} keys, all in the pool": (open_and_close(keys, NUM_KEYS), "<= 2 ms"),
        f"open {NUM_KEYS} keys, none known": (open_and_close(chain("none", NUM_KEYS), 0), ""),
        f"open {NUM_KEYS} keys, all resident": (open_and_close(keys, NUM_KEYS, NUM_KEYS), ""),
    }
    for name, (call, goal) in cases.items():
        report(name, measure(call, runs=runs), "ms", goal)
        report(
            "  close of one lease", measure(lambda: rank.close_leases(open_leases.pop()), runs=min(20, runs)), "ms", ""
        )
        rank.close_leases(*open_leases)
        open_leases.clear()
    report(
        "truncate of an unknown lease",
        measure(lambda: rank.stub.Truncate(pb.TruncateRequest(lease_id=1)), runs=runs),
        "ms",
        "",
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--pool-bytes", type=int, default=2 << 30)
    args = parser.parse_args()
    geometry = released_geometry()
    codec = RecordCodec.of_geometry(geometry)
    pool_path = f"/dev/shm/kvd-bench-{os.getpid()}"
    with tempfile.TemporaryDirectory() as folder:
        kvd = KvdProcess(
            Path(folder),
            pool_path=pool_path,
            pool_bytes=args.pool_bytes,
            snapshot_bytes=64 * MIB,
            store={"kind": "memory"},
        )
        try:
            report("kvd without a rank", [private_mib(kvd.process.pid)], "MiB", "")
            rank = RankClient(kvd.socket, geometry=geometry)
            keys = chain("k", NUM_KEYS)
            fill(rank, keys, codec)
            bench_opens(rank, keys, args.runs)
            num_blocks = rank.pool.num_blocks
            fill(rank, chain("more", num_blocks - NUM_KEYS), codec)
            memory = private_mib(kvd.process.pid)
            report(f"kvd with {num_blocks} full slots", [memory], "MiB", "<= 150 MiB with 2 GiB")
            rank.leave()
        finally:
            kvd.kill()
            for path in (pool_path, f"{pool_path}.leases"):
                os.unlink(path)
    bench_slots()


def bench_slots(num_slots: int = 599_186) -> None:
    """What a full slot costs in kvd's private memory, in a pool of 64 GiB."""
    before = private_mib(os.getpid())
    pool = SlotPool(num_slots)
    for index in range(num_slots):
        [slot] = pool.take(1)
        pool.finish(slot, index.to_bytes(32, "little"))
        pool.unpin(slot)
    num_bytes = (private_mib(os.getpid()) - before) * MIB / num_slots
    report(f"one of {num_slots} full slots", [num_bytes], "B", "<= 250 B")


if __name__ == "__main__":
    main()
