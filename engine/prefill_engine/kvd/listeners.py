"""What kvd listens on: the Unix socket for ranks, the plaintext probe port, Prometheus (kv.md 7.6, 7.7).

Used by kvd's process. The trap: the socket must never be open to others, not even between bind and chmod; hence the umask.
"""

import asyncio
import os
import socket
import stat
import threading
from contextlib import suppress
from typing import Any
from wsgiref.simple_server import WSGIServer

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry, start_http_server

from prefill_engine.kvd.keeper import Keeper
from prefill_engine.kvd.owner import EngineUser
from prefill_engine.kvd.peer_check import PeerCheck
from prefill_engine.kvd.service import KvdService
from prefill_engine.rpc import kv_pb2_grpc
from prefill_plan.errors import ConfigError
from prefill_plan.kvd_config import KvdConfig

KVD_SERVICE = "kvd"
_NO_PORT = -1
_STOP_GRACE_SECONDS = 0.5
_PEER_CHECK_SECONDS = 1.0
_MAX_MESSAGE_BYTES = 16 << 20
# A frozen rank must keep its session: its slots are not free as long as it may go on. No pings of ours, whatever the default.
_NEVER_MS = 2**31 - 1
_OPTIONS = (
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", _NEVER_MS),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.so_reuseport", 0),
)


class Listeners:
    """Opened one by one; `close` ends what is open."""

    def __init__(self, config: KvdConfig, owner: EngineUser) -> None:
        self._config = config
        self._owner = owner
        self._health: Any = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._servers: list[grpc.aio.Server] = []
        self._metrics: tuple[WSGIServer, threading.Thread] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self.probe_port = _NO_PORT

    async def open_probe(self) -> None:
        """Health "" = alive from now on; "kvd" = not yet. Raises ConfigError: port taken."""
        await self._health.set("", health_pb2.HealthCheckResponse.SERVING)
        await self._health.set(KVD_SERVICE, health_pb2.HealthCheckResponse.NOT_SERVING)
        if self._config.probe_port == _NO_PORT:
            return
        server = grpc.aio.server(options=_OPTIONS)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        address = f"0.0.0.0:{self._config.probe_port}"
        try:
            self.probe_port = server.add_insecure_port(address)
        except RuntimeError as error:
            raise ConfigError(f"probe_port: {address} can't be bound; is it in use?") from error
        await server.start()
        self._servers.append(server)

    async def set_started(self) -> None:
        """Health "kvd" = the store answers, or kvd serves without it."""
        await self._health.set(KVD_SERVICE, health_pb2.HealthCheckResponse.SERVING)

    async def open_socket(self, keeper: Keeper, *, transport_kind: str) -> None:
        """Raises ConfigError: another process listens there, or the path can't be used."""
        path = self._config.socket
        _clear_stale(path)
        server = grpc.aio.server(options=_OPTIONS)
        peers = PeerCheck(path, allowed_uids=self._owner.allowed_uids)
        service = KvdService(keeper, peers, transport_kind=transport_kind)
        kv_pb2_grpc.add_KvdServicer_to_server(service, server)  # type: ignore[no-untyped-call]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        mask = os.umask(0o177)
        try:
            server.add_insecure_port(f"unix:{path}")
        except RuntimeError as error:
            raise ConfigError(f"socket {path} can't be bound: {error}") from error
        finally:
            os.umask(mask)
        self._owner.give(path)
        await server.start()
        self._servers.append(server)
        self._watcher = asyncio.create_task(_watch_peers(peers))

    def open_metrics(self, registry: CollectorRegistry) -> int:
        """The bound port, -1 = none. Raises ConfigError: port taken."""
        port = self._config.metrics_port
        if port == _NO_PORT:
            return _NO_PORT
        try:
            self._metrics = start_http_server(port, registry=registry)
        except OSError as error:
            raise ConfigError(f"metrics_port {port} can't be bound: {error.strerror}") from error
        return int(self._metrics[0].server_port)

    async def close(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
        await asyncio.gather(*(server.stop(_STOP_GRACE_SECONDS) for server in self._servers))
        self._servers = []
        if self._metrics is not None:
            (server, thread), self._metrics = self._metrics, None
            await asyncio.to_thread(server.shutdown)
            server.server_close()
            thread.join()


async def _watch_peers(peers: PeerCheck) -> None:
    """Connections that say nothing are looked at as well."""
    while True:
        await asyncio.sleep(_PEER_CHECK_SECONDS)
        peers.shut_foreign()


def _clear_stale(path: str) -> None:
    """Makes room for our socket; one that answers belongs to a living kvd."""
    try:
        is_socket = stat.S_ISSOCK(os.stat(path).st_mode)
    except FileNotFoundError:
        directory = os.path.dirname(path)
        if not os.path.isdir(directory):
            raise ConfigError(f"socket {path}: there is no directory {directory}") from None
        return
    except OSError as error:
        raise ConfigError(f"socket {path} can't be used: {error.strerror}") from error
    if not is_socket:
        raise ConfigError(f"socket {path} exists and is no socket; it was left alone")
    with socket.socket(socket.AF_UNIX) as probe, suppress(OSError):
        probe.connect(path)
        raise ConfigError(f"socket {path}: another kvd listens there")
    os.unlink(path)
