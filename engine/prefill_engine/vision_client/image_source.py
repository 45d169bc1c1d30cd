"""Where the rows of one image of a request come from, in plain values; and the failures that a fetch ends with. No gRPC."""

from dataclasses import dataclass

from prefill_engine.rpc.status import Failure, ServingFailure

PERMANENT_REASONS = ("IMAGE_REJECTED", "IMAGE_TOKEN_MISMATCH", "TOKENS_INVALID")
"""Wherever the image is sent, the answer is the same: the request fails, its other images are cancelled."""
_OF_THE_ENCODER = ("DRAINING", "STARTING", "ENGINE_LOST", "RANK_LOST", "WEDGED", "CALLER_CANCELLED")


@dataclass(frozen=True, slots=True, kw_only=True)
class TicketSource:
    """Rows that an encoder holds for us. ticket_id: a bearer secret. path, host_id, offset: of its shared memory, "" = none.
    checksum: CRC32C of all rows, None = not told."""

    ticket_id: bytes
    address: str
    path: str
    host_id: str
    offset: int
    checksum: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSource:
    """One image of a request. tokens: rows of its span. width, height: final size, 0 = not declared. pixels: the encoded
    image, or ticket: rows that were encoded before; with neither, nothing can be had."""

    index: int
    tokens: int
    patches: int
    width: int
    height: int
    content_key: bytes
    pixels: bytes = b""
    ticket: TicketSource | None = None

    @property
    def has_rows(self) -> bool:
        return bool(self.pixels) or self.ticket is not None


def image_failure(failure: Failure, *, index: int, address: str) -> ServingFailure:
    """What an encoder said about an image, as the request's failure: its index in front, the encoder's own state never passed
    on as ours (a router would take DRAINING for this engine's)."""
    reason = "EMBEDDING_GONE" if failure.reason in _OF_THE_ENCODER else failure.reason
    return ServingFailure(
        Failure(
            reason=reason,
            retry="" if reason != failure.reason else failure.retry,
            phase="IMAGES",
            public_message=f"image {index}: {failure.public_message}",
            operator_detail=f"encoder {address}: {failure.reason} {failure.operator_detail}".rstrip(),
            retry_after_seconds=failure.retry_after_seconds,
            image_index=index,
        )
    )


def lost(reason: str, text: str, *, index: int, detail: str = "") -> ServingFailure:
    """A failure of an image that no encoder put into words."""
    return ServingFailure(
        Failure(
            reason=reason,
            phase="IMAGES",
            public_message=f"image {index}: {text}",
            operator_detail=detail,
            image_index=index,
        )
    )
