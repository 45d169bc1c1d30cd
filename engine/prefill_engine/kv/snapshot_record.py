"""A self-verifying SWA snapshot: one header page, then the ring images of the encoder layers (kv.md 1.4).

Written by ranks, checked by kvd and by whoever pulled one from a peer. The trap: a one-sided read may tear (kv.md 0.7);
the checksum of the payload starts from that of the generation, so a header of one writing never fits a payload of another.

Header, little-endian, SNAPSHOT_HEADER_BYTES long: HEADER_FIELDS, then zeros, and in the last 4 bytes the CRC32C of everything
before it.
"""

import struct
from dataclasses import dataclass

import crc32c

from prefill_engine.kv.pool_geometry import PAGE_BYTES, SNAPSHOT_HEADER_BYTES
from prefill_engine.kv.record import LAYOUT_ID_BYTES, VerifyFailure
from prefill_engine.kv.store import Buffer

MAGIC = b"PEKVSNP\x00"
VERSION = 1
SNAPSHOT_KEY_BYTES = 33  # prefill_plan.block_keys.snapshot_key

HEADER_FIELDS = (
    # name, offset, size, struct code
    ("magic", 0, 8, "8s"),
    ("version", 8, 2, "H"),
    ("exact", 10, 1, "B"),  # 0: made after a bounded replay
    ("reserved", 11, 1, "x"),
    ("payload_crc", 12, 4, "I"),
    ("layout_id", 16, LAYOUT_ID_BYTES, f"{LAYOUT_ID_BYTES}s"),
    ("generation", 24, 8, "Q"),
    ("position", 32, 4, "I"),  # tokens before the boundary
    ("first_valid", 36, 4, "I"),  # first token whose row is in the ring image
    ("payload_bytes", 40, 4, "I"),
    ("key", 44, SNAPSHOT_KEY_BYTES, f"{SNAPSHOT_KEY_BYTES}s"),
)
_FIXED = struct.Struct("<" + "".join(code for _, _, _, code in HEADER_FIELDS))
_CRC = struct.Struct("<I")
_GENERATION = struct.Struct("<Q")
_CRC_OFFSET = SNAPSHOT_HEADER_BYTES - _CRC.size


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotInfo:
    """position: boundary, in tokens. first_valid: first token whose row is present. generation: of this writing."""

    position: int
    first_valid: int
    exact: bool
    generation: int


class SnapshotCodec:
    """Writes and checks the snapshots of one layout. Immutable, so any thread may use it."""

    def __init__(self, layout_digest: bytes, payload_bytes: int) -> None:
        self.payload_bytes = payload_bytes
        self.record_bytes = -(-(SNAPSHOT_HEADER_BYTES + payload_bytes) // PAGE_BYTES) * PAGE_BYTES
        self._layout_id = layout_digest[:LAYOUT_ID_BYTES]

    def encode_header(
        self, *, key: bytes, position: int, first_valid: int, exact: bool, generation: int, payload: Buffer
    ) -> bytes:
        """The header page for this payload.

        Raises:
            ValueError: key, payload or a field has the wrong size.
        """
        num_bytes = memoryview(payload).nbytes
        if (
            len(key) != SNAPSHOT_KEY_BYTES
            or num_bytes != self.payload_bytes
            or not 0 <= first_valid <= position < 1 << 32
        ):
            raise ValueError(
                f"snapshot with key of {len(key)} bytes, payload of {num_bytes}, rows [{first_valid}, {position}): expected "
                f"{SNAPSHOT_KEY_BYTES}, {self.payload_bytes}, an ascending range of u32"
            )
        header = bytearray(SNAPSHOT_HEADER_BYTES)
        crc = _payload_crc(generation, payload)
        fields = (
            MAGIC,
            VERSION,
            exact,
            crc,
            self._layout_id,
            generation,
            position,
            first_valid,
            self.payload_bytes,
            key,
        )
        _FIXED.pack_into(header, 0, *fields)
        _CRC.pack_into(header, _CRC_OFFSET, crc32c.crc32c(header[:_CRC_OFFSET]))
        return bytes(header)

    def verify(self, record: Buffer, *, key: bytes) -> VerifyFailure | None:
        """Why this is not the complete, undamaged snapshot of `key` in this layout; None if it is."""
        view = memoryview(record)
        if view.nbytes < SNAPSHOT_HEADER_BYTES + self.payload_bytes:
            return VerifyFailure.SHORT
        magic, version, _, crc, layout_id, generation, _, _, payload_bytes, found_key = _FIXED.unpack_from(view)
        if magic != MAGIC or version != VERSION or view.nbytes > self.record_bytes:
            return VerifyFailure.LAYOUT
        if _CRC.unpack_from(view, _CRC_OFFSET) != (crc32c.crc32c(view[:_CRC_OFFSET]),):
            return VerifyFailure.CRC
        if layout_id != self._layout_id or payload_bytes != self.payload_bytes:
            return VerifyFailure.LAYOUT
        if found_key != key:
            return VerifyFailure.KEY
        payload = view[SNAPSHOT_HEADER_BYTES : SNAPSHOT_HEADER_BYTES + self.payload_bytes]
        return None if crc == _payload_crc(generation, payload) else VerifyFailure.CRC

    def decode_info(self, record: Buffer) -> SnapshotInfo:
        """Fields of a record that verify has passed."""
        _, _, exact, _, _, generation, position, first_valid, _, _ = _FIXED.unpack_from(record)
        return SnapshotInfo(position=position, first_valid=first_valid, exact=bool(exact), generation=generation)

    def find_key(self, record: Buffer) -> bytes | None:
        """The key that a record's header claims, if its header is whole; the payload is not looked at."""
        view = memoryview(record)
        magic, version, _, _, layout_id, _, _, _, _, key = _FIXED.unpack_from(view)
        if magic != MAGIC or version != VERSION or layout_id != self._layout_id:
            return None
        if _CRC.unpack_from(view, _CRC_OFFSET) != (crc32c.crc32c(view[:_CRC_OFFSET]),):
            return None
        return bytes(key)


def _payload_crc(generation: int, payload: Buffer) -> int:
    return int(crc32c.crc32c(payload, crc32c.crc32c(_GENERATION.pack(generation))))
