"""The rank's ends of the four lanes (C42). Submit, control and events belong to the step thread; data to the read server.

The trap: zmq sockets are not thread-safe. Each socket here has one owning thread, and `RankLanes.wake()` (an inproc socket per
calling thread) is the only way another thread reaches the step thread.
"""

import threading
from collections.abc import Iterator
from typing import Protocol

import msgspec
import zmq

from prefill_engine.messages import Expose, FromRank, ReadRange, ReadReply, ToRank, lane_address

_WAKE_ADDRESS = "inproc://rank-wake"


class Mailbox(Protocol):
    """What the step loop needs of the front: messages in, events out, and a wake-up for its own threads."""

    def send(self, message: FromRank) -> None: ...

    def receive(self, *, timeout_seconds: float) -> Iterator[ToRank]: ...

    def wake(self) -> None: ...


class RankLanes:
    """Submit and control in, events out, and a wake-up for other threads. Used by the step thread only, but for wake()."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], *, socket_dir: str, dp_rank: int) -> None:
        self._context = context
        self._submit = self._connect(zmq.PULL, lane_address(socket_dir, "submit", dp_rank))
        self._control = self._connect(zmq.PULL, lane_address(socket_dir, "control", dp_rank))
        self._events = self._connect(zmq.PUSH, lane_address(socket_dir, "events", dp_rank))
        self._wake = context.socket(zmq.PULL)
        self._wake.bind(_WAKE_ADDRESS)
        self._wakers = threading.local()
        self._poller = zmq.Poller()
        for socket in (self._submit, self._control, self._wake):
            self._poller.register(socket, zmq.POLLIN)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToRank)

    def close(self) -> None:
        """Waits until queued events are out (at most the sockets' linger), then closes every socket of the process."""
        self._context.destroy()

    def _connect(self, kind: int, address: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set_hwm(0)
        socket.setsockopt(zmq.LINGER, 1000)
        socket.connect(address)
        return socket

    def send(self, message: FromRank) -> None:
        """Queues an event for the front; never blocks."""
        self._events.send(self._encoder.encode(message))

    def receive(self, *, timeout_seconds: float) -> Iterator[ToRank]:
        """Waits for a message or a wake-up, then yields everything that has arrived, control before submit."""
        self._poller.poll(max(0, round(timeout_seconds * 1000)))
        for socket in (self._wake, self._control, self._submit):
            while True:
                try:
                    frame = socket.recv(zmq.NOBLOCK)
                except zmq.Again:
                    break
                if socket is not self._wake:
                    yield self._decoder.decode(frame)

    def wake(self) -> None:
        """Ends the step thread's wait; callable from any thread."""
        socket = getattr(self._wakers, "socket", None)
        if socket is None:
            socket = self._context.socket(zmq.PUSH)
            socket.connect(_WAKE_ADDRESS)
            self._wakers.socket = socket
        socket.send(b"")


class EventsLane:
    """A second way into the events lane, owned by the one thread that makes it (the courier's)."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], *, socket_dir: str, dp_rank: int) -> None:
        self._socket = context.socket(zmq.PUSH)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.connect(lane_address(socket_dir, "events", dp_rank))
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, message: FromRank) -> None:
        """Queues an event for the front; never blocks."""
        self._socket.send(self._encoder.encode(message))


class DataLane:
    """The rank's end of the data lane, owned by the read server's thread."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], *, socket_dir: str, dp_rank: int) -> None:
        self._socket = context.socket(zmq.DEALER)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(lane_address(socket_dir, "data", dp_rank))
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ReadRange | Expose)

    def receive(self, *, timeout_seconds: float) -> ReadRange | Expose | None:
        """The next read, or None when none came in time."""
        if not self._socket.poll(round(timeout_seconds * 1000)):
            return None
        return self._decoder.decode(self._socket.recv())

    def reply(self, message: ReadReply) -> None:
        self._socket.send(self._encoder.encode(message))
