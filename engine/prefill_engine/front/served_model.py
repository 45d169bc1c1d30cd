"""What this engine serves, as its callers see it: model, KV format, limits, identity. Built once, when all ranks are ready.

The trap: the format's fingerprint must be the same for every engine that writes the same bytes, whatever its EP size or build,
so it covers layouts and weights and nothing else (serving.md "KvFormat.fingerprint").
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType

from prefill_engine.handoff_pieces import component_lengths
from prefill_engine.messages import RankReady
from prefill_plan.block_keys import chain_root
from prefill_plan.config import EngineConfig, RecordFormat
from prefill_plan.errors import PeerError
from prefill_plan.kv_layout import REQUEST_ROW_BYTES, BlockLayout, StateLayout, block_layout, state_layout
from prefill_plan.model_parts import VisionSpec
from prefill_plan.model_spec import ModelSpec, Part

PROTOCOL_MIN = 1
PROTOCOL_MAX = 1

# pe.v1.ComponentKind
BLOCK_KV = 1
SWA_ENCODER = 3
SWA_DECODER = 4
COMPRESS_STATE = 5
DRAFT_SWA = 6
REQUEST_ROW = 7
COMPONENT_LABELS: Mapping[int, str] = MappingProxyType(
    {
        BLOCK_KV: "block_kv",
        SWA_ENCODER: "swa_encoder",
        SWA_DECODER: "swa_decoder",
        COMPRESS_STATE: "compress_state",
        DRAFT_SWA: "draft_swa",
        REQUEST_ROW: "request_row",
    }
)
"""As in metrics and logs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineIdentity:
    """Who this engine is. epoch: milliseconds since 1970 at start, so it grows with every restart. endpoint: host:port."""

    engine_id: str
    epoch: int
    endpoint: str
    zone: str
    build: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """One part of the hand-over. kind: pe.v1.ComponentKind. layout: name of a RecordLayout without prefix, "" = no records.
    bytes_per_token: 0 unless it grows with the tokens. bytes_fixed: per request. positions: ring length of SWA kinds."""

    kind: int
    layout: str
    bytes_per_token: int
    bytes_fixed: int
    positions: int
    unit_align: int
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoverFormat:
    block_tokens: int
    components: tuple[Component, ...]
    fingerprint: bytes

    def lengths(self, num_tokens: int) -> Mapping[int, int]:
        """Bytes of each component of a prompt's hand-over, by kind."""
        return component_lengths(self.components, block_tokens=self.block_tokens, num_tokens=num_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """Everything that requests are checked against and that GetServerInfo and tickets report.

    kv_tokens: Block KV of the smallest rank. store_kind: "memory" = no other process can read the store. data_transport: what the
    ranks' data ports speak, "" = they have none; data_endpoints: host:port by rank. make_root: cache scope -> root of the block
    key chain. vision_digest: of the tower whose rows this engine takes, b"" = it takes no images. vision: its geometry.
    """

    identity: EngineIdentity
    model_id: str
    weights_digest: bytes
    tokenizer_digest: bytes
    layout_digest: bytes
    numerics_class: str
    format: HandoverFormat
    vocab_size: int
    image_token_id: int
    max_context_tokens: int
    keep_tokens: int
    kv_tokens: int
    chunk_cap_tokens: int
    ep_size: int
    dp_size: int
    device: str
    store_kind: str
    data_transport: str
    data_endpoints: tuple[str, ...]
    make_root: Callable[[bytes], bytes]
    hidden_size: int = 0
    vision_digest: bytes = b""
    vision: VisionSpec | None = None


def build_served_model(
    config: EngineConfig, spec: ModelSpec, *, identity: EngineIdentity, ranks: Sequence[RankReady]
) -> ServedModel:
    """Joins configuration, model and what the ranks report.

    Raises:
        PeerError: ranks disagree on weights, tokenizer, layout or numerics, or their layout is not the configured one.
    """
    first = ranks[0]
    blocks = block_layout(spec, config.kv.record_format)
    state = state_layout(spec, keep_tokens=config.replay.keep_tokens, rollback_tokens=config.replay.max_rollback_tokens)
    for ready in ranks:
        mine = (ready.weights_digest, ready.tokenizer_digest, ready.layout_digest, ready.numerics_class)
        theirs = (first.weights_digest, first.tokenizer_digest, blocks.digest(), first.numerics_class)
        if ready.vision_digest != first.vision_digest:
            raise PeerError(f"rank {ready.rank} has another vision tower than rank {first.rank}")
        if mine != theirs:
            raise PeerError(
                f"rank {ready.rank} reports weights {mine[0].hex()[:16]}, tokenizer {mine[1].hex()[:16]}, layout "
                f"{mine[2].hex()[:16]}, numerics {mine[3]}; expected {theirs[0].hex()[:16]}, {theirs[1].hex()[:16]}, "
                f"{theirs[2].hex()[:16]}, {theirs[3]}"
            )

    def make_root(cache_scope: bytes) -> bytes:
        return chain_root(
            weights_digest=first.weights_digest,
            tokenizer_digest=first.tokenizer_digest,
            layout_digest=first.layout_digest,
            numerics_class=first.numerics_class,
            tenant_salt=cache_scope,
        )

    return ServedModel(
        identity=identity,
        model_id=config.model.name,
        weights_digest=first.weights_digest,
        tokenizer_digest=first.tokenizer_digest,
        layout_digest=first.layout_digest,
        numerics_class=first.numerics_class,
        format=handover_format(spec, blocks=blocks, state=state, weights_digest=first.weights_digest),
        vocab_size=spec.vocab_size,
        image_token_id=spec.image_token_id,
        max_context_tokens=config.max_context_tokens,
        keep_tokens=config.replay.keep_tokens,
        kv_tokens=min(ready.kv_tokens_total for ready in ranks),
        chunk_cap_tokens=config.scheduler.chunk_cap_tokens,
        ep_size=config.parallel.ep_size,
        dp_size=config.parallel.dp_size,
        device=config.device.value,
        store_kind=first.store_kind,
        data_transport=first.data_transport,
        data_endpoints=tuple(f"{identity.endpoint.rpartition(':')[0]}:{ready.data_port}" for ready in ranks),
        make_root=make_root,
        hidden_size=spec.hidden_size,
        vision_digest=first.vision_digest,
        vision=spec.vision,
    )


def handover_format(
    spec: ModelSpec, *, blocks: BlockLayout, state: StateLayout, weights_digest: bytes
) -> HandoverFormat:
    """Components of kv.md 1.5 and decisions C5 in stream order; index keys travel inside BLOCK_KV."""
    layers = spec.layer_specs()
    encoder = tuple(layer.index for layer in layers if layer.part is Part.ENCODER)
    decoder = tuple(layer.index for layer in layers if layer.part is Part.DECODER)
    draft = tuple(range(len(layers), len(layers) + state.num_draft_layers))
    pair_sources = tuple(source.layer for source in blocks.sources if source.ratio == 2)
    main = "FP4_ROW" if blocks.record_format is RecordFormat.FP4 else "FP8_ROW"

    def ring(kind: int, ring_layers: tuple[int, ...]) -> Component:
        one_layer = state.snapshot_rows * state.window_record_bytes
        return Component(
            kind=kind,
            layout="FP8_ROW",
            bytes_per_token=0,
            bytes_fixed=len(ring_layers) * one_layer,
            positions=state.snapshot_rows,
            unit_align=32,
            layers=ring_layers,
        )

    def fixed(kind: int, num_bytes: int, its_layers: tuple[int, ...]) -> Component:
        return Component(
            kind=kind, layout="", bytes_per_token=0, bytes_fixed=num_bytes, positions=0, unit_align=1, layers=its_layers
        )

    block_kv = Component(
        kind=BLOCK_KV,
        layout=main,
        bytes_per_token=blocks.payload_bytes // blocks.block_tokens,
        bytes_fixed=0,
        positions=0,
        unit_align=blocks.payload_bytes,
        layers=tuple(source.layer for source in blocks.sources),
    )
    components = [
        fixed(REQUEST_ROW, REQUEST_ROW_BYTES, ()),
        block_kv,
        ring(SWA_ENCODER, encoder),
        ring(SWA_DECODER, decoder),
        fixed(COMPRESS_STATE, state.compress_state_bytes, pair_sources),
        ring(DRAFT_SWA, draft),
    ]
    present = tuple(part for part in components if part.bytes_fixed or part.bytes_per_token)
    canonical = json.dumps(
        {
            "block_tokens": blocks.block_tokens,
            "components": [asdict(part) for part in present],
            "layout": blocks.digest().hex(),
            "weights": weights_digest.hex(),
        },
        sort_keys=True,
        separators=(",", ":"),
    )
    fingerprint = hashlib.sha256(canonical.encode()).digest()
    return HandoverFormat(block_tokens=blocks.block_tokens, components=present, fingerprint=fingerprint)
