"""Calls to engines: Drain, and the state of which KV store and router speak. Used by drain.py and store_watch.py.

The operator knows pods by the API server; these two are what only an engine itself can tell. The trap: an engine may be gone,
frozen, or behind a policy that lets nobody in, so no answer is an answer too, and none is waited for long.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Protocol

import grpc.aio

from prefill_operator.engine_wire import DRAIN_METHOD, GET_LOAD_METHOD, EngineMessages, LoadState

_STATE_SECONDS = 2.0


class EngineClient(Protocol):
    def drain(self, address: str, *, timeout_seconds: float) -> AsyncIterator[bool]:
        """Asks the engine to drain; yields at each of its reports whether nothing is left, until that is so.

        Raises ConnectionError when the engine does not answer, or stops answering.
        """

    async def load_state(self, address: str) -> LoadState:
        """What the engine says of itself. Raises ConnectionError when it does not answer."""


class GrpcEngineClient:
    """The real one: plaintext, as the engine serves it. Build it inside the loop.

    silence_seconds: an engine that reports nothing for this long does not answer.
    """

    def __init__(self, *, silence_seconds: float = 5.0) -> None:
        self._messages = EngineMessages()
        self._silence_seconds = silence_seconds

    async def drain(self, address: str, *, timeout_seconds: float) -> AsyncIterator[bool]:
        request = self._messages.drain_request()
        request.deadline.FromNanoseconds(int(timeout_seconds * 1e9))
        async with grpc.aio.insecure_channel(address) as channel:
            method = channel.unary_stream(
                DRAIN_METHOD,
                request_serializer=self._messages.drain_request.SerializeToString,
                response_deserializer=self._messages.drain_status.FromString,
            )
            call = method(request)
            reports = aiter(call)
            try:
                while (status := await self._next_report(reports)) is not None:
                    yield bool(status.done)
            except grpc.aio.AioRpcError as error:
                raise ConnectionError(f"{error.code().name}: {error.details()}") from error
            except TimeoutError as error:
                raise ConnectionError(f"no report for {self._silence_seconds:g} s") from error
            finally:
                call.cancel()

    async def load_state(self, address: str) -> LoadState:
        async with grpc.aio.insecure_channel(address) as channel:
            method = channel.unary_unary(
                GET_LOAD_METHOD,
                request_serializer=self._messages.load_request.SerializeToString,
                response_deserializer=self._messages.load_report.FromString,
            )
            try:
                report = await method(self._messages.load_request(), timeout=_STATE_SECONDS)
            except grpc.aio.AioRpcError as error:
                raise ConnectionError(f"{error.code().name}: {error.details()}") from error
        # A state that a newer engine may have is none that we know.
        return LoadState(report.state) if report.state in tuple(LoadState) else LoadState.STATE_UNSPECIFIED

    async def _next_report(self, reports: AsyncIterator[Any]) -> Any:
        """None at the end of the stream. An engine reports several times a second; a dead node never answers at all."""
        async with asyncio.timeout(self._silence_seconds):
            return await anext(reports, None)
