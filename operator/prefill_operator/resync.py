"""Compares the cache with a LIST of the API server, once a minute: the alarm for watches that died in silence (k8s.md 4.1).

Only metadata is listed. An object that differs is looked at again after a grace, since events are always a little behind; what
then still differs was missed: it is fetched, its pool is reconciled, and the mismatch is counted. After three rounds in a row
with something missed the watch is dead, and the health endpoint says so.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Iterable, Mapping

from prefill_operator.cache import Cache, ObjectId, Version
from prefill_operator.cluster import Cluster
from prefill_operator.errors import ClusterError
from prefill_operator.operator_metrics import OperatorMetrics
from prefill_operator.resources import PoolKey, Resource, selector_of

logger = logging.getLogger(__name__)

GRACE_SECONDS = 5.0
DEAD_ROUNDS = 3
_JITTER = 0.2


class Resync:
    """namespaces: those served; ("",) = the whole cluster. sleep: asyncio.sleep, but for tests."""

    def __init__(
        self,
        cluster: Cluster,
        cache: Cache,
        add: Callable[[PoolKey], None],
        *,
        resources: Iterable[Resource],
        namespaces: tuple[str, ...],
        metrics: OperatorMetrics,
        seconds: float,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._cluster = cluster
        self._cache = cache
        self._add = add
        self._resources = tuple(resources)
        self._namespaces = namespaces
        self._metrics = metrics
        self._seconds = seconds
        self._sleep = sleep
        self._soon = asyncio.Event()
        self._bad_rounds: dict[Resource, int] = {}

    @property
    def dead_watches(self) -> tuple[str, ...]:
        """Resources whose watch has missed something in each of the last rounds."""
        return tuple(sorted(r.plural for r, rounds in self._bad_rounds.items() if rounds >= DEAD_ROUNDS))

    def hurry(self) -> None:
        """The next round is due now: a watch was lost for a while."""
        self._soon.set()

    async def fill(self) -> None:
        """Fills the cache from a full LIST of everything, before any watch has begun. Raises ClusterError."""
        for resource in self._resources:
            for namespace in self._namespaces_of(resource):
                pages = self._cluster.pages(resource, namespace=namespace, selector=selector_of(resource))
                async for page in pages:
                    for body in page:
                        self._cache.put(resource, _typed(resource, body))
                    await asyncio.sleep(0)

    async def keep(self) -> None:
        """Rounds for ever. A LIST that fails is left to the next round."""
        while True:
            pause = self._seconds * (1.0 + _JITTER * random.random())
            try:
                async with asyncio.timeout(pause):
                    await self._soon.wait()
            except TimeoutError:
                pass
            self._soon.clear()
            try:
                await self.compare()
            except ClusterError as error:
                logger.warning("resync left out", extra={"error": error.message})

    async def compare(self) -> int:
        """One round over all resources. Returns how many objects had been missed. Raises ClusterError."""
        suspects: dict[Resource, dict[ObjectId, Version | None]] = {}
        for resource in self._resources:
            before = dict(self._cache.versions(resource))
            listed = await self._list_versions(resource)
            suspects[resource] = {
                name: before.get(name)
                for name in listed.keys() | before.keys()
                if listed.get(name) != before.get(name) and self._cache.versions(resource).get(name) == before.get(name)
            }
        if any(suspects.values()):
            await self._sleep(GRACE_SECONDS)
        missed = sum([await self._repair(resource, names) for resource, names in suspects.items()])
        self._metrics.count_resync_round()
        return missed

    async def _repair(self, resource: Resource, suspects: Mapping[ObjectId, Version | None]) -> int:
        """Fetches what still is as it was before the LIST. Returns how many objects had been missed."""
        missed = 0
        for (namespace, name), before in suspects.items():
            if self._cache.versions(resource).get((namespace, name)) != before:
                continue
            body = await self._cluster.find(resource, namespace=namespace, name=name)
            if body is None:
                affected = self._cache.remove(resource, (namespace, name), uid="") if before is not None else set()
                missed += before is not None
            else:
                affected = self._cache.put(resource, body)
                missed += self._cache.versions(resource).get((namespace, name)) != before
            for key in affected:
                self._add(key)
        if missed:
            self._metrics.count_mismatches(resource.plural, missed)
            logger.error("a watch had missed objects", extra={"resource": resource.plural, "count": missed})
        self._bad_rounds[resource] = self._bad_rounds.get(resource, 0) + 1 if missed else 0
        return missed

    async def _list_versions(self, resource: Resource) -> dict[ObjectId, Version]:
        listed: dict[ObjectId, Version] = {}
        selector = selector_of(resource)
        for namespace in self._namespaces_of(resource):
            pages = self._cluster.pages(resource, namespace=namespace, selector=selector, metadata_only=True)
            async for page in pages:
                for body in page:
                    metadata = body["metadata"]
                    name = (metadata.get("namespace", ""), metadata["name"])
                    listed[name] = Version(uid=metadata["uid"], resource_version=metadata["resourceVersion"])
        return listed

    def _namespaces_of(self, resource: Resource) -> tuple[str, ...]:
        return self._namespaces if resource.namespaced else ("",)


def _typed(resource: Resource, body: dict[str, object]) -> dict[str, object]:
    """Items of a LIST come without their kind."""
    return {"apiVersion": resource.api_version, "kind": resource.kind, **body}
