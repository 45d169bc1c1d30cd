"""A data transport inside one process whose writes can be held, refused and come late, as RDMA's do (ai-dynamo/nixl#2067).

Endpoints share a FakeNetwork. The point of it: a write that timed out stays in flight until `release` lets it land or
`close_peer` ends it, and until then `settled` is False.
"""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

from prefill_engine.kv.transport.contract import PullOutcome, PullState, Source


@dataclass(slots=True)
class FakeNetwork:
    """hold: pushes wait until `release`. refuse: pushes fail at once. post_error: they raise. flip: pulled bytes are damaged.
    closes_late: close_peer ends late writes. started: a push began. pushed: keys of writes that landed."""

    transports: dict[str, "FakeTransport"] = field(default_factory=dict)
    hold: bool = False
    refuse: bool = False
    post_error: bool = False
    flip: bool = False
    closes_late: bool = True
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    started: asyncio.Event = field(default_factory=asyncio.Event)
    pushed: list[bytes] = field(default_factory=list)

    def release(self) -> None:
        self.hold = False
        self.gate.set()


@dataclass(slots=True)
class FakeTransport:
    network: FakeNetwork
    endpoint: str = ""
    kind: str = "tcp"
    closed_peers: list[str] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)
    _find: Callable[[bytes], Source | None] = lambda _key: None
    _grants: dict[bytes, tuple[memoryview, Callable[[], None]]] = field(default_factory=dict)
    _writing: set[bytes] = field(default_factory=set)
    _late: dict[str, list["asyncio.Task[None]"]] = field(default_factory=dict)

    async def listen(self, find: Callable[[bytes], Source | None]) -> str:
        self.endpoint = f"fake:{len(self.network.transports) + 1}"
        self._find = find
        self.network.transports[self.endpoint] = self
        return self.endpoint

    async def use_region(self, region: memoryview) -> None:
        return

    async def pull(self, endpoint: str, key: bytes, target: memoryview, *, deadline_seconds: float) -> PullOutcome:
        peer = self.network.transports.get(endpoint)
        source = peer._find(key) if peer is not None else None
        if peer is None:
            return _outcome(PullState.FAILED, "no such peer")
        if source is None:
            return _outcome(PullState.ABSENT, "absent")
        if len(source.view) != len(target):
            return _outcome(PullState.FAILED, "refused: size")
        target[:] = source.view
        if self.network.flip:
            target[0] ^= 1
        source.release()
        return _outcome(PullState.DONE, "")

    async def push(self, endpoint: str, key: bytes, source: memoryview, *, deadline_seconds: float) -> PullOutcome:
        self.network.started.set()
        if self.network.post_error:
            raise RuntimeError("cannot post")
        peer = self.network.transports.get(endpoint)
        if peer is None or self.network.refuse or key not in peer._grants:
            return _outcome(PullState.FAILED, "refused: no_grant")
        writing = asyncio.create_task(peer._write(key, bytes(source)))
        done, _ = await asyncio.wait((writing,), timeout=deadline_seconds)
        if done:
            return _outcome(PullState.DONE, "")
        self._late.setdefault(endpoint, []).append(writing)
        return PullOutcome(state=PullState.LATE, reason="late", seconds=deadline_seconds, settled=writing.done)

    async def _write(self, key: bytes, data: bytes) -> None:
        self._writing.add(key)
        try:
            if self.network.hold:
                await self.network.gate.wait()
            grant = self._grants.pop(key, None)
            if grant is not None:
                grant[0][:] = data
                self.network.pushed.append(key)
                grant[1]()
        finally:
            self._writing.discard(key)

    def accept(self, key: bytes, target: memoryview, done: Callable[[], None]) -> Callable[[], bool]:
        self._grants[key] = (target, done)

        def revoke() -> bool:
            if key in self._writing:
                return False
            self._grants.pop(key, None)
            return True

        return revoke

    async def close_peer(self, endpoint: str) -> None:
        self.closed_peers.append(endpoint)
        if self.network.closes_late:
            for task in self._late.pop(endpoint, []):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task

    async def close(self) -> None:
        for endpoint in list(self._late):
            await self.close_peer(endpoint)
        self.network.transports.pop(self.endpoint, None)


def _outcome(state: PullState, reason: str) -> PullOutcome:
    return PullOutcome(state=state, reason=reason, seconds=0.0, settled=lambda: True)
