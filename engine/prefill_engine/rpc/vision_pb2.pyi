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

class EncodeRequest(_message.Message):
    __slots__ = ("item_id", "parent", "tenant", "vision_digest", "data", "shm", "object", "width", "height", "tokens", "content_key", "policy", "delivery", "traceparent", "time_left")
    ITEM_ID_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    VISION_DIGEST_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    SHM_FIELD_NUMBER: _ClassVar[int]
    OBJECT_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CONTENT_KEY_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    DELIVERY_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    TIME_LEFT_FIELD_NUMBER: _ClassVar[int]
    item_id: bytes
    parent: _common_pb2.AttemptKey
    tenant: _common_pb2.TenantContext
    vision_digest: bytes
    data: bytes
    shm: _common_pb2.ShmRegion
    object: _common_pb2.ObjectRegion
    width: int
    height: int
    tokens: int
    content_key: bytes
    policy: PixelPolicy
    delivery: Delivery
    traceparent: str
    time_left: _duration_pb2.Duration
    def __init__(self, item_id: _Optional[bytes] = ..., parent: _Optional[_Union[_common_pb2.AttemptKey, _Mapping]] = ..., tenant: _Optional[_Union[_common_pb2.TenantContext, _Mapping]] = ..., vision_digest: _Optional[bytes] = ..., data: _Optional[bytes] = ..., shm: _Optional[_Union[_common_pb2.ShmRegion, _Mapping]] = ..., object: _Optional[_Union[_common_pb2.ObjectRegion, _Mapping]] = ..., width: _Optional[int] = ..., height: _Optional[int] = ..., tokens: _Optional[int] = ..., content_key: _Optional[bytes] = ..., policy: _Optional[_Union[PixelPolicy, _Mapping]] = ..., delivery: _Optional[_Union[Delivery, _Mapping]] = ..., traceparent: _Optional[str] = ..., time_left: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class PixelPolicy(_message.Message):
    __slots__ = ("apply_exif_orientation", "background_rgb", "first_frame_of_animation", "max_pixels", "max_side", "max_bytes")
    APPLY_EXIF_ORIENTATION_FIELD_NUMBER: _ClassVar[int]
    BACKGROUND_RGB_FIELD_NUMBER: _ClassVar[int]
    FIRST_FRAME_OF_ANIMATION_FIELD_NUMBER: _ClassVar[int]
    MAX_PIXELS_FIELD_NUMBER: _ClassVar[int]
    MAX_SIDE_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    apply_exif_orientation: bool
    background_rgb: int
    first_frame_of_animation: bool
    max_pixels: int
    max_side: int
    max_bytes: int
    def __init__(self, apply_exif_orientation: _Optional[bool] = ..., background_rgb: _Optional[int] = ..., first_frame_of_animation: _Optional[bool] = ..., max_pixels: _Optional[int] = ..., max_side: _Optional[int] = ..., max_bytes: _Optional[int] = ...) -> None: ...

class Delivery(_message.Message):
    __slots__ = ("mode", "push", "hold")
    class Mode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        MODE_UNSPECIFIED: _ClassVar[Delivery.Mode]
        PULL: _ClassVar[Delivery.Mode]
        PUSH: _ClassVar[Delivery.Mode]
        INLINE: _ClassVar[Delivery.Mode]
    MODE_UNSPECIFIED: Delivery.Mode
    PULL: Delivery.Mode
    PUSH: Delivery.Mode
    INLINE: Delivery.Mode
    MODE_FIELD_NUMBER: _ClassVar[int]
    PUSH_FIELD_NUMBER: _ClassVar[int]
    HOLD_FIELD_NUMBER: _ClassVar[int]
    mode: Delivery.Mode
    push: _common_pb2.RegionRef
    hold: _duration_pb2.Duration
    def __init__(self, mode: _Optional[_Union[Delivery.Mode, str]] = ..., push: _Optional[_Union[_common_pb2.RegionRef, _Mapping]] = ..., hold: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class EncodeResult(_message.Message):
    __slots__ = ("item_id", "image", "error")
    ITEM_ID_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    item_id: bytes
    image: EncodedImage
    error: _common_pb2.ServingError
    def __init__(self, item_id: _Optional[bytes] = ..., image: _Optional[_Union[EncodedImage, _Mapping]] = ..., error: _Optional[_Union[_common_pb2.ServingError, _Mapping]] = ...) -> None: ...

class EncodedImage(_message.Message):
    __slots__ = ("tokens", "columns", "grid_h", "grid_w", "patches", "dtype", "ticket_id", "region", "lease", "checksum", "from_cache", "queued", "preprocess", "gpu", "inline_rows", "content_key", "final_width", "final_height")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    GRID_H_FIELD_NUMBER: _ClassVar[int]
    GRID_W_FIELD_NUMBER: _ClassVar[int]
    PATCHES_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    FROM_CACHE_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    PREPROCESS_FIELD_NUMBER: _ClassVar[int]
    GPU_FIELD_NUMBER: _ClassVar[int]
    INLINE_ROWS_FIELD_NUMBER: _ClassVar[int]
    CONTENT_KEY_FIELD_NUMBER: _ClassVar[int]
    FINAL_WIDTH_FIELD_NUMBER: _ClassVar[int]
    FINAL_HEIGHT_FIELD_NUMBER: _ClassVar[int]
    tokens: int
    columns: int
    grid_h: int
    grid_w: int
    patches: int
    dtype: str
    ticket_id: bytes
    region: _common_pb2.RegionRef
    lease: _common_pb2.Lease
    checksum: bytes
    from_cache: bool
    queued: _duration_pb2.Duration
    preprocess: _duration_pb2.Duration
    gpu: _duration_pb2.Duration
    inline_rows: bytes
    content_key: bytes
    final_width: int
    final_height: int
    def __init__(self, tokens: _Optional[int] = ..., columns: _Optional[int] = ..., grid_h: _Optional[int] = ..., grid_w: _Optional[int] = ..., patches: _Optional[int] = ..., dtype: _Optional[str] = ..., ticket_id: _Optional[bytes] = ..., region: _Optional[_Union[_common_pb2.RegionRef, _Mapping]] = ..., lease: _Optional[_Union[_common_pb2.Lease, _Mapping]] = ..., checksum: _Optional[bytes] = ..., from_cache: _Optional[bool] = ..., queued: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., preprocess: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., gpu: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., inline_rows: _Optional[bytes] = ..., content_key: _Optional[bytes] = ..., final_width: _Optional[int] = ..., final_height: _Optional[int] = ...) -> None: ...

class ClaimRequest(_message.Message):
    __slots__ = ("ticket_id", "offset")
    TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    ticket_id: bytes
    offset: int
    def __init__(self, ticket_id: _Optional[bytes] = ..., offset: _Optional[int] = ...) -> None: ...

class EmbeddingBytes(_message.Message):
    __slots__ = ("offset", "data", "last", "crc32c")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    offset: int
    data: bytes
    last: bool
    crc32c: int
    def __init__(self, offset: _Optional[int] = ..., data: _Optional[bytes] = ..., last: _Optional[bool] = ..., crc32c: _Optional[int] = ...) -> None: ...

class RenewHoldRequest(_message.Message):
    __slots__ = ("ticket_ids", "hold")
    TICKET_IDS_FIELD_NUMBER: _ClassVar[int]
    HOLD_FIELD_NUMBER: _ClassVar[int]
    ticket_ids: _containers.RepeatedScalarFieldContainer[bytes]
    hold: _duration_pb2.Duration
    def __init__(self, ticket_ids: _Optional[_Iterable[bytes]] = ..., hold: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class RenewHoldResponse(_message.Message):
    __slots__ = ("lost",)
    LOST_FIELD_NUMBER: _ClassVar[int]
    lost: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, lost: _Optional[_Iterable[bytes]] = ...) -> None: ...

class AckRequest(_message.Message):
    __slots__ = ("ticket_id", "ok")
    TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    OK_FIELD_NUMBER: _ClassVar[int]
    ticket_id: bytes
    ok: bool
    def __init__(self, ticket_id: _Optional[bytes] = ..., ok: _Optional[bool] = ...) -> None: ...

class AckResponse(_message.Message):
    __slots__ = ("released",)
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    released: bool
    def __init__(self, released: _Optional[bool] = ...) -> None: ...

class CancelEncodeRequest(_message.Message):
    __slots__ = ("item_id", "parent_attempt_id")
    ITEM_ID_FIELD_NUMBER: _ClassVar[int]
    PARENT_ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    item_id: bytes
    parent_attempt_id: bytes
    def __init__(self, item_id: _Optional[bytes] = ..., parent_attempt_id: _Optional[bytes] = ...) -> None: ...

class CancelEncodeResponse(_message.Message):
    __slots__ = ("cancelled", "drained")
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    cancelled: int
    drained: bool
    def __init__(self, cancelled: _Optional[int] = ..., drained: _Optional[bool] = ...) -> None: ...

class InspectRequest(_message.Message):
    __slots__ = ("data_head", "total_bytes", "policy")
    DATA_HEAD_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    data_head: bytes
    total_bytes: int
    policy: PixelPolicy
    def __init__(self, data_head: _Optional[bytes] = ..., total_bytes: _Optional[int] = ..., policy: _Optional[_Union[PixelPolicy, _Mapping]] = ...) -> None: ...

class InspectResult(_message.Message):
    __slots__ = ("format", "width", "height", "final_width", "final_height", "tokens", "patches", "animated", "exif_orientation", "error")
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    FINAL_WIDTH_FIELD_NUMBER: _ClassVar[int]
    FINAL_HEIGHT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PATCHES_FIELD_NUMBER: _ClassVar[int]
    ANIMATED_FIELD_NUMBER: _ClassVar[int]
    EXIF_ORIENTATION_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    format: str
    width: int
    height: int
    final_width: int
    final_height: int
    tokens: int
    patches: int
    animated: bool
    exif_orientation: int
    error: _common_pb2.ServingError
    def __init__(self, format: _Optional[str] = ..., width: _Optional[int] = ..., height: _Optional[int] = ..., final_width: _Optional[int] = ..., final_height: _Optional[int] = ..., tokens: _Optional[int] = ..., patches: _Optional[int] = ..., animated: _Optional[bool] = ..., exif_orientation: _Optional[int] = ..., error: _Optional[_Union[_common_pb2.ServingError, _Mapping]] = ...) -> None: ...

class VisionInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class VisionInfo(_message.Message):
    __slots__ = ("vision_digest", "patch", "downsample", "min_pixels", "max_tokens", "columns", "max_patches_per_image", "max_patches_per_step", "epoch", "dtype", "device", "engine_id", "host_id", "max_image_bytes", "model_id", "build", "numerics_class")
    VISION_DIGEST_FIELD_NUMBER: _ClassVar[int]
    PATCH_FIELD_NUMBER: _ClassVar[int]
    DOWNSAMPLE_FIELD_NUMBER: _ClassVar[int]
    MIN_PIXELS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    MAX_PATCHES_PER_IMAGE_FIELD_NUMBER: _ClassVar[int]
    MAX_PATCHES_PER_STEP_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    MAX_IMAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    BUILD_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_CLASS_FIELD_NUMBER: _ClassVar[int]
    vision_digest: bytes
    patch: int
    downsample: int
    min_pixels: int
    max_tokens: int
    columns: int
    max_patches_per_image: int
    max_patches_per_step: int
    epoch: int
    dtype: str
    device: str
    engine_id: str
    host_id: str
    max_image_bytes: int
    model_id: str
    build: str
    numerics_class: str
    def __init__(self, vision_digest: _Optional[bytes] = ..., patch: _Optional[int] = ..., downsample: _Optional[int] = ..., min_pixels: _Optional[int] = ..., max_tokens: _Optional[int] = ..., columns: _Optional[int] = ..., max_patches_per_image: _Optional[int] = ..., max_patches_per_step: _Optional[int] = ..., epoch: _Optional[int] = ..., dtype: _Optional[str] = ..., device: _Optional[str] = ..., engine_id: _Optional[str] = ..., host_id: _Optional[str] = ..., max_image_bytes: _Optional[int] = ..., model_id: _Optional[str] = ..., build: _Optional[str] = ..., numerics_class: _Optional[str] = ...) -> None: ...

class VisionWatchRequest(_message.Message):
    __slots__ = ("period",)
    PERIOD_FIELD_NUMBER: _ClassVar[int]
    period: _duration_pb2.Duration
    def __init__(self, period: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class VisionLoad(_message.Message):
    __slots__ = ("epoch", "seq", "state", "patches_queued", "patches_limit", "images_queued", "images_in_cpu", "a_ms", "b_ms_per_patch", "cache_bytes", "tickets_open", "step_counter", "patches_encoded")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATE_UNSPECIFIED: _ClassVar[VisionLoad.State]
        STARTING: _ClassVar[VisionLoad.State]
        READY: _ClassVar[VisionLoad.State]
        DRAINING: _ClassVar[VisionLoad.State]
        WEDGED: _ClassVar[VisionLoad.State]
    STATE_UNSPECIFIED: VisionLoad.State
    STARTING: VisionLoad.State
    READY: VisionLoad.State
    DRAINING: VisionLoad.State
    WEDGED: VisionLoad.State
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PATCHES_QUEUED_FIELD_NUMBER: _ClassVar[int]
    PATCHES_LIMIT_FIELD_NUMBER: _ClassVar[int]
    IMAGES_QUEUED_FIELD_NUMBER: _ClassVar[int]
    IMAGES_IN_CPU_FIELD_NUMBER: _ClassVar[int]
    A_MS_FIELD_NUMBER: _ClassVar[int]
    B_MS_PER_PATCH_FIELD_NUMBER: _ClassVar[int]
    CACHE_BYTES_FIELD_NUMBER: _ClassVar[int]
    TICKETS_OPEN_FIELD_NUMBER: _ClassVar[int]
    STEP_COUNTER_FIELD_NUMBER: _ClassVar[int]
    PATCHES_ENCODED_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    seq: int
    state: VisionLoad.State
    patches_queued: int
    patches_limit: int
    images_queued: int
    images_in_cpu: int
    a_ms: float
    b_ms_per_patch: float
    cache_bytes: int
    tickets_open: int
    step_counter: int
    patches_encoded: int
    def __init__(self, epoch: _Optional[int] = ..., seq: _Optional[int] = ..., state: _Optional[_Union[VisionLoad.State, str]] = ..., patches_queued: _Optional[int] = ..., patches_limit: _Optional[int] = ..., images_queued: _Optional[int] = ..., images_in_cpu: _Optional[int] = ..., a_ms: _Optional[float] = ..., b_ms_per_patch: _Optional[float] = ..., cache_bytes: _Optional[int] = ..., tickets_open: _Optional[int] = ..., step_counter: _Optional[int] = ..., patches_encoded: _Optional[int] = ...) -> None: ...

class VisionDrainRequest(_message.Message):
    __slots__ = ("deadline",)
    DEADLINE_FIELD_NUMBER: _ClassVar[int]
    deadline: _duration_pb2.Duration
    def __init__(self, deadline: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class VisionDrainStatus(_message.Message):
    __slots__ = ("patches_left", "tickets_open", "done")
    PATCHES_LEFT_FIELD_NUMBER: _ClassVar[int]
    TICKETS_OPEN_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    patches_left: int
    tickets_open: int
    done: bool
    def __init__(self, patches_left: _Optional[int] = ..., tickets_open: _Optional[int] = ..., done: _Optional[bool] = ...) -> None: ...
