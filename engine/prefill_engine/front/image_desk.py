"""Images of attempts, from the rank's ImagesWanted to ImageRows: fetched into shared memory, told, freed; and what goes wrong.

Called by the front (messages of ranks, new attempts, their ends); owner of every fetch. The traps: an attempt
that ends takes its fetches with it, but memory that its rank was told of goes back only when the rank has let go; pixels are
kept until the attempt ends, because a hit that shrinks later asks for more images.
"""

import asyncio
import dataclasses
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from prefill_engine.front.attempt import DEADLINE_MARGIN_SECONDS, Attempt
from prefill_engine.image_messages import ImageRows, ImageRowsDone, ImagesWanted
from prefill_engine.messages import ToRank
from prefill_engine.rpc.status import Failure, ServingFailure
from prefill_engine.vision.slab import Region
from prefill_engine.vision_client.hold_renewal import HoldRenewal
from prefill_engine.vision_client.image_fetch import VALUE_BYTES, Fetched, ImageFetcher, Owner
from prefill_engine.vision_client.image_source import ImageSource, lost
from prefill_engine.vision_client.slab_room import SlabRoom

logger = logging.getLogger(__name__)

MAX_HELD_PIXEL_BYTES = 512 * 1024 * 1024
"""Encoded images of all attempts that have not ended; more are refused with QUEUE_FULL."""


class Observer(Protocol):
    """Who counts."""

    def image_ended(self, outcome: str, *, seconds: float) -> None: ...


@dataclass(slots=True, eq=False, kw_only=True)
class _Image:
    """One wanted image. region: once there is room; is_told: the rank knows it."""

    source: ImageSource
    round: int
    task: "asyncio.Task[None] | None" = None
    region: Region | None = None
    is_told: bool = False


@dataclass(slots=True, eq=False, kw_only=True)
class _Record:
    """An attempt with images. images: the wanted ones whose rows are not computed. fetched: indices that an encoder was asked
    for."""

    attempt: Attempt
    owner: Owner
    images: dict[int, _Image] = field(default_factory=dict)
    fetched: set[int] = field(default_factory=set)
    pixel_bytes: int = 0
    watch: Callable[[], None] = lambda: None


