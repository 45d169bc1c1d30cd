"""Calls to engines: Drain, and a report of state and load. Used by drain.py and engine_watch.py.

The operator knows pods by the API server; these two are what only an engine itself can tell. The trap: an engine may be gone,
frozen, or behind a policy that lets nobody in, so no answer is an answer too, and none is waited for long.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Protocol

import grpc.aio

from prefill_operator.engine_load import EngineReport, read_encoder_load, read_load_report
from prefill_operator.engine_wire import (
    DRAIN_METHOD,
    ENCODER_DRAIN_METHOD,
    ENCODER_LOAD_METHOD,
    GET_LOAD_METHOD,
    EngineMessages,
)
from prefill_operator.names import Kind

_REPORT_SECONDS = 2.0


class EngineClient(Protocol):
    def drain(self, address: str, *, kind: Kind, timeout_seconds: float) -> AsyncIterator[bool]:
        """Asks the engine (of a VEPool: the encoder) to drain; yields at each report whether nothing is left, until that is so.

        Raises ConnectionError when the engine does not answer, or stops answering.
        """

    async def report(self, address: str, *, kind: Kind) -> EngineReport:
        """What the engine (of a VEPool: the encoder) says of itself. Raises ConnectionError when it does not answer."""


class GrpcEngineClient:
    """The real one: plaintext, as the engine serves it. Build it inside the loop.

    silence_seconds: an engine that reports nothing for this long does not answer.
    """

    def __init__(self, *, silence_seconds: float = 5.0) -> None:
        self._messages = EngineMessages()
        self._silence_seconds = silence_seconds

    async def drain(self, address: str, *, kind: Kind, timeout_seconds: float) -> AsyncIterator[bool]:
        known = self._messages
        path, request_class, status_class = DRAIN_METHOD, known.drain_request, known.drain_status
        if kind is Kind.VE_POOL:
            path, request_class = ENCODER_DRAIN_METHOD, known.encoder_drain_request
            status_class = known.encoder_drain_status
        request = request_class()
        request.deadline.FromNanoseconds(int(timeout_seconds * 1e9))
        async with grpc.aio.insecure_channel(address) as channel:
            method = channel.unary_stream(
                path,
                request_serializer=request_class.SerializeToString,
                response_deserializer=status_class.FromString,
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

    async def report(self, address: str, *, kind: Kind) -> EngineReport:
        async with grpc.aio.insecure_channel(address) as channel:
            try:
                if kind is Kind.VE_POOL:
                    return await self._encoder_report(channel)
                return await self._engine_report(channel)
            except grpc.aio.AioRpcError as error:
                raise ConnectionError(f"{error.code().name}: {error.details()}") from error

    async def _engine_report(self, channel: grpc.aio.Channel) -> EngineReport:
        known = self._messages
        method = channel.unary_unary(
            GET_LOAD_METHOD,
            request_serializer=known.load_request.SerializeToString,
            response_deserializer=known.load_report.FromString,
        )
        return read_load_report(await method(known.load_request(), timeout=_REPORT_SECONDS))

    async def _encoder_report(self, channel: grpc.aio.Channel) -> EngineReport:
        """The first report of the stream: an encoder has no call for one alone."""
        known = self._messages
        method = channel.unary_stream(
            ENCODER_LOAD_METHOD,
            request_serializer=known.encoder_load_request.SerializeToString,
            response_deserializer=known.encoder_load.FromString,
        )
        call = method(known.encoder_load_request(), timeout=_REPORT_SECONDS)
        try:
            report = await anext(aiter(call), None)
        finally:
            call.cancel()
        if report is None:
            raise ConnectionError("the encoder ended the stream before its first report")
        return read_encoder_load(report)

    async def _next_report(self, reports: AsyncIterator[Any]) -> Any:
        """None at the end of the stream. An engine reports several times a second; a dead node never answers at all."""
        async with asyncio.timeout(self._silence_seconds):
            return await anext(reports, None)
