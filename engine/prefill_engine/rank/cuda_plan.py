"""What the CUDA side of a swap-in decides, without CUDA: registration of the pool, way of a copy, values of gate words."""

from dataclasses import dataclass
from enum import Enum, auto

# One cudaHostRegister call fails hard at 512 GiB and takes 0.1 s per GB (vllm-project/vllm#51080, kv.md 6.1).
MAX_REGISTER_BYTES = 64 << 30
# cuMemcpyBatchAsync collapses below this per piece (vllm-project/vllm#57342); our layer groups are 22,784 B.
MIN_BATCH_PIECE_BYTES = 28 * 1024
POISON = 0x7FFF_FFFF
"""In a gate word: pass, and throw the rows away. The stream's comparison is signed and cyclic, so this is beyond every group."""


class CopyPath(Enum):
    GATHER = auto()  # a kernel reads the pinned records
    BATCH = auto()  # the copy engine, one queued copy for each piece


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """Bytes [start, end) of the pool, registered by one call."""

    start: int
    end: int


def plan_registrations(
    pool_bytes: int, *, first_record: int, record_bytes: int, max_bytes: int = MAX_REGISTER_BYTES
) -> tuple[Registration, ...]:
    """The whole pool in calls of at most max_bytes; no record lies across two of them.

    Args:
        first_record: offset of record 0; what lies before goes with the first call.

    Raises:
        ValueError: a record, or what lies before the first, is larger than a call may be.
    """
    if first_record + record_bytes > max_bytes:
        raise ValueError(
            f"records of {record_bytes} bytes from {first_record} on do not fit calls of {max_bytes} bytes"
        )
    chunks, start = [], 0
    while start < pool_bytes:
        end = min(pool_bytes, start + max_bytes)
        if end < pool_bytes:
            end = first_record + (end - first_record) // record_bytes * record_bytes
        chunks.append(Registration(start=start, end=end))
        start = end
    return tuple(chunks)


def choose_copy_path(piece_bytes: int) -> CopyPath:
    """By the size of one piece, never by the total."""
    return CopyPath.GATHER if piece_bytes < MIN_BATCH_PIECE_BYTES else CopyPath.BATCH


def gate_word(*, groups: int, is_over: bool, num_groups: int, still_seconds: float, gate_seconds: float) -> int:
    """What a late attempt's gate word should say: groups that are there, or POISON.

    Args:
        is_over: its load has ended. still_seconds: since anything of it moved.
    """
    if groups >= num_groups:
        return num_groups
    return POISON if is_over or still_seconds >= gate_seconds else groups
