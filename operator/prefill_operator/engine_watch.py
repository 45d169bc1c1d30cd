"""What only engines know, asked from time to time: state of the KV store, backlog, progress of a load, patches of encoders.

Fed by reconcile.py with the pods to ask; observe.py reads backlog, progress and a pool's load here, reconcile.py writes the
state of the store into the annotation prefill.dev/kv-store. Nothing here decides or writes, and the backlog wakes nobody: it is
there when a victim is chosen. The trap: a store that is slow for a moment makes an engine DEGRADED for a moment, and each change
costs a write; so only what is heard twice in a row counts, and an engine that does not answer changes nothing.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from prefill_operator.engine_client import EngineClient
from prefill_operator.engine_load import EngineReport, PatchRate, patch_rate, pool_load, progress_step
from prefill_operator.engine_wire import LoadState
from prefill_operator.imbalance import EncoderQueue, is_uneven, judge_imbalance
from prefill_operator.model import ImbalanceNote, LoadProgress, PoolLoad
from prefill_operator.names import Kind
from prefill_operator.resources import PoolKey

logger = logging.getLogger(__name__)

ROUND_SECONDS = 30.0
"""Each engine is asked this often, and less often where there are very many: one call takes 3 ms of CPU."""
LOADING_ROUND_SECONDS = 10.0
"""The same for one that loads its model: that takes a minute or two."""
MAX_SILENT_ROUNDS = 3
"""An engine that has not answered more often than this has no known load."""
# Nobody is asked: how soon to look whether there is somebody.
_IDLE_SECONDS = 5.0
_KNOWN = {LoadState.READY: False, LoadState.DEGRADED: True}


class _Round(Enum):
    """Engines that are asked in turn; the rounds run beside each other."""

    LOADING = "loading"
    TOLD = "told"
    """Engines with a store, and encoders: statuses tell what they answer."""
    BACKLOG = "backlog"
    """All others."""


_LEAST_PAUSE_SECONDS = {_Round.LOADING: 1 / 4, _Round.TOLD: 1 / 16, _Round.BACKLOG: 1 / 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedEngine:
    address: str
    has_store: bool
    """It serves with a KV store that it can lose."""
    is_degraded: bool
    """What its pod's annotation says now."""
    is_loading: bool
    """Its containers are not ready."""
    batch_patches: int = 0
    """Of encoders: most patches that it encodes at once."""


@dataclass(slots=True, kw_only=True)
class _Seen:
    pool: PoolKey
    engine: WatchedEngine
    is_degraded: bool
    heard: bool | None = None
    """What the last answer said of the store; None = there was none, or it says nothing."""
    report: EngineReport = field(default_factory=EngineReport)
    """The last answer; empty when the engine has been silent for too long."""
    reported_at: float = 0.0
    rate: PatchRate | None = None
    num_silent: int = 0

    @property
    def round(self) -> _Round:
        if self.engine.is_loading:
            return _Round.LOADING
        is_told = self.engine.has_store or self.pool.kind is Kind.VE_POOL
        return _Round.TOLD if is_told else _Round.BACKLOG


