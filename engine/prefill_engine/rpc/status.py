"""Failures of the contract and their gRPC form: a status code and exactly one ServingError detail (serving.md 1.1).

The servicers raise ServingFailure; `abort_with` sends it; `decode_failure` reads it back. The trap: a detail over about
8 KiB makes gRPC drop the whole status, so texts are cut to keep it below 2 KiB.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NoReturn, TypeAlias

import grpc
import grpc.aio
from google.protobuf import any_pb2
from google.rpc import status_pb2

from prefill_engine.rpc import common_pb2
from prefill_plan.errors import PrefillError

DETAILS_KEY = "grpc-status-details-bin"
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
_MAX_PUBLIC_BYTES = 512
_MAX_OPERATOR_BYTES = 1024

_C = grpc.StatusCode
# reason -> (gRPC code, retry scope unless the failure says otherwise); serving.md 1.1, decisions C41, C45, C46, C52.
CODE_OF_REASON: Mapping[str, tuple[grpc.StatusCode, str]] = MappingProxyType(
    {
        "TOKENS_INVALID": (_C.INVALID_ARGUMENT, "NEVER"),
        "PROMPT_TOO_LONG": (_C.OUT_OF_RANGE, "NEVER"),
        "IMAGE_REJECTED": (_C.INVALID_ARGUMENT, "NEVER"),
        "IMAGE_TOKEN_MISMATCH": (_C.INVALID_ARGUMENT, "NEVER"),
        "TENANT_DENIED": (_C.PERMISSION_DENIED, "NEVER"),
        "SAMPLING_INVALID": (_C.INVALID_ARGUMENT, "NEVER"),
        "MODEL_MISMATCH": (_C.FAILED_PRECONDITION, "OTHER_PE"),
        "KV_FORMAT_MISMATCH": (_C.FAILED_PRECONDITION, "OTHER_PE"),
        "PROTOCOL_TOO_OLD": (_C.FAILED_PRECONDITION, "OTHER_PE"),
        "TRANSPORT_UNSUPPORTED": (_C.FAILED_PRECONDITION, "OTHER_PE"),
        "QUEUE_FULL": (_C.RESOURCE_EXHAUSTED, "OTHER_PE"),
        "KV_MEMORY": (_C.RESOURCE_EXHAUSTED, "OTHER_PE"),
        "PATCH_QUEUE_FULL": (_C.RESOURCE_EXHAUSTED, "SAME_LATER"),
        "TENANT_QUOTA": (_C.RESOURCE_EXHAUSTED, "SAME_LATER"),
        "BUDGET_IMPOSSIBLE": (_C.RESOURCE_EXHAUSTED, "NEVER"),
        "DRAINING": (_C.UNAVAILABLE, "OTHER_PE"),
        "STARTING": (_C.UNAVAILABLE, "OTHER_PE"),
        "ENGINE_LOST": (_C.UNAVAILABLE, "OTHER_PE"),
        "RANK_LOST": (_C.UNAVAILABLE, "OTHER_PE"),
        "WEDGED": (_C.UNAVAILABLE, "OTHER_PE"),
        "STORE_WRITE_FAILED": (_C.UNAVAILABLE, "OTHER_PE"),
        "HIT_LEASE_GONE": (_C.NOT_FOUND, "REPLAN"),
        "SWA_GONE": (_C.NOT_FOUND, "REPLAN"),
        "EMBEDDING_GONE": (_C.NOT_FOUND, "REPLAN"),
        "TICKET_GONE": (_C.NOT_FOUND, "REPLAN"),
        "ATTEMPT_UNKNOWN": (_C.NOT_FOUND, "REPLAN"),
        "EPOCH_FENCED": (_C.ABORTED, "OTHER_PE"),
        "ATTEMPT_SUPERSEDED": (_C.ABORTED, "NEVER"),
        "DECODE_ABORTED": (_C.ABORTED, "OTHER_PE"),
        "TICKET_CLAIMED": (_C.ABORTED, "NEVER"),
        "CALLER_CANCELLED": (_C.CANCELLED, "NEVER"),
        "IDEMPOTENCY_CONFLICT": (_C.ALREADY_EXISTS, "NEVER"),
        "KV_CHECKSUM": (_C.DATA_LOSS, "ONCE_THEN_FAIL"),
        "EMBEDDING_CHECKSUM": (_C.DATA_LOSS, "ONCE_THEN_FAIL"),
        "STORE_CORRUPT": (_C.DATA_LOSS, "ONCE_THEN_FAIL"),
        "NONFINITE_OUTPUT": (_C.DATA_LOSS, "ONCE_THEN_FAIL"),
        "QUEUE_WAIT_EXCEEDED": (_C.DEADLINE_EXCEEDED, "OTHER_PE"),
        "COMPUTE_DEADLINE": (_C.DEADLINE_EXCEEDED, "OTHER_PE"),
        "HANDOFF_TIMEOUT": (_C.DEADLINE_EXCEEDED, "OTHER_PE"),
        "SWAP_IN_TIMEOUT": (_C.DEADLINE_EXCEEDED, "OTHER_PE"),
        "ENCODER_TIMEOUT": (_C.DEADLINE_EXCEEDED, "OTHER_PE"),
        "INVARIANT": (_C.INTERNAL, "ONCE_THEN_FAIL"),
        "KERNEL_FAULT": (_C.INTERNAL, "ONCE_THEN_FAIL"),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Terminal outcome of an RPC, in plain words.

    reason, retry, phase: names of pe.v1.ErrorReason, RetryScope, Phase without their prefixes; retry "" = the default of
    the reason. public_message may be shown to the user; operator_detail never holds prompt text, keys or ticket ids.
    """

    reason: str
    public_message: str
    retry: str = ""
    phase: str = "ADMISSION"
    operator_detail: str = ""
    retry_after_seconds: float = 0.0
    rows_computed: int = 0
    image_index: int = -1

    @property
    def code(self) -> grpc.StatusCode:
        return CODE_OF_REASON[self.reason][0]

    @property
    def retry_scope(self) -> str:
        return self.retry or CODE_OF_REASON[self.reason][1]


