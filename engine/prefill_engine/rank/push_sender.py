"""The step thread's side of pushes: which attempts have one, and how many of their blocks the courier has been given.

Owner of `push_pending` of the attempt records. Used by the step thread only; a rank without a data transport has no courier, and
the front has refused pushes to it. The trap: blocks handed over here must keep their slots and bytes until `collect` has named
the attempt, so a hit must not shrink after the first chunk has been committed.
"""

from collections.abc import Sequence

from prefill_engine.rank.attempt import Attempt
from prefill_engine.rank.courier import Courier
from prefill_engine.rank.payloads import Payloads
from prefill_engine.rank.read_server import Component

BLOCK_KV = 1  # pe.v1.ComponentKind


class PushSender:
    """Owner of how much of each push has been given."""

    def __init__(self, courier: Courier | None, *, payloads: Payloads) -> None:
        self._courier = courier
        self._payloads = payloads
        self._num_given: dict[bytes, int] = {}

    def begin(self, attempt: Attempt) -> None:
        """A new attempt; nothing happens unless it is to be pushed."""
        if attempt.submit.push and self._courier is not None:
            attempt.push_pending = True
            self._num_given[attempt.attempt_id] = 0
            self._courier.begin(attempt.attempt_id, attempt.submit.push)

    def blocks_complete(self, attempt: Attempt, *, end_block: int) -> None:
        """Blocks [0, end_block) have their final bytes; with early_send they go out now."""
        if attempt.submit.early_send:
            self._give_blocks(attempt, attempt.block_slots[:end_block])

    def finish(self, attempt: Attempt, components: Sequence[Component]) -> None:
        """All components are complete: the rest goes out."""
        if attempt.attempt_id not in self._num_given or self._courier is None:
            return
        self._give_blocks(attempt, attempt.block_slots)
        for component in components:
            if component.kind != BLOCK_KV and component.num_bytes:
                self._courier.add(attempt.attempt_id, component.kind, component.pieces)
        self._courier.finish(attempt.attempt_id)

    def cancel(self, attempt: Attempt) -> None:
        """Nothing more goes out; the attempt is idle once `collect` has named it."""
        if attempt.push_pending and self._courier is not None:
            self._courier.cancel(attempt.attempt_id)

    def collect(self) -> list[bytes]:
        """Attempts whose push has drained."""
        drained = list(self._courier.collect()) if self._courier is not None else []
        for attempt_id in drained:
            self._num_given.pop(attempt_id, None)
        return drained

    def _give_blocks(self, attempt: Attempt, slots: Sequence[int]) -> None:
        given = self._num_given.get(attempt.attempt_id)
        if given is None or self._courier is None or len(slots) <= given:
            return
        self._num_given[attempt.attempt_id] = len(slots)
        self._courier.add(attempt.attempt_id, BLOCK_KV, self._payloads.parts(slots[given:]))
