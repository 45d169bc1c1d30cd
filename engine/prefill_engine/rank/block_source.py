"""Where a rank's hit blocks and snapshots come from and new ones go: the seam between KvKeeper and what stands behind it.

Two implementations: StoreWorker (a block store in this process) and KvdSource (the pod's KV sidecar). All calls are the step
thread's and return at once; results come out of `completions`, announced by the rank's wake-up. The traps: whatever fails is a
miss, never an exception; slots named in a call stay referenced until its answer is back, so that nothing is freed under I/O.
"""

import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from prefill_engine.swa_pool import SwaSnapshot
from prefill_plan.block_keys import BlockKey


class SnapshotOutlook(Enum):
    """Of the snapshot at the end of the blocks found."""

    NONE = auto()
    HELD = auto()  # on this node: will be here before the first chunk
    PULLING = auto()  # on its way from a peer: used if it arrives in time


@dataclass(frozen=True, slots=True, kw_only=True)
class LookUp:
    """keys: of the whole wanted hit, in chain order. resident_blocks: leading ones that the rank's own pool has. tenant: who
    pays for the room. step_waits: nothing else is to be computed, so the first groups are wanted before whole blocks."""

    attempt_id: bytes
    keys: tuple[BlockKey, ...]
    resident_blocks: int
    tenant: str
    step_waits: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """keys: of the hit. first_block: of those to load. slots: of the KV cache, one per block [first_block, len(keys))."""

    attempt_id: bytes
    keys: tuple[BlockKey, ...]
    first_block: int
    slots: tuple[int, ...]
    tenant: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteItem:
    """One complete block to publish; provenance 1 = descends from a replay (kv.md 2.2)."""

    key: BlockKey
    slot: int
    block_index: int
    provenance: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupDone:
    """present: leading keys beyond the resident ones that the source seems to have. snapshot_due: CLOCK_MONOTONIC seconds until
    which a PULLING snapshot is worth a wait."""

    attempt_id: bytes
    present: int
    snapshot: SnapshotOutlook = SnapshotOutlook.NONE
    snapshot_due: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotDone:
    """The snapshot that a look-up spoke of, verified; None: it will not come."""

    attempt_id: bytes
    snapshot: SwaSnapshot | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLoaded:
    """Layer groups 0..groups-1 of every block of the load are in their slots; more is on its way. seconds: since the load began.
    at_ns: CLOCK_MONOTONIC of it; a step may be running when it is told."""

    attempt_id: bytes
    groups: int
    num_bytes: int
    seconds: float
    at_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadDone:
    """provenances: one per leading block that is in its slot, verified; 1 = descends from a replay. seconds, at_ns: as
    GroupLoaded's."""

    attempt_id: bytes
    provenances: tuple[int, ...]
    num_bytes: int
    seconds: float
    at_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteDone:
    """Result of one write job; slots: every slot the job named, written or not."""

    attempt_id: bytes
    committed: int
    failed: int
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotsKept:
    """Result of one keep_snapshots job: positions that can be found by later attempts."""

    attempt_id: bytes
    positions: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFailed:
    """A thread of the source ended by a fault of ours: what it owes to attempts will not come, so the rank must end."""

    error: Exception


Completion = LookupDone | SnapshotDone | GroupLoaded | LoadDone | WriteDone | SnapshotsKept | SourceFailed


def guarded(run: Callable[[], None], post: Callable[[Completion], None]) -> Callable[[], None]:
    """`run` for a thread: an exception that would end it unseen is posted instead."""

    def work() -> None:
        try:
            run()
        except Exception as error:
            post(SourceFailed(error=error))

    return work


class StepGate(Protocol):
    """The layer gates of one step (C18). poisoned: attempts whose hit did not come in time; their rows are worthless."""

    @property
    def poisoned(self) -> frozenset[bytes]: ...

    @property
    def stall_seconds(self) -> float:
        """Time the step stood still at its gates so far."""
        ...

    def wait(self, layer: int) -> None:
        """Called just before KV source `layer` is read; returns when every attempt of the step has it or is poisoned."""
        ...


class OpenGate:
    """The gate of steps in which nothing is on its way."""

    poisoned: frozenset[bytes] = frozenset()
    stall_seconds = 0.0

    def wait(self, layer: int) -> None:
        """Never waits."""


class BlockSource(Protocol):
    """What the keeper needs of it. look_up, load and keep_snapshots return False when no answer will come."""

    completions: "queue.SimpleQueue[Completion]"

    @property
    def is_ok(self) -> bool:
        """False: hits are lost and writes fail for now; the engine is degraded."""
        ...

    @property
    def is_lost(self) -> bool:
        """True: it will not come back by itself soon."""
        ...

    def look_up(self, request: LookUp) -> bool:
        """Asks what of a hit is there; answered by LookupDone."""
        ...

    def load(self, request: Load) -> bool:
        """Brings the blocks of a looked-up hit into their slots; answered by SnapshotDone, GroupLoaded (each maybe) and
        LoadDone (at last)."""
        ...

    def gate(self, attempt_ids: Sequence[bytes], *, is_shared: bool) -> StepGate:
        """Gates of a step in which these attempts still load; is_shared: it has other attempts, too."""
        ...

    def urge(self, attempt_id: bytes) -> None:
        """Nothing but this load is left to wait for: what an attempt can begin with should come first from now on."""
        ...

    def let_go(self, attempt_id: bytes) -> None:
        """The attempt needs its look-up no more; a load in progress ends early. Repeating it is fine."""
        ...

    def write(self, attempt_id: bytes, items: Sequence[WriteItem], *, tenant: str) -> None:
        """Publishes blocks in chain order; answered by WriteDone."""
        ...

    def keep_snapshots(self, attempt_id: bytes, snapshots: Sequence[tuple[bytes, SwaSnapshot]], *, tenant: str) -> bool:
        """Keeps snapshots, given with their keys, for later hits; answered by SnapshotsKept."""
        ...

    def counters(self) -> dict[str, int]:
        """Monotonic counts, for metrics."""
        ...

    def stop(self) -> None:
        """Finishes queued writes and ends the threads."""
        ...
