"""The frames that transports speak on a socket: a fixed 64-byte header, then `length` bytes of payload. Pure.

One exchange at a time per connection: GET -> DATA or ABSENT; PUT -> GRANTED, payload, STORED; anything may be answered with
REFUSED. nixl uses LOCATE, OFFER and SETTLED to agree on memory, its bytes travel elsewhere. The trap: both lengths are known
before a byte of payload moves, so a peer whose length differs never gets to write.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum

MAGIC = b"PEKT"
VERSION = 1
MIN_KEY_BYTES = 32
MAX_KEY_BYTES = 40
"""Keys are 32 random bytes (hand-over) or 33 (snapshot_key); fewer would be no capability."""
MAX_PAYLOAD_BYTES = 1 << 30
_HEADER = struct.Struct(f"<4sBBBBIIQ{MAX_KEY_BYTES}s")
HEADER_BYTES = _HEADER.size


class Op(IntEnum):
    GET = 1
    """length: what the caller has room for. patience_ms: after that it has gone."""
    DATA = 2
    ABSENT = 3
    PUT = 4
    GRANTED = 5
    STORED = 6
    REFUSED = 7
    """status: a Refusal."""
    LOCATE = 8
    """nixl: like GET, answered with PLACE; the thing stays pinned until SETTLED or the end of the connection."""
    OFFER = 9
    """nixl: like PUT, answered with PLACE; SETTLED says that the write is done."""
    PLACE = 10
    """Payload: a nixl.Place."""
    SETTLED = 11


class Refusal(IntEnum):
    NONE = 0
    SIZE = 1
    """The thing has another length than was asked for."""
    BUSY = 2
    """Too many connections from this peer."""
    NO_GRANT = 3
    """Nobody accepts this key, or another push is on it."""
    NO_WINDOW = 4
    """nixl: no registered memory is free to show the thing in."""


class FrameError(Exception):
    """A peer does not speak this protocol. Never leaves the transport."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """exchange: chosen by the caller, echoed by the answer, so an answer to an earlier question is not taken for this one's."""

    op: Op
    exchange: int
    key: bytes
    length: int = 0
    status: Refusal = Refusal.NONE
    patience_ms: int = 0


def check_key(key: bytes) -> None:
    """Raises ValueError for a key that is too short or too long."""
    if not MIN_KEY_BYTES <= len(key) <= MAX_KEY_BYTES:
        raise ValueError(f"key of {len(key)} bytes, expected {MIN_KEY_BYTES} to {MAX_KEY_BYTES}")


def encode(frame: Frame) -> bytes:
    """Header of a frame. Raises ValueError for a key that is too short or too long."""
    check_key(frame.key)
    return _HEADER.pack(
        MAGIC,
        VERSION,
        frame.op,
        frame.status,
        len(frame.key),
        frame.exchange,
        frame.patience_ms,
        frame.length,
        frame.key,
    )


def decode(header: bytes | bytearray | memoryview) -> Frame:
    """A header of HEADER_BYTES bytes.

    Raises:
        FrameError: other magic, version, op or status, a key or payload of impossible length.
    """
    magic, version, op, status, key_bytes, exchange, patience_ms, length, key = _HEADER.unpack(header)
    if magic != MAGIC or version != VERSION:
        raise FrameError(f"magic {magic!r} version {version}, expected {MAGIC!r} version {VERSION}")
    if length > MAX_PAYLOAD_BYTES or not MIN_KEY_BYTES <= key_bytes <= MAX_KEY_BYTES:
        raise FrameError(f"length {length}, limit {MAX_PAYLOAD_BYTES}; key of {key_bytes} bytes")
    try:
        return Frame(
            op=Op(op),
            exchange=exchange,
            key=key[:key_bytes],
            length=length,
            status=Refusal(status),
            patience_ms=patience_ms,
        )
    except ValueError as error:
        raise FrameError(str(error)) from error


def is_answer(answer: Frame, question: Frame) -> bool:
    return answer.exchange == question.exchange and answer.key == question.key
