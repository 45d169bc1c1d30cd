"""LocalDirectory: a Directory inside this process. A kvd without a directory service has one alone; kvds of a test share one.

The trap: alone, it knows no peers: its snapshot look-ups are always empty, its block look-ups know what this kvd announced.
"""

from collections.abc import Callable, Mapping, Sequence

from prefill_engine.kv.directory import Holder, SnapshotLocation
from prefill_engine.kv.segments import BlockLocation, SegmentInfo
from prefill_engine.kvd.directory_failures import PullFailures
from prefill_engine.kvd.directory_state import DirectoryLimits, DirectoryState
from prefill_plan.block_keys import BlockKey

_NEVER = float("inf")


def new_local_state() -> DirectoryState:
    """A state whose holders never expire: they live in this process."""
    return DirectoryState(DirectoryLimits(expiry_seconds=_NEVER))


class LocalDirectory:
    """holder: this kvd. state: shared by the kvds that see each other. Clock: seconds, monotonic."""

    def __init__(self, state: DirectoryState, holder: Holder, *, clock: Callable[[], float]) -> None:
        self._state = state
        self._holder = holder
        self._clock = clock
        self._failures = PullFailures()
        state.join(holder, now=clock())

    @property
    def counters(self) -> Mapping[str, int]:
        """Nothing can fail here."""
        return {}

    async def lookup_blocks(
        self, store_id: str, layout_id: bytes, keys: Sequence[BlockKey]
    ) -> tuple[BlockLocation, ...]:
        return self._state.lookup_blocks(store_id, layout_id, keys)

    async def lookup_snapshot(self, key: bytes) -> tuple[SnapshotLocation, ...]:
        now = self._clock()
        found = self._state.lookup_snapshots([key], prefer_zone=self._holder.zone, now=now)
        return pullable(found, us=self._holder, failures=self._failures, now=now)

    async def publish_segments(self, store_id: str, segments: Sequence[SegmentInfo]) -> None:
        self._state.publish_segments(store_id, segments)

    async def withdraw_segments(self, store_id: str, names: Sequence[str]) -> None:
        self._state.withdraw_segments(store_id, names)

    async def publish_snapshots(self, keys: Sequence[bytes]) -> None:
        self._state.publish_snapshots(self._holder.holder_id, self._holder.epoch, keys, now=self._clock())

    async def withdraw_snapshots(self, keys: Sequence[bytes]) -> None:
        holder = self._holder
        self._state.withdraw_snapshots(holder.holder_id, holder.epoch, keys, everything=False, now=self._clock())

    async def report_failure(self, location: SnapshotLocation) -> None:
        now = self._clock()
        if self._failures.report(location, now=now):
            holder = location.holder
            self._state.withdraw_snapshots(holder.holder_id, holder.epoch, [location.key], everything=False, now=now)

    async def close(self) -> None:
        holder = self._holder
        self._state.withdraw_snapshots(holder.holder_id, holder.epoch, (), everything=True, now=self._clock())


def pullable(
    found: Sequence[SnapshotLocation], *, us: Holder, failures: PullFailures, now: float
) -> tuple[SnapshotLocation, ...]:
    """What is worth a pull: at other holders, by a transport that both speak, and not failing. Order is kept."""
    ours = _spoken(us)
    return tuple(
        location
        for location in found
        if location.holder.holder_id != us.holder_id
        and not ours.isdisjoint(_spoken(location.holder))
        and failures.allows(location, now=now)
    )


def _spoken(holder: Holder) -> set[str]:
    """What its listener understands: "tcp", "tcp+tls" or "nixl"; what UCX uses below ("nixl-ucx-rdma") agents agree on."""
    return {kind.partition("-")[0] for kind in holder.transports}
