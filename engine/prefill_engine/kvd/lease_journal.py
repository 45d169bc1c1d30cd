"""What a restarted kvd must know of its former life: which slots leases and reservations held (kv.md 7.5).

A file beside the pool, written by the Keeper, read once at start. Shared memory can't hold it: a rank could write there. The
trap: the last entry may be half written; an entry counts only with its checksum, and nothing after a bad one counts.
"""

import errno
import os
import struct
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

import crc32c

from prefill_plan.errors import ConfigError
from prefill_plan.kvd_config import JOURNAL_ROOM_BYTES

_ENTRY = struct.Struct(
    "<IIQQiIII"
)  # crc, bytes after this head, lease, owner, row (-1: reservation), echo, blocks, snapshots
_CRC = struct.Struct("<I")
_CLOSED = -2  # row of an entry that ends a lease
_COMPACT_BYTES = JOURNAL_ROOM_BYTES // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalEntry:
    """row: of the lease table, -1 for a reservation. echo_index: of the owner."""

    lease_id: int
    owner_epoch: int
    row: int
    echo_index: int
    slots: tuple[int, ...]
    snapshot_slots: tuple[int, ...]


class LeaseJournal:
    """Owner of the file. Writing it is a write to tmpfs; `put` tells a failed one as OSError, and the caller must not go on."""

    def __init__(self, path: str) -> None:
        """Raises OSError."""
        self._path = path
        self._entries = _read(path)
        self._live_bytes = sum(map(_size, self._entries.values()))
        self._fd = -1
        self._num_bytes = 0
        self._rewrite()

    @property
    def entries(self) -> list[JournalEntry]:
        """Leases that are open."""
        return list(self._entries.values())

    def put(self, entry: JournalEntry) -> None:
        """A lease was opened, or holds other slots than before."""
        self._forget(entry.lease_id)
        self._entries[entry.lease_id] = entry
        self._live_bytes += _size(entry)
        self._append(_encode(entry))

    def remove(self, lease_id: int) -> None:
        entry = self._forget(lease_id)
        if entry is not None:
            # Not written: the next life holds these slots for its grace, which harms nobody.
            with suppress(OSError):
                self._append(_encode(entry, row=_CLOSED))

    def clear(self) -> None:
        self._entries.clear()
        self._live_bytes = 0
        self._rewrite()

    def close(self) -> None:
        os.close(self._fd)

    def _append(self, data: bytes) -> None:
        if self._num_bytes + len(data) > _COMPACT_BYTES + 2 * self._live_bytes:
            self._rewrite()
            return
        if os.write(self._fd, data) < len(data):
            os.ftruncate(self._fd, self._num_bytes)  # half an entry would hide all that follow
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._path)
        self._num_bytes += len(data)

    def _forget(self, lease_id: int) -> JournalEntry | None:
        entry = self._entries.pop(lease_id, None)
        if entry is not None:
            self._live_bytes -= _size(entry)
        return entry

    def _rewrite(self) -> None:
        temp = f"{self._path}.new"
        data = b"".join(_encode(entry) for entry in self._entries.values())
        fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            if os.write(fd, data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), temp)
            os.rename(temp, self._path)
        except OSError:
            os.close(fd)
            raise
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._num_bytes = fd, len(data)


def journal_path(pool_path: str) -> str:
    """The journal lies beside its pool."""
    return f"{pool_path}.leases"


def check_room(path: str, *, free_bytes: int) -> None:
    """Whether a journal at `path` can be written for long; asked at the start, when the pool has its pages.

    Raises:
        ConfigError: free_bytes of its file system are too few.
    """
    if free_bytes < JOURNAL_ROOM_BYTES:
        raise ConfigError(
            f"{free_bytes} bytes are left beside the pool for the lease journal {path}, expected {JOURNAL_ROOM_BYTES}: "
            f"without it no lease survives a restart; make /dev/shm larger (engine.extraShm of a pool in Kubernetes) or "
            f"pool_bytes smaller"
        )


def open_journal(path: str) -> LeaseJournal:
    """Raises ConfigError."""
    try:
        return LeaseJournal(path)
    except OSError as error:
        raise ConfigError(f"lease journal {path} can't be written: {error.strerror}; make /dev/shm larger") from error


def _size(entry: JournalEntry) -> int:
    return _ENTRY.size + 4 * (len(entry.slots) + len(entry.snapshot_slots))


def _encode(entry: JournalEntry, *, row: int | None = None) -> bytes:
    is_closed = row is not None
    slots: Iterable[int] = () if is_closed else (*entry.slots, *entry.snapshot_slots)
    body = struct.pack(f"<{0 if is_closed else len(entry.slots) + len(entry.snapshot_slots)}I", *slots)
    head = _ENTRY.pack(
        0,
        len(body),
        entry.lease_id,
        entry.owner_epoch,
        entry.row if row is None else row,
        entry.echo_index,
        0 if is_closed else len(entry.slots),
        0 if is_closed else len(entry.snapshot_slots),
    )
    data = head[_CRC.size :] + body
    return _CRC.pack(crc32c.crc32c(data)) + data


def _read(path: str) -> dict[int, JournalEntry]:
    try:
        with open(path, "rb") as file:
            data = memoryview(file.read())
    except FileNotFoundError:
        return {}
    entries: dict[int, JournalEntry] = {}
    start = 0
    while start + _ENTRY.size <= len(data):
        crc, body_bytes, lease_id, owner, row, echo, num_slots, num_snapshots = _ENTRY.unpack_from(data, start)
        end = start + _ENTRY.size + body_bytes
        if end > len(data) or crc != crc32c.crc32c(data[start + _CRC.size : end]):
            break
        numbers = struct.unpack_from(f"<{num_slots + num_snapshots}I", data, start + _ENTRY.size)
        start = end
        if row == _CLOSED:
            entries.pop(lease_id, None)
            continue
        entries[lease_id] = JournalEntry(
            lease_id=lease_id,
            owner_epoch=owner,
            row=row,
            echo_index=echo,
            slots=numbers[:num_slots],
            snapshot_slots=numbers[num_slots:],
        )
    return entries
