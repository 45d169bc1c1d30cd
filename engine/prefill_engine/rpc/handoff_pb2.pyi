import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from prefill_engine.rpc import common_pb2 as _common_pb2
from prefill_engine.rpc import prefill_pb2 as _prefill_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HelloRequest(_message.Message):
    __slots__ = ("protocol_min", "protocol_max", "engine_id", "epoch", "readable", "transports", "agent")
    PROTOCOL_MIN_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_MAX_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    READABLE_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    AGENT_FIELD_NUMBER: _ClassVar[int]
    protocol_min: int
    protocol_max: int
    engine_id: str
    epoch: int
    readable: _containers.RepeatedCompositeFieldContainer[_common_pb2.KvFormat]
    transports: _containers.RepeatedScalarFieldContainer[str]
    agent: bytes
    def __init__(self, protocol_min: _Optional[int] = ..., protocol_max: _Optional[int] = ..., engine_id: _Optional[str] = ..., epoch: _Optional[int] = ..., readable: _Optional[_Iterable[_Union[_common_pb2.KvFormat, _Mapping]]] = ..., transports: _Optional[_Iterable[str]] = ..., agent: _Optional[bytes] = ...) -> None: ...

class HelloResponse(_message.Message):
    __slots__ = ("protocol", "engine_id", "epoch", "chosen", "transport", "agent", "renew_every")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    AGENT_FIELD_NUMBER: _ClassVar[int]
    RENEW_EVERY_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    engine_id: str
    epoch: int
    chosen: _common_pb2.KvFormat
    transport: str
    agent: bytes
    renew_every: _duration_pb2.Duration
    def __init__(self, protocol: _Optional[int] = ..., engine_id: _Optional[str] = ..., epoch: _Optional[int] = ..., chosen: _Optional[_Union[_common_pb2.KvFormat, _Mapping]] = ..., transport: _Optional[str] = ..., agent: _Optional[bytes] = ..., renew_every: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class ClaimTicketRequest(_message.Message):
    __slots__ = ("ticket_id", "engine_id", "epoch", "format_fingerprint", "transports")
    TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    ticket_id: bytes
    engine_id: str
    epoch: int
    format_fingerprint: bytes
    transports: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, ticket_id: _Optional[bytes] = ..., engine_id: _Optional[str] = ..., epoch: _Optional[int] = ..., format_fingerprint: _Optional[bytes] = ..., transports: _Optional[_Iterable[str]] = ...) -> None: ...

class ClaimTicketResponse(_message.Message):
    __slots__ = ("ticket", "first_token", "claim_id", "checksums")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    CLAIM_ID_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    ticket: _prefill_pb2.Ticket
    first_token: _prefill_pb2.FirstToken
    claim_id: bytes
    checksums: _containers.RepeatedCompositeFieldContainer[ComponentChecksum]
    def __init__(self, ticket: _Optional[_Union[_prefill_pb2.Ticket, _Mapping]] = ..., first_token: _Optional[_Union[_prefill_pb2.FirstToken, _Mapping]] = ..., claim_id: _Optional[bytes] = ..., checksums: _Optional[_Iterable[_Union[ComponentChecksum, _Mapping]]] = ...) -> None: ...

class ComponentChecksum(_message.Message):
    __slots__ = ("kind", "value")
    KIND_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    kind: _common_pb2.ComponentKind
    value: bytes
    def __init__(self, kind: _Optional[_Union[_common_pb2.ComponentKind, str]] = ..., value: _Optional[bytes] = ...) -> None: ...

class RenewTicketsRequest(_message.Message):
    __slots__ = ("engine_id", "ticket_ids")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    TICKET_IDS_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    ticket_ids: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, engine_id: _Optional[str] = ..., ticket_ids: _Optional[_Iterable[bytes]] = ...) -> None: ...

class RenewTicketsResponse(_message.Message):
    __slots__ = ("lost", "source_epoch")
    LOST_FIELD_NUMBER: _ClassVar[int]
    SOURCE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    lost: _containers.RepeatedScalarFieldContainer[bytes]
    source_epoch: int
    def __init__(self, lost: _Optional[_Iterable[bytes]] = ..., source_epoch: _Optional[int] = ...) -> None: ...

