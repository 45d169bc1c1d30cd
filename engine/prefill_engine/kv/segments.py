"""What a segment store is to kvd: immutable files of up to 32 block records each (kv.md 3.3). Protocol and data only.

Calls block and come from kvd's I/O threads. The trap: a segment is a promise about nothing until each record of it is verified;
a reader must expect every kind of damage and answer with a miss.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from prefill_plan.block_keys import BlockKey

MAX_RECORDS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLocation:
    """segment: name relative to the store's root. record: index in it."""

    segment: str
    record: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentInfo:
    """A published segment as its table of contents tells it. keys: in record order. num_bytes: of the file."""

    name: str
    layout_id: bytes
    keys: tuple[BlockKey, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordRead:
    """One record to read. target: writable, record_bytes long, in shared memory."""

    key: BlockKey
    location: BlockLocation
    target: memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadJob:
    """Records in chain order. The calls come from I/O threads, in any order of records.

    group_major: one piece per record and group, groups in order, because a step already waits (buffered files only, C17).
    on_group: (index of the read, groups verified so far, from the first).
    on_bad: (index of the read, reason: crc, key, layout, short, hole or io).
    is_cancelled: asked between pieces; after it says yes nothing more is written into targets once `read` has returned.
    is_urgent: asked before each piece; once it says yes, records that have not been begun are read as if group_major.
    """

    reads: Sequence[RecordRead]
    group_major: bool
    on_group: Callable[[int, int], None]
    on_bad: Callable[[int, str], None]
    is_cancelled: Callable[[], bool]
    is_urgent: Callable[[], bool] = lambda: False


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordWrite:
    """A complete record (header and payload) as it stands in shared memory."""

    key: BlockKey
    record: memoryview


class SegmentStore(Protocol):
    """Owner of the files under one root and one block layout."""

    store_id: str
    """Names medium and layout to the directory: equal for every kvd that sees the same files."""

    def read(self, job: ReadJob) -> None:
        """Returns when nothing of the job is in flight any more. Failures are told by on_bad, never raised."""
        ...

    def publish(self, records: Sequence[RecordWrite], *, tenant: str = "") -> SegmentInfo:
        """Writes 1..32 records as one segment, durable before it has a name. tenant: to whose share they count, where tenants
        have one.

        Raises:
            StoreUnavailable: nothing was published.
        """
        ...

    def scan(self) -> Iterator[SegmentInfo]:
        """Every readable segment of this layout, newest generation first; damaged ones are skipped and counted."""
        ...

    def collect(
        self,
        *,
        withdraw: Callable[[Sequence[str]], None],
        announce: Callable[[Sequence[SegmentInfo]], None] | None = None,
    ) -> int:
        """One round of garbage collection: above the high watermark withdraws the oldest generations, first of tenants above
        their share, and deletes what was withdrawn a grace period ago. announce: told the new names of segments that are kept
        because they are read often; None = none are kept. Returns the bytes deleted."""
        ...

    def counters(self) -> dict[str, int]:
        """Monotonic: opens, bytes_read, bytes_written, published, publish_failed, collected_bytes, bad_<reason>."""
        ...

    def close(self) -> None: ...
