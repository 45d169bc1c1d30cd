"""The front's ends of a rank's four lanes (messages.py, C42): ipc sockets in a private directory, bound here.

Nothing here blocks: no lane has a high-water mark, because the bounds are counted (binding.py), never judged by a socket. The
trap: a PUSH socket without a connected peer refuses to send, so the rank must have reported ready before anything is submitted.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import msgspec
import zmq
import zmq.asyncio

from prefill_engine.handoff_pieces import ComponentKey
from prefill_engine.messages import Expose, FromRank, ReadRange, ReadReply, Submit, ToRank, lane_address
from prefill_plan.errors import PeerError


class RankLanes:
    """Lanes to one rank. Close it in the loop that made it."""

    def __init__(self, context: zmq.asyncio.Context, *, socket_dir: str, rank: int) -> None:
        self.rank = rank
        # Sends never wait, so they need no coroutine: plain sockets of the same context.
        plain: zmq.Context[zmq.Socket[bytes]] = zmq.Context(context)
        self._submit = plain.socket(zmq.PUSH)
        self._control = plain.socket(zmq.PUSH)
        self._data = context.socket(zmq.DEALER)
        self._events = context.socket(zmq.PULL)
        self._sockets: dict[str, zmq.Socket[bytes] | zmq.asyncio.Socket] = {
            "submit": self._submit,
            "control": self._control,
            "data": self._data,
            "events": self._events,
        }
        for lane, socket in self._sockets.items():
            socket.set_hwm(0)
            socket.linger = 0
            socket.bind(lane_address(socket_dir, lane, rank))
        self._encoder = msgspec.msgpack.Encoder()
        self._events_decoder: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)
        self._reply_decoder = msgspec.msgpack.Decoder(ReadReply)
        self._reads: dict[int, asyncio.Future[ReadReply]] = {}
        self._next_read_id = 0
        self._is_lost = False

    def send(self, message: ToRank) -> None:
        """Queues a message; submits never delay control. A rank that is gone gets nothing, its loss is reported elsewhere."""
        lane = self._submit if isinstance(message, Submit) else self._control
        with contextlib.suppress(zmq.Again):
            lane.send(self._encoder.encode(message), zmq.DONTWAIT)

    async def events(self) -> AsyncIterator[FromRank]:
        """Everything the rank reports, without end."""
        while True:
            yield self._events_decoder.decode(await self._events.recv())

    async def read(self, attempt_id: bytes, *, kind: int, offset: int, length: int) -> ReadReply:
        """One range of a computed attempt's component; any number may be in flight.

        Raises:
            PeerError: the rank is gone.
        """
        return await self._ask(
            lambda read_id: ReadRange(read_id=read_id, attempt_id=attempt_id, kind=kind, offset=offset, length=length)
        )

    async def expose(self, attempt_id: bytes, keys: tuple[ComponentKey, ...]) -> ReadReply:
        """Makes a computed attempt's components findable on the rank's data transport.

        Raises:
            PeerError: the rank is gone.
        """
        return await self._ask(lambda read_id: Expose(read_id=read_id, attempt_id=attempt_id, keys=keys))

    async def _ask(self, build: Callable[[int], ReadRange | Expose]) -> ReadReply:
        if self._is_lost:
            raise PeerError(f"rank {self.rank} is gone")
        self._next_read_id += 1
        read_id = self._next_read_id
        future: asyncio.Future[ReadReply] = asyncio.get_running_loop().create_future()
        self._reads[read_id] = future
        try:
            await self._data.send(self._encoder.encode(build(read_id)))
            return await future
        finally:
            del self._reads[read_id]

    async def pump_reads(self) -> None:
        """Hands replies to their readers, without end."""
        while True:
            reply = self._reply_decoder.decode(await self._data.recv())
            future = self._reads.get(reply.read_id)
            if future is not None and not future.done():
                future.set_result(reply)

    def fail_reads(self) -> None:
        """The rank is gone: every read in flight, and every later one, fails."""
        self._is_lost = True
        for future in self._reads.values():
            if not future.done():
                future.set_exception(PeerError(f"rank {self.rank} is gone"))

    def close(self) -> None:
        for socket in self._sockets.values():
            socket.close()