class SettleRequest(_message.Message):
    __slots__ = ("ticket_id", "claim_id", "delivered", "failure", "bytes", "took")
    TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    CLAIM_ID_FIELD_NUMBER: _ClassVar[int]
    DELIVERED_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    TOOK_FIELD_NUMBER: _ClassVar[int]
    ticket_id: bytes
    claim_id: bytes
    delivered: bool
    failure: _common_pb2.ServingError
    bytes: int
    took: _duration_pb2.Duration
    def __init__(self, ticket_id: _Optional[bytes] = ..., claim_id: _Optional[bytes] = ..., delivered: _Optional[bool] = ..., failure: _Optional[_Union[_common_pb2.ServingError, _Mapping]] = ..., bytes: _Optional[int] = ..., took: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class SettleResponse(_message.Message):
    __slots__ = ("still_owned",)
    STILL_OWNED_FIELD_NUMBER: _ClassVar[int]
    still_owned: bool
    def __init__(self, still_owned: _Optional[bool] = ...) -> None: ...

class AbortTicketRequest(_message.Message):
    __slots__ = ("ticket_id", "generation", "reason")
    TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ticket_id: bytes
    generation: int
    reason: str
    def __init__(self, ticket_id: _Optional[bytes] = ..., generation: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class AbortTicketResponse(_message.Message):
    __slots__ = ("drained", "generation", "known")
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    drained: bool
    generation: int
    known: bool
    def __init__(self, drained: _Optional[bool] = ..., generation: _Optional[int] = ..., known: _Optional[bool] = ...) -> None: ...

class ReadKvRequest(_message.Message):
    __slots__ = ("ticket_id", "claim_id", "kind", "offset")
    TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    CLAIM_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    ticket_id: bytes
    claim_id: bytes
    kind: _common_pb2.ComponentKind
    offset: int
    def __init__(self, ticket_id: _Optional[bytes] = ..., claim_id: _Optional[bytes] = ..., kind: _Optional[_Union[_common_pb2.ComponentKind, str]] = ..., offset: _Optional[int] = ...) -> None: ...

class KvBytes(_message.Message):
    __slots__ = ("kind", "offset", "data", "last", "crc32c")
    KIND_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    kind: _common_pb2.ComponentKind
    offset: int
    data: bytes
    last: bool
    crc32c: int
    def __init__(self, kind: _Optional[_Union[_common_pb2.ComponentKind, str]] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ..., last: _Optional[bool] = ..., crc32c: _Optional[int] = ...) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("key", "kv_tokens", "format_fingerprint", "ttl", "hold_slot", "grant_id")
    KEY_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    HOLD_SLOT_FIELD_NUMBER: _ClassVar[int]
    GRANT_ID_FIELD_NUMBER: _ClassVar[int]
    key: _common_pb2.AttemptKey
    kv_tokens: int
    format_fingerprint: bytes
    ttl: _duration_pb2.Duration
    hold_slot: bool
    grant_id: bytes
    def __init__(self, key: _Optional[_Union[_common_pb2.AttemptKey, _Mapping]] = ..., kv_tokens: _Optional[int] = ..., format_fingerprint: _Optional[bytes] = ..., ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., hold_slot: _Optional[bool] = ..., grant_id: _Optional[bytes] = ...) -> None: ...

class ReserveResponse(_message.Message):
    __slots__ = ("grant_id", "target", "already_cached_tokens")
    GRANT_ID_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    ALREADY_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    grant_id: bytes
    target: _prefill_pb2.PushTarget
    already_cached_tokens: int
    def __init__(self, grant_id: _Optional[bytes] = ..., target: _Optional[_Union[_prefill_pb2.PushTarget, _Mapping]] = ..., already_cached_tokens: _Optional[int] = ...) -> None: ...

class OfferRequest(_message.Message):
    __slots__ = ("key", "grant_id", "ticket", "first_token", "data_landed", "checksums")
    KEY_FIELD_NUMBER: _ClassVar[int]
    GRANT_ID_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    DATA_LANDED_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    key: _common_pb2.AttemptKey
    grant_id: bytes
    ticket: _prefill_pb2.Ticket
    first_token: _prefill_pb2.FirstToken
    data_landed: bool
    checksums: _containers.RepeatedCompositeFieldContainer[ComponentChecksum]
    def __init__(self, key: _Optional[_Union[_common_pb2.AttemptKey, _Mapping]] = ..., grant_id: _Optional[bytes] = ..., ticket: _Optional[_Union[_prefill_pb2.Ticket, _Mapping]] = ..., first_token: _Optional[_Union[_prefill_pb2.FirstToken, _Mapping]] = ..., data_landed: _Optional[bool] = ..., checksums: _Optional[_Iterable[_Union[ComponentChecksum, _Mapping]]] = ...) -> None: ...

class OfferResponse(_message.Message):
    __slots__ = ("verdict",)
    class Verdict(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        VERDICT_UNSPECIFIED: _ClassVar[OfferResponse.Verdict]
        ACCEPTED: _ClassVar[OfferResponse.Verdict]
        DUPLICATE: _ClassVar[OfferResponse.Verdict]
        REFUSED_EXPIRED: _ClassVar[OfferResponse.Verdict]
        REFUSED_BUSY: _ClassVar[OfferResponse.Verdict]
        REFUSED_FORMAT: _ClassVar[OfferResponse.Verdict]
        REFUSED_CHECKSUM: _ClassVar[OfferResponse.Verdict]
    VERDICT_UNSPECIFIED: OfferResponse.Verdict
    ACCEPTED: OfferResponse.Verdict
    DUPLICATE: OfferResponse.Verdict
    REFUSED_EXPIRED: OfferResponse.Verdict
    REFUSED_BUSY: OfferResponse.Verdict
    REFUSED_FORMAT: OfferResponse.Verdict
    REFUSED_CHECKSUM: OfferResponse.Verdict
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    verdict: OfferResponse.Verdict
    def __init__(self, verdict: _Optional[_Union[OfferResponse.Verdict, str]] = ...) -> None: ...

class AbandonRequest(_message.Message):
    __slots__ = ("grant_id", "generation", "writes_drained", "why")
    GRANT_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    WRITES_DRAINED_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    grant_id: bytes
    generation: int
    writes_drained: bool
    why: _common_pb2.ServingError
    def __init__(self, grant_id: _Optional[bytes] = ..., generation: _Optional[int] = ..., writes_drained: _Optional[bool] = ..., why: _Optional[_Union[_common_pb2.ServingError, _Mapping]] = ...) -> None: ...

class AbandonResponse(_message.Message):
    __slots__ = ("released",)
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    released: bool
    def __init__(self, released: _Optional[bool] = ...) -> None: ...
