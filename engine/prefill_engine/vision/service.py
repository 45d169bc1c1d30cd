"""pe.v1.VisionEncoder over grpc.aio: each handler checks, calls the queue, and answers. Nothing is decided here.

The trap: a call that is gone must leave its item, however it ended, or a dead caller's image would be encoded in vain.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from functools import partial

import crc32c

from prefill_engine.rpc import vision_pb2, vision_pb2_grpc
from prefill_engine.rpc.convert_vision import (
    ServedTower,
    error_message,
    inspect_message,
    result_message,
    vision_info_message,
    vision_load_message,
)
from prefill_engine.rpc.parse_vision import parse_encode, parse_policy
from prefill_engine.rpc.status import Context, Failure, ServingFailure, abort_with, refuse, serving_error
from prefill_engine.vision.encode_call import EncodeCall, Outcome
from prefill_engine.vision.encode_queue import EncodeQueue, Item
from prefill_engine.vision.image_intake import DEFAULT_POLICY, examine
from prefill_engine.vision.tickets import Ticket
from prefill_engine.vision.ve_front import VisionFront
from prefill_plan.errors import ImageRejected

logger = logging.getLogger(__name__)

FRAME_BYTES = 1 << 20
DEFAULT_WATCH_SECONDS = 0.1
_MIN_WATCH_SECONDS = 0.01
_DRAIN_STATUS_SECONDS = 0.2
_MAX_REQUEST_ID = 128
MAX_UNREAD_RESULTS = 64
"""Images of one EncodeMany stream whose results its caller has not taken; a result may hold 1 MiB of rows."""
_INVARIANT = Failure(reason="INVARIANT", public_message="the encoder failed on this image; it is in the encoder's log")


class VisionEncoderService(vision_pb2_grpc.VisionEncoderServicer):
    """Servicer of one VE."""

    def __init__(self, front: VisionFront, *, drain_seconds: float) -> None:
        self._front = front
        self._queue = front.queue
        self._drain_seconds = drain_seconds
        self._image_seconds = front.queue.config.image_seconds

    async def Encode(self, request: vision_pb2.EncodeRequest, context: Context) -> vision_pb2.EncodeResult:
        """Encodes one image; its rows are then held for the caller."""
        try:
            call = self._parse(request, time_remaining=context.time_remaining())
            outcome = await self._run(call)
        except ServingFailure as error:
            self._refused(request, error.failure)
            await abort_with(context, error.failure)
        if isinstance(outcome, Failure):
            await abort_with(context, outcome)
        return self._result(call, outcome)

    async def EncodeMany(
        self, requests: AsyncIterator[vision_pb2.EncodeRequest], context: Context
    ) -> AsyncIterator[vision_pb2.EncodeResult]:
        """Many images on one stream, results as they come. While the queue is full, or the caller takes no results, no more
        requests are read."""
        results: asyncio.Queue[vision_pb2.EncodeResult | None] = asyncio.Queue()
        tasks: set[asyncio.Task[None]] = set()
        room = asyncio.Semaphore(MAX_UNREAD_RESULTS)
        reading = asyncio.create_task(self._read_many(requests, results, tasks, room))
        try:
            while (result := await results.get()) is not None:
                yield result
                room.release()
            await reading
        except Exception:
            logger.exception("handler failed", extra={"method": "EncodeMany"})
            await abort_with(context, _INVARIANT)
        finally:
            for task in [reading, *tasks]:
                task.cancel()

    async def Claim(
        self, request: vision_pb2.ClaimRequest, context: Context
    ) -> AsyncIterator[vision_pb2.EmbeddingBytes]:
        """The rows of a ticket from an offset on, in frames of at most 1 MiB, each with its CRC32C. The hold goes on."""
        cache = self._queue.cache
        try:
            ticket = self._find(request.ticket_id)
            rows = ticket.rows
            size = rows.region.length
            if request.offset > size:
                refuse("EMBEDDING_GONE", f"offset {request.offset}, the rows have {size} bytes")
        except ServingFailure as error:
            await abort_with(context, error.failure)
        cache.pin(rows)
        # However the call ends: also when the caller is lost while a frame is sent.
        context.add_done_callback(lambda _: cache.unpin(rows))  # type: ignore[arg-type]
        offset = request.offset
        while True:
            data = cache.slab.read(rows.region, offset=offset, num_bytes=FRAME_BYTES)
            is_last = offset + len(data) == size
            yield vision_pb2.EmbeddingBytes(offset=offset, data=data, last=is_last, crc32c=crc32c.crc32c(data))
            self._front.telemetry.sent(len(data))
            offset += len(data)
            if is_last:
                return

    async def Renew(self, request: vision_pb2.RenewHoldRequest, _context: Context) -> vision_pb2.RenewHoldResponse:
        """Holds rows longer, up to rows.max_hold_seconds in all; names the tickets that are gone."""
        hold = max(0.0, request.hold.ToNanoseconds() / 1e9)
        tickets = self._queue.tickets
        return vision_pb2.RenewHoldResponse(
            lost=[ticket_id for ticket_id in request.ticket_ids if not tickets.renew(ticket_id, hold)]
        )

    async def Ack(self, request: vision_pb2.AckRequest, _context: Context) -> vision_pb2.AckResponse:
        """The caller has the rows, or gave up: they are free."""
        return vision_pb2.AckResponse(released=self._queue.release(request.ticket_id))

    async def Cancel(
        self, request: vision_pb2.CancelEncodeRequest, _context: Context
    ) -> vision_pb2.CancelEncodeResponse:
        """Ends an item, or all of an attempt: those under way, those held, and for a minute those that come."""
        cancelled, drained = self._queue.cancel(item_id=request.item_id, parent_attempt_id=request.parent_attempt_id)
        return vision_pb2.CancelEncodeResponse(cancelled=cancelled, drained=drained)

    async def Inspect(self, request: vision_pb2.InspectRequest, context: Context) -> vision_pb2.InspectResult:
        """What an image's header says and what it would cost. Decodes nothing."""
        try:
            served = self._front.served
            policy = parse_policy(request.policy) if request.HasField("policy") else DEFAULT_POLICY
        except ServingFailure as error:
            await abort_with(context, error.failure)
        try:
            total = request.total_bytes or len(request.data_head)
            intake = examine(request.data_head, policy=policy, final=None, spec=served.spec, total_bytes=total)
        except ImageRejected as error:
            failure = Failure(reason=error.reason, public_message=error.message)
            return vision_pb2.InspectResult(error=serving_error(failure))
        return inspect_message(intake)

    async def GetInfo(self, _request: vision_pb2.VisionInfoRequest, context: Context) -> vision_pb2.VisionInfo:
        """Identity, limits and digest."""
        return vision_info_message(await self._served(context))

    async def WatchLoad(
        self, request: vision_pb2.VisionWatchRequest, _context: Context
    ) -> AsyncIterator[vision_pb2.VisionLoad]:
        """A report per period until the caller leaves."""
        asked = request.period.ToNanoseconds() / 1e9
        period = max(_MIN_WATCH_SECONDS, asked or DEFAULT_WATCH_SECONDS)
        seq = 0
        while True:
            seq += 1
            yield vision_load_message(self._front.view(), seq=seq)
            await asyncio.sleep(period)

    async def Drain(
        self, request: vision_pb2.VisionDrainRequest, _context: Context
    ) -> AsyncIterator[vision_pb2.VisionDrainStatus]:
        """Starts the drain and reports until it is done. Never ends the process; leaving the stream does not stop it (C43)."""
        asked = request.deadline.ToNanoseconds() / 1e9
        self._queue.begin_drain(asked if request.HasField("deadline") else self._drain_seconds)
        while True:
            status = self._queue.drain_status()
            yield vision_pb2.VisionDrainStatus(
                patches_left=status.patches_left, tickets_open=status.tickets_open, done=status.done
            )
            if status.done:
                return
            await asyncio.sleep(_DRAIN_STATUS_SECONDS)

    def _parse(self, request: vision_pb2.EncodeRequest, *, time_remaining: float | None) -> EncodeCall:
        return parse_encode(
            request,
            vision_digest=self._front.served.vision_digest,
            now=self._front.clock(),
            seconds=self._image_seconds,
            time_remaining=time_remaining,
        )

    async def _run(self, call: EncodeCall) -> Outcome:
        item = self._queue.admit(await self._queue.prepare(call))
        try:
            return await asyncio.shield(item.outcome)
        finally:
            self._queue.leave(item)

    def _result(self, call: EncodeCall, outcome: Outcome) -> vision_pb2.EncodeResult:
        if isinstance(outcome, Failure):
            return error_message(call.item_id, outcome)
        seconds_left = self._queue.tickets.seconds_left
        return result_message(call.item_id, outcome, served=self._front.served, seconds_left=seconds_left)

    async def _read_many(
        self,
        requests: AsyncIterator[vision_pb2.EncodeRequest],
        results: "asyncio.Queue[vision_pb2.EncodeResult | None]",
        tasks: "set[asyncio.Task[None]]",
        room: asyncio.Semaphore,
    ) -> None:
        """Reads on while there is room, and ends the results when all are answered."""
        try:
            async for request in requests:
                await room.acquire()
                try:
                    call = self._parse(request, time_remaining=None)
                    item = await self._submit_when_room(call)
                except ServingFailure as error:
                    self._refused(request, error.failure)
                    results.put_nowait(error_message(request.item_id, error.failure))
                    continue
                task = asyncio.create_task(self._answer(call, item, results))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
                # Not in the task: one that is cancelled before it begins would leave nothing.
                task.add_done_callback(partial(_leave, self._queue, item))
            await asyncio.gather(*tasks)
        finally:
            results.put_nowait(None)

    async def _submit_when_room(self, call: EncodeCall) -> Item:
        """As submit, but a full queue is waited for, as long as the image has time."""
        prepared = await self._queue.prepare(call)
        while True:
            try:
                return self._queue.admit(prepared)
            except ServingFailure as error:
                if error.failure.reason != "PATCH_QUEUE_FULL" or self._front.clock() >= call.deadline:
                    raise
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(call.deadline):
                    await self._queue.changed()

    async def _answer(
        self, call: EncodeCall, item: Item, results: "asyncio.Queue[vision_pb2.EncodeResult | None]"
    ) -> None:
        try:
            outcome = await asyncio.shield(item.outcome)
            result = self._result(call, outcome)
        except Exception:
            logger.exception("handler failed", extra={"method": "EncodeMany"})
            result = error_message(call.item_id, _INVARIANT)
        results.put_nowait(result)

    def _refused(self, request: vision_pb2.EncodeRequest, failure: Failure) -> None:
        request_id = request.parent.request_id[:_MAX_REQUEST_ID]
        self._front.telemetry.refused(failure, request_id=request_id, item_id=request.item_id)

    def _find(self, ticket_id: bytes) -> Ticket:
        ticket = self._queue.tickets.find(ticket_id)
        if ticket is None:
            refuse("EMBEDDING_GONE", "no rows are held under this ticket: acknowledged, cancelled, or their hold ended")
        return ticket

    async def _served(self, context: Context) -> ServedTower:
        try:
            return self._front.served
        except ServingFailure as error:
            await abort_with(context, error.failure)


def _leave(queue: EncodeQueue, item: Item, _task: "asyncio.Task[None]") -> None:
    queue.leave(item)
