"""Segment store against the plain system calls on the same bytes: 757 blocks (the worked example's hit) in 32 segments.

    python tests/bench/bench_kv_store.py [--runs N] [--directory DIR] [--threads N] [--direct-threads N]

Each run measures both sides one after the other, in changing order; the figures are medians over runs of the ratio within a run,
so that a busy machine slows both (decision C19). Every read is checked against what was written before anything is timed. The
directory must lie on a real disk; without fio, a loop of 16 preadv threads stands in for it, and the line says so.
"""

import argparse
import itertools
import json
import mmap
import os
import platform
import random
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import crc32c

from prefill_engine.kv.file_operations import FileOperations
from prefill_engine.kv.record import RecordCodec, RecordShape
from prefill_engine.kv.segment_data import PosixData, scatter
from prefill_engine.kv.segment_file import HEADER_BYTES
from prefill_engine.kv.segment_store import FileSegmentStore
from prefill_engine.kv.segments import BlockLocation, ReadJob, RecordRead, RecordWrite
from prefill_plan.block_keys import BlockKey
from prefill_plan.config import RecordFormat
from prefill_plan.kv_layout import block_layout
from prefill_plan.kvd_config import KvdStoreConfig
from prefill_plan.model_spec import released_model_spec

SHAPE = RecordShape.of_layout(block_layout(released_model_spec(), RecordFormat.FP4))
NUM_BLOCKS, BLOCKS_PER_SEGMENT, QUEUE_DEPTH = 757, 24, 16
NUM_BYTES = NUM_BLOCKS * SHAPE.record_bytes
_FIO_SECONDS = 1


class Pool:
    """Targets in shared memory, in scattered slots, prefaulted."""

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, NUM_BYTES)
        view = memoryview(self._map)
        view[:] = bytes(NUM_BYTES)
        slots = list(range(NUM_BLOCKS))
        random.Random(5).shuffle(slots)
        size = SHAPE.record_bytes
        self.targets = [view[slot * size : (slot + 1) * size] for slot in slots]

    def clear(self) -> None:
        memoryview(self._map)[:] = bytes(NUM_BYTES)


def ignore(*_: object) -> None:
    """What nobody asks for."""


def make_records() -> list[RecordWrite]:
    codec, records = RecordCodec(SHAPE), []
    for index in range(NUM_BLOCKS):
        payload = random.Random(index).randbytes(SHAPE.payload_bytes)
        key = BlockKey(index.to_bytes(32, "big"))
        header = codec.encode_header(key=key, payload=payload, block_index=index, provenance=0)
        records.append(RecordWrite(key=key, record=memoryview(header + payload)))
    return records


