"""How leases and reservations end or shrink: closed, cut, abandoned, not declared again, or gone with their owner (kv.md 7.5).

Called by the Keeper on its loop; made anew with each layout. Owner of the deadlines of leases that a rank did not declare when it
came back. The trap: a lease may end while its own Open still waits for the directory; Opens looks whether it is still there.
"""

import logging
from collections.abc import Callable, Sequence

from prefill_engine.kv.pool_memory import LeaseState
from prefill_engine.kvd.block_reads import BlockReads
from prefill_engine.kvd.pool_state import PoolState
from prefill_engine.kvd.sessions import Session

logger = logging.getLogger(__name__)


class LeaseEnds:
    """clock: monotonic seconds. grace_seconds: for leases that are not declared."""

    def __init__(
        self, state: PoolState, reads: BlockReads, *, clock: Callable[[], float], grace_seconds: float
    ) -> None:
        self._state = state
        self._reads = reads
        self._clock = clock
        self._grace_seconds = grace_seconds
        self._undeclared: dict[int, float] = {}

    def adopt(self, owner_epoch: int, held_leases: Sequence[int]) -> list[int]:
        """A rank is back and holds these; its other leases end after the grace. Returns those it keeps."""
        adopted, held = [], set(held_leases)
        for lease in self._state.leases.of_owner(owner_epoch):
            if lease.lease_id in held:
                adopted.append(lease.lease_id)
                self._undeclared.pop(lease.lease_id, None)
                self._state.leases.set_state(lease, LeaseState.LIVE)
            else:
                self._undeclared[lease.lease_id] = self._clock() + self._grace_seconds
        return adopted

    def close(self, ids: Sequence[int]) -> int:
        """Ends leases and reservations; returns how many were not known."""
        num_unknown = 0
        for lease_id in ids:
            lease = self._state.leases.find(lease_id)
            if lease is None:
                num_unknown += 1
            else:
                self._undeclared.pop(lease_id, None)
                self._state.end_lease(lease)
        self._reads.cancel_unwanted()
        return num_unknown

    def abandon(self, session: Session, call_ids: Sequence[int]) -> None:
        """The rank waits no longer for answers to these calls: what they were given ends, and those still to come get nothing."""
        session.abandoned.extend(call_ids)
        owned = self._state.leases.of_owner(session.owner_epoch)
        abandoned = set(call_ids)
        unknown = [lease.lease_id for lease in owned if lease.call_id and lease.call_id in abandoned]
        self.close(unknown)
        logger.info("calls abandoned by their rank", extra={"calls": len(call_ids), "leases": len(unknown)})

    def truncate(self, lease_id: int, *, num_blocks: int, drop_snapshot: bool) -> bool:
        """Cuts the end of a lease off. False = there is no such lease."""
        state = self._state
        lease = state.leases.find(lease_id)
        if lease is None or lease.is_reservation:
            return False
        for slot in state.leases.truncate(lease, num_blocks):
            state.blocks.unpin(slot)
        if drop_snapshot:
            for slot in state.leases.drop_snapshot(lease):
                state.snapshots.unpin(slot)
        state.record_less(lease)
        self._reads.cancel_unwanted()
        return True

    def end_owner(self, owner_epoch: int) -> None:
        """The rank is dead."""
        leases = self._state.leases.of_owner(owner_epoch)
        for lease in leases:
            self._undeclared.pop(lease.lease_id, None)
            self._state.end_lease(lease, lost=True)
        self._reads.cancel_unwanted()
        logger.info("session over; its slots are free", extra={"leases": len(leases)})

    def end_undeclared(self) -> None:
        """Housekeeping: ends leases whose grace is over."""
        now = self._clock()
        for lease_id in [one for one, until in self._undeclared.items() if now >= until]:
            del self._undeclared[lease_id]
            lease = self._state.leases.find(lease_id)
            if lease is not None:
                self._state.end_lease(lease, lost=True)
