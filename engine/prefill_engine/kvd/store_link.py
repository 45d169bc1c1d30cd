"""kvd's view of its store: opened in the background, left alone while it fails, announced to the directory (kv.md 7.5).

Owned by the Keeper, on its loop; opening, scanning and collecting run on a thread of their own. The trap: a mount may hang
rather than fail, so nothing here is waited for without a limit by whoever answers a rank.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from typing import TypeVar

from prefill_engine.kv.directory import Directory
from prefill_engine.kv.pool_memory import PoolGeometry
from prefill_engine.kv.segments import SegmentInfo, SegmentStore
from prefill_engine.kvd.breaker import Breaker, Renewal

logger = logging.getLogger(__name__)

T = TypeVar("T")
StoreOpener = Callable[[PoolGeometry], SegmentStore]
"""Opens the store for this geometry; blocks. Raises ConfigError or StoreUnavailable."""
MediumForgetter = Callable[[], Callable[[], None]]
"""Gives up what stores were opened with, so that the next opening begins anew. What it returns ends that, and blocks; those
stores must be closed by then."""

_RETRY_SECONDS = (0.5, 15.0)
_DIRECTORY_SECONDS = 30.0
_COLLECT_SECONDS = 10.0
_ANNOUNCE_SEGMENTS = 256
_MAX_FAILURES = 3
_FIRST_TRY_SECONDS = 5.0


class StoreLink:
    """opener: None = no store behind the pool. forget_medium: None = the medium has nothing that dies with a mount.
    collect_seconds: between two rounds of garbage collection."""

    def __init__(
        self,
        opener: StoreOpener | None,
        directory: Directory,
        *,
        forget_medium: MediumForgetter | None = None,
        renewal: Renewal | None = None,
        collect_seconds: float = _COLLECT_SECONDS,
    ) -> None:
        self._opener = opener
        self._directory = directory
        self._forget_medium = forget_medium
        self._renewal = renewal or Renewal(clock=time.monotonic)
        self._collect_seconds = collect_seconds
        self._store: SegmentStore | None = None
        self._reads, self._writes = _new_breaker(), _new_breaker()
        # Two: a scan of a large store must not keep garbage from being collected.
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="kvd-store")
        self._tasks: list[asyncio.Task[None]] = []
        self._geometry: PoolGeometry | None = None
        self._announcing: asyncio.Task[None] | None = None
        self._tried = asyncio.Event()
        self.last_error = ""

    @property
    def is_configured(self) -> bool:
        return self._opener is not None

    @property
    def is_up(self) -> bool:
        """Open, and neither reads nor writes are failing; True without a store."""
        if self._opener is None:
            return True
        return self._store is not None and not self._reads.is_open and not self._writes.is_open

    @property
    def store_id(self) -> str:
        return "" if self._store is None else self._store.store_id

    def counters(self) -> dict[str, int]:
        return {} if self._store is None else self._store.counters()

    def reader(self) -> SegmentStore | None:
        """The store, if a read may be tried now."""
        return self._store if self._store is not None and self._reads.allows() else None

    def writer(self) -> SegmentStore | None:
        """The store, if a write may be tried now."""
        return self._store if self._store is not None and self._writes.allows() else None

    async def first_try(self) -> None:
        """Until opening has succeeded or failed once; a moment after a start, unless the medium hangs."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._tried.wait(), _FIRST_TRY_SECONDS)

    def note_read(self, answered: bool) -> None:
        self._note(self._reads, answered, "reads from")

    def note_write(self, answered: bool) -> None:
        self._note(self._writes, answered, "writes to")

    def start(self, geometry: PoolGeometry) -> None:
        self._geometry = geometry
        if self._opener is not None:
            self._tasks = [asyncio.create_task(self._keep(self._opener, geometry))]

    def announce_all(self) -> None:
        """Tells the directory every segment again: at start, and when the directory has forgotten."""
        store = self._store
        if store is not None and (self._announcing is None or self._announcing.done()):
            self._announcing = asyncio.create_task(self._announce(store))
            self._tasks.append(self._announcing)

    def reopen(self) -> None:
        """After the medium was mounted anew: handles and rings of the old mount are dead."""
        was_open = self._store is not None
        self._give_up()
        opener, geometry = self._opener, self._geometry
        if not was_open or opener is None or geometry is None:
            return  # it is being opened, or will be
        for task in self._tasks:
            task.cancel()
        self._tasks = [asyncio.create_task(self._keep(opener, geometry))]

    async def stop(self) -> None:
        """Of this geometry; reads and writes must have ended."""
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with suppress(asyncio.CancelledError):
                await task
        self._tasks = []
        store, self._store = self._store, None
        if store is not None:
            await self._in_thread(store.close)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _keep(self, opener: StoreOpener, geometry: PoolGeometry) -> None:
        while True:
            self._store = store = await self._open(opener, geometry)
            self.last_error = ""
            self._tried.set()
            logger.info("store open", extra={"store_id": store.store_id})
            self.announce_all()
            while True:
                await asyncio.sleep(self._collect_seconds)
                if self._is_renewal_due():
                    break
                await self._collect(store)
            logger.warning("the store goes on failing; opened anew, for its mount may be another one")
            if self._announcing is not None:
                self._announcing.cancel()
            self._give_up()

    async def _open(self, opener: StoreOpener, geometry: PoolGeometry) -> SegmentStore:
        pause, longest = _RETRY_SECONDS
        while True:
            try:
                return await self._in_thread(lambda: opener(geometry))
            except Exception as error:
                text = str(error) or repr(error)
                if text != self.last_error:
                    logger.warning("store can't be opened; serving the pool alone", extra={"detail": text})
                self.last_error = text
                self._tried.set()
                if self._is_renewal_due():
                    self._give_up()
                await asyncio.sleep(pause)
                pause = min(2 * pause, longest)

    def _is_renewal_due(self) -> bool:
        return self._forget_medium is not None and self._renewal.is_due(is_failing=not self.is_up)

    def _give_up(self) -> None:
        """The store, if it is open, and what it was opened with. They are ended when their last call has returned."""
        store, self._store = self._store, None
        end_medium = self._forget_medium() if self._forget_medium is not None else None
        self._reads, self._writes = _new_breaker(), _new_breaker()

        def end() -> None:
            if store is not None:
                store.close()
            if end_medium is not None:
                end_medium()

        # Not one of our two threads: it may wait for a call that a dead mount holds for ever.
        threading.Thread(target=end, name="kvd-store-end", daemon=True).start()

    async def _announce(self, store: SegmentStore) -> None:
        segments = store.scan()
        num = 0
        while batch := await self._in_thread(lambda: _next_batch(segments)):
            num += len(batch)
            await self._directory.publish_segments(store.store_id, batch)
        logger.info("segments announced", extra={"segments": num})

    async def _collect(self, store: SegmentStore) -> None:
        loop = asyncio.get_running_loop()

        def withdraw(names: Sequence[str]) -> None:
            done = asyncio.run_coroutine_threadsafe(self._directory.withdraw_segments(store.store_id, names), loop)
            done.result(timeout=_DIRECTORY_SECONDS)

        def announce(segments: Sequence[SegmentInfo]) -> None:
            done = asyncio.run_coroutine_threadsafe(self._directory.publish_segments(store.store_id, segments), loop)
            done.result(timeout=_DIRECTORY_SECONDS)

        try:
            num_bytes = await self._in_thread(lambda: store.collect(withdraw=withdraw, announce=announce))
        except Exception:
            logger.exception("garbage collection of the store failed; tried again")
        else:
            if num_bytes:
                logger.info("segments deleted", extra={"bytes": num_bytes})

    def _note(self, breaker: Breaker, answered: bool, what: str) -> None:
        was_open = breaker.is_open
        if answered:
            breaker.succeed()
            self._renewal.succeed()
        else:
            breaker.fail()
        if breaker.is_open != was_open:
            state = "failing; misses until it answers" if breaker.is_open else "working again"
            logger.warning("%s the store are %s", what, state)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _new_breaker() -> Breaker:
    return Breaker(limit=_MAX_FAILURES, clock=time.monotonic)


def _next_batch(segments: Iterator[SegmentInfo]) -> list[SegmentInfo]:
    return list(islice(segments, _ANNOUNCE_SEGMENTS))
