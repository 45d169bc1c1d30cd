"""The serving side of a transport: accepts peers, and hands each question to one function. Owner of its connections.

Every wait has a deadline of its own, so a peer that stops in mid-frame or in mid-payload costs one connection for a bounded
time and pins nothing longer. The trap: what answers is cancelled when the listener closes; it must free its source in `finally`.
"""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator

from prefill_engine.kv.transport.frame import HEADER_BYTES, Frame, FrameError, Op, Refusal, decode, encode
from prefill_engine.kv.transport.link import Link, LinkLost, accept_link
from prefill_plan.errors import ConfigError

logger = logging.getLogger(__name__)

_BACKLOG = 256
_IDLE_SECONDS = 600.0
_HEADER_SECONDS = 5.0
_HANDSHAKE_SECONDS = 5.0
_PATIENCE_SECONDS = 30.0
# A peer that gives up closes its connection; only one that stopped altogether makes us wait this much longer.
_PATIENCE_SLACK_SECONDS = 1.0
_ACCEPT_PAUSE_SECONDS = 0.1
_REFUSAL_SECONDS = 1.0

Answer = Callable[[Link, Frame], Awaitable[bool]]
"""Answers one question; True = the connection is fit for another."""


class Listener:
    """max_links, max_links_per_peer: connections beyond them are refused. counters: monotonic, by what happened."""

    def __init__(self, answer: Answer, *, max_links: int, max_links_per_peer: int) -> None:
        self._answer = answer
        self._max_links = max_links
        self._max_links_per_peer = max_links_per_peer
        self._sock: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._serving: set[asyncio.Task[None]] = set()
        self._links_by_host: Counter[str] = Counter()
        self.counters: Counter[str] = Counter()

    def start(self, host: str, port: int, *, context: ssl.SSLContext | None) -> int:
        """Binds and accepts; the port. Raises ConfigError if it cannot be bound."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._sock = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        except OSError as error:
            raise ConfigError(f"transport listener on {host}:{port} cannot be bound: {error.strerror}") from error
        self._sock.setblocking(False)
        self._accepting = asyncio.create_task(self._accept(self._sock, context))
        return int(self._sock.getsockname()[1])

    async def close(self) -> None:
        tasks = [*self._serving, *([self._accepting] if self._accepting else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._sock is not None:
            self._sock.close()

    async def _accept(self, listening: socket.socket, context: ssl.SSLContext | None) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, address = await loop.sock_accept(listening)
            except OSError:
                # Out of file descriptors, or the peer has gone again.
                self.counters["accept_failed"] += 1
                await asyncio.sleep(_ACCEPT_PAUSE_SECONDS)
                continue
            task = asyncio.create_task(self._serve(sock, str(address[0]), context))
            self._serving.add(task)
            task.add_done_callback(self._serving.discard)

    async def _serve(self, sock: socket.socket, host: str, context: ssl.SSLContext | None) -> None:
        is_full = self._links_by_host[host] >= self._max_links_per_peer or len(self._serving) > self._max_links
        self._links_by_host[host] += 1
        link: Link | None = None
        try:
            async with asyncio.timeout(_HANDSHAKE_SECONDS):
                link = await accept_link(sock, context=context, loop=asyncio.get_running_loop())
            if is_full:
                self.counters["refused"] += 1
                await _refuse_all(link)
            else:
                await self._answer_questions(link)
        except (LinkLost, OSError, TimeoutError):
            self.counters["lost"] += 1
        except FrameError as error:
            self.counters["protocol_errors"] += 1
            logger.warning("peer does not speak our protocol", extra={"peer": host, "detail": str(error)})
        except Exception:
            self.counters["failed"] += 1
            logger.exception("question of a peer failed here, connection closed", extra={"peer": host})
        finally:
            if link is not None:
                link.abort()
            else:
                sock.close()
            self._links_by_host[host] -= 1
            if self._links_by_host[host] <= 0:
                del self._links_by_host[host]

    async def _answer_questions(self, link: Link) -> None:
        in_order = True
        while in_order:
            question = await read_question(link)
            patience = min(question.patience_ms / 1e3 or _PATIENCE_SECONDS, _PATIENCE_SECONDS)
            with limit(link, patience + _PATIENCE_SLACK_SECONDS):
                in_order = await self._answer(link, question)


async def read_question(link: Link) -> Frame:
    """The next header; its first byte may take long, the rest not. Raises LinkLost, FrameError."""
    header = memoryview(bytearray(HEADER_BYTES))
    with limit(link, _IDLE_SECONDS):
        await link.receive(header[:1])
    with limit(link, _HEADER_SECONDS):
        await link.receive(header[1:])
    return decode(header)


@contextlib.contextmanager
def limit(link: Link, seconds: float) -> Iterator[None]:
    """Ends the connection when the body takes longer: LinkLost inside. A third of the cost of asyncio.timeout."""
    timer = asyncio.get_running_loop().call_later(seconds, link.abort)
    try:
        yield
    finally:
        timer.cancel()


async def refuse(link: Link, question: Frame, status: Refusal) -> bool:
    """Answers REFUSED; the connection stays in order. Raises LinkLost."""
    await link.send(encode(Frame(op=Op.REFUSED, exchange=question.exchange, key=question.key, status=status)))
    return True


async def _refuse_all(link: Link) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_REFUSAL_SECONDS):
            await refuse(link, await read_question(link), Refusal.BUSY)
