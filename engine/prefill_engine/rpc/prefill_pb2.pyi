import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from prefill_engine.rpc import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PrefillRequest(_message.Message):
    __slots__ = ("protocol", "key", "tenant", "model", "tokens", "images", "hit", "budget", "first_token", "handoff", "store", "resume", "events", "labels")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    HIT_FIELD_NUMBER: _ClassVar[int]
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    key: _common_pb2.AttemptKey
    tenant: _common_pb2.TenantContext
    model: _common_pb2.ModelBinding
    tokens: _containers.RepeatedScalarFieldContainer[int]
    images: _containers.RepeatedCompositeFieldContainer[ImageSpan]
    hit: HitPlan
    budget: TimeBudget
    first_token: FirstTokenPlan
    handoff: HandoffPlan
    store: StorePlan
    resume: Resume
    events: EventOptions
    labels: _containers.ScalarMap[str, str]
    def __init__(self, protocol: _Optional[int] = ..., key: _Optional[_Union[_common_pb2.AttemptKey, _Mapping]] = ..., tenant: _Optional[_Union[_common_pb2.TenantContext, _Mapping]] = ..., model: _Optional[_Union[_common_pb2.ModelBinding, _Mapping]] = ..., tokens: _Optional[_Iterable[int]] = ..., images: _Optional[_Iterable[_Union[ImageSpan, _Mapping]]] = ..., hit: _Optional[_Union[HitPlan, _Mapping]] = ..., budget: _Optional[_Union[TimeBudget, _Mapping]] = ..., first_token: _Optional[_Union[FirstTokenPlan, _Mapping]] = ..., handoff: _Optional[_Union[HandoffPlan, _Mapping]] = ..., store: _Optional[_Union[StorePlan, _Mapping]] = ..., resume: _Optional[_Union[Resume, _Mapping]] = ..., events: _Optional[_Union[EventOptions, _Mapping]] = ..., labels: _Optional[_Mapping[str, str]] = ...) -> None: ...

class ImageSpan(_message.Message):
    __slots__ = ("index", "start", "length", "width", "height", "content_key", "ticket", "pixels")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    CONTENT_KEY_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    PIXELS_FIELD_NUMBER: _ClassVar[int]
    index: int
    start: int
    length: int
    width: int
    height: int
    content_key: bytes
    ticket: EmbeddingTicket
    pixels: bytes
    def __init__(self, index: _Optional[int] = ..., start: _Optional[int] = ..., length: _Optional[int] = ..., width: _Optional[int] = ..., height: _Optional[int] = ..., content_key: _Optional[bytes] = ..., ticket: _Optional[_Union[EmbeddingTicket, _Mapping]] = ..., pixels: _Optional[bytes] = ...) -> None: ...

class EmbeddingTicket(_message.Message):
    __slots__ = ("ticket_id", "ve_endpoint", "region", "lease", "columns", "checksum")
    TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    VE_ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    ticket_id: bytes
    ve_endpoint: str
    region: _common_pb2.RegionRef
    lease: _common_pb2.Lease
    columns: int
    checksum: bytes
    def __init__(self, ticket_id: _Optional[bytes] = ..., ve_endpoint: _Optional[str] = ..., region: _Optional[_Union[_common_pb2.RegionRef, _Mapping]] = ..., lease: _Optional[_Union[_common_pb2.Lease, _Mapping]] = ..., columns: _Optional[int] = ..., checksum: _Optional[bytes] = ...) -> None: ...

