"""How a component of a hand-over is cut into pieces for the data transport, and what proves that they arrived. No I/O.

Both sides compute the same: the engine's courier (rank/), the decode side (handoff_client, handoff_sink). The trap: a piece's
key opens that piece only, but who has the component's key can open all of them, so keys travel like tickets, never in logs.
"""

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import crc32c

from prefill_plan.config import Struct

PIECE_BYTES = 1 << 20
"""Of pulled pieces: large enough to hide a round trip, small enough to be copied while nobody else waits for the lock."""
KEY_BYTES = 32
CHECKS_INDEX = 0xFFFF_FFFF
"""Index whose key names the list of the pieces' checksums (common.proto, PeerRegion)."""
_DOMAIN = b"handoff-piece"
_CHECK = struct.Struct("<I")
CHECK_BYTES = _CHECK.size


class ComponentShape(Protocol):
    """What a KvFormat says of a component; see front/served_model.Component."""

    @property
    def kind(self) -> int: ...
    @property
    def bytes_per_token(self) -> int: ...
    @property
    def bytes_fixed(self) -> int: ...
    @property
    def positions(self) -> int: ...
    @property
    def unit_align(self) -> int: ...
    @property
    def layers(self) -> Sequence[int]: ...


class PushRegion(Struct):
    """Where a decode peer takes one component: bytes [offset, offset + num_bytes) of it, in pieces (handoff_pieces.py).

    kind: pe.v1.ComponentKind number. transport, endpoint: of the peer's listener. key: 32 bytes, as secret as a ticket.
    """

    kind: int
    transport: str
    endpoint: str
    key: bytes
    piece_bytes: int
    offset: int
    num_bytes: int


class ComponentKey(Struct):
    """kind: pe.v1.ComponentKind number. key: 32 random bytes that open the component on the data transport."""

    kind: int
    key: bytes


class PieceChecks(Struct):
    """CRC32C (u32 little-endian) of each piece of a pushed component, as it was sent."""

    kind: int
    checks: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceRange:
    """Bytes [start, end) of a region; key: what its transfer is named by."""

    index: int
    start: int
    end: int
    key: bytes


def piece_key(component_key: bytes, index: int) -> bytes:
    """32-byte key of one piece, or of the list of checksums (CHECKS_INDEX)."""
    return hashlib.sha256(_DOMAIN + component_key + _CHECK.pack(index)).digest()


def cut_pieces(component_key: bytes, *, num_bytes: int, piece_bytes: int) -> tuple[PieceRange, ...]:
    """Every piece of a region of num_bytes, in order.

    Raises:
        ValueError: piece_bytes < 1.
    """
    if piece_bytes < 1:
        raise ValueError(f"piece_bytes {piece_bytes}, expected at least 1")
    return tuple(
        PieceRange(
            index=index,
            start=start,
            end=min(start + piece_bytes, num_bytes),
            key=piece_key(component_key, index),
        )
        for index, start in enumerate(range(0, num_bytes, piece_bytes))
    )


def checksum(data: bytes | bytearray | memoryview) -> bytes:
    """CRC32C of a piece as it travels."""
    return _CHECK.pack(crc32c.crc32c(data))


def checksums(data: bytes | bytearray | memoryview, *, piece_bytes: int) -> bytes:
    """The list of checksums of a region that is cut into pieces."""
    view = memoryview(data)
    return b"".join(checksum(view[start : start + piece_bytes]) for start in range(0, len(view), piece_bytes))


def first_damaged(data: bytes | bytearray | memoryview, checks: bytes, *, piece_bytes: int) -> int | None:
    """Index of the first piece that is not what the checksums say, or that has none; None = all are right."""
    view = memoryview(data)
    num_pieces = -(-len(view) // piece_bytes)
    if len(checks) != num_pieces * CHECK_BYTES:
        return 0
    for index in range(num_pieces):
        piece = view[index * piece_bytes : (index + 1) * piece_bytes]
        if checksum(piece) != checks[index * CHECK_BYTES : (index + 1) * CHECK_BYTES]:
            return index
    return None


def component_lengths(components: Sequence[ComponentShape], *, block_tokens: int, num_tokens: int) -> Mapping[int, int]:
    """Bytes of each component of a hand-over of num_tokens, by kind (kv.md 1.5): whole blocks, ring images padded per layer."""
    lengths = {}
    for part in components:
        if part.bytes_per_token:
            length = -(-num_tokens // block_tokens) * part.unit_align
        elif part.positions:
            image = part.bytes_fixed // max(1, len(part.layers))
            length = -(-image // part.unit_align) * part.unit_align * len(part.layers)
        else:
            length = part.bytes_fixed
        if length:
            lengths[part.kind] = length
    return lengths
