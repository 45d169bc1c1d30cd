"""How SWA snapshots and hand-overs travel between processes (kv.md 4.5). Protocol and data only.

The trap: a destination whose transfer timed out belongs to the transport until it says otherwise: it may still be written
(ai-dynamo/nixl#2067). So a pull ends in an outcome with `settled`, and nobody reuses the destination before that is true.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


def protocol_of(kind: str) -> str:
    """What a peer must speak to understand a transport of this kind: "tcp", "tcp+tls", "nixl", "nixl+tls". UCX's agents agree by
    themselves on what they use below."""
    return kind.partition("-")[0]


class PullState(StrEnum):
    DONE = "done"
    """All bytes are in the destination. Not verified here: that is for the record's own checksum."""
    ABSENT = "absent"
    """The peer answered that it has no such thing."""
    BUSY = "busy"
    """The peer has it, but can't give it by this transport now: another way may be quicker than another try."""
    FAILED = "failed"
    """Connection refused or lost, protocol or size mismatch."""
    LATE = "late"
    """The deadline passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PullOutcome:
    """settled: True once nothing can be written into the destination any more; always True for DONE, ABSENT and BUSY."""

    state: PullState
    reason: str
    seconds: float
    settled: Callable[[], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A readable thing of this process, pinned until `release` is called. view: its bytes. fd, offset: where they stand in a
    file, for zero-copy sending (fd -1 = nowhere)."""

    view: memoryview
    fd: int
    offset: int
    release: Callable[[], None]


class Transport(Protocol):
    """One side's end: a listener for peers and pulls from peers. Used on one event loop."""

    @property
    def kind(self) -> str:
        """What is really in use: "tcp", "tcp+tls", "nixl-ucx-tcp", "nixl-ucx-rdma" (nothing else was left
        to UCX), "nixl-ucx-any" (UCX has a device and its choice), with agreement over TLS "nixl+tls-ucx-..."; shown by
        kv_transport_info."""
        ...

    @property
    def counters(self) -> Mapping[str, int]:
        """Monotonic, by what happened; exported as kv_transport_events_total."""
        ...

    async def listen(self, find: Callable[[bytes], Source | None]) -> str:
        """Serves things by their key, 32 to 40 bytes (a capability: it must be presented in full). Returns host:port."""
        ...

    async def use_region(self, region: memoryview) -> None:
        """Where everything that is pulled or served stands from now on, instead of any region before: memory that a transport
        has to register is registered once. Other memory works as well. Call it with nothing in flight."""
        ...

    async def pull(self, endpoint: str, key: bytes, target: memoryview, *, deadline_seconds: float) -> PullOutcome:
        """Copies the thing with this key into `target` (exactly as long). Never raises for what a peer or the network does."""
        ...

    async def push(self, endpoint: str, key: bytes, source: memoryview, *, deadline_seconds: float) -> PullOutcome:
        """Offers bytes to a peer that granted `key` (accept); DONE = the peer has all of them."""
        ...

    def accept(self, key: bytes, target: memoryview, done: Callable[[], None]) -> Callable[[], bool]:
        """Grants one push into `target`; `done` is called when all bytes are there. The result revokes the grant: True = nothing
        can be written any more, False = a write is in flight; ask again."""
        ...

    async def close_peer(self, endpoint: str) -> None:
        """Drops connections to a peer, which settles every late pull from it; any endpoint: and every write into granted memory
        whose peer has vanished."""
        ...

    async def close(self) -> None: ...
