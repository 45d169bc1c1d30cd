"""How `prefill-engine request` and the demo take a hand-off over: mode, transport and store, opened for one request. No torch.

The trap: a transport that was asked for by name and is not there is an error; only `auto` may fall back to gRPC, and a push has
nothing to fall back to.
"""

import socket
from dataclasses import dataclass
from pathlib import Path

from prefill_engine.client import PrefillAttempt
from prefill_engine.handoff_sink import DecodeSink
from prefill_engine.kv.file_store import FileStore
from prefill_engine.kv.transport.choose import build_transport
from prefill_engine.kv.transport.contract import Transport
from prefill_engine.rpc import common_pb2
from prefill_engine.stored_blocks import StoredBlocks
from prefill_engine.stored_segments import StoredSegments
from prefill_engine.takeover import DecodeSide, Outcome, follow, follow_push
from prefill_plan.config import RecordFormat, TransportKind
from prefill_plan.errors import ConfigError
from prefill_plan.kv_layout import block_layout
from prefill_plan.kvd_config import TransportConfig
from prefill_plan.model_spec import load_model_spec

TRANSPORTS = ("auto", "tcp", "nixl", "grpc")
_LAYOUTS = {common_pb2.RECORD_LAYOUT_FP4_ROW: RecordFormat.FP4, common_pb2.RECORD_LAYOUT_FP8_ROW: RecordFormat.FP8}


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeOverWay:
    """mode: "pull", "push" or "store-only". transport: one of TRANSPORTS. model, store: directories, for store-only. kv_format:
    of the engine's hand-overs. offered: what the engine hands over by (ServerInfo.transports), for auto."""

    mode: str
    transport: str
    model: Path | None
    store: Path | None
    kv_format: common_pb2.KvFormat
    offered: tuple[str, ...] = ()


async def send_and_take_over(attempt: PrefillAttempt, way: TakeOverWay, *, endpoint: str) -> Outcome:
    """Sends the attempt and takes its hand-off over, if it has one.

    Raises:
        ConfigError: the store cannot be opened, or the transport is not there.
        CallFailed, KvError: as takeover.follow and follow_push.
    """
    host = own_address(endpoint)
    store, payload_bytes = _open_store(way) if way.mode == "store-only" else (None, 0)
    data = await _open_transport(way, host)
    if way.mode == "push":
        if data is None:
            raise ConfigError("gRPC cannot push; nothing was sent")
        async with DecodeSink(data, way.kv_format, engine_id="probe", host=host) as sink:
            return await follow_push(attempt, sink)
    required = way.transport not in ("auto", "grpc")
    side = DecodeSide(transport=data, required=required, store=store, payload_bytes=payload_bytes)
    try:
        return await follow(attempt, endpoint=endpoint, side=side)
    finally:
        if data is not None:
            await data.close()
        if store is not None:
            store.close()


async def _open_transport(way: TakeOverWay, host: str) -> Transport | None:
    """None = ReadKv only. Raises ConfigError: nixl is asked for, or needed for a push, and not there."""
    if way.transport == "grpc":
        return None
    by_nixl = way.transport == TransportKind.NIXL or (way.transport == "auto" and TransportKind.NIXL in way.offered)
    kind = TransportKind.NIXL if by_nixl else TransportKind.TCP
    try:
        transport = build_transport(TransportConfig(kind=kind, host=host))
        if by_nixl and way.mode != "push":
            # Its agents are made now: that may take longer than a short lease.
            await transport.listen(lambda _key: None)
    except ConfigError:
        if way.transport == "auto" and way.mode != "push":
            return None
        raise
    return transport


def own_address(endpoint: str) -> str:
    """Our address as the host of `endpoint` can reach it; loopback for a local engine. Sends nothing.

    Raises:
        ConfigError: no such host, or no way to it.
    """
    host, _, port = endpoint.rpartition(":")
    try:
        family, _, _, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except (OSError, ValueError) as error:
        raise ConfigError(f"{endpoint}: no way to this engine: {error}; nothing was sent") from error


def _open_store(way: TakeOverWay) -> tuple[StoredBlocks, int]:
    """The store of an engine's own, or of a kvd: what of this layout is there tells which."""
    if way.store is None or way.model is None:
        raise ConfigError("a store-only hand-off needs the directories of the block store and of the model")
    if not way.store.is_dir():
        raise ConfigError(f"--block-store {way.store}: no such directory; nothing was sent")
    parts = [part.layout for part in way.kv_format.components if part.kind == common_pb2.COMPONENT_KIND_BLOCK_KV]
    record_format = _LAYOUTS.get(parts[0]) if parts else None
    if record_format is None:
        raise ConfigError("the engine's KV format has no block layout that we know; nothing was sent")
    layout = block_layout(load_model_spec(way.model), record_format)
    segments = StoredSegments(way.store, layout)
    return segments if segments.exists else FileStore(way.store, layout), layout.payload_bytes