class Bench:
    def __init__(self, directory: Path, *, threads: int, direct_threads: int) -> None:
        self.directory, self.threads, self.direct_threads = directory, threads, direct_threads
        self.pool, self.records = Pool(), make_records()
        self.store = self.open_store(threads, direct_io=False)
        self.direct = self.open_store(direct_threads, direct_io=True)
        starts = range(0, NUM_BLOCKS, BLOCKS_PER_SEGMENT)
        segments = [self.store.publish(self.records[start : start + BLOCKS_PER_SEGMENT]) for start in starts]
        self.paths = [str(directory / segment.name) for segment in segments]
        locations = [
            BlockLocation(segment=segment.name, record=record)
            for segment in segments
            for record in range(len(segment.keys))
        ]
        self.reads = [
            RecordRead(key=record.key, location=location, target=target)
            for record, location, target in zip(self.records, locations, self.pool.targets, strict=True)
        ]

    def open_store(self, threads: int, *, direct_io: bool) -> FileSegmentStore:
        config = KvdStoreConfig(read_threads=threads, direct_io=direct_io)
        return FileSegmentStore(self.directory, geometry=SHAPE, config=config)

    def read(self, store: FileSegmentStore, *, group_major: bool = False) -> None:
        bad: list[tuple[int, str]] = []
        job = ReadJob(
            reads=self.reads,
            group_major=group_major,
            on_group=ignore,
            on_bad=lambda index, reason: bad.append((index, reason)),
            is_cancelled=lambda: False,
        )
        store.read(job)
        if bad:
            raise SystemExit(f"{len(bad)} records are bad, first {bad[0]}")

    def check(self) -> None:
        for store, group_major in ((self.store, False), (self.store, True), (self.direct, False)):
            self.pool.clear()
            opens = store.counters()["opens"]
            self.read(store, group_major=group_major)
            for record, target in zip(self.records, self.pool.targets, strict=True):
                if target != record.record:
                    raise SystemExit("a record read is not the one written")
            print(
                f"757 records read and compared, {store.counters()['opens'] - opens} opens of {len(self.paths)} segments"
            )

    def plain_loop(
        self,
        *,
        threads: int,
        flags: int,
        records_per_call: int,
        checksum: bool,
        shuffled: bool = False,
        reader: Callable[[int, Sequence[memoryview], int], int] = os.preadv,
    ) -> None:
        """preadv, and CRC32C of the whole record: what a program without any care would do. reader: instead of preadv."""
        calls = []
        for read in self.reads[::1] if records_per_call == 1 else []:
            calls.append((read.location.segment, read.location.record, [read.target]))
        if records_per_call > 1:
            for _, group in itertools.groupby(self.reads, key=lambda read: read.location.segment):
                of_segment = list(group)
                for start in range(0, len(of_segment), records_per_call):
                    part = of_segment[start : start + records_per_call]
                    calls.append((part[0].location.segment, start, [read.target for read in part]))
        if shuffled:
            random.Random(1).shuffle(calls)
        fds = {name: os.open(self.directory / name, os.O_RDONLY | flags) for name in {call[0] for call in calls}}
        left, lock = iter(calls), threading.Lock()

        def work() -> None:
            while True:
                with lock:
                    call = next(left, None)
                if call is None:
                    return
                name, record, targets = call
                reader(fds[name], targets, HEADER_BYTES + record * SHAPE.record_bytes)
                if checksum:
                    for target in targets:
                        crc32c.crc32c(target)

        helpers = [threading.Thread(target=work) for _ in range(threads - 1)]
        for helper in helpers:
            helper.start()
        work()
        for helper in helpers:
            helper.join()
        for fd in fds.values():
            os.close(fd)

    def publish(self) -> None:
        self.store.publish(self.records[:BLOCKS_PER_SEGMENT])

    def write_once(self) -> None:
        """One write and one fdatasync of a segment's bytes, as a new file."""
        path = self.directory / f"plain-{time.monotonic_ns()}"
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o640)
        buffers = [bytes(HEADER_BYTES), *(record.record for record in self.records[:BLOCKS_PER_SEGMENT])]
        if os.writev(fd, buffers) != HEADER_BYTES + BLOCKS_PER_SEGMENT * SHAPE.record_bytes:
            raise SystemExit("short write")
        os.fdatasync(fd)
        os.close(fd)

    def direct_seconds(self) -> float:
        """Mean over as long as fio runs, because a device's rate goes up and down within a second."""
        started = time.perf_counter()
        for count in itertools.count(1):
            self.read(self.direct)
            seconds = time.perf_counter() - started
            if seconds >= _FIO_SECONDS:
                return seconds / count
        raise AssertionError

    def fio_seconds(self) -> float | None:
        """What reading as many bytes would take at fio's rate: io_uring, O_DIRECT, QD16, random reads of a record's size."""
        if shutil.which("fio") is None:
            return None
        command = ["fio", "--name=r", "--ioengine=io_uring", "--direct=1", "--rw=randread", "--iodepth=16"]
        command += [
            f"--bs={SHAPE.record_bytes}",
            f"--filename={':'.join(self.paths)}",
            f"--runtime={_FIO_SECONDS}",
            "--time_based",
        ]
        command += ["--readonly", "--output-format=json"]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        return NUM_BYTES / float(json.loads(output)["jobs"][0]["read"]["bw_bytes"])


def lent_reads(data: PosixData) -> Callable[[int, Sequence[memoryview], int], int]:
    """The store's way of direct reads, through huge pages where there are some, without verifying."""

    def read(fd: int, targets: Sequence[memoryview], offset: int) -> int:
        with data.lend(fd, sum(target.nbytes for target in targets), offset) as lent:
            if lent is None:
                return data.read(fd, targets, offset)
            scatter(lent, targets)
            return lent.nbytes

    return read


