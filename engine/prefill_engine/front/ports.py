"""The listening sockets: gRPC (engine, hand-off, health, reflection), the plaintext probe port, Prometheus (C44)."""

import asyncio
import contextlib
import threading
from dataclasses import dataclass
from typing import Any
from wsgiref.simple_server import WSGIServer

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import CollectorRegistry, start_http_server

from prefill_engine.front.front import REFRESH_SECONDS, Front
from prefill_engine.front.guard import Guard
from prefill_engine.front.handoff import HandoffSourceService
from prefill_engine.front.health import is_live, is_serving
from prefill_engine.front.service import PrefillEngineService
from prefill_engine.rpc import handoff_pb2, handoff_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from prefill_plan.config import EngineConfig, ServerConfig
from prefill_plan.errors import ConfigError

ENGINE_SERVICE: str = prefill_pb2.DESCRIPTOR.services_by_name["PrefillEngine"].full_name
HANDOFF_SERVICE: str = handoff_pb2.DESCRIPTOR.services_by_name["HandoffSource"].full_name
_STOP_GRACE_SECONDS = 1.0
NO_PORT = -1


@dataclass(slots=True, kw_only=True)
class OpenPorts:
    """What listens, and on which ports (-1 = none)."""

    port: int
    probe_port: int
    metrics_port: int
    servers: list[grpc.aio.Server]
    metrics_server: tuple[WSGIServer, threading.Thread] | None
    publisher: "asyncio.Task[None]"

    async def close(self) -> None:
        """Ends open calls after a second; the last answers of a drain get out in it."""
        self.publisher.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.publisher
        await asyncio.gather(*(server.stop(_STOP_GRACE_SECONDS) for server in self.servers))
        if self.metrics_server is not None:
            server, thread = self.metrics_server
            await asyncio.to_thread(server.shutdown)
            server.server_close()
            thread.join()


async def open_ports(front: Front, config: EngineConfig, *, registry: CollectorRegistry) -> OpenPorts:
    """Binds and starts everything that listens.

    Raises:
        ConfigError: a port cannot be bound.
    """
    server_config = config.server
    server = grpc.aio.server(interceptors=[Guard()], options=server_options(server_config.max_message_bytes))
    engine_service = PrefillEngineService(front, drain_seconds=server_config.drain_seconds)
    prefill_pb2_grpc.add_PrefillEngineServicer_to_server(engine_service, server)  # type: ignore[no-untyped-call]
    handoff_service = HandoffSourceService(
        front, ticket_seconds=config.handoff.ticket_seconds, new_id=front.lifecycle.new_id
    )
    handoff_pb2_grpc.add_HandoffSourceServicer_to_server(handoff_service, server)  # type: ignore[no-untyped-call]
    health_service = health.aio.HealthServicer()  # type: ignore[attr-defined]
    health_pb2_grpc.add_HealthServicer_to_server(health_service, server)
    names = (ENGINE_SERVICE, HANDOFF_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    servers = [server]
    port = bind_port(server, server_config.host, server_config.port, "server.port")
    probe_port = NO_PORT
    if server_config.probe_port != NO_PORT:
        probe = grpc.aio.server(options=server_options(server_config.max_message_bytes))
        health_pb2_grpc.add_HealthServicer_to_server(health_service, probe)
        probe_port = bind_port(probe, server_config.host, server_config.probe_port, "server.probe_port")
        servers.append(probe)
    metrics_server = open_metrics(server_config, registry)
    metrics_port = NO_PORT if metrics_server is None else metrics_server[0].server_port
    for one in servers:
        await one.start()
    publisher = asyncio.create_task(publish_health(front, health_service))
    return OpenPorts(
        port=port,
        probe_port=probe_port,
        metrics_port=metrics_port,
        servers=servers,
        metrics_server=metrics_server,
        publisher=publisher,
    )


async def publish_health(front: Front, service: Any) -> None:
    """Keeps both health services at what the engine's state says."""
    serving = health_pb2.HealthCheckResponse.SERVING
    not_serving = health_pb2.HealthCheckResponse.NOT_SERVING
    while True:
        state = front.view().state
        await service.set("", serving if is_live(state) else not_serving)
        await service.set(ENGINE_SERVICE, serving if is_serving(state) else not_serving)
        await asyncio.sleep(REFRESH_SECONDS)


def open_metrics(config: ServerConfig, registry: CollectorRegistry) -> tuple[WSGIServer, threading.Thread] | None:
    """The Prometheus listener; None if it is turned off. Raises ConfigError: the port cannot be bound."""
    if config.metrics_port == NO_PORT:
        return None
    try:
        return start_http_server(config.metrics_port, addr=config.host, registry=registry)
    except OSError as error:
        where = f"server.metrics_port {config.metrics_port} on {config.host}"
        raise ConfigError(f"{where} cannot be bound: {error.strerror}") from error


def server_options(max_message_bytes: int) -> list[tuple[str, int]]:
    """Limits and keepalive of every gRPC server of ours."""
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        # Two engines on one port would share its calls in silence.
        ("grpc.so_reuseport", 0),
        # serving.md 1.1: clients ping every 30 s, also without calls; the default server answers that with GOAWAY.
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
    ]


def bind_port(server: grpc.aio.Server, host: str, port: int, key: str) -> int:
    """The bound port. Raises ConfigError, naming the setting `key`."""
    try:
        bound = server.add_insecure_port(f"{host}:{port}")
    except RuntimeError as error:
        raise ConfigError(f"{key} {port} on {host} cannot be bound; is it in use?") from error
    if bound == 0:
        raise ConfigError(f"{key} {port} on {host} cannot be bound; is it in use?")
    return bound
