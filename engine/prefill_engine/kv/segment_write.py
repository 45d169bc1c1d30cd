"""Publishing of segments: temporary file, sync, name, sync of the directory (kv.md 3.3).

Owner of the generations that new segments go to. Called by write threads. The trap: until `publish` returns nobody may be told
of the segment; a name that a crash loses is one miss more, never a wrong byte.
"""

import errno
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from prefill_engine.kv.file_operations import FileOperations
from prefill_engine.kv.segment_counters import SegmentCounters
from prefill_engine.kv.segment_data import SegmentData
from prefill_engine.kv.segment_file import SegmentForm
from prefill_engine.kv.segment_paths import (
    MARKER_NAME,
    TEMP_NAME,
    SegmentPaths,
    generation_name,
    is_same_bucket,
    owner_of,
    part_of,
)
from prefill_engine.kv.segments import RecordWrite, SegmentInfo
from prefill_plan.errors import StoreUnavailable

_DIRECTORY_MODE = 0o750
_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_DIRECTORY_SYNC = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)


@dataclass(slots=True)
class _Current:
    """The part of a generation that is being filled."""

    generation: str = ""
    part: int = 0
    num_bytes: int = 0


class SegmentWriter:
    """Writes segments of one layout. Thread-safe."""

    def __init__(
        self,
        *,
        paths: SegmentPaths,
        form: SegmentForm,
        data: SegmentData,
        files: FileOperations,
        counters: SegmentCounters,
        generation_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        self._paths, self._form, self._data, self._files, self._counters = paths, form, data, files, counters
        self._generation_seconds, self._clock = generation_seconds, clock
        self._lock = threading.Lock()
        self._currents: dict[str, _Current] = {}  # by owner
        self._next_part = 0  # of all owners, so that names tell whose part began first
        self._part_bytes: int | None = None
        self._room: int | None = None

    def limit(self, *, part_bytes: int, room_bytes: int | None) -> None:
        """What a collection measured. part_bytes: size at which the next part begins. room_bytes: what may still be written
        until the next collection; None = whatever the medium takes."""
        with self._lock:
            self._part_bytes, self._room = part_bytes, room_bytes
            for owner, current in list(self._currents.items()):
                if current.generation != self._name(owner, current.part):  # its time is over
                    del self._currents[owner]

    def leave_generation(self, generation: str) -> None:
        """Nothing more goes there: it is full, or somebody is about to delete it."""
        owner = owner_of(generation)
        with self._lock:
            if is_same_bucket(
                generation, self._name(owner, 0)
            ):  # maybe an earlier kvd's, whose parts this one has not counted
                self._next_part = max(self._next_part, part_of(generation) + 1)
            current = self._choose(0, owner)
            if current.generation == generation:
                self._start(owner)

    def publish(self, records: Sequence[RecordWrite], *, owner: str) -> SegmentInfo:
        """As SegmentStore. owner: tag of the tenant whose generation it goes to; "" = nobody's."""
        keys = tuple(record.key for record in records)
        buffers: list[bytes | memoryview] = [self._form.encode_header(keys), *(record.record for record in records)]
        num_bytes = self._form.file_bytes(len(records))
        if any(memoryview(record.record).nbytes != self._form.record_bytes for record in records):
            raise ValueError(f"a record to publish has another size: expected {self._form.record_bytes} bytes")
        self._leave_withdrawn(owner)
        generation = self._reserve(num_bytes, owner)
        file_id = os.urandom(16).hex()
        name = self._paths.name(generation, file_id)
        temp = f"{self._paths.generation(generation)}/{TEMP_NAME}/{file_id}"
        try:
            self._write_temp(generation, temp, buffers)
            self._put(temp, self._paths.path(name))
        except OSError as error:
            self._discard(temp)
            self._refuse(error, len(records), num_bytes)
        self._counters.add("published")
        self._counters.add("bytes_written", num_bytes)
        return SegmentInfo(name=name, layout_id=self._form.layout_id, keys=keys, num_bytes=num_bytes)

    def keep(self, source: str, *, owner: str) -> str | None:
        """A second name in the owner's current generation for a segment of an old one; None if the medium refuses links."""
        generation = self._leave_withdrawn(owner)
        file_id = os.urandom(16).hex()
        name = self._paths.name(generation, file_id)
        target = self._paths.path(name)
        try:
            try:
                self._files.link(source, target)
            except FileNotFoundError:
                self._make_generation(generation)
                self._make_directory(os.path.dirname(target))
                self._files.link(source, target)
        except OSError:
            self._counters.add("collect_errors")
            return None
        return name

    def _leave_withdrawn(self, owner: str) -> str:
        """The owner's current generation, which no kvd of the store has withdrawn: its marker would be there."""
        while True:
            with self._lock:
                generation = self._choose(0, owner).generation
            try:
                self._files.stat(f"{self._paths.generation(generation)}/{MARKER_NAME}")
            except OSError:
                return generation
            self.leave_generation(generation)

    def _name(self, owner: str, part: int) -> str:
        return generation_name(self._clock(), generation_seconds=self._generation_seconds, part=part, owner=owner)

    def _choose(self, num_bytes: int, owner: str) -> _Current:
        """Where so many bytes more of this owner go; with the lock held."""
        current = self._currents.get(owner)
        if current is None or current.generation != self._name(owner, current.part):
            return self._start(owner)
        is_grown = self._part_bytes is not None and current.num_bytes + num_bytes > self._part_bytes
        return self._start(owner) if current.num_bytes and is_grown else current

    def _start(self, owner: str) -> _Current:
        """A new part; with the lock held."""
        part, self._next_part = self._next_part, self._next_part + 1
        self._currents[owner] = current = _Current(generation=self._name(owner, part), part=part)
        return current

    def _reserve(self, num_bytes: int, owner: str) -> str:
        """Raises StoreUnavailable where max_bytes leaves no room."""
        with self._lock:
            if self._room is not None and num_bytes > self._room:
                self._counters.add("publish_failed")
                self._counters.add("publish_full")
                raise StoreUnavailable(
                    f"segment of {num_bytes} bytes was not stored: {self._room} bytes are left of max_bytes until the next "
                    f"collection; its blocks stay misses",
                    errno=errno.ENOSPC,
                )
            current = self._choose(num_bytes, owner)
            current.num_bytes += num_bytes
            if self._room is not None:
                self._room -= num_bytes
            return current.generation

    def _write_temp(self, generation: str, temp: str, buffers: Sequence[bytes | memoryview]) -> None:
        try:
            self._data.write(temp, buffers)
        except FileNotFoundError:
            self._make_generation(generation)
            self._data.write(temp, buffers)

    def _put(self, temp: str, path: str) -> None:
        """The name is random, so a plain rename replaces nothing (3FS refuses renames with flags)."""
        directory = os.path.dirname(path)
        try:
            self._files.rename(temp, path)
        except FileNotFoundError:
            self._make_directory(directory)
            self._files.rename(temp, path)
        try:
            self._sync_directory(directory)
        except OSError:
            # What is not known to be durable is not published.
            self._discard(path)
            raise

    def _refuse(self, error: OSError, num_records: int, num_bytes: int) -> None:
        """Counts and raises StoreUnavailable."""
        self._counters.add("publish_failed")
        if error.errno in _FULL:
            self._counters.add("publish_full")
        with self._lock:
            if self._room is not None:
                self._room += num_bytes
        name = errno.errorcode.get(error.errno or 0, str(error.errno))
        raise StoreUnavailable(
            f"segment of {num_records} blocks was not stored: {error.strerror} ({name}); its blocks stay misses",
            errno=error.errno,
        ) from error

    def _make_generation(self, generation: str) -> None:
        for path in (self._paths.generation(generation), f"{self._paths.generation(generation)}/{TEMP_NAME}"):
            self._make_directory(path)

    def _make_directory(self, path: str) -> None:
        with suppress(FileExistsError):
            self._files.mkdir(path, _DIRECTORY_MODE)

    def _sync_directory(self, path: str) -> None:
        fd = self._files.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, 0)
        try:
            self._files.fsync(fd)
        except OSError as error:
            if error.errno not in _NO_DIRECTORY_SYNC:
                raise
        finally:
            self._files.close(fd)

    def _discard(self, path: str) -> None:
        # A file that can't be removed is left to the removal by age, or to that of its generation.
        with suppress(OSError):
            self._files.unlink(path)
