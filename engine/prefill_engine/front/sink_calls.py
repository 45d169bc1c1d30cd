"""Calls to the HandoffSink of decode peers that are pushed to: renew a grant, offer what has landed, abandon.

Started by the life cycle (through grants.py), answered to it; every call ends within CALL_SECONDS. Owner of the channels. The
trap: a peer that is gone is no error here, it is an answer that did not come.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from prefill_engine.front.grants import CALL_SECONDS, CallKind, SinkAnswer, SinkCall
from prefill_engine.front.served_model import ServedModel
from prefill_engine.front.tickets import Ticket
from prefill_engine.rpc import handoff_pb2_grpc
from prefill_engine.rpc.convert_handoff import abandon_message, offer_answer, offer_message, renew_message

logger = logging.getLogger(__name__)

_GONE = (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.ABORTED, grpc.StatusCode.FAILED_PRECONDITION)
_MOST_CHANNELS = 256


class SinkCaller:
    """answered: told once per started call."""

    def __init__(self, answered: Callable[[SinkCall, SinkAnswer], None]) -> None:
        self._answered = answered
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, call: SinkCall, ticket: Ticket | None, served: ServedModel) -> None:
        """Makes the call in the background; ticket: of the attempt, if there is one by now."""
        task = asyncio.get_running_loop().create_task(self._call(call, ticket, served))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Gives up what is under way."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for channel in self._channels.values():
            await channel.close(None)

    async def _call(self, call: SinkCall, ticket: Ticket | None, served: ServedModel) -> None:
        try:
            answer = await self._ask(call, ticket, served)
        except grpc.aio.AioRpcError as error:
            text = f"{call.kind} at {call.grant.plan.endpoint}: {error.code().name}"
            logger.warning("decode peer did not answer", extra={"call": call.kind.value, "code": error.code().name})
            answer = SinkAnswer(answered=error.code() in _GONE, gone=error.code() in _GONE, text=text)
        self._answered(call, answer)

    async def _ask(self, call: SinkCall, ticket: Ticket | None, served: ServedModel) -> SinkAnswer:
        channel = await self._channel(call.grant.plan.endpoint)
        stub: Any = handoff_pb2_grpc.HandoffSinkStub(channel)  # type: ignore[no-untyped-call]
        match call.kind:
            case CallKind.RENEW:
                reply = await stub.Reserve(renew_message(call.grant, served=served), timeout=CALL_SECONDS)
                return SinkAnswer(answered=True, gone=reply.grant_id != call.grant.plan.grant_id)
            case CallKind.OFFER:
                assert ticket is not None, "an offer without a ticket"
                return offer_answer(await stub.Offer(offer_message(call, ticket, served=served), timeout=CALL_SECONDS))
            case CallKind.ABANDON:
                reply = await stub.Abandon(abandon_message(call), timeout=CALL_SECONDS)
                return SinkAnswer(answered=True, released=reply.released)

    async def _channel(self, endpoint: str) -> grpc.aio.Channel:
        channel = self._channels.get(endpoint)
        if channel is None:
            if len(self._channels) >= _MOST_CHANNELS:
                oldest = next(iter(self._channels))
                await self._channels.pop(oldest).close(CALL_SECONDS)
            channel = self._channels[endpoint] = grpc.aio.insecure_channel(endpoint)
        return channel
