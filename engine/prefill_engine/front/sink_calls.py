"""Calls to the HandoffSink of decode peers that are pushed to: renew a grant, offer what has landed, abandon.

Started by the life cycle (through grants.py), answered to it; every call ends within CALL_SECONDS. Owner of the channels. The
traps: a peer that is gone is no error here, it is an answer that did not come; a channel is closed only when no call is on it.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
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


@dataclass(slots=True, kw_only=True)
class _Peer:
    channel: grpc.aio.Channel
    num_calls: int = 0


class SinkCaller:
    """answered: told once per started call. most_channels: kept open; more only while calls are on all of them."""

    def __init__(
        self, answered: Callable[[SinkCall, SinkAnswer], None], *, most_channels: int = _MOST_CHANNELS
    ) -> None:
        self._answered = answered
        self._most_channels = most_channels
        self._peers: dict[str, _Peer] = {}
        """By endpoint, the one whose latest call is longest ago first."""
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
        for peer in self._peers.values():
            await peer.channel.close(None)

    async def _call(self, call: SinkCall, ticket: Ticket | None, served: ServedModel) -> None:
        try:
            async with self._channel(call.grant.plan.endpoint) as channel:
                answer = await self._ask(channel, call, ticket, served)
        except grpc.aio.AioRpcError as error:
            text = f"{call.kind} at {call.grant.plan.endpoint}: {error.code().name}"
            logger.warning("decode peer did not answer", extra={"call": call.kind.value, "code": error.code().name})
            answer = SinkAnswer(answered=error.code() in _GONE, gone=error.code() in _GONE, text=text)
        self._answered(call, answer)

    async def _ask(
        self, channel: grpc.aio.Channel, call: SinkCall, ticket: Ticket | None, served: ServedModel
    ) -> SinkAnswer:
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

    @asynccontextmanager
    async def _channel(self, endpoint: str) -> AsyncIterator[grpc.aio.Channel]:
        """The peer's channel for one call; others that nobody has used for long may be closed for it."""
        peer = self._peers.pop(endpoint, None) or _Peer(channel=grpc.aio.insecure_channel(endpoint))
        self._peers[endpoint] = peer
        peer.num_calls += 1
        try:
            for idle in self._pop_beyond_limit():
                await idle.channel.close(None)
            yield peer.channel
        finally:
            peer.num_calls -= 1

    def _pop_beyond_limit(self) -> list[_Peer]:
        idle = [endpoint for endpoint, peer in self._peers.items() if not peer.num_calls]
        return [self._peers.pop(endpoint) for endpoint in idle[: max(0, len(self._peers) - self._most_channels)]]
