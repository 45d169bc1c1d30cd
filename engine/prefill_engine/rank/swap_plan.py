"""What a swap-in does next: pure decisions on the watermarks of a lease. Called by the copy thread.

Blocks are counted from the first one that the rank wants of the lease; a group is one KV source's part of a block, and groups are
copied in layer order, since the first one lets the attempt run.
"""

from dataclasses import dataclass
from enum import Enum, auto


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """Groups [first_group, end_group) of blocks [first, end)."""

    first_group: int
    end_group: int
    first: int
    end: int


class Ending(Enum):
    """Why a swap-in is over."""

    WHOLE = auto()
    SHORT = auto()  # a read failed: what comes before it is there
    LATE = auto()  # its limit has passed (swap_limit.py)
    GONE = auto()  # no session with kvd, and nothing moves
    LOST = auto()  # the lease is not ours any more
    GIVEN_UP = auto()  # nobody wants it


def next_copy(
    copied: tuple[int, ...], ready: tuple[int, ...], limit: int, *, at_most: int, lone_groups: int
) -> Copy | None:
    """The lowest group that has verified blocks not copied yet, at most `at_most` of them; with the groups after it where they
    stand alike, since they lie side by side and large pieces copy faster.

    Args:
        copied, ready: leading blocks per group. limit: blocks that can still become whole.
        lone_groups: leading groups that always go alone, because an attempt waits for the first one.
    """
    for group, (done, there) in enumerate(zip(copied, ready, strict=True)):
        end = min(there, limit, done + at_most)
        if end > done:
            end_group = group + 1
            while (
                group >= lone_groups
                and end_group < len(copied)
                and copied[end_group] == done
                and ready[end_group] >= end
            ):
                end_group += 1
            return Copy(first_group=group, end_group=end_group, first=done, end=end)
    return None


def find_ending(
    copied: tuple[int, ...], num_blocks: int, limit: int, *, now: float, late_at: float, is_kvd_gone: bool
) -> Ending | None:
    """Whether a swap-in that has nothing to copy now is over."""
    whole = min(copied, default=num_blocks)
    if whole >= num_blocks:
        return Ending.WHOLE
    if whole >= limit:
        return Ending.SHORT
    if is_kvd_gone:
        return Ending.GONE
    return Ending.LATE if now >= late_at else None


def whole_groups(copied: tuple[int, ...], num_blocks: int) -> int:
    """Leading groups that every block has."""
    return next((group for group, done in enumerate(copied) if done < num_blocks), len(copied))
