"""`prefill-engine kv serve`: builds every object of kvd, serves until SIGTERM, and turns the end into an exit code (C46).

Start order: probe port -> pool, prefaulted -> 3FS mount and store -> transport, directory -> Unix socket -> ready. End order:
no new reservations -> write-back, for a bounded time -> socket -> the rest. The trap: a thread may be stuck in a dead mount; the
process then leaves without it.
"""

import asyncio
import json
import logging
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import CollectorRegistry

from prefill_engine.kv.directory import Directory, Holder
from prefill_engine.kv.pool_memory import PoolGeometry, PoolMemory
from prefill_engine.kv.segments import SegmentStore
from prefill_engine.kv.transport.contract import Transport
from prefill_engine.kvd.build import StoreMaker, build_directory, build_transport
from prefill_engine.kvd.fuse_mount import FuseMount
from prefill_engine.kvd.keeper import Keeper
from prefill_engine.kvd.kvd_metrics import KvdMetrics
from prefill_engine.kvd.lease_journal import check_room, journal_path
from prefill_engine.kvd.listeners import Listeners
from prefill_engine.kvd.owner import EngineUser
from prefill_engine.kvd.store_link import StoreLink
from prefill_engine.settings import HostIdentity
from prefill_plan.errors import ConfigError, ExitCode
from prefill_plan.kvd_config import KvdConfig

logger = logging.getLogger(__name__)

_PREFAULT_THREADS = 4
_STORE_RETRY_SECONDS = 0.5
_STORE_CHECK_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class KvdOptions:
    """drain_seconds: longest wait for the write-back at the end. announce: gets one JSON line when kvd is ready. wrap_store: what
    stands between kvd and its store; the demo's makes a slow medium of it."""

    drain_seconds: float
    announce: Callable[[str], None]
    wrap_store: Callable[[SegmentStore, PoolGeometry], SegmentStore] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KvdEnding:
    exit_code: ExitCode
    detail: str


def run_kvd(config: KvdConfig, identity: HostIdentity, options: KvdOptions) -> KvdEnding:
    """Serves until SIGTERM or SIGINT."""
    try:
        config.check()
        detail = asyncio.run(_Process(config, identity, options).serve())
    except ConfigError as error:
        return KvdEnding(exit_code=ExitCode.CONFIG, detail=error.message)
    return KvdEnding(exit_code=ExitCode.DRAINED, detail=detail)


