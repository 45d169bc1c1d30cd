"""ImageSpans of a PrefillRequest -> what the rank must know, and where the front gets rows (serving.md 1.1, 4.4, C53).

Called by parse.py. The traps: tokens are counted on the final size, so a span whose length is not its size's shifts every
position after it and is refused here; a span may come without a source, if the caller believes it inside the hit.
"""

import array
from collections.abc import Sequence

from prefill_engine.front.served_model import ServedModel
from prefill_engine.messages import ImageItem
from prefill_engine.rpc import prefill_pb2
from prefill_engine.rpc.status import refuse
from prefill_engine.vision.plan import plan_image
from prefill_engine.vision_client.image_source import ImageSource, TicketSource
from prefill_plan.errors import ImageRejected

MAX_PIXEL_BYTES = 4 * 1024 * 1024
"""Of one encoded image inside a request; more fits into no message of several."""
MAX_REQUEST_IMAGES = 600
MAX_REQUEST_PIXEL_BYTES = 64_000_000
"""Of all encoded images inside a request (serving.md 4.3), as far as server.max_message_bytes lets them come here."""
_KEY_BYTES = 32
_TICKET_ID_BYTES = 16
_CHECKSUM_BYTES = 4
_PATCHES_PER_CELL = 9


def parse_images(
    spans: Sequence[prefill_pb2.ImageSpan], tokens: "array.array[int]", served: ServedModel
) -> tuple[tuple[ImageItem, ...], tuple[ImageSource, ...]]:
    """Items and sources of all images, by their place in the request.

    Raises:
        ServingFailure: with the image's index.
    """
    if len(spans) > MAX_REQUEST_IMAGES:
        text = f"{len(spans)} images in one request, limit {MAX_REQUEST_IMAGES}; nothing was computed"
        refuse("IMAGE_REJECTED", text, image_index=MAX_REQUEST_IMAGES)
    items, sources = [], []
    end = pixel_bytes = 0
    for number, span in enumerate(spans):
        _check_span(number, span, tokens, served, after=end)
        end = span.start + span.length
        source = _parse_source(number, span, served)
        pixel_bytes += len(source.pixels)
        if pixel_bytes > MAX_REQUEST_PIXEL_BYTES:
            text = f"image {number}: {pixel_bytes} bytes of images up to it, limit {MAX_REQUEST_PIXEL_BYTES} in one request"
            refuse("IMAGE_REJECTED", f"{text}; nothing was computed", image_index=number)
        has_source = source.has_rows and bool(served.vision_digest)
        items.append(
            ImageItem(start=span.start, length=span.length, content_key=span.content_key, has_source=has_source)
        )
        sources.append(source)
    return tuple(items), tuple(sources)


def _check_span(
    number: int, span: prefill_pb2.ImageSpan, tokens: "array.array[int]", served: ServedModel, *, after: int
) -> None:
    if len(span.content_key) != _KEY_BYTES:
        text = f"image {number}: content_key has {len(span.content_key)} bytes, expected {_KEY_BYTES}"
        refuse("IMAGE_REJECTED", text, image_index=number)
    end = span.start + span.length
    if span.length < 1 or end > len(tokens):
        text = f"image {number}: span [{span.start}, {end}) outside the {len(tokens)} tokens"
        refuse("IMAGE_TOKEN_MISMATCH", text, image_index=number)
    if span.start < after:
        text = f"image {number}: starts at {span.start} before the one ahead ends at {after}; sorted, disjoint spans expected"
        refuse("IMAGE_TOKEN_MISMATCH", text, image_index=number)
    wrong = next((i for i in range(span.start, end) if tokens[i] != served.image_token_id), None)
    if wrong is not None:
        text = f"image {number}: position {wrong} does not carry the image token {served.image_token_id}"
        refuse("IMAGE_TOKEN_MISMATCH", text, image_index=number)


def _parse_source(number: int, span: prefill_pb2.ImageSpan, served: ServedModel) -> ImageSource:
    if bool(span.width) != bool(span.height):
        text = f"image {number}: final size {span.width}x{span.height}, expected both sides or none"
        refuse("IMAGE_REJECTED", text, image_index=number)
    # Read once: protobuf makes a copy each time.
    pixels = span.pixels
    if len(pixels) > MAX_PIXEL_BYTES:
        text = f"image {number}: {len(pixels)} bytes, limit {MAX_PIXEL_BYTES} inside a request; send a ticket"
        refuse("IMAGE_REJECTED", text, image_index=number)
    return ImageSource(
        index=number,
        tokens=span.length,
        patches=_count_patches(number, span, served),
        width=span.width,
        height=span.height,
        content_key=span.content_key,
        pixels=pixels,
        ticket=_parse_ticket(number, span, served) if span.WhichOneof("source") == "ticket" else None,
    )


def _count_patches(number: int, span: prefill_pb2.ImageSpan, served: ServedModel) -> int:
    """By the declared size, which must give as many tokens as the span has; without one, about as many as its tokens tell."""
    if not span.width or served.vision is None:
        return span.length * _PATCHES_PER_CELL
    try:
        plan = plan_image(span.width, span.height, served.vision)
    except ImageRejected as error:
        refuse("IMAGE_REJECTED", f"image {number}: {error.message}", image_index=number)
    if plan.tokens != span.length:
        text = (
            f"image {number}: final size {span.width}x{span.height} has {plan.tokens} tokens, the span {span.length}; "
            f"nothing was computed"
        )
        refuse("IMAGE_TOKEN_MISMATCH", text, image_index=number)
    return plan.num_patches


def _parse_ticket(number: int, span: prefill_pb2.ImageSpan, served: ServedModel) -> TicketSource:
    ticket = span.ticket
    if len(ticket.ticket_id) != _TICKET_ID_BYTES:
        text = f"image {number}: ticket_id has {len(ticket.ticket_id)} bytes, expected {_TICKET_ID_BYTES}"
        refuse("IMAGE_REJECTED", text, image_index=number)
    if len(ticket.checksum) not in (0, _CHECKSUM_BYTES):
        text = f"image {number}: checksum has {len(ticket.checksum)} bytes, expected {_CHECKSUM_BYTES} or none"
        refuse("IMAGE_REJECTED", text, image_index=number)
    if ticket.columns and served.vision_digest and ticket.columns != served.hidden_size:
        text = f"image {number}: rows of {ticket.columns} values, this engine's model has {served.hidden_size}"
        refuse("MODEL_MISMATCH", text, image_index=number)
    shm, extents = ticket.region.shm, ticket.region.extents
    return TicketSource(
        ticket_id=ticket.ticket_id,
        address=ticket.ve_endpoint,
        path=shm.handle if len(extents) == 1 else "",
        host_id=shm.host_id,
        offset=extents[0].offset if len(extents) == 1 else 0,
        checksum=int.from_bytes(ticket.checksum, "little") if ticket.checksum else None,
    )
