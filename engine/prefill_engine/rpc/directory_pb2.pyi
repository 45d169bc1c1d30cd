import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Holder(_message.Message):
    __slots__ = ("holder_id", "epoch", "endpoint", "zone", "transports")
    HOLDER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    ZONE_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    holder_id: str
    epoch: int
    endpoint: str
    zone: str
    transports: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, holder_id: _Optional[str] = ..., epoch: _Optional[int] = ..., endpoint: _Optional[str] = ..., zone: _Optional[str] = ..., transports: _Optional[_Iterable[str]] = ...) -> None: ...

class JoinRequest(_message.Message):
    __slots__ = ("holder",)
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    holder: Holder
    def __init__(self, holder: _Optional[_Union[Holder, _Mapping]] = ...) -> None: ...

class JoinResponse(_message.Message):
    __slots__ = ("heartbeat", "expiry", "directory_epoch")
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    EXPIRY_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_EPOCH_FIELD_NUMBER: _ClassVar[int]
    heartbeat: _duration_pb2.Duration
    expiry: _duration_pb2.Duration
    directory_epoch: int
    def __init__(self, heartbeat: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., expiry: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., directory_epoch: _Optional[int] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("holder_id", "epoch", "num_snapshots")
    HOLDER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUM_SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    holder_id: str
    epoch: int
    num_snapshots: int
    def __init__(self, holder_id: _Optional[str] = ..., epoch: _Optional[int] = ..., num_snapshots: _Optional[int] = ...) -> None: ...

class HeartbeatResponse(_message.Message):
    __slots__ = ("resync", "fenced")
    RESYNC_FIELD_NUMBER: _ClassVar[int]
    FENCED_FIELD_NUMBER: _ClassVar[int]
    resync: bool
    fenced: bool
    def __init__(self, resync: _Optional[bool] = ..., fenced: _Optional[bool] = ...) -> None: ...

class PublishSnapshotsRequest(_message.Message):
    __slots__ = ("holder_id", "epoch", "keys")
    HOLDER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    holder_id: str
    epoch: int
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, holder_id: _Optional[str] = ..., epoch: _Optional[int] = ..., keys: _Optional[_Iterable[bytes]] = ...) -> None: ...

class PublishSnapshotsResponse(_message.Message):
    __slots__ = ("fenced",)
    FENCED_FIELD_NUMBER: _ClassVar[int]
    fenced: bool
    def __init__(self, fenced: _Optional[bool] = ...) -> None: ...

class WithdrawSnapshotsRequest(_message.Message):
    __slots__ = ("holder_id", "epoch", "keys", "all")
    HOLDER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    ALL_FIELD_NUMBER: _ClassVar[int]
    holder_id: str
    epoch: int
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    all: bool
    def __init__(self, holder_id: _Optional[str] = ..., epoch: _Optional[int] = ..., keys: _Optional[_Iterable[bytes]] = ..., all: _Optional[bool] = ...) -> None: ...

class WithdrawSnapshotsResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Segment(_message.Message):
    __slots__ = ("name", "layout_id", "keys")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    name: str
    layout_id: bytes
    keys: bytes
    def __init__(self, name: _Optional[str] = ..., layout_id: _Optional[bytes] = ..., keys: _Optional[bytes] = ...) -> None: ...

class PublishSegmentRequest(_message.Message):
    __slots__ = ("store_id", "segments")
    STORE_ID_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    store_id: str
    segments: _containers.RepeatedCompositeFieldContainer[Segment]
    def __init__(self, store_id: _Optional[str] = ..., segments: _Optional[_Iterable[_Union[Segment, _Mapping]]] = ...) -> None: ...

class PublishSegmentResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WithdrawSegmentRequest(_message.Message):
    __slots__ = ("store_id", "names")
    STORE_ID_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    store_id: str
    names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, store_id: _Optional[str] = ..., names: _Optional[_Iterable[str]] = ...) -> None: ...

class WithdrawSegmentResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LookupBlocksRequest(_message.Message):
    __slots__ = ("store_id", "layout_id", "keys")
    STORE_ID_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    store_id: str
    layout_id: bytes
    keys: bytes
    def __init__(self, store_id: _Optional[str] = ..., layout_id: _Optional[bytes] = ..., keys: _Optional[bytes] = ...) -> None: ...

class LookupBlocksResponse(_message.Message):
    __slots__ = ("runs",)
    RUNS_FIELD_NUMBER: _ClassVar[int]
    runs: _containers.RepeatedCompositeFieldContainer[BlockRun]
    def __init__(self, runs: _Optional[_Iterable[_Union[BlockRun, _Mapping]]] = ...) -> None: ...

class BlockRun(_message.Message):
    __slots__ = ("segment", "first_record", "num_records")
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    FIRST_RECORD_FIELD_NUMBER: _ClassVar[int]
    NUM_RECORDS_FIELD_NUMBER: _ClassVar[int]
    segment: str
    first_record: int
    num_records: int
    def __init__(self, segment: _Optional[str] = ..., first_record: _Optional[int] = ..., num_records: _Optional[int] = ...) -> None: ...

class LookupSnapshotsRequest(_message.Message):
    __slots__ = ("keys", "prefer_zone")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    PREFER_ZONE_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    prefer_zone: str
    def __init__(self, keys: _Optional[_Iterable[bytes]] = ..., prefer_zone: _Optional[str] = ...) -> None: ...

class LookupSnapshotsResponse(_message.Message):
    __slots__ = ("locations",)
    LOCATIONS_FIELD_NUMBER: _ClassVar[int]
    locations: _containers.RepeatedCompositeFieldContainer[SnapshotLocation]
    def __init__(self, locations: _Optional[_Iterable[_Union[SnapshotLocation, _Mapping]]] = ...) -> None: ...

class SnapshotLocation(_message.Message):
    __slots__ = ("key", "holder")
    KEY_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    holder: Holder
    def __init__(self, key: _Optional[bytes] = ..., holder: _Optional[_Union[Holder, _Mapping]] = ...) -> None: ...
