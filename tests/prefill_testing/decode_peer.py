"""A decode peer as a process of its own, told what to do through a pipe: takes a ticket over, or grants memory for a push.

At one phase it kills or stops itself, or waits for a word (kill, stop, wait; "-" = never). Phases of a pull: claimed, reading,
read. Of a push: reserved, piece, offer, offered. It reports each phase once, then how it ended: taken or accepted (with a
digest of all bytes), or failed. Processes come from a fork server that has imported everything and never used gRPC.
"""

import asyncio
import hashlib
import multiprocessing
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any

from prefill_engine.client_ticket import ticket_from_proto
from prefill_engine.handoff_client import HandoffClient
from prefill_engine.handoff_sink import DecodeSink
from prefill_engine.kv.transport.choose import build_transport
from prefill_engine.kv.transport.contract import Transport
from prefill_engine.rpc import common_pb2, prefill_pb2
from prefill_plan.config import TransportKind
from prefill_plan.errors import PrefillError
from prefill_plan.kvd_config import TransportConfig

PATIENCE_SECONDS = 60.0
_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["prefill_testing.decode_peer"])


def digest_of(components: Mapping[int, bytes]) -> str:
    digest = hashlib.sha256()
    for kind in sorted(components):
        digest.update(kind.to_bytes(4, "little") + components[kind])
    return digest.hexdigest()


# --- the child ----------------------------------------------------------------------------------------------------------
class _Child:
    def __init__(self, pipe: Connection, phase: str, action: str) -> None:
        self._pipe, self._phase, self._action = pipe, phase, action
        self._seen: set[str] = set()

    def reach(self, phase: str) -> None:
        if phase in self._seen:
            return
        self._seen.add(phase)
        self._pipe.send({"event": phase})
        if phase != self._phase:
            return
        match self._action:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "wait":
                self._pipe.recv()

    async def run(self) -> None:
        order = await asyncio.to_thread(self._pipe.recv)
        try:
            await (self._pull(order) if order["op"] == "pull" else self._grant(order))
        except PrefillError as error:
            self._pipe.send({"event": "failed", "error": str(error), "reason": getattr(error, "reason", "")})

    async def _pull(self, order: dict[str, Any]) -> None:
        ticket = ticket_from_proto(prefill_pb2.Ticket.FromString(bytes.fromhex(order["ticket"])))
        transport = None if order["transport"] == "grpc" else _open_transport(order["transport"])
        if transport is not None:
            await transport.listen(lambda _key: None)  # nixl's agents are made now, not while a lease runs
        async with HandoffClient(ticket.source_endpoint, engine_id="d", epoch=1, transport=transport) as client:
            await client.hello()
            claim = await client.claim(ticket)
            self.reach("claimed")
            components = {}
            for kind in claim.ticket.component_bytes:
                components[kind] = await client.read(claim, kind)
                self.reach("reading")
            self.reach("read")
            num_bytes = sum(map(len, components.values()))
            if await client.settle(claim, delivered=True, num_bytes=num_bytes, took_seconds=0.1):
                self._pipe.send({"event": "taken", "digest": digest_of(components), "transport": claim.transport})
            else:
                self._pipe.send({"event": "failed", "error": "the lease was over", "reason": "TICKET_GONE"})

    async def _grant(self, order: dict[str, Any]) -> None:
        kv_format = common_pb2.KvFormat.FromString(bytes.fromhex(order["format"]))
        key = common_pb2.AttemptKey.FromString(bytes.fromhex(order["key"]))
        transport = _open_transport(order["transport"])
        async with DecodeSink(transport, kv_format, engine_id="d", phase=self._defer, piece_bytes=1 << 14) as sink:
            free = sink.grants.free_bytes
            target = await sink.reserve(key, kv_tokens=order["tokens"], ttl_seconds=order["ttl_seconds"])
            assert target is not None
            self._pipe.send({"event": "granted", "endpoint": sink.endpoint, "target": target.SerializeToString().hex()})
            self.reach("reserved")
            taken = await sink.take(target.grant_id)
            if taken is not None:
                self._pipe.send({"event": "accepted", "digest": digest_of(taken[0])})
                return
            while sink.grants.free_bytes != free:
                await asyncio.sleep(0.01)
            self._pipe.send({"event": "failed", "error": "not accepted, all memory is free again", "reason": ""})

    def _defer(self, phase: str) -> None:
        if phase != "reserved":
            self.reach(phase)


def _open_transport(kind: str) -> Transport:
    if kind == TransportKind.NIXL:
        os.environ["UCX_TLS"] = "tcp,self"  # as between nodes; UCX reads it when an agent is made
    return build_transport(TransportConfig(kind=TransportKind(kind), host="127.0.0.1"))


def _child_main(pipe: Connection, phase: str, action: str) -> None:
    asyncio.run(_Child(pipe, phase, action).run())


# --- the parent ---------------------------------------------------------------------------------------------------------
@dataclass(slots=True)
class DecodePeer:
    """A running child; use as a context manager."""

    process: ForkServerProcess
    pipe: Connection

    def __enter__(self) -> "DecodePeer":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()

    def tell(self, **order: object) -> None:
        self.pipe.send(order)

    def expect(self, *names: str) -> dict[str, Any]:
        """The next event with one of these names; others are passed over. Fails when the child ends before."""
        while self.pipe.poll(PATIENCE_SECONDS):
            try:
                event: dict[str, Any] = self.pipe.recv()
            except EOFError:
                raise AssertionError(f"the decode peer ended before any of {names}") from None
            if event["event"] in names:
                return event
        raise AssertionError(f"the decode peer did not report any of {names}")

    def go_on(self) -> None:
        """After a stop."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGCONT)


def start_decode_peer(phase: str = "-", action: str = "-") -> DecodePeer:
    ours, theirs = _SERVER.Pipe()
    process = _SERVER.Process(target=_child_main, args=(theirs, phase, action), daemon=True)
    process.start()
    theirs.close()
    return DecodePeer(process, ours)
