"""Health of this process, and the HTTP server that tells of it: /healthz, /readyz, /metrics (k8s.md 4.14).

Alive: the event loop runs, and no watch is dead. Ready: the API server answers us about the Lease, and a leader has filled its
cache; a standby is ready too, or a rolling update of the operator would wait for ever.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest

from prefill_operator.lease import LeaderLease
from prefill_operator.operator_metrics import OperatorMetrics

MAX_LAG_SECONDS = 10.0
MAX_SILENCE_SECONDS = 30.0
_BEAT_SECONDS = 0.5


class Watches(Protocol):
    """What resync.Resync knows of the watches."""

    @property
    def dead_watches(self) -> tuple[str, ...]: ...


class Health:
    """clock: the same monotonic seconds as the Lease's."""

    def __init__(self, lease: LeaderLease, metrics: OperatorMetrics, *, clock: Callable[[], float]) -> None:
        self._lease = lease
        self._metrics = metrics
        self._clock = clock
        self._beat_at = clock()
        self._watches: Watches | None = None
        self._is_leading = False
        self._is_filled = False

    def set_leading(self) -> None:
        """The Lease is ours; the cache is being filled."""
        self._is_leading = True

    def set_filled(self, watches: Watches) -> None:
        """The first LISTs are in, and watches go on from there."""
        self._watches = watches
        self._is_filled = True

    async def beat(self) -> None:
        """Measures the lag of the event loop, for ever."""
        while True:
            before = self._clock()
            await asyncio.sleep(_BEAT_SECONDS)
            self._beat_at = self._clock()
            self._metrics.set_loop_lag(max(0.0, self._beat_at - before - _BEAT_SECONDS))

    def sickness(self) -> str:
        """Why this process should be restarted; "" if it should not."""
        lag = self._clock() - self._beat_at - _BEAT_SECONDS
        if lag >= MAX_LAG_SECONDS:
            return f"the event loop lags by {lag:.1f} s, limit {MAX_LAG_SECONDS:g} s"
        dead = self._watches.dead_watches if self._watches else ()
        return f"watches are dead: {', '.join(dead)}" if dead else ""

    def unreadiness(self) -> str:
        """Why this process is not ready; "" if it is."""
        silence = self._clock() - self._lease.last_contact
        if silence >= MAX_SILENCE_SECONDS:
            return f"no answer of the API server for {silence:.0f} s"
        return "filling the cache" if self._is_leading and not self._is_filled else ""


class HealthServer:
    """Serves on host:port; port 0 = any free one, then `port` says which."""

    def __init__(self, health: Health, registry: CollectorRegistry, *, host: str, port: int) -> None:
        self._health = health
        self._registry = registry
        self._host = host
        self.port = port
        app = web.Application()
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._metrics)
        self._runner = web.AppRunner(app, access_log=None)

    async def start(self) -> None:
        """Raises OSError if the port cannot be had."""
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self.port)
        await site.start()
        self.port = int(self._runner.addresses[0][1])

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def _healthz(self, _request: web.Request) -> web.Response:
        return _verdict(self._health.sickness())

    async def _readyz(self, _request: web.Request) -> web.Response:
        return _verdict(self._health.unreadiness())

    async def _metrics(self, _request: web.Request) -> web.Response:
        text = generate_latest(self._registry)
        return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


def _verdict(complaint: str) -> web.Response:
    return web.Response(status=503 if complaint else 200, text=complaint or "ok")
