"""HandoffPlan -> how a finished prefill leaves the engine: pull, push, store-only or not at all. Unknown modes fail closed.

The trap: a push is refused here, before anything is computed, unless the decode peer granted room for exactly what will come.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from prefill_engine.front.call import PushPlan
from prefill_engine.front.served_model import BLOCK_KV, ServedModel
from prefill_engine.handoff_pieces import KEY_BYTES, PushRegion
from prefill_engine.rpc import common_pb2, prefill_pb2
from prefill_engine.rpc.status import refuse
from prefill_plan.layer_spec import BLOCK_TOKENS

_MAX_PIECE_BYTES = 1 << 26
_DEFAULT_GRANT_SECONDS = 30.0
_SKIP = prefill_pb2.StorePlan.SKIP
_MODES = {
    prefill_pb2.HandoffPlan.MODE_UNSPECIFIED: "pull",
    prefill_pb2.HandoffPlan.PULL: "pull",
    prefill_pb2.HandoffPlan.PUSH: "push",
    prefill_pb2.HandoffPlan.STORE_ONLY: "store_only",
    prefill_pb2.HandoffPlan.NONE: "none",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffRequest:
    """mode: "pull", "push", "store_only" or "none". push: with mode "push"."""

    mode: str
    push: PushPlan | None = None


def parse_handoff(request: prefill_pb2.PrefillRequest, served: ServedModel) -> HandoffRequest:
    """Checks the plan against what this engine can do and the prompt needs.

    Raises:
        ServingFailure: TRANSPORT_UNSUPPORTED, KV_FORMAT_MISMATCH.
    """
    plan = request.handoff
    mode = _MODES.get(plan.mode)
    if mode is None:
        refuse("TRANSPORT_UNSUPPORTED", f"hand-off mode {plan.mode} is unknown to this engine")
    if mode == "none":
        return HandoffRequest(mode=mode)
    check_format(plan.accepted_format, served)
    if mode == "store_only":
        _check_store(request, served)
    if mode != "push":
        return HandoffRequest(mode=mode)
    return HandoffRequest(mode=mode, push=_parse_push(plan, served, num_tokens=len(request.tokens)))


def check_format(fingerprint: bytes, served: ServedModel) -> None:
    """Refuses a peer that reads another KV format; empty = not checked."""
    if fingerprint and fingerprint != served.format.fingerprint:
        theirs, ours = fingerprint.hex()[:16], served.format.fingerprint.hex()[:16]
        refuse("KV_FORMAT_MISMATCH", f"KV format {theirs}, this engine writes {ours}")


def _check_store(request: prefill_pb2.PrefillRequest, served: ServedModel) -> None:
    if request.store.durability == _SKIP:
        refuse("TRANSPORT_UNSUPPORTED", "hand-off STORE_ONLY with store SKIP: the decode side would find no blocks")
    if served.store_kind == "memory":
        text = "hand-off STORE_ONLY: the store of this engine is its own memory, which no decode peer can read"
        refuse("TRANSPORT_UNSUPPORTED", text)


def _parse_push(plan: prefill_pb2.HandoffPlan, served: ServedModel, *, num_tokens: int) -> PushPlan:
    if not served.data_transport:
        refuse("TRANSPORT_UNSUPPORTED", "hand-off PUSH: this engine has no data transport (handoff.data_port -1)")
    if not plan.decode_endpoint or not plan.push.grant_id:
        refuse("TRANSPORT_UNSUPPORTED", "hand-off PUSH without decode_endpoint or push.grant_id; Reserve gives both")
    lengths = served.format.lengths(num_tokens)
    regions = tuple(_parse_region(part, served) for part in plan.push.regions)
    kinds = [region.kind for region in regions]
    if len(set(kinds)) != len(kinds):
        refuse("KV_FORMAT_MISMATCH", "hand-off PUSH: a component is granted twice")
    for kind, length in lengths.items():
        end = next((region.offset + region.num_bytes for region in regions if region.kind == kind), 0)
        if end != length:
            name = common_pb2.ComponentKind.Name(kind)
            refuse("KV_FORMAT_MISMATCH", f"hand-off PUSH: {name} is granted up to byte {end}, it has {length}")
    strange = [kind for kind in kinds if kind not in lengths]
    if strange:
        refuse("KV_FORMAT_MISMATCH", f"hand-off PUSH: component {strange[0]} is granted, this prompt has none")
    seconds = plan.push.lease.ttl.ToNanoseconds() / 1e9
    return PushPlan(
        endpoint=plan.decode_endpoint,
        engine_id=plan.decode_engine_id or plan.decode_endpoint,
        grant_id=plan.push.grant_id,
        lease_seconds=seconds if seconds > 0 else _DEFAULT_GRANT_SECONDS,
        regions=regions,
        early_send=plan.early_send,
        already_cached_tokens=_already_cached(regions, served),
    )


def _already_cached(regions: Sequence[PushRegion], served: ServedModel) -> int:
    """Tokens of the whole blocks before the first one that is granted."""
    block_bytes = served.format.lengths(BLOCK_TOKENS).get(BLOCK_KV, 0)
    offset = next((region.offset for region in regions if region.kind == BLOCK_KV), 0)
    return offset // block_bytes * BLOCK_TOKENS if block_bytes else 0


def _parse_region(part: prefill_pb2.ComponentRegions, served: ServedModel) -> PushRegion:
    """The first of the offered places that our transport can reach."""
    known = part.kind in common_pb2.ComponentKind.values()
    name = common_pb2.ComponentKind.Name(part.kind) if known else f"component {part.kind}"
    refs = (part.region, *part.alternatives)
    ours = next((ref for ref in refs if ref.peer.kind == served.data_transport), None)
    if ours is None:
        refuse("TRANSPORT_UNSUPPORTED", f"hand-off PUSH: {name} has no place reachable by {served.data_transport}")
    extents = [(extent.offset, extent.length) for extent in ours.extents]
    if len(extents) != 1:
        refuse("KV_FORMAT_MISMATCH", f"hand-off PUSH: {name} has {len(extents)} extents, expected 1")
    (offset, num_bytes), peer = extents[0], ours.peer
    if len(peer.key) != KEY_BYTES or not peer.endpoint or not 0 < peer.piece_bytes <= _MAX_PIECE_BYTES:
        text = f"a key of {len(peer.key)} bytes, pieces of {peer.piece_bytes} bytes, endpoint {bool(peer.endpoint)}"
        refuse("KV_FORMAT_MISMATCH", f"hand-off PUSH: {name} with {text}: expected 32, 1 to {_MAX_PIECE_BYTES}, one")
    if part.kind != BLOCK_KV and offset:
        refuse(
            "KV_FORMAT_MISMATCH", f"hand-off PUSH: {name} is granted from byte {offset}, only blocks can be left out"
        )
    return PushRegion(
        kind=part.kind,
        transport=peer.kind,
        endpoint=peer.endpoint,
        key=peer.key,
        piece_bytes=peer.piece_bytes,
        offset=offset,
        num_bytes=num_bytes,
    )


def plan_digest_parts(plan: prefill_pb2.HandoffPlan, push: PushPlan | None) -> tuple[object, ...]:
    """What of the plan makes the content of an attempt (C45)."""
    return (plan.mode, plan.decode_endpoint, plan.decode_engine_id, plan.accepted_format, push)
