"""The directory as a server: gRPC, health and metrics, until it is told to stop. Called by `prefill-engine directory serve`.

Also embeddable: a router builds a DirectoryServer around its own DirectoryState. The trap: nothing is saved at the end; holders
and stores announce again to the next one, which they recognise by its epoch.
"""

import asyncio
import contextlib
import json
import logging
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry, Counter, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from prefill_engine.kvd.directory_messages import server_credentials
from prefill_engine.kvd.directory_service import DIRECTORY_SERVICE, DirectoryService
from prefill_engine.kvd.directory_state import DirectoryLimits, DirectoryState
from prefill_engine.rpc import directory_pb2_grpc
from prefill_plan.config import TlsConfig
from prefill_plan.errors import ConfigError

logger = logging.getLogger(__name__)

_MAX_MESSAGE_BYTES = 16 * 1024 * 1024
_STOP_GRACE_SECONDS = 0.5
_NO_PORT = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryOptions:
    """What `directory serve` runs with. metrics_port: 0 = any free port, -1 = none. announce: gets one JSON line once it
    listens."""

    host: str
    port: int
    metrics_port: int
    heartbeat_seconds: float
    limits: DirectoryLimits
    tls: TlsConfig
    announce: Callable[[str], None]


class DirectoryServer:
    """The listening server: Directory and health ("" and pe.v1.Directory)."""

    def __init__(self, service: DirectoryService) -> None:
        self._service = service
        options = (("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES))
        self._server = grpc.aio.server(options=options)
        self._sweeper: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int, *, tls: TlsConfig) -> int:
        """The bound port. Raises ConfigError: port taken, TLS files unusable."""
        directory_pb2_grpc.add_DirectoryServicer_to_server(self._service, self._server)  # type: ignore[no-untyped-call]
        health_service = health.aio.HealthServicer()  # type: ignore[attr-defined]
        health_pb2_grpc.add_HealthServicer_to_server(health_service, self._server)
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        credentials = server_credentials(tls)
        try:
            if credentials is None:
                bound = self._server.add_insecure_port(address)
            else:
                bound = self._server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise ConfigError(f"directory cannot listen on {address}: {error}") from error
        await self._server.start()
        for name in ("", DIRECTORY_SERVICE):
            await health_service.set(name, health_pb2.HealthCheckResponse.SERVING)
        self._sweeper = asyncio.create_task(self._service.sweep_forever())
        return bound

    async def close(self) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._sweeper
        await self._server.stop(_STOP_GRACE_SECONDS)


class DirectoryMetrics(Collector):
    """kv_directory_*: read from the state when asked."""

    def __init__(self, state: DirectoryState) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        for name, value in asdict(self._state.counts()).items():
            if name in ("holders", "snapshots", "segments", "blocks"):
                yield GaugeMetricFamily(f"kv_directory_{name}", f"Known {name}.", value=value)
            else:
                yield CounterMetricFamily(f"kv_directory_{name}", f"{name}, since start.".capitalize(), value=value)


def run_directory(options: DirectoryOptions) -> None:
    """Serves until SIGTERM or SIGINT. Raises ConfigError."""
    if options.limits.expiry_seconds <= options.heartbeat_seconds:
        raise ConfigError(
            f"expiry {options.limits.expiry_seconds:g} s, heartbeat {options.heartbeat_seconds:g} s: "
            "expected the expiry to be longer, best three times"
        )
    asyncio.run(_run(options))


async def _run(options: DirectoryOptions) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    registry = CollectorRegistry()
    state = DirectoryState(options.limits)
    registry.register(DirectoryMetrics(state))
    calls = Counter("kv_directory_calls_total", "Calls answered.", ("method",), registry=registry)
    service = DirectoryService(
        state,
        heartbeat_seconds=options.heartbeat_seconds,
        expiry_seconds=options.limits.expiry_seconds,
        epoch=time.time_ns() // 1_000_000,
        count=lambda method: calls.labels(method).inc(),
    )
    server = DirectoryServer(service)
    port = await server.start(options.host, options.port, tls=options.tls)
    metrics_port, close_metrics = _serve_metrics(options, registry)
    try:
        line = {"event": "listening", "port": port, "metrics_port": metrics_port}
        options.announce(json.dumps(line))
        logger.info("listening", extra=line)
        await stop.wait()
    finally:
        await server.close()
        await asyncio.to_thread(close_metrics)


def _serve_metrics(options: DirectoryOptions, registry: CollectorRegistry) -> tuple[int, Callable[[], None]]:
    if options.metrics_port == _NO_PORT:
        return _NO_PORT, lambda: None
    try:
        server, thread = start_http_server(options.metrics_port, addr=options.host, registry=registry)
    except OSError as error:
        raise ConfigError(f"metrics port {options.metrics_port} cannot be bound: {error.strerror}") from error

    def close() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return server.server_port, close
