"""One image, from its source to rows in our own memory: encoded, pulled, verified, acknowledged; once more elsewhere.

Called by the front's ImageDesk, which has reserved the target before. The traps: rows count only when their number, width,
type and checksum are what was asked for; a copy from an encoder's shared memory counts only if the hold still stood after it
(Ack); an encoder's ticket is given back however the fetch ends.
"""

import asyncio
import contextlib
import logging
import os
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import crc32c
import grpc
import grpc.aio

from prefill_engine.rpc import common_pb2, vision_pb2
from prefill_engine.rpc.convert import to_duration
from prefill_engine.rpc.status import DETAILS_KEY, ServingFailure, decode_failure
from prefill_engine.vision.slab import host_id, is_slab_path
from prefill_engine.vision_client.encoder_peer import EncoderPeer
from prefill_engine.vision_client.encoder_set import EncoderSet
from prefill_engine.vision_client.image_source import PERMANENT_REASONS, ImageSource, TicketSource, image_failure, lost

logger = logging.getLogger(__name__)

VALUE_BYTES = 2  # bfloat16
MAX_TRIES = 2  # serving.md 4.6: once on another encoder
ACK_SECONDS = 2.0
_MIN_WAIT_SECONDS = 0.05
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Whose images: the attempt, and its tenant's salt, which is part of the content keys."""

    request_id: str
    attempt: int
    attempt_id: bytes
    tenant: str
    cache_scope: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """How an image came. encoder: its address. from_cache: it was encoded before. transport: "shm" or "grpc"."""

    encoder: str
    from_cache: bool
    transport: str
    tries: int


