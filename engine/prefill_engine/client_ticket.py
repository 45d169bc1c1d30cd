"""Tickets as a decode peer sees them: the record, and how it is read from protobuf. For client.py and handoff_client.py.

The trap: ticket ids and places open memory: they are kept out of every repr, log and file.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from prefill_engine.client_events import to_seconds
from prefill_engine.rpc import common_pb2, prefill_pb2

HANDOFF_MODES = ("pull", "push", "store-only")
MODE_NUMBERS = {
    "pull": prefill_pb2.HandoffPlan.PULL,
    "push": prefill_pb2.HandoffPlan.PUSH,
    "store-only": prefill_pb2.HandoffPlan.STORE_ONLY,
}
_KEY_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerPlace:
    """A component on a data transport (common.proto, PeerRegion). kind: of the transport. key: as secret as the ticket."""

    kind: str
    endpoint: str
    key: bytes = field(repr=False)
    piece_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """Right to read one prefill's KV. ticket_id is a bearer secret: never printed, never logged.

    component_bytes: pe.v1.ComponentKind number -> length. record_format: "fp4" or "fp8" main KV. window_rows: rows per layer
    of the window rings (window + rollback); both from the ticket's KvFormat, "" and 0 if it says nothing. mode: "pull", "push" or
    "store-only". Of a claimed ticket only: places: components on a data transport; stored_block_keys: leading blocks that are
    read from the block store, 32 bytes each.
    """

    ticket_id: bytes = field(repr=False)
    fingerprint: bytes
    kv_tokens: int
    lease_seconds: float
    source_endpoint: str
    component_bytes: Mapping[int, int]
    record_format: str
    window_rows: int
    mode: str = "pull"
    places: Mapping[int, PeerPlace] = field(default_factory=dict, repr=False)
    stored_block_keys: tuple[bytes, ...] = field(default=(), repr=False)


def ticket_from_proto(ticket: prefill_pb2.Ticket) -> Ticket:
    """Component lengths are the sums of their extents."""
    formats = {component.kind: component for component in ticket.format.components}
    blocks = formats.get(common_pb2.COMPONENT_KIND_BLOCK_KV, common_pb2.ComponentFormat())
    windows = formats.get(common_pb2.COMPONENT_KIND_SWA_ENCODER, common_pb2.ComponentFormat())
    keys = ticket.stored_block_keys
    layout = common_pb2.RecordLayout.Name(blocks.layout).removeprefix("RECORD_LAYOUT_")
    return Ticket(
        ticket_id=ticket.ticket_id,
        fingerprint=ticket.format.fingerprint,
        kv_tokens=ticket.kv_tokens,
        lease_seconds=to_seconds(ticket.lease.ttl),
        source_endpoint=ticket.source_endpoint,
        component_bytes={part.kind: sum(extent.length for extent in part.region.extents) for part in ticket.regions},
        record_format="" if layout == "UNSPECIFIED" else layout.partition("_")[0].lower(),
        window_rows=windows.positions,
        mode=_mode_name(ticket.mode),
        places={part.kind: place for part in ticket.regions if (place := _peer_place(part)) is not None},
        stored_block_keys=tuple(keys[start : start + _KEY_BYTES] for start in range(0, len(keys), _KEY_BYTES)),
    )


def _mode_name(mode: int) -> str:
    return next((name for name, number in MODE_NUMBERS.items() if number == mode), "pull")


def _peer_place(part: prefill_pb2.ComponentRegions) -> PeerPlace | None:
    peer = next((ref.peer for ref in (part.region, *part.alternatives) if ref.peer.key), None)
    if peer is None:
        return None
    return PeerPlace(kind=peer.kind, endpoint=peer.endpoint, key=peer.key, piece_bytes=peer.piece_bytes)
