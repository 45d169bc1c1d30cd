import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SessionRequest(_message.Message):
    __slots__ = ("hello", "attached", "beat", "abandon", "urge")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    ABANDON_FIELD_NUMBER: _ClassVar[int]
    URGE_FIELD_NUMBER: _ClassVar[int]
    hello: SessionHello
    attached: SessionAttached
    beat: SessionBeat
    abandon: SessionAbandon
    urge: SessionUrge
    def __init__(self, hello: _Optional[_Union[SessionHello, _Mapping]] = ..., attached: _Optional[_Union[SessionAttached, _Mapping]] = ..., beat: _Optional[_Union[SessionBeat, _Mapping]] = ..., abandon: _Optional[_Union[SessionAbandon, _Mapping]] = ..., urge: _Optional[_Union[SessionUrge, _Mapping]] = ...) -> None: ...

class SessionHello(_message.Message):
    __slots__ = ("protocol", "engine_id", "rank", "owner_epoch", "geometry", "snapshot_bytes", "held_leases")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    OWNER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    GEOMETRY_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    HELD_LEASES_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    engine_id: str
    rank: int
    owner_epoch: int
    geometry: BlockGeometry
    snapshot_bytes: int
    held_leases: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, protocol: _Optional[int] = ..., engine_id: _Optional[str] = ..., rank: _Optional[int] = ..., owner_epoch: _Optional[int] = ..., geometry: _Optional[_Union[BlockGeometry, _Mapping]] = ..., snapshot_bytes: _Optional[int] = ..., held_leases: _Optional[_Iterable[int]] = ...) -> None: ...

class BlockGeometry(_message.Message):
    __slots__ = ("layout_digest", "header_bytes", "payload_bytes", "record_bytes", "group_bytes")
    LAYOUT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    HEADER_BYTES_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    RECORD_BYTES_FIELD_NUMBER: _ClassVar[int]
    GROUP_BYTES_FIELD_NUMBER: _ClassVar[int]
    layout_digest: bytes
    header_bytes: int
    payload_bytes: int
    record_bytes: int
    group_bytes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, layout_digest: _Optional[bytes] = ..., header_bytes: _Optional[int] = ..., payload_bytes: _Optional[int] = ..., record_bytes: _Optional[int] = ..., group_bytes: _Optional[_Iterable[int]] = ...) -> None: ...

