"""A self-verifying block record: header, then payload; the same bytes on every medium (kv.md 2.3, C12).

Used by every store. The trap: a payload is right only together with its header; RecordCodec.verify is the one place
that says so.

Header, little-endian, layout.header_bytes long (768 for FP4, 1,792 for FP8 of the released model):

    HEADER_FIELDS, then at GROUP_CRCS_OFFSET one CRC32C per KV source group of the payload, then zeros,
    and in the last 4 bytes the CRC32C of everything before it.
"""

import struct
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from typing import Protocol

import crc32c

from prefill_engine.kv.store import Buffer, StoredBlock
from prefill_plan.block_keys import BlockKey
from prefill_plan.kv_layout import BlockLayout

MAGIC = b"PEKVBLK\x00"
VERSION = 1
KEY_BYTES = 32
LAYOUT_ID_BYTES = 8

HEADER_FIELDS = (
    # name, offset, size, struct code
    ("magic", 0, 8, "8s"),
    ("version", 8, 2, "H"),
    ("provenance", 10, 1, "B"),  # 0: exact chain; 1: descends from a bounded replay (kv.md 2.2)
    ("num_groups", 11, 1, "B"),
    ("block_index", 12, 4, "I"),
    ("layout_id", 16, LAYOUT_ID_BYTES, f"{LAYOUT_ID_BYTES}s"),  # start of BlockLayout.digest()
    ("key", 24, KEY_BYTES, f"{KEY_BYTES}s"),
    ("reserved", 56, 8, "8x"),  # zero
)
GROUP_CRCS_OFFSET = 64
CRC_BYTES = 4
_FIXED = struct.Struct("<" + "".join(code for _, _, _, code in HEADER_FIELDS))
_CRC = struct.Struct("<I")


class VerifyFailure(StrEnum):
    """Why a record is not served; the suffix of the counters verify_fail_*."""

    SHORT = "short"
    LAYOUT = "layout"
    """Not a record of this version and layout: foreign bytes included."""
    KEY = "key"
    CRC = "crc"


