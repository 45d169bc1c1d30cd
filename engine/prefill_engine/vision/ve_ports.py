"""The listening sockets of a VE: gRPC (encoder, health, reflection), the plaintext probe port, Prometheus; as the PE's (C44)."""

import asyncio
from typing import Any

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import CollectorRegistry

from prefill_engine.front.guard import Guard
from prefill_engine.front.health import is_live, is_serving
from prefill_engine.front.ports import NO_PORT, OpenPorts, bind_port, open_metrics, server_options
from prefill_engine.rpc import vision_pb2, vision_pb2_grpc
from prefill_engine.vision.image_intake import MAX_IMAGE_BYTES
from prefill_engine.vision.service import VisionEncoderService
from prefill_engine.vision.ve_front import REFRESH_SECONDS, VisionFront
from prefill_plan.encoder_config import EncoderConfig

ENCODER_SERVICE: str = vision_pb2.DESCRIPTOR.services_by_name["VisionEncoder"].full_name
MAX_REQUEST_BYTES = 2 * MAX_IMAGE_BYTES
"""An image up to twice the limit is refused by name; gRPC itself would only say RESOURCE_EXHAUSTED."""


async def open_ve_ports(front: VisionFront, config: EncoderConfig, *, registry: CollectorRegistry) -> OpenPorts:
    """Binds and starts everything that listens.

    Raises:
        ConfigError: a port cannot be bound.
    """
    settings = config.server
    options = server_options(max(settings.max_message_bytes, MAX_REQUEST_BYTES))
    server = grpc.aio.server(interceptors=[Guard()], options=options)
    service = VisionEncoderService(front, drain_seconds=settings.drain_seconds)
    vision_pb2_grpc.add_VisionEncoderServicer_to_server(service, server)  # type: ignore[no-untyped-call]
    health_service = health.aio.HealthServicer()  # type: ignore[attr-defined]
    health_pb2_grpc.add_HealthServicer_to_server(health_service, server)
    names = (ENCODER_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    servers = [server]
    port = bind_port(server, settings.host, settings.port, "server.port")
    probe_port = NO_PORT
    if settings.probe_port != NO_PORT:
        probe = grpc.aio.server(options=server_options(settings.max_message_bytes))
        health_pb2_grpc.add_HealthServicer_to_server(health_service, probe)
        probe_port = bind_port(probe, settings.host, settings.probe_port, "server.probe_port")
        servers.append(probe)
    metrics_server = open_metrics(settings, registry)
    for one in servers:
        await one.start()
    return OpenPorts(
        port=port,
        probe_port=probe_port,
        metrics_port=NO_PORT if metrics_server is None else metrics_server[0].server_port,
        servers=servers,
        metrics_server=metrics_server,
        publisher=asyncio.create_task(_publish_health(front, health_service)),
    )


async def _publish_health(front: VisionFront, service: Any) -> None:
    """Keeps both health services at what the VE's state says."""
    serving = health_pb2.HealthCheckResponse.SERVING
    not_serving = health_pb2.HealthCheckResponse.NOT_SERVING
    while True:
        state = front.view().state
        await service.set("", serving if is_live(state) else not_serving)
        await service.set(ENCODER_SERVICE, serving if is_serving(state) else not_serving)
        await asyncio.sleep(REFRESH_SECONDS)
