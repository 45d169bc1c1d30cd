"""Connections to one peer: reused, limited in number, and opened one at a time. Owned by a transport, used on its loop.

The trap: a connection is fit for another exchange only if the last one ended in order and the peer has sent nothing since;
everything else is closed, which is also what makes a given-up pull settled at once.
"""

import asyncio
import ssl

from prefill_engine.kv.transport.frame import HEADER_BYTES, Frame, FrameError, decode, encode, is_answer
from prefill_engine.kv.transport.link import Link, LinkLost, connect_link

_CONNECT_SECONDS = 2.0


class Peer:
    """host, port: where it listens. max_links: more exchanges than this wait for one to end. users: exchanges that hold it."""

    def __init__(self, endpoint: str, *, context: ssl.SSLContext | None, max_links: int) -> None:
        host, _, port = endpoint.rpartition(":")
        if not host or not port.isdigit():
            raise LinkLost(f"endpoint {endpoint!r}, expected host:port")
        self._host, self._port = host.strip("[]"), int(port)
        self._context = context
        self._max_links = max_links
        self._idle: list[Link] = []
        self._links: set[Link] = set()
        self._released = asyncio.Event()
        self._connecting: asyncio.Task[None] | None = None
        self._exchange = 0
        self.users = 0
        self.is_closed = False

    def has_links(self) -> bool:
        return bool(self._links) or self._connecting is not None

    async def acquire(self) -> tuple[Link, bool]:
        """A link for one exchange, and whether it is an older one, which the peer may have closed unseen. Raises LinkLost."""
        is_older = True
        while True:
            if self.is_closed:
                raise LinkLost("closed by us")
            while self._idle:
                link = self._idle.pop()
                if link.is_quiet():
                    return link, is_older
                self._drop(link)
            if len(self._links) < self._max_links:
                await self._connect()
                is_older = False
            else:
                self._released.clear()
                await self._released.wait()

    def release(self, link: Link, *, in_order: bool) -> None:
        """Ends an exchange. in_order False closes the connection: nothing of the exchange can arrive any more."""
        if in_order and link in self._links and not self.is_closed:
            self._idle.append(link)
        else:
            self._drop(link)
        self._released.set()

    def next_exchange(self) -> int:
        self._exchange = (self._exchange + 1) & 0xFFFFFFFF
        return self._exchange

    def close(self) -> None:
        """Ends every connection; exchanges on them fail."""
        self.is_closed = True
        if self._connecting is not None:
            self._connecting.cancel()
        for link in list(self._links):
            self._drop(link)
        self._released.set()

    def _drop(self, link: Link) -> None:
        link.abort()
        self._links.discard(link)
        if link in self._idle:
            self._idle.remove(link)

    async def _connect(self) -> None:
        """Waits for the one connection attempt that is under way, starting it if need be; it outlives a caller that gives up."""
        if self._connecting is None:
            self._connecting = asyncio.create_task(self._open_link())
            # Everybody may have given up on it: its failure is then nobody's news.
            self._connecting.add_done_callback(lambda task: task.cancelled() or task.exception())
        task = self._connecting
        await asyncio.wait((task,))
        if task.cancelled():
            raise LinkLost("closed by us")
        error = task.exception()
        if error is not None:
            raise LinkLost(str(error)) from error

    async def _open_link(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                link = await connect_link(self._host, self._port, context=self._context, loop=loop)
        except TimeoutError as error:
            raise LinkLost(f"no connection within {_CONNECT_SECONDS:g} s") from error
        except OSError as error:
            raise LinkLost(f"connect: {error.strerror or error}") from error
        finally:
            self._connecting = None
        if self.is_closed:
            link.abort()
            raise LinkLost("closed by us")
        self._links.add(link)
        self._idle.append(link)


async def ask(link: Link, question: Frame) -> Frame:
    """Sends a header and reads the answer's. Raises LinkLost, FrameError."""
    await link.send(encode(question))
    return await read_answer(link, question)


async def read_answer(link: Link, question: Frame) -> Frame:
    """Raises LinkLost, FrameError (also for the answer to another question)."""
    header = bytearray(HEADER_BYTES)
    await link.receive(memoryview(header))
    answer = decode(header)
    if not is_answer(answer, question):
        raise FrameError(f"answer {answer.op.name} to exchange {answer.exchange}, asked was {question.exchange}")
    return answer