def seconds_of(call: Callable[[], None]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def compare(
    runs: int, ours: Callable[[], float | None], theirs: Callable[[], float | None]
) -> list[tuple[float, float]]:
    """Seconds of both sides per run; a side may return seconds of its own."""
    pairs = []
    for run in range(runs + 1):
        values = {}
        for side in ("ours", "theirs") if run % 2 else ("theirs", "ours"):
            started = time.perf_counter()
            told = ours() if side == "ours" else theirs()
            values[side] = told if told is not None else time.perf_counter() - started
        if run:  # the first is a warm-up
            pairs.append((values["ours"], values["theirs"]))
    return pairs


def report(name: str, pairs: list[tuple[float, float]], *, num_bytes: int, goal: str, is_cost: bool) -> None:
    ratios = sorted(ours / theirs if is_cost else theirs / ours for ours, theirs in pairs)
    deciles = statistics.quantiles(ratios, n=10)
    ours, theirs = (statistics.median(side) for side in zip(*pairs, strict=True))
    print(
        f"{name:58s} ratio {statistics.median(ratios):.2f} (p20 {deciles[1]:.2f}, p80 {deciles[7]:.2f}), goal {goal}; "
        f"ours {ours * 1e3:.2f} ms {num_bytes / ours / 1e9:.2f} GB/s, theirs {theirs * 1e3:.2f} ms"
    )


def run_all(bench: Bench, runs: int) -> None:
    threads, direct = bench.threads, os.O_DIRECT
    strip = max(1, (1 << 20) // SHAPE.record_bytes)

    def unbuffered() -> None:
        bench.read(bench.direct)

    for count in sorted({1, threads}):
        store = bench.open_store(count, direct_io=False)
        pairs = compare(
            runs,
            lambda store=store: bench.read(store),
            lambda count=count: bench.plain_loop(threads=count, flags=0, records_per_call=1, checksum=True),
        )
        name = f"page cache, verified / preadv + CRC loop, {count} thread(s)"
        report(name, pairs, num_bytes=NUM_BYTES, goal=">= 0.70", is_cost=False)
    pairs = compare(runs, lambda: bench.read(bench.store, group_major=True), lambda: bench.read(bench.store))
    report("page cache, group-major / record-major", pairs, num_bytes=NUM_BYTES, goal="none", is_cost=False)

    def preads() -> None:
        bench.plain_loop(threads=QUEUE_DEPTH, flags=direct, records_per_call=1, checksum=False, shuffled=True)

    has_fio = shutil.which("fio") is not None
    if has_fio:
        pairs = compare(runs, bench.direct_seconds, bench.fio_seconds)
        name = "O_DIRECT, verified / fio io_uring QD16 random"
        report(name, pairs, num_bytes=NUM_BYTES, goal=">= 0.80", is_cost=False)
    # fio fills 16 buffers again and again; these fill the same slots as ours.
    name = "O_DIRECT, verified / 16 preadv threads, random"
    goal = "none" if has_fio else ">= 0.80"
    report(name, compare(runs, unbuffered, preads), num_bytes=NUM_BYTES, goal=goal, is_cost=False)

    same_reads = lent_reads(PosixData(FileOperations(), direct_io=True))

    def unverified() -> None:
        count = bench.direct_threads
        bench.plain_loop(threads=count, flags=direct, records_per_call=strip, checksum=False, reader=same_reads)

    pairs = compare(runs, unbuffered, unverified)
    report(
        "O_DIRECT, time with verification / same reads without",
        pairs,
        num_bytes=NUM_BYTES,
        goal="<= 1.10",
        is_cost=True,
    )
    pairs = compare(runs, bench.publish, bench.write_once)
    segment_bytes = HEADER_BYTES + BLOCKS_PER_SEGMENT * SHAPE.record_bytes
    report("publish 24 blocks / one write + fdatasync", pairs, num_bytes=segment_bytes, goal="<= 1.30", is_cost=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--threads", type=int, default=4, help="read_threads of the buffered store")
    parser.add_argument("--direct-threads", type=int, default=4, help="read_threads of the store with direct_io")
    parser.add_argument("--directory", type=Path, default=None, help="on a real disk; default: a temporary one")
    args = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
    model = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line).split(": ")[1]
    print(
        f"kv store, {NUM_BLOCKS} blocks, {NUM_BYTES} B, {args.threads} threads ({args.direct_threads} with O_DIRECT), "
        f"{args.runs} runs; {model}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}, Linux {platform.release()}, "
        f"Python {platform.python_version()}, crc32c {'hardware' if crc32c.hardware_based else 'software'}, "
        f"commit {commit.strip()}"
    )
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        bench = Bench(Path(directory), threads=args.threads, direct_threads=args.direct_threads)
        bench.check()
        run_all(bench, args.runs)


if __name__ == "__main__":
    main()
