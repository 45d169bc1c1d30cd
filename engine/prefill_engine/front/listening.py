"""What listens in every serving process of ours: gRPC with health and reflection, the plaintext probe port, Prometheus (C44).

Called by ports.py (engine) and vision/ve_ports.py (encoder), which add their services. The trap: ports open before anything
is loaded, so that health answers while starting.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from wsgiref.simple_server import WSGIServer

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import CollectorRegistry, start_http_server

from prefill_engine.front.guard import Guard
from prefill_engine.front.health import EngineState, is_live, is_serving
from prefill_plan.config import ServerConfig
from prefill_plan.errors import ConfigError

_STOP_GRACE_SECONDS = 1.0
_PUBLISH_SECONDS = 0.25
_NO_PORT = -1


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


async def start_listening(
    config: ServerConfig,
    *,
    registry: CollectorRegistry,
    add_services: Callable[[grpc.aio.Server], None],
    services: Sequence[str],
    state: Callable[[], EngineState],
    max_message_bytes: int,
) -> OpenPorts:
    """Binds and starts everything that listens.

    Args:
        services: full names of what add_services adds; the first one's health is readiness.

    Raises:
        ConfigError: a port cannot be bound.
    """
    server = grpc.aio.server(interceptors=[Guard()], options=server_options(max_message_bytes))
    add_services(server)
    health_service = health.aio.HealthServicer()  # type: ignore[attr-defined]
    health_pb2_grpc.add_HealthServicer_to_server(health_service, server)
    reflection.enable_server_reflection((*services, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    servers = [server]
    port = bind_port(server, config.host, config.port, "server.port")
    probe_port = _NO_PORT
    if config.probe_port != _NO_PORT:
        probe = grpc.aio.server(options=server_options(config.max_message_bytes))
        health_pb2_grpc.add_HealthServicer_to_server(health_service, probe)
        probe_port = bind_port(probe, config.host, config.probe_port, "server.probe_port")
        servers.append(probe)
    metrics_server = open_metrics(config, registry)
    for one in servers:
        await one.start()
    return OpenPorts(
        port=port,
        probe_port=probe_port,
        metrics_port=_NO_PORT if metrics_server is None else metrics_server[0].server_port,
        servers=servers,
        metrics_server=metrics_server,
        publisher=asyncio.create_task(_publish_health(state, health_service, services[0])),
    )


async def _publish_health(state: Callable[[], EngineState], service: Any, name: str) -> None:
    """Keeps both health services at what the state says."""
    serving = health_pb2.HealthCheckResponse.SERVING
    not_serving = health_pb2.HealthCheckResponse.NOT_SERVING
    while True:
        now = state()
        await service.set("", serving if is_live(now) else not_serving)
        await service.set(name, serving if is_serving(now) else not_serving)
        await asyncio.sleep(_PUBLISH_SECONDS)


def open_metrics(config: ServerConfig, registry: CollectorRegistry) -> tuple[WSGIServer, threading.Thread] | None:
    """The Prometheus listener; None if it is turned off. Raises ConfigError: the port cannot be bound."""
    if config.metrics_port == _NO_PORT:
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