class _Process:
    """What is open, so that the end can close it in order."""

    def __init__(self, config: KvdConfig, identity: HostIdentity, options: KvdOptions) -> None:
        self._config = config
        self._identity = identity
        self._options = options
        self._registry = CollectorRegistry()
        self._metrics = KvdMetrics(self._registry)
        self._epoch = time.time_ns() // 1_000_000
        self._maker = StoreMaker(config.store, awaits_mount=bool(config.fuse_config))
        self._store: StoreLink | None = None
        self._fuse: FuseMount | None = None
        # Not the loop's own threads: its end waits for those, and a dead mount may hold one for ever.
        self._checker = ThreadPoolExecutor(1, thread_name_prefix="kvd-probe")
        self._ended = asyncio.Event()

    async def serve(self) -> str:
        """Returns what is to be said of the end. Raises ConfigError."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._ended.set)
        owner = EngineUser(self._config.engine_uid)
        listeners = Listeners(self._config, owner)
        memory: PoolMemory | None = None
        try:
            await listeners.open_probe()
            memory = await asyncio.to_thread(self._make_pool, owner)
            if self._config.required:
                await self._prepare_store()
            transport = build_transport(self._config.transport, pod_ip=self._identity.pod_ip)
            try:
                return await self._run(memory, transport, listeners)
            finally:
                await transport.close()
        finally:
            self._checker.shutdown(wait=False, cancel_futures=True)
            if self._fuse is not None:
                await self._fuse.stop()
            await listeners.close()
            if memory is not None:
                memory.close()
                self._remove_own_pool(memory.path)

    def _remove_own_pool(self, path: str) -> None:
        """A pool named after this very process can't be found by a later one. After a kill it stays, as any does."""
        if not self._config.pool_path and self._identity.engine_id.endswith(f"-{os.getpid()}"):
            for name in (path, journal_path(path)):
                with suppress(FileNotFoundError):
                    os.unlink(name)

    def _make_pool(self, owner: EngineUser) -> PoolMemory:
        path = self._config.pool_path or f"/dev/shm/kvd.{self._identity.engine_id}"
        owner.take_back(path)
        memory = PoolMemory.create(path, pool_bytes=self._config.pool_bytes, epoch=self._epoch)
        started = time.monotonic()
        try:
            memory.prefault(_PREFAULT_THREADS)
            room = os.statvfs(path)
            check_room(journal_path(path), free_bytes=room.f_bavail * room.f_frsize)
            owner.give(path)
        except BaseException:
            memory.close()
            raise
        seconds = round(time.monotonic() - started, 3)
        extra = {
            "path": path,
            "bytes": memory.num_bytes,
            "reattached": memory.is_reattached,
            "prefault_seconds": seconds,
        }
        logger.info("pool ready", extra=extra)
        return memory

    async def _run(self, memory: PoolMemory, transport: Transport, listeners: Listeners) -> str:
        keeper: Keeper | None = None
        endpoint = await transport.listen(lambda key: keeper.find_snapshot(key) if keeper else None)
        directory = self._build_directory(endpoint, transport.kind, lambda: keeper)
        self._store = StoreLink(
            self._open_store if self._maker.is_configured else None,
            directory,
            forget_medium=self._maker.forget_mount if self._maker.has_rings else None,
        )
        keeper = Keeper(
            self._config,
            memory,
            store=self._store,
            directory=directory,
            transport=transport,
            metrics=self._metrics,
        )
        keeper.start()
        preparing = asyncio.create_task(self._prepare_optional_store(listeners))
        try:
            await listeners.open_socket(keeper, transport_kind=transport.kind)
            metrics_port = listeners.open_metrics(self._registry)
            self._announce(memory, listeners, metrics_port, endpoint, transport.kind)
            await self._ended.wait()
            return await self._end(keeper, listeners)
        finally:
            preparing.cancel()
            with suppress(asyncio.CancelledError):
                await preparing
            await keeper.stop()
            await directory.close()

    def _open_store(self, geometry: PoolGeometry) -> SegmentStore:
        store, wrap = self._maker.open(geometry), self._options.wrap_store
        return store if wrap is None else wrap(store, geometry)

    def _build_directory(self, endpoint: str, kind: str, keeper: Callable[[], Keeper | None]) -> Directory:
        holder = Holder(
            holder_id=self._identity.engine_id,
            epoch=self._epoch,
            endpoint=endpoint,
            zone=self._identity.zone,
            transports=(kind,),
        )

        def snapshot_keys() -> list[bytes]:
            found = keeper()
            return found.snapshot_keys() if found is not None else []

        def on_resync() -> None:
            if self._store is not None:
                self._store.announce_all()

        return build_directory(self._config, holder, snapshot_keys=snapshot_keys, on_resync=on_resync)

    async def _prepare_optional_store(self, listeners: Listeners) -> None:
        """kvd counts as started when the store answers, or when it has had its time."""
        if not self._config.required:
            try:
                await self._prepare_store()
            except ConfigError as error:
                logger.warning("serving without the store; tried again", extra={"detail": error.message})
        await listeners.set_started()

    async def _prepare_store(self) -> None:
        """Mounts 3FS if asked to, and waits for the store's medium. Raises ConfigError when the time is over."""
        config = self._config
        deadline = time.monotonic() + config.startup_timeout_seconds
        if config.fuse_config:
            self._fuse = FuseMount(Path(config.fuse_config), on_remount=self._remounted)
            self._maker.mount = self._fuse.mount
            await self._fuse.start(seconds=config.startup_timeout_seconds)
        if not self._maker.is_configured:
            return
        while not self._ended.is_set():
            try:
                check = asyncio.get_running_loop().run_in_executor(self._checker, self._maker.check)
                await asyncio.wait_for(check, _STORE_CHECK_SECONDS)
                return
            except (ConfigError, TimeoutError) as error:
                if time.monotonic() >= deadline:
                    text = str(error) or f"store.path {config.store.path} does not answer"
                    raise ConfigError(f"{text}; tried for {config.startup_timeout_seconds:g} s") from error
            await asyncio.sleep(_STORE_RETRY_SECONDS)

    def _remounted(self) -> None:
        if self._store is not None:
            self._store.reopen()
        else:
            self._maker.forget_mount()

    def _announce(self, memory: PoolMemory, listeners: Listeners, metrics_port: int, endpoint: str, kind: str) -> None:
        facts = {
            "event": "ready",
            "pid": os.getpid(),
            "epoch": self._epoch,
            "socket": self._config.socket,
            "pool_path": memory.path,
            "pool_bytes": memory.num_bytes,
            "probe_port": listeners.probe_port,
            "metrics_port": metrics_port,
            "transport": kind,
            "endpoint": endpoint,
        }
        self._options.announce(json.dumps(facts))
        logger.info("kvd ready", extra=facts)

    async def _end(self, keeper: Keeper, listeners: Listeners) -> str:
        started = time.monotonic()
        is_written = await keeper.drain(self._options.drain_seconds)
        seconds = round(time.monotonic() - started, 3)
        logger.info("draining ended", extra={"write_back_done": is_written, "seconds": seconds})
        await listeners.close()
        return "" if is_written else f"committed blocks were left unwritten after {self._options.drain_seconds:g} s"
