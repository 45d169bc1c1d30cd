"""Where things are: segments of blocks in the store, SWA snapshots on nodes (kv.md 7.1). Protocol and data only.

Answers are hints; whoever follows one verifies. No call raises for a directory that is away: the answer is then "nothing known".
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from prefill_engine.kv.segments import BlockLocation, SegmentInfo
from prefill_plan.block_keys import BlockKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A kvd that serves snapshots to peers. epoch: of its incarnation. endpoint: host:port of its transport listener. transports:
    kinds that it speaks there; others do not try it by another."""

    holder_id: str
    epoch: int
    endpoint: str
    zone: str = ""
    transports: tuple[str, ...] = ("tcp",)


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotLocation:
    """key: snapshot key (prefill_plan.block_keys.snapshot_key)."""

    key: bytes
    holder: Holder


class Directory(Protocol):
    """What kvd asks and tells. Called on its event loop."""

    @property
    def counters(self) -> Mapping[str, int]:
        """Monotonic, by what happened; exported as kv_directory_client_events_total."""
        ...

    async def lookup_blocks(
        self, store_id: str, layout_id: bytes, keys: Sequence[BlockKey]
    ) -> tuple[BlockLocation, ...]:
        """Locations of the leading keys that are known."""
        ...

    async def lookup_snapshot(self, key: bytes) -> tuple[SnapshotLocation, ...]:
        """Holders other than this one, best first."""
        ...

    async def publish_segments(self, store_id: str, segments: Sequence[SegmentInfo]) -> None: ...

    async def withdraw_segments(self, store_id: str, names: Sequence[str]) -> None: ...

    async def publish_snapshots(self, keys: Sequence[bytes]) -> None: ...

    async def withdraw_snapshots(self, keys: Sequence[bytes]) -> None: ...

    async def report_failure(self, location: SnapshotLocation) -> None:
        """A pull from there failed; after some failures the location is not answered any more."""
        ...

    async def close(self) -> None: ...
