"""One call for one image in plain values, and how it ends. Made by rpc/parse_vision, answered by rpc/convert_vision."""

from dataclasses import dataclass

from prefill_engine.rpc.status import Failure
from prefill_engine.vision.embedding_cache import Rows
from prefill_engine.vision.image_intake import PixelPolicy
from prefill_engine.vision.tickets import Ticket

MAX_INLINE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeCall:
    """item_id: 16 bytes. parent_attempt_id: b"" or 16 bytes. final, tokens, content_key: as declared; None, 0, b"" = not.
    deadline: of the loop's clock, ours included. hold_seconds: 0 = ours. inline: rows in the answer, if they fit."""

    item_id: bytes
    parent_attempt_id: bytes
    request_id: str
    cache_scope: bytes
    data: bytes
    policy: PixelPolicy
    final: tuple[int, int] | None
    tokens: int
    content_key: bytes
    deadline: float
    hold_seconds: float
    inline: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """ticket: holds the rows; None = inline_rows are they. queued: decoded or not, waiting; preprocess: a decoder's; gpu: of the
    batch the image was in; all seconds."""

    rows: Rows
    ticket: Ticket | None
    inline_rows: bytes
    from_cache: bool
    queued_seconds: float
    preprocess_seconds: float
    gpu_seconds: float


Outcome = Encoded | Failure
