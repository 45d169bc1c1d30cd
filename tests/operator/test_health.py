"""prefill_operator.health: what /healthz, /readyz and /metrics say, and when."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest

from prefill_operator.health import Health, HealthServer
from prefill_operator.lease import LeaderLease
from prefill_operator.operator_metrics import OperatorMetrics
from prefill_operator.settings import LeaseTimes
from prefill_testing.fake_api import FakeApi
from prefill_testing.fake_cluster import FakeCluster
from prefill_testing.in_loop import in_loop


class Watches:
    def __init__(self, *dead: str) -> None:
        self.dead_watches = dead


class Bench:
    def __init__(self) -> None:
        self.now = 0.0
        self.metrics = OperatorMetrics()
        api = FakeApi(clock=lambda: 1e9)
        self.lease = LeaderLease(
            FakeCluster(api), namespace="home", identity="a", times=LeaseTimes(), clock=lambda: self.now
        )
        self.health = Health(self.lease, self.metrics, clock=lambda: self.now)


def test_standby_is_alive_and_ready() -> None:
    bench = Bench()

    assert (bench.health.sickness(), bench.health.unreadiness()) == ("", "")


def test_leader_is_ready_once_its_cache_is_filled() -> None:
    bench = Bench()
    bench.health.set_leading()
    assert bench.health.unreadiness() == "filling the cache"

    bench.health.set_filled(Watches())

    assert bench.health.unreadiness() == ""


def test_loop_that_stands_still_is_sick() -> None:
    bench = Bench()
    bench.now = 9.0
    assert bench.health.sickness() == ""

    bench.now = 10.6

    assert "lags by 10.1 s" in bench.health.sickness()


@in_loop
async def test_beat_measures_the_lag() -> None:
    bench = Bench()
    beat = asyncio.create_task(bench.health.beat())
    await asyncio.sleep(0)
    bench.now = 12.0
    while not (lag := bench.metrics.registry.get_sample_value("prefill_operator_event_loop_lag_seconds")):
        await asyncio.sleep(0.01)
    beat.cancel()

    assert lag == pytest.approx(11.5)
    assert bench.health.sickness() == "", "the loop runs again"


def test_dead_watch_is_sick() -> None:
    bench = Bench()
    bench.health.set_filled(Watches("nodes", "pods"))

    assert bench.health.sickness() == "watches are dead: nodes, pods"


@in_loop
async def test_silent_api_server_makes_unready() -> None:
    bench = Bench()
    bench.now = 31.0
    assert "no answer of the API server for 31 s" in bench.health.unreadiness()

    await bench.lease.try_hold()

    assert bench.health.unreadiness() == ""


@asynccontextmanager
async def _served(bench: Bench) -> AsyncIterator[str]:
    server = HealthServer(bench.health, bench.metrics.registry, host="127.0.0.1", port=0)
    await server.start()
    try:
        yield f"http://127.0.0.1:{server.port}"
    finally:
        await server.stop()


@pytest.mark.parametrize(
    ("path", "now", "status", "text"),
    [
        ("healthz", 0.0, 200, "ok"),
        ("healthz", 60.0, 503, "lags by"),
        ("readyz", 0.0, 200, "ok"),
        ("readyz", 60.0, 503, "no answer"),
        ("metrics", 0.0, 200, "prefill_operator_leader 0.0"),
    ],
)
@in_loop
async def test_answers_over_http(path: str, now: float, status: int, text: str) -> None:
    bench = Bench()
    bench.now = now
    async with _served(bench) as url, aiohttp.ClientSession() as session, session.get(f"{url}/{path}") as answer:
        body = await answer.text()

    assert answer.status == status
    assert text in body
