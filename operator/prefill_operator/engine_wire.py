"""The messages of engines and encoders that the operator speaks, built here: those of Drain whole, of load reports a part.

Why not the engine's generated modules: prefill_operator must not import prefill_engine. Why not modules of our own generated
from the same .proto: the default descriptor pool refuses a second definition of pe.v1.*, so one process (every test that runs
the operator against a real engine) could not hold both. A private pool with these messages has neither problem, and a test
compares them with the engine's .proto. Fields that are not named here are passed over when a message is read.
"""

from enum import IntEnum
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, duration_pb2, message_factory

DRAIN_METHOD = "/pe.v1.PrefillEngine/Drain"
ENCODER_DRAIN_METHOD = "/pe.v1.VisionEncoder/Drain"
GET_LOAD_METHOD = "/pe.v1.PrefillEngine/GetLoad"
ENCODER_LOAD_METHOD = "/pe.v1.VisionEncoder/WatchLoad"

_Field = descriptor_pb2.FieldDescriptorProto
_DRAIN_REQUEST_FIELDS = ((1, "deadline", _Field.TYPE_MESSAGE), (2, "finish_queued", _Field.TYPE_BOOL))
_DRAIN_STATUS_FIELDS = (
    (1, "running", _Field.TYPE_UINT32),
    (2, "waiting", _Field.TYPE_UINT32),
    (3, "tickets_open", _Field.TYPE_UINT32),
    (4, "done", _Field.TYPE_BOOL),
    (5, "sent_back", _Field.TYPE_UINT32),
)
_ENCODER_DRAIN_REQUEST_FIELDS = ((1, "deadline", _Field.TYPE_MESSAGE),)
_ENCODER_DRAIN_STATUS_FIELDS = (
    (1, "patches_left", _Field.TYPE_UINT64),
    (2, "tickets_open", _Field.TYPE_UINT32),
    (3, "done", _Field.TYPE_BOOL),
)
_LOAD_FIELDS = (
    (3, "state", _Field.TYPE_ENUM),
    (11, "backlog", _Field.TYPE_MESSAGE),
    (12, "weight_bytes_loaded", _Field.TYPE_UINT64),
    (13, "weight_bytes_total", _Field.TYPE_UINT64),
)
_ENCODER_LOAD_REQUEST_FIELDS = ((1, "period", _Field.TYPE_MESSAGE),)
_ENCODER_LOAD_FIELDS = (
    (1, "epoch", _Field.TYPE_UINT64),
    (4, "patches_queued", _Field.TYPE_UINT64),
    (8, "a_ms", _Field.TYPE_DOUBLE),
    (9, "b_ms_per_patch", _Field.TYPE_DOUBLE),
    (13, "patches_encoded", _Field.TYPE_UINT64),
)
_TYPE_NAMES = {_Field.TYPE_MESSAGE: ".google.protobuf.Duration", _Field.TYPE_ENUM: ".pe.v1.LoadReport.State"}


class LoadState(IntEnum):
    """pe.v1.LoadReport.State."""

    STATE_UNSPECIFIED = 0
    STARTING = 1
    READY = 2
    DEGRADED = 3
    """Serves, but the KV store behind it does not answer: hits are lost and nothing is saved."""
    DRAINING = 4
    WEDGED = 5


class EngineMessages:
    """Message classes of pe.v1: DrainRequest, DrainStatus, GetLoadRequest, LoadReport, and for encoders VisionDrainRequest,
    VisionDrainStatus, VisionWatchRequest, VisionLoad."""

    def __init__(self) -> None:
        file = descriptor_pb2.FileDescriptorProto(name="engine.proto", package="pe.v1", syntax="proto3")
        file.dependency.append(duration_pb2.DESCRIPTOR.name)
        for name, fields in (
            ("DrainRequest", _DRAIN_REQUEST_FIELDS),
            ("DrainStatus", _DRAIN_STATUS_FIELDS),
            ("VisionDrainRequest", _ENCODER_DRAIN_REQUEST_FIELDS),
            ("VisionDrainStatus", _ENCODER_DRAIN_STATUS_FIELDS),
            ("VisionWatchRequest", _ENCODER_LOAD_REQUEST_FIELDS),
            ("VisionLoad", _ENCODER_LOAD_FIELDS),
            ("GetLoadRequest", ()),
            ("LoadReport", _LOAD_FIELDS),
        ):
            message = file.message_type.add(name=name)
            for number, field, kind in fields:
                type_name = _TYPE_NAMES.get(kind)
                message.field.add(
                    name=field, number=number, type=kind, type_name=type_name, label=_Field.LABEL_OPTIONAL
                )
        states = file.message_type[-1].enum_type.add(name="State")
        for state in LoadState:
            states.value.add(name=state.name, number=state.value)
        pool = descriptor_pool.DescriptorPool()
        pool.AddSerializedFile(duration_pb2.DESCRIPTOR.serialized_pb)
        pool.AddSerializedFile(file.SerializeToString())
        self.drain_request: Any = _class_of(pool, "DrainRequest")
        self.drain_status: Any = _class_of(pool, "DrainStatus")
        self.encoder_drain_request: Any = _class_of(pool, "VisionDrainRequest")
        self.encoder_drain_status: Any = _class_of(pool, "VisionDrainStatus")
        self.load_request: Any = _class_of(pool, "GetLoadRequest")
        self.load_report: Any = _class_of(pool, "LoadReport")
        self.encoder_load_request: Any = _class_of(pool, "VisionWatchRequest")
        self.encoder_load: Any = _class_of(pool, "VisionLoad")


def _class_of(pool: descriptor_pool.DescriptorPool, name: str) -> Any:
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"pe.v1.{name}"))
