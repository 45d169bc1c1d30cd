"""SegmentStore on any POSIX directory (local disk, NFS, 3FS through FUSE), shared by any number of kvds.

kvd builds one once a rank has told the geometry, and calls it from its I/O threads. This file wires the parts; reading, writing,
scanning and collecting stand in segment_read, _write, _scan and _collect. The trap: `read` tells every failure by on_bad, and
returns only when nothing can write into a target any more.
"""

import errno
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from prefill_engine.kv.file_operations import FileOperations
from prefill_engine.kv.record import RecordCodec, RecordGeometry
from prefill_engine.kv.segment_collect import SegmentCollector
from prefill_engine.kv.segment_counters import BadReason, SegmentCounters
from prefill_engine.kv.segment_data import DIRECT_ALIGN, Lend, PosixData, SegmentData, address_of, write_file
from prefill_engine.kv.segment_file import SegmentForm
from prefill_engine.kv.segment_helpers import Helpers
from prefill_engine.kv.segment_paths import SegmentPaths, owner_tag
from prefill_engine.kv.segment_ranges import plan_ranges
from prefill_engine.kv.segment_read import SegmentRead, plan_strips
from prefill_engine.kv.segment_scan import SegmentScan
from prefill_engine.kv.segment_write import SegmentWriter
from prefill_engine.kv.segments import ReadJob, RecordRead, RecordWrite, SegmentInfo
from prefill_plan.errors import ConfigError, StoreUnavailable
from prefill_plan.kvd_config import KvdStoreConfig

_DIRECTORY_MODE = 0o750
_ID_NAME = "store-id"
_ID_DIGITS = 32
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)
# Long, because a thread that comes back from a strip waits for the interpreter's lock; yet in the core's cache when its checksums
# are computed; and one buffer of usrbio takes it. Bytes from the page cache that one thread reads: in the nearer cache.
_STRIP_BYTES = 1 << 20
_LONE_STRIP_BYTES = 512 << 10


class FileSegmentStore:
    """Segments under `root`, which is created if absent. Thread-safe; `collect` from one thread at a time."""

    def __init__(
        self,
        root: Path,
        *,
        geometry: RecordGeometry,
        config: KvdStoreConfig,
        files: FileOperations | None = None,
        clock: Callable[[], float] = time.time,
        data: SegmentData | None = None,
        remove_tree: Callable[[str], bool] | None = None,
    ) -> None:
        """clock: wall time in seconds, as file times are. data, remove_tree: another way to the same files (usrbio).

        Raises:
            ConfigError: segments can't be read and written there; with direct_io, the file system has no O_DIRECT.
        """
        self._files = files or FileOperations()
        self._codec, self._form = RecordCodec.of_geometry(geometry), SegmentForm.of_geometry(geometry)
        self._paths = SegmentPaths(root=str(root), layout_id=self._form.layout_id)
        self._counters = SegmentCounters()
        self._needs_alignment = config.direct_io and data is None
        if self._needs_alignment and self._form.record_bytes % DIRECT_ALIGN:
            raise ConfigError(
                f"direct_io with records of {self._form.record_bytes} bytes: expected a multiple of {DIRECT_ALIGN}"
            )
        self._lend: Lend | None = None
        if data is None:
            posix = PosixData(self._files, direct_io=config.direct_io)
            self._data: SegmentData = posix
            self._lend = posix.lend if config.direct_io else None
        else:
            self._data = data
        self.store_id = self._open_root(root)
        # Bytes that lie in memory: more threads than cores, or than one for small pieces, only take the interpreter's lock from
        # each other. The others are called when reads turn out to wait for the medium.
        self._is_cached = data is None and not config.direct_io
        self._num_cores = len(os.sched_getaffinity(0))
        self._strip_records = self._plan_strip(min(config.read_threads, self._num_cores))
        self._scan = SegmentScan(paths=self._paths, form=self._form, files=self._files, counters=self._counters)
        self._writer = SegmentWriter(
            paths=self._paths,
            form=self._form,
            data=self._data,
            files=self._files,
            counters=self._counters,
            generation_seconds=config.generation_seconds,
            clock=clock,
        )
        self._collector = SegmentCollector(
            config=config,
            paths=self._paths,
            files=self._files,
            scan=self._scan,
            writer=self._writer,
            counters=self._counters,
            clock=clock,
            remove_tree=remove_tree,
        )
        self._has_owners = config.tenant_share < 1
        # The caller of read is one of the threads; so a job makes progress even if all helpers work for others.
        self._num_helpers = max(0, config.read_threads - 1)
        self._helpers = ThreadPoolExecutor(max(1, self._num_helpers), thread_name_prefix="kv-read")
        self._is_closed = False
        self._num_active = 0
        self._idle = threading.Condition()

    def _plan_strip(self, num_threads: int) -> int:
        """Records that one call reads. num_threads: that can run at a time."""
        num_bytes = _LONE_STRIP_BYTES if self._is_cached and num_threads == 1 else _STRIP_BYTES
        return max(1, num_bytes // self._form.record_bytes)

    def read(self, job: ReadJob) -> None:
        """As SegmentStore.

        Raises:
            ValueError: a target of another size, read-only, or not aligned to pages with direct_io; nothing was read.
        """
        self._check_targets(job.reads)
        if not self._enter():
            for index in range(len(job.reads)):
                job.on_bad(index, str(BadReason.IO))
            return
        try:
            self._read(job)
        finally:
            self._leave()

    def publish(self, records: Sequence[RecordWrite], *, tenant: str = "") -> SegmentInfo:
        """As SegmentStore.

        Raises:
            StoreUnavailable: the medium refused, or max_bytes leaves no room; nothing was published.
            ValueError: not 1..32 records, or one of another size.
        """
        if not self._enter():
            raise StoreUnavailable("the segment store is closed")
        try:
            owner = owner_tag(tenant, store_id=self.store_id) if self._has_owners else ""
            return self._writer.publish(records, owner=owner)
        finally:
            self._leave()

    def scan(self) -> Iterator[SegmentInfo]:
        """As SegmentStore."""
        return self._scan.segments()

    def collect(
        self,
        *,
        withdraw: Callable[[Sequence[str]], None],
        announce: Callable[[Sequence[SegmentInfo]], None] | None = None,
    ) -> int:
        """As SegmentStore. announce: told the new names of segments that are kept because they are hot; None = none are."""
        return self._collector.collect(withdraw=withdraw, announce=announce)

    def counters(self) -> dict[str, int]:
        """As SegmentStore; names in segment_counters."""
        return self._counters.snapshot()

    def close(self) -> None:
        """Waits for reads and publications in progress; later ones fail."""
        with self._idle:
            was_closed, self._is_closed = self._is_closed, True
            self._idle.wait_for(lambda: self._num_active == 0)
        if not was_closed:
            self._helpers.shutdown(wait=True)
            self._data.shut_down()

    def _enter(self) -> bool:
        with self._idle:
            self._num_active += not self._is_closed
            return not self._is_closed

    def _leave(self) -> None:
        with self._idle:
            self._num_active -= 1
            self._idle.notify_all()

    def _read(self, job: ReadJob) -> None:
        strips = plan_strips(job.reads, max_records=self._strip_records)
        ranges = plan_ranges(
            job, strips, codec=self._codec, form=self._form, paths=self._paths, by_group=self._data.reads_pieces
        )
        most = min(self._num_helpers, len(strips) - 1)
        at_once = most
        if self._is_cached:
            at_once = 0 if job.group_major else min(most, self._num_cores - 1)
        helpers = Helpers(self._helpers, most=most)
        with self._data.job(ranges) as data:
            run = SegmentRead(
                job,
                strips=strips,
                data=data,
                codec=self._codec,
                form=self._form,
                paths=self._paths,
                counters=self._counters,
                lend=self._lend,
                can_turn=self._is_cached,  # what usrbio asks for ahead stands fixed
                call_help=lambda: helpers.call(run.work),
            )
            for _ in range(at_once):
                helpers.call(run.work)
            try:
                run.work()
            finally:
                failures = helpers.end()
                run.finish()
        if failures:
            raise failures[0]
        self._collector.touch(list({strip.segment for strip in strips}))

    def _check_targets(self, reads: Sequence[RecordRead]) -> None:
        record_bytes = self._form.record_bytes
        for index, read in enumerate(reads):
            target = read.target
            if target.nbytes != record_bytes or target.readonly or target.format != "B":
                raise ValueError(
                    f"target of read {index} has {target.nbytes} bytes, read-only {target.readonly}: expected {record_bytes} "
                    f"writable ones"
                )
            if self._needs_alignment and address_of(target) % DIRECT_ALIGN:
                raise ValueError(
                    f"target of read {index} is not aligned to {DIRECT_ALIGN} bytes, as direct_io needs it"
                )

    def _open_root(self, root: Path) -> str:
        """Makes the directories, proves that a segment could be written and read, and returns the store's id."""
        try:
            root.mkdir(mode=_DIRECTORY_MODE, parents=True, exist_ok=True)
            for path in (f"{root}/kv", self._paths.layout):
                with suppress(FileExistsError):
                    self._files.mkdir(path, _DIRECTORY_MODE)
            self._files.listdir(self._paths.layout)
            return f"{self._obtain_id(f'{root}/kv')}/{self._form.layout_id.hex()}"
        except OSError as error:
            name = errno.errorcode.get(error.errno or 0, str(error.errno))
            raise ConfigError(
                f"segment store {root} can't be used: {error.strerror} ({name}) at {error.filename}; expected a directory that "
                f"this process can read and write{', with O_DIRECT' if self._needs_alignment else ''}",
                path=str(root),
            ) from error

    def _obtain_id(self, directory: str) -> str:
        """Id of this store, chosen by whoever opened it first. A full medium still serves what it holds."""
        path = f"{directory}/{_ID_NAME}"
        fresh = os.urandom(_ID_DIGITS // 2).hex()
        temp = f"{directory}/.{_ID_NAME}-{fresh}"
        try:
            try:
                # A page, so that O_DIRECT can be tried on it.
                write_file(self._files, temp, [fresh.encode().ljust(DIRECT_ALIGN, b"\n")], sync=self._files.fsync)
                self._put_id(temp, path)
            finally:
                with suppress(OSError):
                    self._files.unlink(temp)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
        text = self._read_id(path)
        if len(text) != _ID_DIGITS:
            raise ConfigError(
                f"{path} holds {len(text)} characters: expected the {_ID_DIGITS} of a store's id", path=path
            )
        return text

    def _put_id(self, temp: str, path: str) -> None:
        with suppress(FileExistsError):
            try:
                self._files.link(temp, path)
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                self._files.rename_new(temp, path)

    def _read_id(self, path: str) -> str:
        page = memoryview(mmap.mmap(-1, DIRECT_ALIGN))
        handle = self._data.open(path)
        try:
            num_bytes = self._data.read(handle, [page], 0)
        finally:
            self._data.close(handle)
        return bytes(page[:num_bytes]).strip().decode("ascii", "replace")
