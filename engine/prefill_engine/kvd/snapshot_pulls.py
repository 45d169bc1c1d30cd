"""Brings SWA snapshots from peers into snapshot slots, and serves ours to peers (kv.md 4.5, 7.5).

Called by the Keeper on its loop. The trap: a pull that missed its deadline may still write; its slot is quarantined until the
transport says settled; too many of those, or one that stays too long, close the peer's connections, which settles them.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Any

from prefill_engine.kv.directory import Directory, SnapshotLocation
from prefill_engine.kv.pool_memory import SnapshotState
from prefill_engine.kv.transport.contract import PullOutcome, PullState, Source, Transport
from prefill_engine.kvd.kvd_metrics import KvdMetrics
from prefill_engine.kvd.pool_state import PoolState
from prefill_engine.kvd.slot_pool import SlotState

logger = logging.getLogger(__name__)

_NAMESPACE_BYTES = (
    1  # a transport's key is the block key alone: prefill_plan.block_keys.snapshot_key without its first byte
)
_LATE_SECONDS = 5.0
_LATE_SHARE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class _Late:
    """since: when the pull was given up, or the peer's connections were last closed for it."""

    slot: int
    endpoint: str
    outcome: PullOutcome
    since: float


class SnapshotPulls:
    """run: starts a task that the Keeper ends with itself. max_quarantined: as KvdConfig's, but never more than a quarter of the
    slots: late pulls of one dead link must not take them all. clock: monotonic seconds."""

    def __init__(
        self,
        state: PoolState,
        transport: Transport,
        directory: Directory,
        *,
        metrics: KvdMetrics,
        threads: Executor,
        run: Callable[[Coroutine[Any, Any, None]], None],
        deadline_seconds: float,
        max_quarantined: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._state = state
        self._transport = transport
        self._directory = directory
        self._metrics = metrics
        self._threads = threads
        self._run = run
        self._deadline_seconds = deadline_seconds
        self._max_quarantined = max(1, min(max_quarantined, state.snapshots.num_slots // _LATE_SHARE))
        self._clock = clock
        self._late: list[_Late] = []
        self._num_running = 0

    @property
    def is_idle(self) -> bool:
        return not self._late and not self._num_running

    def take_slot(self, *, tenant: str) -> int | None:
        """A slot for a snapshot, pinned once; what had to go is withdrawn."""
        slots = self._state.snapshots.take(1, tenant=tenant)
        evicted = self._state.snapshots.pop_evicted()
        if evicted:
            self._metrics.evicted_bytes.labels("snapshot").inc(
                len(evicted) * self._state.geometry.snapshot_record_bytes
            )
            self._run(self._directory.withdraw_snapshots(evicted))
        return slots[0] if slots else None

    def start(self, slot: int, key: bytes, locations: Sequence[SnapshotLocation]) -> None:
        """Pulls into a slot of take_slot; leases that wait for it learn the end."""
        self._state.snapshots.start_fill(slot, key)
        self._state.snapshots.pin(slot)
        self._num_running += 1
        self._run(self._pull(slot, key, locations))

    def check(self, slot: int, key: bytes) -> asyncio.Event:
        """Verifies what a restart left in a slot that is suspect, or FILLING and pinned; the event is set at its end."""
        self._state.snapshots.pin(slot)
        self._state.snapshots.start_fill(slot, key)
        self._num_running += 1
        done = asyncio.Event()
        self._run(self._check(slot, key, done))
        return done

    def find(self, key: bytes) -> Source | None:
        """Transport.listen's question: our snapshot at the end of the block with this key, pinned while it is sent."""
        snapshots, memory = self._state.snapshots, self._state.memory
        slot = snapshots.find(b"\x01" + key)
        if slot is None or snapshots.state(slot) is not SlotState.VALID or snapshots.is_suspect(slot):
            return None
        snapshots.pin(slot)
        return Source(
            view=memory.snapshot(slot),
            fd=memory.fd,
            offset=memory.snapshot_offset(slot),
            release=lambda: snapshots.unpin(slot),
        )

    def keys(self) -> list[bytes]:
        """Snapshots that a peer may ask for."""
        snapshots = self._state.snapshots
        valid = [slot for slot in snapshots.slots_in((SlotState.VALID,)) if not snapshots.is_suspect(slot)]
        return [key for slot in valid if (key := snapshots.key(slot)) is not None]

    async def settle_late(self) -> None:
        """Housekeeping: gives back the slots of late pulls that are over."""
        await self._close_late_peers()
        still_late = []
        for late in self._late:
            if late.outcome.settled():
                self._state.snapshots.settle(late.slot)
            else:
                still_late.append(late)
        self._late = still_late

    async def _close_late_peers(self) -> None:
        """All of them when there are too many late pulls, else those whose pull is late for too long."""
        now = self._clock()
        is_full = len(self._late) > self._max_quarantined
        endpoints = {late.endpoint for late in self._late if is_full or now - late.since > _LATE_SECONDS}
        for endpoint in endpoints:
            extra = {"endpoint": endpoint, "late_pulls": len(self._late), "limit": self._max_quarantined}
            logger.warning("late pulls hold snapshot slots; connections closed", extra=extra)
            await self._transport.close_peer(endpoint)
        # Not again in the next round: a transport may take a moment to settle what it closed.
        self._late = [replace(late, since=now) if late.endpoint in endpoints else late for late in self._late]

    async def _pull(self, slot: int, key: bytes, locations: Sequence[SnapshotLocation]) -> None:
        started = time.monotonic()
        deadline = started + self._deadline_seconds
        target = self._state.memory.snapshot(slot)
        reason = "absent"
        try:
            for location in locations:
                rest = deadline - time.monotonic()
                if rest <= 0:
                    reason = "late"
                    break
                endpoint = location.holder.endpoint
                outcome = await self._transport.pull(endpoint, key[_NAMESPACE_BYTES:], target, deadline_seconds=rest)
                if outcome.state is PullState.DONE:
                    failure = await self._verify(slot, key)
                    if failure is None:
                        self._arrived(slot, key, time.monotonic() - started)
                        return
                    reason = failure
                else:
                    reason = str(outcome.state)
                self._run(self._directory.report_failure(location))
                if not outcome.settled():
                    self._fail(slot, reason, self._late_now(slot, endpoint, outcome))
                    return
            self._fail(slot, reason, None)
        except BaseException:
            # Cancelled, or a transport that broke its promise: whether it still writes is unknown, so the slot is lost.
            self._state.snapshots.quarantine(slot)
            self._state.leases.note_snapshot(slot, SnapshotState.FAILED)
            raise
        finally:
            self._num_running -= 1
            self._state.snapshots.unpin(slot)

    def _late_now(self, slot: int, endpoint: str, outcome: PullOutcome) -> _Late:
        return _Late(slot=slot, endpoint=endpoint, outcome=outcome, since=self._clock())

    async def _check(self, slot: int, key: bytes, done: asyncio.Event) -> None:
        try:
            failure = await self._verify(slot, key)
            if failure is None:
                self._state.finish_snapshot(slot, key)
                self._state.leases.note_snapshot(slot, SnapshotState.READY)
                await self._directory.publish_snapshots([key])
            else:
                self._fail(slot, failure, None)
        finally:
            self._num_running -= 1
            self._state.snapshots.unpin(slot)
            done.set()

    async def _verify(self, slot: int, key: bytes) -> str | None:
        record = self._state.memory.snapshot(slot)
        verify = self._state.snapshot_codec.verify
        loop = asyncio.get_running_loop()
        failure = await loop.run_in_executor(self._threads, lambda: verify(record, key=key))
        if failure is not None:
            self._metrics.verify_fail.labels(str(failure)).inc()
        return None if failure is None else str(failure)

    def _arrived(self, slot: int, key: bytes, seconds: float) -> None:
        self._state.finish_snapshot(slot, key)
        self._state.leases.note_snapshot(slot, SnapshotState.READY)
        self._metrics.swa_pull_seconds.observe(seconds)
        self._metrics.swapin_bytes.labels("peer").inc(self._state.geometry.snapshot_record_bytes)
        self._run(self._directory.publish_snapshots([key]))

    def _fail(self, slot: int, reason: str, late: _Late | None) -> None:
        if late is None:
            self._state.snapshots.fail(slot)
        else:
            self._state.snapshots.quarantine(slot)
            self._late.append(late)
        self._state.leases.note_snapshot(slot, SnapshotState.FAILED)
        self._metrics.swa_pull_fail.labels(reason).inc()
        logger.warning("snapshot did not arrive; the hit is replayed", extra={"reason": reason})
