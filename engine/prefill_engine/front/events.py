"""What a Prefill stream tells its caller, as plain values; rpc/convert.py gives them their wire form."""

from dataclasses import dataclass

from prefill_engine.messages import Region


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """The hit is resolved. replay_rows is a plan; Usage is the truth (C45)."""

    dp_rank: int
    effective_hit: int
    replay_rows: int
    compute_rows: int
    predicted_wait_seconds: float
    predicted_finish_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Queued:
    """waiting_for: name of a pe.v1.Phase without prefix."""

    ahead_requests: int
    ahead_rows: int
    waiting_for: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageState:
    """An image of the request: its rows are where the model reads them. took_seconds: since it was asked for."""

    index: int
    ready: bool
    rows: int
    took_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapIn:
    """hit_shrunk_to: new effective hit if blocks were bad, else 0."""

    layers_ready: int
    layers_total: int
    num_bytes: int
    hit_shrunk_to: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkDone:
    rows_done: int
    rows_total: int
    chunk_rows: int
    step_seconds: float
    step_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstToken:
    token: int
    logprob: float
    alt_tokens: tuple[int, ...]
    alt_logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TicketOffer:
    """A ticket as its receiver sees it. ttl_seconds counts from receipt. The ids are bearer secrets: never in logs. mode: as
    PrefillCall."""

    ticket_id: bytes
    lease_id: bytes
    fence: int
    ttl_seconds: float
    kv_tokens: int
    regions: tuple[Region, ...]
    mode: str = "pull"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreState:
    blocks_committed: int
    blocks_total: int
    blocks_failed: int
    swa_published: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffState:
    """state: name of a pe.v1.HandoffState.S."""

    state: str
    bytes_done: int
    bytes_total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """prompt = cached + computed; replayed rows are never billed (serving.md 0.1)."""

    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    replayed_tokens: int
    image_tokens: int
    kv_bytes_moved: int
    already_cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One phase of the attempt; start counts from its arrival."""

    phase: str
    start_seconds: float
    length_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """handoff: None when the caller asked for no ticket. timeline: empty unless asked for."""

    usage: Usage
    timeline: tuple[Stage, ...]
    handoff: HandoffState | None
    store: StoreState


Body = (
    Accepted
    | Queued
    | ImageState
    | SwapIn
    | ChunkDone
    | FirstToken
    | TicketOffer
    | StoreState
    | HandoffState
    | Completed
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """seq: 1, 2, 3, ... without gaps per attempt. since_accept_seconds counts from the attempt's arrival."""

    seq: int
    since_accept_seconds: float
    body: Body
