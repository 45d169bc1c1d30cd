"""One read job: records of segments into shared memory, verified while others are still being read.

Run by the thread that called SegmentStore.read and by helpers of the store's pool, which all take the most urgent piece of work
that is left. The trap: a piece of a record is worth something only after the header; the groups of a record are therefore read
in order, by whichever thread, and never two at a time.
"""

import errno
import heapq
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from itertools import pairwise

import crc32c

from prefill_engine.kv.record import RecordCodec, VerifyFailure
from prefill_engine.kv.segment_counters import BadReason, SegmentCounters
from prefill_engine.kv.segment_data import HoleRead, Lend, SegmentReads
from prefill_engine.kv.segment_file import SegmentForm
from prefill_engine.kv.segment_paths import SegmentPaths
from prefill_engine.kv.segments import BlockLocation, ReadJob, RecordRead

logger = logging.getLogger(__name__)

_GONE = (errno.ENOENT, errno.ESTALE, errno.ENOTDIR)
# Reads that take longer than this, on the average of a job, wait for their medium and not for memory.
_CALL_SECONDS, _BYTE_SECONDS = 50e-6, 1 / (1 << 30)
_PATIENCE = 5e-3  # at most: a thread that had to wait for a core looks slow too


@dataclass(frozen=True, slots=True, kw_only=True)
class Strip:
    """Consecutive records of one segment. reads: indices into the job, in record order."""

    segment: str
    first_record: int
    reads: tuple[int, ...]


