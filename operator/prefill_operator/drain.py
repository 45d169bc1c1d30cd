"""Drains under way: one call of the engine's Drain per pod, and what it said last.

Begun by apply.py after the pod was annotated, and resumed from the annotation by reconcile.py after a restart (k8s.md 4.7).
Nothing here decides or writes: the planner reads `state` and deletes the pod when it is done, late, or out of reach. The engine
fixes the deadline at its first Drain (C43), so that calling again is harmless.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from prefill_operator.engine_client import EngineClient
from prefill_operator.names import Kind
from prefill_operator.resources import PoolKey

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainState:
    """What is known of one pod's drain. Times are seconds since the epoch, as in the planner."""

    done: bool = False
    unreachable_since: float | None = None


@dataclass(slots=True, kw_only=True)
class _Running:
    pool: PoolKey
    task: asyncio.Task[None]
    state: DrainState


class Drains:
    """All drains of this process, by pod UID. on_change: called with the pool when a state changed."""

    def __init__(
        self,
        engines: EngineClient,
        *,
        on_change: Callable[[PoolKey], None],
        clock: Callable[[], float] = time.time,
        retry_seconds: float = 1.0,
    ) -> None:
        self._engines = engines
        self._on_change = on_change
        self._clock = clock
        self._retry_seconds = retry_seconds
        self._running: dict[str, _Running] = {}

    def begin(self, uid: str, *, pool: PoolKey, address: str, timeout_seconds: float) -> None:
        """Starts the call, unless it runs already. Without an address the engine counts as unreachable from now on."""
        if uid in self._running:
            return
        state = DrainState(unreachable_since=None if address else self._clock())
        call = self._call(uid, address, kind=pool.kind, timeout_seconds=timeout_seconds)
        task = asyncio.create_task(call, name=f"drain {uid}")
        self._running[uid] = _Running(pool=pool, task=task, state=state)

    def state(self, uid: str) -> DrainState | None:
        """None if no drain of this pod was begun by this process."""
        running = self._running.get(uid)
        return running.state if running else None

    def keep_only(self, pool: PoolKey, uids: Iterable[str]) -> None:
        """Ends the calls of the pool's other pods: they are gone or no longer drained."""
        kept = set(uids)
        for uid in [uid for uid, running in self._running.items() if running.pool == pool and uid not in kept]:
            self._running.pop(uid).task.cancel()

    async def close(self) -> None:
        """Ends all calls. Engines go on draining by themselves."""
        tasks = [running.task for running in self._running.values()]
        self._running.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _call(self, uid: str, address: str, *, kind: Kind, timeout_seconds: float) -> None:
        end = self._clock() + timeout_seconds
        while address:
            left = max(0.0, end - self._clock())
            try:
                async for done in self._engines.drain(address, kind=kind, timeout_seconds=left):
                    self._set(uid, DrainState(done=done))
                    if done:
                        return
                raise ConnectionError("the engine ended the call before it was done")
            except ConnectionError as error:
                since = self._running[uid].state.unreachable_since if uid in self._running else None
                self._set(uid, DrainState(unreachable_since=since or self._clock()))
                logger.info("engine does not answer drain", extra={"address": address, "error": str(error)})
            await asyncio.sleep(self._retry_seconds)

    def _set(self, uid: str, state: DrainState) -> None:
        running = self._running.get(uid)
        if running is not None and running.state != state:
            running.state = state
            self._on_change(running.pool)
