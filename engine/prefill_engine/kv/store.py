"""Where complete Block KV outlives the pool: the protocol, its record and its errors. No torch here: buffers only.

Called by the rank's transfer thread. The trap: a store must never be trusted. Whatever goes wrong (short read, flipped
bit, other layout, half-written file) is a miss, counted by reason, and never a wrong byte (kv.md 2.3, R-table).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from prefill_plan.block_keys import BlockKey

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBlock:
    """What a verified record says about its block. provenance: 1 = descends from a bounded replay (kv.md 2.2), 0 =
    exact chain."""

    block_index: int
    provenance: int


class BlockStore(Protocol):
    """Put-if-absent store of block records, keyed by the 32-byte block key. Safe for concurrent readers and writers,
    also of several processes where the medium is shared."""

    def count_present(self, keys: Sequence[BlockKey]) -> int:
        """Leading keys that are present, without reading payloads. A hint: a later read may still miss."""
        ...

    def read(self, key: BlockKey, out: memoryview) -> StoredBlock | None:
        """Verified payload of one block into `out` (payload_bytes long, writable). None = miss; `out` then holds
        garbage."""
        ...

    def write(self, key: BlockKey, payload: Buffer, *, block_index: int, provenance: int) -> bool:
        """Publishes one block if absent; True if it is present afterwards, written by whomever. Never overwrites.

        Raises:
            StoreUnavailable: the medium refused (full disk, I/O error); the key stays a miss.
            ValueError: key or payload has the wrong size.
        """
        ...

    def counters(self) -> dict[str, int]:
        """Monotonic counts: hits, misses (of any reason), verify_fail_crc, verify_fail_key, verify_fail_layout,
        verify_fail_short, read_errors, writes, writes_present, write_errors, bytes_read, bytes_written, evicted
        (blocks)."""
        ...

    def close(self) -> None:
        """Releases files and memory; further calls raise StoreUnavailable."""
        ...
