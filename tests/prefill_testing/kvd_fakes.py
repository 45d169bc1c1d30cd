"""Store and transport of kvd with faults on demand, and the geometry and records they deal in. No torch."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from prefill_engine.kv.pool_memory import PoolGeometry
from prefill_engine.kv.record import RecordCodec
from prefill_engine.kv.segments import ReadJob, RecordWrite, SegmentInfo
from prefill_engine.kv.snapshot_record import SnapshotCodec
from prefill_engine.kv.transport.contract import PullOutcome, PullState, Source
from prefill_engine.kvd.block_reads import check_records
from prefill_plan.block_keys import BlockKey, snapshot_key
from prefill_plan.errors import StoreUnavailable
from prefill_testing.blocks import make_key, make_payload, tiny_layout

LAYOUT = tiny_layout()
SNAPSHOT_BYTES = 10_000
GEOMETRY = PoolGeometry(
    layout_digest=LAYOUT.digest(),
    header_bytes=LAYOUT.header_bytes,
    payload_bytes=LAYOUT.payload_bytes,
    record_bytes=LAYOUT.record_bytes,
    group_bytes=tuple(source.group_bytes for source in LAYOUT.sources),
    snapshot_payload_bytes=SNAPSHOT_BYTES,
)
CODEC = RecordCodec(LAYOUT)
SNAPSHOT_CODEC = SnapshotCodec(LAYOUT.digest(), SNAPSHOT_BYTES)


def make_record(key: BlockKey, *, index: int = 0, provenance: int = 0) -> bytes:
    """The record of `key`; its payload follows from the key, so that anybody can tell a wrong byte."""
    payload = make_payload(LAYOUT, key.hex())
    return CODEC.encode_header(key=key, payload=payload, block_index=index, provenance=provenance) + payload


def make_snapshot(key: BlockKey, *, generation: int = 1, exact: bool = True) -> bytes:
    """The snapshot record at the end of block `key`."""
    payload = (key * (SNAPSHOT_BYTES // len(key) + 1))[:SNAPSHOT_BYTES]
    header = SNAPSHOT_CODEC.encode_header(
        key=snapshot_key(key), position=128, first_valid=0, exact=exact, generation=generation, payload=payload
    )
    return (header + payload).ljust(SNAPSHOT_CODEC.record_bytes, b"\x00")


def chain(label: str, num: int) -> list[BlockKey]:
    return [make_key(f"{label}{index}") for index in range(num)]


class FakeStore:
    """SegmentStore in memory. hang: reads wait for it. fail_reads, fail_writes: every one fails. damage: changes what is read."""

    store_id = "fake"

    def __init__(self) -> None:
        self.segments: dict[str, list[tuple[BlockKey, bytes]]] = {}
        self.hang: threading.Event | None = None
        self.fail_reads = self.fail_writes = False
        self.damage: Callable[[BlockKey, bytearray], None] = lambda _key, _record: None
        self.num_reads = 0
        self.group_major: list[bool] = []
        self.jobs: list[ReadJob] = []
        self.tenants: list[str] = []

    def put(self, keys: Sequence[BlockKey], *, provenance: int = 0) -> SegmentInfo:
        records = [(key, make_record(key, index=index, provenance=provenance)) for index, key in enumerate(keys)]
        return self._add(records)

    def read(self, job: ReadJob) -> None:
        self.group_major.append(job.group_major)
        self.jobs.append(job)
        for index, read in enumerate(job.reads):
            if self.hang is not None:
                self.hang.wait()
            if self.fail_reads:
                job.on_bad(index, "io")
                continue
            if job.is_cancelled():
                return
            self.num_reads += 1
            record = bytearray(self.segments[read.location.segment][read.location.record][1])
            self.damage(read.key, record)
            read.target[:] = record
            one = ReadJob(
                reads=[read],
                group_major=False,
                on_group=lambda _, groups, index=index: job.on_group(index, groups),
                on_bad=lambda _, reason, index=index: job.on_bad(index, reason),
                is_cancelled=lambda: False,
            )
            check_records(CODEC, one)

    def publish(self, records: Sequence[RecordWrite], *, tenant: str = "") -> SegmentInfo:
        self.tenants.append(tenant)
        if self.hang is not None:
            self.hang.wait()
        if self.fail_writes:
            raise StoreUnavailable("no space left on device")
        return self._add([(record.key, bytes(record.record)) for record in records])

    def scan(self) -> Iterator[SegmentInfo]:
        for name in list(self.segments):
            yield self._info(name)

    def collect(self, *, withdraw: Callable[[Sequence[str]], None], announce: object = None) -> int:
        return 0

    def counters(self) -> dict[str, int]:
        return {"opens": self.num_reads}

    def close(self) -> None:
        return

    def keys(self) -> set[BlockKey]:
        return {key for segment in self.segments.values() for key, _ in segment}

    def _add(self, records: list[tuple[BlockKey, bytes]]) -> SegmentInfo:
        name = f"segment-{len(self.segments)}"
        self.segments[name] = records
        return self._info(name)

    def _info(self, name: str) -> SegmentInfo:
        records = self.segments[name]
        return SegmentInfo(
            name=name,
            layout_id=LAYOUT.digest()[:8],
            keys=tuple(key for key, _ in records),
            num_bytes=sum(len(record) for _, record in records),
        )


class FakeTransport:
    """Transport whose peers are the dictionary `things` (32-byte key -> bytes). state: of the next pulls. late writes go into
    `late` targets until `settle`. hold: pulls wait for it."""

    kind = "fake"

    def __init__(self) -> None:
        self.things: dict[bytes, bytes] = {}
        self.state = PullState.DONE
        self.late: list[memoryview] = []
        self.is_settled = True
        self.hold: asyncio.Event | None = None
        self.closed_peers: list[str] = []
        self.closing_settles = True
        self.counters: dict[str, int] = {}
        self.regions: list[memoryview] = []
        self.find: Callable[[bytes], Source | None] = lambda _key: None

    async def listen(self, find: Callable[[bytes], Source | None]) -> str:
        self.find = find
        return "127.0.0.1:1"

    async def use_region(self, region: memoryview) -> None:
        self.regions.append(region)

    async def pull(self, endpoint: str, key: bytes, target: memoryview, *, deadline_seconds: float) -> PullOutcome:
        state = self.state
        if self.hold is not None:
            await self.hold.wait()
        if state is PullState.DONE:
            thing = self.things.get(key)
            if thing is None:
                state = PullState.ABSENT
            else:
                target[:] = thing
        if state is PullState.LATE:
            self.is_settled = False
            self.late.append(target)
        settled = (lambda: self.is_settled) if state is PullState.LATE else (lambda: True)
        return PullOutcome(state=state, reason="", seconds=0.0, settled=settled)

    async def push(self, endpoint: str, key: bytes, source: memoryview, *, deadline_seconds: float) -> PullOutcome:
        raise NotImplementedError

    def accept(self, key: bytes, target: memoryview, done: Callable[[], None]) -> Callable[[], bool]:
        raise NotImplementedError

    async def close_peer(self, endpoint: str) -> None:
        self.closed_peers.append(endpoint)
        self.is_settled = self.is_settled or self.closing_settles

    async def close(self) -> None:
        return


class Clock:
    """Monotonic seconds that a test can move."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead
