"""Segments on 3FS with their data through USRBIO; names, links and deletions go through the FUSE mount (kv.md 3).

kvd makes one UsrbioClient per process, and a store of it per geometry. Data passes a buffer that is registered with the FUSE
process and is then copied: so an IO whose completion never comes can't write into a slot that kvd has given away. The trap: a
registered fd must be deregistered before it is closed, else the next file of that number reads the old one's bytes.
"""

import errno
import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from prefill_engine.kv.file_operations import FileOperations
from prefill_engine.kv.record import RecordGeometry
from prefill_engine.kv.segment_data import FILE_MODE, FileRange
from prefill_engine.kv.segment_store import FileSegmentStore
from prefill_engine.kv.store import Buffer
from prefill_engine.kv.usrbio_ahead import WINDOW, ReadAhead
from prefill_engine.kv.usrbio_lane import Extent, Lane
from prefill_engine.kv.usrbio_library import FORBID_READ_HOLES, UsrbioLibrary
from prefill_plan.errors import ConfigError
from prefill_plan.kvd_config import KvdStoreConfig

logger = logging.getLogger(__name__)

_IOC_FSYNC = 2 << 30 | 4 << 16 | ord("h") << 8 | 11  # HF3FS_IOC_FSYNC = _IOR('h', 11, uint32_t)
_RING_ENTRIES = 1024
_READ_BUFFER_BYTES = 1 << 20
_WRITE_BUFFER_BYTES = 8 << 20  # one segment of 32 records of the largest layout
_NUM_WRITE_BUFFERS = 2
# Beside one for each thread that may ask: reads that are started before they are asked for, and what lost completions hold.
_AHEAD_READ_BUFFERS = WINDOW
_NUM_CALLERS = 16  # of SegmentStore.read at a time, beside the store's own threads


def force_sync(fd: int) -> None:
    """Length and data of a file, as fsync on 3FS alone does not promise (kv.md 3.2). Raises OSError."""
    fcntl.ioctl(fd, _IOC_FSYNC, bytes(4))


