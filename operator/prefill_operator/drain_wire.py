"""The two messages of pe.v1.PrefillEngine/Drain, built here.

Why not the engine's generated modules: prefill_operator must not import prefill_engine. Why not modules of our own generated
from the same .proto: the default descriptor pool refuses a second definition of pe.v1.*, so one process (every test that runs
the operator against a real engine) could not hold both. A private pool with these two messages has neither problem, and a test
compares them with the engine's .proto.
"""

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, duration_pb2, message_factory

DRAIN_METHOD = "/pe.v1.PrefillEngine/Drain"

_Field = descriptor_pb2.FieldDescriptorProto
_REQUEST_FIELDS = (("deadline", _Field.TYPE_MESSAGE), ("finish_queued", _Field.TYPE_BOOL))
_STATUS_FIELDS = (
    ("running", _Field.TYPE_UINT32),
    ("waiting", _Field.TYPE_UINT32),
    ("tickets_open", _Field.TYPE_UINT32),
    ("done", _Field.TYPE_BOOL),
    ("sent_back", _Field.TYPE_UINT32),
)


class DrainMessages:
    """`request` and `status` are the message classes pe.v1.DrainRequest and pe.v1.DrainStatus."""

    def __init__(self) -> None:
        pool = descriptor_pool.DescriptorPool()
        pool.AddSerializedFile(duration_pb2.DESCRIPTOR.serialized_pb)
        file = descriptor_pb2.FileDescriptorProto(name="drain.proto", package="pe.v1", syntax="proto3")
        file.dependency.append(duration_pb2.DESCRIPTOR.name)
        for name, fields in (("DrainRequest", _REQUEST_FIELDS), ("DrainStatus", _STATUS_FIELDS)):
            message = file.message_type.add(name=name)
            for number, (field, kind) in enumerate(fields, start=1):
                type_name = ".google.protobuf.Duration" if kind == _Field.TYPE_MESSAGE else None
                message.field.add(
                    name=field, number=number, type=kind, type_name=type_name, label=_Field.LABEL_OPTIONAL
                )
        pool.AddSerializedFile(file.SerializeToString())
        self.request: Any = message_factory.GetMessageClass(pool.FindMessageTypeByName("pe.v1.DrainRequest"))
        self.status: Any = message_factory.GetMessageClass(pool.FindMessageTypeByName("pe.v1.DrainStatus"))
