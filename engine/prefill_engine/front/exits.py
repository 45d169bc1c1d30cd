"""Which exit code `serve` ends with, and the termination message the operator reads (C31, C46, k8s.md 4.6). Pure but `write`."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from prefill_engine.messages import RankFailed
from prefill_plan.errors import ExitCode

_MAX_BYTES = 4096
_MAX_DETAIL_CHARS = 1024
# First found wins: a GPU fault explains an out-of-memory error, not the other way round. Load-time codes come last.
_SPECIFIC = (
    ExitCode.GPU_FAULT,
    ExitCode.OUT_OF_MEMORY_LOAD,
    ExitCode.OUT_OF_MEMORY_RUN,
    ExitCode.NETWORK,
    ExitCode.STORE_LOST,
    ExitCode.CHECKPOINT,
    ExitCode.CONFIG,
)
_CODE_NAMES = {
    ExitCode.DRAINED: "Drained",
    ExitCode.UNKNOWN: "Unknown",
    ExitCode.CONFIG: "Config",
    ExitCode.CHECKPOINT: "Checkpoint",
    ExitCode.OUT_OF_MEMORY_LOAD: "CudaOom",
    ExitCode.OUT_OF_MEMORY_RUN: "CudaOom",
    ExitCode.GPU_FAULT: "GpuFault",
    ExitCode.NETWORK: "Network",
    ExitCode.RANK_LOST: "RankLost",
    ExitCode.STORE_LOST: "StoreLost",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """Why the engine ended. phase: start, load, warmup, serve, drain. rank: None when it was not a rank."""

    exit_code: ExitCode
    phase: str
    rank: int | None
    detail: str


def judge_rank_loss(*, exit_codes: Iterable[tuple[int, int]], reports: Iterable[RankFailed], phase: str) -> Ending:
    """The ending after a rank died.

    Args:
        exit_codes: (rank, process exit code) of the dead ranks; negative = killed by that signal.
        reports: last words that came within a second.
        phase: of the engine, for ranks that left no report.
    """
    words = {report.rank: report for report in reports}
    codes = dict(exit_codes)
    found = [(report.exit_code, report.rank) for report in words.values()]
    found += [(code, rank) for rank, code in codes.items() if rank not in words or code != words[rank].exit_code]
    for specific in _SPECIFIC:
        for code, rank in found:
            if code == specific:
                report = words.get(rank)
                detail = report.detail if report else f"rank {rank} exited with {code}"
                return Ending(exit_code=specific, phase=report.phase if report else phase, rank=rank, detail=detail)
    rank = min(codes, default=min(words, default=0))
    report = words.get(rank)
    detail = report.detail if report else f"rank {rank} exited with {codes.get(rank)} and left no report"
    return Ending(exit_code=ExitCode.RANK_LOST, phase=report.phase if report else phase, rank=rank, detail=detail)


def termination_json(ending: Ending, *, plan_hash: str) -> bytes:
    """At most 4,096 bytes. Byte counts and Xid are null until a GPU rank reports them."""
    message = {
        "v": 1,
        "code": _CODE_NAMES[ending.exit_code],
        "exit": int(ending.exit_code),
        "phase": ending.phase,
        "planHash": plan_hash,
        "rank": ending.rank,
        "wantBytes": None,
        "freeBytes": None,
        "foreignBytes": None,
        "xid": None,
        "detail": ending.detail[:_MAX_DETAIL_CHARS],
    }
    data = json.dumps(message, separators=(",", ":")).encode()
    if len(data) > _MAX_BYTES:
        data = json.dumps({**message, "detail": ending.detail[:256]}, separators=(",", ":")).encode()
    return data


def write_termination(path: Path, data: bytes) -> None:
    """Only if the file exists: outside Kubernetes nobody asked for one. Failure to write is not worth another failure."""
    if path.is_file():
        try:
            path.write_bytes(data)
        except OSError:
            return
