"""Every error that crosses a module border of the house, and the exit codes of `prefill-engine serve`.

PrefillError                        code: stable string; retryable; details as attributes
  ConfigError                       a setting is wrong; message names file and path of the key
  CheckpointError                   files of the model do not match its config (exit 11)
  PlanError                         memory, topology, placement impossible; message shows the sum and the limit
  RequestError                      the caller's fault: reason and retry of the wire contract travel along
    ImageRejected                   an image that cannot be encoded, by its own fault
  CapacityError      retryable      no room now
  KvError
    BlockCorrupt                    a record failed verification; the block is dropped and recomputed
    StoreUnavailable retryable      the store's medium failed; degrade to recompute
  PeerError                         a rank is gone
  CallFailed                        a call to an engine failed, seen from its client; carries what the engine said
  Draining           retryable      this engine takes no new work
"""

from enum import IntEnum


class PrefillError(Exception):
    """Base of all our errors. `code` is stable and machine-readable; the message is for people."""

    code = "PREFILL"
    retryable = False

    def __init__(self, message: str, **details: object) -> None:
        super().__init__(message)
        self.message = message
        self.details = details


class ConfigError(PrefillError):
    code = "CONFIG"


class CheckpointError(PrefillError):
    code = "CHECKPOINT"


class PlanError(PrefillError):
    code = "PLAN"


class RequestError(PrefillError):
    """`reason` is the name of a pe.v1.ErrorReason, e.g. "TOKENS_INVALID"."""

    code = "REQUEST"

    def __init__(self, message: str, *, reason: str, **details: object) -> None:
        super().__init__(message, **details)
        self.reason = reason


class ImageRejected(RequestError):
    """An image that can't be encoded, whoever tries. Whoever knows its index in the request adds it to the text."""

    code = "IMAGE_REJECTED"

    def __init__(self, message: str, *, reason: str = "IMAGE_REJECTED", **details: object) -> None:
        super().__init__(message, reason=reason, **details)


class CapacityError(PrefillError):
    code = "CAPACITY"
    retryable = True

    def __init__(self, message: str, *, reason: str, **details: object) -> None:
        super().__init__(message, **details)
        self.reason = reason


class KvError(PrefillError):
    code = "KV"


class BlockCorrupt(KvError):
    code = "BLOCK_CORRUPT"


class StoreUnavailable(KvError):
    code = "STORE_UNAVAILABLE"
    retryable = True


class PeerError(PrefillError):
    code = "PEER"


class GpuFault(PrefillError):
    """The GPU cannot be used any more by this process, and perhaps by none."""

    code = "GPU_FAULT"


class CallFailed(PrefillError):
    """A gRPC call to an engine failed. `status` is the gRPC code's name; reason, retry and phase are names of pe.v1.ErrorReason,
    RetryScope and Phase, "" where the engine sent no ServingError (then retry on the status alone, serving.md 1.1)."""

    code = "CALL_FAILED"

    def __init__(
        self, message: str, *, status: str, reason: str = "", retry: str = "", phase: str = "", **details: object
    ) -> None:
        super().__init__(message, **details)
        self.status = status
        self.reason = reason
        self.retry = retry
        self.phase = phase


class Draining(PrefillError):
    code = "DRAINING"
    retryable = True


class ExitCode(IntEnum):
    """Exit codes of `serve` (k8s.md 4.6, decisions C31 and C46). Other CLI verbs: 0 ok, 1 failed, 2 usage."""

    DRAINED = 0
    UNKNOWN = 1
    CONFIG = 10
    CHECKPOINT = 11
    OUT_OF_MEMORY_LOAD = 12
    OUT_OF_MEMORY_RUN = 13
    GPU_FAULT = 14
    NETWORK = 15
    RANK_LOST = 16
    STORE_LOST = 17
