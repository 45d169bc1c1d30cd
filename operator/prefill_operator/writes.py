"""Writes to the API server on behalf of pools: each asks the Lease first, and each answer goes into the cache at once.

Used by apply.py only. The fence costs nothing, so it is asked before every single write: a process that was stopped for a while
must not finish what it began (k8s.md 4.11).
"""

from prefill_operator.cache import Cache, object_id
from prefill_operator.cluster import Cluster
from prefill_operator.errors import ObjectMissing
from prefill_operator.lease import LeaderLease
from prefill_operator.resources import Json, Resource


class FencedWrites:
    """All raise LeaseLost without having written when this process no longer leads."""

    def __init__(self, cluster: Cluster, cache: Cache, lease: LeaderLease) -> None:
        self._cluster = cluster
        self._cache = cache
        self._lease = lease

    async def create(self, resource: Resource, body: Json) -> Json:
        self._lease.check()
        return self._keep(resource, await self._cluster.create(resource, body))

    async def apply(self, resource: Resource, body: Json, *, subresource: str = "") -> Json:
        self._lease.check()
        return self._keep(resource, await self._cluster.apply(resource, body, subresource=subresource))

    async def merge(self, resource: Resource, patch: Json, *, namespace: str, name: str, uid: str) -> Json:
        self._lease.check()
        return self._keep(resource, await self._cluster.merge(resource, patch, namespace=namespace, name=name, uid=uid))

    async def set_condition(self, resource: Resource, condition: Json, *, namespace: str, name: str, uid: str) -> Json:
        self._lease.check()
        answer = await self._cluster.set_condition(resource, condition, namespace=namespace, name=name, uid=uid)
        return self._keep(resource, answer)

    async def delete(
        self, resource: Resource, *, namespace: str, name: str, uid: str, grace_seconds: int | None = None
    ) -> None:
        """An object that is gone already is no error."""
        self._lease.check()
        try:
            answer = await self._cluster.delete(
                resource, namespace=namespace, name=name, uid=uid, grace_seconds=grace_seconds
            )
        except ObjectMissing:
            answer = {}
        if answer.get("kind") == resource.kind and answer["metadata"].get("deletionTimestamp"):
            self._cache.put(resource, answer)
        else:
            self._cache.remove(resource, (namespace, name), uid=uid)

    async def post_event(self, resource: Resource, body: Json) -> None:
        """As create, for objects that are not cached."""
        self._lease.check()
        await self._cluster.create(resource, body)

    def _keep(self, resource: Resource, answer: Json) -> Json:
        assert object_id(answer)
        self._cache.put(resource, answer)
        return answer
