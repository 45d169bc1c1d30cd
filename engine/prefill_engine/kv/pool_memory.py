"""The pool of a pod as kvd and its ranks map it: header page, lease table, block records, snapshot records (kv.md 7.2).

kvd creates it, lays it out and writes its leases; ranks attach, write their echo, read leases, and write records only into
slots they reserved. Who may use a slot stands in kvd's private memory, never here: a rank can't corrupt it. The trap: a
slot's bytes mean something only after kvd said so, by a lease's `ready` words or its snapshot state.

    header page       pool_file.HEADER, geometry, then from _ECHO_OFFSET one u64 per rank
    lease table       NUM_LEASES rows of LEASE_BYTES
    block records     num_blocks x record_bytes: header and payload, the same bytes as in the store
    snapshot records  num_snapshots x snapshot_record_bytes, at the end of the file
"""

import ctypes
import mmap
import os
import secrets
import struct

from prefill_engine.kv.lease_record import LEASE_BYTES, MAX_GROUPS, LeaseRecord, LeaseState, SnapshotState
from prefill_engine.kv.pool_file import (
    ABI,
    HEADER,
    MAGIC,
    is_range_locked,
    lock_range,
    open_locked,
    prefault,
    read_header,
    reserve_room,
)
from prefill_engine.kv.pool_geometry import PAGE_BYTES, SNAPSHOT_HEADER_BYTES, PoolGeometry
from prefill_plan.errors import ConfigError

__all__ = [
    "LEASE_BYTES",
    "MAX_GROUPS",
    "MAX_RANKS",
    "NUM_LEASES",
    "PAGE_BYTES",
    "RECORDS_OFFSET",
    "SNAPSHOT_HEADER_BYTES",
    "LeaseRecord",
    "LeaseState",
    "PoolGeometry",
    "PoolMemory",
    "SnapshotState",
]

NUM_LEASES = 4096
MAX_RANKS = 128
NONCE_BYTES = 16
RECORDS_OFFSET = PAGE_BYTES + NUM_LEASES * LEASE_BYTES

_IS_LAID_OUT_OFFSET, _EPOCH_OFFSET = 12, 16  # in pool_file.HEADER
# digest, header, payload, record, number of groups, groups, snapshot payload, number of blocks, number of snapshots
_GEOMETRY = struct.Struct(f"<32s4I{MAX_GROUPS}I3I")
_GEOMETRY_OFFSET = 64
_ECHO_OFFSET = 2048


