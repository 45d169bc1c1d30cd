"""What an Open does: how far the hit goes, which blocks come from the pool, which are read (kv.md 7.4). Pure.

Called by the Keeper with what pool and directory know. The trap (sgl-project/sglang#40193): a hit shortened for lack of room is
told as such, never passed off as all there is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

RETRY_SECONDS = 0.05


class Source(Enum):
    """Where a block would come from."""

    POOL = "pool"
    """VALID in a slot."""
    JOIN = "join"
    """On its way into a slot for somebody else."""
    CHECK = "check"
    """In a slot since before a restart: verified in place."""
    READ = "read"
    """In the store."""
    ABSENT = "absent"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenPlan:
    """num_blocks: leading blocks to lease. shrunk_blocks: further ones that exist but found no room or read budget."""

    num_blocks: int
    num_reads: int
    shrunk_blocks: int

    @property
    def retry_seconds(self) -> float:
        """When asking again may give more; 0 = nothing was cut."""
        return RETRY_SECONDS if self.shrunk_blocks else 0.0


def plan_open(
    sources: Sequence[Source], takeable: Sequence[bool], *, num_takeable: int, read_budget_blocks: int
) -> OpenPlan:
    """Leases the longest leading run that fits.

    Args:
        sources: of the blocks after the resident ones, in chain order.
        takeable: whether nobody else holds the slot that a block is in, so that holding it costs the pool room.
        num_takeable: slots that the pool could hand out, those counted by `takeable` included.
        read_budget_blocks: records this session may have in flight on top of those it has.
    """
    existing = sources.index(Source.ABSENT) if Source.ABSENT in sources else len(sources)
    if Source.READ not in sources:  # what is in slots already always fits
        return OpenPlan(num_blocks=existing, num_reads=0, shrunk_blocks=0)
    room, budget, num_reads = num_takeable, read_budget_blocks, 0
    for index in range(existing):
        is_read = sources[index] is Source.READ
        room -= is_read or takeable[index]
        budget -= is_read
        if room < 0 or budget < 0:
            return OpenPlan(num_blocks=index, num_reads=num_reads, shrunk_blocks=existing - index)
        num_reads += is_read
    return OpenPlan(num_blocks=existing, num_reads=num_reads, shrunk_blocks=0)
