"""Which exit code a rank's last exception means (k8s.md 4.6, C46), and the sentence that goes with it."""

import torch

from prefill_engine.messages import RankFailed
from prefill_plan.errors import CheckpointError, ConfigError, ExitCode, GpuFault, PeerError, PlanError, StoreUnavailable


class InjectedFault(Exception):
    """Raised where `--fault exit=CODE@phase` asks for it; tests only."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"injected fault: exit {exit_code}")
        self.exit_code = exit_code


def describe_failure(error: BaseException, *, rank: int, phase: str) -> RankFailed:
    """Last words for an exception that ends the rank. phase: "start", "load", "warmup", "serve" or "drain"."""
    return RankFailed(
        rank=rank,
        exit_code=int(_exit_code(error, phase=phase)),
        code=_code_name(error),
        phase=phase,
        detail=_detail(error),
    )


def _exit_code(error: BaseException, *, phase: str) -> int:
    match error:
        case InjectedFault():
            return error.exit_code
        case CheckpointError():
            return ExitCode.CHECKPOINT
        case ConfigError() | PlanError():
            return ExitCode.CONFIG
        case StoreUnavailable():
            return ExitCode.STORE_LOST
        case PeerError():
            return ExitCode.RANK_LOST
        case GpuFault() | torch.AcceleratorError():
            return ExitCode.GPU_FAULT
        case MemoryError() | torch.OutOfMemoryError():
            return ExitCode.OUT_OF_MEMORY_RUN if phase == "serve" else ExitCode.OUT_OF_MEMORY_LOAD
        case _:
            return ExitCode.UNKNOWN


def _code_name(error: BaseException) -> str:
    match error:
        case MemoryError():
            return "HostOom"
        case torch.OutOfMemoryError():
            return "CudaOom"
        case _:
            return type(error).__name__


def _detail(error: BaseException) -> str:
    text = str(error) or type(error).__name__
    return text if len(text) <= 2000 else text[:2000] + "..."


def parse_fault(fault: str) -> tuple[int, str] | None:
    """(exit code, phase) of a test hook `exit=CODE[@phase]`; None for an empty text.

    Raises:
        ConfigError: another form.
    """
    if not fault:
        return None
    head, _, phase = fault.partition("@")
    name, _, code = head.partition("=")
    if name != "exit" or not code.isdigit():
        raise ConfigError(f"--fault {fault!r}: expected exit=CODE or exit=CODE@phase, e.g. exit=12@serve")
    return int(code), phase or "serve"
