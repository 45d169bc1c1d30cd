"""Peers that do not behave: plain sockets that speak the transport's frames by hand, byte by byte."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from prefill_engine.kv.transport.frame import HEADER_BYTES, Frame, decode

Reader, Writer = asyncio.StreamReader, asyncio.StreamWriter


@dataclass
class RawServer:
    """endpoint: where it listens. connections: how many it has seen."""

    endpoint: str = ""
    connections: int = 0
    writers: list[Writer] = field(default_factory=list)


@asynccontextmanager
async def raw_server(answer: Callable[[Frame, Writer], Awaitable[None]]) -> AsyncIterator[RawServer]:
    """Hands each header that arrives to `answer`, on every connection until it ends."""
    seen = RawServer()

    async def serve(reader: Reader, writer: Writer) -> None:
        seen.connections += 1
        seen.writers.append(writer)
        try:
            while True:
                await answer(decode(await reader.readexactly(HEADER_BYTES)), writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    seen.endpoint = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield seen
    finally:
        server.close()
        for writer in seen.writers:
            writer.close()
        await asyncio.gather(*(writer.wait_closed() for writer in seen.writers), return_exceptions=True)


@asynccontextmanager
async def raw_client(endpoint: str) -> AsyncIterator[tuple[Reader, Writer]]:
    host, _, port = endpoint.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)


async def read_frame(reader: Reader) -> Frame:
    return decode(await reader.readexactly(HEADER_BYTES))


async def until(condition: Callable[[], bool], *, seconds: float = 20.0) -> None:
    """Waits for a state; fails after `seconds`."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.002)
