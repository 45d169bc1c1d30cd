"""pe.v1.PrefillEngine over grpc.aio: each handler checks, calls the life cycle, and relays events. Nothing is decided here."""

import asyncio
import math
from collections.abc import AsyncIterator
from typing import NoReturn

from prefill_engine.front.attempt import Attempt
from prefill_engine.front.event_log import Cursor
from prefill_engine.front.front import Front
from prefill_engine.front.health import is_serving
from prefill_engine.front.load import predicted_compute_seconds
from prefill_engine.front.served_model import ServedModel
from prefill_engine.rpc import prefill_pb2, prefill_pb2_grpc
from prefill_engine.rpc.convert import event_message, load_message, server_info_message, to_duration
from prefill_engine.rpc.parse import parse_call
from prefill_engine.rpc.status import Context, Failure, ServingFailure, abort_with, refuse

DEFAULT_WATCH_SECONDS = 0.1
_MIN_WATCH_SECONDS = 0.01
_DRAIN_STATUS_SECONDS = 0.2


class PrefillEngineService(prefill_pb2_grpc.PrefillEngineServicer):
    """Servicer of one engine."""

    def __init__(self, front: Front, *, drain_seconds: float) -> None:
        self._front = front
        self._drain_seconds = drain_seconds

    async def Prefill(
        self, request: prefill_pb2.PrefillRequest, context: Context
    ) -> AsyncIterator[prefill_pb2.PrefillEvent]:
        """Admits or joins an attempt and streams its events; the stream's end is the attempt's outcome."""
        try:
            call = parse_call(request, self._front.served)
            remaining = context.time_remaining()
            deadline = math.inf if remaining is None else self._front.clock() + remaining
            vision = self._front.vision
            if vision is not None:
                vision.check_room(call)
            attempt, joined = self._front.lifecycle.submit(call, deadline=deadline)
            if vision is not None and not joined:
                vision.open(attempt)
        except ServingFailure as error:
            await abort_with(context, error.failure)
        async for message in self._relay(attempt, attempt.log.join(after_seq=0), context, joined=joined):
            yield message

    async def Attach(
        self, request: prefill_pb2.AttachRequest, context: Context
    ) -> AsyncIterator[prefill_pb2.PrefillEvent]:
        """Joins an attempt after the events that the caller has seen."""
        attempt = self._front.lifecycle.attempts.find(request.attempt_id)
        if attempt is None:
            text = "no attempt with this id is running or remembered"
            await abort_with(context, Failure(reason="ATTEMPT_UNKNOWN", public_message=text))
        try:
            cursor = attempt.log.join(after_seq=request.after_seq)
        except ValueError as error:
            await abort_with(context, Failure(reason="ATTEMPT_UNKNOWN", public_message=str(error)))
        async for message in self._relay(attempt, cursor, context, joined=True):
            yield message

    async def Cancel(self, request: prefill_pb2.CancelRequest, _context: Context) -> prefill_pb2.CancelResponse:
        """Cancels an attempt; with wait_drained it answers when the rank holds nothing of it any more."""
        lifecycle = self._front.lifecycle
        result = lifecycle.cancel(request.attempt_id)
        attempt = lifecycle.attempts.find(request.attempt_id)
        if attempt is not None and request.wait_drained and result != "TOO_LATE_TICKET_CLAIMED":
            changed = asyncio.Event()
            attempt.watchers.add(changed.set)
            try:
                while not attempt.released:
                    await changed.wait()
                    changed.clear()
            finally:
                attempt.watchers.discard(changed.set)
        drained = attempt is None or attempt.released
        return prefill_pb2.CancelResponse(result=result, drained=drained, generation=request.generation)

    async def Estimate(self, request: prefill_pb2.EstimateRequest, context: Context) -> prefill_pb2.EstimateResponse:
        """Predicted wait and finish on the best rank; changes nothing."""
        served = await self._served(context)
        front = self._front
        wait = min(front.board.wait_seconds(rank) for rank in front.lanes)
        compute = predicted_compute_seconds(
            front.board.step_model(),
            rows=request.compute_rows,
            context=request.context,
            chunk_rows=served.chunk_cap_tokens,
        )
        tokens = max(request.context, request.compute_rows)
        fits = tokens <= min(served.kv_tokens, served.max_context_tokens)
        admissible = fits and is_serving(front.view().state) and front.lifecycle.can_admit(request.tenant.fairness_key)
        return prefill_pb2.EstimateResponse(
            wait=to_duration(wait), finish=to_duration(wait + compute), admissible=admissible
        )

    async def GetServerInfo(
        self, _request: prefill_pb2.GetServerInfoRequest, context: Context
    ) -> prefill_pb2.ServerInfo:
        """Identity, limits and digests."""
        return server_info_message(await self._served(context))

    async def GetLoad(self, _request: prefill_pb2.GetLoadRequest, _context: Context) -> prefill_pb2.LoadReport:
        """One load report; it names no attempts."""
        return load_message(self._front.view(), seq=1, known_attempts=())

    async def WatchLoad(
        self, request: prefill_pb2.WatchLoadRequest, _context: Context
    ) -> AsyncIterator[prefill_pb2.LoadReport]:
        """A report per period until the caller leaves; each names the attempts admitted since the one before."""
        asked = request.period.ToNanoseconds() / 1e9
        period = max(_MIN_WATCH_SECONDS, asked or DEFAULT_WATCH_SECONDS)
        board = self._front.board
        seq, seen = 0, board.num_admitted
        while True:
            seq += 1
            known, seen = board.admitted_since(seen), board.num_admitted
            yield load_message(self._front.view(), seq=seq, known_attempts=known)
            await asyncio.sleep(period)

    async def Drain(
        self, request: prefill_pb2.DrainRequest, _context: Context
    ) -> AsyncIterator[prefill_pb2.DrainStatus]:
        """Starts the drain and reports until it is done. Never ends the process; leaving the stream does not stop it (C43)."""
        lifecycle = self._front.lifecycle
        asked = request.deadline.ToNanoseconds() / 1e9
        seconds = asked if request.HasField("deadline") else self._drain_seconds
        lifecycle.begin_drain(seconds=seconds, finish_queued=request.finish_queued)
        while True:
            status = lifecycle.drain_status()
            yield prefill_pb2.DrainStatus(
                running=status.running,
                waiting=status.waiting,
                tickets_open=status.tickets_open,
                done=status.done,
                sent_back=status.sent_back,
            )
            if status.done:
                return
            await asyncio.sleep(_DRAIN_STATUS_SECONDS)

    async def _served(self, context: Context) -> ServedModel:
        try:
            return self._front.served
        except ServingFailure as error:
            await abort_with(context, error.failure)

    async def _relay(
        self, attempt: Attempt, cursor: Cursor, context: Context, *, joined: bool
    ) -> AsyncIterator[prefill_pb2.PrefillEvent]:
        """Sends the attempt's events as fast as the reader takes them, then its outcome."""
        served = self._front.served
        changed = asyncio.Event()
        attempt.watchers.add(changed.set)
        attempt.streams += 1

        def leave(_: object) -> None:
            attempt.watchers.discard(changed.set)
            attempt.streams -= 1
            self._front.lifecycle.stream_lost(attempt)

        # Runs however the call ends: also when the caller is lost while a message is being sent, where no `finally` would.
        context.add_done_callback(leave)  # type: ignore[arg-type]
        try:
            while True:
                event = attempt.log.take(cursor)
                if event is not None:
                    yield event_message(event, served=served, deduplicated=joined)
                elif isinstance(attempt.outcome, Failure):
                    await abort_with(context, attempt.outcome)
                elif attempt.outcome is not None:
                    return
                else:
                    await changed.wait()
                    changed.clear()
                if attempt.log.has_overrun(cursor):
                    _overrun()
        except ServingFailure as error:
            await abort_with(context, error.failure)


def _overrun() -> NoReturn:
    refuse("QUEUE_FULL", "this stream reads too slowly: it is more than 256 events behind; attach again with after_seq")