class RecordGeometry(Protocol):
    """The sizes of a record, without the meaning of its bytes; PoolGeometry is one."""

    @property
    def layout_digest(self) -> bytes: ...
    @property
    def header_bytes(self) -> int: ...
    @property
    def payload_bytes(self) -> int: ...
    @property
    def record_bytes(self) -> int: ...
    @property
    def group_bytes(self) -> tuple[int, ...]:
        """Of each KV source, in payload order, without gaps."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordShape:
    """RecordGeometry of a BlockLayout."""

    layout_digest: bytes
    header_bytes: int
    payload_bytes: int
    record_bytes: int
    group_bytes: tuple[int, ...]

    @classmethod
    def of_layout(cls, layout: BlockLayout) -> "RecordShape":
        return cls(
            layout_digest=layout.digest(),
            header_bytes=layout.header_bytes,
            payload_bytes=layout.payload_bytes,
            record_bytes=layout.record_bytes,
            group_bytes=tuple(source.group_bytes for source in layout.sources),
        )


class RecordCodec:
    """Writes and checks the records of one layout. Immutable, so any thread may use it."""

    def __init__(self, layout: BlockLayout | RecordGeometry) -> None:
        """Raises ValueError if the header has no room for one CRC per KV source."""
        self.shape: RecordGeometry = RecordShape.of_layout(layout) if isinstance(layout, BlockLayout) else layout
        self._layout_id = self.shape.layout_digest[:LAYOUT_ID_BYTES]
        ends = tuple(accumulate(self.shape.group_bytes))
        self._groups = tuple(zip((0, *ends), ends, strict=False))
        self._crcs = struct.Struct(f"<{len(self._groups)}I")
        self._crc_offset = self.shape.header_bytes - CRC_BYTES
        self._ranges = tuple(
            (self.shape.header_bytes + start, self.shape.header_bytes + end) for start, end in self._groups
        )
        if GROUP_CRCS_OFFSET + self._crcs.size > self._crc_offset:
            raise ValueError(
                f"header of {self.shape.header_bytes} bytes has no room for {len(self._groups)} group checksums"
            )
        # All of a header in one call: a hit reads hundreds of them, one after the other under the interpreter's lock.
        num_zeros = self._crc_offset - GROUP_CRCS_OFFSET - self._crcs.size
        self._header = struct.Struct(f"{_FIXED.format}{len(self._groups)}I{num_zeros}xI")

    @classmethod
    def of_geometry(cls, geometry: RecordGeometry) -> "RecordCodec":
        """For whoever knows sizes and layout digest only (kvd). Raises as the constructor."""
        return cls(geometry)

    @property
    def num_groups(self) -> int:
        return len(self._groups)

    def group_range(self, group: int) -> tuple[int, int]:
        """Start and end of a group in the record, header included."""
        return self._ranges[group]

    def check_payload(self, payload: Buffer) -> None:
        """Raises ValueError unless it is a flat byte buffer of payload_bytes."""
        view = memoryview(payload)
        if view.nbytes != self.shape.payload_bytes or view.ndim != 1 or view.itemsize != 1:
            raise ValueError(
                f"payload has {view.nbytes} bytes, {view.ndim} dimensions, items of {view.itemsize} bytes: "
                f"expected {self.shape.payload_bytes} bytes in one dimension"
            )

    def check_target(self, out: memoryview) -> None:
        """Raises ValueError unless a payload can be read into it."""
        self.check_payload(out)
        if out.readonly:
            raise ValueError("the buffer to read a payload into is read-only: expected a writable one")

    def split(self, record: Buffer) -> tuple[memoryview, memoryview]:
        """Header and payload of a record, or of what is left of one."""
        view = memoryview(record)
        return view[: self.shape.header_bytes], view[self.shape.header_bytes :]

    def encode_header(self, *, key: BlockKey, payload: Buffer, block_index: int, provenance: int) -> bytes:
        """Header of the record with this payload (payload_bytes long).

        Raises:
            ValueError: key, payload or a field has the wrong size.
        """
        if len(key) != KEY_BYTES or not 0 <= block_index < 1 << 32 or provenance not in (0, 1):
            raise ValueError(
                f"key of {len(key)} bytes, block index {block_index}, provenance {provenance}: "
                f"expected {KEY_BYTES} bytes, a u32, 0 or 1"
            )
        self.check_payload(payload)
        header = bytearray(self.shape.header_bytes)
        _FIXED.pack_into(header, 0, MAGIC, VERSION, provenance, len(self._groups), block_index, self._layout_id, key)
        self._crcs.pack_into(header, GROUP_CRCS_OFFSET, *self._group_crcs(memoryview(payload)))
        _CRC.pack_into(header, self._crc_offset, self._header_crc(memoryview(header)))
        return bytes(header)

    def verify(self, header: Buffer, payload: Buffer, *, key: BlockKey) -> VerifyFailure | None:
        """Why this is not the complete, undamaged record of `key` in this layout; None if it is."""
        head, body = memoryview(header), memoryview(payload)
        if head.nbytes < self.shape.header_bytes or body.nbytes < self.shape.payload_bytes:
            return VerifyFailure.SHORT
        if head.nbytes > self.shape.header_bytes or body.nbytes > self.shape.payload_bytes:
            return VerifyFailure.LAYOUT
        expected = self.read_header(head, key=key)
        if isinstance(expected, VerifyFailure):
            return expected
        return None if expected == self._group_crcs(body) else VerifyFailure.CRC

    def read_header(self, head: memoryview, *, key: BlockKey) -> tuple[int, ...] | VerifyFailure:
        """CRC32C that each group of the payload must have, from a header of header_bytes; or why it is not `key`'s header.

        For whoever gets a record piece by piece.
        """
        magic, version, _, num_groups, _, layout_id, record_key, *group_crcs, header_crc = self._header.unpack_from(
            head
        )
        if magic != MAGIC or version != VERSION:
            return VerifyFailure.LAYOUT
        if header_crc != crc32c.crc32c(head[: self._crc_offset]):
            return VerifyFailure.CRC
        if layout_id != self._layout_id or num_groups != len(self._groups):
            return VerifyFailure.LAYOUT
        if record_key != key:
            return VerifyFailure.KEY
        return tuple(group_crcs)

    def _group_crcs(self, payload: memoryview) -> tuple[int, ...]:
        return tuple(crc32c.crc32c(payload[start:end]) for start, end in self._groups)

    def _header_crc(self, header: memoryview) -> int:
        return int(crc32c.crc32c(header[: self._crc_offset]))


def decode_info(header: Buffer) -> StoredBlock:
    """Fields of a header that RecordCodec.verify has passed."""
    _, _, provenance, _, block_index, _, _ = _FIXED.unpack_from(header)
    return StoredBlock(block_index=block_index, provenance=provenance)