class ImageDesk:
    """columns: of a row. send: to a rank. fail: ends a living attempt. clock: monotonic seconds."""

    def __init__(
        self,
        fetcher: ImageFetcher,
        room: SlabRoom,
        holds: HoldRenewal,
        *,
        columns: int,
        send: Callable[[int, ToRank], None],
        fail: Callable[[Attempt, Failure], None],
        observer: Observer,
        clock: Callable[[], float],
    ) -> None:
        self._fetcher = fetcher
        self._room = room
        self._holds = holds
        self._columns = columns
        self._send = send
        self._fail = fail
        self._observer = observer
        self._clock = clock
        self._records: dict[bytes, _Record] = {}
        self._held_pixel_bytes = 0

    def check_room(self, num_bytes: int) -> None:
        """Before an attempt with so many bytes of pixels is admitted.

        Raises:
            ServingFailure: QUEUE_FULL.
        """
        if num_bytes and self._held_pixel_bytes + num_bytes > MAX_HELD_PIXEL_BYTES:
            text = f"{self._held_pixel_bytes} bytes of images wait, limit {MAX_HELD_PIXEL_BYTES}; nothing was queued"
            raise ServingFailure(Failure(reason="QUEUE_FULL", public_message=text, retry_after_seconds=1.0))

    def open(self, attempt: Attempt) -> None:
        """An attempt with images was handed to its rank."""
        call = attempt.call
        record = _Record(
            attempt=attempt,
            owner=Owner(
                request_id=call.request_id,
                attempt=call.attempt,
                attempt_id=call.attempt_id,
                tenant=call.fairness_key,
                cache_scope=call.cache_scope,
            ),
            pixel_bytes=sum(len(source.pixels) for source in attempt.image_sources),
        )
        self._holds.add(source.ticket for source in attempt.image_sources if source.ticket is not None)
        record.watch = lambda: self._look(record)
        self._held_pixel_bytes += record.pixel_bytes
        self._records[call.attempt_id] = record
        attempt.watchers.add(record.watch)

    def receive(self, message: ImagesWanted | ImageRowsDone) -> None:
        """Acts on what a rank says about an attempt's images."""
        record = self._records.get(message.attempt_id)
        if record is None or not record.attempt.is_live:
            return
        if isinstance(message, ImageRowsDone):
            image = record.images.pop(message.index, None)
            if image is not None:
                self._drop(image)
            return
        for index in record.images.keys() - set(message.indices):
            self._drop(record.images.pop(index))
        new = [index for index in message.indices if index not in record.images]
        if new:
            record.attempt.begin_images(now=message.at_ns * 1e-9)
        for index in new:
            image = _Image(source=record.attempt.image_sources[index], round=message.round)
            record.images[index] = image
            record.fetched.add(index)
            image.task = asyncio.create_task(self._fetch(record, image))

    def released(self, attempt_id: bytes) -> None:
        """The rank holds nothing of the attempt any more."""
        record = self._records.pop(attempt_id, None)
        if record is not None:
            record.attempt.watchers.discard(record.watch)
            self._close(record)
            for image in record.images.values():
                self._drop(image)

    async def close(self) -> None:
        """Ends every fetch."""
        tasks = [image.task for record in self._records.values() for image in record.images.values() if image.task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._fetcher.close()

    def _look(self, record: _Record) -> None:
        """The attempt has changed; if it has ended, nothing is fetched for it any more."""
        if not record.attempt.is_live:
            self._close(record)

    def _close(self, record: _Record) -> None:
        attempt = record.attempt
        for image in record.images.values():
            if image.task is not None:
                image.task.cancel()
        for source in attempt.image_sources:
            if source.ticket is not None:
                self._holds.drop(source.ticket)
            if source.index not in record.fetched:
                self._fetcher.give_up(source)
        attempt.image_sources = ()
        self._held_pixel_bytes -= record.pixel_bytes
        record.pixel_bytes = 0

    def _drop(self, image: _Image) -> None:
        """Nobody wants the image, and nobody looks at its rows. A fetch gives its region back itself."""
        if image.task is not None and not image.task.done():
            image.task.cancel()
        elif image.region is not None:
            self._room.free(image.region)
            image.region = None

    async def _fetch(self, record: _Record, image: _Image) -> None:
        source = image.source
        began = self._clock()
        try:
            fetched = await self._fill(record, image)
        except ServingFailure as error:
            failure = error.failure
            self._observer.image_ended(failure.reason.lower(), seconds=self._clock() - began)
            self._fail(record.attempt, dataclasses.replace(failure, rows_computed=record.attempt.rows_done))
            return
        except Exception as error:
            # Our own bug; the attempt must not wait for rows that will never come.
            logger.exception("image failed", extra={"request_id": record.owner.request_id, "image": source.index})
            text = f"image {source.index}: {type(error).__name__} in this engine; it is in the engine's log"
            self._fail(record.attempt, record.attempt.failure("INVARIANT", text))
            return
        finally:
            if not image.is_told and image.region is not None:
                self._room.free(image.region)
                image.region = None
        now = self._clock()
        self._observer.image_ended("ok", seconds=now - began)
        extra = {"request_id": record.owner.request_id, "image": source.index, "rows": source.tokens}
        logger.debug("image is here", extra={**extra, "encoder": fetched.encoder, "transport": fetched.transport})
        is_last = all(other.is_told for other in record.images.values())
        record.attempt.image_ready(source.index, rows=source.tokens, took_seconds=now - began, is_last=is_last, now=now)
        record.attempt.notify()

    async def _fill(self, record: _Record, image: _Image) -> Fetched:
        """Reserves, fetches and tells the rank, without a pause between the last two."""
        source, attempt = image.source, record.attempt
        num_bytes = source.tokens * self._columns * VALUE_BYTES
        try:
            image.region = await self._room.reserve(num_bytes)
        except (TimeoutError, ValueError) as error:
            raise lost("ENCODER_TIMEOUT", f"{error}; it was not sent", index=source.index) from None
        target = self._room.slab.view(image.region)
        try:
            fetched = await self._fetcher.fetch(source, record.owner, target=target, deadline=_deadline(attempt))
        finally:
            target.release()
        self._send(
            attempt.rank,
            ImageRows(
                attempt_id=attempt.call.attempt_id,
                index=source.index,
                round=image.round,
                path=self._room.slab.path,
                offset=image.region.offset,
                rows=source.tokens,
                columns=self._columns,
            ),
        )
        image.is_told = True
        if source.ticket is not None:
            self._holds.drop(source.ticket)
        return fetched


def _deadline(attempt: Attempt) -> float:
    """Images are waited for no longer than the attempt has, nor than its time to the first token."""
    target = attempt.call.ttft_target_seconds
    by_target = math.inf if target is None else attempt.arrival + target
    return min(attempt.deadline - DEADLINE_MARGIN_SECONDS, by_target)
