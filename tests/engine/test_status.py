"""Failures on the wire: every reason has a code, one ServingError below 2 KiB, and comes back as it went."""

import grpc
import pytest
from google.rpc import status_pb2

from prefill_engine.rpc import common_pb2
from prefill_engine.rpc.status import CODE_OF_REASON, Failure, decode_failure, encode_failure

REASONS = [name for name, number in common_pb2.ErrorReason.items() if number != 0]


@pytest.mark.parametrize("reason", REASONS)
def test_every_reason_survives_the_wire(reason: str):
    failure = Failure(
        reason=reason,
        retry="REPLAN",
        phase="COMPUTE",
        public_message="what happened",
        operator_detail="more",
        retry_after_seconds=1.5,
        rows_computed=9,
        image_index=2,
    )
    assert decode_failure(encode_failure(failure)) == failure


@pytest.mark.parametrize(
    ("reason", "code", "retry"),
    [
        ("PROMPT_TOO_LONG", grpc.StatusCode.OUT_OF_RANGE, "NEVER"),
        ("TOKENS_INVALID", grpc.StatusCode.INVALID_ARGUMENT, "NEVER"),
        ("SAMPLING_INVALID", grpc.StatusCode.INVALID_ARGUMENT, "NEVER"),
        ("KV_MEMORY", grpc.StatusCode.RESOURCE_EXHAUSTED, "OTHER_PE"),
        ("RANK_LOST", grpc.StatusCode.UNAVAILABLE, "OTHER_PE"),
        ("STORE_WRITE_FAILED", grpc.StatusCode.UNAVAILABLE, "OTHER_PE"),
        ("TICKET_CLAIMED", grpc.StatusCode.ABORTED, "NEVER"),
        ("CALLER_CANCELLED", grpc.StatusCode.CANCELLED, "NEVER"),
        ("IDEMPOTENCY_CONFLICT", grpc.StatusCode.ALREADY_EXISTS, "NEVER"),
        ("HIT_LEASE_GONE", grpc.StatusCode.NOT_FOUND, "REPLAN"),
        ("COMPUTE_DEADLINE", grpc.StatusCode.DEADLINE_EXCEEDED, "OTHER_PE"),
        ("NONFINITE_OUTPUT", grpc.StatusCode.DATA_LOSS, "ONCE_THEN_FAIL"),
        ("INVARIANT", grpc.StatusCode.INTERNAL, "ONCE_THEN_FAIL"),
    ],
)
def test_reason_has_the_code_and_retry_of_the_contract(reason: str, code: grpc.StatusCode, retry: str):
    failure = Failure(reason=reason, public_message="")
    assert (failure.code, failure.retry_scope) == (code, retry)


def test_all_reasons_of_the_proto_are_mapped():
    assert set(REASONS) == set(CODE_OF_REASON)


def test_long_texts_stay_below_two_kibibytes():
    failure = Failure(reason="KERNEL_FAULT", public_message="ä" * 5000, operator_detail="ö" * 50_000)
    data = encode_failure(failure)
    assert len(data) < 2048
    assert len(status_pb2.Status.FromString(data).details) == 1


def test_status_without_a_serving_error_is_no_failure_of_ours():
    assert decode_failure(status_pb2.Status(code=8, message="too large").SerializeToString()) is None
