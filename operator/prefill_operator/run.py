"""`prefill-operator run`: from start to exit code.

A standby waits for the Lease and holds nothing else. A leader fills its cache by its own LISTs, so that the first pass of every
pool sees all of its pods; then the watches take over. The trap: kopf, when it ends, cancels every task that began after it; so it
is started last, and at the end nobody may write any more and the Lease is released before kopf takes its time to stop.
"""

import asyncio
import logging
import os
import signal
from collections.abc import Coroutine, Iterable
from contextlib import suppress
from typing import Any

from prefill_operator.cluster import KubernetesCluster
from prefill_operator.engine_client import GrpcEngineClient
from prefill_operator.errors import LeaseLost
from prefill_operator.handlers import run_kopf
from prefill_operator.health import Health, HealthServer
from prefill_operator.json_log import setup_logging
from prefill_operator.leader import Leader, build_leader, find_resources, wait_for_other_kinds
from prefill_operator.lease import LeaderLease, boot_seconds
from prefill_operator.operator_metrics import OperatorMetrics
from prefill_operator.settings import OperatorSettings

logger = logging.getLogger(__name__)

EXIT_STOPPED = 0
EXIT_FAILED = 1
EXIT_LEASE_LOST = 3

_Task = asyncio.Task[Any]


def run_operator(settings: OperatorSettings) -> int:
    """Runs until SIGTERM or SIGINT. Returns the exit code: 0 stopped, 1 failed, 3 the Lease was lost.

    Raises:
        ConfigError: no way to reach an API server.
    """
    setup_logging(level=settings.log_level, constants={"identity": settings.identity})
    logger.info("starting", extra={"pid": os.getpid(), "namespaces": settings.namespaces or "all"})
    code = asyncio.run(_serve(settings))
    logger.info("ended", extra={"exit": code})
    return code


async def _serve(settings: OperatorSettings) -> int:
    metrics = OperatorMetrics()
    cluster = await KubernetesCluster.connect(settings.kubeconfig, on_request=metrics.count_request)
    lease = LeaderLease(cluster, namespace=settings.namespace, identity=settings.identity, times=settings.lease)
    health = Health(lease, metrics, clock=boot_seconds)
    server = HealthServer(health, metrics.registry, host=settings.host, port=max(0, settings.port))
    beat = asyncio.create_task(health.beat(), name="beat")
    try:
        if settings.port >= 0:
            await server.start()
            logger.info("serving metrics and health", extra={"port": server.port})
        return await _Process(settings, cluster, lease, metrics=metrics, health=health).run()
    finally:
        beat.cancel()
        await server.stop()
        await cluster.close()


class _Process:
    """A standby, then perhaps a leader."""

    def __init__(
        self,
        settings: OperatorSettings,
        cluster: KubernetesCluster,
        lease: LeaderLease,
        *,
        metrics: OperatorMetrics,
        health: Health,
    ) -> None:
        self._settings = settings
        self._cluster = cluster
        self._lease = lease
        self._metrics = metrics
        self._health = health
        self._stop = asyncio.Event()

    async def run(self) -> int:
        self._catch_signals()
        stop = asyncio.create_task(self._stop.wait(), name="stop")
        acquiring = asyncio.create_task(self._lease.acquire(), name="acquire")
        await asyncio.wait([stop, acquiring], return_when=asyncio.FIRST_COMPLETED)
        if self._stop.is_set():
            await _end([acquiring])
            await self._lease.release()
            return EXIT_STOPPED
        self._metrics.set_leader(True)
        self._health.set_leading()
        try:
            return await self._lead(stop)
        finally:
            self._metrics.set_leader(False)

    async def _lead(self, stop: _Task) -> int:
        keeping = asyncio.create_task(self._lease.keep(), name="lease")
        preparing = asyncio.create_task(self._prepare(), name="prepare")
        await asyncio.wait([stop, keeping, preparing], return_when=asyncio.FIRST_COMPLETED)
        if stop.done() or keeping.done() or preparing.exception() is not None:
            return await self._leave([preparing, keeping])
        leader = preparing.result()
        self._health.set_filled(leader.resync)
        workers = [self._start(leader.reconciler.work(), f"worker {i}") for i in range(self._settings.workers)]
        feeders = [self._start(leader.resync.keep(), "resync"), self._start(leader.engines.keep(), "engines")]
        writers = [*workers, *feeders, keeping]
        watching = self._start(self._watch(leader), "watches")
        noticing = self._start(self._notice_kinds(leader), "kinds")
        await asyncio.wait([stop, watching, noticing, *writers], return_when=asyncio.FIRST_COMPLETED)
        code = await self._leave(writers)
        await leader.drains.close()
        is_noticed = noticing.done() and noticing.exception() is None
        return max(code, await _end([watching] if is_noticed else [watching, noticing]))

    async def _prepare(self) -> Leader:
        resources = await find_resources(self._cluster, self._settings)
        leader = build_leader(
            self._cluster,
            self._lease,
            GrpcEngineClient(),
            resources=resources,
            settings=self._settings,
            metrics=self._metrics,
        )
        await leader.fill()
        return leader

    async def _watch(self, leader: Leader) -> None:
        await run_kopf(
            leader.sink,
            leader.resources,
            self._cluster,
            namespaces=self._settings.namespaces,
            identity=self._settings.identity,
            on_start=self._catch_signals,
        )

    async def _notice_kinds(self, leader: Leader) -> None:
        """Ends when other watches are needed, and with it this process: the next leader finds them at its start."""
        kinds = await wait_for_other_kinds(self._cluster, self._settings, leader.resources)
        logger.info("the cluster serves other kinds; leaving the lead to start anew", extra={"kinds": kinds})

    async def _leave(self, writers: Iterable[_Task]) -> int:
        """Ends what may write, then lets others lead."""
        code = await _end(writers)
        await self._lease.release()
        return code

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> _Task:
        return asyncio.create_task(work, name=name)

    def _catch_signals(self) -> None:
        """Again after kopf has started, which puts its own handlers there."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)


async def _end(tasks: Iterable[_Task]) -> int:
    """Cancels what still runs and waits for it. Returns the exit code that the tasks ask for."""
    tasks = list(tasks)
    code = _code_of([task for task in tasks if task.done()])
    for task in tasks:
        task.cancel()
    for task in tasks:
        with suppress(asyncio.CancelledError, Exception):
            await task
    return code


def _code_of(ended: Iterable[_Task]) -> int:
    """Of tasks that should never have ended."""
    code = EXIT_STOPPED
    for task in ended:
        error = None if task.cancelled() else task.exception()
        if isinstance(error, LeaseLost):
            logger.error("lease lost", extra={"task": task.get_name(), "error": error.message})
            code = max(code, EXIT_LEASE_LOST)
        elif error is not None:
            logger.error("task failed", extra={"task": task.get_name()}, exc_info=error)
            code = max(code, EXIT_FAILED)
        else:
            logger.error("task ended", extra={"task": task.get_name()})
            code = max(code, EXIT_FAILED)
    return code
