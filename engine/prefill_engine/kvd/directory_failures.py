"""Pulls that failed, and which locations are therefore not tried any more. Pure; one per kvd, time is an argument.

The trap: a dead node costs a pull's whole deadline each time. So failures count against the holder's incarnation too, not only
against one key; a restarted holder (new epoch) starts clean.
"""

from collections import OrderedDict

from prefill_engine.kv.directory import SnapshotLocation

FAILURES_TO_WITHDRAW = 3
FAILURES_TO_SHUN = 6
_MEMORY_SECONDS = 30.0
_MAX_ROWS = 4096

_Row = tuple[str, int, bytes]


class PullFailures:
    """Owner of the counts. A count is forgotten after 30 s without a further failure, so a holder gets another chance."""

    def __init__(self) -> None:
        self._rows: OrderedDict[_Row, tuple[int, float]] = OrderedDict()

    def report(self, location: SnapshotLocation, *, now: float) -> bool:
        """True: this is the failure after which the location is to be withdrawn from the directory."""
        holder = location.holder
        self._count((holder.holder_id, holder.epoch, b""), now)
        return self._count((holder.holder_id, holder.epoch, location.key), now) == FAILURES_TO_WITHDRAW

    def allows(self, location: SnapshotLocation, *, now: float) -> bool:
        """False after 3 failures of this key there, or 6 of any keys of that holder."""
        holder = location.holder
        return (
            self._recent((holder.holder_id, holder.epoch, location.key), now) < FAILURES_TO_WITHDRAW
            and self._recent((holder.holder_id, holder.epoch, b""), now) < FAILURES_TO_SHUN
        )

    def _recent(self, row: _Row, now: float) -> int:
        count, last = self._rows.get(row, (0, 0.0))
        return count if now - last <= _MEMORY_SECONDS else 0

    def _count(self, row: _Row, now: float) -> int:
        count = self._recent(row, now) + 1
        self._rows[row] = (count, now)
        self._rows.move_to_end(row)
        while len(self._rows) > _MAX_ROWS:
            self._rows.popitem(last=False)
        return count