class PoolMemory:
    """A mapping of the file. Made by `create` or `attach`; views of it are valid until `close`."""

    def __init__(self, path: str, fd: int, num_bytes: int, *, is_reattached: bool) -> None:
        self.path, self.fd, self.num_bytes = path, fd, num_bytes
        self.is_reattached = is_reattached
        """True: kvd found the file of its predecessor and kept what stands in it."""
        self._map = mmap.mmap(fd, num_bytes)
        self._base = memoryview(self._map)
        self._echoes = self._base[_ECHO_OFFSET : _ECHO_OFFSET + 8 * MAX_RANKS].cast("Q")
        self._anchor = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(self._anchor)
        self._is_closed = False
        self.geometry: PoolGeometry | None = None
        self.num_blocks = self.num_snapshots = 0
        self._snapshots_offset = num_bytes

    @classmethod
    def create(cls, path: str, *, pool_bytes: int, epoch: int) -> "PoolMemory":
        """The pool of a new kvd incarnation. A good file of the same size is taken over with its nonce; its geometry then
        stands until lay_out.

        Raises:
            ConfigError: another kvd holds the file; too little room in the file system; path or size unusable.
        """
        least = RECORDS_OFFSET + PAGE_BYTES
        if pool_bytes < least:
            raise ConfigError(
                f"pool_bytes = {pool_bytes}, expected at least {least}: header page, lease table, one record"
            )
        num_bytes = pool_bytes // PAGE_BYTES * PAGE_BYTES
        try:
            fd, is_old = open_locked(path, num_bytes)
        except OSError as error:
            raise ConfigError(f"pool file {path} can't be opened: {error.strerror}") from error
        try:
            if not is_old:
                reserve_room(path, fd, num_bytes)
            pool = cls(path, fd, num_bytes, is_reattached=is_old)
        except BaseException:
            if not is_old:
                os.unlink(path)
            os.close(fd)
            raise
        nonce = pool.nonce if is_old else secrets.token_bytes(NONCE_BYTES)
        HEADER.pack_into(pool._base, 0, MAGIC, ABI, pool._is_laid_out, epoch, num_bytes, nonce)
        try:
            pool._read_geometry()
        except ConfigError:  # a rank scribbled over the header; records verify themselves, their places do not
            pool._mark_laid_out(0)
            pool._read_geometry()
        return pool

    @classmethod
    def attach(cls, path: str, *, nonce: bytes) -> "PoolMemory":
        """A rank's mapping of the pool that kvd's welcome names.

        Raises:
            ConfigError: the file is absent, or is not the one kvd maps.
        """
        hint = (
            "engine and kvd must mount the same /dev/shm: the pod's own, or one emptyDir {medium: Memory} in both containers "
            "(sgl-project/sglang#10249); running without the KV sidecar"
        )
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(f"kvd's pool {path} is not visible here: {error.strerror}; {hint}") from error
        try:
            magic, abi, _, _, num_bytes, found = read_header(fd)
            if magic != MAGIC or found != nonce:
                raise ConfigError(
                    f"{path} is not the pool that kvd maps (nonce {found.hex()}, expected {nonce.hex()}); {hint}"
                )
            if abi != ABI or os.fstat(fd).st_size < num_bytes:
                raise ConfigError(
                    f"{path}: pool of version {abi} and {os.fstat(fd).st_size} bytes; expected {ABI}, {num_bytes}"
                )
            pool = cls(path, fd, num_bytes, is_reattached=False)
        except BaseException:
            os.close(fd)
            raise
        pool._read_geometry()
        return pool

    @property
    def epoch(self) -> int:
        """Of the kvd incarnation that serves the pool."""
        return int(struct.unpack_from("<Q", self._base, _EPOCH_OFFSET)[0])

    @property
    def nonce(self) -> bytes:
        """Random per file."""
        return bytes(HEADER.unpack_from(self._base)[5])

    def prefault(self, threads: int) -> None:
        """Makes every page present and mapped, so that no later write waits for the kernel or meets SIGBUS."""
        prefault(self.path, self.address, self.num_bytes, threads=threads)

    def lay_out(self, geometry: PoolGeometry, snapshot_bytes: int) -> None:
        """Divides the pool: snapshot_bytes for snapshots, the rest for blocks. Contents stay as they are; they verify
        themselves.

        Raises:
            ConfigError: a wrong geometry, or no room for one block and one snapshot.
        """
        geometry.check()
        room = self.num_bytes - RECORDS_OFFSET
        num_snapshots = min(snapshot_bytes, room) // geometry.snapshot_record_bytes
        num_blocks = (room - num_snapshots * geometry.snapshot_record_bytes) // geometry.record_bytes
        if num_blocks < 1 or num_snapshots < 1:
            raise ConfigError(
                f"pool of {self.num_bytes} bytes with {snapshot_bytes} for snapshots holds {num_blocks} blocks of "
                f"{geometry.record_bytes} and {num_snapshots} snapshots of {geometry.snapshot_record_bytes}; expected one of each"
            )
        self._mark_laid_out(0)
        groups = (*geometry.group_bytes, *[0] * (MAX_GROUPS - len(geometry.group_bytes)))
        sizes = (geometry.header_bytes, geometry.payload_bytes, geometry.record_bytes, len(geometry.group_bytes))
        counts = (geometry.snapshot_payload_bytes, num_blocks, num_snapshots)
        _GEOMETRY.pack_into(self._base, _GEOMETRY_OFFSET, geometry.layout_digest, *sizes, *groups, *counts)
        self._mark_laid_out(1)
        self._read_geometry()

    def record(self, slot: int) -> memoryview:
        """Header and payload of a block slot, writable."""
        start = self.record_offset(slot)
        return self._base[start : start + self._form.record_bytes]

    def payload(self, slot: int) -> memoryview:
        start = self.record_offset(slot) + self._form.header_bytes
        return self._base[start : start + self._form.payload_bytes]

    def payload_address(self, slot: int) -> int:
        """Where it is mapped."""
        return self.address + self.record_offset(slot) + self._form.header_bytes

    def group(self, slot: int, group: int) -> memoryview:
        """One KV source's part of the payload."""
        start = self.record_offset(slot) + self._form.header_bytes + self._form.group_offset(group)
        return self._base[start : start + self._form.group_bytes[group]]

    def snapshot(self, slot: int) -> memoryview:
        """Header page, payload and padding of a snapshot slot, writable."""
        start = self.snapshot_offset(slot)
        return self._base[start : start + self._form.snapshot_record_bytes]

    @property
    def snapshot_area(self) -> memoryview:
        """All snapshot slots."""
        return self._base[self._snapshots_offset :]

    def record_offset(self, slot: int) -> int:
        """In the file."""
        assert 0 <= slot < self.num_blocks, slot
        return RECORDS_OFFSET + slot * self._form.record_bytes

    def snapshot_offset(self, slot: int) -> int:
        """In the file."""
        assert 0 <= slot < self.num_snapshots, slot
        return self._snapshots_offset + slot * self._form.snapshot_record_bytes

    def lease(self, row: int) -> LeaseRecord:
        assert 0 <= row < NUM_LEASES, row
        start = PAGE_BYTES + row * LEASE_BYTES
        return LeaseRecord(self._base[start : start + LEASE_BYTES])

    def echo(self, index: int) -> int:
        """What rank `index` wrote when it had mapped the pool."""
        return int(self._echoes[index])

    def set_echo(self, index: int, epoch: int) -> None:
        """By a rank: shows kvd that both map the same file, and takes a lock that the kernel drops when the process is gone.

        Raises:
            ConfigError: another living process holds this field.
        """
        try:
            lock_range(self.fd, _ECHO_OFFSET + 8 * index, 8)
        except OSError as error:
            raise ConfigError(f"echo field {index} of {self.path} can't be locked: {error.strerror}") from error
        self._echoes[index] = epoch

    def has_living_rank(self, index: int) -> bool:
        """By kvd: whether the process that wrote echo `index` still maps the pool; true across PID namespaces."""
        return is_range_locked(self.fd, _ECHO_OFFSET + 8 * index, 8)

    def close(self) -> None:
        """Unmaps; a view somebody still holds keeps the mapping until it is gone. Twice is as good as once."""
        if self._is_closed:
            return
        self._is_closed = True
        del self._anchor
        self._echoes.release()
        try:
            self._base.release()
            self._map.close()
        except BufferError:
            pass
        os.close(self.fd)

    @property
    def _form(self) -> PoolGeometry:
        assert self.geometry is not None, "the pool is not laid out"
        return self.geometry

    @property
    def _is_laid_out(self) -> int:
        return int(struct.unpack_from("<I", self._base, _IS_LAID_OUT_OFFSET)[0])

    def _mark_laid_out(self, value: int) -> None:
        struct.pack_into("<I", self._base, _IS_LAID_OUT_OFFSET, value)

    def _read_geometry(self) -> None:
        self.geometry, self.num_blocks, self.num_snapshots = None, 0, 0
        if not self._is_laid_out:
            return
        digest, *sizes = _GEOMETRY.unpack_from(self._base, _GEOMETRY_OFFSET)
        header, payload, record, num_groups = sizes[:4]
        snapshot_payload, self.num_blocks, self.num_snapshots = sizes[4 + MAX_GROUPS :]
        self.geometry = PoolGeometry(
            layout_digest=digest,
            header_bytes=header,
            payload_bytes=payload,
            record_bytes=record,
            group_bytes=tuple(sizes[4 : 4 + num_groups]),
            snapshot_payload_bytes=snapshot_payload,
        )
        self.geometry.check()
        self._snapshots_offset = self.num_bytes - self.num_snapshots * self.geometry.snapshot_record_bytes
        end_of_blocks = RECORDS_OFFSET + self.num_blocks * record
        if end_of_blocks > self._snapshots_offset:
            raise ConfigError(
                f"pool {self.path}: {self.num_blocks} blocks end at {end_of_blocks}, beyond the snapshots"
            )
