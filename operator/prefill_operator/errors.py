"""Errors of the operator; they extend the taxonomy of prefill_plan.errors.

PrefillError
  PoolInvalid                       the spec of a pool contradicts itself; ends as a condition, never as a retry storm
  ForeignObject                     an object has a name of ours and another owner; left alone and reported
  LeaseLost                         this process no longer leads; nothing may be written
  ClusterError                      an answer of the API server that is not success
    ObjectMissing                   404
    ObjectExists                    409 on create: a stale decision, harmless
    WriteConflict    retryable      409 on update, or a failed UID or resourceVersion precondition
    QuotaDenied      retryable      403 "exceeded quota": retried slowly
    RequestRejected                 400, 403, 422: the request itself is wrong or not allowed
    ClusterUnavailable retryable    408, 410, 429, 5xx, time-outs and broken connections
"""

from prefill_plan.errors import PrefillError


class PoolInvalid(PrefillError):
    """`path` names the field, e.g. "spec.gpu.memory"; `value` is what stands there (None: nothing), `rule` what must hold."""

    code = "POOL_INVALID"

    def __init__(self, path: str, *, value: object, rule: str) -> None:
        self.path = path
        self.value = value
        self.rule = rule
        found = "" if value is None else f" is {_short(value)}"
        super().__init__(f"{path}{found}: {rule}", path=path)


class ForeignObject(PrefillError):
    code = "FOREIGN_OBJECT"


class LeaseLost(PrefillError):
    code = "LEASE_LOST"


class ClusterError(PrefillError):
    """`status` is the HTTP code, 0 when there was no answer; `reason` the API server's own word, e.g. "AlreadyExists"."""

    code = "CLUSTER"

    def __init__(self, message: str, *, status: int, reason: str = "", **details: object) -> None:
        super().__init__(message, **details)
        self.status = status
        self.reason = reason


class ObjectMissing(ClusterError):
    code = "OBJECT_MISSING"


class ObjectExists(ClusterError):
    code = "OBJECT_EXISTS"


class WriteConflict(ClusterError):
    code = "WRITE_CONFLICT"
    retryable = True


class QuotaDenied(ClusterError):
    code = "QUOTA_DENIED"
    retryable = True


class RequestRejected(ClusterError):
    code = "REQUEST_REJECTED"


class ClusterUnavailable(ClusterError):
    code = "CLUSTER_UNAVAILABLE"
    retryable = True


def _short(value: object) -> str:
    text = repr(list(value) if isinstance(value, tuple) else value)
    return text if len(text) <= 80 else f"{text[:77]}..."
