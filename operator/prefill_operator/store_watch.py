"""Which engines serve without their KV store: asked from time to time, since nothing in a pod's status tells it (k8s.md 4.9).

Fed by reconcile.py with the pods to ask, which writes what comes out into their annotation prefill.dev/kv-store. Nothing here
decides or writes. The trap: a store that is slow for a moment makes an engine DEGRADED for a moment, and each change costs a
write; so only what is heard twice in a row counts, and an engine that does not answer changes nothing.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from prefill_operator.engine_client import EngineClient
from prefill_operator.engine_wire import LoadState
from prefill_operator.resources import PoolKey

logger = logging.getLogger(__name__)

ROUND_SECONDS = 30.0
"""Each engine is asked this often, and less often where there are very many."""
_LEAST_PAUSE_SECONDS = 1 / 16
# Nobody is asked: how soon to look whether there is somebody.
_IDLE_SECONDS = 5.0
_KNOWN = {LoadState.READY: False, LoadState.DEGRADED: True}


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedEngine:
    address: str
    is_degraded: bool
    """What its pod's annotation says now."""


@dataclass(slots=True, kw_only=True)
class _Seen:
    pool: PoolKey
    address: str
    is_degraded: bool
    heard: bool | None = None
    """The last answer; None = it gave none, or one that says nothing of the store."""


class StoreWatch:
    """All engines that are asked, by pod UID. on_change: called with the pool when an engine's store went or came back."""

    def __init__(
        self, engines: EngineClient, *, on_change: Callable[[PoolKey], None], seconds: float = ROUND_SECONDS
    ) -> None:
        self._engines = engines
        self._on_change = on_change
        self._seconds = seconds
        self._seen: dict[str, _Seen] = {}

    @property
    def uids(self) -> tuple[str, ...]:
        return tuple(self._seen)

    def keep_only(self, pool: PoolKey, engines: Mapping[str, WatchedEngine]) -> None:
        """From now on these of the pool are asked, by pod UID, and no others of it."""
        for uid in [uid for uid, seen in self._seen.items() if seen.pool == pool and uid not in engines]:
            del self._seen[uid]
        for uid, engine in engines.items():
            seen = self._seen.get(uid)
            if seen is None or seen.address != engine.address:
                self._seen[uid] = _Seen(pool=pool, address=engine.address, is_degraded=engine.is_degraded)

    def is_degraded(self, uid: str) -> bool | None:
        """Whether the engine serves without its store; None = it is not asked."""
        seen = self._seen.get(uid)
        return None if seen is None else seen.is_degraded

    async def keep(self) -> None:
        """Asks one engine after the other, for ever. Those that do not answer hold up nobody."""
        async with asyncio.TaskGroup() as calls:
            while True:
                uids = self.uids
                for uid in uids:
                    calls.create_task(self.look(uid))
                    await asyncio.sleep(max(_LEAST_PAUSE_SECONDS, self._seconds / len(uids)))
                if not uids:
                    await asyncio.sleep(min(_IDLE_SECONDS, self._seconds))

    async def look(self, uid: str) -> None:
        """Asks this engine once."""
        seen = self._seen.get(uid)
        if seen is None:
            return
        try:
            answer = _KNOWN.get(await self._engines.load_state(seen.address))
        except ConnectionError as error:
            logger.debug("engine does not tell its state", extra={"address": seen.address, "error": str(error)})
            answer = None
        before, seen.heard = seen.heard, answer
        if self._seen.get(uid) is not seen or answer is None or answer != before or answer == seen.is_degraded:
            return
        seen.is_degraded = answer
        logger.info("kv store", extra={"pool": str(seen.pool), "address": seen.address, "degraded": answer})
        self._on_change(seen.pool)