def plan_strips(reads: Sequence[RecordRead], *, max_records: int) -> tuple[Strip, ...]:
    """Cuts reads in chain order into strips that one system call can read, keeping the order. A stretch of a segment that is
    longer than max_records is cut evenly."""
    strips: list[Strip] = []
    start = 0
    for end in range(1, len(reads) + 1):
        if end < len(reads) and _is_next(reads[end - 1].location, reads[end].location):
            continue
        num_strips = -(-(end - start) // max_records)
        bounds = [start + (end - start) * number // num_strips for number in range(num_strips + 1)]
        for first, last in pairwise(bounds):
            location = reads[first].location
            strips.append(
                Strip(segment=location.segment, first_record=location.record, reads=tuple(range(first, last)))
            )
        start = end
    return tuple(strips)


def _is_next(location: BlockLocation, other: BlockLocation) -> bool:
    return other.record == location.record + 1 and other.segment == location.segment


class _OpenSegment:
    """The one handle of a segment in a job; a segment that could not be opened is not tried again."""

    def __init__(self, path: str, data: SegmentReads, counters: SegmentCounters) -> None:
        self._path, self._data, self._counters = path, data, counters
        self._lock = threading.Lock()
        self._handle: int | None = None
        self._failure: OSError | None = None

    def handle(self) -> int:
        """Raises OSError."""
        if self._handle is not None:
            return self._handle
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if self._handle is None:
                try:
                    self._counters.add("opens")
                    self._handle = self._data.open(self._path)
                except OSError as error:
                    self._failure = error
                    if error.errno in _GONE:
                        self._counters.add("segments_gone")
                    raise
            return self._handle

    def close(self) -> None:
        if self._handle is not None:
            with suppress(OSError):
                self._data.close(self._handle)


class SegmentRead:
    """State of one job. `work` may run in any number of threads; `finish` comes once, after all of them."""

    def __init__(
        self,
        job: ReadJob,
        *,
        strips: Sequence[Strip],
        data: SegmentReads,
        codec: RecordCodec,
        form: SegmentForm,
        paths: SegmentPaths,
        counters: SegmentCounters,
        lend: Lend | None = None,
        can_turn: bool = False,
        call_help: Callable[[], None] = lambda: None,
    ) -> None:
        """lend: for whole records that data had better not read into their targets. can_turn: the order of pieces may change
        while they are read. call_help: one more thread may work, because reads wait for the medium; asked for any number of
        times."""
        self._job, self._data, self._codec, self._form, self._counters = job, data, codec, form, counters
        self._lend = lend
        self._is_grouped = job.group_major and data.reads_pieces
        self._can_turn = can_turn and data.reads_pieces
        self._ranges = tuple(codec.group_range(group) for group in range(codec.num_groups))
        # CRC32C that the groups of a read must have; None until its header has been verified.
        self._expected: list[tuple[int, ...] | None] = [None] * len(job.reads)
        # Group, then position: with one group as stage of whole records, this is chain order.
        self._queue: list[tuple[int, int, Strip]] = [(0, number, strip) for number, strip in enumerate(strips)]
        self._lock = threading.Lock()
        self._is_stopped = False
        self._call_help = call_help
        self._patience = (
            _PATIENCE  # seconds that reads may still take before they count as slow; threads may lose an update
        )
        self._segments: dict[str, _OpenSegment] = {}
        for name in {strip.segment for strip in strips}:
            path = paths.resolve(name)
            if path is not None:
                self._segments[name] = _OpenSegment(path, data, counters)

    def work(self) -> None:
        """Takes pieces until none is left or the job is cancelled."""
        try:
            while (item := self._take()) is not None:
                group, number, strip = item
                # A strip that was begun by groups has gaps, and its first groups are told.
                if group == 0 and not self._reads_by_group():
                    self._read_records(strip)
                    continue
                left = self._read_group(strip, group)
                if left is not None and group + 1 < len(self._ranges):
                    with self._lock:
                        heapq.heappush(self._queue, (group + 1, number, left))
        except BaseException:
            self._is_stopped = True
            raise

    def _reads_by_group(self) -> bool:
        """How a strip is read that is begun now."""
        return self._is_grouped or (self._can_turn and self._job.is_urgent())

    def finish(self) -> None:
        """Closes what was opened."""
        for segment in self._segments.values():
            segment.close()

    def _take(self) -> tuple[int, int, Strip] | None:
        if self._is_stopped or self._job.is_cancelled():
            return None
        with self._lock:
            return heapq.heappop(self._queue) if self._queue else None

    def _read_records(self, strip: Strip) -> None:
        """Whole records in one call; after EIO one by one, so that a bad sector or a hole costs one record."""
        try:
            num_bytes, reasons = self._read_and_verify(strip)
        except OSError as error:
            if len(strip.reads) == 1 or error.errno != errno.EIO or not self._is_open(strip):
                self._fail(strip.reads, _reason_of(error), error)
                return
            for position, index in enumerate(strip.reads):
                if self._is_stopped or self._job.is_cancelled():
                    return
                record = strip.first_record + position
                self._read_records(Strip(segment=strip.segment, first_record=record, reads=(index,)))
            return
        self._counters.add("bytes_read", num_bytes)
        # Told together, so that whoever waits for news is woken once.
        num_groups = len(self._ranges)
        for index, reason in zip(strip.reads, reasons, strict=False):
            if reason is None:
                self._job.on_group(index, num_groups)
            else:
                self._tell_bad(index, reason)
        for index in strip.reads[len(reasons) :]:
            self._tell_bad(index, BadReason.SHORT)

    def _read_and_verify(self, strip: Strip) -> tuple[int, list[BadReason | None]]:
        """Bytes read, and what is wrong with each whole record among them. Raises OSError."""
        targets = [self._job.reads[index].target for index in strip.reads]
        offset, size = self._form.record_offset(strip.first_record), self._form.record_bytes
        lend = nullcontext() if self._lend is None else self._lend(self._handle(strip), len(targets) * size, offset)
        with lend as lent:
            if lent is None:
                num_bytes = self._read(strip, targets, offset)
                return num_bytes, [
                    self._verify_record(index, target)
                    for index, target in zip(strip.reads[: num_bytes // size], targets, strict=False)
                ]
            reasons: list[BadReason | None] = []
            for index, target in zip(strip.reads[: lent.nbytes // size], targets, strict=False):
                start = len(reasons) * size
                record = lent[start : start + size]
                reasons.append(reason := self._verify_record(index, record))
                if reason is None:
                    # While the core's cache has it; and by slices, which keep the interpreter's lock as the checksums do.
                    target[:] = record
            return lent.nbytes, reasons

    def _read_group(self, strip: Strip, group: int) -> Strip | None:
        """One group of each record of a strip, the header with the first; returns what is left of the strip."""
        start, end = self._ranges[group]
        start = start if group else 0
        good: list[int] = []
        bytes_read = 0
        for index in strip.reads:
            if self._is_stopped or self._job.is_cancelled():
                good = []
                break
            read = self._job.reads[index]
            target = read.target[start:end]
            try:
                num_bytes = self._read(strip, [target], self._form.record_offset(read.location.record) + start)
            except OSError as error:
                self._fail((index,), _reason_of(error), error)
                continue
            bytes_read += num_bytes
            reason = BadReason.SHORT if num_bytes < end - start else self._verify_piece(index, group)
            if reason is not None:
                self._tell_bad(index, reason)
                continue
            good.append(index)
            self._job.on_group(index, group + 1)
        self._counters.add("bytes_read", bytes_read)
        return Strip(segment=strip.segment, first_record=strip.first_record, reads=tuple(good)) if good else None

    def _read(self, strip: Strip, targets: Sequence[memoryview], offset: int) -> int:
        handle = self._handle(strip)
        started = time.perf_counter()
        num_bytes = self._data.read(handle, targets, offset)
        left = _CALL_SECONDS + num_bytes * _BYTE_SECONDS - (time.perf_counter() - started)
        self._patience = patience = min(_PATIENCE, self._patience + left)
        if patience < 0:
            self._call_help()
        return num_bytes

    def _handle(self, strip: Strip) -> int:
        """Raises OSError."""
        segment = self._segments.get(strip.segment)
        if segment is None:
            raise _ForeignSegment(errno.EINVAL, "not the name of a segment of this layout", strip.segment)
        return segment.handle()

    def _is_open(self, strip: Strip) -> bool:
        segment = self._segments.get(strip.segment)
        try:
            return segment is not None and segment.handle() >= 0
        except OSError:
            return False

    def _verify_record(self, index: int, record: memoryview) -> BadReason | None:
        expected = self._read_header(index, record)
        if isinstance(expected, BadReason):
            return expected
        for (start, end), crc in zip(self._ranges, expected, strict=True):
            reason = _verify_part(record[start:end], crc)
            if reason is not None:
                return reason
        return None

    def _verify_piece(self, index: int, group: int) -> BadReason | None:
        """A group of a record whose earlier groups have passed; with the first, the header."""
        expected = self._expected[index]
        if expected is None:
            found = self._read_header(index, self._job.reads[index].target)
            if isinstance(found, BadReason):
                return found
            self._expected[index] = expected = found
        start, end = self._ranges[group]
        return _verify_part(self._job.reads[index].target[start:end], expected[group])

    def _read_header(self, index: int, record: memoryview) -> tuple[int, ...] | BadReason:
        """CRC32C that the groups of a read must have."""
        header = record[: self._codec.shape.header_bytes]
        expected = self._codec.read_header(header, key=self._job.reads[index].key)
        if isinstance(expected, VerifyFailure):
            return BadReason.HOLE if _is_zero(header) else BadReason(expected.value)
        return expected

    def _fail(self, indices: Sequence[int], reason: BadReason, error: OSError) -> None:
        logger.warning(
            "segment could not be read; its blocks are misses",
            extra={"errno": error.errno, "reason": str(reason), "num_blocks": len(indices)},
        )
        for index in indices:
            self._tell_bad(index, reason)

    def _tell_bad(self, index: int, reason: BadReason) -> None:
        self._counters.add(f"bad_{reason}")
        self._job.on_bad(index, str(reason))


class _ForeignSegment(OSError):
    """A location that names no segment of this store."""


def _reason_of(error: OSError) -> BadReason:
    if isinstance(error, HoleRead):
        return BadReason.HOLE
    return BadReason.LAYOUT if isinstance(error, _ForeignSegment) else BadReason.IO


def _verify_part(part: memoryview, expected: int) -> BadReason | None:
    # Never gives the interpreter's lock away (by default it does from 32 KiB on): threads that pass it on for every few
    # microseconds of work spend more time on waking each other.
    if crc32c.crc32c(part, 0, 0) == expected:
        return None
    return BadReason.HOLE if _is_zero(part) else BadReason.CRC


def _is_zero(part: memoryview) -> bool:
    return not any(part)
