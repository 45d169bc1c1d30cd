"""What the front and a rank say to each other, as msgspec structs packed with msgpack. No torch, no protobuf.

Lanes (C42), one zmq socket pair each: *submit* (front -> rank: Submit; the front counts what is in it), *control*
(front -> rank: Cancel, Release, Stop; unbounded, never behind a submit), *data* (front <-> the rank's read server: ReadRange,
Expose, ReadReply) and *events* (rank -> front: everything else). All times named at_ns are CLOCK_MONOTONIC nanoseconds, which is
one clock for all processes of a machine; they never leave it.
"""

from prefill_engine.handoff_pieces import ComponentKey, PieceChecks, PushRegion
from prefill_engine.image_messages import ImageRows, ImageRowsDone, ImagesWanted
from prefill_plan.config import Struct


class Message(Struct, tag=True):
    """Base: tagged, so a union decodes by type."""


# --- front -> rank ------------------------------------------------------------------------------------------------------
class ImageItem(Struct):
    """Image span [start, start + length) of the prompt; content_key: 32 bytes (serving.md 4.4). has_source: its rows can be had,
    the request came with pixels or a ticket."""

    start: int
    length: int
    content_key: bytes
    has_source: bool = False


class Sampling(Struct):
    """How the first token is chosen. sample False: no token. temperature 0 = greedy, top_p 0 = 1 (C50).

    forced_token: a retry must repeat this token (Resume); -1 = none.
    """

    sample: bool
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    top_logprobs: int = 0
    forced_token: int = -1


class Submit(Message):
    """A validated attempt, bound to this rank.

    tokens: int32 little-endian. cache_scope: tenant salt of the block keys. offered_hit: upper bound of the hit, None = whatever
    the rank finds. priority: 1 interactive, 2 standard, 3 sheddable. step_cap_ms, max_compute_rows: None = no limit.
    store: "best_effort", "required" or "skip". handoff: False = KV is freed after the store is done. arrival_ns: at the front.
    store_only: full blocks do not travel, the store has them. push: where everything goes; () = it is pulled. early_send:
    complete blocks may be pushed before all rows are computed.
    """

    attempt_id: bytes
    request_id: str
    tokens: bytes
    images: tuple[ImageItem, ...]
    cache_scope: bytes
    offered_hit: int | None
    priority: int
    fairness_key: str
    weight: int
    step_cap_ms: float | None
    max_compute_rows: int | None
    sampling: Sampling
    store: str
    handoff: bool
    arrival_ns: int
    store_only: bool = False
    push: tuple[PushRegion, ...] = ()
    early_send: bool = False


class Cancel(Message):
    """Stop computing the attempt; its KV is freed as soon as nothing uses it. Answered by Released (also when unknown)."""

    attempt_id: bytes


class Release(Message):
    """The hand-off has ended (settled, aborted, expired): the rank may free what the attempt holds. Answered by Released."""

    attempt_id: bytes


class Stop(Message):
    """End the process: close the store, exit 0."""


# --- data lane ----------------------------------------------------------------------------------------------------------
class ReadRange(Message):
    """Bytes [offset, offset + length) of one component (pe.v1.ComponentKind number) of a computed attempt."""

    read_id: int
    attempt_id: bytes
    kind: int
    offset: int
    length: int


class Expose(Message):
    """Serve a computed attempt's components on the data transport as well; answered by ReadReply without data. Ends with the
    attempt's Release or Cancel."""

    read_id: int
    attempt_id: bytes
    keys: tuple[ComponentKey, ...]


class ReadReply(Message):
    """error: empty = ok. crc32c of data, computed where the bytes were read."""

    read_id: int
    data: bytes
    crc32c: int
    error: str


# --- rank -> front ------------------------------------------------------------------------------------------------------
class Progress(Message):
    """Start-up progress. stage: "load", "warmup"; done/total in unit."""

    rank: int
    stage: str
    done: int
    total: int
    unit: str
    item: str
    at_ns: int


class RankReady(Message):
    """The rank can take work. Digests are 32 bytes (kv.md 2.2). data_transport: what its data port speaks, "" = it has none;
    data_transport_kind: what it moves bytes by (Transport.kind). vision_digest: of the checkpoint's tower, b"" without vision."""

    rank: int
    kv_tokens_total: int
    state_slots_total: int
    weights_digest: bytes
    tokenizer_digest: bytes
    layout_digest: bytes
    numerics_class: str
    store_kind: str
    data_transport: str = ""
    data_transport_kind: str = ""
    data_port: int = -1
    vision_digest: bytes = b""


class RankFailed(Message):
    """Last words of a rank: an ExitCode and what goes into the termination message."""

    rank: int
    exit_code: int
    code: str
    phase: str
    detail: str


class Beat(Message):
    """One layer done (or a placeholder step). predicted_layer_ms: what the cost model expects of one layer now."""

    rank: int
    step_id: int
    layer: int
    predicted_layer_ms: float
    at_ns: int


class Resolved(Message):
    """The hit is known: the attempt is accepted. replay_rows is a plan (C45). swa_source: "none", "local" or "replay"."""

    attempt_id: bytes
    effective_hit: int
    replay_rows: int
    compute_rows: int
    swa_source: str
    predicted_wait_seconds: float
    predicted_finish_seconds: float
    at_ns: int