class UsrbioClient:
    """Library, two rings and their buffers: made once per process, for rings leak (kv.md 3.2). It is the SegmentData of 3FS."""

    reads_pieces = True

    def __init__(
        self,
        config: KvdStoreConfig,
        *,
        deadline_seconds: float = 5.0,
        sync: Callable[[int], None] = force_sync,
        files: FileOperations | None = None,
    ) -> None:
        """deadline_seconds: for the IOs of one call; later ones count as lost. sync: makes data and length of a file durable.

        Raises:
            ConfigError: no library, no 3FS at the path, no shared memory with the FUSE process; or a grace period that a
                read may outlive.
        """
        if config.grace_seconds <= deadline_seconds:
            raise ConfigError(
                f"store.grace_seconds = {config.grace_seconds:g}, expected more than the {deadline_seconds:g} s that a read may "
                f"take: 3FS does not keep deleted files for their readers",
                path="store.grace_seconds",
            )
        self._library = UsrbioLibrary(config.usrbio_library)
        # One for each thread that may ask at a time: these are not taken ahead of need.
        self._num_asking = config.read_threads + _NUM_CALLERS
        self._sync = sync
        self._files = files or FileOperations()
        self.mount = config.usrbio_mount or self._library.find_mount(config.path) or ""
        if not self.mount:
            raise ConfigError(f"{config.path} is on no 3FS mount: expected store.path inside one", path="store.path")
        self._check_mount()
        try:
            self._reading, self._writing = self._make_lanes(deadline_seconds)
        except OSError as error:
            raise ConfigError(
                f"USRBIO of 3FS mount {self.mount} can't be set up: {error.strerror}; expected that the FUSE process sees the "
                f"same /dev/shm (kv.md 3.5) and that it has room for rings and buffers",
                path="store.usrbio_mount",
            ) from error

    def open(self, path: str) -> int:
        """As SegmentData; the handle is a registered fd."""
        return self._register(self._files.open(path, os.O_RDONLY | os.O_CLOEXEC, 0))

    def read(self, handle: int, targets: Sequence[memoryview], offset: int) -> int:
        """As SegmentData. Raises OSError ETIMEDOUT for a lost completion; targets are then as they were."""
        return self._reading.fill(handle, targets, offset, self._reading.transfer)

    @contextmanager
    def job(self, ranges: Iterable[FileRange]) -> Iterator[ReadAhead]:
        """As SegmentData: starts them many at a time."""
        ahead = ReadAhead(self._reading, ranges, open_file=self.open, close_file=self.close, keep=self._num_asking)
        try:
            yield ahead
        finally:
            ahead.finish()

    def close(self, handle: int) -> None:
        """As SegmentData."""
        self._library.deregister(handle)
        self._files.close(handle)

    def write(self, path: str, buffers: Sequence[Buffer]) -> None:
        """As SegmentData: data through the write ring, then HF3FS_IOC_FSYNC, so that readers see its length."""
        fd = self._files.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
        handle = self._register(fd)
        try:
            offset = 0
            for part in _cut(buffers, self._writing.piece_bytes):
                num_bytes = sum(piece.nbytes for piece in part)
                extent = Extent(handle=handle, offset=offset, num_bytes=num_bytes)
                piece, got = self._writing.transfer(extent, part)
                self._writing.give_back(piece)
                if got != num_bytes:
                    raise OSError(errno.EIO, f"{got} of {num_bytes} bytes were written", path)
                offset += num_bytes
            self._sync(handle)
        except BaseException:
            with suppress(OSError):
                self.close(handle)
            raise
        self.close(handle)

    def remove_tree(self, path: str) -> bool:
        """Whole generations by the mount's own recursive removal: a link named into 3fs-virt/rm-rf."""
        try:
            os.symlink(os.path.realpath(path), f"{self.mount}/3fs-virt/rm-rf/{os.urandom(16).hex()}")
        except OSError:
            return False
        return True

    def shut_down(self) -> None:
        """A store's end; the rings are the process's and stay."""

    def close_rings(self) -> None:
        """At the end of the process, after its stores."""
        self._reading.close()
        self._writing.close()

    def _make_lanes(self, deadline_seconds: float) -> tuple[Lane, Lane]:
        """For reads and for writes. Raises OSError."""
        reading = Lane(
            self._library,
            self.mount,
            entries=_RING_ENTRIES,
            for_read=True,
            flags=FORBID_READ_HOLES,
            num_pieces=self._num_asking + _AHEAD_READ_BUFFERS,
            piece_bytes=_READ_BUFFER_BYTES,
            deadline_seconds=deadline_seconds,
        )
        try:
            writing = Lane(
                self._library,
                self.mount,
                entries=_RING_ENTRIES,
                for_read=False,
                flags=0,
                num_pieces=_NUM_WRITE_BUFFERS,
                piece_bytes=_WRITE_BUFFER_BYTES,
                deadline_seconds=deadline_seconds,
            )
        except OSError:
            reading.close()
            raise
        return reading, writing

    def _check_mount(self) -> None:
        try:
            fd = os.open(self.mount, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(
                f"3FS mount {self.mount} can't be opened: {error.strerror}", path="store.usrbio_mount"
            ) from error
        try:
            if not self._library.is_hf3fs(fd):
                raise ConfigError(
                    f"{self.mount} is no 3FS mount: the library does not know it", path="store.usrbio_mount"
                )
        finally:
            os.close(fd)

    def _register(self, fd: int) -> int:
        """Closes fd where it can't be registered. Raises OSError."""
        try:
            self._library.register(fd)
        except OSError:
            self._files.close(fd)
            raise
        return fd


def open_usrbio_store(
    root: Path,
    *,
    geometry: RecordGeometry,
    config: KvdStoreConfig,
    client: UsrbioClient,
    files: FileOperations | None = None,
    clock: Callable[[], float] = time.time,
) -> FileSegmentStore:
    """A segment store whose data goes through `client`. Raises as FileSegmentStore."""
    return FileSegmentStore(
        root,
        geometry=geometry,
        config=config,
        files=files,
        clock=clock,
        data=client,
        remove_tree=client.remove_tree,
    )


def _cut(buffers: Sequence[Buffer], most_bytes: int) -> list[list[memoryview]]:
    """Consecutive parts of at most so many bytes."""
    parts: list[list[memoryview]] = [[]]
    room = most_bytes
    for buffer in buffers:
        left = memoryview(buffer)
        while left.nbytes:
            if room == 0:
                parts.append([])
                room = most_bytes
            parts[-1].append(left[:room])
            left, room = left[room:], room - min(room, left.nbytes)
    return parts
