"""The listening sockets of an engine: gRPC (engine, hand-off, health, reflection), the plaintext probe port, Prometheus (C44)."""

import grpc.aio
from prometheus_client import CollectorRegistry

from prefill_engine.front.front import Front
from prefill_engine.front.handoff import HandoffSourceService
from prefill_engine.front.listening import OpenPorts, start_listening
from prefill_engine.front.service import PrefillEngineService
from prefill_engine.rpc import handoff_pb2, handoff_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from prefill_plan.config import EngineConfig

ENGINE_SERVICE: str = prefill_pb2.DESCRIPTOR.services_by_name["PrefillEngine"].full_name
HANDOFF_SERVICE: str = handoff_pb2.DESCRIPTOR.services_by_name["HandoffSource"].full_name


async def open_ports(front: Front, config: EngineConfig, *, registry: CollectorRegistry) -> OpenPorts:
    """Binds and starts everything that listens.

    Raises:
        ConfigError: a port cannot be bound.
    """
    settings = config.server

    def add_services(server: grpc.aio.Server) -> None:
        engine = PrefillEngineService(front, drain_seconds=settings.drain_seconds)
        prefill_pb2_grpc.add_PrefillEngineServicer_to_server(engine, server)  # type: ignore[no-untyped-call]
        handoff = HandoffSourceService(
            front, ticket_seconds=config.handoff.ticket_seconds, new_id=front.lifecycle.new_id
        )
        handoff_pb2_grpc.add_HandoffSourceServicer_to_server(handoff, server)  # type: ignore[no-untyped-call]

    return await start_listening(
        settings,
        registry=registry,
        add_services=add_services,
        services=(ENGINE_SERVICE, HANDOFF_SERVICE),
        state=lambda: front.view().state,
        max_message_bytes=settings.max_message_bytes,
    )