class SessionAttached(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SessionBeat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SessionAbandon(_message.Message):
    __slots__ = ("call_ids",)
    CALL_IDS_FIELD_NUMBER: _ClassVar[int]
    call_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, call_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class SessionUrge(_message.Message):
    __slots__ = ("lease_ids",)
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    lease_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, lease_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class SessionResponse(_message.Message):
    __slots__ = ("welcome", "ready", "notice")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    NOTICE_FIELD_NUMBER: _ClassVar[int]
    welcome: SessionWelcome
    ready: SessionReady
    notice: SessionNotice
    def __init__(self, welcome: _Optional[_Union[SessionWelcome, _Mapping]] = ..., ready: _Optional[_Union[SessionReady, _Mapping]] = ..., notice: _Optional[_Union[SessionNotice, _Mapping]] = ...) -> None: ...

class SessionWelcome(_message.Message):
    __slots__ = ("protocol", "kvd_epoch", "pool_path", "nonce", "adopted_leases", "echo_index")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    KVD_EPOCH_FIELD_NUMBER: _ClassVar[int]
    POOL_PATH_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    ADOPTED_LEASES_FIELD_NUMBER: _ClassVar[int]
    ECHO_INDEX_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    kvd_epoch: int
    pool_path: str
    nonce: bytes
    adopted_leases: _containers.RepeatedScalarFieldContainer[int]
    echo_index: int
    def __init__(self, protocol: _Optional[int] = ..., kvd_epoch: _Optional[int] = ..., pool_path: _Optional[str] = ..., nonce: _Optional[bytes] = ..., adopted_leases: _Optional[_Iterable[int]] = ..., echo_index: _Optional[int] = ...) -> None: ...

class SessionReady(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SessionNotice(_message.Message):
    __slots__ = ("store_ok", "transport", "draining")
    STORE_OK_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    store_ok: bool
    transport: str
    draining: bool
    def __init__(self, store_ok: _Optional[bool] = ..., transport: _Optional[str] = ..., draining: _Optional[bool] = ...) -> None: ...

class OpenRequest(_message.Message):
    __slots__ = ("owner_epoch", "attempt_id", "keys", "resident_blocks", "tenant", "want_snapshot", "limit", "refuse_replayed", "step_waits", "call_id")
    OWNER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    WANT_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    REFUSE_REPLAYED_FIELD_NUMBER: _ClassVar[int]
    STEP_WAITS_FIELD_NUMBER: _ClassVar[int]
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    owner_epoch: int
    attempt_id: bytes
    keys: bytes
    resident_blocks: int
    tenant: str
    want_snapshot: bool
    limit: _duration_pb2.Duration
    refuse_replayed: bool
    step_waits: bool
    call_id: int
    def __init__(self, owner_epoch: _Optional[int] = ..., attempt_id: _Optional[bytes] = ..., keys: _Optional[bytes] = ..., resident_blocks: _Optional[int] = ..., tenant: _Optional[str] = ..., want_snapshot: _Optional[bool] = ..., limit: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., refuse_replayed: _Optional[bool] = ..., step_waits: _Optional[bool] = ..., call_id: _Optional[int] = ...) -> None: ...

class OpenResponse(_message.Message):
    __slots__ = ("lease_id", "lease_row", "found_blocks", "slots", "snapshot", "snapshot_slot", "shrunk_blocks", "retry_after")
    class Snapshot(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        SNAPSHOT_UNSPECIFIED: _ClassVar[OpenResponse.Snapshot]
        NONE: _ClassVar[OpenResponse.Snapshot]
        HELD: _ClassVar[OpenResponse.Snapshot]
        PULLING: _ClassVar[OpenResponse.Snapshot]
    SNAPSHOT_UNSPECIFIED: OpenResponse.Snapshot
    NONE: OpenResponse.Snapshot
    HELD: OpenResponse.Snapshot
    PULLING: OpenResponse.Snapshot
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_ROW_FIELD_NUMBER: _ClassVar[int]
    FOUND_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_SLOT_FIELD_NUMBER: _ClassVar[int]
    SHRUNK_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    lease_row: int
    found_blocks: int
    slots: _containers.RepeatedScalarFieldContainer[int]
    snapshot: OpenResponse.Snapshot
    snapshot_slot: int
    shrunk_blocks: int
    retry_after: _duration_pb2.Duration
    def __init__(self, lease_id: _Optional[int] = ..., lease_row: _Optional[int] = ..., found_blocks: _Optional[int] = ..., slots: _Optional[_Iterable[int]] = ..., snapshot: _Optional[_Union[OpenResponse.Snapshot, str]] = ..., snapshot_slot: _Optional[int] = ..., shrunk_blocks: _Optional[int] = ..., retry_after: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class ReserveSlotsRequest(_message.Message):
    __slots__ = ("owner_epoch", "attempt_id", "num_blocks", "num_snapshots", "tenant", "call_id")
    OWNER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    owner_epoch: int
    attempt_id: bytes
    num_blocks: int
    num_snapshots: int
    tenant: str
    call_id: int
    def __init__(self, owner_epoch: _Optional[int] = ..., attempt_id: _Optional[bytes] = ..., num_blocks: _Optional[int] = ..., num_snapshots: _Optional[int] = ..., tenant: _Optional[str] = ..., call_id: _Optional[int] = ...) -> None: ...

class ReserveSlotsResponse(_message.Message):
    __slots__ = ("reservation_id", "slots", "snapshot_slots")
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_SLOTS_FIELD_NUMBER: _ClassVar[int]
    reservation_id: int
    slots: _containers.RepeatedScalarFieldContainer[int]
    snapshot_slots: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, reservation_id: _Optional[int] = ..., slots: _Optional[_Iterable[int]] = ..., snapshot_slots: _Optional[_Iterable[int]] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("reservation_id", "blocks", "snapshots", "tenant")
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    reservation_id: int
    blocks: _containers.RepeatedCompositeFieldContainer[CommitBlock]
    snapshots: _containers.RepeatedCompositeFieldContainer[CommitSnapshot]
    tenant: str
    def __init__(self, reservation_id: _Optional[int] = ..., blocks: _Optional[_Iterable[_Union[CommitBlock, _Mapping]]] = ..., snapshots: _Optional[_Iterable[_Union[CommitSnapshot, _Mapping]]] = ..., tenant: _Optional[str] = ...) -> None: ...

class CommitBlock(_message.Message):
    __slots__ = ("key", "slot")
    KEY_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    slot: int
    def __init__(self, key: _Optional[bytes] = ..., slot: _Optional[int] = ...) -> None: ...

class CommitSnapshot(_message.Message):
    __slots__ = ("key", "slot")
    KEY_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    slot: int
    def __init__(self, key: _Optional[bytes] = ..., slot: _Optional[int] = ...) -> None: ...

class CommitResponse(_message.Message):
    __slots__ = ("stored_blocks", "held_snapshots", "failure")
    STORED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HELD_SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    stored_blocks: int
    held_snapshots: int
    failure: str
    def __init__(self, stored_blocks: _Optional[int] = ..., held_snapshots: _Optional[int] = ..., failure: _Optional[str] = ...) -> None: ...

class TruncateRequest(_message.Message):
    __slots__ = ("lease_id", "num_blocks", "drop_snapshot")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DROP_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    num_blocks: int
    drop_snapshot: bool
    def __init__(self, lease_id: _Optional[int] = ..., num_blocks: _Optional[int] = ..., drop_snapshot: _Optional[bool] = ...) -> None: ...

class TruncateResponse(_message.Message):
    __slots__ = ("known",)
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    known: bool
    def __init__(self, known: _Optional[bool] = ...) -> None: ...

class CloseRequest(_message.Message):
    __slots__ = ("lease_ids", "reservation_ids")
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_IDS_FIELD_NUMBER: _ClassVar[int]
    lease_ids: _containers.RepeatedScalarFieldContainer[int]
    reservation_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, lease_ids: _Optional[_Iterable[int]] = ..., reservation_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class CloseResponse(_message.Message):
    __slots__ = ("unknown",)
    UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    unknown: int
    def __init__(self, unknown: _Optional[int] = ...) -> None: ...
