"""The listening sockets of a VE: gRPC (encoder, health, reflection), the plaintext probe port, Prometheus; as the PE's (C44)."""

import grpc.aio
from prometheus_client import CollectorRegistry

from prefill_engine.front.listening import OpenPorts, start_listening
from prefill_engine.rpc import vision_pb2, vision_pb2_grpc
from prefill_engine.vision.image_intake import MAX_IMAGE_BYTES
from prefill_engine.vision.service import VisionEncoderService
from prefill_engine.vision.ve_front import VisionFront
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

    def add_services(server: grpc.aio.Server) -> None:
        service = VisionEncoderService(front, drain_seconds=settings.drain_seconds)
        vision_pb2_grpc.add_VisionEncoderServicer_to_server(service, server)  # type: ignore[no-untyped-call]

    return await start_listening(
        settings,
        registry=registry,
        add_services=add_services,
        services=(ENCODER_SERVICE,),
        state=lambda: front.view().state,
        max_message_bytes=max(settings.max_message_bytes, MAX_REQUEST_BYTES),
    )
