import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PriorityClass(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PRIORITY_CLASS_UNSPECIFIED: _ClassVar[PriorityClass]
    PRIORITY_CLASS_INTERACTIVE: _ClassVar[PriorityClass]
    PRIORITY_CLASS_STANDARD: _ClassVar[PriorityClass]
    PRIORITY_CLASS_SHEDDABLE: _ClassVar[PriorityClass]

class RecordLayout(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RECORD_LAYOUT_UNSPECIFIED: _ClassVar[RecordLayout]
    RECORD_LAYOUT_FP8_ROW: _ClassVar[RecordLayout]
    RECORD_LAYOUT_FP4_ROW: _ClassVar[RecordLayout]
    RECORD_LAYOUT_FP8_SPLIT: _ClassVar[RecordLayout]
    RECORD_LAYOUT_FP4_SPLIT: _ClassVar[RecordLayout]

class ComponentKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    COMPONENT_KIND_UNSPECIFIED: _ClassVar[ComponentKind]
    COMPONENT_KIND_BLOCK_KV: _ClassVar[ComponentKind]
    COMPONENT_KIND_INDEX_K: _ClassVar[ComponentKind]
    COMPONENT_KIND_SWA_ENCODER: _ClassVar[ComponentKind]
    COMPONENT_KIND_SWA_DECODER: _ClassVar[ComponentKind]
    COMPONENT_KIND_COMPRESS_STATE: _ClassVar[ComponentKind]
    COMPONENT_KIND_DRAFT_SWA: _ClassVar[ComponentKind]
    COMPONENT_KIND_REQUEST_ROW: _ClassVar[ComponentKind]

class ErrorReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ERROR_REASON_UNSPECIFIED: _ClassVar[ErrorReason]
    TOKENS_INVALID: _ClassVar[ErrorReason]
    PROMPT_TOO_LONG: _ClassVar[ErrorReason]
    IMAGE_REJECTED: _ClassVar[ErrorReason]
    IMAGE_TOKEN_MISMATCH: _ClassVar[ErrorReason]
    TENANT_DENIED: _ClassVar[ErrorReason]
    SAMPLING_INVALID: _ClassVar[ErrorReason]
    MODEL_MISMATCH: _ClassVar[ErrorReason]
    KV_FORMAT_MISMATCH: _ClassVar[ErrorReason]
    PROTOCOL_TOO_OLD: _ClassVar[ErrorReason]
    TRANSPORT_UNSUPPORTED: _ClassVar[ErrorReason]
    QUEUE_FULL: _ClassVar[ErrorReason]
    KV_MEMORY: _ClassVar[ErrorReason]
    PATCH_QUEUE_FULL: _ClassVar[ErrorReason]
    TENANT_QUOTA: _ClassVar[ErrorReason]
    BUDGET_IMPOSSIBLE: _ClassVar[ErrorReason]
    DRAINING: _ClassVar[ErrorReason]
    STARTING: _ClassVar[ErrorReason]
    ENGINE_LOST: _ClassVar[ErrorReason]
    RANK_LOST: _ClassVar[ErrorReason]
    WEDGED: _ClassVar[ErrorReason]
    STORE_WRITE_FAILED: _ClassVar[ErrorReason]
    HIT_LEASE_GONE: _ClassVar[ErrorReason]
    SWA_GONE: _ClassVar[ErrorReason]
    EMBEDDING_GONE: _ClassVar[ErrorReason]
    TICKET_GONE: _ClassVar[ErrorReason]
    ATTEMPT_UNKNOWN: _ClassVar[ErrorReason]
    EPOCH_FENCED: _ClassVar[ErrorReason]
    ATTEMPT_SUPERSEDED: _ClassVar[ErrorReason]
    DECODE_ABORTED: _ClassVar[ErrorReason]
    TICKET_CLAIMED: _ClassVar[ErrorReason]
    CALLER_CANCELLED: _ClassVar[ErrorReason]
    IDEMPOTENCY_CONFLICT: _ClassVar[ErrorReason]
    KV_CHECKSUM: _ClassVar[ErrorReason]
    EMBEDDING_CHECKSUM: _ClassVar[ErrorReason]
    STORE_CORRUPT: _ClassVar[ErrorReason]
    NONFINITE_OUTPUT: _ClassVar[ErrorReason]
    QUEUE_WAIT_EXCEEDED: _ClassVar[ErrorReason]
    COMPUTE_DEADLINE: _ClassVar[ErrorReason]
    HANDOFF_TIMEOUT: _ClassVar[ErrorReason]
    SWAP_IN_TIMEOUT: _ClassVar[ErrorReason]
    ENCODER_TIMEOUT: _ClassVar[ErrorReason]
    INVARIANT: _ClassVar[ErrorReason]
    KERNEL_FAULT: _ClassVar[ErrorReason]

class RetryScope(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RETRY_SCOPE_UNSPECIFIED: _ClassVar[RetryScope]
    RETRY_SCOPE_NEVER: _ClassVar[RetryScope]
    RETRY_SCOPE_SAME_LATER: _ClassVar[RetryScope]
    RETRY_SCOPE_OTHER_PE: _ClassVar[RetryScope]
    RETRY_SCOPE_REPLAN: _ClassVar[RetryScope]
    RETRY_SCOPE_ONCE_THEN_FAIL: _ClassVar[RetryScope]

class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PHASE_UNSPECIFIED: _ClassVar[Phase]
    PHASE_ADMISSION: _ClassVar[Phase]
    PHASE_QUEUE: _ClassVar[Phase]
    PHASE_IMAGES: _ClassVar[Phase]
    PHASE_SWAP_IN: _ClassVar[Phase]
    PHASE_COMPUTE: _ClassVar[Phase]
    PHASE_STORE: _ClassVar[Phase]
    PHASE_HANDOFF: _ClassVar[Phase]
    PHASE_SETTLED: _ClassVar[Phase]
PRIORITY_CLASS_UNSPECIFIED: PriorityClass
PRIORITY_CLASS_INTERACTIVE: PriorityClass
PRIORITY_CLASS_STANDARD: PriorityClass
PRIORITY_CLASS_SHEDDABLE: PriorityClass
RECORD_LAYOUT_UNSPECIFIED: RecordLayout
RECORD_LAYOUT_FP8_ROW: RecordLayout
RECORD_LAYOUT_FP4_ROW: RecordLayout
RECORD_LAYOUT_FP8_SPLIT: RecordLayout
RECORD_LAYOUT_FP4_SPLIT: RecordLayout
COMPONENT_KIND_UNSPECIFIED: ComponentKind
COMPONENT_KIND_BLOCK_KV: ComponentKind
COMPONENT_KIND_INDEX_K: ComponentKind
COMPONENT_KIND_SWA_ENCODER: ComponentKind
COMPONENT_KIND_SWA_DECODER: ComponentKind
COMPONENT_KIND_COMPRESS_STATE: ComponentKind
COMPONENT_KIND_DRAFT_SWA: ComponentKind
COMPONENT_KIND_REQUEST_ROW: ComponentKind
ERROR_REASON_UNSPECIFIED: ErrorReason
TOKENS_INVALID: ErrorReason
PROMPT_TOO_LONG: ErrorReason
IMAGE_REJECTED: ErrorReason
IMAGE_TOKEN_MISMATCH: ErrorReason
TENANT_DENIED: ErrorReason
SAMPLING_INVALID: ErrorReason
MODEL_MISMATCH: ErrorReason
KV_FORMAT_MISMATCH: ErrorReason
PROTOCOL_TOO_OLD: ErrorReason
TRANSPORT_UNSUPPORTED: ErrorReason
QUEUE_FULL: ErrorReason
KV_MEMORY: ErrorReason
PATCH_QUEUE_FULL: ErrorReason
TENANT_QUOTA: ErrorReason
BUDGET_IMPOSSIBLE: ErrorReason
DRAINING: ErrorReason
STARTING: ErrorReason
ENGINE_LOST: ErrorReason
RANK_LOST: ErrorReason
WEDGED: ErrorReason
STORE_WRITE_FAILED: ErrorReason
HIT_LEASE_GONE: ErrorReason
SWA_GONE: ErrorReason
EMBEDDING_GONE: ErrorReason
TICKET_GONE: ErrorReason
ATTEMPT_UNKNOWN: ErrorReason
EPOCH_FENCED: ErrorReason
ATTEMPT_SUPERSEDED: ErrorReason
DECODE_ABORTED: ErrorReason
TICKET_CLAIMED: ErrorReason
CALLER_CANCELLED: ErrorReason
IDEMPOTENCY_CONFLICT: ErrorReason
KV_CHECKSUM: ErrorReason
EMBEDDING_CHECKSUM: ErrorReason
STORE_CORRUPT: ErrorReason
NONFINITE_OUTPUT: ErrorReason
QUEUE_WAIT_EXCEEDED: ErrorReason
COMPUTE_DEADLINE: ErrorReason
HANDOFF_TIMEOUT: ErrorReason
SWAP_IN_TIMEOUT: ErrorReason
ENCODER_TIMEOUT: ErrorReason
INVARIANT: ErrorReason
KERNEL_FAULT: ErrorReason
RETRY_SCOPE_UNSPECIFIED: RetryScope
RETRY_SCOPE_NEVER: RetryScope
RETRY_SCOPE_SAME_LATER: RetryScope
RETRY_SCOPE_OTHER_PE: RetryScope
RETRY_SCOPE_REPLAN: RetryScope
RETRY_SCOPE_ONCE_THEN_FAIL: RetryScope
PHASE_UNSPECIFIED: Phase
PHASE_ADMISSION: Phase
PHASE_QUEUE: Phase
PHASE_IMAGES: Phase
PHASE_SWAP_IN: Phase
PHASE_COMPUTE: Phase
PHASE_STORE: Phase
PHASE_HANDOFF: Phase
PHASE_SETTLED: Phase

class AttemptKey(_message.Message):
    __slots__ = ("request_id", "attempt", "attempt_id")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    attempt_id: bytes
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., attempt_id: _Optional[bytes] = ...) -> None: ...

class TenantContext(_message.Message):
    __slots__ = ("tenant", "cache_scope", "priority", "fairness_key", "weight")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    CACHE_SCOPE_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    FAIRNESS_KEY_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    cache_scope: bytes
    priority: PriorityClass
    fairness_key: str
    weight: int
    def __init__(self, tenant: _Optional[str] = ..., cache_scope: _Optional[bytes] = ..., priority: _Optional[_Union[PriorityClass, str]] = ..., fairness_key: _Optional[str] = ..., weight: _Optional[int] = ...) -> None: ...

class ModelBinding(_message.Message):
    __slots__ = ("model_id", "weights_digest", "tokenizer_digest", "vision_digest", "render_revision")
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    VISION_DIGEST_FIELD_NUMBER: _ClassVar[int]
    RENDER_REVISION_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    weights_digest: bytes
    tokenizer_digest: bytes
    vision_digest: bytes
    render_revision: str
    def __init__(self, model_id: _Optional[str] = ..., weights_digest: _Optional[bytes] = ..., tokenizer_digest: _Optional[bytes] = ..., vision_digest: _Optional[bytes] = ..., render_revision: _Optional[str] = ...) -> None: ...

class ComponentFormat(_message.Message):
    __slots__ = ("kind", "layout", "bytes_per_token", "bytes_fixed", "positions", "unit_align", "layers")
    KIND_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIXED_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    UNIT_ALIGN_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    kind: ComponentKind
    layout: RecordLayout
    bytes_per_token: int
    bytes_fixed: int
    positions: int
    unit_align: int
    layers: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, kind: _Optional[_Union[ComponentKind, str]] = ..., layout: _Optional[_Union[RecordLayout, str]] = ..., bytes_per_token: _Optional[int] = ..., bytes_fixed: _Optional[int] = ..., positions: _Optional[int] = ..., unit_align: _Optional[int] = ..., layers: _Optional[_Iterable[int]] = ...) -> None: ...

class KvFormat(_message.Message):
    __slots__ = ("block_tokens", "components", "fingerprint")
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPONENTS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    block_tokens: int
    components: _containers.RepeatedCompositeFieldContainer[ComponentFormat]
    fingerprint: bytes
    def __init__(self, block_tokens: _Optional[int] = ..., components: _Optional[_Iterable[_Union[ComponentFormat, _Mapping]]] = ..., fingerprint: _Optional[bytes] = ...) -> None: ...

class Extent(_message.Message):
    __slots__ = ("offset", "length")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    offset: int
    length: int
    def __init__(self, offset: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...

class RegionRef(_message.Message):
    __slots__ = ("rdma", "shm", "stream", "object", "peer", "extents")
    RDMA_FIELD_NUMBER: _ClassVar[int]
    SHM_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    OBJECT_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    EXTENTS_FIELD_NUMBER: _ClassVar[int]
    rdma: RdmaRegion
    shm: ShmRegion
    stream: StreamRegion
    object: ObjectRegion
    peer: PeerRegion
    extents: _containers.RepeatedCompositeFieldContainer[Extent]
    def __init__(self, rdma: _Optional[_Union[RdmaRegion, _Mapping]] = ..., shm: _Optional[_Union[ShmRegion, _Mapping]] = ..., stream: _Optional[_Union[StreamRegion, _Mapping]] = ..., object: _Optional[_Union[ObjectRegion, _Mapping]] = ..., peer: _Optional[_Union[PeerRegion, _Mapping]] = ..., extents: _Optional[_Iterable[_Union[Extent, _Mapping]]] = ...) -> None: ...

class RdmaRegion(_message.Message):
    __slots__ = ("backend", "agent", "base", "key", "device", "rail")
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    AGENT_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    RAIL_FIELD_NUMBER: _ClassVar[int]
    backend: str
    agent: bytes
    base: int
    key: bytes
    device: int
    rail: int
    def __init__(self, backend: _Optional[str] = ..., agent: _Optional[bytes] = ..., base: _Optional[int] = ..., key: _Optional[bytes] = ..., device: _Optional[int] = ..., rail: _Optional[int] = ...) -> None: ...

class ShmRegion(_message.Message):
    __slots__ = ("handle", "host_id")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    handle: str
    host_id: str
    def __init__(self, handle: _Optional[str] = ..., host_id: _Optional[str] = ...) -> None: ...

class StreamRegion(_message.Message):
    __slots__ = ("endpoint", "token")
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    endpoint: str
    token: bytes
    def __init__(self, endpoint: _Optional[str] = ..., token: _Optional[bytes] = ...) -> None: ...

class PeerRegion(_message.Message):
    __slots__ = ("kind", "endpoint", "key", "piece_bytes")
    KIND_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    PIECE_BYTES_FIELD_NUMBER: _ClassVar[int]
    kind: str
    endpoint: str
    key: bytes
    piece_bytes: int
    def __init__(self, kind: _Optional[str] = ..., endpoint: _Optional[str] = ..., key: _Optional[bytes] = ..., piece_bytes: _Optional[int] = ...) -> None: ...

class ObjectRegion(_message.Message):
    __slots__ = ("uri", "etag")
    URI_FIELD_NUMBER: _ClassVar[int]
    ETAG_FIELD_NUMBER: _ClassVar[int]
    uri: str
    etag: bytes
    def __init__(self, uri: _Optional[str] = ..., etag: _Optional[bytes] = ...) -> None: ...

class Lease(_message.Message):
    __slots__ = ("lease_id", "owner_epoch", "fence", "ttl")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    OWNER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    lease_id: bytes
    owner_epoch: int
    fence: int
    ttl: _duration_pb2.Duration
    def __init__(self, lease_id: _Optional[bytes] = ..., owner_epoch: _Optional[int] = ..., fence: _Optional[int] = ..., ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class ServingError(_message.Message):
    __slots__ = ("reason", "retry", "phase", "retry_after", "rows_computed", "image_index", "public_message", "operator_detail")
    REASON_FIELD_NUMBER: _ClassVar[int]
    RETRY_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_FIELD_NUMBER: _ClassVar[int]
    ROWS_COMPUTED_FIELD_NUMBER: _ClassVar[int]
    IMAGE_INDEX_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    OPERATOR_DETAIL_FIELD_NUMBER: _ClassVar[int]
    reason: ErrorReason
    retry: RetryScope
    phase: Phase
    retry_after: _duration_pb2.Duration
    rows_computed: int
    image_index: int
    public_message: str
    operator_detail: str
    def __init__(self, reason: _Optional[_Union[ErrorReason, str]] = ..., retry: _Optional[_Union[RetryScope, str]] = ..., phase: _Optional[_Union[Phase, str]] = ..., retry_after: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., rows_computed: _Optional[int] = ..., image_index: _Optional[int] = ..., public_message: _Optional[str] = ..., operator_detail: _Optional[str] = ...) -> None: ...