class ImageFetcher:
    """image_seconds: longest wait for one try. columns: of a row. clock: monotonic seconds."""

    def __init__(
        self,
        encoders: EncoderSet,
        *,
        digest: bytes,
        columns: int,
        image_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        self._encoders = encoders
        self._digest = digest
        self._columns = columns
        self._image_seconds = image_seconds
        self._clock = clock
        self._acks: set[asyncio.Task[bool]] = set()

    async def fetch(self, source: ImageSource, owner: Owner, *, target: memoryview, deadline: float) -> Fetched:
        """Fills `target`, tokens * columns * 2 bytes; what it holds counts only if this returns. deadline: of the clock.

        Raises:
            ServingFailure: with the image's index. Permanent reasons (PERMANENT_REASONS) are never tried twice.
        """
        if source.ticket is not None:
            return await self._fetch_held(source, source.ticket, target=target, deadline=deadline)
        tried: list[str] = []
        while True:
            seconds = min(self._image_seconds, deadline - self._clock())
            try:
                async with asyncio.timeout(max(0.0, seconds)):
                    return await self._try(source, owner, target=target, tried=tried, seconds=seconds)
            except TimeoutError:
                failure = self._timed_out(source, tried, seconds)
            except ServingFailure as error:
                failure = error
            is_final = failure.failure.reason in PERMANENT_REASONS or len(tried) >= MAX_TRIES or not tried
            if is_final or self._clock() >= deadline:
                raise failure
            extra = {"request_id": owner.request_id, "image": source.index, "reason": failure.failure.reason}
            logger.warning("image is tried again", extra={**extra, "detail": failure.failure.operator_detail})

    def give_up(self, source: ImageSource) -> None:
        """Lets an encoder free the rows of a ticket that we were given and never used."""
        peer = self._encoders.peer(source.ticket.address) if source.ticket is not None else None
        if source.ticket is not None and peer is not None:
            self._ack_later(peer, source.ticket.ticket_id)

    async def close(self) -> None:
        """Ends what is still being given back."""
        for task in self._acks:
            task.cancel()
        await asyncio.gather(*self._acks, return_exceptions=True)

    async def _try(
        self, source: ImageSource, owner: Owner, *, target: memoryview, tried: list[str], seconds: float
    ) -> Fetched:
        """One encoder, from picking it to the Ack. A full queue is no try: another one is asked, or the same one later."""
        end = self._clock() + seconds
        full: set[str] = set()
        while True:
            peer = await self._encoders.pick(source.patches, avoid={*tried, *full})
            try:
                return await self._encode(peer, source, owner, target=target, tried=tried, end=end)
            except ServingFailure as error:
                if error.failure.reason != "PATCH_QUEUE_FULL":
                    raise
                tried.pop()
                pause = max(_MIN_WAIT_SECONDS, error.failure.retry_after_seconds)
                if peer.address in full:
                    if self._clock() + pause >= end:
                        raise
                    await asyncio.sleep(pause)
                full.add(peer.address)

    async def _encode(
        self, peer: EncoderPeer, source: ImageSource, owner: Owner, *, target: memoryview, tried: list[str], end: float
    ) -> Fetched:
        tried.append(peer.address)
        peer.note_sent(source.patches)
        peer.num_images += 1
        item_id = secrets.token_bytes(16)
        is_answered = False
        try:
            request = self._request(source, owner, item_id=item_id, seconds=end - self._clock())
            result = await peer.stub.Encode(request)
            is_answered = True
            image = result.image
            transport = await self._pull(peer, source, image, target=target)
        except grpc.aio.AioRpcError as error:
            raise self._failed(peer, source, error) from error
        finally:
            peer.num_images -= 1
            if not is_answered:
                self._cancel_later(peer, item_id)
        return Fetched(encoder=peer.address, from_cache=image.from_cache, transport=transport, tries=len(tried))

    def _request(
        self, source: ImageSource, owner: Owner, *, item_id: bytes, seconds: float
    ) -> vision_pb2.EncodeRequest:
        return vision_pb2.EncodeRequest(
            item_id=item_id,
            parent=common_pb2.AttemptKey(
                request_id=owner.request_id, attempt=owner.attempt, attempt_id=owner.attempt_id
            ),
            tenant=common_pb2.TenantContext(tenant=owner.tenant, cache_scope=owner.cache_scope),
            vision_digest=self._digest,
            data=source.pixels,
            width=source.width,
            height=source.height,
            tokens=source.tokens,
            content_key=source.content_key,
            delivery=vision_pb2.Delivery(mode=vision_pb2.Delivery.PULL),
            time_left=to_duration(seconds),
        )

    async def _pull(
        self, peer: EncoderPeer, source: ImageSource, image: vision_pb2.EncodedImage, *, target: memoryview
    ) -> str:
        """Rows of an answer into the target, verified; the ticket goes back in any case."""
        ticket = TicketSource(
            ticket_id=image.ticket_id,
            address=peer.address,
            path=image.region.shm.handle,
            host_id=image.region.shm.host_id,
            offset=image.region.extents[0].offset if image.region.extents else 0,
            checksum=int.from_bytes(image.checksum, "little") if len(image.checksum) == 4 else None,
        )
        try:
            self._check(source, image, peer)
            return await self._pull_ticket(peer, source, ticket, target=target)
        except BaseException:
            if ticket.ticket_id:
                self._ack_later(peer, ticket.ticket_id)
            raise

    async def _fetch_held(
        self, source: ImageSource, ticket: TicketSource, *, target: memoryview, deadline: float
    ) -> Fetched:
        """Rows that the caller had encoded before: there are no pixels to ask another encoder with."""
        seconds = min(self._image_seconds, deadline - self._clock())
        peer = self._encoders.peer(ticket.address)
        if peer is None:
            text = "the ticket names an encoder that this engine does not know; it was not asked"
            raise lost("EMBEDDING_GONE", text, index=source.index, detail=f"encoder {ticket.address}")
        try:
            async with asyncio.timeout(max(0.0, seconds)):
                # The ticket does not say of which tower its rows are. A restart after this answer takes the ticket with it.
                await peer.identify()
                transport = await self._pull_ticket(peer, source, ticket, target=target)
        except TimeoutError:
            raise self._timed_out(source, [ticket.address], seconds) from None
        except ValueError as error:
            text = "the rows of its ticket are of another tower or other arithmetic; they were not taken"
            raise lost(
                "EMBEDDING_GONE", text, index=source.index, detail=f"encoder {ticket.address}: {error}"
            ) from error
        except grpc.aio.AioRpcError as error:
            raise self._failed(peer, source, error) from error
        return Fetched(encoder=ticket.address, from_cache=False, transport=transport, tries=1)

    async def _pull_ticket(
        self, peer: EncoderPeer, source: ImageSource, ticket: TicketSource, *, target: memoryview
    ) -> str:
        is_shared = await _finish(asyncio.ensure_future(asyncio.to_thread(_read_shared, ticket, target)))
        if not is_shared:
            await self._claim(peer, source, ticket, target=target)
        await _verify(source, ticket, target)
        released = await self._ack(peer, ticket.ticket_id, ok=True)
        if released or not is_shared:
            return "shm" if is_shared else "grpc"
        text = "the encoder had let go of its rows while they were copied; what came was dropped"
        raise lost("EMBEDDING_GONE", text, index=source.index, detail=f"encoder {peer.address}")

    def _check(self, source: ImageSource, image: vision_pb2.EncodedImage, peer: EncoderPeer) -> None:
        found = (image.tokens, image.columns, image.dtype)
        expected = (source.tokens, self._columns, "bf16")
        if found != expected:
            text = f"the encoder answered {found[0]} rows of {found[1]} {found[2]}, expected {expected[0]} of {expected[1]}"
            raise lost(
                "EMBEDDING_CHECKSUM", f"{text} bf16; dropped", index=source.index, detail=f"encoder {peer.address}"
            )
        if source.content_key and image.content_key and image.content_key != source.content_key:
            text = "the encoder answered with the rows of another image; dropped"
            raise lost("EMBEDDING_CHECKSUM", text, index=source.index, detail=f"encoder {peer.address}")

    async def _claim(self, peer: EncoderPeer, source: ImageSource, ticket: TicketSource, *, target: memoryview) -> None:
        """Rows by gRPC, in frames that each carry a checksum."""
        at, is_last = 0, False
        async for frame in peer.stub.Claim(vision_pb2.ClaimRequest(ticket_id=ticket.ticket_id)):
            end = at + len(frame.data)
            if frame.offset != at or end > len(target) or is_last or crc32c.crc32c(frame.data) != frame.crc32c:
                text = f"bytes [{at}, {end}) of {len(target)} came damaged or out of order; dropped"
                raise lost("EMBEDDING_CHECKSUM", text, index=source.index, detail=f"encoder {peer.address}")
            target[at:end] = frame.data
            at, is_last = end, frame.last
        if at != len(target) or not is_last:
            text = f"{at} of {len(target)} bytes came; dropped"
            raise lost("EMBEDDING_CHECKSUM", text, index=source.index, detail=f"encoder {peer.address}")

    async def _ack(self, peer: EncoderPeer, ticket_id: bytes, *, ok: bool) -> bool:
        request = vision_pb2.AckRequest(ticket_id=ticket_id, ok=ok)
        reply = await peer.stub.Ack(request, timeout=ACK_SECONDS)
        return bool(reply.released)

    def _ack_later(self, peer: EncoderPeer, ticket_id: bytes) -> None:
        self._keep(asyncio.create_task(self._ack(peer, ticket_id, ok=False)))

    def _cancel_later(self, peer: EncoderPeer, item_id: bytes) -> None:
        """An image whose answer we did not wait for: its work ends, or its rows are freed."""

        async def cancel() -> bool:
            await peer.stub.Cancel(vision_pb2.CancelEncodeRequest(item_id=item_id), timeout=ACK_SECONDS)
            return True

        self._keep(asyncio.create_task(cancel()))

    def _keep(self, task: "asyncio.Task[bool]") -> None:
        """An encoder that can't be told lets go when its hold ends."""
        self._acks.add(task)
        task.add_done_callback(self._acks.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())

    def _timed_out(self, source: ImageSource, tried: list[str], seconds: float) -> ServingFailure:
        if tried:
            text, detail = f"not encoded within {max(0.0, seconds):.3g} s", f"encoder {tried[-1]}"
        else:
            text = f"no vision encoder took it within {max(0.0, seconds):.3g} s"
            detail = self._encoders.describe()
        return lost("ENCODER_TIMEOUT", text, index=source.index, detail=detail)

    def _failed(self, peer: EncoderPeer, source: ImageSource, error: grpc.aio.AioRpcError) -> ServingFailure:
        # The stubs know a type of metadata that the library does not have.
        metadata: Iterable[tuple[str, str | bytes]] = error.trailing_metadata() or ()  # type: ignore[assignment]
        for key, value in metadata:
            if key == DETAILS_KEY and isinstance(value, bytes) and (failure := decode_failure(value)) is not None:
                return image_failure(failure, index=source.index, address=peer.address)
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            peer.note_lost(f"UNAVAILABLE: {error.details()}")
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            return self._timed_out(source, [peer.address], self._image_seconds)
        detail = f"encoder {peer.address}: {error.code().name}: {error.details()}"
        return lost("EMBEDDING_GONE", "the vision encoder was lost", index=source.index, detail=detail)


def _read_shared(ticket: TicketSource, target: memoryview) -> bool:
    """Rows from the encoder's memory into the target, unchecked; False if that memory is another machine's, or gone.

    Read, not mapped: a mapping would keep the memory of an encoder that has ended. Path and offset may be a caller's words:
    nothing but a slab is opened, since a pipe would never open, and no number is too large.
    """
    if ticket.checksum is None or not is_slab_path(ticket.path):
        return False
    try:
        if host_id(ticket.path) != ticket.host_id:
            return False
        fd = os.open(ticket.path, os.O_RDONLY | os.O_CLOEXEC)
    except (OSError, ValueError):
        return False
    try:
        return os.preadv(fd, [target], ticket.offset) == len(target)
    except (OSError, OverflowError):
        return False
    finally:
        os.close(fd)


async def _finish(work: "asyncio.Future[_T]") -> "_T":
    """A thread's result. A thread can't be cancelled, and this one uses memory that is given away afterwards: waits for it
    always."""
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        while not work.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([work])
        raise


async def _verify(source: ImageSource, ticket: TicketSource, target: memoryview) -> None:
    """Frames carry their own checksums, so a ticket that came without one may be claimed all the same."""
    if ticket.checksum is None:
        return
    found = await _finish(asyncio.ensure_future(asyncio.to_thread(crc32c.crc32c, target)))
    if found != ticket.checksum:
        raise _checksum(source, ticket)


def _checksum(source: ImageSource, ticket: TicketSource) -> ServingFailure:
    text = "the checksum of its rows is wrong; dropped"
    return lost("EMBEDDING_CHECKSUM", text, index=source.index, detail=f"encoder {ticket.address}")
