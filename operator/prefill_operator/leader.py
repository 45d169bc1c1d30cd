"""What only a leader has: cache, queue, workers, drains, store watch, resync; built in one place, filled before any of it acts.

Used by run.py. Which resources are watched is found out at the start: CustomResourceDefinitions of ours must be served, other
optional ones may be, and nodes may be read or not (C35). When the cluster later serves others, the leader ends and starts anew.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from prefill_operator.apply import Applier
from prefill_operator.cache import Cache
from prefill_operator.cluster import Cluster
from prefill_operator.drain import Drains
from prefill_operator.engine_client import EngineClient
from prefill_operator.engine_watch import EngineWatch
from prefill_operator.errors import ClusterError, RequestRejected
from prefill_operator.event_limiter import EventLimiter
from prefill_operator.event_sink import EventSink
from prefill_operator.lease import LeaderLease
from prefill_operator.model import ChildKind
from prefill_operator.observe import Observer
from prefill_operator.operator_metrics import OperatorMetrics
from prefill_operator.pool_metrics import PoolMetrics
from prefill_operator.reconcile import Reconciler
from prefill_operator.render_policy import RenderPolicy
from prefill_operator.resources import CHILDREN, NODES, PODS, POOLS, REQUIRED_CHILDREN, PoolKey, Resource
from prefill_operator.resync import Resync
from prefill_operator.settings import OperatorSettings, RbacParts
from prefill_operator.work_queue import WorkQueue
from prefill_plan.model_spec import released_model_spec

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Leader:
    """All of it. `fill` comes first; then `reconciler.work`, `resync.keep`, `engines.keep` and whatever feeds `sink` may run."""

    resources: tuple[Resource, ...]
    cache: Cache
    queue: WorkQueue[PoolKey]
    sink: EventSink
    drains: Drains
    engines: EngineWatch
    resync: Resync
    reconciler: Reconciler

    async def fill(self) -> None:
        """Fills the cache, however long the API server takes, and has every pool looked at."""
        while True:
            try:
                await self.resync.fill()
                break
            except ClusterError as error:
                logger.warning("cache not filled yet", extra={"error": error.message})
                await asyncio.sleep(_RETRY_SECONDS)
        keys = self.cache.pool_keys()
        for key in keys:
            self.queue.add(key)
        logger.info("cache filled", extra={"pools": len(keys), "resources": [r.plural for r in self.resources]})


def build_leader(
    cluster: Cluster,
    lease: LeaderLease,
    engines: EngineClient,
    *,
    resources: tuple[Resource, ...],
    settings: OperatorSettings,
    metrics: OperatorMetrics,
    clock: Callable[[], float] = time.time,
    monotonic: Callable[[], float] = time.monotonic,
) -> Leader:
    """Builds every object of a leader; nothing runs yet.

    `resources` are those of find_resources; `clock` tells seconds since the epoch, `monotonic` seconds that never go back.
    """
    cache = Cache(settings.signals, has_nodes=NODES in resources)
    queue = WorkQueue[PoolKey](clock=monotonic)
    drains = Drains(engines, on_change=queue.add, clock=clock)
    watch = EngineWatch(engines, on_change=queue.add, clock=monotonic)
    resync = Resync(
        cluster,
        cache,
        queue.add,
        resources=resources,
        namespaces=settings.namespaces or ("",),
        metrics=metrics,
        seconds=settings.resync_seconds,
    )
    metrics.watch_queue(depth=lambda: queue.depth, oldest_seconds=lambda: queue.oldest_seconds)
    return Leader(
        resources=resources,
        cache=cache,
        queue=queue,
        sink=EventSink(cache, queue.add, metrics=metrics, on_relist=resync.hurry, clock=monotonic),
        drains=drains,
        engines=watch,
        resync=resync,
        reconciler=Reconciler(
            cache,
            queue,
            _build_observer(cache, drains, watch, resources=resources, settings=settings, clock=clock),
            _build_applier(cluster, cache, lease, drains, settings=settings, clock=clock, monotonic=monotonic),
            drains=drains,
            engines=watch,
            metrics=metrics,
            pool_metrics=PoolMetrics(metrics.registry),
            settings=settings,
            clock=clock,
        ),
    )


def _build_observer(
    cache: Cache,
    drains: Drains,
    engines: EngineWatch,
    *,
    resources: tuple[Resource, ...],
    settings: OperatorSettings,
    clock: Callable[[], float],
) -> Observer:
    optional = frozenset(kind for kind in ChildKind if CHILDREN[kind] in resources) - frozenset(REQUIRED_CHILDREN)
    forbidden = frozenset(ChildKind) - frozenset(REQUIRED_CHILDREN) - frozenset(_allowed_kinds(settings.rbac))
    return Observer(
        cache,
        drains,
        engines,
        policy=RenderPolicy.of(settings),
        optional_kinds=optional,
        forbidden_kinds=forbidden,
        model=released_model_spec(),
        clock=clock,
    )


def _build_applier(
    cluster: Cluster,
    cache: Cache,
    lease: LeaderLease,
    drains: Drains,
    *,
    settings: OperatorSettings,
    clock: Callable[[], float],
    monotonic: Callable[[], float],
) -> Applier:
    events = EventLimiter(identity=settings.identity, on_nodes=not settings.namespaces, clock=monotonic)
    return Applier(cluster, cache, lease, drains=drains, events=events, policy=RenderPolicy.of(settings), clock=clock)


async def find_resources(cluster: Cluster, settings: OperatorSettings) -> tuple[Resource, ...]:
    """What to watch in this cluster with these rights. Waits for the CustomResourceDefinitions and for the API server."""
    while True:
        try:
            missing = [pools.plural for pools in POOLS.values() if not await cluster.serves(pools)]
            if not missing:
                return await _list_resources(cluster, settings)
            logger.warning("CustomResourceDefinitions are not installed", extra={"missing": missing})
        except ClusterError as error:
            logger.warning("API server not usable yet", extra={"error": error.message})
        await asyncio.sleep(_RETRY_SECONDS)


async def wait_for_other_kinds(
    cluster: Cluster,
    settings: OperatorSettings,
    resources: tuple[Resource, ...],
    *,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> tuple[str, ...]:
    """Returns when the cluster serves other optional kinds than it did (KEDA was installed, or removed): their plurals.

    It is looked once per resync; two looks in a row must agree, and an API server that does not answer changes nothing. Watches
    begin at the start of a process only, so that whoever waits here leaves the lead to one that starts anew (run.py).
    """
    known = {resource for resource in resources if resource in CHILDREN.values()}
    before: set[Resource] = known
    while True:
        await sleep(settings.resync_seconds)
        try:
            now = set(await _list_children(cluster, settings))
        except ClusterError as error:
            logger.warning("kinds not looked up", extra={"error": error.message})
            continue
        if now != known and now == before:
            return tuple(sorted(resource.plural for resource in now ^ known))
        before = now


async def _list_children(cluster: Cluster, settings: OperatorSettings) -> list[Resource]:
    kinds = [*REQUIRED_CHILDREN, *_allowed_kinds(settings.rbac)]
    return [CHILDREN[kind] for kind in kinds if await cluster.serves(CHILDREN[kind])]


async def _list_resources(cluster: Cluster, settings: OperatorSettings) -> tuple[Resource, ...]:
    children = await _list_children(cluster, settings)
    nodes = [NODES] if settings.rbac.nodes and await _may_read_nodes(cluster) else []
    return (*POOLS.values(), PODS, *nodes, *children)


def _allowed_kinds(parts: RbacParts) -> list[ChildKind]:
    allowed = {
        ChildKind.HPA: parts.autoscaling,
        ChildKind.SCALED_OBJECT: parts.keda,
        ChildKind.POD_MONITOR: parts.prometheus_operator,
        ChildKind.NETWORK_POLICY: parts.network_policies,
    }
    return [kind for kind, is_allowed in allowed.items() if is_allowed]


async def _may_read_nodes(cluster: Cluster) -> bool:
    try:
        async for _ in cluster.pages(NODES, metadata_only=True):
            break
    except RequestRejected as error:
        logger.warning("nodes may not be read; rules about nodes are off", extra={"error": error.message})
        return False
    return True
