"""Which rank takes a new attempt, and when none does. Pure (C47, C51; serving.md 2.3: fewest outstanding rows on arrival)."""

from collections.abc import Sequence
from dataclasses import dataclass

from prefill_engine.rpc.status import Failure
from prefill_plan.config import ServerConfig

_MIN_RETRY_SECONDS = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class RankQueue:
    """What a rank has in front of a new attempt. *_rows: uncomputed; tenant_rows: waiting ones of the new one's fairness key."""

    rank: int
    outstanding_rows: int
    waiting_requests: int
    waiting_rows: int
    tenant_rows: int


def choose_rank(queues: Sequence[RankQueue]) -> RankQueue:
    """The rank with the fewest outstanding rows; ties go to the lowest rank."""
    return min(queues, key=lambda queue: (queue.outstanding_rows, queue.rank))


def queue_refusal(queue: RankQueue, limits: ServerConfig, *, wait_seconds: float) -> Failure | None:
    """Back-pressure. Limits count what is ahead of the new attempt, never its own rows.

    Args:
        wait_seconds: predicted wait behind what is there; becomes retry_after.
    """
    checks = (
        # First, since it holds on every engine: nobody should try the next one.
        ("TENANT_QUOTA", "rows of this fairness key wait", queue.tenant_rows, limits.max_tenant_rows),
        ("QUEUE_FULL", "requests wait", queue.waiting_requests, limits.max_waiting_requests),
        ("QUEUE_FULL", "rows wait", queue.waiting_rows, limits.max_waiting_rows),
    )
    for reason, what, found, limit in checks:
        if found >= limit:
            return Failure(
                reason=reason,
                public_message=f"{found} {what}, limit {limit}; nothing was queued",
                retry_after_seconds=max(_MIN_RETRY_SECONDS, wait_seconds),
            )
    return None
