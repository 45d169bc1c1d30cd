"""BlockStore on any POSIX directory (local disk, tmpfs, NFS, 3FS through FUSE), shared by any number of processes and
machines.

One file per block record, `blocks/<2 hex>/<64 hex>.kv`; multi-block segments come with the KV sidecar. A record is
written under `tmp/`, synced, and only then linked to its name, which never replaces a file (3FS refuses renames with
flags, hence link). The trap: a name means nothing until the record behind it is verified; every read verifies.
"""

import errno
import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from prefill_engine.kv.file_operations import FileOperations
from prefill_engine.kv.record import KEY_BYTES, RecordCodec, VerifyFailure, decode_info
from prefill_engine.kv.store import Buffer, StoredBlock
from prefill_engine.kv.store_counters import StoreCounters
from prefill_plan.block_keys import BlockKey
from prefill_plan.errors import ConfigError, StoreUnavailable
from prefill_plan.kv_layout import BlockLayout

logger = logging.getLogger(__name__)

_FILE_MODE = 0o640  # kv.md 7.6
_DIRECTORY_MODE = 0o750
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)  # what link() says where there are no hard links
_FULL = (errno.ENOSPC, errno.EDQUOT)


class FileStore:
    """Records under `path`, which is created if absent. Thread-safe.

    temp_max_age_seconds: at start, temporary files older than this are what a crashed writer left, and go. clock: wall
    time in seconds, as file times are.
    """

    def __init__(
        self,
        path: Path,
        layout: BlockLayout,
        *,
        files: FileOperations | None = None,
        temp_max_age_seconds: float = 3600.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Raises ConfigError with path and cause if records can't be read and written there."""
        self._codec = RecordCodec(layout)
        self._files = files or FileOperations()
        self._counters = StoreCounters()
        self._is_closed = False
        self._blocks_path = str(path / "blocks")
        self._temps_path = str(path / "tmp")
        try:
            path.mkdir(mode=_DIRECTORY_MODE, parents=True, exist_ok=True)
            self._make_directory(self._blocks_path)
            self._make_directory(self._temps_path)
            self._files.listdir(self._blocks_path)
            self._remove_stale_temps(oldest=clock() - temp_max_age_seconds)
            self._put_if_absent = self._choose_put()
        except OSError as error:
            raise ConfigError(
                f"store directory {path} can't be used: {error.strerror} ({_errno_name(error)}) at {error.filename}; "
                f"expected a directory that this process can read and write",
                path=str(path),
            ) from error

    def count_present(self, keys: Sequence[BlockKey]) -> int:
        """As BlockStore; one stat per key."""
        self._check_open()
        for index, key in enumerate(keys):
            try:
                self._files.stat(self._record_path(key))
            except FileNotFoundError:
                return index
            except OSError:
                self._counters.add("read_errors")
                return index
        return len(keys)

    def read(self, key: BlockKey, out: memoryview) -> StoredBlock | None:
        """As BlockStore; a record that fails verification is removed, so that it can be written again."""
        self._check_open()
        self._codec.check_target(out)
        path = self._record_path(key)
        header = bytearray(self._codec.shape.header_bytes)
        try:
            num_bytes = self._read_file(path, header, out)
        except FileNotFoundError:
            self._counters.add_miss(None)
            return None
        except OSError as error:
            self._counters.add_miss("read_errors")
            logger.warning("store record could not be read; it is a miss", extra={"errno": _errno_name(error)})
            return None
        failure = self._verify(num_bytes, header, out, key)
        if failure is not None:
            self._counters.add_miss(f"verify_fail_{failure}")
            logger.warning("store record failed verification; removed", extra={"reason": str(failure)})
            # Another process may have replaced it meanwhile: then a good record goes, which is only one more miss.
            with suppress(OSError):
                self._files.unlink(path)
            return None
        self._counters.add_hit(out.nbytes)
        return decode_info(header)

    def write(self, key: BlockKey, payload: Buffer, *, block_index: int, provenance: int) -> bool:
        """As BlockStore; when it returns, the record has been synced to the medium."""
        self._check_open()
        header = self._codec.encode_header(key=key, payload=payload, block_index=block_index, provenance=provenance)
        path = self._record_path(key)
        try:
            is_new = not self._exists(path) and self._publish(path, [memoryview(header), memoryview(payload)])
        except OSError as error:
            self._counters.add("write_errors")
            raise StoreUnavailable(
                f"block {block_index} was not stored: {error.strerror} ({_errno_name(error)}); it stays a miss",
                errno=error.errno,
            ) from error
        if is_new:
            self._counters.add_write(self._codec.shape.record_bytes)
        else:
            self._counters.add("writes_present")
        return True

    def counters(self) -> dict[str, int]:
        """As BlockStore, and stale_temps: temporary files of crashed writers removed at start."""
        return self._counters.snapshot()

    def close(self) -> None:
        """As BlockStore."""
        self._is_closed = True

    def _check_open(self) -> None:
        if self._is_closed:
            raise StoreUnavailable("the file store is closed")

    def _record_path(self, key: BlockKey) -> str:
        if len(key) != KEY_BYTES:
            raise ValueError(f"block key has {len(key)} bytes: expected {KEY_BYTES}")
        name = key.hex()
        return f"{self._blocks_path}/{name[:2]}/{name}.kv"

    def _exists(self, path: str) -> bool:
        try:
            self._files.stat(path)
        except FileNotFoundError:
            return False
        return True

    def _read_file(self, path: str, header: bytearray, payload: memoryview) -> int:
        """Reads the file into header and payload; returns its length, at most one byte more than a record."""
        buffers = [memoryview(header), payload, memoryview(bytearray(1))]
        fd = self._files.open(path, os.O_RDONLY | os.O_CLOEXEC, 0)
        try:
            offset = 0
            while offset < self._codec.shape.record_bytes:
                num_bytes = self._files.preadv(fd, buffers, offset)
                if num_bytes == 0:
                    break
                offset += num_bytes
                buffers = _skip_bytes(buffers, num_bytes)
            return offset
        finally:
            self._files.close(fd)

    def _verify(self, num_bytes: int, header: bytearray, payload: memoryview, key: BlockKey) -> VerifyFailure | None:
        record_bytes = self._codec.shape.record_bytes
        if num_bytes < record_bytes:
            return VerifyFailure.SHORT
        if num_bytes > record_bytes:
            return VerifyFailure.LAYOUT
        return self._codec.verify(header, payload, key=key)

    def _publish(self, path: str, buffers: list[memoryview]) -> bool:
        """Temporary file, fsync, put if absent, fsync of the directory. False: another writer was first."""
        temp = self._write_temp(buffers)
        try:
            try:
                is_new = self._put_if_absent(temp, path)
            except FileNotFoundError:
                self._make_directory(os.path.dirname(path))
                is_new = self._put_if_absent(temp, path)
        finally:
            self._discard(temp)
        if is_new:
            try:
                self._sync_directory(os.path.dirname(path))
            except OSError:
                # What is not known to be durable is not published.
                self._discard(path)
                raise
        return is_new

    def _write_temp(self, buffers: list[memoryview]) -> str:
        temp = f"{self._temps_path}/{os.urandom(16).hex()}"
        fd = self._files.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _FILE_MODE)
        try:
            try:
                while buffers:
                    buffers = _skip_bytes(buffers, self._files.writev(fd, buffers))
                self._files.fsync(fd)
            finally:
                self._files.close(fd)
        except OSError:
            self._discard(temp)
            raise
        return temp

    def _discard(self, path: str) -> None:
        # A file that can't be removed is left to the removal by age of a later start.
        with suppress(OSError):
            self._files.unlink(path)

    def _put_by_link(self, temp: str, path: str) -> bool:
        try:
            self._files.link(temp, path)
        except FileExistsError:
            return False
        return True

    def _put_by_rename(self, temp: str, path: str) -> bool:
        try:
            self._files.rename_new(temp, path)
        except FileExistsError:
            return False
        return True

    def _choose_put(self) -> Callable[[str, str], bool]:
        """Publishes an empty file inside tmp/ and removes it: proves that the medium can be written, and how."""
        try:
            temp = self._write_temp([])
            target = f"{temp}.probe"
            put = self._put_by_link
            try:
                put(temp, target)
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                put = self._put_by_rename
                put(temp, target)
            finally:
                self._discard(temp)
                self._discard(target)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            logger.warning("store is full: it serves what it holds", extra={"path": self._temps_path})
            return self._put_by_link
        return put

    def _make_directory(self, path: str) -> None:
        try:
            self._files.mkdir(path, _DIRECTORY_MODE)
        except FileExistsError:
            return
        self._sync_directory(os.path.dirname(path))

    def _sync_directory(self, path: str) -> None:
        fd = self._files.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, 0)
        try:
            self._files.fsync(fd)
        finally:
            self._files.close(fd)

    def _remove_stale_temps(self, *, oldest: float) -> None:
        for name in self._files.listdir(self._temps_path):
            path = f"{self._temps_path}/{name}"
            # Another process may start, clean up or publish at the same time.
            with suppress(FileNotFoundError):
                if self._files.stat(path).st_mtime < oldest:
                    self._files.unlink(path)
                    self._counters.add("stale_temps")


def _skip_bytes(buffers: list[memoryview], num_bytes: int) -> list[memoryview]:
    """What is left of consecutive buffers after their first `num_bytes` bytes."""
    rest = []
    for buffer in buffers:
        skipped = min(num_bytes, buffer.nbytes)
        num_bytes -= skipped
        if skipped < buffer.nbytes:
            rest.append(buffer[skipped:])
    return rest


def _errno_name(error: OSError) -> str:
    return errno.errorcode.get(error.errno or 0, str(error.errno))
