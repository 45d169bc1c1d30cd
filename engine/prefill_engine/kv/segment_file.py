"""A segment: one header page that tells which keys its records have, then the records (kv.md 3.3). Bytes only, no files.

Written by segment stores, read by their scans. The trap: the table of contents serves scans and directories alone; a reader
trusts nothing but the record it read, whose header repeats key and layout.

Header page, little-endian, HEADER_BYTES long: HEADER_FIELDS, then at KEYS_OFFSET num_records keys of KEY_BYTES, then zeros, and
in the last 4 bytes the CRC32C of everything before it. Record i stands at HEADER_BYTES + i * record_bytes; nothing follows the
last one.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import crc32c

from prefill_engine.kv.record import KEY_BYTES, LAYOUT_ID_BYTES, RecordGeometry
from prefill_engine.kv.segments import MAX_RECORDS
from prefill_engine.kv.store import Buffer
from prefill_plan.block_keys import BlockKey

MAGIC = b"PEKVSEG\x00"
VERSION = 1
HEADER_BYTES = 4096

HEADER_FIELDS = (
    # name, offset, size, struct code
    ("magic", 0, 8, "8s"),
    ("version", 8, 2, "H"),
    ("num_records", 10, 2, "H"),
    ("record_bytes", 12, 4, "I"),
    ("layout_id", 16, LAYOUT_ID_BYTES, f"{LAYOUT_ID_BYTES}s"),
    ("reserved", 24, 40, "40x"),  # zero
)
KEYS_OFFSET = 64
_FIXED = struct.Struct("<" + "".join(code for _, _, _, code in HEADER_FIELDS))
_CRC = struct.Struct("<I")
_CRC_OFFSET = HEADER_BYTES - _CRC.size


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentForm:
    """What all segments of one layout have in common."""

    layout_id: bytes
    record_bytes: int

    @classmethod
    def of_geometry(cls, geometry: RecordGeometry) -> "SegmentForm":
        return cls(layout_id=geometry.layout_digest[:LAYOUT_ID_BYTES], record_bytes=geometry.record_bytes)

    def record_offset(self, record: int) -> int:
        """In the file."""
        return HEADER_BYTES + record * self.record_bytes

    def file_bytes(self, num_records: int) -> int:
        return self.record_offset(num_records)

    def encode_header(self, keys: Sequence[BlockKey]) -> bytes:
        """Header page of a segment whose records have these keys, in order.

        Raises:
            ValueError: not 1..32 keys, or a key of another length.
        """
        if not 1 <= len(keys) <= MAX_RECORDS or any(len(key) != KEY_BYTES for key in keys):
            raise ValueError(
                f"{len(keys)} keys of {sorted({len(key) for key in keys})} bytes: expected 1..{MAX_RECORDS} of {KEY_BYTES}"
            )
        header = bytearray(HEADER_BYTES)
        _FIXED.pack_into(header, 0, MAGIC, VERSION, len(keys), self.record_bytes, self.layout_id)
        header[KEYS_OFFSET : KEYS_OFFSET + KEY_BYTES * len(keys)] = b"".join(keys)
        _CRC.pack_into(header, _CRC_OFFSET, crc32c.crc32c(memoryview(header)[:_CRC_OFFSET]))
        return bytes(header)

    def decode_header(self, header: Buffer, *, file_bytes: int) -> tuple[BlockKey, ...] | None:
        """Keys in record order; None if this is not the undamaged header of a complete file of this form."""
        view = memoryview(header)
        if view.nbytes != HEADER_BYTES or _CRC.unpack_from(view, _CRC_OFFSET) != (crc32c.crc32c(view[:_CRC_OFFSET]),):
            return None
        magic, version, num_records, record_bytes, layout_id = _FIXED.unpack_from(view)
        if (magic, version, record_bytes, layout_id) != (MAGIC, VERSION, self.record_bytes, self.layout_id):
            return None
        if not 1 <= num_records <= MAX_RECORDS or file_bytes != self.file_bytes(num_records):
            return None
        keys = bytes(view[KEYS_OFFSET : KEYS_OFFSET + KEY_BYTES * num_records])
        return tuple(BlockKey(keys[start : start + KEY_BYTES]) for start in range(0, len(keys), KEY_BYTES))
