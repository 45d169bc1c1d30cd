"""A connection to a peer: bytes out, bytes straight into a caller's buffer, and an end that is an end.

Used by tcp.py on its event loop. PlainLink works on the socket itself (sendfile, recv_into); TlsLink on an asyncio transport.
The trap: after `abort` nothing is written into any buffer, because all receiving happens in callbacks of this very loop.
"""

import asyncio
import contextlib
import errno
import os
import socket
import ssl
from collections.abc import Callable
from typing import Protocol

_SCRATCH_BYTES = 1 << 16
_PIECE_BYTES = 1 << 20
# A fast peer keeps a socket ready for ever: after this much the loop gets its turn, with the deadlines that wait on it.
_BURST_BYTES = 4 << 20
# A receiver is woken once per this much, not once per segment (SO_RCVLOWAT).
_WAKE_BYTES = 256 << 10


class LinkLost(Exception):
    """The connection ended or was aborted. Never leaves the transport."""


class Link(Protocol):
    """At most one receive and one send at a time."""

    async def receive(self, target: memoryview) -> None:
        """Fills the whole target. Raises LinkLost."""
        ...

    async def send(self, data: memoryview | bytes, *, more: bool = False) -> None:
        """more: further bytes follow at once. Raises LinkLost."""
        ...

    async def send_file(self, fd: int, offset: int, view: memoryview) -> None:
        """Sends view, which stands at offset in the file fd (-1 = nowhere). Raises LinkLost."""
        ...

    def is_quiet(self) -> bool:
        """Open, and the peer has sent nothing since the last receive: fit for another exchange."""
        ...

    def abort(self) -> None: ...


class PlainLink:
    """Owner of one connected, non-blocking socket."""

    def __init__(self, sock: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
        self._sock = sock
        self._loop = loop
        self._waiters: set[asyncio.Future[None]] = set()
        self._closed = False
        self._low_water = 1

    async def receive(self, target: memoryview) -> None:
        filled = 0

        def step() -> bool:
            nonlocal filled
            stop = min(len(target), filled + _BURST_BYTES)
            while filled < stop:
                try:
                    count = self._sock.recv_into(target[filled:])
                except BlockingIOError:
                    self._wake_after(min(len(target) - filled, _WAKE_BYTES))
                    raise
                if count == 0:
                    raise LinkLost(f"closed by the peer after {filled} of {len(target)} bytes")
                filled += count
            return filled == len(target)

        await self._run(step, self._loop.add_reader, self._loop.remove_reader)

    async def send(self, data: memoryview | bytes, *, more: bool = False) -> None:
        view = memoryview(data)
        sent = 0
        flags = socket.MSG_MORE if more else 0

        def step() -> bool:
            nonlocal sent
            stop = min(len(view), sent + _BURST_BYTES)
            while sent < stop:
                sent += self._sock.send(view[sent:stop], flags)
            return sent == len(view)

        await self._run(step, self._loop.add_writer, self._loop.remove_writer)

    async def send_file(self, fd: int, offset: int, view: memoryview) -> None:
        if fd < 0:
            await self.send(view)
            return
        sent = 0

        def step() -> bool:
            nonlocal sent
            stop = min(len(view), sent + _BURST_BYTES)
            while sent < stop:
                count = os.sendfile(self._sock.fileno(), fd, offset + sent, stop - sent)
                if count == 0:
                    raise LinkLost(f"file ends after {sent} of {len(view)} bytes")
                sent += count
            return sent == len(view)

        await self._run(step, self._loop.add_writer, self._loop.remove_writer)

    def is_quiet(self) -> bool:
        if self._closed:
            return False
        try:
            self._sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def abort(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        self._sock.close()
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(LinkLost("closed by us"))

    def _wake_after(self, num_bytes: int) -> None:
        if num_bytes != self._low_water:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)
            self._low_water = num_bytes

    async def _run(
        self,
        step: Callable[[], bool],
        watch: Callable[[socket.socket, Callable[[], None]], None],
        unwatch: Callable[[socket.socket], bool],
    ) -> None:
        """Calls step now and whenever the socket is ready, until it does not raise BlockingIOError.

        One callback per readiness and one wake-up of the coroutine at the end: a future per piece costs as much as the copy.
        """
        if self._closed:
            raise LinkLost("closed by us")
        if _attempt(step):
            return
        waiter: asyncio.Future[None] = self._loop.create_future()

        def ready() -> None:
            if waiter.done():
                return
            try:
                if _attempt(step):
                    waiter.set_result(None)
            except LinkLost as error:
                waiter.set_exception(error)

        self._waiters.add(waiter)
        watch(self._sock, ready)
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)
            if not self._closed:
                unwatch(self._sock)