class ServingFailure(PrefillError):
    """Carries a Failure to the border where it becomes a gRPC status."""

    code = "SERVING"

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.public_message)
        self.failure = failure


def refuse(reason: str, message: str, *, image_index: int = -1) -> NoReturn:
    """Raises the failure of a request that was never admitted."""
    raise ServingFailure(Failure(reason=reason, public_message=message, image_index=image_index))


def serving_error(failure: Failure) -> common_pb2.ServingError:
    """The detail, its texts cut; by itself for failures that travel inside a message."""
    detail = common_pb2.ServingError(
        reason=failure.reason,
        retry="RETRY_SCOPE_" + failure.retry_scope,
        phase="PHASE_" + failure.phase,
        rows_computed=failure.rows_computed,
        image_index=failure.image_index,
        public_message=_cut(failure.public_message, _MAX_PUBLIC_BYTES),
        operator_detail=_cut(failure.operator_detail, _MAX_OPERATOR_BYTES),
    )
    if failure.retry_after_seconds > 0:
        detail.retry_after.FromNanoseconds(round(failure.retry_after_seconds * 1e9))
    return detail


def encode_failure(failure: Failure) -> bytes:
    """google.rpc.Status bytes of the grpc-status-details-bin trailer, below 2 KiB."""
    detail = serving_error(failure)
    packed = any_pb2.Any()
    packed.Pack(detail)
    # The message travels once, in the detail: repeating it here could pass the 2 KiB.
    status = status_pb2.Status(code=failure.code.value[0], message=failure.reason, details=[packed])
    return bytes(status.SerializeToString())


def decode_failure(data: bytes) -> Failure | None:
    """The Failure inside grpc-status-details-bin; None if it holds no ServingError or a reason that we do not know."""
    status = status_pb2.Status.FromString(data)
    detail = common_pb2.ServingError()
    if not any(packed.Unpack(detail) for packed in status.details):
        return None
    known = (
        detail.reason in common_pb2.ErrorReason.values()
        and common_pb2.ErrorReason.Name(detail.reason) in CODE_OF_REASON
    )
    if not known:
        return None
    return Failure(
        reason=common_pb2.ErrorReason.Name(detail.reason),
        retry=_name(common_pb2.RetryScope, detail.retry, "RETRY_SCOPE_"),
        phase=_name(common_pb2.Phase, detail.phase, "PHASE_"),
        public_message=detail.public_message,
        operator_detail=detail.operator_detail,
        retry_after_seconds=detail.retry_after.ToNanoseconds() / 1e9,
        rows_computed=detail.rows_computed,
        image_index=detail.image_index,
    )


async def abort_with(context: Context, failure: Failure) -> NoReturn:
    """Ends the RPC with the failure's status and its one ServingError."""
    await context.abort(
        failure.code,
        f"{failure.reason}: {_cut(failure.public_message, _MAX_PUBLIC_BYTES)}",
        ((DETAILS_KEY, encode_failure(failure)),),
    )
    raise AssertionError("context.abort returned")


def _cut(text: str, max_bytes: int) -> str:
    return text.encode()[:max_bytes].decode(errors="ignore")


def _name(enum: object, number: int, prefix: str) -> str:
    try:
        name: str = enum.Name(number)  # type: ignore[attr-defined]
    except ValueError:
        return "UNSPECIFIED"
    return name.removeprefix(prefix)
