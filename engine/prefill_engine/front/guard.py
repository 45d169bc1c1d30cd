"""Turns an exception that no handler expected into INTERNAL/INVARIANT with its ServingError, and logs it.

Without it gRPC answers UNKNOWN with no detail, which a router must take for a dead transport (serving.md 1.1).
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from prefill_engine.rpc.status import Context, Failure, abort_with

logger = logging.getLogger(__name__)

_FAILURE = Failure(reason="INVARIANT", public_message="the engine failed on this request; it is in the engine's log")
_Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Any]]


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # not generic at run time
    """Wraps unary and streaming answers; every service of the house takes one request per call."""

    async def intercept_service(
        self, continuation: _Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming:
            return handler
        wrap = _guard_stream if handler.response_streaming else _guard_unary
        make = (
            grpc.unary_stream_rpc_method_handler if handler.response_streaming else grpc.unary_unary_rpc_method_handler
        )
        behaviour = handler.unary_stream if handler.response_streaming else handler.unary_unary
        return make(
            wrap(behaviour, handler_call_details.method),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )


def _guard_unary(behaviour: Callable[[Any, Context], Awaitable[Any]], method: str) -> Callable[[Any, Context], Any]:
    async def guarded(request: Any, context: Context) -> Any:
        try:
            return await behaviour(request, context)
        except (grpc.aio.AbortError, asyncio.CancelledError):
            raise
        except Exception:
            logger.exception("handler failed", extra={"method": method})
            await abort_with(context, _FAILURE)

    return guarded


def _guard_stream(
    behaviour: Callable[[Any, Context], AsyncIterator[Any]], method: str
) -> Callable[[Any, Context], AsyncIterator[Any]]:
    async def guarded(request: Any, context: Context) -> AsyncIterator[Any]:
        try:
            async for message in behaviour(request, context):
                yield message
        except (grpc.aio.AbortError, asyncio.CancelledError, GeneratorExit):
            raise
        except Exception:
            logger.exception("handler failed", extra={"method": method})
            await abort_with(context, _FAILURE)

    return guarded