class HitPlan(_message.Message):
    __slots__ = ("tokens", "block_keys", "lease", "swa", "allow_shrink", "swap_in_limit")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_KEYS_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    SWA_FIELD_NUMBER: _ClassVar[int]
    ALLOW_SHRINK_FIELD_NUMBER: _ClassVar[int]
    SWAP_IN_LIMIT_FIELD_NUMBER: _ClassVar[int]
    tokens: int
    block_keys: _containers.RepeatedScalarFieldContainer[bytes]
    lease: _common_pb2.Lease
    swa: SwaPlan
    allow_shrink: bool
    swap_in_limit: _duration_pb2.Duration
    def __init__(self, tokens: _Optional[int] = ..., block_keys: _Optional[_Iterable[bytes]] = ..., lease: _Optional[_Union[_common_pb2.Lease, _Mapping]] = ..., swa: _Optional[_Union[SwaPlan, _Mapping]] = ..., allow_shrink: _Optional[bool] = ..., swap_in_limit: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class SwaPlan(_message.Message):
    __slots__ = ("position", "local", "remote", "replay")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    LOCAL_FIELD_NUMBER: _ClassVar[int]
    REMOTE_FIELD_NUMBER: _ClassVar[int]
    REPLAY_FIELD_NUMBER: _ClassVar[int]
    position: int
    local: SwaLocal
    remote: SwaRemote
    replay: SwaReplay
    def __init__(self, position: _Optional[int] = ..., local: _Optional[_Union[SwaLocal, _Mapping]] = ..., remote: _Optional[_Union[SwaRemote, _Mapping]] = ..., replay: _Optional[_Union[SwaReplay, _Mapping]] = ...) -> None: ...

class SwaLocal(_message.Message):
    __slots__ = ("snapshot_key",)
    SNAPSHOT_KEY_FIELD_NUMBER: _ClassVar[int]
    snapshot_key: bytes
    def __init__(self, snapshot_key: _Optional[bytes] = ...) -> None: ...

class SwaRemote(_message.Message):
    __slots__ = ("snapshot_key", "holder_id", "endpoint", "region", "lease")
    SNAPSHOT_KEY_FIELD_NUMBER: _ClassVar[int]
    HOLDER_ID_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    snapshot_key: bytes
    holder_id: str
    endpoint: str
    region: _common_pb2.RegionRef
    lease: _common_pb2.Lease
    def __init__(self, snapshot_key: _Optional[bytes] = ..., holder_id: _Optional[str] = ..., endpoint: _Optional[str] = ..., region: _Optional[_Union[_common_pb2.RegionRef, _Mapping]] = ..., lease: _Optional[_Union[_common_pb2.Lease, _Mapping]] = ...) -> None: ...

class SwaReplay(_message.Message):
    __slots__ = ("rows",)
    ROWS_FIELD_NUMBER: _ClassVar[int]
    rows: int
    def __init__(self, rows: _Optional[int] = ...) -> None: ...

class TimeBudget(_message.Message):
    __slots__ = ("step_cap", "ttft_target", "max_queue_wait", "max_compute_rows")
    STEP_CAP_FIELD_NUMBER: _ClassVar[int]
    TTFT_TARGET_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUE_WAIT_FIELD_NUMBER: _ClassVar[int]
    MAX_COMPUTE_ROWS_FIELD_NUMBER: _ClassVar[int]
    step_cap: _duration_pb2.Duration
    ttft_target: _duration_pb2.Duration
    max_queue_wait: _duration_pb2.Duration
    max_compute_rows: int
    def __init__(self, step_cap: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., ttft_target: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., max_queue_wait: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., max_compute_rows: _Optional[int] = ...) -> None: ...

class FirstTokenPlan(_message.Message):
    __slots__ = ("mode", "temperature", "top_p", "seed", "top_logprobs", "constraint_kind", "constraint")
    class Mode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        MODE_UNSPECIFIED: _ClassVar[FirstTokenPlan.Mode]
        SAMPLE: _ClassVar[FirstTokenPlan.Mode]
        NONE: _ClassVar[FirstTokenPlan.Mode]
    MODE_UNSPECIFIED: FirstTokenPlan.Mode
    SAMPLE: FirstTokenPlan.Mode
    NONE: FirstTokenPlan.Mode
    MODE_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINT_KIND_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINT_FIELD_NUMBER: _ClassVar[int]
    mode: FirstTokenPlan.Mode
    temperature: float
    top_p: float
    seed: int
    top_logprobs: int
    constraint_kind: str
    constraint: str
    def __init__(self, mode: _Optional[_Union[FirstTokenPlan.Mode, str]] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., seed: _Optional[int] = ..., top_logprobs: _Optional[int] = ..., constraint_kind: _Optional[str] = ..., constraint: _Optional[str] = ...) -> None: ...

class HandoffPlan(_message.Message):
    __slots__ = ("mode", "decode_endpoint", "decode_engine_id", "accepted_format", "push", "ticket_ttl", "early_send", "checksum")
    class Mode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        MODE_UNSPECIFIED: _ClassVar[HandoffPlan.Mode]
        PULL: _ClassVar[HandoffPlan.Mode]
        PUSH: _ClassVar[HandoffPlan.Mode]
        STORE_ONLY: _ClassVar[HandoffPlan.Mode]
        NONE: _ClassVar[HandoffPlan.Mode]
    MODE_UNSPECIFIED: HandoffPlan.Mode
    PULL: HandoffPlan.Mode
    PUSH: HandoffPlan.Mode
    STORE_ONLY: HandoffPlan.Mode
    NONE: HandoffPlan.Mode
    MODE_FIELD_NUMBER: _ClassVar[int]
    DECODE_ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    DECODE_ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FORMAT_FIELD_NUMBER: _ClassVar[int]
    PUSH_FIELD_NUMBER: _ClassVar[int]
    TICKET_TTL_FIELD_NUMBER: _ClassVar[int]
    EARLY_SEND_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    mode: HandoffPlan.Mode
    decode_endpoint: str
    decode_engine_id: str
    accepted_format: bytes
    push: PushTarget
    ticket_ttl: _duration_pb2.Duration
    early_send: bool
    checksum: bool
    def __init__(self, mode: _Optional[_Union[HandoffPlan.Mode, str]] = ..., decode_endpoint: _Optional[str] = ..., decode_engine_id: _Optional[str] = ..., accepted_format: _Optional[bytes] = ..., push: _Optional[_Union[PushTarget, _Mapping]] = ..., ticket_ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., early_send: _Optional[bool] = ..., checksum: _Optional[bool] = ...) -> None: ...

class PushTarget(_message.Message):
    __slots__ = ("grant_id", "lease", "regions")
    GRANT_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    REGIONS_FIELD_NUMBER: _ClassVar[int]
    grant_id: bytes
    lease: _common_pb2.Lease
    regions: _containers.RepeatedCompositeFieldContainer[ComponentRegions]
    def __init__(self, grant_id: _Optional[bytes] = ..., lease: _Optional[_Union[_common_pb2.Lease, _Mapping]] = ..., regions: _Optional[_Iterable[_Union[ComponentRegions, _Mapping]]] = ...) -> None: ...

class ComponentRegions(_message.Message):
    __slots__ = ("kind", "region", "alternatives")
    KIND_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    ALTERNATIVES_FIELD_NUMBER: _ClassVar[int]
    kind: _common_pb2.ComponentKind
    region: _common_pb2.RegionRef
    alternatives: _containers.RepeatedCompositeFieldContainer[_common_pb2.RegionRef]
    def __init__(self, kind: _Optional[_Union[_common_pb2.ComponentKind, str]] = ..., region: _Optional[_Union[_common_pb2.RegionRef, _Mapping]] = ..., alternatives: _Optional[_Iterable[_Union[_common_pb2.RegionRef, _Mapping]]] = ...) -> None: ...

class StorePlan(_message.Message):
    __slots__ = ("durability", "swa_checkpoints")
    class Durability(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        DURABILITY_UNSPECIFIED: _ClassVar[StorePlan.Durability]
        BEST_EFFORT: _ClassVar[StorePlan.Durability]
        REQUIRED: _ClassVar[StorePlan.Durability]
        SKIP: _ClassVar[StorePlan.Durability]
    DURABILITY_UNSPECIFIED: StorePlan.Durability
    BEST_EFFORT: StorePlan.Durability
    REQUIRED: StorePlan.Durability
    SKIP: StorePlan.Durability
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    SWA_CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    durability: StorePlan.Durability
    swa_checkpoints: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, durability: _Optional[_Union[StorePlan.Durability, str]] = ..., swa_checkpoints: _Optional[_Iterable[int]] = ...) -> None: ...

class Resume(_message.Message):
    __slots__ = ("first_token_already_shown", "first_token")
    FIRST_TOKEN_ALREADY_SHOWN_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    first_token_already_shown: bool
    first_token: int
    def __init__(self, first_token_already_shown: _Optional[bool] = ..., first_token: _Optional[int] = ...) -> None: ...

class EventOptions(_message.Message):
    __slots__ = ("min_progress_gap", "timeline")
    MIN_PROGRESS_GAP_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    min_progress_gap: _duration_pb2.Duration
    timeline: bool
    def __init__(self, min_progress_gap: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., timeline: _Optional[bool] = ...) -> None: ...

class PrefillEvent(_message.Message):
    __slots__ = ("seq", "since_accept", "pe_epoch", "accepted", "queued", "image", "swap_in", "chunk", "first_token", "ticket", "store", "handoff", "completed")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    SINCE_ACCEPT_FIELD_NUMBER: _ClassVar[int]
    PE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    SWAP_IN_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    COMPLETED_FIELD_NUMBER: _ClassVar[int]
    seq: int
    since_accept: _duration_pb2.Duration
    pe_epoch: int
    accepted: Accepted
    queued: Queued
    image: ImageState
    swap_in: SwapIn
    chunk: ChunkDone
    first_token: FirstToken
    ticket: Ticket
    store: StoreState
    handoff: HandoffState
    completed: Completed
    def __init__(self, seq: _Optional[int] = ..., since_accept: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., pe_epoch: _Optional[int] = ..., accepted: _Optional[_Union[Accepted, _Mapping]] = ..., queued: _Optional[_Union[Queued, _Mapping]] = ..., image: _Optional[_Union[ImageState, _Mapping]] = ..., swap_in: _Optional[_Union[SwapIn, _Mapping]] = ..., chunk: _Optional[_Union[ChunkDone, _Mapping]] = ..., first_token: _Optional[_Union[FirstToken, _Mapping]] = ..., ticket: _Optional[_Union[Ticket, _Mapping]] = ..., store: _Optional[_Union[StoreState, _Mapping]] = ..., handoff: _Optional[_Union[HandoffState, _Mapping]] = ..., completed: _Optional[_Union[Completed, _Mapping]] = ...) -> None: ...

class Accepted(_message.Message):
    __slots__ = ("dp_rank", "effective_hit", "replay_rows", "compute_rows", "predicted_wait", "predicted_finish", "deduplicated")
    DP_RANK_FIELD_NUMBER: _ClassVar[int]
    EFFECTIVE_HIT_FIELD_NUMBER: _ClassVar[int]
    REPLAY_ROWS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_ROWS_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_WAIT_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_FINISH_FIELD_NUMBER: _ClassVar[int]
    DEDUPLICATED_FIELD_NUMBER: _ClassVar[int]
    dp_rank: int
    effective_hit: int
    replay_rows: int
    compute_rows: int
    predicted_wait: _duration_pb2.Duration
    predicted_finish: _duration_pb2.Duration
    deduplicated: bool
    def __init__(self, dp_rank: _Optional[int] = ..., effective_hit: _Optional[int] = ..., replay_rows: _Optional[int] = ..., compute_rows: _Optional[int] = ..., predicted_wait: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., predicted_finish: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., deduplicated: _Optional[bool] = ...) -> None: ...

class Queued(_message.Message):
    __slots__ = ("ahead_requests", "ahead_rows", "waiting_for")
    AHEAD_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    AHEAD_ROWS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    ahead_requests: int
    ahead_rows: int
    waiting_for: _common_pb2.Phase
    def __init__(self, ahead_requests: _Optional[int] = ..., ahead_rows: _Optional[int] = ..., waiting_for: _Optional[_Union[_common_pb2.Phase, str]] = ...) -> None: ...

class ImageState(_message.Message):
    __slots__ = ("index", "ready", "rows", "took")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    TOOK_FIELD_NUMBER: _ClassVar[int]
    index: int
    ready: bool
    rows: int
    took: _duration_pb2.Duration
    def __init__(self, index: _Optional[int] = ..., ready: _Optional[bool] = ..., rows: _Optional[int] = ..., took: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class SwapIn(_message.Message):
    __slots__ = ("layers_ready", "layers_total", "bytes", "hit_shrunk_to")
    LAYERS_READY_FIELD_NUMBER: _ClassVar[int]
    LAYERS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    HIT_SHRUNK_TO_FIELD_NUMBER: _ClassVar[int]
    layers_ready: int
    layers_total: int
    bytes: int
    hit_shrunk_to: int
    def __init__(self, layers_ready: _Optional[int] = ..., layers_total: _Optional[int] = ..., bytes: _Optional[int] = ..., hit_shrunk_to: _Optional[int] = ...) -> None: ...

class ChunkDone(_message.Message):
    __slots__ = ("rows_done", "rows_total", "chunk_rows", "step", "step_id")
    ROWS_DONE_FIELD_NUMBER: _ClassVar[int]
    ROWS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    CHUNK_ROWS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    rows_done: int
    rows_total: int
    chunk_rows: int
    step: _duration_pb2.Duration
    step_id: int
    def __init__(self, rows_done: _Optional[int] = ..., rows_total: _Optional[int] = ..., chunk_rows: _Optional[int] = ..., step: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., step_id: _Optional[int] = ...) -> None: ...

class FirstToken(_message.Message):
    __slots__ = ("token", "logprob", "alt_tokens", "alt_logprobs", "sampler_state")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    ALT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ALT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SAMPLER_STATE_FIELD_NUMBER: _ClassVar[int]
    token: int
    logprob: float
    alt_tokens: _containers.RepeatedScalarFieldContainer[int]
    alt_logprobs: _containers.RepeatedScalarFieldContainer[float]
    sampler_state: bytes
    def __init__(self, token: _Optional[int] = ..., logprob: _Optional[float] = ..., alt_tokens: _Optional[_Iterable[int]] = ..., alt_logprobs: _Optional[_Iterable[float]] = ..., sampler_state: _Optional[bytes] = ...) -> None: ...

class Ticket(_message.Message):
    __slots__ = ("ticket_id", "lease", "format", "kv_tokens", "regions", "source_endpoint", "source_engine_id", "compat_json", "mode", "stored_block_keys")
    TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REGIONS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    SOURCE_ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    COMPAT_JSON_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    STORED_BLOCK_KEYS_FIELD_NUMBER: _ClassVar[int]
    ticket_id: bytes
    lease: _common_pb2.Lease
    format: _common_pb2.KvFormat
    kv_tokens: int
    regions: _containers.RepeatedCompositeFieldContainer[ComponentRegions]
    source_endpoint: str
    source_engine_id: str
    compat_json: str
    mode: HandoffPlan.Mode
    stored_block_keys: bytes
    def __init__(self, ticket_id: _Optional[bytes] = ..., lease: _Optional[_Union[_common_pb2.Lease, _Mapping]] = ..., format: _Optional[_Union[_common_pb2.KvFormat, _Mapping]] = ..., kv_tokens: _Optional[int] = ..., regions: _Optional[_Iterable[_Union[ComponentRegions, _Mapping]]] = ..., source_endpoint: _Optional[str] = ..., source_engine_id: _Optional[str] = ..., compat_json: _Optional[str] = ..., mode: _Optional[_Union[HandoffPlan.Mode, str]] = ..., stored_block_keys: _Optional[bytes] = ...) -> None: ...

class StoreState(_message.Message):
    __slots__ = ("blocks_committed", "blocks_total", "swa_published", "blocks_failed")
    BLOCKS_COMMITTED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    SWA_PUBLISHED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FAILED_FIELD_NUMBER: _ClassVar[int]
    blocks_committed: int
    blocks_total: int
    swa_published: _containers.RepeatedScalarFieldContainer[int]
    blocks_failed: int
    def __init__(self, blocks_committed: _Optional[int] = ..., blocks_total: _Optional[int] = ..., swa_published: _Optional[_Iterable[int]] = ..., blocks_failed: _Optional[int] = ...) -> None: ...

class HandoffState(_message.Message):
    __slots__ = ("state", "bytes_done", "bytes_total")
    class S(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        S_UNSPECIFIED: _ClassVar[HandoffState.S]
        OFFERED: _ClassVar[HandoffState.S]
        CLAIMED: _ClassVar[HandoffState.S]
        MOVING: _ClassVar[HandoffState.S]
        DELIVERED: _ClassVar[HandoffState.S]
        ABORTED: _ClassVar[HandoffState.S]
        EXPIRED: _ClassVar[HandoffState.S]
    S_UNSPECIFIED: HandoffState.S
    OFFERED: HandoffState.S
    CLAIMED: HandoffState.S
    MOVING: HandoffState.S
    DELIVERED: HandoffState.S
    ABORTED: HandoffState.S
    EXPIRED: HandoffState.S
    STATE_FIELD_NUMBER: _ClassVar[int]
    BYTES_DONE_FIELD_NUMBER: _ClassVar[int]
    BYTES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    state: HandoffState.S
    bytes_done: int
    bytes_total: int
    def __init__(self, state: _Optional[_Union[HandoffState.S, str]] = ..., bytes_done: _Optional[int] = ..., bytes_total: _Optional[int] = ...) -> None: ...

class Completed(_message.Message):
    __slots__ = ("usage", "timeline", "handoff", "store")
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    usage: Usage
    timeline: _containers.RepeatedCompositeFieldContainer[Stage]
    handoff: HandoffState
    store: StoreState
    def __init__(self, usage: _Optional[_Union[Usage, _Mapping]] = ..., timeline: _Optional[_Iterable[_Union[Stage, _Mapping]]] = ..., handoff: _Optional[_Union[HandoffState, _Mapping]] = ..., store: _Optional[_Union[StoreState, _Mapping]] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "cached_tokens", "computed_tokens", "replayed_tokens", "image_tokens", "kv_bytes_moved", "already_cached_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REPLAYED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IMAGE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_MOVED_FIELD_NUMBER: _ClassVar[int]
    ALREADY_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    replayed_tokens: int
    image_tokens: int
    kv_bytes_moved: int
    already_cached_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., computed_tokens: _Optional[int] = ..., replayed_tokens: _Optional[int] = ..., image_tokens: _Optional[int] = ..., kv_bytes_moved: _Optional[int] = ..., already_cached_tokens: _Optional[int] = ...) -> None: ...

class Stage(_message.Message):
    __slots__ = ("phase", "start", "length", "note")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    phase: _common_pb2.Phase
    start: _duration_pb2.Duration
    length: _duration_pb2.Duration
    note: str
    def __init__(self, phase: _Optional[_Union[_common_pb2.Phase, str]] = ..., start: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., length: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., note: _Optional[str] = ...) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("attempt_id", "after_seq")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    AFTER_SEQ_FIELD_NUMBER: _ClassVar[int]
    attempt_id: bytes
    after_seq: int
    def __init__(self, attempt_id: _Optional[bytes] = ..., after_seq: _Optional[int] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("attempt_id", "reason", "wait_drained", "generation")
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    WAIT_DRAINED_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    attempt_id: bytes
    reason: str
    wait_drained: bool
    generation: int
    def __init__(self, attempt_id: _Optional[bytes] = ..., reason: _Optional[str] = ..., wait_drained: _Optional[bool] = ..., generation: _Optional[int] = ...) -> None: ...

class CancelResponse(_message.Message):
    __slots__ = ("result", "drained", "generation")
    class Result(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        RESULT_UNSPECIFIED: _ClassVar[CancelResponse.Result]
        CANCELLED: _ClassVar[CancelResponse.Result]
        ALREADY_FINISHED: _ClassVar[CancelResponse.Result]
        UNKNOWN: _ClassVar[CancelResponse.Result]
        TOO_LATE_TICKET_CLAIMED: _ClassVar[CancelResponse.Result]
    RESULT_UNSPECIFIED: CancelResponse.Result
    CANCELLED: CancelResponse.Result
    ALREADY_FINISHED: CancelResponse.Result
    UNKNOWN: CancelResponse.Result
    TOO_LATE_TICKET_CLAIMED: CancelResponse.Result
    RESULT_FIELD_NUMBER: _ClassVar[int]
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    result: CancelResponse.Result
    drained: bool
    generation: int
    def __init__(self, result: _Optional[_Union[CancelResponse.Result, str]] = ..., drained: _Optional[bool] = ..., generation: _Optional[int] = ...) -> None: ...

class EstimateRequest(_message.Message):
    __slots__ = ("compute_rows", "context", "hit_blocks", "tenant")
    COMPUTE_ROWS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    HIT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    compute_rows: int
    context: int
    hit_blocks: int
    tenant: _common_pb2.TenantContext
    def __init__(self, compute_rows: _Optional[int] = ..., context: _Optional[int] = ..., hit_blocks: _Optional[int] = ..., tenant: _Optional[_Union[_common_pb2.TenantContext, _Mapping]] = ...) -> None: ...

class EstimateResponse(_message.Message):
    __slots__ = ("wait", "finish", "admissible")
    WAIT_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    ADMISSIBLE_FIELD_NUMBER: _ClassVar[int]
    wait: _duration_pb2.Duration
    finish: _duration_pb2.Duration
    admissible: bool
    def __init__(self, wait: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., finish: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., admissible: _Optional[bool] = ...) -> None: ...

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ServerInfo(_message.Message):
    __slots__ = ("protocol_min", "protocol_max", "build", "model", "formats", "epoch", "engine_id", "zone", "ep_size", "dp_ranks", "chunk_cap_per_gpu", "max_context", "handoff_modes", "transports", "features", "layout_digest", "numerics_class", "keep_tokens", "device")
    PROTOCOL_MIN_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_MAX_FIELD_NUMBER: _ClassVar[int]
    BUILD_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    FORMATS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    ZONE_FIELD_NUMBER: _ClassVar[int]
    EP_SIZE_FIELD_NUMBER: _ClassVar[int]
    DP_RANKS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_CAP_PER_GPU_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_MODES_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_CLASS_FIELD_NUMBER: _ClassVar[int]
    KEEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    protocol_min: int
    protocol_max: int
    build: str
    model: _common_pb2.ModelBinding
    formats: _containers.RepeatedCompositeFieldContainer[_common_pb2.KvFormat]
    epoch: int
    engine_id: str
    zone: str
    ep_size: int
    dp_ranks: int
    chunk_cap_per_gpu: int
    max_context: int
    handoff_modes: _containers.RepeatedScalarFieldContainer[str]
    transports: _containers.RepeatedScalarFieldContainer[str]
    features: _containers.RepeatedScalarFieldContainer[str]
    layout_digest: bytes
    numerics_class: str
    keep_tokens: int
    device: str
    def __init__(self, protocol_min: _Optional[int] = ..., protocol_max: _Optional[int] = ..., build: _Optional[str] = ..., model: _Optional[_Union[_common_pb2.ModelBinding, _Mapping]] = ..., formats: _Optional[_Iterable[_Union[_common_pb2.KvFormat, _Mapping]]] = ..., epoch: _Optional[int] = ..., engine_id: _Optional[str] = ..., zone: _Optional[str] = ..., ep_size: _Optional[int] = ..., dp_ranks: _Optional[int] = ..., chunk_cap_per_gpu: _Optional[int] = ..., max_context: _Optional[int] = ..., handoff_modes: _Optional[_Iterable[str]] = ..., transports: _Optional[_Iterable[str]] = ..., features: _Optional[_Iterable[str]] = ..., layout_digest: _Optional[bytes] = ..., numerics_class: _Optional[str] = ..., keep_tokens: _Optional[int] = ..., device: _Optional[str] = ...) -> None: ...

class GetLoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchLoadRequest(_message.Message):
    __slots__ = ("period",)
    PERIOD_FIELD_NUMBER: _ClassVar[int]
    period: _duration_pb2.Duration
    def __init__(self, period: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class LoadReport(_message.Message):
    __slots__ = ("epoch", "seq", "state", "step", "ranks", "step_counter", "last_step_age", "acked_attempts", "uptime", "known_attempts", "backlog", "weight_bytes_loaded", "weight_bytes_total")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATE_UNSPECIFIED: _ClassVar[LoadReport.State]
        STARTING: _ClassVar[LoadReport.State]
        READY: _ClassVar[LoadReport.State]
        DEGRADED: _ClassVar[LoadReport.State]
        DRAINING: _ClassVar[LoadReport.State]
        WEDGED: _ClassVar[LoadReport.State]
    STATE_UNSPECIFIED: LoadReport.State
    STARTING: LoadReport.State
    READY: LoadReport.State
    DEGRADED: LoadReport.State
    DRAINING: LoadReport.State
    WEDGED: LoadReport.State
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    STEP_COUNTER_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_AGE_FIELD_NUMBER: _ClassVar[int]
    ACKED_ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    UPTIME_FIELD_NUMBER: _ClassVar[int]
    KNOWN_ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    BACKLOG_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_LOADED_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    seq: int
    state: LoadReport.State
    step: StepModel
    ranks: _containers.RepeatedCompositeFieldContainer[RankLoad]
    step_counter: int
    last_step_age: _duration_pb2.Duration
    acked_attempts: int
    uptime: _duration_pb2.Duration
    known_attempts: _containers.RepeatedScalarFieldContainer[bytes]
    backlog: _duration_pb2.Duration
    weight_bytes_loaded: int
    weight_bytes_total: int
    def __init__(self, epoch: _Optional[int] = ..., seq: _Optional[int] = ..., state: _Optional[_Union[LoadReport.State, str]] = ..., step: _Optional[_Union[StepModel, _Mapping]] = ..., ranks: _Optional[_Iterable[_Union[RankLoad, _Mapping]]] = ..., step_counter: _Optional[int] = ..., last_step_age: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., acked_attempts: _Optional[int] = ..., uptime: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., known_attempts: _Optional[_Iterable[bytes]] = ..., backlog: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., weight_bytes_loaded: _Optional[int] = ..., weight_bytes_total: _Optional[int] = ...) -> None: ...

class StepModel(_message.Message):
    __slots__ = ("a_ms", "enc_ms_per_row", "dec_ms_per_row", "ctx_ms_per_mega", "residual_p95_ms", "samples")
    A_MS_FIELD_NUMBER: _ClassVar[int]
    ENC_MS_PER_ROW_FIELD_NUMBER: _ClassVar[int]
    DEC_MS_PER_ROW_FIELD_NUMBER: _ClassVar[int]
    CTX_MS_PER_MEGA_FIELD_NUMBER: _ClassVar[int]
    RESIDUAL_P95_MS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    a_ms: float
    enc_ms_per_row: float
    dec_ms_per_row: float
    ctx_ms_per_mega: float
    residual_p95_ms: float
    samples: int
    def __init__(self, a_ms: _Optional[float] = ..., enc_ms_per_row: _Optional[float] = ..., dec_ms_per_row: _Optional[float] = ..., ctx_ms_per_mega: _Optional[float] = ..., residual_p95_ms: _Optional[float] = ..., samples: _Optional[int] = ...) -> None: ...

class RankLoad(_message.Message):
    __slots__ = ("rank", "running", "waiting", "waiting_rows", "running_rows_left", "kv_tokens_total", "kv_tokens_free", "kv_tokens_held_by_tickets", "state_slots_free", "tickets_open")
    RANK_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    WAITING_ROWS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_ROWS_LEFT_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_FREE_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_HELD_BY_TICKETS_FIELD_NUMBER: _ClassVar[int]
    STATE_SLOTS_FREE_FIELD_NUMBER: _ClassVar[int]
    TICKETS_OPEN_FIELD_NUMBER: _ClassVar[int]
    rank: int
    running: int
    waiting: int
    waiting_rows: int
    running_rows_left: int
    kv_tokens_total: int
    kv_tokens_free: int
    kv_tokens_held_by_tickets: int
    state_slots_free: int
    tickets_open: int
    def __init__(self, rank: _Optional[int] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., waiting_rows: _Optional[int] = ..., running_rows_left: _Optional[int] = ..., kv_tokens_total: _Optional[int] = ..., kv_tokens_free: _Optional[int] = ..., kv_tokens_held_by_tickets: _Optional[int] = ..., state_slots_free: _Optional[int] = ..., tickets_open: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("deadline", "finish_queued")
    DEADLINE_FIELD_NUMBER: _ClassVar[int]
    FINISH_QUEUED_FIELD_NUMBER: _ClassVar[int]
    deadline: _duration_pb2.Duration
    finish_queued: bool
    def __init__(self, deadline: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., finish_queued: _Optional[bool] = ...) -> None: ...

class DrainStatus(_message.Message):
    __slots__ = ("running", "waiting", "tickets_open", "done", "sent_back")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    TICKETS_OPEN_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    SENT_BACK_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    tickets_open: int
    done: bool
    sent_back: int
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., tickets_open: _Optional[int] = ..., done: _Optional[bool] = ..., sent_back: _Optional[int] = ...) -> None: ...