def _attempt(step: Callable[[], bool]) -> bool:
    try:
        return step()
    except BlockingIOError:
        return False
    except OSError as error:
        raise LinkLost(errno.errorcode.get(error.errno or 0, str(error))) from error


class TlsLink(asyncio.BufferedProtocol):
    """Owner of one asyncio TLS transport. Decrypted bytes go into the caller's target, or wait here while there is none."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._early = bytearray()
        self._target: memoryview | None = None
        self._filled = 0
        self._received: asyncio.Future[None] | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self._lost: LinkLost | None = None

    async def receive(self, target: memoryview) -> None:
        taken = min(len(self._early), len(target))
        target[:taken] = self._early[:taken]
        del self._early[:taken]
        if taken == len(target):
            return
        if self._lost is not None:
            raise self._lost
        assert self._transport is not None
        self._target, self._filled = target, taken
        self._received = self._loop.create_future()
        self._transport.resume_reading()
        try:
            await self._received
        finally:
            self._target = self._received = None

    async def send(self, data: memoryview | bytes, *, more: bool = False) -> None:  # noqa: ARG002
        view = memoryview(data)
        for start in range(0, len(view), _PIECE_BYTES):
            await self._writable.wait()
            if self._lost is not None:
                raise self._lost
            assert self._transport is not None
            self._transport.write(view[start : start + _PIECE_BYTES])
        await self._writable.wait()
        if self._lost is not None:
            raise self._lost

    async def send_file(self, fd: int, offset: int, view: memoryview) -> None:  # noqa: ARG002
        await self.send(view)

    def is_quiet(self) -> bool:
        return self._lost is None and not self._early

    def abort(self) -> None:
        self._end("closed by us")
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        # A send returns once TLS has taken the bytes; the buffer of plain bytes behind it stays small.
        transport.set_write_buffer_limits(high=_PIECE_BYTES, low=0)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(f"closed by the peer{f': {exc}' if exc else ''}")

    def eof_received(self) -> None:
        self._end("closed by the peer")

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002
        if self._target is not None and self._filled < len(self._target):
            return self._target[self._filled :]
        return self._scratch

    def buffer_updated(self, nbytes: int) -> None:
        if self._target is None or self._filled == len(self._target):
            self._early += self._scratch[:nbytes]
            if len(self._early) >= _SCRATCH_BYTES and self._transport is not None:
                self._transport.pause_reading()
            return
        self._filled += nbytes
        if self._filled == len(self._target) and self._received is not None and not self._received.done():
            self._received.set_result(None)

    def _end(self, reason: str) -> None:
        if self._lost is None:
            self._lost = LinkLost(reason)
        if self._received is not None and not self._received.done():
            self._received.set_exception(LinkLost(reason))
        self._target = None
        self._writable.set()


async def connect_link(
    host: str, port: int, *, context: ssl.SSLContext | None, loop: asyncio.AbstractEventLoop
) -> Link:
    """A link to a listener. Raises OSError (ssl.SSLError included)."""
    infos = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, kind, number, _, address = infos[0]
    sock = socket.socket(family, kind, number)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await loop.sock_connect(sock, address)
        if context is None:
            return PlainLink(sock, loop)
        _, link = await loop.create_connection(lambda: TlsLink(loop), sock=sock, ssl=context, server_hostname=host)
    except BaseException:
        sock.close()
        raise
    return link


async def accept_link(sock: socket.socket, *, context: ssl.SSLContext | None, loop: asyncio.AbstractEventLoop) -> Link:
    """The listener's end of an accepted socket. Raises OSError."""
    sock.setblocking(False)
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if context is None:
        return PlainLink(sock, loop)
    try:
        _, link = await loop.connect_accepted_socket(lambda: TlsLink(loop), sock, ssl=context)
    except BaseException:
        sock.close()
        raise
    return link