class Waiting(Message):
    """Position in the queue. waiting_for: "queue" or "swap_in"."""

    attempt_id: bytes
    ahead_requests: int
    ahead_rows: int
    waiting_for: str
    at_ns: int


class Started(Message):
    """The first chunk of the attempt has entered a step: it waits no longer (sent once, when the step begins)."""

    attempt_id: bytes
    at_ns: int


class SwappedIn(Message):
    """Hit blocks from the store are in the pool. hit_shrunk_to: new effective hit if blocks were bad, else -1."""

    attempt_id: bytes
    layers_ready: int
    layers_total: int
    num_bytes: int
    hit_shrunk_to: int
    took_seconds: float
    at_ns: int


class ChunkFinished(Message):
    attempt_id: bytes
    rows_done: int
    rows_total: int
    chunk_rows: int
    step_seconds: float
    step_id: int
    at_ns: int


class FirstTokenReady(Message):
    attempt_id: bytes
    token: int
    logprob: float
    alt_tokens: tuple[int, ...]
    alt_logprobs: tuple[float, ...]
    at_ns: int


class Region(Struct):
    """One component of the hand-over: pe.v1.ComponentKind number and length. Zero-length components are left out.

    offset: where these bytes stand in the whole component (STORE_ONLY leaves out the full blocks).
    """

    kind: int
    num_bytes: int
    offset: int = 0


class Computed(Message):
    """All rows are done and every byte of the hand-over is readable. provenance 1: descends from a replay. stored_block_keys: of
    the full blocks, with store_only."""

    attempt_id: bytes
    kv_tokens: int
    regions: tuple[Region, ...]
    cached_tokens: int
    computed_tokens: int
    replayed_tokens: int
    image_tokens: int
    provenance: int
    at_ns: int
    stored_block_keys: bytes = b""


class StoreProgress(Message):
    """Written blocks of the attempt. done: nothing more will be written. snapshots: positions held locally."""

    attempt_id: bytes
    committed: int
    total: int
    failed: int
    snapshots: tuple[int, ...]
    done: bool
    at_ns: int


class PushReport(Message):
    """What became of a push; sent by the rank's courier, so it may overtake the step thread's messages.

    state: "landed" (the peer has every byte, nothing is in flight), "failed" (it never will; "drained" follows) or "drained"
    (nothing of it is in flight any more). reason: with failed, a name of pe.v1.ErrorReason.
    """

    attempt_id: bytes
    state: str
    num_bytes: int
    reason: str
    detail: str
    checks: tuple[PieceChecks, ...]
    at_ns: int


class AttemptFailed(Message):
    """Terminal. reason, retry: names of pe.v1.ErrorReason and RetryScope (without prefix RETRY_SCOPE_); phase: of pe.v1.Phase
    (without PHASE_). Released follows."""

    attempt_id: bytes
    reason: str
    retry: str
    phase: str
    public_message: str
    operator_detail: str
    rows_computed: int
    at_ns: int


class Released(Message):
    """Every slot of the attempt is back in its pool (also the answer for an unknown attempt)."""

    attempt_id: bytes
    at_ns: int


class StepModelReport(Struct):
    """step(ms) = a + enc*encoder rows + dec*decoder rows + ctx*sum(rows*context)/1e6 (serving.md 2.2)."""

    a_ms: float
    enc_ms_per_row: float
    dec_ms_per_row: float
    ctx_ms_per_mega: float
    residual_p95_ms: float
    samples: int


class StepReport(Struct):
    """One finished step, for metrics. kind: "real", "placeholder" or "canary"."""

    kind: str
    seconds: float
    encoder_rows: int
    decoder_rows: int
    replay_rows: int


class RankLoad(Message):
    """State of a rank, sent after every step and at least once a second. counters: monotonic, of store, snapshots, pools."""

    rank: int
    running: int
    waiting: int
    waiting_rows: int
    running_rows_left: int
    waiting_rows_by_class: tuple[int, int, int]
    kv_tokens_total: int
    kv_tokens_free: int
    kv_tokens_held_by_tickets: int
    state_slots_free: int
    step_counter: int
    step_model: StepModelReport
    step: StepReport | None
    store_ok: bool
    store_lag_blocks: int
    counters: dict[str, int]
    at_ns: int


ToRank = Submit | Cancel | Release | Stop | ImageRows
FromRank = (
    Progress
    | RankReady
    | RankFailed
    | Beat
    | Resolved
    | Waiting
    | Started
    | SwappedIn
    | ChunkFinished
    | FirstTokenReady
    | Computed
    | StoreProgress
    | PushReport
    | AttemptFailed
    | Released
    | RankLoad
    | ImagesWanted
    | ImageRowsDone
)


# --- process start ------------------------------------------------------------------------------------------------------
class RankArgs(Struct):
    """What a rank process is started with. config: JSON of EngineConfig. socket_dir: holds the lanes' ipc sockets, bound by the
    front as `<lane>-<rank>`. fault: test hook `exit=12[@phase]`, empty in production (C31)."""

    config: bytes
    dp_rank: int
    socket_dir: str
    fault: str


def lane_address(socket_dir: str, lane: str, dp_rank: int) -> str:
    """ipc address of a lane; the front binds it, the rank connects."""
    return f"ipc://{socket_dir}/{lane}-{dp_rank}"
