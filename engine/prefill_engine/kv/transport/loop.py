"""LoopTransport: kvds of one process copy from each other's memory; for tests and demos without sockets.

The trap: it proves nothing about a network. It passes the contract suite, so code that runs on it sees the same outcomes.
"""

import time
from collections.abc import Callable

from prefill_engine.kv.transport.contract import PullOutcome, PullState, Source
from prefill_engine.kv.transport.grants import Grant, Grants
from prefill_engine.kv.transport.outcome import check_arguments, ended


class LoopHub:
    """The transports that see each other, by endpoint. Shared by those who should."""

    def __init__(self) -> None:
        self.members: dict[str, LoopTransport] = {}
        self._next = 1

    def join(self, member: "LoopTransport") -> str:
        endpoint = f"loop:{self._next}"
        self._next += 1
        self.members[endpoint] = member
        return endpoint


class LoopTransport:
    """Owner of its grants and of its place in the hub."""

    def __init__(self, hub: LoopHub) -> None:
        self._hub = hub
        self._endpoint = ""
        self._find: Callable[[bytes], Source | None] = lambda _key: None
        self._grants = Grants()

    @property
    def kind(self) -> str:
        return "loop"

    @property
    def counters(self) -> dict[str, int]:
        return {}

    async def listen(self, find: Callable[[bytes], Source | None]) -> str:
        self._find = find
        self._endpoint = self._hub.join(self)
        return self._endpoint

    async def use_region(self, region: memoryview) -> None:
        """Nothing is registered."""

    async def pull(self, endpoint: str, key: bytes, target: memoryview, *, deadline_seconds: float) -> PullOutcome:
        check_arguments(key, deadline_seconds)
        started = time.monotonic()
        owner = self._hub.members.get(endpoint)
        if owner is None:
            return ended(PullState.FAILED, "nobody listens there", started=started)
        source = owner._find(key)
        if source is None:
            return ended(PullState.ABSENT, "absent", started=started)
        try:
            if len(source.view) != len(target):
                return ended(PullState.FAILED, "refused: size", started=started)
            target[:] = source.view
        finally:
            source.release()
        return ended(PullState.DONE, "", started=started)

    async def push(self, endpoint: str, key: bytes, source: memoryview, *, deadline_seconds: float) -> PullOutcome:
        check_arguments(key, deadline_seconds)
        started = time.monotonic()
        owner = self._hub.members.get(endpoint)
        if owner is None:
            return ended(PullState.FAILED, "nobody listens there", started=started)
        grant: Grant | None = owner._grants.begin(key, lambda: True)
        if grant is None:
            return ended(PullState.FAILED, "refused: no_grant", started=started)
        if len(grant.target) != len(source):
            owner._grants.fail(grant)
            return ended(PullState.FAILED, "refused: size", started=started)
        grant.target[:] = source
        owner._grants.finish(grant)
        return ended(PullState.DONE, "", started=started)

    def accept(self, key: bytes, target: memoryview, done: Callable[[], None]) -> Callable[[], bool]:
        return self._grants.accept(key, target, done)

    async def close_peer(self, endpoint: str) -> None:
        """Nothing is ever in flight."""

    async def close(self) -> None:
        self._hub.members.pop(self._endpoint, None)