class EngineWatch:
    """All engines that are asked, by pod UID.

    on_change: called with the pool when an engine's store went or came back, when a load got 5 % further, and when the load of a
    VEPool is another. clock: monotonic seconds.
    """

    def __init__(
        self,
        engines: EngineClient,
        *,
        on_change: Callable[[PoolKey], None],
        seconds: float = ROUND_SECONDS,
        loading_seconds: float = LOADING_ROUND_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engines = engines
        self._on_change = on_change
        self._seconds = seconds
        self._loading_seconds = loading_seconds
        self._clock = clock
        self._seen: dict[str, _Seen] = {}
        self._uids: dict[PoolKey, frozenset[str]] = {}
        """Of _seen; every pass of a pool asks for its own, and there are thousands."""
        self._pool_loads: dict[PoolKey, PoolLoad] = {}
        self._uneven_since: dict[PoolKey, float] = {}
        """Pools whose last sums were all uneven, by our clock. Not kept anywhere else: a new leader counts anew."""

    @property
    def uids(self) -> tuple[str, ...]:
        return tuple(self._seen)

    def keep_only(self, pool: PoolKey, engines: Mapping[str, WatchedEngine]) -> None:
        """From now on these of the pool are asked, by pod UID, and no others of it."""
        for uid in self._uids.pop(pool, frozenset()) - engines.keys():
            del self._seen[uid]
        if engines:
            self._uids[pool] = frozenset(engines)
        else:
            self._pool_loads.pop(pool, None)
            self._uneven_since.pop(pool, None)
        for uid, engine in engines.items():
            seen = self._seen.get(uid)
            if seen is None or seen.engine.address != engine.address:
                self._seen[uid] = _Seen(pool=pool, engine=engine, is_degraded=engine.is_degraded)
            else:
                seen.engine = engine

    def is_degraded(self, uid: str) -> bool | None:
        """Whether the engine serves without its store; None = it has none, or is not asked."""
        seen = self._seen.get(uid)
        return seen.is_degraded if seen is not None and seen.engine.has_store else None

    def backlog_milliseconds(self, uid: str) -> float | None:
        """The engine's predicted wait; None = unknown."""
        seen = self._seen.get(uid)
        return None if seen is None else seen.report.backlog_milliseconds

    def progress(self, uid: str) -> LoadProgress | None:
        """Of the engine's weights; None = it does not load, or does not tell."""
        seen = self._seen.get(uid)
        return None if seen is None else seen.report.progress

    def pool_load(self, pool: PoolKey) -> PoolLoad | None:
        """Of a VEPool, as last summed up; None = unknown."""
        return self._pool_loads.get(pool)

    async def keep(self) -> None:
        """Asks one engine after the other, for ever. Those that do not answer hold up nobody."""
        async with asyncio.TaskGroup() as calls:
            for kind in _Round:
                calls.create_task(self._keep_asking(kind, calls))
            while True:
                await asyncio.sleep(self._seconds)
                self.sum_up()

    async def _keep_asking(self, kind: _Round, calls: asyncio.TaskGroup) -> None:
        seconds = self._loading_seconds if kind is _Round.LOADING else self._seconds
        while True:
            uids = [uid for uid, seen in self._seen.items() if seen.round is kind]
            for uid in uids:
                calls.create_task(self.look(uid))
                await asyncio.sleep(max(_LEAST_PAUSE_SECONDS[kind], seconds / len(uids)))
            if not uids:
                await asyncio.sleep(min(_IDLE_SECONDS, seconds))

    async def look(self, uid: str) -> None:
        """Asks this engine once."""
        seen = self._seen.get(uid)
        if seen is None:
            return
        try:
            report = await self._engines.report(seen.engine.address, kind=seen.pool.kind)
        except ConnectionError as error:
            logger.debug("engine does not report", extra={"address": seen.engine.address, "error": str(error)})
            report = None
        if self._seen.get(uid) is not seen:
            return
        is_store_told = self._note_store(seen, report)
        is_further = self._note_load(seen, report)
        if is_store_told or is_further:
            self._on_change(seen.pool)

    def sum_up(self) -> None:
        """The load of each pool of encoders, from the last answers. Every 30 s, so that a status follows no faster."""
        told: dict[PoolKey, dict[str, PatchRate]] = {pool: {} for pool in self._pool_loads}
        for uid, seen in self._seen.items():
            if seen.rate is not None and not seen.engine.is_loading:
                told.setdefault(seen.pool, {})[uid] = seen.rate
        for pool, rates in told.items():
            before = self._pool_loads.get(pool)
            # The last figures stay where nobody tells any more; that they are uneven does not.
            load = pool_load(tuple(rates.values())) or before
            load = None if load is None else replace(load, uneven=self._note_balance(pool, rates))
            if load is not None and load != before:
                self._pool_loads[pool] = load
                self._on_change(pool)

    def _note_balance(self, pool: PoolKey, rates: Mapping[str, PatchRate]) -> ImbalanceNote | None:
        """What is to be said of these rates by pod UID, after those of the rounds before."""
        queues = [
            EncoderQueue(uid=uid, queued=rate.queued, batch=self._seen[uid].engine.batch_patches)
            for uid, rate in rates.items()
        ]
        if not is_uneven(queues):
            self._uneven_since.pop(pool, None)
            return None
        now = self._clock()
        return judge_imbalance(queues, seconds=now - self._uneven_since.setdefault(pool, now))

    def _note_store(self, seen: _Seen, report: EngineReport | None) -> bool:
        """Whether the engine's store is another now."""
        answer = None if report is None else _KNOWN.get(report.state)
        before, seen.heard = seen.heard, answer
        if not seen.engine.has_store or answer is None or answer != before or answer == seen.is_degraded:
            return False
        seen.is_degraded = answer
        logger.info("kv store", extra={"pool": str(seen.pool), "address": seen.engine.address, "degraded": answer})
        return True

    def _note_load(self, seen: _Seen, report: EngineReport | None) -> bool:
        """Whether the engine's load of its model is a step further."""
        if report is None:
            seen.num_silent += 1
            if seen.num_silent <= MAX_SILENT_ROUNDS:
                return False
            report = EngineReport()
        else:
            seen.num_silent = 0
        now, before = self._clock(), seen.report
        elapsed = now - seen.reported_at
        seen.rate = None if report.patches is None else patch_rate(before.patches, report.patches, seconds=elapsed)
        seen.report, seen.reported_at = report, now
        return progress_step(report.progress) != progress_step(before.progress)
